"""Figures and findings of notebook 02 on the parabolas that probes see, see ``clouds``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import Verdict
from hyfreedp.experiments.studies.repeated_probes import Cloud

ORANGE, RED = plots.STYLES["line_search"]["color"], plots.STYLES["paper"]["color"]
PLACES = np.linspace(-1.5, 1.5, 61)  # along G, in units of h


def parabola(slope: float, curvature: float, distance: float) -> np.ndarray:
    """Change of the loss at ``PLACES`` along G, which is uphill for a positive slope b; ``distance`` is h."""
    return -slope * distance * PLACES + curvature * (distance * PLACES) ** 2 / 2


def draw_parabolas(cloud: Cloud, choices: dict[str, dict[str, float]], right: dict[str, float]) -> Figure:
    """Parabolas of both probes at three thresholds each, and the spread of b/a against the threshold.

    Args:
        cloud: of one batch.
        choices: of ``repeated_probes.threshold_choices``.
        right: of ``repeated_probes.right_multiples``.
    """
    figure, axes = plt.subplots(2, 4, figsize=(13, 6), width_ratios=[1, 1, 1, 1.4])
    for row, (probe, chosen) in zip(axes, choices.items(), strict=True):
        for axis, (name, multiple) in zip(row[:3], chosen.items(), strict=True):
            _draw_fits(axis, cloud, probe, multiple)
            symbol, place = ("$R_l$", 0) if probe == "losses" else ("$R_d$", 1)
            axis.set_title(f"{name}: {symbol} = {multiple * cloud.usual[place]:.2g}")
        row[0].set_ylabel(("three losses" if probe == "losses" else "contrasts") + "\nchange of the loss (nats)")
        _draw_spread(row[3], cloud, probe, right[probe])
    plots.shared_legend(figure, [axes[1, 3]], ncols=5)
    return figure


def _draw_fits(axis: Axes, cloud: Cloud, probe: str, multiple: float) -> None:
    """The first sixty parabolas at one threshold, and the exact one."""
    some = cloud.fits[(cloud.fits.probe == probe) & np.isclose(cloud.fits.multiple, multiple)].head(60)
    curves = [parabola(fit.slope, fit.curvature, cloud.distance) for fit in some.itertuples()]
    lines = [np.column_stack([PLACES, curve]) for curve in curves]
    axis.add_collection(LineCollection(lines, colors=ORANGE, alpha=0.25, linewidths=0.8))
    truth = parabola(cloud.exact.slope, cloud.exact.curvature, cloud.distance)
    axis.plot(PLACES, truth, color="0.1", linestyle="--", linewidth=2)
    margin = np.ptp(truth)
    axis.set_ylim(truth.min() - 0.6 * margin, truth.max() + 0.3 * margin)
    axis.set_xlabel("distance along $G$ (h)")


def _draw_spread(axis: Axes, cloud: Cloud, probe: str, right: float) -> None:
    """Quantiles of b/a in units of h against the threshold, and the thresholds to know."""
    spread, distance = cloud.spread[cloud.spread.probe == probe], cloud.distance
    for low, high, alpha, share in (("q5", "q95", 0.2, "nine tenths"), ("q25", "q75", 0.4, "half")):
        band: dict[str, Any] = {"color": ORANGE, "alpha": alpha, "linewidth": 0, "label": f"{share} of the rates"}
        axis.fill_between(spread.multiple, spread[low] / distance, spread[high] / distance, **band)
    axis.plot(spread.multiple, spread.q50 / distance, color=ORANGE, label="median")
    axis.axhline(cloud.exact.minimizer / distance, color="0.1", linestyle="--", label="exact")
    if probe == "losses":
        for value, label, dashes in ((1.0, "$L$", (1, 1)), (cloud.sum_rule / cloud.usual[0], "sum", (6, 2))):
            axis.axvline(value, color="0.2", linewidth=1.2, linestyle=(0, dashes))
            place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            axis.annotate(label, (value, 0.03), xytext=(3, 0), **place)
    axis.axvline(right, color=RED, linewidth=1.5, linestyle="-.", label="right")
    reach = 4 * abs(cloud.exact.minimizer) / distance
    axis.set(xscale="log", ylim=(-reach, reach), ylabel="$b/a$ (h)")
    plots.log_ticks(axis.xaxis, [0.3, 1, 3, 10])
    axis.set_xlabel("$R_l$ / mean loss" if probe == "losses" else "$R_d$ and $R_c$ / 0.8 quantile")


def spread_findings(table: pd.DataFrame, seeds: int) -> list[str]:
    """From ``repeated_probes.spread_table`` over ``seeds`` runs."""
    return [
        f"{row.probe}, {row.threshold} ({row.multiple:.2g} times): {row.near:.0%} of the rates within a factor of two "
        f"of the exact one ({row.near_low:.0%} to {row.near_high:.0%} over {seeds} seed{'s' * (seeds > 1)}), "
        f"{row.concave:.0%} of the parabolas concave."
        for row in table.itertuples()
    ]


def rate_findings(rates: pd.DataFrame, stages: Sequence[int], seeds: int) -> list[str]:
    """From ``clouds.rate_table`` over ``seeds`` runs: what clipping alone does at each step."""
    off = rates[["mean_loss", "sum_of_losses", "contrasts"]].div(rates.exact, axis=0).groupby(rates.step)
    low, high = off.min(), off.max()
    return [
        f"Step {stage}, clipping alone: contrasts give {low.contrasts[stage]:.2f} to {high.contrasts[stage]:.2f} times "
        f"the exact rate, three losses {low.sum_of_losses[stage]:.2f} to {high.sum_of_losses[stage]:.2f} times at "
        f"their sum and {low.mean_loss[stage]:.2f} to {high.mean_loss[stage]:.2f} times at R_l = L "
        f"({seeds} seed{'s' * (seeds > 1)})."
        for stage in stages
    ]


def verdicts(table: pd.DataFrame) -> list[Verdict]:
    """On the paper's two thresholds for its three losses, from ``repeated_probes.spread_table``."""
    near = table[table.probe == "losses"].set_index("threshold").near
    (mean_loss,), (total,) = (near[near.index.str.contains(name)] for name in ("R_l = L", "sum of three losses"))
    best = near.max()
    return [
        Verdict(
            "Three losses clipped at R_l = L, or at their sum, give the rate",
            "reproduced" if max(mean_loss, total) > 0.5 else "not at this scale",
            f"within a factor of two in {mean_loss:.0%} of the probes at R_l = L, {total:.0%} at the sum, "
            f"{best:.0%} at the best threshold",
        )
    ]
