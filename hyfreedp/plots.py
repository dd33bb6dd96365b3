"""Figures of a run, drawn from ``optimizer.history`` and so from released values only."""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def look(history: Iterable[Mapping[str, Any]]) -> "Figure":
    """The votes of a run with preset "robust", one panel per look, from ``optimizer.history``.

    Each margin is drawn between the two rates that it compares, with error bars of two standard deviations of its
    noise. Above zero, the higher rate was preferred. ValueError if the history has no look.
    """
    from matplotlib.figure import Figure

    rows = [row for row in history if "margins" in row]
    if not rows:
        raise ValueError("history must have a step with a look: it comes with preset='robust', from the second step on")
    lines = 1 + (len(rows) > 3)
    columns = math.ceil(len(rows) / lines)
    figure = Figure(figsize=(4.5 * columns, 3.2 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for axes, row in zip(panels, rows, strict=False):  # of five looks, as of two runs, one panel stays empty
        rates = row["rates"]
        between = [math.sqrt(high * low) for high, low in pairwise(rates)]
        voted = [(rate, margin) for rate, margin in zip(between, row["margins"], strict=True) if margin is not None]
        x, y = zip(*voted, strict=True)
        axes.errorbar(x, y, 2 * row["margin_std"], fmt="o", capsize=3, label="margin, ± 2 sd of noise")
        axes.plot([rates[-1], rates[0]], [0, 0], alpha=0)  # makes the axis show the whole ladder of rates
        axes.axhline(0, color="0.5", linewidth=0.8)
        axes.axvline(row["chosen"], color="C1", label=f"chosen {row['chosen']:.2g}")
        axes.axvline(row["eta_next"], color="C1", linestyle=":", label=f"next {row['eta_next']:.2g}")
        axes.set(xscale="log", xlabel="learning rate", title=f"after {row['step']} step{'s' * (row['step'] != 1)}")
        axes.legend(fontsize="small")
    figure.supylabel("mean vote for the higher rate", fontsize="medium")
    return figure
