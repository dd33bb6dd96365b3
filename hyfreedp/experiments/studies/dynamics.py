"""Training dynamics (notebook 05): which runs show them, one row per step of these, and what their probes did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from hyfreedp.experiments.runs.cells import read_steps, run_cells, tabulate
from hyfreedp.experiments.runs.methods import EXTENDED_GRID, METHODS
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.tables import small_tasks

PROFILE_TASKS = {"smoke": ("digits",), "laptop": ("digits",), "gpu": ("gtsrb", "cifar10"), "paper": ("svhn", "gtsrb")}
INTERVALS = (1, 5, 10)
STARTS = (1e-4, 1e-2)  # the paper's first rate, and one that suits
RULES = ("paper_literal", "paper")  # what moves the rate
THRESHOLDS = ("paper_previous", "paper")  # both published rules for R_l
TITLES = {method: METHODS[method].title for method in (*RULES, *THRESHOLDS)} | {"paper": "preset paper"}

# What tells the runs of this notebook apart.
SPEC_COLUMNS = ("task", "method", "epsilon", "seed", "learning_rate", "interval")


# -- which runs --------------------------------------------------------------------------------------------------------


def curve_specs(base: Spec, intervals: Sequence[int] = INTERVALS) -> list[Spec]:
    """Preset paper from every start at every K; task, epsilon, seed and length are those of ``base``."""
    return [
        replace(base, method="paper", learning_rate=start, interval=interval)
        for start, interval in product(STARTS, intervals)
    ]


def robust_spec(base: Spec) -> Spec:
    """Preset robust at the task, the epsilon, the seed and the length of ``base``."""
    return replace(base, method="robust", learning_rate=Spec.learning_rate, interval=Spec.interval)


def rule_specs(base: Spec) -> list[Spec]:
    """All step rules from the paper's first rate, at the K of ``base``."""
    return [replace(base, method=method) for method in RULES]


def threshold_specs(base: Spec) -> list[Spec]:
    """Both rules for R_l, from the rate that suits, so that there is something to learn."""
    return [replace(base, method=method, learning_rate=STARTS[-1]) for method in THRESHOLDS]


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


def peak(rows: pd.DataFrame, column: str) -> tuple[float, float]:
    """Where a column peaks, as a share of the run, and what is left of that at the end: medians over the runs."""
    found = []
    for _, run in rows.dropna(subset=column).groupby("seed"):
        highest = run.loc[run[column].idxmax()]
        found.append((highest.step / run.step.max(), run[column].iloc[-1] / highest[column]))
    at, left = np.median(found, axis=0)
    return float(at), float(left)


def behaviour_table(rows: pd.DataFrame, results: pd.DataFrame, specs: Iterable[Spec]) -> pd.DataFrame:
    """What the probes of each line search did, over the seeds, and what it reached.

    Args:
        rows: of :func:`steps_of`.
        results: of ``runs.cells.tabulate``.
        specs: line searches.

    Returns:
        One row per spec: ``what`` (its title), ``K``; in percent of the probes, those whose slope was ``clear`` (more
        than two standard deviations of its noise from zero), whose fit was ``rejected``, whose result was ``clamped``
        to the rule's range, after which the rate was ``negative``; ``smallest`` and ``largest`` rate of all runs;
        ``accuracy`` in percent, as text.
    """
    table = []
    for spec in specs:
        probes = of_spec(rows, spec).dropna(subset="slope")
        done = {
            "clear": probes.slope.abs() > 2 * probes.slope_std,
            "rejected": ~probes.accepted.astype(bool),
            "clamped": probes.reason.str.contains("clamped"),
            "negative": probes.eta_next < 0,
        }
        size = probes.eta_next.abs()
        shares = {name: 100 * share.mean() for name, share in done.items()}
        extremes = {"smallest": size.min(), "largest": size.max()}
        named = {"what": TITLES[spec.method], "K": spec.interval}
        table.append(named | shares | extremes | {"accuracy": reached(results, spec)})
    return pd.DataFrame(table)


def spread(values: pd.Series) -> str:
    """Mean and standard deviation with one decimal, as text; the mean alone of a single value."""
    return f"{values.mean():.1f}" + (f" ± {values.std():.1f}" if len(values) > 1 else "")


def reached(results: pd.DataFrame, spec: Spec) -> str:
    """Final test accuracy of a spec in percent over seeds, as text."""
    return f"{spread(100 * of_spec(results, spec).accuracy)} %"
