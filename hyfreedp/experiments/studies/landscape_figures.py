"""Figures, tables and findings of notebook 04 on real runs, from the tables of ``landscape``."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.studies.landscape import FIVE_POINTS

# Two kinds of probes, and the method whose run shows each.
METHODS = {"losses": "paper_anchored", "contrasts": "line_search"}
TITLES = {"losses": "three losses", "contrasts": "contrasts"}
STYLES = {"losses": plots.STYLES["paper"], "contrasts": plots.STYLES["line_search"]}
FINE = np.linspace(-1.25, 1.25, 101)
RAW: dict[str, Any] = {"color": "0.45", "linewidth": 3, "alpha": 0.6}
THIN: dict[str, Any] = {"linewidth": 0.5, "alpha": 0.35}


# -- loss curves at some steps -----------------------------------------------------------------------------------------


def at_step(curves: pd.DataFrame, step: int, kind: str, draw: int | None = None) -> pd.DataFrame:
    """The rows of ``landscape.loss_curves`` of one kind at one step, in the order of x."""
    rows = curves[(curves.step == step) & (curves.kind == kind)]
    return rows if draw is None else rows[rows.draw == draw]


def coefficients(curves: pd.DataFrame, step: int, kind: str) -> pd.DataFrame:
    """Slope, curvature and intercept, one row per draw."""
    return at_step(curves, step, kind).pivot(index="draw", columns="x", values="value")


def of_run(curves: pd.DataFrame, step: int) -> pd.Series:
    """Distance, rates, threshold and noise of the run at one step."""
    return at_step(curves, step, "run").set_index("x").value


def parabola(row: pd.Series, x: np.ndarray) -> np.ndarray:
    """A row of :func:`coefficients` at x; from contrasts, which leave out the height, the change from x = 0."""
    height = 0.0 if np.isnan(row.intercept) else row.intercept
    return np.asarray(height - row.slope * x + row.curvature * x**2 / 2)


def draw_losses(curves: pd.DataFrame) -> Figure:
    """Raw curve, clipped points and their parabolas above, noised parabolas below, a column per step.

    Args:
        curves: of ``landscape.loss_curves`` for a run that probes losses.
    """
    steps = sorted(curves.step.unique())
    figure, axes = plt.subplots(2, len(steps), figsize=(11, 5.6), sharex=True, squeeze=False)
    for (top, bottom), step in zip(axes.T, steps, strict=True):
        raw = at_step(curves, step, "raw")
        for axis in (top, bottom):
            axis.plot(raw.x.astype(float), raw.value, label="raw loss, 41 points", **RAW)
        _draw_clipped(top, curves, step)
        _draw_noised(bottom, curves, step)
        run = of_run(curves, step)
        top.set_title(f"step {step}: $R_l$ = {run.threshold:.2g} nats")
        bottom.set_title(f"noise of a point: {run.noise:.2g} nats")
        bottom.set_xlabel("distance along -G (units of h)")
    axes[0, 0].set_ylabel("mean loss (nats)")
    axes[1, 0].set_ylabel("mean loss (nats)")
    plots.shared_legend(figure, axes.flat, ncols=4, fontsize="small")
    return figure


def _draw_clipped(axis: Axes, curves: pd.DataFrame, step: int) -> None:
    """Five raw and five clipped points with their parabolas."""
    exact, clipped = (coefficients(curves, step, name).iloc[0] for name in ("exact fit", "clipped fit"))
    points = at_step(curves, step, "points").value
    axis.plot(FIVE_POINTS, points, "o", color="black", markersize=5, label="raw, five points")
    axis.plot(FINE, parabola(exact, FINE), color="black", linewidth=1, label="parabola through raw")
    axis.plot(FIVE_POINTS, at_step(curves, step, "clipped").value, label="clipped", **plots.marks(STYLES["losses"]))
    axis.plot(FINE, parabola(clipped, FINE), label="parabola through clipped", **plots.line(STYLES["losses"]))


def _draw_noised(axis: Axes, curves: pd.DataFrame, step: int) -> None:
    """The parabolas of all draws; of the first also its points and its b/a, where that is on the axis."""
    noised = coefficients(curves, step, "noised fit")
    color = STYLES["losses"]["color"]
    for draw, row in noised.iterrows():
        label = "parabolas, other noise" if draw == 0 else None
        axis.plot(FINE, parabola(row, FINE), color=color, label=label, **THIN)
    one, first = at_step(curves, step, "noised", draw=0).value, noised.iloc[0]
    axis.plot(FIVE_POINTS, one, "D", color="black", markersize=5, label="clipped and noised, one draw")
    axis.plot(FINE, parabola(first, FINE), "--", color="black", label="its parabola")
    bottom_at = first.slope / first.curvature
    if abs(bottom_at) <= FINE[-1]:
        axis.axvline(bottom_at, color="black", linestyle=":", label="its b/a")


def draw_contrasts(curves: pd.DataFrame) -> Figure:
    """Change of the raw loss, and the parabolas of noised contrasts, a panel per step.

    Args:
        curves: of ``landscape.loss_curves`` for a run that probes contrasts.
    """
    steps = sorted(curves.step.unique())
    figure, axes = plt.subplots(1, len(steps), figsize=(11, 3.4), squeeze=False)
    for axis, step in zip(axes.flat, steps, strict=True):
        raw = at_step(curves, step, "raw")
        x = raw.x.astype(float).to_numpy()
        axis.plot(x, raw.value - np.interp(0.0, x, raw.value), label="raw loss minus L(w)", **RAW)
        for draw, row in coefficients(curves, step, "noised fit").iterrows():
            label = "from noised contrasts" if draw == 0 else None
            axis.plot(FINE, parabola(row, FINE), color=STYLES["contrasts"]["color"], label=label, **THIN)
        clipped = coefficients(curves, step, "clipped fit").iloc[0]
        axis.plot(FINE, parabola(clipped, FINE), "--", color="black", label="from clipped contrasts")
        run = of_run(curves, step)
        for name, marker in (("before", "|"), ("after", "v")):
            mark: dict[str, Any] = {"color": "black", "markersize": 9, "clip_on": False}
            height = axis.get_ylim()[0]
            axis.plot(run[name] / run.distance, height, marker, label=f"the run's rate {name}", **mark)
        axis.set_title(f"step {step}: h = {run.distance:.2g}")
        axis.set_xlabel("distance along -G (units of h)")
    axes[0, 0].set_ylabel("change of the mean loss (nats)")
    plots.shared_legend(figure, axes[0, :1], ncols=5, fontsize="small")
    return figure


def fit_table(curves: pd.DataFrame) -> pd.DataFrame:
    """What clipping and noise do to slope and curvature, in nats over one probe distance, a row per step.

    Args:
        curves: of ``landscape.loss_curves``.
    """
    rows = []
    for step in sorted(curves.step.unique()):
        exact, clipped = (coefficients(curves, step, name).iloc[0] for name in ("exact fit", "clipped fit"))
        noised = coefficients(curves, step, "noised fit")
        run = of_run(curves, step)
        right = (noised.slope * exact.slope > 0) & (noised.curvature * exact.curvature > 0)
        rows.append(
            {
                "step": step,
                "h": run.distance,
                "threshold": run.threshold,
                "b raw": exact.slope,
                "b clipped": clipped.slope,
                "b noise": noised.slope.std(),
                "a raw": exact.curvature,
                "a clipped": clipped.curvature,
                "a noise": noised.curvature.std(),
                "b/a raw": exact.slope / exact.curvature,
                "b/a clipped": clipped.slope / clipped.curvature,
                "right signs": right.mean(),
            }
        )
    return pd.DataFrame(rows)


def noise_share(fits: pd.DataFrame) -> pd.Series:
    """Noise of the slope in units of the clipped slope, of rows of :func:`fit_table`."""
    return fits["b noise"] / fits["b clipped"].abs()


def fit_findings(fits: pd.DataFrame) -> list[str]:
    """Of :func:`fit_table`, a line per step."""
    return [
        f"step {step}: noise of the slope is {share:.2g} times the clipped slope; slope and curvature have the right "
        f"signs, those of the raw ones, in {100 * right:.0f} % of the draws"
        for step, share, right in zip(fits.step, noise_share(fits), fits["right signs"], strict=True)
    ]


def _right(fits: pd.DataFrame) -> str:
    """Range, in percent, of the share of right signs."""
    return f"{100 * fits['right signs'].min():.0f} to {100 * fits['right signs'].max():.0f} %"


def losses_text(fits: pd.DataFrame, batch_size: int) -> str:
    """What :func:`draw_losses` shows."""
    kept, share = fits["b clipped"] / fits["b raw"], noise_share(fits)
    return (
        f"**What to see.** *Clipping* (upper row). Where $R_l$ lies above all losses, clipped points lie a percent or "
        f"so off the raw ones, along the same parabola: released sums are divided by the expected batch size "
        f"{batch_size:,}, the raw mean by the batch's own. Where it does not, the highest losses are cut, and most so "
        f"at the end where they rise: the slope becomes {kept.min():.2f} to {kept.max():.2f} times the raw one, and "
        "the bottom moves (columns b/a of the table). *Noise* (lower row). It is small against the loss and large "
        f"against its change: in the slope it is {share.min():.1f} to {share.max():.0f} times the slope that clipping "
        f"leaves, and the signs are right in {_right(fits)} of the draws."
    )


def contrasts_text(fits: pd.DataFrame, losses: pd.DataFrame) -> str:
    """What :func:`draw_contrasts` shows, beside the table of three losses."""
    kept, share = fits["b clipped"] / fits["b raw"], noise_share(fits)
    return (
        f"**What to see.** The bundles are narrow: noise is {share.min():.2f} to {share.max():.1f} times the clipped "
        f"slope (three losses: {noise_share(losses).min():.1f} to {noise_share(losses).max():.0f}), and the signs are "
        f"right in {_right(fits)} of the draws. But they are flatter than the curve: clipping keeps "
        f"{100 * kept.min():.0f} to {100 * kept.max():.0f} % of the slope. A fifth of the samples lies beyond each "
        "threshold by design, and late in a run these few carry most of the change. The rate needs only the ratio b/a, "
        "which loses less (last columns but one): a bias bought for much less noise, as in notebook 01."
    )


# -- more points -------------------------------------------------------------------------------------------------------


def price_findings(price: pd.DataFrame) -> list[str]:
    """Of ``landscape.price_of_points``."""
    return [
        f"{row.points} points: {row.forwards} forward passes, slope noise {row.slope_noise:.2f}, curvature noise "
        f"{row.curvature_noise:.2f} (three points: 1)"
        for row in price.itertuples()
    ]


def price_text(price: pd.DataFrame) -> str:
    """What five points cost."""
    five = 100 * (price.set_index("points").loc[5] - 1)
    return (
        f"**What to see.** At equal privacy five points give a slope with {five.slope_noise:.0f} % *more* noise and a "
        f"curvature with {five.curvature_noise:.0f} % more, for twice the forward passes. The outermost points carry "
        "nearly all the information; each other point only shares the budget."
    )
