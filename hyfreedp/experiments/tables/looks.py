"""Preset robust on the places of version 0.1.0's record, on test data: ``python -m hyfreedp.experiments.tables.looks``.

That record (``data/results/laptop/targets.csv``) has, at each place, the test accuracy of the best of a search over
sixteen schedules that validation data chose. The same seeds are trained here with today's preset. Finished runs are
kept, so that an interrupted command goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from scipy import stats

from hyfreedp.experiments.runs.cells import run_cells, tabulate
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.paths import RESULTS, workspace
from hyfreedp.experiments.tasks.registry import TASKS

PLACE = ["task", "model", "tuning", "base", "steps", "epsilon"]


def places() -> pd.DataFrame:
    """Rows of the record whose tasks there still are."""
    rows = pd.read_csv(RESULTS / "laptop" / "targets.csv")
    return rows[rows.task.isin(TASKS)]


def run(found: pd.DataFrame) -> pd.DataFrame:
    """The rows of preset robust, trained today."""
    rows = found[found.name == "robust"].sort_values("seconds")[[*PLACE, "seed"]].to_dict("records")
    return tabulate(run_cells([Spec(method="robust", **row) for row in rows], workspace().cells))


def gaps(found: pd.DataFrame, today: pd.DataFrame) -> pd.DataFrame:
    """Percent accuracy of the search at each place, and how many points from it 0.02 and both presets are."""
    columns = {name: rows.groupby(PLACE).accuracy.mean() for name, rows in found.groupby("name")}
    table = 100 * pd.DataFrame(columns | {"today": today.groupby(PLACE).accuracy.mean()})
    return table.assign(**{name: table[name] - table.best for name in table.columns if name != "best"})


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Over the places with privacy: mean gap, share within a point, and the worst."""
    private = table[table.index.get_level_values("epsilon") < float("inf")].drop(columns="best")
    return pd.DataFrame(
        {"mean": private.mean(), "within 1 (%)": 100 * (private >= -1).sum() / private.count(), "worst": private.min()}
    ).round(1)


CONTENDERS = {"today": "preset robust, today", "robust": "of version 0.1.0", "0.02, linear": "0.02, linear decay"}


def differences(found: pd.DataFrame, today: pd.DataFrame) -> pd.DataFrame:
    """Points of accuracy of every run with privacy to the best of the search, run by run with the same seed.

    Returns:
        Columns of ``PLACE``, ``seed``, ``name`` (of ``CONTENDERS``) and ``points``.
    """
    runs = pd.concat([found, today.assign(name="today")])
    runs = runs[runs.epsilon < float("inf")].set_index([*PLACE, "seed"])
    best = runs[runs.name == "best"].accuracy.rename("best")
    rest = runs[runs.name != "best"].join(best, how="inner")
    return rest.assign(points=100 * (rest.accuracy - rest.best)).reset_index()[[*PLACE, "seed", "name", "points"]]


# Statistics over places and seeds as in Agarwal et al., Deep RL at the Edge of the Statistical Precipice, 2021. Their
# package, rliable, takes a table with equally many seeds at every place, which ours have not.


def interquartile_mean(values: ArrayLike) -> float:
    """The mean of the middle half: an outlier does not move it, and it needs fewer runs than a median."""
    return float(stats.trim_mean(values, 0.25, axis=None))


def profile(values: ArrayLike, marks: ArrayLike) -> np.ndarray:
    """The share of runs that reach each mark."""
    return np.mean(np.asarray(values)[:, None] >= np.asarray(marks), axis=0)


def stratified_bootstrap(
    strata: Sequence[ArrayLike],
    statistic: Callable[[np.ndarray], ArrayLike],
    *,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the 95 % percentile interval of a statistic of all runs, where seeds are drawn again within each place.

    Args:
        strata: the runs of each place.
        statistic: of all runs of all places, as one array.
    """
    rng = np.random.default_rng(seed)
    places = [np.asarray(runs, dtype=float) for runs in strata]
    drawn = [np.concatenate([rng.choice(runs, len(runs)) for runs in places]) for _ in range(draws)]
    ends = np.quantile([statistic(runs) for runs in drawn], [(1 - 0.95) / 2, (1 + 0.95) / 2], axis=0)
    return ends[0], ends[1]


def over_all(points: pd.DataFrame) -> pd.DataFrame:
    """A row for each contender: interquartile mean with its 95 % interval, and the share of runs within a point."""
    rows = {}
    for name, title in CONTENDERS.items():
        chosen = points[points.name == name]
        places = [runs.points.to_numpy() for _, runs in chosen.groupby(PLACE)]
        low, high = stratified_bootstrap(places, interquartile_mean)
        rows[title] = [len(places), len(chosen), interquartile_mean(chosen.points), low, high]
        rows[title].append(100 * float(profile(chosen.points, [-1.0])[0]))
    columns = ["places", "runs", "interquartile mean", "low", "high", "runs within 1 (%)"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("contender")


def draw_all(points: pd.DataFrame) -> Figure:
    """Every place at a glance, in order of today's mean, beside the profiles of all contenders."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4))
    marks = np.linspace(-12, 4, 81)
    order = points[points.name == "today"].groupby(PLACE).points.mean().sort_values()
    for (name, title), style in zip(CONTENDERS.items(), ("robust", "worst", "alternative"), strict=True):
        look, chosen = plots.STYLES[style], points[points.name == name]
        means = chosen.groupby(PLACE).points.mean().reindex(order.index)
        left.plot(means.to_numpy(), range(len(order)), markersize=4, **plots.marks(look))
        places = [runs.points.to_numpy() for _, runs in chosen.groupby(PLACE)]
        low, high = stratified_bootstrap(places, partial(profile, marks=marks), draws=500)
        right.plot(marks, 100 * profile(chosen.points, marks), label=title, markevery=10, markersize=5, **look)
        right.fill_between(marks, 100 * low, 100 * high, color=look["color"], alpha=0.2, linewidth=0)
    for axis in (left, right):
        axis.axvline(0, color="0.3", linewidth=1)
        axis.set_xlabel("points to the best of the search")
    near = 100 * profile(points[points.name == "today"].points, [-1.0])[0]
    left.set(yticks=[], ylabel=f"{len(order)} places", title="Today's worst place loses less than the others'")
    right.set(ylabel="runs that reach it (%), 95 % bands", title=f"{near:.0f} % of today's runs lose at most a point")
    plots.shared_legend(figure, [right], ncols=3)
    return figure


def markdown(today: pd.DataFrame) -> str:
    """The table of docs/step_rule.md: percent of the search, and points from it."""
    table = gaps(places(), today)
    lines = ["| Task, model | base | T | epsilon | best of the search | today | 0.1.0's votes | 0.02, linear |"]
    lines.append("|" + " --- |" * 8)
    for (task, model, tuning, base, steps, epsilon), row in table.iterrows():
        name = f"{task}, {model}" + (f", {tuning}" if tuning != "full" else "")
        points = [f"{row[one]:+.1f}" if row[one] == row[one] else "" for one in ("today", "robust", "0.02, linear")]
        lines.append(f"| {' | '.join([name, base, str(steps), f'{epsilon:g}', f'{row.best:.1f}', *points])} |")
    return "\n".join(lines)


def sentence(today: pd.DataFrame) -> str:
    """What the README says of preset robust."""
    row = summary(gaps(places(), today)).loc["today"]
    return f"{row['mean']:+.1f} points from the best of a search in the mean, within one at {row['within 1 (%)']:.0f} %"


if __name__ == "__main__":
    record = places()
    today = run(record)
    write_csv(RESULTS / "laptop" / "looks.csv", today)
    table = gaps(record, today)
    print(table.round(1).to_string(), summary(table).to_string(), sep="\n\n")
