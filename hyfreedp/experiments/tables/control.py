"""The paper's method with its own accounting, with sound accounting, and without noise on losses; three first rates.

``python -m hyfreedp.experiments control`` trains what is missing, one seed at all places before the next, and writes
``data/results/<profile>/control.csv`` for notebook 06. An interrupted command can be repeated.
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
from hyfreedp.experiments.store.verdicts import COMPARABLE, Verdict, over_data_sets, span
from hyfreedp.experiments.tables.image_classification import BEATS, CHOSE, CLOSE, OURS, RIVALS, data_set, within_reach
from hyfreedp.experiments.tables.plan import CELL, SCALES, TABLE

FIRST_RATES = (1e-4, 1e-3, 1e-2)  # the paper's, and two that are nearer to those of a search
METHODS = ("paper_claimed", "paper", "paper_noiseless_losses", "algorithm1_claimed")
SEEDS = 3
PLACE = CELL[:-1]


def runs(profile: str) -> list[Spec]:
    """Every method from every first rate, but Algorithm 1 as printed from the paper's only."""
    scale = SCALES[profile]
    return [
        Spec(method=method, epsilon=epsilon, seed=seed, learning_rate=rate, **asdict(learner))
        for seed, rate, method in product(range(SEEDS), FIRST_RATES, METHODS)
        for learner, epsilon in product(scale.learners, scale.epsilons)
        if epsilon < float("inf") and (method != "algorithm1_claimed" or rate == FIRST_RATES[0])
    ]


def compared(profile: str) -> pd.DataFrame:
    """The committed runs, one row per place, method and first rate; empty if the profile has no record.

    Returns:
        ``task``, ``model``, ``tuning``, ``epsilon``, ``method``, ``first_rate``; means over seeds of ``accuracy``
        (percent), ``points`` above the grid search over the paper's rates, ``last_rate`` and ``epsilon_true``, which
        the run really spends; ``within``, see ``within_reach``; and ``runs``, the number of seeds.
    """
    path = RESULTS / profile / "control.csv"
    if not path.exists():
        return pd.DataFrame()
    names = {"learning_rate": "first_rate", "final_eta": "last_rate", "epsilon_spent": "epsilon_true"}
    found = pd.read_csv(path).rename(columns=names)
    numbers = pd.read_csv(RESULTS / profile / TABLE).query("row == 'grid'").assign(profile=profile)
    grid = numbers.assign(within=within_reach(numbers)).groupby(PLACE)
    found = found.join(grid.agg(grid=("accuracy", "mean"), within=("within", "all")), on=PLACE)
    found = found.assign(points=100 * (found.accuracy - found.grid), accuracy=100 * found.accuracy)
    by_rate = found.groupby([*PLACE, "method", "first_rate"], sort=False)
    means = by_rate[["accuracy", "points", "last_rate", "epsilon_true"]].mean()
    return means.assign(within=by_rate.within.all(), runs=by_rate.size()).reset_index()


def _beside(runs: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """The runs, indexed by data set, with a column for each method of ``rows``: its accuracy there in percent."""
    means = (100 * rows.groupby([*PLACE, "row"]).accuracy.mean()).unstack()
    return runs.assign(data=runs.task.map(data_set)).join(means, on=PLACE, how="inner").set_index("data")


def cases(found: pd.DataFrame, rows: pd.DataFrame) -> list[Verdict]:
    """Verdicts from rows of :func:`compared` on the claims that HyFreeDP comes close to a tuned rate and beats rivals.

    With the paper's accounting from its first rate, at places within reach; and with either accounting from the best
    first rate tried at each place, which is chosen by test accuracy, in its favour, and not covered by epsilon.
    """
    told = []
    for method, way in (("paper_claimed", ", the paper's accounting"), ("paper", "")):
        runs = found[found.method == method]
        first = runs[(runs.first_rate == FIRST_RATES[0]) & runs.within & (method == "paper_claimed")]
        several = runs[runs.groupby(PLACE).first_rate.transform("max") > FIRST_RATES[0]]
        best = runs.loc[several.groupby(PLACE, sort=False).points.idxmax()]
        for start, part in (("0.0001", first), ("the best first rate tried", best)):
            if len(part):
                outcome, number = over_data_sets(part.set_index(part.task.map(data_set)).points, COMPARABLE)
                if method == "paper_claimed":
                    spent = part.groupby("epsilon").epsilon_true.agg(lambda true: span(list(true), ".2f"))
                    number += f"; spends {', '.join(f'{true} for {e:g}' for e, true in spent.items())}"
                told.append(Verdict(CLOSE, outcome, number, case=f"from {start}{way}"))
    for tuning, row in (*(("full", row) for row in RIVALS), ("bitfit", "prodigy")):  # what the paper has
        part = _beside(best[best.tuning == tuning], rows)
        case = f"{'all weights' if tuning == 'full' else 'BitFit'}, from the best first rate tried"
        told.append(Verdict(BEATS + RIVALS[row], *over_data_sets(part.accuracy - part[row], 0.0), case=case))
    return told


def against_ours(found: pd.DataFrame, rows: pd.DataFrame) -> Verdict:
    """Verdict on preset robust against HyFreeDP from its best first rate; tells where that beats it and the search."""
    private = found[found.method.isin(["paper", "paper_claimed"])]
    private = private[private.groupby(PLACE).first_rate.transform("max") > FIRST_RATES[0]]
    best = private.loc[private.groupby(PLACE, sort=False).accuracy.idxmax()]
    best = _beside(best.drop(columns="points"), rows).eval("points = hyfreedp_robust - accuracy")
    chose = best.index.isin(CHOSE)
    outcome, number = over_data_sets(best.points[~chose], COMPARABLE, best.points[chose], "they chose its constants")
    for one in best[(best.accuracy > best.grid) & (best.points < 0)].itertuples():
        number += f"; {one.Index}, {one.model[:3]}, {one.tuning}, epsilon = {one.epsilon:g}: {one.accuracy:.1f} % from "
        number += f"{one.first_rate:g}, the search {one.grid:.1f}, preset robust {one.hyfreedp_robust:.1f}"
    return Verdict(OURS, outcome, number, "ours", "beside HyFreeDP from the best first rate tried")


def record(profile: str, cells: Path, *, jobs: int = 1) -> pd.DataFrame:
    """Train what is missing, write the table (columns of ``accuracy.csv``), and return it :func:`compared`."""
    wanted, read, path = runs(profile), reader(cells), RESULTS / profile / "control.csv"
    try:
        run_cells(wanted, cells, jobs=jobs, description=f"{profile}, control")
    finally:  # also if interrupted, but never with fewer runs than before
        records = [record for spec in wanted if (record := read(spec)) is not None]
        if records and (not path.exists() or len(records) >= len(pd.read_csv(path))):
            write_csv(path, tabulate(records))
    return compared(profile)
