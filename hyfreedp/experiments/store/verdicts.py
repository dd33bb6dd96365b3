"""One rule for all verdicts: what a notebook finds about a claim, in words that mean the same everywhere.

docs/verdicts.md explains it. A claim says of some quantity that it lies between two marks, on every data set alike.

* "reproduced": the whole 95 % interval over our data sets lies between the marks; all rows do, where each is exact.
* "fails here": the whole interval lies outside, or a row does. "Here" is our scale: small data, small models.
* "not shown": neither. The number says how many data sets would decide, if they scattered as these do.
* "mathematically wrong": of a statement that holds always or not at all, there is a counter-example.
* "not refuted": no attack went beyond a bound, which proves no bound.

The marks of "comparable" are the same in all notebooks, and were set before today's records were made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % t interval of the mean of independent values; NaN for fewer than two."""
    if len(values) < 2:
        return math.nan, math.nan
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1) * stats.sem(values)
    return float(np.mean(values) - half), float(np.mean(values) + half)


def by_interval(low: float, high: float, least: float = -math.inf, most: float = math.inf) -> Outcome:
    """Of an interval, NaN where there is none, and what is claimed."""
    if least <= low and high <= most:
        return "reproduced"
    return "fails here" if high < least or low > most else "not shown"


def would_decide(values: Sequence[float], mark: float) -> int | None:
    """How many values would have an interval on one side of the mark; None for a single one, or a mean at the mark."""
    if len(values) < 2 or (distance := abs(float(np.mean(values)) - mark)) == 0:
        return None
    for number in range(2, 10_000):
        if stats.t.ppf(0.5 + CONFIDENCE / 2, number - 1) * np.std(values, ddof=1) / math.sqrt(number) < distance:
            return number
    return None


def by_data_sets(values: pd.Series, least: float = -math.inf, most: float = math.inf) -> Outcome:
    """Of numbers indexed by their data set: of the interval over the data sets' means, which a single one has not."""
    return by_interval(*mean_interval(list(values.groupby(level=0, sort=False).mean())), least, most)


def over_data_sets(values: pd.Series, least: float = -math.inf, most: float = math.inf) -> tuple[Outcome, str]:
    """Of a claim about points of accuracy, on every data set alike; and the numbers in words.

    Places of one data set (its models, budgets and what is trained) are no independent witnesses: they are averaged
    first, and the interval is over data sets. A single data set has none.

    Args:
        values: a number per place, the mean over its seeds, indexed by its data set.
        least, most: the marks; one of them.
    """
    means = values.groupby(level=0, sort=False).mean()
    outcome, (low, high) = by_data_sets(values, least, most), mean_interval(list(means))
    words = ", ".join(f"{name} {mean:+.1f}" for name, mean in means.items()) + " points"
    words += f"; mean {means.mean():+.1f}" if len(means) > 1 else ", one data set"
    # An interval of two has one degree of freedom: wider than what it is about.
    words += f" (95 %: {low:+.1f} to {high:+.1f})" if len(means) > 2 else ""
    needed = would_decide(list(means), least if math.isfinite(least) else most)
    if outcome == "not shown" and needed:
        words += f"; {needed if needed <= 100 else 'more than 100'} data sets would decide"
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
    ours = {"ours": " (our claim)"}
    lines = [
        f"* {_named(one)}{ours.get(one.whose, '')}: **{one.outcome}**. {one.number[0].upper()}{one.number[1:]}."
        for one in found
    ]
    display(Markdown("\n".join(lines)))


def _named(one: Verdict) -> str:
    return f"{one.claim}, {one.case}" if one.case else one.claim


def scoreboard(pages: Sequence[str], whose: Whose) -> str:
    """Committed verdicts as a list in Markdown: each with links to the notebooks (pages) that judge it, and its claim.

    A claim with several cases has the verdict that all of them share, and "not shown" where they differ.
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
        shared = cases.outcome.iloc[0] if cases.outcome.nunique() == 1 else "not shown"
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
