"""The grid of runs behind the accuracy tables: what is done, what is missing, and running that."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from hyfreedp.experiments.runs.cells import reader, try_cells
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import replacing, write_text
from hyfreedp.experiments.tables.plan import ROWS, SCALES, TABLE, Reader, entries, finals, searches, table
from hyfreedp.experiments.tasks.registry import TASKS

Learner = tuple[str, str | None, str | None]  # task, model, tuning


@dataclass(frozen=True)
class Plan:
    """The runs of a profile, as far as they are known, and the records of those that are done.

    Attributes:
        stages: "searches", scored on validation data, then "finals", tested.
        unknown: per learner, the numbers of the tables whose final run is not known as its search is not done.
            Different searches may choose the same run, so this is the most there can be.
        records: of the runs that are done.
    """

    stages: dict[str, list[Spec]]
    unknown: Counter[Learner]
    records: dict[Spec, dict[str, Any]]

    def missing(self, stage: str) -> list[Spec]:
        """The runs of a stage that have no record."""
        return [spec for spec in self.stages[stage] if spec not in self.records]


def plan(profile: str, read: Reader) -> Plan:
    """What the tables of a profile, a name in ``SCALES``, need."""
    scale = SCALES[profile]
    first = searches(scale)
    known = set(first)
    stages = {"searches": first, "finals": [spec for spec in finals(scale, read) if spec not in known]}
    unknown: Counter[Learner] = Counter(
        (entry.learner.task, entry.learner.model, entry.learner.tuning)
        for entry in entries(scale)
        if ROWS[entry.row].search == "grid" and entry.final(read) is None  # a random search releases one of its runs
    )
    found = ((spec, read(spec)) for specs in stages.values() for spec in specs)
    return Plan(stages, unknown, {spec: record for spec, record in found if record is not None})


def run(profile: str, cells: Path, results: Path, *, jobs: int = 1) -> int:
    """Run what is missing, stage by stage, and write ``<results>/<profile>/image_classification.csv``; the exit status.

    Args:
        profile: a name in ``SCALES``.
        cells: folder of the records.
        results: folder of the tables.
        jobs: worker processes; 1 runs in this process.
    """
    read = reader(cells)
    failed: dict[Spec, Exception] = {}
    trained = 0
    try:
        for stage in ("searches", "finals"):
            missing = plan(profile, read).missing(stage)
            failed |= _without_data(missing)
            ready = [spec for spec in missing if spec not in failed]
            if not ready:
                continue
            with closing(try_cells(ready, cells, jobs=jobs, description=f"{profile}, {stage}")) as ended:
                for spec, result in ended:
                    if isinstance(result, Exception):
                        failed[spec] = result
                    else:
                        trained += 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", flush=True)
        return 130
    for spec, error in failed.items():
        print(f"failed: {spec.key} ({_words(spec)}): {type(error).__name__}: {error}")
    done = plan(profile, read).records
    print(f"{trained} runs trained, {len(done) - trained} were there, {len(failed)} failed")
    print(write_table(profile, cells, results))
    return 1 if failed else 0


def write_table(profile: str, cells: Path, results: Path) -> str:
    """Write the table, unless a fuller one is there already, and say so.

    Columns: those of :func:`hyfreedp.experiments.tables.plan.table`, and the versions and hardware that each number was
    made with.
    """
    rows = table(SCALES[profile], reader(cells))
    versions = {key: _environment(cells, key) for key in rows.key.dropna().unique()}
    rows = rows.join(pd.DataFrame([versions.get(key, {}) for key in rows.key], index=rows.index).add_prefix("version_"))
    path = results / profile / TABLE
    missing = int(rows.accuracy.isna().sum())
    if missing == len(rows):
        return f"no table: all {missing} numbers are missing"
    if path.exists() and pd.read_csv(path).accuracy.count() > len(rows) - missing:
        return f"{path} is left as it was, for it has more numbers: {missing} of {len(rows)} are missing here"
    with replacing(path) as temporary:
        rows.to_csv(temporary, index=False)
    return f"{path}: {len(rows)} numbers" + (f", {missing} of them still missing" if missing else "")


def listing(profile: str, cells: Path, *, jobs: int = 1) -> str:
    """Every run that is known, a line each, and what is left."""
    known = plan(profile, reader(cells))
    rows = [
        {
            "stage": stage,
            "task": spec.task,
            "model": spec.model,
            "tuning": spec.tuning,
            "method": spec.method,
            "epsilon": f"{spec.epsilon:g}",
            "rate": f"{spec.learning_rate:g}",
            "seed": spec.seed,
            "key": spec.key,
            "state": "done" if spec in known.records else "missing",
        }
        for stage, specs in known.stages.items()
        for spec in specs
    ]
    return f"{pd.DataFrame(rows).to_string(index=False)}\n\n{_left(known, jobs)}"


def status(profile: str, cells: Path, *, jobs: int = 1) -> str:
    """How many runs are done, per learner and stage, and what is left."""
    known = plan(profile, reader(cells))
    counts = {
        stage: (Counter(map(_learner, specs)), Counter(_learner(spec) for spec in specs if spec in known.records))
        for stage, specs in known.stages.items()
    }
    learners = dict.fromkeys(_learner(spec) for specs in known.stages.values() for spec in specs)
    rows = [
        dict(zip(("task", "model", "tuning"), learner, strict=True))
        | {stage: f"{done[learner]}/{total[learner]}" for stage, (total, done) in counts.items()}
        | {"finals not known yet": known.unknown[learner]}
        for learner in learners
    ]
    return f"{pd.DataFrame(rows).to_string(index=False)}\n\n{_left(known, jobs)}"


def write_specs(profile: str, cells: Path, folder: Path) -> None:
    """For workflow managers: ``<key>.json`` per known run, and the keys of each stage in ``searches`` and ``finals``.

    Spec files that are there stay untouched, as they are named by their content. As long as the searches are not done
    there is no ``finals``: a manager that was killed would take a part of it for the whole.
    """
    known = plan(profile, reader(cells))
    for stage, specs in known.stages.items():
        for spec in specs:
            if not (folder / f"{spec.key}.json").exists():
                write_text(folder / f"{spec.key}.json", spec.to_json())
        if stage == "finals" and known.unknown:
            (folder / stage).unlink(missing_ok=True)
        else:
            write_text(folder / stage, "".join(f"{spec.key}\n" for spec in specs))


def seconds_left(known: Plan) -> tuple[float, int]:
    """Time for the missing runs, one after the other, and the number of those that no estimate exists for.

    A run is expected to take the mean of the finished ones of its learner.
    """
    times: dict[Learner, list[float]] = {}
    for spec, record in known.records.items():
        times.setdefault(_learner(spec), []).append(record["seconds"])
    missing = known.unknown + Counter(_learner(spec) for stage in known.stages for spec in known.missing(stage))
    seconds = sum(count * fmean(times[learner]) for learner, count in missing.items() if learner in times)
    return seconds, sum(count for learner, count in missing.items() if learner not in times)


def _left(known: Plan, jobs: int) -> str:
    missing = sum(len(known.missing(stage)) for stage in known.stages)
    unknown = known.unknown.total()
    total = len(known.records) + missing
    if not missing and not unknown:
        return f"all {total} runs are done"
    seconds, without = seconds_left(known)
    at_most = f", and at most {unknown} not known yet, whose searches are not done" if unknown else ""
    workers = "" if jobs == 1 else f" with {jobs} workers"
    if without == missing + unknown:
        time = "time left: unknown, as no run of these learners is done"
    else:
        time = f"time left: about {_duration(seconds / jobs)}{workers}"
        if without:
            time += f", and unknown for {without} runs of learners of which none is done"
    return f"{len(known.records)} of {total} known runs done{at_most}\n{time}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _without_data(specs: Sequence[Spec]) -> dict[Spec, Exception]:
    """The runs whose data cannot be had, which is found out once per task."""
    errors: dict[str, Exception] = {}
    for task in dict.fromkeys(spec.task for spec in specs):
        try:
            _ = TASKS[task].source
        except (OSError, ValueError) as error:
            errors[task] = error
    return {spec: errors[spec.task] for spec in specs if spec.task in errors}


def _learner(spec: Spec) -> Learner:
    return spec.task, spec.model, spec.tuning


def _words(spec: Spec) -> str:
    names = [*map(str, _learner(spec)), spec.method, spec.evaluation]
    return f"{', '.join(names)}, epsilon {spec.epsilon:g}, rate {spec.learning_rate:g}, seed {spec.seed}"


def _environment(cells: Path, key: str) -> dict[str, str]:
    return json.loads((cells / f"{key}.json").read_text(encoding="utf-8"))["environment"]
