"""Training dynamics on real images (notebook 05): the paper's method at several K beside a rate tuned by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from hyfreedp.experiments.runs.cells import read_steps, reader, run_cells
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.experiments.store.provenance import with_versions
from hyfreedp.experiments.studies.dynamics import INTERVALS
from hyfreedp.experiments.tables.plan import SCALES, Reader, Scale, entries, searches

# The first learner of profile desktop, CIFAR-10 with all parameters trained, at its larger budget.
SCALE = replace(
    SCALES["desktop"],
    learners=SCALES["desktop"].learners[:1],
    epsilons=(8.0,),
    rows=("hyfreedp_paper", "hyfreedp_robust", "grid_extended"),
)
TABLE = "desktop/fine_tuning.csv"  # of the committed record
NAMES = {"hyfreedp_robust": "HyFreeDP, robust", "grid_extended": "tuned by hand"}
VALUES = ("loss_threshold", "eta", "private_loss", "test_loss", "test_accuracy")
EVERY = 5  # steps, of which one is recorded, beside those with an evaluation


def recorded() -> pd.DataFrame:
    """The committed table, empty if there is none."""
    path = workspace().results / TABLE
    return pd.read_csv(path) if path.exists() else pd.DataFrame()


def runs(scale: Scale, read: Reader) -> dict[str, list[Spec]]:
    """The runs of each series, one per seed; those tuned by hand only if their search is done."""
    found: dict[str, list[Spec]] = {}
    for entry in entries(scale):
        if (final := entry.final(read)) is None:
            continue
        if entry.row == "hyfreedp_paper":
            for interval in INTERVALS:
                found.setdefault(f"HyFreeDP, paper, K = {interval}", []).append(replace(final, interval=interval))
        else:
            found.setdefault(NAMES[entry.row], []).append(final)
    return found


def record(cells: Path, table: Path, *, scale: Scale = SCALE, jobs: int = 1) -> pd.DataFrame:
    """Train what is missing and write the table: a line per run and recorded step.

    Returns:
        ``series``, ``seed``, ``epsilon``, ``step``; ``VALUES`` as of a run's steps, NaN where a step has none; versions
        and hardware.
    """
    run_cells(searches(entries(scale)), cells, jobs=jobs, description="searches")
    chosen = runs(scale, reader(cells))
    run_cells([spec for specs in chosen.values() for spec in specs], cells, jobs=jobs, description="dynamics")
    frames = []
    for series, specs in chosen.items():
        for spec in specs:
            steps = read_steps(spec, cells)
            some = steps[(steps.step % EVERY == 0) | steps.test_loss.notna()]
            named = {"series": series, "seed": spec.seed, "epsilon": spec.epsilon}
            frames.append(some.reindex(columns=["step", *VALUES]).assign(**named))
    rows = with_versions(pd.concat(frames, ignore_index=True))
    write_csv(table, rows)
    return rows
