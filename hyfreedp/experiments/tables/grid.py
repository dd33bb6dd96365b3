"""The grid of runs behind the accuracy tables: which are done, which are missing, and training those."""

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

RECORDED_STEPS = 50  # per run whose learning rate is recorded


def train_missing(wanted: Iterable[Entry], cells: Path, *, jobs: int) -> None:
    """Train the runs that these numbers still need: first the searches, then the tested runs."""
    wanted = list(wanted)
    run_cells(searches(wanted), cells, jobs=jobs, description="searches")
    run_cells(finals(wanted, reader(cells)), cells, jobs=jobs, description="tested runs")


def stages(profile: str, read: Reader) -> dict[str, list[Spec]]:
    """The runs of a profile in ``SCALES``: "searches", scored on validation data, and "finals", scored on test data.

    A final run is not known, and missing here, until its search is done.
    """
    scale = plan.SCALES[profile]
    first = searches(entries(scale))
    known = set(first)
    return {"searches": first, "finals": [spec for spec in finals(entries(scale), read) if spec not in known]}


def _unknown(profile: str, read: Reader) -> int:
    """How many numbers have a final run that is not known yet; several may later share one."""
    return sum(
        plan.ROWS[entry.row].search == "grid" and entry.final(read) is None  # a random search releases one of its runs
        for entry in entries(plan.SCALES[profile])
    )


def run(profile: str, cells: Path, results: Path, *, jobs: int = 1) -> int:
    """Train what is missing, by stages, and write the table into ``<results>/<profile>/``; returns the exit status."""
    read = reader(cells)
    failed: dict[Spec, Exception] = {}
    trained = 0
    for stage in ("finals", "searches", "finals"):  # at first the finals that need no search
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
    """Write the table, and return a line on how many numbers are missing. Numbers whose run is not in ``cells`` stay.

    Columns: those of :func:`hyfreedp.experiments.tables.plan.table`, and date, versions and hardware of each run.
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
    """Write ``key``, ``step`` and ``eta`` of runs at some fifty steps (first and last, too), with date and version.

    Args:
        learned: keys of the runs; rows of runs that are not in ``made`` stay as they are.
        made: date and versions by key, for the runs in ``cells``.
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
    """As text, one line for each known run, "done" or "missing", and how many are done."""
    read = reader(cells)
    known = [(stage, spec) for stage, specs in stages(profile, read).items() for spec in specs]
    missing = {spec for _, spec in known if read(spec) is None}
    lines = [f"{stage:8} {'missing' if spec in missing else 'done':7} {spec.key} {spec}" for stage, spec in known]
    unknown = _unknown(profile, read)
    more = f", and at most {unknown} not known yet, whose searches are not done" if unknown else ""
    return "\n".join([*lines, "", f"{len(known) - len(missing)} of {len(known)} known runs done{more}"])


def write_specs(profile: str, cells: Path, folder: Path) -> None:
    """For workflow managers: write ``<key>.json`` for each known run, and files ``searches`` and ``finals`` of keys.

    Existing specs stay untouched, as they are named by their content. ``finals`` is written only when all searches are
    done, so that no manager takes an incomplete list for the whole.
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
