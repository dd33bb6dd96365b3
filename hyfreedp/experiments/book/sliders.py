"""Figures with sliders that need no kernel: Python computes values for all places, a script in the page draws them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from IPython.display import HTML
from numpy.typing import ArrayLike

# Where scripts do not run, as on a code host; the static figure above has the point, too.
ABSENT = "Sliders stand here where a page may run scripts: on the course's site, or once you have run this cell."


def sliders(
    name: str,
    x: Sequence[float],
    curves: Mapping[str, tuple[dict[str, Any], ArrayLike]],
    dials: Mapping[str, Sequence[float]],
    **choices: Any,
) -> HTML:
    """A figure with a slider for each of ``dials``, and a last one that reads the curves off along the axis.

    Args:
        name: of this figure, unique on a page.
        x: places of the axis.
        curves: style (of ``plots.STYLES``) and values of each; these broadcast to (a length per dial, length of ``x``).
        dials: the places of each slider.
        choices: ``x_label`` and ``y_label``; ``log_x``, ``log_y``; ``least``, the index of the curve whose lowest point
            is marked; ``zoom``: the vertical axis ends at so many times that lowest value.
    """
    shape = (*map(len, dials.values()), len(x))
    drawn = [
        {"label": label, "color": style["color"], "line": style["linestyle"], "values": _short(values)}
        | {"shape": (1,) * (len(shape) - np.ndim(values)) + np.shape(values)}
        for label, (style, values) in curves.items()
        if np.broadcast_to(values, shape).size  # or says why not
    ]
    places = [{"label": label, "values": _short(values)} for label, values in dials.items()]
    data = {"name": f"sliders-{name}", "x": _short(x), "dials": places, "curves": drawn} | choices
    script = files(__package__).joinpath("sliders.js").read_text(encoding="utf-8").strip()
    payload = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return HTML(f'<div id="{data["name"]}"><em>{ABSENT}</em></div>\n<script>\n({script})({payload});\n</script>')


def private_step() -> HTML:
    """The moving picture of one private step, with a slider for each of its parts; ``step.js`` computes it all."""
    script = files(__package__).joinpath("step.js").read_text(encoding="utf-8")
    return HTML(f'<div class="private-step"><em>{ABSENT}</em></div>\n<script>\n{script}</script>')


def _short(values: ArrayLike) -> list[float]:
    return [float(f"{value:.4g}") for value in np.ravel(values)]
