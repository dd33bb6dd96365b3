"""Cells: a frozen spec gives one JSON record and one per-step CSV. Finished cells are not trained again.

Many cells can be trained in worker processes, where one that fails does not stop the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock
from joblib import Parallel, delayed
from tqdm import tqdm

from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import rate_factor, train
from hyfreedp.experiments.store.files import write_csv, write_text
from hyfreedp.experiments.store.provenance import columns_of, environment, one_thread


def run_cells(specs: Iterable[Spec], folder: Path, *, jobs: int = 1, description: str = "runs") -> list[dict[str, Any]]:
    """Train the cells that have no record yet, and return all records, in order; raises the first error of a cell.

    A ``description`` is shown with a progress bar; if it is empty, there is none.
    """
    specs = list(specs)
    records = {}
    for spec, record in try_cells(specs, folder, jobs=jobs, description=description):
        if isinstance(record, Exception):
            raise record
        records[spec] = record
    return [records[spec] for spec in specs]


def try_cells(
    specs: Sequence[Spec], folder: Path, *, jobs: int, description: str
) -> Iterator[tuple[Spec, dict[str, Any] | Exception]]:
    """As :func:`run_cells`, but yields each cell when it ends, with its record or its error."""
    missing = [spec for spec in specs if not (folder / f"{spec.key}.json").exists()]
    without_data: dict[Any, Exception] = {}
    for data, spec in {(spec.task, spec.source): spec for spec in missing}.items():
        try:
            _ = spec.problem.source  # reading it downloads and decodes the data here, once, not in every worker
        except (OSError, ValueError) as error:
            without_data[data] = error
    failed = [spec for spec in missing if (spec.task, spec.source) in without_data]
    yield from ((spec, without_data[spec.task, spec.source]) for spec in failed)
    ready = [spec for spec in specs if spec not in failed]
    runs = Parallel(jobs if missing else 1, return_as="generator_unordered")
    ended = runs(delayed(_tried)(spec, folder) for spec in ready)
    yield from tqdm(ended, total=len(ready), desc=description, unit="run", disable=not description)


def _tried(spec: Spec, folder: Path) -> tuple[Spec, dict[str, Any] | Exception]:
    try:
        return spec, run_cell(spec, folder)
    except Exception as error:
        return spec, error


def reader(folder: Path) -> Callable[[Spec], dict[str, Any] | None]:
    """A function from a spec to the record of its finished cell, or None. Records never change, so it keeps them."""
    known: dict[Spec, dict[str, Any]] = {}

    def read(spec: Spec) -> dict[str, Any] | None:
        if spec not in known and (path := folder / f"{spec.key}.json").exists():
            known[spec] = json.loads(path.read_text(encoding="utf-8"))
        return known.get(spec)

    return read


def run_cell(spec: Spec, folder: Path) -> dict[str, Any]:
    """The record of one cell: read if it exists; else it is trained, from its checkpoint if there is one.

    If several processes want the same cell, one trains it and the others wait.

    Args:
        folder: of ``<key>.json``, the record, and ``<key>.csv``, one row per step; made if it does not exist.

    Raises:
        OSError: the folder cannot be made or written to (noticed before the training), or the disk is full.
    """
    key = spec.key
    record, checkpoint, lock = folder / f"{key}.json", folder / f"{key}.ckpt", folder / f".{key}.lock"
    if not record.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):  # the system releases it if this process is killed
            if not record.exists():
                _make_cell(spec, folder, checkpoint)
    for left in (checkpoint, lock):  # whoever waits for the lock finds the record
        with suppress(OSError):
            left.unlink()
    return json.loads(record.read_text(encoding="utf-8"))


def _make_cell(spec: Spec, folder: Path, checkpoint: Path) -> None:
    for left in folder.glob(f".{spec.key}-*"):  # temporary files of a process that was killed
        left.unlink()
    started = time.perf_counter()
    with one_thread():
        optimizer, rows = train(spec, checkpoint)
        scores = {"accuracy": rows[-1]["test_accuracy"], "loss": rows[-1]["test_loss"]}
        if spec.evaluation == "validation":  # a random search releases this model, so its test accuracy is needed, too
            _, test = spec.problem.datasets("test", spec.model)
            scores["test_accuracy"] = spec.problem.evaluate(optimizer.module, test, spec.model).accuracy
        texts = spec.problem.outputs(optimizer.module, spec.model) if spec.evaluation == "test" else None
    write_csv(folder / f"{spec.key}.csv", pd.DataFrame(rows))
    record = {
        "spec": asdict(spec),
        **scores,
        **({} if texts is None else {"outputs": texts}),
        "epsilon_spent": optimizer.epsilon_spent(),
        "guarantee": optimizer.guarantee,
        "noise_split": optimizer.split.to_dict(),
        "final_eta": optimizer.eta * rate_factor(optimizer),
        "seconds": time.perf_counter() - started,
        "data": spec.problem.source,
        "weights": spec.weights,
        "date": str(date.today()),
        "environment": environment(),
    }
    write_text(folder / f"{spec.key}.json", json.dumps(record, indent=1))


def read_steps(spec: Spec, folder: Path) -> pd.DataFrame:
    """The per-step rows of a finished cell."""
    return pd.read_csv(folder / f"{spec.key}.csv")


def tabulate(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """One row per record: the spec's fields, accuracy, epsilon, final rate, seconds, date and versions."""
    names = ("accuracy", "epsilon_spent", "guarantee", "final_eta", "seconds")
    return pd.DataFrame([one["spec"] | {name: one[name] for name in names} | columns_of(one) for one in records])


def with_seeds(spec: Spec, seeds: int) -> list[Spec]:
    """The spec with seeds 0, ..., seeds - 1."""
    return [replace(spec, seed=seed) for seed in range(seeds)]
