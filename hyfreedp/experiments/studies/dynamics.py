"""Training dynamics (notebook 05): which runs show them, on a small task and, recorded, on real images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from hyfreedp.experiments.runs.cells import read_steps, reader, run_cells, tabulate, with_seeds
from hyfreedp.experiments.runs.methods import EXTENDED_GRID
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.provenance import with_versions
from hyfreedp.experiments.store.verdicts import COMPARABLE, Verdict, by_data_sets, over_data_sets
from hyfreedp.experiments.tables import small_tasks
from hyfreedp.experiments.tables.image_classification import CLOSE, highest_rate
from hyfreedp.experiments.tables.plan import SCALES, entries, searches

PROFILE_TASKS = {"smoke": ("digits",), "laptop": ("digits",), "gpu": ("gtsrb", "cifar10"), "paper": ("svhn", "gtsrb")}
INTERVALS = (1, 5, 10)
STARTS = (1e-4, 1e-2)  # the paper's first rate, and one that suits


def series(base: Spec, tuned: Spec, intervals: Sequence[int]) -> dict[tuple[str, str], Spec]:
    """By start and name, preset paper from every first rate at every K, preset robust, and what was tuned by hand."""
    found = {}
    for rate in STARTS:
        start = f"{base.task}, from {rate:g}"
        for interval in intervals:
            found[start, f"K = {interval}"] = replace(base, method="paper", learning_rate=rate, interval=interval)
        found[start, "robust"] = replace(base, method="robust")
        found[start, "tuned"] = tuned
    return found


def tuned_by_hand(base: Spec, recorded: pd.DataFrame, folder: Path) -> Spec:
    """The grid's best rate, constant or with linear decay, by mean *test* accuracy: in its favour, and not private.

    ``recorded`` are rows of the accuracy study; a task without rows gets its grid trained, one run per rate.
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
    """One row per step of the finished runs of :func:`series`, with ``start``, ``series`` and ``seed``."""
    tables = [
        read_steps(one, folder).assign(start=start, series=name, seed=one.seed)
        for (start, name), spec in lines.items()
        for one in with_seeds(spec, seeds)
    ]
    return pd.concat(tables, ignore_index=True)


def numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """Per start and series, means over its runs.

    Returns:
        ``accuracy`` in percent; ``largest``, and ``eta``, the last rate; ``peak``, where R_l is highest, in percent of
        the run, and ``end``, what is left of that, in percent.
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
    """The claims of Fig. "train curve", by rows of :func:`steps_of`, on real images too.

    Where arithmetic keeps a run from the tuned rate, see ``highest_rate``, it is left out.
    """
    best, one, five, shapes = [], [], [], {}
    for part in parts:
        for start, table in numbers(part).groupby(level="start", sort=False):
            data, _, first = str(start).partition(", from ")
            lines, rate = table.droplevel("start"), float(first or STARTS[0])
            gaps = {}
            for k in INTERVALS:
                if f"K = {k}" in lines.index and highest_rate(part.step.max() + 1, rate, k) >= lines.eta["tuned"]:
                    gaps[k] = lines.accuracy[f"K = {k}"] - lines.accuracy["tuned"]
            if gaps and rate == STARTS[0]:
                best.append((data, max(gaps.values())))
            if len(gaps) == len(INTERVALS):
                one.append((data, gaps[1] - max(gaps[5], gaps[10])))
                five.append((data, gaps[5] - gaps[1]))
            for k in gaps:
                shape = lines.loc[f"K = {k}"]
                shapes[data, f"{start}, K = {k}"] = (shape.peak <= 25) and (shape.end <= 90)
    claims = [
        (CLOSE, best, COMPARABLE, 'Fig. "train curve", from 0.0001 at its best K'),
        ('Fig. "train curve": K = 1 converges best', one, 0.0, ""),
        ('Fig. "train curve": K = 5 is as good as K = 1', five, COMPARABLE, ""),
    ]
    decided = []
    for claim, found, mark, case in claims:
        if found:
            points = pd.DataFrame(found).set_index(0)[1]
            decided.append(Verdict(claim, *over_data_sets(points, mark), case=case))
    if shapes:
        early = pd.Series(shapes)
        number = f"{early.sum()} of {len(early)} lines peak in the first quarter and end at most at 0.9 of that"
        if not early.all():
            number += f"; not {', '.join(early.index.get_level_values(1)[~early])}"
        outcome = by_data_sets(early.droplevel(1).astype(float), least=1.0)
        decided.append(Verdict('Fig. "train curve": thresholds peak early and decrease', outcome, number))
    return decided


# The first learner of profile desktop, CIFAR-10 with all parameters trained, at its larger budget.
SCALE = replace(
    SCALES["desktop"],
    learners=SCALES["desktop"].learners[:1],
    epsilons=(8.0,),
    rows=("hyfreedp_paper", "hyfreedp_robust", "grid_extended"),
)
TABLE = "desktop/fine_tuning.csv"  # of the committed record
NAMES = {"hyfreedp_robust": "preset robust (ours)", "grid_extended": "tuned by hand"}
VALUES = ("loss_threshold", "eta", "private_loss", "test_loss", "test_accuracy")
EVERY = 5  # steps, of which one is recorded, beside those with an evaluation


def record(cells: Path, table: Path, *, jobs: int) -> pd.DataFrame:
    """Train what is missing and write the table: a line per run and recorded step, with versions and hardware."""
    run_cells(searches(entries(SCALE)), cells, jobs=jobs, description="searches")
    finals: dict[str, list[Spec]] = {row: [] for row in SCALE.rows}
    for entry in entries(SCALE):
        if (final := entry.final(reader(cells))) is not None:  # else its search is not done
            finals[entry.row].append(final)
    chosen = [
        (f"HyFreeDP, paper, K = {k}", replace(final, interval=k))
        for k in INTERVALS
        for final in finals["hyfreedp_paper"]
    ]
    chosen += [(name, final) for row, name in NAMES.items() for final in finals[row]]
    run_cells([spec for _, spec in chosen], cells, jobs=jobs, description="dynamics")
    frames = []
    for name, spec in chosen:
        steps = read_steps(spec, cells)
        some = steps[(steps.step % EVERY == 0) | steps.test_loss.notna()].reindex(columns=["step", *VALUES])
        frames.append(some.assign(series=name, seed=spec.seed, epsilon=spec.epsilon))
    rows = with_versions(pd.concat(frames, ignore_index=True))
    write_csv(table, rows)
    return rows
