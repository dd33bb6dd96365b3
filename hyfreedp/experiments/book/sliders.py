"""Figures with sliders, without a kernel: Python computes all values, and a script in the page draws them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from IPython.display import HTML
from numpy.typing import ArrayLike

# Shown where scripts do not run, as on GitHub; the static figure above makes the same point.
ABSENT = "Sliders stand here where a page may run scripts: on the course's site, or once you have run this cell."


def sliders(
    name: str,
    x: Sequence[float],
    curves: Mapping[str, tuple[dict[str, Any], ArrayLike]],
    dials: Mapping[str, Sequence[float]],
    **choices: Any,
) -> HTML:
    """A figure with a slider for each of ``dials``, and a last one to read off the curves at a point of the x axis.

    Args:
        name: of this figure, unique on a page.
        x: points of the x axis.
        curves: by label, a style of ``plots.STYLES`` and values, which broadcast to (*lengths of dials, length of x).
        dials: by label, the positions of each slider.
        choices: ``x_label`` and ``y_label``; ``log_x``, ``log_y``; ``least``, the index of the curve whose lowest point
            is marked; ``zoom``: the y axis ends at so many times that lowest value.
    """
    shape = (*map(len, dials.values()), len(x))
    drawn = [
        {"label": label, "color": style["color"], "line": style["linestyle"], "values": _short(values)}
        | {"shape": (1,) * (len(shape) - np.ndim(values)) + np.shape(values)}
        for label, (style, values) in curves.items()
        if np.broadcast_to(values, shape).size  # raises ValueError if shapes do not fit
    ]
    places = [{"label": label, "values": _short(values)} for label, values in dials.items()]
    data = {"name": f"sliders-{name}", "x": _short(x), "dials": places, "curves": drawn} | choices
    script = files(__package__).joinpath("sliders.js").read_text(encoding="utf-8").strip()
    payload = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return HTML(f'<div id="{data["name"]}"><em>{ABSENT}</em></div>\n<script>\n({script})({payload});\n</script>')


def private_step() -> HTML:
    """An animation of one private step, with a slider for each of its parts; ``step.js`` computes everything."""
    script = files(__package__).joinpath("step.js").read_text(encoding="utf-8")
    return HTML(f'<div class="private-step"><em>{ABSENT}</em></div>\n<script>\n{script}</script>')


def _short(values: ArrayLike) -> list[float]:
    return [float(f"{value:.4g}") for value in np.ravel(values)]
