"""One rule for all verdicts on claims, which docs/verdicts.md explains.

A claim says that some quantity lies between two marks, on every data set.

* "reproduced": the whole 95 % interval of the mean over at least three data sets is between the marks; for exact
  numbers and times, every row is.
* "fails here": the whole interval is outside, or one row is. "Here" is our scale: small data, small models.
* "not shown": neither. The number then says how many data sets would decide, with the same standard deviation.
* "mathematically wrong": there is a counter-example to a theorem.
* "not refuted": no attack exceeded the bound, which does not prove the bound.

The marks of "comparable" are the same in all notebooks, and were set before today's records were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
import pandas as pd
from IPython.display import Markdown, display
from scipy import stats

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.paths import workspace

Outcome = Literal["reproduced", "not shown", "fails here", "mathematically wrong", "not refuted"]
Whose = Literal["the paper's", "ours"]

COMPARABLE, POOR = -1.0, 5.0  # points of accuracy: the smallest difference to the other; the smallest gap behind it
COMPARABLE_SCORE, POOR_SCORE = 0.95, 0.5  # for texts, as a share of the other's score: the smallest; the largest
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim, or on one case of it.

    Attributes:
        claim: a sentence, with its place in the paper.
        outcome: from one of the functions below.
        number: a phrase with the number that decides.
        whose: claim it is. Ours are judged by the same marks, and listed separately.
        case: which one, if a claim is tried in several ways. docs/verdicts.md lists all cases under their claim.
    """

    claim: str
    outcome: Outcome
    number: str
    whose: Whose = "the paper's"
    case: str = ""


def span(values: Sequence[float], form: str = ".0f") -> str:
    """The smallest and the largest of some numbers, as "12 to 16", or "12" if both are formatted alike."""
    low, high = (f"{value:{form}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % t interval of the mean of independent values; NaN for fewer than three."""
    if len(values) < 3:  # the deviation of two values is one difference, which may be small by chance
        return math.nan, math.nan
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1) * stats.sem(values)
    return float(np.mean(values) - half), float(np.mean(values) + half)


def by_interval(low: float, high: float, least: float = -math.inf, most: float = math.inf) -> Outcome:
    """The outcome for the interval [low, high] if [least, most] is claimed; "not shown" if both are NaN."""
    if least <= low and high <= most:
        return "reproduced"
    return "fails here" if high < least or low > most else "not shown"


def would_decide(values: Sequence[float], mark: float) -> int | None:
    """How many values (at least 3) of this mean and deviation would have an interval on one side of the mark.

    None for a single value, whose deviation is unknown, and for a mean at the mark.
    """
    distance = abs(float(np.mean(values)) - mark) if len(values) > 1 else 0.0
    if distance == 0:
        return None
    for number in range(3, 10_000):
        if stats.t.ppf(0.5 + CONFIDENCE / 2, number - 1) * np.std(values, ddof=1) / math.sqrt(number) < distance:
            return number
    return None


def by_data_sets(values: pd.Series, least: float = -math.inf, most: float = math.inf) -> Outcome:
    """The outcome for numbers indexed by data set: by the interval of the data sets' means ("not shown" for < 3)."""
    return by_interval(*mean_interval(list(values.groupby(level=0, sort=False).mean())), least, most)


def means_in_words(values: pd.Series) -> str:
    """As text, the mean for each data set (the index of ``values``), and the mean over data sets."""
    means = values.groupby(level=0, sort=False).mean()
    words = ", ".join(f"{name} {mean:+.1f}" for name, mean in means.items()) + " points"
    return words + (f"; mean {means.mean():+.1f}" if len(means) > 1 else ", one data set")


def over_data_sets(values: pd.Series, least: float, left_out: Any = (), why: str = "") -> tuple[Outcome, str]:
    """The outcome for a claim about points of accuracy on every data set, and the numbers as text.

    Places of one data set (models, budgets, trained parameters) are not independent, so they are averaged first, and
    the interval is over data sets.

    Args:
        values: one number per place, the mean over its seeds, indexed by data set.
        least: the mark.
        left_out, why: places that do not count, as ``values``, and the reason; the text tells them.
    """
    means = list(values.groupby(level=0, sort=False).mean())
    outcome, words = by_data_sets(values, least), means_in_words(values)
    if len(means) > 2:
        low, high = mean_interval(means)
        words += f" ({low:+.1f} to {high:+.1f})"
    needed = would_decide(means, least)
    if outcome == "not shown" and needed:
        words += f"; {needed if needed <= 100 else 'more than 100'} would decide"
    if len(left_out):
        words += f"; left out, {why}: {means_in_words(left_out)}"
    return outcome, words


def by_row(rows: Sequence[bool]) -> Outcome:
    """The outcome for a claim about every row, if rows are exact or measured so precisely that one decides."""
    return "reproduced" if all(rows) else "fails here"


def by_proof(holds: bool) -> Outcome:
    """The outcome for a theorem, which one counter-example refutes."""
    return "reproduced" if holds else "mathematically wrong"


def by_attack(refuted: int) -> Outcome:
    """The outcome for a bound on all attacks, of which ``refuted`` exceeded it."""
    return "mathematically wrong" if refuted else "not refuted"


def verdict(name: str, found: Sequence[Verdict], *, parameters: Mapping[str, Any], inputs: Sequence[str]) -> None:
    """Display the verdicts of a notebook, and write them to ``<name>_verdict.csv`` and ``.json``."""
    plots.save_table(
        pd.DataFrame(found, columns=[field.name for field in fields(Verdict)]),
        f"{name}_verdict",
        parameters=dict(parameters),
        inputs=inputs,
        shows="Verdicts on the claims of this notebook, each with the number that decides.",
        summary=[f"{_named(one)}: {one.outcome} ({one.number})" for one in found] or ["too little data for a verdict"],
    )
    lines, ours = [], {"ours": " (our claim)"}
    for claim in dict.fromkeys(one.claim for one in found):
        cases = [one for one in found if one.claim == claim]
        shared = _shared(one.outcome for one in cases)
        numbers = [f"{one.number[0].upper()}{one.number[1:]}." for one in cases]
        lines.append(f"* {_named(cases[0]) if len(cases) == 1 else claim}{ours.get(cases[0].whose, '')}: **{shared}**.")
        if len(cases) == 1:
            lines[-1] += f" {numbers[0]}"
        else:
            lines += [f"  * {one.case}: {one.outcome}. {told}" for one, told in zip(cases, numbers, strict=True)]
    display(Markdown("\n".join(lines)))


def _named(one: Verdict) -> str:
    return f"{one.claim}, {one.case}" if one.case else one.claim


def _shared(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome for a claim with several cases: theirs if all are equal, else "not shown"."""
    different = set(outcomes)
    return different.pop() if len(different) == 1 else "not shown"


def scoreboard(pages: Sequence[str], whose: Whose) -> str:
    """The committed verdicts on the paper's or on our claims, as a Markdown list with links to notebooks (``pages``).

    Cases of one claim, from all notebooks, are listed under it.
    """
    tables = []
    for page in pages:
        path = workspace().figures / f"{PurePath(page).stem}_verdict.csv"
        if path.exists():
            tables.append(pd.read_csv(path, keep_default_na=False).assign(page=page))
    rows = pd.concat(tables).fillna({"case": ""}) if tables else pd.DataFrame(columns=["whose", "claim"])
    lines = []
    for claim, cases in rows[rows.whose == whose].groupby("claim", sort=False):
        links = ", ".join(f"[{PurePath(page).stem[:2]}]({page})" for page in dict.fromkeys(cases.page))
        shared = _shared(cases.outcome)
        first = f"* **{shared}** {links} {claim}"
        if len(cases) == 1 and not cases.case.iloc[0]:
            lines.append(f"{first}: {cases.number.iloc[0]}")
            continue
        lines.append(first)
        for one in cases.itertuples():
            case = f"{one.case}: " if one.case else ""
            own = "" if one.outcome == shared else f"**{one.outcome}**, "
            lines.append(f"  * {case}{own}{one.number}")
    return "\n".join(lines)
