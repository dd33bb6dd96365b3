"""Fig. "overview", redrawn: one step from batch to next learning rate, by a probe or by a look, and who sets what."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from hyfreedp import PRESETS
from hyfreedp.gradients import AutomaticClipping
from hyfreedp.look import FIRST, LADDER, SHARES, START, look_steps

WIDTH, HEIGHT = 100.0, 83.0  # tenths of an inch: a box 10 wide is an inch wide
BORDER = 58.0  # raw values stay left of it
RAW, PRIVATE, INK, NOISE, LEARNED = "#E3C08F", "#EDF3F8", "0.1", "0.2", "#B3261E"

# How a box looks says who sets the numbers in it.
PLAIN: dict[str, Any] = {"facecolor": "white", "edgecolor": INK, "linewidth": 1.0}
BY_BUDGET: dict[str, Any] = {"facecolor": NOISE, "edgecolor": NOISE, "linewidth": 1.0}
BY_DEFAULT: dict[str, Any] = {"facecolor": "white", "edgecolor": INK, "linewidth": 1.6, "linestyle": (0, (2, 1.5))}
BY_LEARNING: dict[str, Any] = {"facecolor": "white", "edgecolor": LEARNED, "linewidth": 3.0}

LANES = {"step": 68.3, "paper": 49.5, "robust": 29.5}
HEIGHT_OF_A_BOX = 12.5
COLUMNS = ((15.5, 31.0), (34.0, 50.0), (52.0, 64.0), (67.0, 81.5), (84.0, 96.5))


def draw() -> Figure:
    """The diagram, 10 inches wide, no text below 9 points; constants are those of their presets."""
    figure, axes = plt.subplots(figsize=(WIDTH / 10, HEIGHT / 10), layout="constrained")
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.axis("off")
    top, bottom = HEIGHT - 0.5, 14.0
    for left, right, colour, text in (
        (0.5, BORDER, RAW, "RAW: from the records, never shown"),
        (BORDER, WIDTH - 0.5, PRIVATE, "PRIVATE: noised, free to use"),
    ):
        axes.add_patch(Rectangle((left, bottom), right - left, top - bottom, facecolor=colour, edgecolor="none"))
        _text(axes, (left + right) / 2, top - 2.2, text, fontsize=11, fontweight="bold")
    axes.plot([BORDER, BORDER], [bottom, top], color=INK, linewidth=1.2, linestyle=(0, (6, 3)))
    stability = AutomaticClipping().stability
    _lane(
        axes,
        "step",
        "At every\nstep",
        "",
        "Poisson batch,\nrate $q = B/N$;\nforward: losses $L_i$",
        f"gradients $g_i$,\nnormalised, summed\n$\\Sigma_i\\; g_i\\,/\\,(\\|g_i\\| + {stability:g})$",
        "noise\n$+\\;\\sigma_g\\, \\mathcal{N}(0, I)$",
        "any optimizer:\ndirection $G$",
        "update\n$w \\leftarrow w - \\eta\\, G$",
        by_default=(0, 3),
    )
    _lane(
        axes,
        "paper",
        "Preset\n“paper”",
        f"every {PRESETS['paper'].interval} steps",
        "forward at $w \\pm hG$,\n$h = \\eta$:\nlosses $L_{-}, L_0, L_{+}$",
        "clip each loss\n$\\min(L_{k,i},\\, R_l)$",
        "sum\n$+\\;\\sigma_l R_l\\, \\mathcal{N}(0, I_3)$",
        "parabola through\n$\\tilde L_{-}, \\tilde L_0, \\tilde L_{+}$:\nslope $b$, curvature $a$",
        "$b/a$\nif $a, b > 0$, and\nnear the old $\\eta$",
    )
    _lane(
        axes,
        "robust",
        "Preset\n“robust”",
        f"after {FIRST} step, at\n{', '.join(str(Fraction(share)) for share in SHARES)}\nof the run",
        f"same batch, forward\nat some of {len(LADDER)} rates $\\eta_j$\nalong the run so far:\nlosses $L_{{j,i}}$",
        "a vote on each two:\n$\\mathrm{sign}(L_{j+1,i} - L_{j,i})$\nat most 1, whatever\nthe losses",
        "sums, one by one\n$+\\;\\sigma_l\\, \\mathcal{N}(0, 1)$",
        "the rate to which\nmargins lead",
        "mean with start\nand looks; weights\nback to its place",
    )
    _ways_between_lanes(axes)
    _hyperparameters(axes)
    return figure


def findings(steps: int) -> list[str]:
    """What each preset asks and learns in a run of ``steps`` steps."""
    paper, robust = PRESETS["paper"], PRESETS["robust"]
    return [
        f"Preset paper: probes losses every {paper.interval} steps, gamma = {paper.gamma:g}; eta and R_l learned, eta "
        f"from {paper.initial_learning_rate:g} on",
        f"Preset robust: looks at steps {', '.join(map(str, look_steps(steps)))} of {steps}, gamma = "
        f"{robust.gamma:g}; eta from a public start on, with {robust.decay} decay",
    ]


def _lane(axes: Axes, name: str, title: str, when: str, *texts: str, by_default: Sequence[int] = ()) -> None:
    """A row of boxes with an arrow from each to the next; noise is added in the third."""
    y = LANES[name]
    _text(axes, 1.8, y, title, ha="left", fontweight="bold", va="bottom")
    _text(axes, 1.8, y - 0.8, when, ha="left", va="top")
    for place, ((left, right), text) in enumerate(zip(COLUMNS, texts, strict=True)):
        style = BY_BUDGET if place == 2 else BY_DEFAULT if place in by_default else PLAIN
        _box(axes, (left, y - HEIGHT_OF_A_BOX / 2, right, y + HEIGHT_OF_A_BOX / 2), text, style)
        if place:
            _arrow(axes, (COLUMNS[place - 1][1], y), (left, y))
    _text(axes, (COLUMNS[2][1] + COLUMNS[3][0]) / 2, y + 1.8, "$\\div B$")


def _ways_between_lanes(axes: Axes) -> None:
    half = HEIGHT_OF_A_BOX / 2
    step, paper, robust = LANES.values()
    # The new rate moves this very step, and those up to the next probe or look.
    _box(axes, (84.0, 58.0, 96.5, 61.0), "new $\\eta$", BY_LEARNING)
    _arrow(axes, (90.2, paper), (90.2, 58.0), color=LEARNED)
    _arrow(axes, (90.2, 61.0), (90.2, step - half), color=LEARNED)
    _path(axes, (96.5, robust), (98.2, robust), (98.2, 59.5), (96.5, 59.5), color=LEARNED)
    # The new weights are those of the next step; G goes back to the records: that is where the probes look.
    above = step + half + 2.0
    _path(axes, (90.2, step + half), (90.2, above), (23.2, above), (23.2, step + half))
    _text(axes, 73.5, above + 1.0, "the next step starts from the new weights")
    _path(axes, (74, step - half), (74, 59.5), (13.3, 59.5), (13.3, paper), (15.5, paper))
    _text(axes, 37, 60.9, "probe: look along $G$, on the same batch")
    # The releases also set the next threshold.
    below = paper - half - 2.6
    _path(axes, (74.5, paper - half), (74.5, below), (42, below), (42, paper - half), color=LEARNED)
    _box(axes, (52.0, below - 1.5, 64.0, below + 1.5), "next $R_l$", BY_LEARNING)
    _text(axes, 75.5, below, "sum of the released losses", ha="left")
    # Weights are private, so the records may be looked at anywhere on the ray; the rate starts from public numbers.
    below = robust - half - 5.2
    _path(axes, (60, below), (23.2, below), (23.2, robust - half))
    _box(axes, (60.0, below - 2.4, 81.5, below + 2.4), "ray from $w_0$ through $w$,\nand public noise", PLAIN)
    ends = f"start ${START:g}/\\sqrt{{nT}}$,\naverage in the end"
    _box(axes, (84.0, below - 2.4, 96.5, below + 2.4), ends, BY_DEFAULT)
    _arrow(axes, (90.2, below + 2.4), (90.2, robust - half))


def _hyperparameters(axes: Axes) -> None:
    paper, robust = PRESETS["paper"], PRESETS["robust"]
    budget = "the accountant finds $\\sigma_g$, $\\sigma_l$ for $(\\varepsilon, \\delta)$,\n"
    budget += f"$q$, $T$, $K$ or looks; $\\gamma = {paper.gamma:g}$ (paper), ${robust.gamma:g}$ (robust)"
    defaults = "$B$, $T$, $\\beta_1$, $\\beta_2$, weight decay, start of $\\eta$;\n$R_g$ is scaled out by normalising"
    learned = f"paper: $\\eta$, from {paper.initial_learning_rate:g} on, and $R_l$;\nrobust: $\\eta$, by looks"
    columns: list[tuple[float, float, str, str, dict[str, Any]]] = [
        (0.5, 34.5, "DP-related: budget and constants", budget, BY_BUDGET),
        (36.0, 67.5, "Data-independent: left at defaults", defaults, BY_DEFAULT),
        (69.0, 99.5, "Data-dependent: learned, privately", learned, BY_LEARNING),
    ]
    trunk, boxes = (COLUMNS[1][1] + COLUMNS[2][0]) / 2, COLUMNS[2][0]
    for y in LANES.values():  # from the accountant to all three noises
        _path(axes, (30, 12), (30, 13), (trunk, 13), (trunk, y - 4), (boxes, y - 4), color=NOISE)
    for left, right, name, text, style in columns:
        _box(axes, (left, 1.0, right, 12.0), "", style)
        options: dict[str, Any] = {"color": _ink(style), "linespacing": 1.35}
        _text(axes, (left + right) / 2, 9.5, name, fontweight="bold", **options)
        _text(axes, (left + right) / 2, 5.0, text, **options)


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


def _path(axes: Axes, *corners: tuple[float, float], color: str = INK) -> None:
    """A line from corner to corner, with an arrow at its end."""
    axes.plot(*zip(*corners[:-1], strict=True), color=color, linewidth=1.2)
    _arrow(axes, corners[-2], corners[-1], color)
