"""The grid of runs behind the accuracy tables: what is done, what is missing, and running that."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from hyfreedp.experiments.runs.cells import reader, run_cells, try_cells
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import write_csv, write_text
from hyfreedp.experiments.store.provenance import columns_of
from hyfreedp.experiments.tables import plan
from hyfreedp.experiments.tables.plan import Entry, Reader, entries, finals, searches

RECORDED_STEPS = 50  # of a run whose learning rate is recorded


def train_missing(wanted: Iterable[Entry], cells: Path, *, jobs: int) -> None:
    """Train what these numbers lack: first the searches."""
    wanted = list(wanted)
    run_cells(searches(wanted), cells, jobs=jobs, description="searches")
    run_cells(finals(wanted, reader(cells)), cells, jobs=jobs, description="tested runs")


def stages(profile: str, read: Reader) -> dict[str, list[Spec]]:
    """The runs of a profile, a name in ``SCALES``: "searches", scored on validation data, then "finals", tested.

    A final run whose search is not done is not known yet, and not among them.
    """
    scale = plan.SCALES[profile]
    first = searches(entries(scale))
    known = set(first)
    return {"searches": first, "finals": [spec for spec in finals(entries(scale), read) if spec not in known]}


def _unknown(profile: str, read: Reader) -> int:
    """Numbers of the tables whose final run is not known yet. Different searches may choose the same run."""
    return sum(
        plan.ROWS[entry.row].search == "grid" and entry.final(read) is None  # a random search releases one of its runs
        for entry in entries(plan.SCALES[profile])
    )


def run(profile: str, cells: Path, results: Path, *, jobs: int = 1) -> int:
    """Run what is missing, stage by stage, and write ``<results>/<profile>/`` with the table; the exit status."""
    read = reader(cells)
    failed: dict[Spec, Exception] = {}
    trained = 0
    for stage in ("finals", "searches", "finals"):  # first those that need no search
        missing = [spec for spec in stages(profile, read)[stage] if spec not in failed and read(spec) is None]
        for spec, result in try_cells(missing, cells, jobs=jobs, description=f"{profile}, {stage}" if missing else ""):
            if isinstance(result, Exception):
                failed[spec] = result
            else:
                trained += 1
    for spec, error in failed.items():
        print(f"failed: {spec.key} ({spec}): {type(error).__name__}: {error}")
    done = sum(read(spec) is not None for specs in stages(profile, read).values() for spec in specs)
    print(f"{trained} runs trained, {done - trained} were there, {len(failed)} failed")
    print(write_table(profile, cells, results))
    return 1 if failed else 0


def write_table(profile: str, cells: Path, results: Path) -> str:
    """Write the table, and say how many numbers are missing: one without a run at hand stays as it was.

    Columns: those of :func:`hyfreedp.experiments.tables.plan.table`, and the versions and hardware that each number was
    made with.
    """
    path, rates = (results / profile / name for name in (plan.TABLE, plan.RATES))
    rows = plan.table(plan.SCALES[profile], reader(cells))
    records = {key: json.loads((cells / f"{key}.json").read_text("utf-8")) for key in rows.key.dropna().unique()}
    if not records:
        return f"no table: all {len(rows)} numbers are missing"
    made = {key: columns_of(record) for key, record in records.items()}
    rows = rows.join(pd.DataFrame([made.get(key, {}) for key in rows.key], index=rows.index))
    if path.exists():
        rows = plan.filled(rows, pd.read_csv(path))
    write_csv(path, rows)
    _write_rates(rates, list(rows[rows.row.isin(plan.LEARNED)].key.dropna()), made, cells)
    missing = int(rows.accuracy.isna().sum())
    return f"{path}: {len(rows)} numbers" + (f", {missing} of them still missing" if missing else "")


def _write_rates(path: Path, learned: list[str], made: dict[str, dict[str, str]], cells: Path) -> None:
    """``key``, ``step`` and ``eta`` of runs at some fifty of their steps, the first and last, with versions.

    Args:
        learned: keys of the runs; one that is not at hand stays as it was.
        made: date and versions of the runs at hand.
    """
    known, names = pd.read_csv(path) if path.exists() else None, ["date", "version_hyfreedp"]
    found = [] if known is None else [known[known.key.isin(learned) & ~known.key.isin(made)]]
    for key in learned:
        if key in made:
            steps = pd.read_csv(cells / f"{key}.csv", usecols=["step", "eta"])
            some = np.unique(np.linspace(0, len(steps) - 1, RECORDED_STEPS).round().astype(int))
            named = steps.iloc[some].assign(key=key, **{name: made[key][name] for name in names})
            found.append(named[["key", "step", "eta", *names]])
    if found:
        write_csv(path, pd.concat(found, ignore_index=True))


def listing(profile: str, cells: Path) -> str:
    """Every run that is known, a line each, done or missing, and their numbers."""
    read = reader(cells)
    known = [(stage, spec) for stage, specs in stages(profile, read).items() for spec in specs]
    missing = {spec for _, spec in known if read(spec) is None}
    lines = [f"{stage:8} {'missing' if spec in missing else 'done':7} {spec.key} {spec}" for stage, spec in known]
    unknown = _unknown(profile, read)
    more = f", and at most {unknown} not known yet, whose searches are not done" if unknown else ""
    return "\n".join([*lines, "", f"{len(known) - len(missing)} of {len(known)} known runs done{more}"])


def write_specs(profile: str, cells: Path, folder: Path) -> None:
    """For workflow managers: ``<key>.json`` per known run, and the keys of each stage in ``searches`` and ``finals``.

    Spec files that are there stay untouched, as they are named by their content. As long as the searches are not done
    there is no ``finals``: a manager that was killed would take a part of it for the whole.
    """
    read = reader(cells)
    for stage, specs in stages(profile, read).items():
        for spec in specs:
            if not (folder / f"{spec.key}.json").exists():
                write_text(folder / f"{spec.key}.json", spec.to_json())
        if stage == "finals" and _unknown(profile, read):
            (folder / stage).unlink(missing_ok=True)
        else:
            write_text(folder / stage, "".join(f"{spec.key}\n" for spec in specs))
