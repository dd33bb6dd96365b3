"""Trains a few committed runs again, drawn at random each time, and compares them with their records.

The noise depends on every bit of what it hides. If a processor or library rounds one sum differently, all noise from
there on is different, and the run ends like one with another seed. So a run that is not equal to its record is compared
with the spread over seeds. "equal" means that every released number of every step is.
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
DEVIATIONS = 5.0  # a larger difference, in standard deviations of that of two seeds, is "beyond"
_ALIKE = ("method", "task", "model", "tuning")  # runs that agree in these fields are assumed to vary alike over seeds
Outcome = Literal["equal", "as another seed", "beyond"]
_OF_THE_MACHINE = ("seconds", "environment", "date")  # entries of a record that differ between executions


@dataclass(frozen=True)
class Again:
    """A repeated run: whether it equals its record, is within the spread of seeds, or beyond; and both accuracies."""

    spec: Spec
    outcome: Outcome
    accuracy: float
    recorded: float

    def __str__(self) -> str:
        return f"{self.spec}: {self.outcome}, {100 * self.accuracy:.1f} % where {100 * self.recorded:.1f} is recorded"


def again(committed: Mapping[str, bytes], folder: Path, *, jobs: int = 1) -> list[Again]:
    """Train some runs of :func:`hyfreedp.experiments.store.archive.read` again, in ``folder``, which must be empty."""
    records = {Path(name).stem: json.loads(text) for name, text in committed.items() if name.endswith(".json")}
    drawn = draw(records)
    made = run_cells([spec for _, spec in drawn], folder, jobs=jobs, description="")
    found, usual = [], spread_over_seeds(records.values())
    for (key, spec), record in zip(drawn, made, strict=True):
        accuracy, recorded = record["accuracy"], records[key]["accuracy"]
        like = [other for other in records.values() if all(other["spec"][n] == getattr(spec, n) for n in _ALIKE)]
        # The larger of two estimates: there may be few similar runs, and Prodigy's vary three times as much as others.
        most = DEVIATIONS * math.sqrt(2) * max(usual, spread_over_seeds(like))
        outcome: Outcome = "beyond" if abs(accuracy - recorded) > most else "as another seed"
        same_steps = (folder / f"{key}.csv").read_bytes() == committed[f"{key}.csv"]
        if same_steps and _released(record) == _released(records[key]):
            outcome = "equal"
        found.append(Again(spec, outcome, accuracy, recorded))
    return found


def draw(records: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Spec]]:
    """Keys and specs of at most :data:`NUMBER` random records, that took at most :data:`SECONDS` together.

    Records of earlier versions, whose specs have other keys today, are not drawn.
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
    """Standard deviation of accuracy over seeds, pooled over groups of records that differ in nothing else."""
    rows = pd.DataFrame([{**record["spec"], "accuracy": record["accuracy"]} for record in records])
    if rows.empty:
        return 0.0
    fields = [name for name in rows.columns if name not in ("seed", "accuracy")]
    groups = rows.groupby(fields, dropna=False, sort=False).accuracy
    freedom = groups.count() - 1
    return math.sqrt((groups.var() * freedom).sum() / max(freedom.sum(), 1))


def _released(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in _OF_THE_MACHINE}
