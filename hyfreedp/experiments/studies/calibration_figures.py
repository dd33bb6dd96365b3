"""Figures and findings of notebook 06 on probabilities, see ``calibration``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.studies.calibration import PROBLEMS, WAYS, chosen

Array = NDArray[np.float64]
RULES = [plots.STYLES["robust"], plots.STYLES["best"]]  # normalised, flat
DRAWN: dict[tuple[str, str], dict[str, Any]] = {
    ("default", "none"): plots.STYLES["robust"],
    ("flat 1", "none"): plots.STYLES["best"],
    ("smoothing 0.1", "none"): plots.STYLES["alternative"],
    ("default", "slopes"): plots.STYLES["paper"],
}


def draw_mechanism(norms: Array, lengths: Mapping[str, Array], logits: Array, drifts: Mapping[str, Array]) -> Figure:
    """Two rules of clipping: what they leave of a gradient, and how they push a logit.

    Args:
        norms: of gradients, and ``lengths``, what each rule leaves of them, by its name.
        logits: at which ``drifts`` are the mean pushes, by the rule's name.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    for style, (name, length) in zip(RULES, lengths.items(), strict=True):
        left.plot(norms, length, label=name, **plots.line(style))
        right.plot(logits, drifts[name], **plots.line(style))
        rest = resting(logits, drifts[name])
        right.plot(rest, 0, markersize=8, **plots.marks(style))
        right.annotate(f"{rest:.1f}", (rest, 0), (6, 8), textcoords="offset points")
    right.axhline(0, color="0.3", linewidth=0.8)
    right.axvline(np.log(7 / 3), color="0.3", linestyle=":")
    left.set(title="A sure model still takes steps of length one", xscale="log", yscale="log")
    left.set(xlabel=r"gradient norm $\|g\|$", ylabel=r"length of what counts, $c\,\|g\|$")
    right.set(title="and 70/30 labels drift past the truth (dotted)")
    right.set(xlabel="logit", ylabel="mean push on the logit, per record")
    plots.shared_legend(figure, [left], ncols=2)
    return figure


def resting(logits: Array, drift: Array) -> float:
    """Where a falling drift is zero, between two of the logits."""
    return float(np.interp(0.0, -drift, logits))


def mechanism_findings(logits: Array, drifts: Mapping[str, Array]) -> list[str]:
    """Under :func:`draw_mechanism`: where each rule comes to rest, and what it loses there."""
    lines = []
    for name, drift in drifts.items():
        rest = resting(logits, drift)
        p = 1 / (1 + np.exp(-rest))
        loss = -0.7 * np.log(p) - 0.3 * np.log(1 - p)
        lines.append(f"{name}: rests at a logit of {rest:.1f}, probability {p:.3f}, log loss {loss:.2f} nats")
    return lines


def draw_study(rows: pd.DataFrame) -> Figure:
    """Log loss and calibration error of tested runs by problem, means over budgets and seeds.

    Args:
        rows: of ``calibration.record``.
    """
    means = _means(rows)
    names = [name for name in PROBLEMS if name in means.index.get_level_values("problem")]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for axis, column in zip(axes, ("log_loss", "calibration_error"), strict=True):
        for way, style in DRAWN.items():
            values = [means[column][(*way, name)] for name in names]
            axis.plot(values, range(len(names)), label=WAYS[way].replace("`", ""), **plots.marks(style))
    shares = chosen(rows, "test").groupby("problem").base_rate_loss.first()
    marks = {"linestyle": "none", "marker": "|", "markersize": 16, "color": "0.3"}
    axes[0].plot([shares[name] for name in names], range(len(names)), label="shares of the classes", **marks)
    axes[0].set(title="A temperature mends the log loss, and no label changes", xlabel="log loss (nats)", xscale="log")
    plots.log_ticks(axes[0].xaxis, (0.2, 0.5, 1, 2, 5))
    axes[0].set_yticks(range(len(names)), [PROBLEMS[name].title for name in names])
    axes[0].invert_yaxis()
    axes[1].set(title="and the calibration error", xlabel="expected calibration error")
    axes[1].set_xlim(left=0)
    plots.shared_legend(figure, axes, ncols=3)
    return figure


def _means(rows: pd.DataFrame) -> pd.DataFrame:
    keys = ["setting", "fit", "problem"]
    return chosen(rows, "test").groupby(keys)[["accuracy", "log_loss", "calibration_error"]].mean()


def study_findings(rows: pd.DataFrame) -> list[str]:
    """Under :func:`draw_study`."""
    means, here = _means(rows), chosen(rows, "test")
    as_it_is = means.loc["default", "none"]
    lines = []
    for way in list(DRAWN)[1:]:
        other = means.loc[way]
        ratio, points = other.log_loss / as_it_is.log_loss, 100 * (other.accuracy - as_it_is.accuracy)
        lines.append(
            f"{WAYS[way].replace('`', '')}: {ratio.min():.2f} to {ratio.max():.2f} times the log loss as it is, "
            f"calibration error {other.calibration_error.min():.2f} to {other.calibration_error.max():.2f} "
            f"(as it is {as_it_is.calibration_error.min():.2f} to {as_it_is.calibration_error.max():.2f}), "
            f"accuracy {points.min():+.1f} to {points.max():+.1f} points"
        )
    spent = here[(here.setting == "default") & (here.fit == "slopes")]
    cost = 100 * (spent.epsilon_spent / spent.epsilon - 1)
    return [*lines, f"the temperature costs {cost.min():.1f} to {cost.max():.1f} % of epsilon more"]
