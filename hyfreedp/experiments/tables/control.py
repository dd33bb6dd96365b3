"""The paper's method by its own accounting, the sound one and without noise on losses, from three first rates.

``python -m hyfreedp.experiments control`` trains what is missing, of all places one seed before the next, and writes
``data/results/<profile>/control.csv``, which notebook 06 shows. It can be interrupted.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path

import pandas as pd

from hyfreedp.experiments.runs.cells import reader, run_cells, tabulate
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.paths import RESULTS
from hyfreedp.experiments.store.verdicts import COMPARABLE, Verdict, over_data_sets
from hyfreedp.experiments.tables.image_classification import CLOSE, OURS, data_set, within_reach
from hyfreedp.experiments.tables.plan import CELL, SCALES, TABLE

FIRST_RATES = (1e-4, 1e-3, 1e-2)  # the paper's, and two with which it would have begun near a searched one
METHODS = ("paper_claimed", "paper", "paper_noiseless_losses", "algorithm1_claimed")
SEEDS = 3
PLACE = CELL[:-1]


def runs(profile: str) -> list[Spec]:
    """Every method from every first rate, but Algorithm 1 as printed, which begins at the paper's."""
    scale = SCALES[profile]
    return [
        Spec(method=method, epsilon=epsilon, seed=seed, learning_rate=rate, **asdict(learner))
        for seed, rate, method in product(range(SEEDS), FIRST_RATES, METHODS)
        for learner, epsilon in product(scale.learners, scale.epsilons)
        if epsilon < float("inf") and (method != "algorithm1_claimed" or rate == FIRST_RATES[0])
    ]


def compared(profile: str) -> pd.DataFrame:
    """The committed runs, a line per place, method and first rate.

    Returns:
        ``task``, ``model``, ``tuning``, ``epsilon``, ``method``, ``first_rate``; over the seeds, the means of
        ``accuracy`` (percent), ``points`` to the grid search over the paper's rates, ``last_rate``, and
        ``epsilon_true``, what the run really spends; ``within``, whether the search's rate is within reach of the
        paper's first one; ``runs``, their number. Empty if the profile has no record.
    """
    path = RESULTS / profile / "control.csv"
    if not path.exists():
        return pd.DataFrame()
    names = {"learning_rate": "first_rate", "final_eta": "last_rate", "epsilon_spent": "epsilon_true"}
    found = pd.read_csv(path).rename(columns=names)
    numbers = pd.read_csv(RESULTS / profile / TABLE)
    numbers = numbers[numbers.row == "grid"].assign(profile=profile)
    grid = numbers.assign(within=within_reach(numbers)).groupby(PLACE)
    found = found.join(grid.agg(grid=("accuracy", "mean"), within=("within", "all")), on=PLACE)
    found = found.assign(points=100 * (found.accuracy - found.grid), accuracy=100 * found.accuracy)
    by_rate = found.groupby([*PLACE, "method", "first_rate"], sort=False)
    means = by_rate[["accuracy", "points", "last_rate", "epsilon_true"]].mean()
    return means.assign(within=by_rate.within.all(), runs=by_rate.size()).reset_index()


def cases(found: pd.DataFrame) -> list[Verdict]:
    """What lines of :func:`compared` say of the claim that HyFreeDP comes close, beside those of the tables.

    By its own accounting from the paper's first rate, where that is within reach; and by either accounting from the
    best first rate that was tried at a place: chosen by test accuracy, in its favour, and not covered by epsilon.
    """
    told = []
    for method, way in (("paper_claimed", "the paper's accounting"), ("paper", "sound accounting")):
        runs = found[found.method == method]
        first = runs[(runs.first_rate == FIRST_RATES[0]) & runs.within & (method == "paper_claimed")]
        several = runs[runs.groupby(PLACE).first_rate.transform("max") > FIRST_RATES[0]]
        best = runs.loc[several.groupby(PLACE).points.idxmax()]
        for start, part in (("0.0001", first), ("the best first rate tried", best)):
            if len(part):
                outcome, number = over_data_sets(part.set_index(part.task.map(data_set)).points, COMPARABLE)
                spent = part.groupby("epsilon").epsilon_true.max()
                number += f"; spends {', '.join(f'{true:.2f} for {e:g}' for e, true in spent.items())}"
                told.append(Verdict(CLOSE, outcome, number, case=f"from {start}, {way}"))
    return told


def against_ours(found: pd.DataFrame, rows: pd.DataFrame) -> Verdict:
    """Preset robust beside the paper's method from the best first rate that was tried, by either accounting.

    Args:
        found: lines of :func:`compared`.
        rows: the tables' numbers at the same places.
    """
    private = found[found.method.isin(["paper", "paper_claimed"])]
    best = private.loc[private.groupby(PLACE).accuracy.idxmax()]
    wanted = rows[rows.row.isin(["grid", "hyfreedp_robust"])]
    best = best.join((100 * wanted.groupby([*PLACE, "row"]).accuracy.mean()).unstack(), on=PLACE, how="inner")
    best["points"] = best.hyfreedp_robust - best.accuracy
    best.index = pd.Index([data_set(task) for task in best.task])
    outcome, number = over_data_sets(best.points, COMPARABLE)
    for one in best[(best.accuracy > best.grid) & (best.points < 0) & (best.index != "digits")].itertuples():
        number += f"; {one.Index}, {one.tuning}, epsilon = {one.epsilon:g}: HyFreeDP from {one.first_rate:g} has "
        number += f"{one.accuracy:.1f} %, the search {one.grid:.1f}, preset robust {one.hyfreedp_robust:.1f}"
    return Verdict(OURS, outcome, number, "ours", "beside HyFreeDP from the best first rate tried")


def record(profile: str, cells: Path, *, jobs: int = 1) -> pd.DataFrame:
    """Train what is missing, and write what is there, with the columns of ``accuracy.csv``; it :func:`compared`."""
    wanted = runs(profile)
    try:
        run_cells(wanted, cells, jobs=jobs, description=f"{profile}, control")
    finally:  # interrupted too; but no fewer runs than there were
        path, records = RESULTS / profile / "control.csv", list(filter(None, map(reader(cells), wanted)))
        if records and (not path.exists() or len(records) >= len(pd.read_csv(path))):
            write_csv(path, tabulate(records))
    return compared(profile)
