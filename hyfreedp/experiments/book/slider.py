"""One page with three sliders: threshold, batch size and noise, their bias and noise, the parabolas and the rates.

Everything on it follows from few numbers. Clipping makes one parabola of each probe at each threshold; noise moves it
by draws that are proportional to the threshold, to sigma_l and to 1/B. So the page holds the clipped parabolas at some
thresholds, between which it interpolates, and one set of draws.
"""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd

from hyfreedp import QuadraticFit

PROBES = ("losses", "contrasts")


def page_data(
    errors: pd.DataFrame,
    clipped: pd.DataFrame,
    fits: pd.DataFrame,
    *,
    usual: tuple[float, float, float],
    marks: dict[str, float],
    exact: QuadraticFit,
    distance: float,
    batch_size: float,
    noise_multiplier: float,
    setting: str,
    drawn: int = 100,
) -> dict[str, Any]:
    """What the page shows, as plain numbers of six digits. Rates are in units of h, losses in nats.

    Args:
        errors: of :func:`~hyfreedp.experiments.studies.bias_variance.batch_errors`, one row per threshold.
        clipped: of :func:`~hyfreedp.experiments.studies.clouds.clipped_fits`, at these thresholds.
        fits: of :func:`~hyfreedp.experiments.studies.clouds.clouds`, whose multiple nearest to 1 gives the draws.
        usual: (R_l, R_d, R_c) at multiple 1.
        marks: names and values of R_l to mark and to jump to.
        exact: parabola through the raw mean losses.
        batch_size: B of the run, where its slider starts.
        noise_multiplier: sigma_l of three losses, likewise.
        setting: one sentence on data, batch and noise.
        drawn: how many parabolas of each probe the page has.

    Raises:
        ValueError: the tables are not of the same thresholds.
    """
    multiples = errors.threshold.to_numpy() / usual[0]
    drawn_at = float(fits.multiple.iloc[np.abs(np.log(fits.multiple.to_numpy())).argmin()])
    units = {"slope": distance, "curvature": distance**2}
    positions, noise = [], {}
    for probe in PROBES:
        of_probe = clipped[clipped.probe == probe].set_index("multiple")[list(units)]
        centre = of_probe[np.isclose(of_probe.index, drawn_at)]
        cloud = fits[(fits.probe == probe) & np.isclose(fits.multiple, drawn_at)].head(drawn)
        if centre.empty or cloud.empty:
            raise ValueError(f"clipped and fits must have the same thresholds, {drawn_at:.6g} is missing")
        noise[probe] = [
            [_short((row[name] - centre.iloc[0][name]) * unit / drawn_at) for name, unit in units.items()]
            for _, row in cloud.iterrows()
        ]
    for multiple, bias in zip(multiples, errors.bias, strict=True):
        position: dict[str, Any] = {"multiple": _short(multiple), "bias": _short(bias)}
        for probe in PROBES:
            row = clipped[(clipped.probe == probe) & np.isclose(clipped.multiple, multiple)]
            if len(row) != 1:
                raise ValueError(f"clipped must have every threshold of errors, {multiple:.6g} is missing")
            position[probe] = [_short(row.iloc[0][name] * unit) for name, unit in units.items()]
        positions.append(position)
    return {
        "setting": setting,
        "usual": [_short(value) for value in usual],
        "marks": [[name, _short(value)] for name, value in marks.items()],
        "exact": [_short(exact.slope * distance), _short(exact.curvature * distance**2)],
        "batch_size": batch_size,
        "sigma": _short(noise_multiplier),
        "noise": noise,
        "positions": positions,
    }


def page(data: dict[str, Any]) -> str:
    """The page as text. It needs no server and no network, and works by keyboard and on a phone."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    parts = {"STYLE": _read("slider.css"), "SCRIPT": _read("slider.js"), "DATA": text}
    return re.sub("@([A-Z]+)@", lambda place: parts[place[1]], _read("slider.html"))


def frame(text: str) -> dict[str, str]:
    """A page within a notebook, for ``display(..., raw=True)``: it may run its script and reach nothing else."""
    style = "width: 100%; height: 46rem; border: 1px solid #999"
    title = "From the clipping threshold to the learning rate"
    html = f'<iframe title="{title}" sandbox="allow-scripts" style="{style}" srcdoc="{escape(text)}"></iframe>'
    return {"text/html": html, "text/plain": "an interactive page, which a browser shows"}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
