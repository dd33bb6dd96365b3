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
    """The rows of ``landscape.curves`` of one kind at one step, in the order of x."""
    rows = curves[(curves.step == step) & (curves.kind == kind)]
    return rows if draw is None else rows[rows.draw == draw]


def coefficients(curves: pd.DataFrame, step: int, kind: str) -> pd.DataFrame:
    """Slope, curvature and intercept, one row per draw."""
    return at_step(curves, step, kind).pivot(index="draw", columns="x", values="value")


def parabola(row: pd.Series, x: np.ndarray) -> np.ndarray:
    """A row of :func:`coefficients` at x; from contrasts, which leave out the height, the change from x = 0."""
    height = 0.0 if np.isnan(row.intercept) else row.intercept
    return np.asarray(height - row.slope * x + row.curvature * x**2 / 2)


def draw_losses(curves: pd.DataFrame) -> Figure:
    """Raw curve, clipped points and their parabolas above, noised parabolas below, a column per step.

    Args:
        curves: of ``landscape.curves`` for a run that probes losses.
    """
    steps = sorted(curves.step.unique())
    figure, axes = plt.subplots(2, len(steps), figsize=(11, 5.6), sharex=True, squeeze=False)
    for (top, bottom), step in zip(axes.T, steps, strict=True):
        raw = at_step(curves, step, "raw")
        for axis in (top, bottom):
            axis.plot(raw.x.astype(float), raw.value, label="raw loss, 41 points", **RAW)
        _draw_clipped(top, curves, step)
        _draw_noised(bottom, curves, step)
        top.set_title(f"step {step}")
        bottom.set_xlabel("distance along -G (units of h)")
    axes[0, 0].set_ylabel("mean loss (nats)")
    axes[1, 0].set_ylabel("mean loss (nats)")
    plots.shared_legend(figure, axes.flat, ncols=4, fontsize="small")
    return figure


def _draw_clipped(axis: Axes, curves: pd.DataFrame, step: int) -> None:
    """Five raw and five clipped points with their parabolas."""
    exact, clipped = (coefficients(curves, step, name).iloc[0] for name in ("exact fit", "clipped fit"))
    blue, green = plots.SERIES[0], plots.SERIES[2]
    points = at_step(curves, step, "points").value
    axis.plot(FIVE_POINTS, points, "o", color="black", markersize=5, label="raw, five points")
    axis.plot(FINE, parabola(exact, FINE), label="parabola through raw", **plots.line(green))
    axis.plot(FIVE_POINTS, at_step(curves, step, "clipped").value, "s", color=blue["color"], label="clipped")
    axis.plot(FINE, parabola(clipped, FINE), label="parabola through clipped", **plots.line(blue))


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
        curves: of ``landscape.curves`` for a run that probes contrasts.
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
        at = at_step(curves, step, "eta").set_index("x").value
        for name, marker in (("before", "|"), ("after", "v")):
            mark: dict[str, Any] = {"color": "black", "markersize": 9, "clip_on": False}
            height = axis.get_ylim()[0]
            axis.plot(at[name] / at.distance, height, marker, label=f"the run's rate {name}", **mark)
        axis.set_title(f"step {step}")
        axis.set_xlabel("distance along -G (units of h)")
    axes[0, 0].set_ylabel("change of the mean loss (nats)")
    plots.shared_legend(figure, axes[0, :1], ncols=5, fontsize="small")
    return figure


def fit_table(curves: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """What clipping and noise do to slope and curvature, a row per probe and step of ``landscape.curves``."""
    rows = []
    for kind, table in curves.items():
        for step in sorted(table.step.unique()):
            exact, clipped = (coefficients(table, step, name).iloc[0] for name in ("exact fit", "clipped fit"))
            noised = coefficients(table, step, "noised fit")
            at = at_step(table, step, "eta").set_index("x").value
            right = (noised.slope * exact.slope > 0) & (noised.curvature * exact.curvature > 0)
            rows.append(
                {
                    "probe": kind,
                    "step": step,
                    "exact b/a (h)": exact.slope / exact.curvature,
                    "clipped b/a (h)": clipped.slope / clipped.curvature,
                    "b, exact": exact.slope,
                    "b, clipped": clipped.slope,
                    "b, sd of noise": noised.slope.std(),
                    "a, exact": exact.curvature,
                    "a, clipped": clipped.curvature,
                    "a, sd of noise": noised.curvature.std(),
                    "right signs (share)": right.mean(),
                    "eta before": at.before,
                    "eta after": at.after,
                }
            )
    return pd.DataFrame(rows)


def noise_share(fits: pd.DataFrame) -> pd.Series:
    """Noise of the slope in units of the clipped slope, of rows of :func:`fit_table`."""
    return fits["b, sd of noise"] / fits["b, clipped"].abs()


def fit_findings(fits: pd.DataFrame, probe: str) -> list[str]:
    """Of :func:`fit_table`, a line per step of one probe."""
    chosen = fits[fits.probe == probe]
    digits = 1 if probe == "losses" else 2
    return [
        f"step {step}: noise of the slope is {share:.{digits}f} times the clipped slope; slope and curvature have the "
        f"right signs in {100 * right:.0f} % of the draws"
        for step, share, right in zip(chosen.step, noise_share(chosen), chosen["right signs (share)"], strict=True)
    ]


def _kept_and_right(fits: pd.DataFrame, probe: str) -> tuple[str, str]:
    """Ranges, in percent, of the share of the slope that clipping keeps and of right signs."""
    chosen = fits[fits.probe == probe]
    kept, right = chosen["b, clipped"] / chosen["b, exact"], chosen["right signs (share)"]
    kept_range, right_range = (f"{100 * x.min():.0f} to {100 * x.max():.0f} %" for x in (kept, right))
    return kept_range, right_range


def losses_text(fits: pd.DataFrame, batch_size: int) -> str:
    """What :func:`draw_losses` shows."""
    kept, right = _kept_and_right(fits, "losses")
    share = noise_share(fits[fits.probe == "losses"])
    return (
        f"**What to see.** A parabola through the five raw points follows the raw curve closely. Clipping keeps {kept} "
        "of its slope: nearly all while $R_l$ is above the losses, hardly any once $R_l$ has fallen below those of "
        "the few hard samples that still change. Where clipped points lie *above* raw ones, the Poisson batch was "
        "larger than usual: released sums are divided by the expected batch size B, the raw mean by the batch's own. "
        "That scales slope and curvature alike and leaves b/a as it is. Noise is another matter: the standard "
        "deviation of the slope's noise is "
        f"{share.min():.1f} to {share.max():.1f} times the clipped slope, and slope and curvature have the right signs "
        f"in {right} of the draws (25 % by chance). The paper's claim holds where the loss changes much over the "
        f"probed distance and batches are large; here, with B = {batch_size:,}, noise that is small against the *loss* "
        "is large against its *change*."
    )


def contrasts_text(fits: pd.DataFrame) -> str:
    """What :func:`draw_contrasts` shows."""
    kept, right = _kept_and_right(fits, "contrasts")
    return (
        f"**What to see.** The bundles are narrow, and slope and curvature have the right signs in {right} of the "
        f"draws (three losses: {_kept_and_right(fits, 'losses')[1]}). But they are flatter than the curve: clipping "
        f"keeps {kept} of the slope. A fifth of the samples lies beyond each threshold by design, and late in a run "
        "these few carry most of the change. The rate needs only the ratio b/a, which mostly suffers less (columns 3 "
        "and 4 of the table): a bias bought for much less noise, as in notebook 01."
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
