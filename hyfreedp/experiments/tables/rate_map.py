"""Accuracy over clipping threshold and learning rate, and where HyFreeDP trains on that map (notebook 09)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyfreedp import calibrate_noise
from hyfreedp.experiments.runs.cells import Spec, read_steps, run_cells, tabulate, with_seeds
from hyfreedp.experiments.tables import tuning_budget
from hyfreedp.experiments.tasks.registry import TASKS

TITLES = {"sgd": "SGD with momentum 0.9", "adamw": "AdamW"}
CLIPS = 10.0  # the largest R_g that scales gradients of this task: one that clips none has no equivalent rate
# Per profile the steps of a run and, per optimizer, thresholds R_g and rates eta.
MAPS: dict[str, dict[str, Any]] = {
    "smoke": {"steps": 10, "sgd": ((0.1, 1.0), (0.3, 3.0)), "adamw": ((0.1, 1.0), (1e-2,))},
    "laptop": {
        "steps": 50,
        "sgd": ((0.1, 0.3, 1.0, 3.0, 10.0, 30.0), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
        "adamw": ((0.3, 3.0, 30.0), (1e-3, 5e-3, 2e-2, 5e-2)),
    },
    "paper": {
        "steps": None,
        "sgd": ((0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0), (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)),
        "adamw": ((0.3, 1.0, 3.0, 10.0, 30.0), (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)),
    },
}
MAPS["gpu"] = MAPS["paper"]


def specs(profile: str, epsilon: float, seeds: int) -> list[Spec]:
    """The runs of the map: both optimizers with every threshold and rate, without a threshold, and with HyFreeDP."""
    common: dict[str, Any] = {"task": "digits", "epsilon": epsilon, "steps": MAPS[profile]["steps"]}
    chosen = []
    for base in TITLES:
        thresholds, rates = MAPS[profile][base]
        chosen += [
            Spec(method="vanilla", base=base, clipping_threshold=threshold, learning_rate=rate, **common)
            for threshold in thresholds
            for rate in rates
        ]
        chosen += [Spec(method="constant", base=base, learning_rate=rate, **common) for rate in rates]
        chosen += [Spec(method="robust", base=base, **common)]
    return [one for spec in chosen for one in with_seeds(spec, seeds)]


def train(runs: Sequence[Spec], folder: Path, jobs: int) -> pd.DataFrame:
    """One row per run: that of ``runs.cells.tabulate``, ``percent`` and, for HyFreeDP, the median rate ``eta``."""
    results = tabulate(run_cells(runs, folder, jobs=jobs, description="training runs"))
    results["percent"] = 100 * results.accuracy
    learned = [read_steps(spec, folder).eta.median() for spec in runs if spec.method == "robust"]
    results.loc[results.method == "robust", "eta"] = learned
    return results


def means(results: pd.DataFrame) -> pd.Series:
    """Mean accuracy in percent by ``base``, ``method``, ``clipping_threshold`` and ``learning_rate``."""
    return results.groupby(["base", "method", "clipping_threshold", "learning_rate"], dropna=False).percent.mean()


def learned_rate(results: pd.DataFrame, base: str) -> float:
    """The rate of HyFreeDP: mean over seeds of the median over steps."""
    return float(results[(results.method == "robust") & (results.base == base)].eta.mean())


def column_of(rate: Any, rates: Sequence[float]) -> np.ndarray:
    """Where a rate is on an axis whose columns are these rates; NaN if beyond them."""
    places = np.arange(len(rates)) + 0.5
    return np.asarray(np.interp(np.log10(rate), np.log10(rates), places, left=np.nan, right=np.nan))


def draw(results: pd.DataFrame) -> Figure:
    """A heat map per optimizer, with automatic clipping as a row below, and where HyFreeDP trains.

    Args:
        results: of :func:`train`.
    """
    shape: dict[str, Any] = {"width_ratios": (1.35, 1), "height_ratios": (6, 1), "sharex": "col"}
    figure, axes = plt.subplots(2, 2, figsize=(10, 5.6), **shape)
    accuracies = means(results)
    for (above, below), (base, title) in zip(axes.T, TITLES.items(), strict=True):
        vanilla = accuracies[base]["vanilla"].unstack().sort_index(ascending=False)
        automatic = accuracies[base]["constant"].droplevel("clipping_threshold").to_frame().T
        rates, rows = list(vanilla.columns), np.arange(len(vanilla)) + 0.5
        _heat_map(above, vanilla)
        _heat_map(below, automatic)
        found = learned_rate(results, base)
        equivalent = [found / level if base == "sgd" else found for level in vanilla.index]
        mark: dict[str, Any] = {"color": "black", "markerfacecolor": "white", "zorder": 5}
        scaled = vanilla.index <= CLIPS
        above.plot(column_of(equivalent, rates)[scaled], rows[scaled], "o", markersize=7, **mark)
        below.plot(column_of([found], rates), [0.62], "*", markersize=14, **mark)
        above.set_title(f"{title}: clipping at $R_g$")
        above.set_yticks(rows, [f"{level:g}" for level in vanilla.index], rotation=0)
        below.set_yticks([0.5], ["automatic\n($R_g \\to 0$)"], rotation=0)
        below.set_xticks(np.arange(len(rates)) + 0.5, [f"{rate:g}" for rate in rates], rotation=0)
        below.set_xlabel(r"learning rate $\eta$")
        above.tick_params(labelbottom=False)
    axes[0, 0].set_ylabel("clipping threshold $R_g$")
    title = rf"Test accuracy (%), mean of {results.seed.nunique()} runs; dots and star: the rate that HyFreeDP finds"
    figure.suptitle(title, fontsize="medium")
    return figure


def _heat_map(axis: Axes, values: pd.DataFrame) -> None:
    look: dict[str, Any] = {"cmap": "cividis", "vmin": 10, "vmax": 100, "cbar": False, "linewidths": 0.5}
    sns.heatmap(values, ax=axis, annot=True, fmt=".0f", annot_kws={"va": "bottom"}, **look)
    axis.set(xlabel="", ylabel="")


def findings(results: pd.DataFrame, profile: str, epsilon: float) -> list[str]:
    """The best of the map and what its search would cost, HyFreeDP beside it, and the spread over seeds."""
    task, seeds = TASKS["digits"], results.seed.nunique()
    steps = MAPS[profile]["steps"] or task.steps
    protocol: dict[str, Any] = {"target_delta": task.delta, "sample_rate": task.batch_size / task.train_size}
    sigma = calibrate_noise(target_epsilon=epsilon, steps=steps, probe="none", accountant="rdp", **protocol).sigma
    lines = []
    for base, title in TITLES.items():
        vanilla, constant = means(results)[base]["vanilla"], means(results)[base]["constant"]
        good = int((vanilla > vanilla.max() - 2).sum())
        whole = tuning_budget.dp_sgd_epsilon(sigma, steps=len(vanilla) * steps, **protocol)
        threshold, rate = vanilla.idxmax()
        lines.append(
            f"{title}: best of {len(vanilla)} cells {vanilla.max():.1f} % (R_g = {threshold:g}, rate {rate:g}), {good} "
            f"of them within 2 points, worst {vanilla.min():.1f} %; counted, this search costs epsilon = {whole:.1f} "
            "(RDP)"
        )
        ours = results[(results.base == base) & (results.method == "robust")].percent
        lines.append(
            f"{title}: HyFreeDP {ours.mean():.1f} % (from {ours.min():.1f} to {ours.max():.1f} over {seeds} seeds) at "
            f"a median rate of {learned_rate(results, base):.3g}, without a search; best rate under automatic clipping "
            f"{constant.max():.1f} %"
        )
    cells = results[results.method == "vanilla"].groupby(["base", "clipping_threshold", "learning_rate"])
    spread = cells.percent.agg(np.ptp).median()
    lines.append(f"Two runs of one cell differ by {spread:.1f} points (median range over {seeds} seeds)")
    return lines
