"""Figures and findings of notebook 04 on whole runs, from ``landscape.all_bands``."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import Verdict
from hyfreedp.experiments.studies.landscape_figures import STYLES, TITLES


def draw_bands(bands: pd.DataFrame) -> Figure:
    """Spread of b/a over the noise of one probe along a run, and how often a and b have the right signs.

    Args:
        bands: of ``landscape.all_bands``.
    """
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.5))
    for axis, (kind, title) in zip(axes, TITLES.items(), strict=False):
        _draw_band(axis, bands[bands.probe == kind], STYLES[kind]["color"])
        axis.set(title=title, xlabel="step", ylabel="b/a (units of the run's rate)", ylim=(-1e4, 1e4))
    for kind, title in TITLES.items():
        percent = 100 * bands[bands.probe == kind].set_index("step").right_signs
        draw_range(axes[2], percent, title, STYLES[kind])
    axes[2].axhline(25, color="0.3", linestyle=":", label="coin flips")
    axes[2].set(title="a and b with the right signs", xlabel="step", ylabel="share (%)", ylim=(0, 104))
    axes[2].legend(fontsize="small")
    plots.shared_legend(figure, axes[:1], ncols=5, fontsize="small")
    return figure


def _draw_band(axis: Axes, rows: pd.DataFrame, color: str) -> None:
    """Medians over the runs of the quantiles of b/a, and b/a of the raw losses."""
    middle = rows.groupby("step")[["q5", "q25", "q50", "q75", "q95"]].median()
    axis.fill_between(middle.index, middle.q5, middle.q95, color=color, alpha=0.2, label="nine tenths of the rates")
    axis.fill_between(middle.index, middle.q25, middle.q75, color=color, alpha=0.4, label="half of the rates")
    axis.plot(middle.index, middle.q50, color=color, label="median")
    axis.plot(rows.step, rows.exact, ".", color="black", markersize=4, label="b/a of raw losses (not private)")
    axis.axhline(1, color="0.3", linestyle=":", label="the run's rate")
    axis.set_yscale("symlog", linthresh=1)


def draw_range(axis: Axes, values: pd.Series, label: str, style: dict[str, Any]) -> None:
    """Mean and range over the runs; the index of ``values`` is the step."""
    by_step = values.groupby(level="step")
    axis.plot(by_step.mean(), label=label, **style | {"markersize": 4})
    low, high = by_step.min(), by_step.max()
    axis.fill_between(low.index, low, high, color=style["color"], alpha=0.15)


def band_findings(bands: pd.DataFrame) -> list[str]:
    """Of ``landscape.all_bands``, a line per probe."""
    return [
        f"{TITLES[str(kind)]}: {100 * share:.0f} % of the draws have a and b with the right signs, over all steps"
        for kind, share in bands.groupby("probe").right_signs.mean().items()
    ]


def verdicts(bands: pd.DataFrame, batch_size: int) -> list[Verdict]:
    """On Fig. "lr loss curve", from ``landscape.all_bands``: half-way from chance (25 %) to certainty decides."""
    share = 100 * bands[bands.probe == "losses"].right_signs.mean()
    return [
        Verdict(
            'Fig. "lr loss curve": noise on the losses hardly changes the parabola',
            "reproduced" if share > 62.5 else "not at this scale",
            f"at B = {batch_size:,} slope and curvature have the right signs in {share:.0f} % of the draws, where 25 % "
            "is chance",
        )
    ]


def bands_text(bands: pd.DataFrame) -> str:
    """What :func:`draw_bands` shows."""
    means = 100 * bands.groupby("probe").right_signs.mean()
    return (
        f"**What to see.** With three losses slope and curvature have the right signs in {means.losses:.0f} % of the "
        f"draws, with contrasts in {means.contrasts:.0f} % (25 % by chance). Where the band crosses zero, no rule can "
        "do without a guard or an average over probes."
    )


def draw_same_batch(bands: pd.DataFrame) -> Figure:
    """Slope along the update direction, on the batch that made it and on all other training records."""
    figure, axis = plt.subplots(figsize=(6.5, 3.6))
    contrasts = bands[bands.probe == "contrasts"].set_index("step")
    for column, label, style in (
        ("slope_batch", "on the step's own batch", plots.SERIES[0]),
        ("slope_rest", "on the other training records", plots.SERIES[1]),
        ("slope_std", "standard deviation of the probe's noise", plots.SERIES[4]),
    ):
        draw_range(axis, contrasts[column], label, style)
    axis.axhline(0, color="0.3", linewidth=0.8)
    axis.set_yscale("symlog", linthresh=0.01)
    axis.set(
        xlabel="step", ylabel="slope over one probe distance (nats)", title="Contrasts: where the slope is measured"
    )
    axis.legend(fontsize="small")
    return figure


def _same_batch_means(bands: pd.DataFrame) -> tuple[float, pd.Series]:
    """Share of steps, in percent, with a larger slope on the own batch; means over the second half of the run."""
    contrasts = bands[bands.probe == "contrasts"]
    larger = 100 * (contrasts.slope_batch > contrasts.slope_rest).mean()
    columns = ["slope_batch", "slope_rest", "curvature_batch", "curvature_rest"]
    return larger, contrasts[contrasts.step > contrasts.step.max() / 2][columns].mean()


def same_batch_findings(bands: pd.DataFrame) -> list[str]:
    """Under :func:`draw_same_batch`."""
    larger, late = _same_batch_means(bands)
    return [
        f"the slope is larger on the step's own batch at {larger:.0f} % of the steps looked at",
        f"second half of the run: mean slope {late.slope_batch:.4f} on the batch, {late.slope_rest:.4f} on the other "
        "records",
    ]


def same_batch_text(bands: pd.DataFrame) -> str:
    """What :func:`draw_same_batch` shows."""
    larger, late = _same_batch_means(bands)
    ratio = late.slope_batch / late.curvature_batch * late.curvature_rest / late.slope_rest
    return (
        f"**What to see.** At {larger:.0f} % of the steps the slope is larger on the batch that made the direction. "
        f"Over the second half of the run its mean is {late.slope_batch:.4f} nats on the batch and "
        f"{late.slope_rest:.4f} on the other records, that of the curvature {late.curvature_batch:.4f} and "
        f"{late.curvature_rest:.4f}; so b/a is {ratio:.2f} times what the other records would say. That is a bias of "
        "the line search, which no budget removes."
    )
