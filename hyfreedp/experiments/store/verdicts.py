"""One rule for all verdicts: what a notebook finds about a claim, in words that mean the same everywhere.

docs/verdicts.md explains it. A claim says of some quantity that it lies between two marks, on every data set alike.

* "reproduced": the whole 95 % interval over our data sets, three at least, is between the marks; or all rows are,
  where each is exact.
* "fails here": the whole interval lies outside, or a row does. "Here" is our scale: small data, small models.
* "not shown": neither. The number says how many data sets would decide, if they scattered as these do.
* "mathematically wrong": of a statement that holds always or not at all, there is a counter-example.
* "not refuted": no attack went beyond a bound, which proves no bound.

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

COMPARABLE, POOR = -1.0, 5.0  # points of accuracy to what it is compared with, at least; behind it, at least
COMPARABLE_SCORE, POOR_SCORE = 0.95, 0.5  # of the other's score of written texts: at least; at most
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Verdict:
    """Of one claim.

    Attributes:
        claim: in a sentence, with its place in the paper.
        outcome: by one of the functions below.
        number: a phrase with the number that decides.
        whose: claim it is. Ours are judged by the same marks, and shown apart.
        case: of a claim that is tried in several ways. The board gathers the cases of a claim from all notebooks.
    """

    claim: str
    outcome: Outcome
    number: str
    whose: Whose = "the paper's"
    case: str = ""


def span(values: Sequence[float], form: str = ".0f") -> str:
    """The smallest and the largest of some numbers in words, once where they read alike: "12 to 16"."""
    low, high = (f"{value:{form}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % t interval of the mean of independent values; NaN for fewer than three."""
    if len(values) < 3:  # the scatter of two is one difference, small by chance where they happen to be alike
        return math.nan, math.nan
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1) * stats.sem(values)
    return float(np.mean(values) - half), float(np.mean(values) + half)


def by_interval(low: float, high: float, least: float = -math.inf, most: float = math.inf) -> Outcome:
    """Of an interval, NaN where there is none, and what is claimed."""
    if least <= low and high <= most:
        return "reproduced"
    return "fails here" if high < least or low > most else "not shown"


def would_decide(values: Sequence[float], mark: float) -> int | None:
    """How many values, three or more, would have an interval on one side of the mark, if they scattered as these do.

    None for a single one, whose scatter is not known, and for a mean at the mark.
    """
    if len(values) < 2 or (distance := abs(float(np.mean(values)) - mark)) == 0:
        return None
    for number in range(3, 10_000):
        if stats.t.ppf(0.5 + CONFIDENCE / 2, number - 1) * np.std(values, ddof=1) / math.sqrt(number) < distance:
            return number
    return None


def by_data_sets(values: pd.Series, least: float = -math.inf, most: float = math.inf) -> Outcome:
    """Of numbers indexed by their data set: of the interval over the data sets' means, which fewer than three lack."""
    return by_interval(*mean_interval(list(values.groupby(level=0, sort=False).mean())), least, most)


def means_in_words(values: pd.Series) -> str:
    """The mean of each data set, by which the values are indexed, and that over data sets."""
    means = values.groupby(level=0, sort=False).mean()
    words = ", ".join(f"{name} {mean:+.1f}" for name, mean in means.items()) + " points"
    return words + (f"; mean {means.mean():+.1f}" if len(means) > 1 else ", one data set")


def over_data_sets(values: pd.Series, least: float) -> tuple[Outcome, str]:
    """Of a claim about points of accuracy, on every data set alike; and the numbers in words.

    Places of one data set (its models, budgets and what is trained) are no independent witnesses: they are averaged
    first, and the interval is over data sets.

    Args:
        values: a number per place, the mean over its seeds, indexed by its data set.
        least: the mark.
    """
    means = list(values.groupby(level=0, sort=False).mean())
    outcome, words = by_data_sets(values, least), means_in_words(values)
    if len(means) > 2:
        low, high = mean_interval(means)
        words += f" (95 %: {low:+.1f} to {high:+.1f})"
    needed = would_decide(means, least)
    if outcome == "not shown" and needed:
        words += f"; {needed if needed <= 100 else 'more than 100'} such data sets would decide"
    return outcome, words


def by_row(rows: Sequence[bool]) -> Outcome:
    """Of a claim that all rows have, each of them exact or measured so closely that only the scale is in doubt."""
    return "reproduced" if all(rows) else "fails here"


def by_proof(holds: bool) -> Outcome:
    """Of a statement of mathematics, which one counter-example ends."""
    return "reproduced" if holds else "mathematically wrong"


def by_attack(refuted: int) -> Outcome:
    """Of a bound on what any attack can find."""
    return "mathematically wrong" if refuted else "not refuted"


def verdict(name: str, found: Sequence[Verdict], *, parameters: Mapping[str, Any], inputs: Sequence[str]) -> None:
    """Show the verdicts at a notebook's end, and write them to ``<name>_verdict.csv`` with their ``.json``."""
    plots.save_table(
        pd.DataFrame(found, columns=[field.name for field in fields(Verdict)]),
        f"{name}_verdict",
        parameters=dict(parameters),
        inputs=inputs,
        shows="Verdicts on the claims of this notebook, each with the number that decides.",
        claim="",
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
    """Of a claim with several cases: what all of them have, and "not shown" where they differ."""
    different = set(outcomes)
    return different.pop() if len(different) == 1 else "not shown"


def scoreboard(pages: Sequence[str], whose: Whose) -> str:
    """Committed verdicts as a list in Markdown: each with links to the notebooks (pages) that judge it, and its claim.

    The cases of a claim are gathered from all of them.
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
