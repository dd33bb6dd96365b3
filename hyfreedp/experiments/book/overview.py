"""Fig. "overview", redrawn: one step from batch to next learning rate, by a probe or by a vote, and who sets what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from hyfreedp import PRESETS
from hyfreedp.clipping import AutomaticClipping
from hyfreedp.votes import OPENING, PEAK, REVIEWS, vote_steps

WIDTH, HEIGHT = 100.0, 83.0  # tenths of an inch: a box 10 wide is an inch wide
BORDER = 58.0  # raw values stay left of it
RAW, PRIVATE, INK, NOISE, LEARNED = "#E3C08F", "#EDF3F8", "0.1", "0.2", "#B3261E"

# How a box looks says who sets the numbers in it.
PLAIN: dict[str, Any] = {"facecolor": "white", "edgecolor": INK, "linewidth": 1.0}
BY_BUDGET: dict[str, Any] = {"facecolor": NOISE, "edgecolor": NOISE, "linewidth": 1.0}
BY_DEFAULT: dict[str, Any] = {"facecolor": "white", "edgecolor": INK, "linewidth": 1.6, "linestyle": (0, (2, 1.5))}
BY_LEARNING: dict[str, Any] = {"facecolor": "white", "edgecolor": LEARNED, "linewidth": 3.0}

LANES = {"step": 69.5, "paper": 49.5, "robust": 29.5}


def draw() -> Figure:
    """The diagram, 10 inches wide, no text below 9 points; constants are those of their presets."""
    figure, axes = plt.subplots(figsize=(WIDTH / 10, HEIGHT / 10), layout="constrained")
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.axis("off")
    _zones(axes)
    _gradient_lane(axes)
    _probe_lane(axes)
    _vote_lane(axes)
    _hyperparameters(axes)
    return figure


def findings(steps: int) -> list[str]:
    """What each preset asks and learns in a run of ``steps`` steps."""
    paper, robust = PRESETS["paper"], PRESETS["robust"]
    return [
        f"Preset paper: probes losses every {paper.interval} steps, gamma = {paper.gamma:g}; eta and R_l learned, eta "
        f"from {paper.initial_learning_rate:g} on",
        f"Preset robust: votes at steps {', '.join(map(str, vote_steps(steps)))} of {steps}, gamma = "
        f"{robust.gamma:g}; eta from {PEAK / math.sqrt(steps):g} on, with {robust.decay} decay",
    ]


def _zones(axes: Axes) -> None:
    top, bottom = HEIGHT - 0.5, 14.0
    for left, right, colour, text in (
        (0.5, BORDER, RAW, "RAW: from the records, never shown"),
        (BORDER, WIDTH - 0.5, PRIVATE, "PRIVATE: noised, free to use"),
    ):
        axes.add_patch(Rectangle((left, bottom), right - left, top - bottom, facecolor=colour, edgecolor="none"))
        _text(axes, (left + right) / 2, top - 2.2, text, fontsize=11, fontweight="bold")
    axes.plot([BORDER, BORDER], [bottom, top], color=INK, linewidth=1.2, linestyle=(0, (6, 3)))


def _gradient_lane(axes: Axes) -> None:
    y, height = LANES["step"], 10.0
    _text(axes, 1.8, y + 7, "At every step", ha="left", fontweight="bold")
    stability = AutomaticClipping().stability
    boxes = [
        (1.5, 12.0, "Poisson batch\nrate $q = B/N$", BY_DEFAULT),
        (13.7, 22.2, "forward\nlosses $L_i$", PLAIN),
        (23.9, 33.9, "backward\ngradients $g_i$", PLAIN),
        (35.6, 50.0, f"normalise, sum\n$\\Sigma_i\\; g_i\\,/\\,(\\|g_i\\| + {stability:g})$", PLAIN),
        (52.0, 64.0, "noise\n$+\\;\\sigma_g\\, \\mathcal{N}(0, I)$", BY_BUDGET),
        (67.0, 80.5, "any optimizer\ndirection $G$", BY_DEFAULT),
        (84.0, 96.5, "update\n$w \\leftarrow w - \\eta\\, G$", PLAIN),
    ]
    _row(axes, y, height, boxes, labels={4: "$\\div B$"})
    # The new rate moves this very step, and those up to the next probe or vote.
    chip = (84.0, 59.0, 96.5, 62.0)
    _box(axes, chip, "new $\\eta$", BY_LEARNING)
    _arrow(axes, (90.2, LANES["paper"]), (90.2, chip[1]), color=LEARNED)
    _arrow(axes, (90.2, chip[3]), (90.2, y - height / 2), color=LEARNED)
    axes.plot([96.5, 98.2, 98.2], [LANES["robust"], LANES["robust"], 60.5], color=LEARNED, linewidth=1.6)
    _arrow(axes, (98.2, 60.5), (96.5, 60.5), color=LEARNED)
    # The new weights are those of the next step.
    above = y + height / 2 + 3.2
    axes.plot([90.2, 90.2, 17.9], [y + height / 2, above, above], color=INK, linewidth=1.2)
    _arrow(axes, (17.9, above), (17.9, y + height / 2))
    _text(axes, 73.5, above - 1.7, "the next step starts from the new weights")
    # G goes back to the records: that is where the probes look.
    turn, left = 60.5, 13.3
    axes.plot([74, 74, left, left], [y - height / 2, turn, turn, LANES["paper"]], color=INK, linewidth=1.2)
    _text(axes, 40, turn + 1.4, "probe: look along $G$, on the same batch")
    _arrow(axes, (left, LANES["paper"]), (15.5, LANES["paper"]))


def _probe_lane(axes: Axes) -> None:
    boxes = [
        (15.5, 31.0, "forward at $w \\pm hG$,\n$h = \\eta$:\nlosses $L_{-}, L_0, L_{+}$", PLAIN),
        (34.0, 50.0, "clip each loss\n$\\min(L_{k,i},\\, R_l)$", PLAIN),
        (52.0, 64.0, "sum\n$+\\;\\sigma_l R_l\\, \\mathcal{N}(0, I_3)$", BY_BUDGET),
        (67.0, 81.5, "parabola through\n$\\tilde L_{-}, \\tilde L_0, \\tilde L_{+}$:\nslope $b$, curvature $a$", PLAIN),
        (84.0, 96.5, "$b/a$\nif $a, b > 0$, and\nnear the old $\\eta$", PLAIN),
    ]
    floor = _lane(axes, "paper", f"every {PRESETS['paper'].interval} steps", boxes)
    # The releases also set the next threshold.
    below = floor - 2.6
    axes.plot([74.5, 74.5, 42], [floor, below, below], color=LEARNED, linewidth=1.6)
    _arrow(axes, (42, below), (42, floor), color=LEARNED)
    _box(axes, (52.0, below - 1.5, 64.0, below + 1.5), "next $R_l$", BY_LEARNING)
    _text(axes, 75.5, below, "sum of the released losses", ha="left")


def _vote_lane(axes: Axes) -> None:
    when = f"after {OPENING} steps, then\n{len(REVIEWS)} times up to\n{REVIEWS[-1]:.0%} of the run"
    boxes = [
        (15.5, 31.0, "same batch, forward\nat an average $\\bar w$ of\nthe weights so far:\nlosses $\\bar L_i$", PLAIN),
        (34.0, 50.0, "one vote per record\n$\\mathrm{sign}(\\bar L_i - L_i)$:\nat most 1, whatever\nthe losses", PLAIN),
        (52.0, 64.0, "sum\n$+\\;\\sigma_l\\, \\mathcal{N}(0, 1)$", BY_BUDGET),
        (67.0, 81.5, "margin of $w$ over $\\bar w$:\nlost if too low", PLAIN),
        (84.0, 96.5, "if lost: go back\nand brake $\\eta$;\nelse go on", PLAIN),
    ]
    floor = _lane(axes, "robust", when, boxes)
    # Weights are private, so the records may be looked at with their average; the rate starts from public numbers.
    below = floor - 5.2
    average = (60.0, below - 2.4, 81.5, below + 2.4)
    axes.plot([average[0], 23.2], [below, below], color=INK, linewidth=1.2)
    _arrow(axes, (23.2, below), (23.2, floor))
    _box(axes, average, "average $\\bar w$ of the\nweights so far", PLAIN)
    _box(axes, (84.0, below - 2.4, 96.5, below + 2.4), f"start ${PEAK:g}/\\sqrt{{T}}$,\nlinear decay", BY_DEFAULT)
    _arrow(axes, (90.2, below + 2.4), (90.2, floor))


def _lane(axes: Axes, name: str, when: str, boxes: Sequence[tuple[float, float, str, dict[str, Any]]]) -> float:
    """A preset's way from the records to the rate; the height of the floor of its boxes."""
    y, height = LANES[name], 12.5
    _text(axes, 1.8, y, f"Preset\n“{name}”", ha="left", fontweight="bold", va="bottom")
    _text(axes, 1.8, y - 0.8, when, ha="left", va="top")
    _row(axes, y, height, boxes, labels={2: "$\\div B$"})
    return y - height / 2


def _hyperparameters(axes: Axes) -> None:
    paper, robust = PRESETS["paper"], PRESETS["robust"]
    columns: list[tuple[float, float, str, str, dict[str, Any]]] = [
        (
            0.5,
            34.5,
            "DP-related: budget and constants",
            "the accountant finds $\\sigma_g$, $\\sigma_l$ for $(\\varepsilon, \\delta)$,\n"
            f"$q$, $T$, $K$ or votes; $\\gamma = {paper.gamma:g}$ (paper), ${robust.gamma:g}$ (robust)",
            BY_BUDGET,
        ),
        (
            36.0,
            67.5,
            "Data-independent: left at defaults",
            "$B$, $T$, $\\beta_1$, $\\beta_2$, weight decay, start of $\\eta$;\n$R_g$ is scaled out by normalising",
            BY_DEFAULT,
        ),
        (
            69.0,
            99.5,
            "Data-dependent: learned, privately",
            f"paper: $\\eta$, from {paper.initial_learning_rate:g} on, and $R_l$;\nrobust: when to brake $\\eta$",
            BY_LEARNING,
        ),
    ]
    # From the accountant to the noise.
    axes.plot([30, 30, 56], [12, 13, 13], color=NOISE, linewidth=1.6)
    _arrow(axes, (56, 13), (56, LANES["robust"] - 6.25), color=NOISE)
    for left, right, name, text, style in columns:
        _box(axes, (left, 1.0, right, 12.0), "", style)
        options: dict[str, Any] = {"color": _ink(style), "linespacing": 1.35}
        _text(axes, (left + right) / 2, 9.5, name, fontweight="bold", **options)
        _text(axes, (left + right) / 2, 5.0, text, **options)


def _row(
    axes: Axes,
    y: float,
    height: float,
    boxes: Sequence[tuple[float, float, str, dict[str, Any]]],
    labels: dict[int, str],
) -> None:
    """Boxes (left, right, text, style) side by side, an arrow from each to the next with an optional label."""
    for left, right, text, style in boxes:
        _box(axes, (left, y - height / 2, right, y + height / 2), text, style)
    for index, (box, following) in enumerate(pairwise(boxes)):
        _arrow(axes, (box[1], y), (following[0], y))
        _text(axes, (box[1] + following[0]) / 2, y + 1.8, labels.get(index, ""))


def _box(axes: Axes, corners: tuple[float, float, float, float], text: str, style: dict[str, Any]) -> None:
    left, bottom, right, top = corners
    axes.add_patch(
        FancyBboxPatch(
            (left, bottom), right - left, top - bottom, boxstyle="round,pad=0,rounding_size=0.8", zorder=3, **style
        )
    )
    _text(axes, (left + right) / 2, (bottom + top) / 2, text, color=_ink(style), linespacing=1.35)


def _ink(style: dict[str, Any]) -> str:
    return "white" if style is BY_BUDGET else INK


def _text(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "color": INK, "zorder": 4}
    axes.text(x, y, text, **(style | options))


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK) -> None:
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 10}
    axes.annotate("", end, start, arrowprops=style, zorder=2)
