"""A handful of committed runs, drawn anew each time, trained again and compared with their records.

Noise follows from the very bits of what it hides. Where a processor or library rounds one sum otherwise, a run draws
other noise from there on and ends as a run with another seed would, so that a record that is not equal is compared with
the spread over seeds. It is called equal only if every released number of every step is.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any, Literal

import pandas as pd
from scipy import stats

from hyfreedp.experiments.runs.cells import run_cells
from hyfreedp.experiments.runs.spec import Spec

NUMBER = 7
SECONDS = 60.0  # of all of them together, as recorded
CONFIDENCE = 0.999  # of the spread over seeds: one false alarm in a hundred and fifty batches of seven
FREEDOM = 5  # fewer pairs of seeds do not tell their spread
_OF_THE_MACHINE = ("seconds", "environment")  # entries of a record that no other execution has
_KIND = ("task", "model", "tuning", "method")


@dataclass(frozen=True)
class Again:
    """A run beside its record.

    Attributes:
        outcome: "equal" in every bit of record and steps; "as another seed", within the spread; "beyond" it; or
            "unknown" where too few committed runs of any kind differ by their seed alone.
        accuracy, recorded: of this execution and of the record, shares.
        spread: the largest difference that two seeds would have with probability :data:`CONFIDENCE`, of the narrowest
            kind that has enough of them; NaN if unknown.
    """

    spec: Spec
    outcome: Literal["equal", "as another seed", "beyond", "unknown"]
    accuracy: float
    recorded: float
    spread: float

    def __str__(self) -> str:
        spec = self.spec
        name = f"{spec.task}, {spec.method}, epsilon {spec.epsilon:g}, rate {spec.learning_rate:g}, seed {spec.seed}"
        if self.outcome == "equal":
            return f"{name}: equal, {100 * self.accuracy:.1f} %"
        spread = "" if math.isnan(self.spread) else f", spread of seeds ±{100 * self.spread:.1f}"
        return (
            f"{name}: {self.outcome}, {100 * self.accuracy:.1f} % where {100 * self.recorded:.1f} is recorded{spread}"
        )


def again(committed: Mapping[str, bytes], folder: Path, *, jobs: int = 1) -> list[Again]:
    """Train some of the committed runs once more.

    Args:
        committed: files of :func:`hyfreedp.experiments.store.archive.read`.
        folder: an empty one, for the new records.
        jobs: worker processes.

    Returns:
        The runs, in the order in which they were drawn; none if nothing is committed.
    """
    records = {Path(name).stem: json.loads(text) for name, text in committed.items() if name.endswith(".json")}
    drawn = draw(records)
    made = run_cells([spec for _, spec in drawn], folder, jobs=jobs, description="")
    spreads = spreads_over_seeds(records.values())
    found = []
    for (key, spec), record in zip(drawn, made, strict=True):
        same = _released(record) == _released(records[key])
        same = same and (folder / f"{key}.csv").read_bytes() == committed[f"{key}.csv"]
        found.append(judged(spec, record["accuracy"], records[key]["accuracy"], same, spreads))
    return found


def judged(spec: Spec, accuracy: float, recorded: float, same: bool, spreads: Mapping[tuple[Any, ...], float]) -> Again:
    """A run beside its record.

    Args:
        same: whether every number that is known of the record is the same.
        spreads: of :func:`spreads_over_seeds`.
    """
    kinds = _beginnings(tuple(getattr(spec, name) for name in _KIND))
    spread = next((spreads[kind] for kind in kinds if kind in spreads), math.nan)
    outcome: Literal["equal", "as another seed", "beyond", "unknown"] = "equal"
    if not same:
        far = abs(accuracy - recorded) > spread
        outcome = "unknown" if math.isnan(spread) else "beyond" if far else "as another seed"
    return Again(spec, outcome, accuracy, recorded, spread)


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


def spreads_over_seeds(records: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], float]:
    """How far apart two runs that differ in nothing but their seed may be, by the beginnings of a kind.

    The standard deviation is pooled over the groups of such runs, and taken times sqrt(2) and the quantile of Student's
    t of :data:`CONFIDENCE`. What has less than :data:`FREEDOM` degrees of freedom is left out.

    Returns:
        Spreads of (task, model, tuning, method), and pooled over methods, tunings, models and tasks: of the shorter
        beginnings of these four, down to the empty one.
    """
    rows = pd.DataFrame([{**record["spec"], "accuracy": record["accuracy"]} for record in records])
    if rows.empty:
        return {}
    fields = [name for name in rows.columns if name not in ("seed", "accuracy")]
    groups = rows.groupby(fields, dropna=False, sort=False).accuracy.agg(["var", "count"]).reset_index()
    squares: Counter[tuple[Any, ...]] = Counter()
    freedom: Counter[tuple[Any, ...]] = Counter()
    for group in groups[groups["count"] > 1].to_dict("records"):
        kind = tuple(None if pd.isna(group[name]) else group[name] for name in _KIND)
        for beginning in _beginnings(kind):
            squares[beginning] += group["var"] * (group["count"] - 1)
            freedom[beginning] += group["count"] - 1
    return {
        kind: float(stats.t.ppf(0.5 + CONFIDENCE / 2, known) * math.sqrt(2 * squares[kind] / known))
        for kind, known in freedom.items()
        if known >= FREEDOM
    }


def _beginnings(kind: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Of a kind, the longest first: what is known of few seeds is taken from its likes."""
    return [kind[:length] for length in range(len(kind), -1, -1)]


def summary(found: Sequence[Again], committed: int) -> str:
    """One line, as "7 of 812 records made again: 6 equal, 1 as another seed"."""
    counts = pd.Series([one.outcome for one in found]).value_counts(sort=False)
    outcomes = "equal" if set(counts.index) == {"equal"} else ", ".join(f"{n} {name}" for name, n in counts.items())
    return f"{len(found)} of {committed:,} records made again: {outcomes}"


def _released(record: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in record.items() if name not in _OF_THE_MACHINE}
    return json.loads(json.dumps(kept))
