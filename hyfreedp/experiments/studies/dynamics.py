"""Training dynamics (notebook 04): which runs show them, one row per step of these, their bands, and the ablation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from hyfreedp.experiments.runs.cells import read_steps, run_cells, tabulate
from hyfreedp.experiments.runs.methods import EXTENDED_GRID, METHODS
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import replacing
from hyfreedp.experiments.store.provenance import with_versions
from hyfreedp.experiments.tables import small_tasks

PROFILE_TASKS = {
    "smoke": ("digits",),
    "laptop": ("digits",),
    "gpu": ("gtsrb", "cifar10"),
    "paper": ("svhn", "gtsrb"),
}
SEARCHES = ("line_search", "paper")
INTERVALS = (1, 5, 10)

# Every step rule on every probe, all else as in the line search that the probe belongs to: (probe, rule) -> method.
RULES = {
    ("contrasts", "literal"): "line_search_literal",
    ("contrasts", "gen"): "line_search_gen",
    ("contrasts", "posterior"): "line_search",
    ("contrasts", "anchored"): "line_search_anchored",
    ("losses", "literal"): "paper_literal",
    ("losses", "gen"): "paper",
    ("losses", "posterior"): "paper_posterior",
    ("losses", "anchored"): "paper_anchored",
}
# The line search, whole and with one of its parts left out at a time.
PARTS = {
    "as it is": "line_search",
    "without damping": "line_search_undamped",
    "without warm-up": "line_search_cold",
    "with losses, not contrasts": "line_search_losses",
}
# What published versions of rule "gen" differ in: (weight of the new rate, batch that probes) -> method. The authors'
# package is (0.1, "next"), and 0.9 is an independent one's; Alg. 1 probes on the same batch and prints no smoothing.
SMOOTHINGS = {
    (0.1, "same"): "paper",
    (0.1, "next"): "paper_next",
    (0.9, "same"): "paper_fast",
    (0.9, "next"): "paper_fast_next",
}
# Both published rules for R_l, under a step rule that does not learn on small data and one that does:
# (step rule, rule for R_l) -> method.
LOSS_THRESHOLDS = {
    ("gen", "previous"): "paper_previous",
    ("gen", "sum"): "paper",
    ("anchored", "previous"): "paper_anchored_previous",
    ("anchored", "sum"): "paper_anchored",
}
ABLATION = tuple(
    dict.fromkeys([*RULES.values(), *PARTS.values(), *SMOOTHINGS.values(), *LOSS_THRESHOLDS.values(), "algorithm1"])
)

# What tells the runs of this notebook apart.
SPEC_COLUMNS = ("task", "method", "epsilon", "seed", "learning_rate", "interval")


# -- which runs --------------------------------------------------------------------------------------------------------


def curve_specs(base: Spec, intervals: Sequence[int] = INTERVALS) -> list[Spec]:
    """Both line searches at every K; task, epsilon, seed and length are those of ``base``."""
    return [replace(base, method=method, interval=interval) for method, interval in product(SEARCHES, intervals)]


def ablation_specs(base: Spec) -> list[Spec]:
    """All methods of the ablation at the K of ``base``."""
    return [replace(base, method=method) for method in ABLATION]


def threshold_specs(base: Spec) -> list[Spec]:
    """Both rules for R_l under both step rules, at the K of ``base``."""
    return [replace(base, method=method) for method in LOSS_THRESHOLDS.values()]


def tuned_by_hand(base: Spec, recorded: pd.DataFrame, folder: Path) -> Spec:
    """The grid's best rate, constant or with linear decay, by mean *test* accuracy: in its favour, and not private.

    Args:
        base: its task and epsilon are asked for, and the nearest epsilon recorded is taken.
        recorded: rows of the accuracy study. A task without rows gets its grid trained, one run (the seed of
            ``base``) per rate.
        folder: of the cells.
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


# -- tables ------------------------------------------------------------------------------------------------------------


def steps_of(specs: Iterable[Spec], folder: Path) -> pd.DataFrame:
    """The per-step rows of finished cells, one below the other, each with the spec of its run."""
    return pd.concat(
        [
            read_steps(spec, folder).assign(**{name: getattr(spec, name) for name in SPEC_COLUMNS})
            for spec in dict.fromkeys(specs)
        ],
        ignore_index=True,
    )


def of_spec(table: pd.DataFrame, spec: Spec) -> pd.DataFrame:
    """The rows of a spec in a table with its columns, whatever their seed."""
    names = [name for name in SPEC_COLUMNS if name != "seed"]
    return table[np.all([table[name] == getattr(spec, name) for name in names], axis=0)]


def bands(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """``median``, ``low`` and ``high`` (the range) of a column over the runs in ``rows``, for each step with values."""
    by_step = rows.dropna(subset=column).groupby("step")[column]
    return by_step.agg(["median", "min", "max"]).rename(columns={"min": "low", "max": "high"})


def probe_behaviour(rows: pd.DataFrame) -> pd.DataFrame:
    """What the probes of each run did: one row per run, with its spec.

    Returns:
        Columns beside the spec's: ``probes`` (their number); as shares of these, ``rejected`` (eta kept), ``clamped``
        (the rule's range was what decided), ``negative`` (the next eta is below zero) and ``clear`` (the slope is
        more than two standard deviations of its noise from zero); ``smallest_eta`` and ``largest_eta``, the extremes
        of the absolute rate without decay; ``last_loss_threshold``, R_l at the last probe.
    """
    probes = rows[rows.slope.notna()]
    marked = probes.assign(
        rejected=~probes.accepted.astype(bool),
        clamped=probes.reason.str.contains("clamped"),
        negative=probes.eta_next < 0,
        clear=probes.slope.abs() > 2 * probes.slope_std,
        size=probes.eta_next.abs(),
    )
    if "loss_threshold" not in marked:
        marked["loss_threshold"] = np.nan
    by_run = marked.groupby(list(SPEC_COLUMNS), sort=False)
    shares = by_run[["rejected", "clamped", "negative", "clear"]].mean()
    return shares.assign(
        probes=by_run.size(),
        smallest_eta=by_run["size"].min(),
        largest_eta=by_run["size"].max(),
        last_loss_threshold=by_run["loss_threshold"].last(),
    ).reset_index()


def peaks(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Where a column peaks and what is left of it at the end of each run: one row per run with values in it.

    Returns:
        Columns beside the spec's: ``peak``, ``peak_at`` (the share of the run before it) and ``last`` (over the peak).
    """
    table = []
    for spec, run in rows.dropna(subset=column).groupby(list(SPEC_COLUMNS), sort=False):
        highest = run.loc[run[column].idxmax()]
        shape = (highest[column], highest.step / run.step.max(), run[column].iloc[-1] / highest[column])
        table.append([*spec, *shape])
    return pd.DataFrame(table, columns=[*SPEC_COLUMNS, "peak", "peak_at", "last"])


def ablation_table(records: Iterable[dict[str, Any]], folder: Path) -> pd.DataFrame:
    """One row per run: the spec, its result (``runs.cells.tabulate``) and :func:`probe_behaviour`."""
    table = tabulate(records)
    specs = [Spec(**record["spec"]) for record in records]
    behaviour = probe_behaviour(steps_of(specs, folder))
    return table.merge(behaviour, on=list(SPEC_COLUMNS), how="left", validate="one_to_one")


def record_ablation(folder: Path, table: Path, *, seeds: int = 5, jobs: int = 1) -> pd.DataFrame:
    """Run what is missing of the ablation on digits, at the study's three epsilons, and write one row per run."""
    specs = [
        spec
        for epsilon, seed in product(small_tasks.EPSILONS, range(seeds))
        for spec in ablation_specs(Spec(task="digits", epsilon=epsilon, seed=seed))
    ]
    rows = ablation_table(run_cells(specs, folder, jobs=jobs, description="ablation"), folder)
    rows = with_versions(rows)
    with replacing(table) as temporary:
        rows.to_csv(temporary, index=False)
    return rows


def spread(values: pd.Series) -> str:
    """Mean and standard deviation with one decimal, as text; the mean alone of a single value."""
    return f"{values.mean():.1f}" + (f" ± {values.std():.1f}" if len(values) > 1 else "")


def accuracy_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Final test accuracy in percent, mean and standard deviation over seeds as text: methods by epsilon."""
    percent = rows.assign(percent=100 * rows.accuracy).groupby(["method", "epsilon"]).percent
    text = percent.agg(spread).unstack()
    text = text.loc[[method for method in ABLATION if method in text.index], ::-1]
    return text.rename(index={method: METHODS[method].title for method in text.index}).rename_axis(index=None)


# -- panels ------------------------------------------------------------------------------------------------------------


def draw_band(
    axis: Axes, rows: pd.DataFrame, column: str, style: dict[str, Any], label: str = "", *, every: float = 0.2
) -> None:
    """Median over the runs as a line, their range as a band; nothing where the column has no values.

    Args:
        axis: to draw on.
        rows: per-step rows of the runs of one series.
        column: what to draw against ``step``.
        style: colour, dashes and marker, from :mod:`hyfreedp.experiments.store.plots`.
        label: of the line.
        every: spacing of the markers, as a share of the axis.
    """
    if column not in rows or rows[column].isna().all():
        return
    band = bands(rows, column)
    axis.plot(band.index, band["median"], label=label, markevery=every, markersize=4, **style)
    axis.fill_between(band.index, band.low, band.high, color=style["color"], alpha=0.15, linewidth=0)


def draw_runs(axis: Axes, rows: pd.DataFrame, column: str, style: dict[str, Any]) -> None:
    """One line of absolute values per run; a cross wherever the value is negative."""
    for _, run in rows.dropna(subset=column).groupby("seed"):
        axis.plot(run.step, run[column].abs(), linewidth=1.2, color=style["color"], linestyle=style["linestyle"])
        below = run[run[column] < 0]
        axis.plot(below.step, below[column].abs(), "x", color="black", markersize=4)


def draw_accuracies(
    axis: Axes,
    results: pd.DataFrame,
    methods: dict[str, str],
    style: dict[str, Any],
    label: str = "",
    shift: float = 0.0,
) -> None:
    """Final accuracies: one row per entry of ``methods``, a small point per run, a large one with mean and deviation.

    Args:
        axis: to draw on; names go to its y axis, from top to bottom.
        results: one row per run, ``accuracy`` a share.
        methods: name to show -> method.
        style: colour and marker.
        label: of the series.
        shift: of the points within their row, for several series on one axis.
    """
    points = {"color": style["color"], "marker": style["marker"], "linestyle": "none"}
    for row, method in enumerate(methods.values()):
        percent = 100 * results[results.method == method].accuracy
        axis.plot(percent, [row + shift] * len(percent), alpha=0.4, markersize=4, **points)
        name = label if row == 0 else None
        axis.errorbar(percent.mean(), row + shift, xerr=percent.std(), capsize=3, markersize=7, label=name, **points)
    axis.set_yticks(range(len(methods)), list(methods))
    axis.set_ylim(len(methods) - 0.5, -0.5)
