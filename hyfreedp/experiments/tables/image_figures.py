"""The figures of notebook 06, from the tables of ``image_classification`` and ``control``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hyfreedp.experiments.runs.methods import METHODS
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.tables.control import PLACE as CONTROL_PLACE
from hyfreedp.experiments.tables.image_classification import PLACE, TUNING_TITLES, data_set
from hyfreedp.experiments.tables.plan import ROWS

DATA = {"desktop": "real images", "laptop": "digits"}
FAR = -26.0  # points; beyond, a method stands at the edge with its number
RATES = {"hyfreedp_robust": "robust", "hyfreedp_paper": "paper", "dadaptation": "reference", "prodigy": "worst"}
CONTROLS = {
    "paper_claimed": plots.STYLES["alternative"],
    "paper": plots.STYLES["paper"],
    "paper_noiseless_losses": plots.NOISELESS_LOSSES,
    "algorithm1_claimed": plots.STYLES["worst"],
}


def draw_means(compared: Mapping[str, pd.DataFrame]) -> Figure:
    """Points to the best grid search, mean and 95 % interval over private places: profile -> its comparisons."""
    names = [row for row in ROWS if any((table.pairs.get(row, 0) > 0) for table in compared.values())]
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.36 * len(names)))
    shifts = np.linspace(-0.16, 0.16, len(compared)) if len(compared) > 1 else [0.0]
    for shift, (profile, table), style in zip(shifts, compared.items(), plots.SERIES, strict=False):
        for place, name in enumerate(names):
            if not table.pairs.get(name, 0):
                continue
            mean, low, high = table.loc[name, ["mean", "low", "high"]]
            look = plots.marks(style) | {"markerfacecolor": style["color"] if ROWS[name].covered else "white"}
            if mean < FAR:
                look["marker"] = "<"
                axis.annotate(f"{mean:.0f}", (FAR, place + shift), (5, 2), textcoords="offset points", fontsize=8)
            axis.plot([max(low, FAR), max(high, FAR)], [place + shift] * 2, color=style["color"], linewidth=1)
            axis.plot(max(mean, FAR), place + shift, markersize=7, **look)
        axis.plot([], [], label=DATA.get(profile, profile), **plots.marks(style))
    for title, colour in (("epsilon covers the choice of the rate", "0.5"), ("it does not", "white")):
        axis.plot([], [], "h", color="0.5", markerfacecolor=colour, label=title)
    axis.axvline(0, color="0.3", linewidth=1)
    axis.set(xlim=(FAR - 1, 6), xlabel="points of test accuracy to the best grid search (arrow: beyond the axis)")
    axis.set_yticks(range(len(names)), [ROWS[name].title for name in names])
    axis.invert_yaxis()
    axis.set_title("Of what epsilon covers, preset robust alone keeps up with the searches on both")
    plots.shared_legend(figure, [axis], ncols=4)
    return figure


def draw_rates(steps: pd.DataFrame) -> Figure:
    """The learned rates of the first data set at its smallest and largest budget; ``image_classification.rates``."""
    ends = [steps.epsilon.min(), steps.epsilon.max()]
    here = steps[steps.epsilon.isin(ends) & (steps.task == steps.task.iloc[0])]
    places = list(here.groupby(PLACE, sort=False))[:4]
    figure, axes = plt.subplots(-(-len(places) // 2), 2, figsize=(10, 5.6), sharex=True, sharey=True, squeeze=False)
    for axis, ((_, _, _, tuning, epsilon), found) in zip(axes.flat, places, strict=False):
        for row, name in RATES.items():
            band = found[found.row == row].groupby("step").eta.agg(["median", "min", "max"]).clip(lower=1e-9)
            style = plots.STYLES[name]
            axis.plot(band.index, band["median"], label=ROWS[row].title, markevery=0.2, markersize=4, **style)
            axis.fill_between(band.index, band["min"], band["max"], color=style["color"], alpha=0.15, linewidth=0)
        axis.set_yscale("log")
        axis.set_title(f"{TUNING_TITLES[tuning]}, {'no privacy' if np.isinf(epsilon) else f'epsilon = {epsilon:g}'}")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    for axis in axes[:, 0]:
        axis.set_ylabel("learning rate")
    title = "Noise in every direction holds D-Adaptation and Prodigy at their start"
    figure.suptitle(f"{title} ({data_set(here.task.iloc[0])})")
    plots.shared_legend(figure, axes[0, :1], ncols=4)
    return figure


def draw_gaps(gaps: pd.DataFrame) -> Figure:
    """Points to the grid search by tuning, the paper's and ours: mean and range over budgets of ``gaps``."""
    names = [row for row in ROWS if row in set(gaps.row) and (ROWS[row].paper or row == "hyfreedp_robust")]
    names.remove("grid")
    sources = list(dict.fromkeys(gaps.source))
    figure, axes = plt.subplots(1, gaps.tuning.nunique(), figsize=(10, 4.2), sharey=True, squeeze=False)
    for axis, (tuning, here) in zip(axes[0], gaps.groupby("tuning", sort=False), strict=True):
        for shift, source, style in zip(np.linspace(-0.22, 0.22, len(sources)), sources, plots.SERIES, strict=False):
            found = here[here.source == source].groupby("row").gap.agg(["mean", "min", "max"]).reindex(names)
            ends = [found["mean"] - found["min"], found["max"] - found["mean"]]
            look: dict[str, Any] = plots.marks(style) | {"label": DATA.get(source, source), "capsize": 2}
            axis.errorbar(found["mean"], np.arange(len(names)) + shift, xerr=ends, **look)
        axis.axvline(0, color="0.3", linewidth=1)
        axis.set(title=TUNING_TITLES[str(tuning)], xlabel="points to the grid search")
    axes[0, 0].set_yticks(range(len(names)), [ROWS[name].title for name in names])
    axes[0, 0].invert_yaxis()
    figure.suptitle("The paper's HyFreeDP ties with its grid; the same method falls behind ours")
    plots.shared_legend(figure, axes[0, :1], ncols=3)
    return figure


def draw_control(controls: Mapping[str, pd.DataFrame]) -> Figure:
    """The paper's method from several first rates, a panel per place: profile -> its ``control.compared``."""
    panels = [
        (place, here)
        for found in controls.values()
        for place, here in found[found.epsilon == found.epsilon.max()].groupby(CONTROL_PLACE[:-1], sort=False)
        if here.method.nunique() > 1
    ]
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3.6), sharex=True, sharey=True, squeeze=False)
    for axis, ((task, model, tuning), here) in zip(axes[0], panels, strict=True):
        for method, style in CONTROLS.items():
            of = here[here.method == method]
            axis.plot(of.first_rate, of.points, label=METHODS[method].title, **style)
        axis.axhline(0, color="0.3", linewidth=1)
        kind = "MLP" if model == "mlp" else "ViT"
        axis.set(xscale="log", xlabel="first rate", title=f"{data_set(task)}, {kind}\n{TUNING_TITLES[tuning]}")
    axes[0, 0].set_ylabel("points to the grid search")
    figure.suptitle("The first rate decides: even without noise on the losses it rises too slowly")
    plots.shared_legend(figure, axes[0, -1:], ncols=3)
    return figure
