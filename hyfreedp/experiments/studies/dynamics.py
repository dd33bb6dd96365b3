"""Training dynamics (notebook 05): the runs, on a small task and, from a record, on real images; and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from hyfreedp.experiments.runs.cells import read_steps, run_cells, tabulate, with_seeds
from hyfreedp.experiments.runs.methods import EXTENDED_GRID
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.provenance import with_versions
from hyfreedp.experiments.store.verdicts import COMPARABLE, Verdict, by_data_sets, over_data_sets
from hyfreedp.experiments.tables import small_tasks
from hyfreedp.experiments.tables.image_classification import CLOSE, highest_rate
from hyfreedp.experiments.tables.plan import NUMBER, SCALES
from hyfreedp.experiments.tables.plan import TABLE as TABLE_OF_06

PROFILE_TASKS = {"smoke": ("digits",), "laptop": ("digits",), "gpu": ("gtsrb", "cifar10"), "paper": ("svhn", "gtsrb")}
INTERVALS = (1, 5, 10)
STARTS = (1e-4, 1e-2)  # first rates: the paper's, and one near those of a search


def series(base: Spec, tuned: Spec, intervals: Sequence[int]) -> dict[tuple[str, str], Spec]:
    """Runs by start and name: preset paper from each first rate at each K; preset robust; and ``tuned``."""
    found = {}
    for rate in STARTS:
        start = f"{base.task}, from {rate:g}"
        for interval in intervals:
            found[start, f"K = {interval}"] = replace(base, method="paper", learning_rate=rate, interval=interval)
        found[start, "robust"] = replace(base, method="robust")
        found[start, "tuned"] = tuned
    return found


def tuned_by_hand(base: Spec, recorded: pd.DataFrame, folder: Path) -> Spec:
    """The grid's best run, constant or with linear decay, by mean *test* accuracy (in its favour, and not private).

    ``recorded`` has rows of the accuracy study; if none is of this task, the grid is trained here, once per rate.
    """
    if base.task not in set(recorded.task):
        specs = [
            replace(base, method=method, learning_rate=rate)
            for method, rate in product(small_tasks.GRID_METHODS, EXTENDED_GRID)
        ]
        recorded = tabulate(run_cells(specs, folder, description=f"grid on {base.task}"))
    grid = small_tasks.summarise(recorded)
    grid = grid[(grid.task == base.task) & grid.method.isin(small_tasks.GRID_METHODS)]
    distance = np.log(grid.epsilon / base.epsilon).abs()
    grid = grid[distance == distance.min()]
    best = grid.loc[grid["mean"].idxmax()]
    return replace(base, method=str(best.method), learning_rate=float(best.learning_rate))


def steps_of(lines: Mapping[tuple[str, str], Spec], seeds: int, folder: Path) -> pd.DataFrame:
    """The finished runs of :func:`series`: one row per step, with ``start``, ``series`` and ``seed``."""
    tables = [
        read_steps(one, folder).assign(start=start, series=name, seed=one.seed)
        for (start, name), spec in lines.items()
        for one in with_seeds(spec, seeds)
    ]
    return pd.concat(tables, ignore_index=True)


def numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds, indexed by start and series.

    Returns:
        ``accuracy`` in percent; ``largest`` and ``eta``, the largest and the last rate; ``peak``, when R_l is highest,
        in percent of the run; and ``end``, the last R_l in percent of the highest.
    """
    line = ["start", "series"]
    ordered = rows.sort_values("step", kind="stable").groupby([*line, "seed"], sort=False)
    found = pd.DataFrame({"accuracy": 100 * ordered.test_accuracy.last(), "largest": ordered.eta.max()})
    found["eta"] = ordered.eta.last()
    clipped = rows.dropna(subset="loss_threshold").groupby([*line, "seed"], sort=False)
    highest = rows.loc[clipped.loss_threshold.idxmax()].set_index([*line, "seed"])
    found["peak"] = 100 * highest.step / rows.step.max()
    found["end"] = 100 * ordered.loss_threshold.last() / highest.loss_threshold
    return found.groupby(line, sort=False).mean()


def judged(*parts: pd.DataFrame) -> list[Verdict]:
    """Verdicts on Fig. "train curve" by rows of :func:`steps_of`, one table per study (digits, real images).

    Runs that cannot reach the tuned rate in their number of steps, see ``highest_rate``, are left out.
    """
    lines = []
    for part in parts:
        for start, table in numbers(part).groupby(level="start", sort=False):
            data, _, first = str(start).partition(", from ")
            found, rate = table.droplevel("start"), float(first or STARTS[0])
            for k in INTERVALS:
                if f"K = {k}" in found.index and highest_rate(part.step.max() + 1, rate, k) >= found.largest["tuned"]:
                    at = found.loc[f"K = {k}"]
                    gap, early = at.accuracy - found.accuracy["tuned"], at.peak <= 25 and at.end <= 90
                    lines.append((data, start, rate, k, gap, early))
    rows = pd.DataFrame(lines, columns=["data", "start", "rate", "K", "gap", "early"])
    if rows.empty:
        return []
    lines_of = rows.set_index(["data", "start", "K"]).gap
    best = lines_of[list(rows.rate == STARTS[0])].groupby(["data", "start"], sort=False).max()
    every = lines_of.unstack(sort=False).reindex(columns=INTERVALS).dropna()
    claims = [
        (CLOSE, best, COMPARABLE, 'Fig. "train curve", from 0.0001 at its best K'),
        ('Fig. "train curve": K = 1 converges best', every[1] - every[[5, 10]].max(axis=1), 0.0, ""),
        ('Fig. "train curve": K = 5 is as good as K = 1', every[5] - every[1], COMPARABLE, ""),
    ]
    decided = [
        Verdict(name, *over_data_sets(points, mark), case=case) for name, points, mark, case in claims if len(points)
    ]
    number = f"{rows.early.sum()} of {len(rows)} lines peak in the first quarter and end at most at 0.9 of that"
    if not rows.early.all():
        late = rows[~rows.early]
        number += f"; not {', '.join(late.start + ', K = ' + late.K.astype(str))}"
    outcome = by_data_sets(rows.set_index("data").early.astype(float), least=1.0)
    return [*decided, Verdict('Fig. "train curve": thresholds peak early and decrease', outcome, number)]


TABLE = "desktop/fine_tuning.csv"  # of the committed record
VALUES = ("loss_threshold", "eta", "private_loss", "test_loss", "test_accuracy")
EVERY = 5  # one of so many steps is recorded, and all steps with an evaluation


def record(cells: Path, table: Path, *, jobs: int) -> pd.DataFrame:
    """Train what is missing; write and return one row per run and recorded step, with versions and hardware.

    The runs are of the first learner of profile desktop (CIFAR-10, all parameters trained) at epsilon 8. The tuned rate
    is what the extended search of notebook 06 has chosen there.
    """
    learner, rows = SCALES["desktop"].learners[0], pd.read_csv(table.with_name(TABLE_OF_06))
    wanted = learner.task, learner.model, learner.tuning, 8.0, "grid_extended", 0
    tuned = rows.set_index(NUMBER).learning_rate[wanted]
    base = Spec(**asdict(learner), method="paper", epsilon=8.0, learning_rate=STARTS[0])
    lines = {f"HyFreeDP, paper, K = {k}": replace(base, interval=k) for k in INTERVALS}
    lines["preset robust (ours)"] = replace(base, method="robust")
    lines["tuned by hand"] = replace(base, method="constant", learning_rate=tuned)
    chosen = [(name, one) for name, spec in lines.items() for one in with_seeds(spec, 2)]
    run_cells([spec for _, spec in chosen], cells, jobs=jobs, description="dynamics")
    frames = []
    for name, spec in chosen:
        steps = read_steps(spec, cells)
        some = steps[(steps.step % EVERY == 0) | steps.test_loss.notna()].reindex(columns=["step", *VALUES])
        frames.append(some.assign(series=name, seed=spec.seed, epsilon=spec.epsilon))
    made = with_versions(pd.concat(frames, ignore_index=True))
    write_csv(table, made)
    return made
