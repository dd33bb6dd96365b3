"""One rule for all verdicts: what a notebook finds about a claim, in words that mean the same everywhere.

docs/verdicts.md explains it. A claim says of some quantity that it lies between two marks, at every place alike.

* "reproduced": the whole 95 % interval over our places lies between the marks; all rows do, where each is exact.
* "fails here": the whole interval lies outside, or a row does. "Here" is our scale: small data, small models.
* "not shown": neither. The number says how many places would decide, if they scattered as these do.
* "mathematically wrong": of a statement that holds always or not at all, there is a counter-example.
* "not refuted": no attack went beyond a bound, which proves no bound.

The marks of "comparable" are the same in all notebooks, and were set before today's records were made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

COMPARABLE = -1.0  # points of accuracy to what it is compared with, at least
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
    """

    claim: str
    outcome: Outcome
    number: str
    whose: Whose = "the paper's"


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % t interval of the mean over places; NaN for fewer than two."""
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
    """How many places would have an interval on one side of the mark; None for a single one, or a mean at the mark."""
    if len(values) < 2 or (distance := abs(float(np.mean(values)) - mark)) == 0:
        return None
    for places in range(2, 10_000):
        if stats.t.ppf(0.5 + CONFIDENCE / 2, places - 1) * np.std(values, ddof=1) / math.sqrt(places) < distance:
            return places
    return None


def over_places(values: Sequence[float], mark: float) -> tuple[Outcome, str]:
    """Of a claim that the mean over all places is at least the mark; and the interval in words.

    Args:
        values: a number per place, the mean over its seeds.
        mark: in the same unit.
    """
    low, high = mean_interval(values)
    outcome = by_interval(low, high, least=mark)
    words = f"mean of {len(values)} place{'s' * (len(values) != 1)}"
    # An interval of two places has one degree of freedom: wider than what it is about.
    words += f", 95 % interval {low:+.1f} to {high:+.1f}" if len(values) > 2 else ""
    if outcome == "not shown" and (needed := would_decide(values, mark)):
        words += f"; {needed} places would decide"
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
        pd.DataFrame(found, columns=["claim", "outcome", "number", "whose"]),
        f"{name}_verdict",
        parameters=dict(parameters),
        inputs=inputs,
        shows="Verdicts on the claims of this notebook, each with the number that decides.",
        claim="",
        summary=[f"{one.claim}: {one.outcome} ({one.number})" for one in found] or ["too little data for a verdict"],
    )
    ours = {"ours": " (our claim)"}
    lines = [
        f"* {one.claim}{ours.get(one.whose, '')}: **{one.outcome}**. {one.number[0].upper()}{one.number[1:]}."
        for one in found
    ]
    display(Markdown("\n".join(lines)))


def scoreboard(pages: Sequence[str], whose: Whose) -> str:
    """Committed verdicts as a table in Markdown; each of these pages, of notebooks, is linked in its first line."""
    lines = ["| | Claim | Verdict | The number that decides |", "| --- | --- | --- | --- |"]
    for page in pages:
        stem = PurePath(page).stem
        path = workspace().figures / f"{stem}_verdict.csv"
        rows = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["whose"])
        for place, row in enumerate(rows[rows.whose == whose].itertuples()):
            link = "" if place else f"[{stem[:2]}]({page})"
            lines.append(f"| {link} | {row.claim} | **{row.outcome}** | {row.number} |")
    return "\n".join(lines)
