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
    """Spread of b/a over the noise of one probe along a run, and how often a and b have the signs of the raw ones.

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
    same = 100 * bands[bands.probe == "contrasts"].set_index("step").right_signs_losses
    draw_range(axes[2], same, "three losses in the run of the contrasts", plots.STYLES["reference"])
    axes[2].axhline(25, color="0.3", linestyle="--", label="coin flips")
    axes[2].set(title="right signs of a and b", xlabel="step", ylabel="share (%)", ylim=(0, 104))
    plots.shared_legend(figure, [axes[0], axes[2]], ncols=4, fontsize="small")
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
    """Of ``landscape.all_bands``, a line per probe and run."""
    return [
        f"{name}: {share:.0f} % of the draws have a and b with the signs of the raw ones, over all steps and runs"
        for name, share in _right_signs(bands).items()
    ]


def _right_signs(bands: pd.DataFrame) -> dict[str, float]:
    """Shares of right signs over all steps and runs, in percent."""
    means = 100 * bands.groupby("probe")[["right_signs", "right_signs_losses"]].mean()
    shares = {title: means.right_signs[kind] for kind, title in TITLES.items()}
    return shares | {"three losses in the run of the contrasts": means.right_signs_losses["contrasts"]}


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
    losses, contrasts, same = _right_signs(bands).values()
    return (
        f"**What to see.** Over all steps and runs the signs are right in {losses:.0f} % of the draws with three "
        f"losses and in {contrasts:.0f} % with contrasts (25 % is chance). At the weights, distances and price of the "
        f"contrasts' run, three losses would reach {same:.0f} %: it is the probe, not the run. Where the "
        "band crosses zero, even the direction of the rate is open: a rule needs a guard, or an average over probes. "
        "The dots far off the band are no noise: where the curve is straight, a is nearly zero and b/a is huge, with "
        "either sign."
    )


def draw_same_batch(bands: pd.DataFrame) -> Figure:
    """Slope along the update direction, on the batch that made it and on all other training records."""
    figure, axis = plt.subplots(figsize=(8, 4.4))
    contrasts = bands[bands.probe == "contrasts"].set_index("step")
    _, late = _same_batch_means(bands)
    half = (contrasts.index.max() / 2, contrasts.index.max())
    for column, label, style in (
        ("slope_batch", "on the step's own batch", STYLES["contrasts"]),
        ("slope_rest", "on the other training records", plots.STYLES["reference"]),
        ("slope_std", "standard deviation of the probe's noise", plots.STYLES["worst"]),
    ):
        draw_range(axis, contrasts[column], label, style)
        if column in late:
            name = f"mean over the second half: {late[column]:.2g}"
            axis.plot(half, [late[column]] * 2, color=style["color"], linewidth=4, alpha=0.6, label=name)
    axis.axhline(0, color="0.3", linewidth=0.8)
    axis.set_yscale("symlog", linthresh=0.01)
    axis.set(
        xlabel="step", ylabel="slope over one probe distance (nats)", title="Contrasts: where the slope is measured"
    )
    plots.shared_legend(figure, [axis], ncols=2, fontsize="small")
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
        f"Over the second half of the run, where it lies far above the noise (grey), its mean is "
        f"{late.slope_batch:.2g} nats there and {late.slope_rest:.2g} on the other records, that of the curvature "
        f"{late.curvature_batch:.2g} and {late.curvature_rest:.2g}: b/a is {ratio:.1f} times what the other records "
        "would say."
    )
