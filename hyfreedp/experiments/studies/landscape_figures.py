"""The figure of notebook 04, from the tables of ``landscape``."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hyfreedp import QuadraticFit
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.studies.landscape import FIVE_POINTS, fit_table, fits_at

FINE = np.linspace(-1.25, 1.25, 101)
RAW: dict[str, Any] = {"color": "0.45", "linewidth": 3, "alpha": 0.6, "label": "raw loss"}
STYLE = plots.STYLES["paper"]


def parabola(fit: QuadraticFit) -> np.ndarray:
    """A fit in x = distance / h, at ``FINE``."""
    return np.asarray(fit.intercept - fit.slope * FINE + fit.curvature * FINE**2 / 2)


def draw(curves: pd.DataFrame, repeats: int, seed: int) -> Figure:
    """Raw curve, clipped points and their parabolas above, noised parabolas below, a column per step.

    Args:
        curves: of ``landscape.loss_curves``.
        repeats, seed: of the noise.
    """
    steps = sorted(curves.step.unique())
    figure, axes = plt.subplots(2, len(steps), figsize=(11, 6.4), sharex=True, squeeze=False)
    right = fit_table(curves, repeats, seed).set_index("step")["right signs"]
    for (top, bottom), step in zip(axes.T, steps, strict=True):
        here = curves[curves.step == step]
        values = {str(kind): rows for kind, rows in here.groupby("kind")}
        for axis in (top, bottom):
            axis.plot(values["raw"].x, values["raw"].value, **RAW)
        raw, clipped, noised = fits_at(curves, step, repeats, seed)
        top.plot(FIVE_POINTS, values["points"].value, "o", color="black", markersize=5, label="raw, five points")
        top.plot(FINE, parabola(raw), color="black", linewidth=1, label="parabola through raw")
        top.plot(FIVE_POINTS, values["clipped"].value, label="clipped", **plots.marks(STYLE))
        top.plot(FINE, parabola(clipped), label="parabola through clipped", **plots.line(STYLE))
        fits = [QuadraticFit(*row) for row in noised]
        for index, fit in enumerate(fits):
            label = "parabolas through clipped and noised" if index == 0 else None
            bottom.plot(FINE, parabola(fit), color=STYLE["color"], linewidth=0.5, alpha=0.35, label=label)
        bottom.plot(FINE, parabola(fits[0]), "--", color="black", label="one of them")
        if abs(fits[0].minimizer) <= FINE[-1]:
            bottom.axvline(fits[0].minimizer, color="black", linestyle=":", label="its b/a")
        top.set_title(f"step {step}: $R_l$ = {here.threshold.iloc[0]:.2g} nats")
        bottom.set_title(f"noise {here.noise.iloc[0]:.2g} nats:\nright signs in {right[step]:.0%}")
        bottom.set_xlabel("along the update (h)")
    figure.suptitle("Clipping moves the parabola (above), noise replaces it (below)", fontsize="large")
    for axis in axes[:, 0]:
        axis.set_ylabel("mean loss (nats)")
    plots.shared_legend(figure, axes.flat, ncols=4, fontsize="small")
    return figure
