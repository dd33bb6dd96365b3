"""What a notebook finds about the paper's claims, in one word and with the number that decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd
from IPython.display import Markdown, display

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.running.checks import check_choice

Outcome = Literal["reproduced", "not at this scale", "contradicted"]


@dataclass(frozen=True)
class Verdict:
    """Of one claim.

    Attributes:
        claim: of the paper, or of this package where it says so.
        outcome: "not at this scale" if it fails, or too few places tell, on smaller data or models than it is about.
        number: a phrase with the number that decides.
    """

    claim: str
    outcome: Outcome
    number: str

    def __post_init__(self) -> None:
        check_choice("outcome", self.outcome, get_args(Outcome))


def verdict(name: str, found: Sequence[Verdict], *, parameters: Mapping[str, Any], inputs: Sequence[str]) -> None:
    """Show the verdicts at a notebook's end, and write them to ``<name>_verdict.csv`` with their ``.json``."""
    plots.save_table(
        pd.DataFrame(found, columns=["claim", "outcome", "number"]),
        f"{name}_verdict",
        parameters=dict(parameters),
        inputs=inputs,
        shows="Verdicts on the claims of this notebook, each with the number that decides.",
        claim="",
        summary=[f"{one.claim}: {one.outcome} ({one.number})" for one in found] or ["too little data for a verdict"],
    )
    lines = [f"* {one.claim}: **{one.outcome}**. {one.number[0].upper()}{one.number[1:]}." for one in found]
    display(Markdown("\n".join(lines)))


def scoreboard(stems: Sequence[str]) -> str:
    """All committed verdicts as a table in Markdown; each notebook is linked in the first of its lines."""
    lines = ["| | Claim | Verdict | The number that decides |", "| --- | --- | --- | --- |"]
    for stem in stems:
        path = workspace().figures / f"{stem}_verdict.csv"
        rows = pd.read_csv(path).itertuples() if path.exists() else ()
        for place, row in enumerate(rows):
            link = "" if place else f"[{stem[:2]}](notebooks/{stem}.ipynb)"
            lines.append(f"| {link} | {row.claim} | **{row.outcome}** | {row.number} |")
    return "\n".join(lines)
