"""A handful of committed runs, drawn anew each time, trained again and compared with their records.

Noise follows from the very bits of what it hides. Where a processor or library rounds one sum otherwise, a run draws
other noise from there on and ends as a run with another seed would, so that a record that is not equal is compared with
the spread over seeds. It is called equal only if every released number of every step is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any, Literal

import pandas as pd

from hyfreedp.experiments.runs.cells import run_cells
from hyfreedp.experiments.runs.spec import Spec

NUMBER = 7
SECONDS = 60.0  # of all of them together, as recorded
DEVIATIONS = 5.0  # of the difference of two seeds, within which a run ends as another seed would
_ALIKE = ("method", "task", "model", "tuning")  # fields of runs that scatter alike
Outcome = Literal["equal", "as another seed", "beyond"]
_OF_THE_MACHINE = ("seconds", "environment")  # entries of a record that no other execution has


@dataclass(frozen=True)
class Again:
    """A run beside its record, with both accuracies: equal in every bit, within the spread of seeds, or beyond it."""

    spec: Spec
    outcome: Outcome
    accuracy: float
    recorded: float

    def __str__(self) -> str:
        return f"{self.spec}: {self.outcome}, {100 * self.accuracy:.1f} % where {100 * self.recorded:.1f} is recorded"


def again(committed: Mapping[str, bytes], folder: Path, *, jobs: int = 1) -> list[Again]:
    """Train some of the runs of :func:`hyfreedp.experiments.store.archive.read` once more, in an empty folder."""
    records = {Path(name).stem: json.loads(text) for name, text in committed.items() if name.endswith(".json")}
    drawn = draw(records)
    made = run_cells([spec for _, spec in drawn], folder, jobs=jobs, description="")
    found, usual = [], spread_over_seeds(records.values())
    for (key, spec), record in zip(drawn, made, strict=True):
        accuracy, recorded = record["accuracy"], records[key]["accuracy"]
        like = [other for other in records.values() if all(other["spec"][n] == getattr(spec, n) for n in _ALIKE)]
        # Few runs may be alike, and those of Prodigy scatter three times as far as others.
        most = DEVIATIONS * math.sqrt(2) * max(usual, spread_over_seeds(like))
        outcome: Outcome = "beyond" if abs(accuracy - recorded) > most else "as another seed"
        same_steps = (folder / f"{key}.csv").read_bytes() == committed[f"{key}.csv"]
        if same_steps and _released(record) == _released(records[key]):
            outcome = "equal"
        found.append(Again(spec, outcome, accuracy, recorded))
    return found


def draw(records: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Spec]]:
    """Key and spec of at most :data:`NUMBER` records, drawn by the system's randomness, of :data:`SECONDS` in all.

    A record whose spec has another key by now belongs to an earlier version, and is not drawn.
    """
    random, left = SystemRandom(), SECONDS
    drawn: list[tuple[str, Spec]] = []
    for key in random.sample(sorted(records), len(records)):
        spec = Spec.from_fields(records[key]["spec"])
        if len(drawn) < NUMBER and records[key]["seconds"] <= left and spec.key == key:
            left -= records[key]["seconds"]
            drawn.append((key, spec))
    return drawn


def spread_over_seeds(records: Iterable[Mapping[str, Any]]) -> float:
    """The standard deviation of accuracies that differ in nothing but their seed, pooled over all such groups."""
    rows = pd.DataFrame([{**record["spec"], "accuracy": record["accuracy"]} for record in records])
    if rows.empty:
        return 0.0
    fields = [name for name in rows.columns if name not in ("seed", "accuracy")]
    groups = rows.groupby(fields, dropna=False, sort=False).accuracy
    return math.sqrt((groups.var() * (groups.count() - 1)).sum() / max((groups.count() - 1).sum(), 1))


def _released(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in _OF_THE_MACHINE}
