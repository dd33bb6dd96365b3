"""One page with one slider: the threshold, its bias and noise, the parabolas behind it and the rates they give."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd

from hyfreedp import QuadraticFit


def page_data(
    errors: pd.DataFrame,
    fits: pd.DataFrame,
    spread: pd.DataFrame,
    *,
    usual: tuple[float, float, float],
    marks: dict[str, float],
    exact: QuadraticFit,
    distance: float,
    setting: str,
    drawn: int = 60,
) -> dict[str, Any]:
    """What the page shows, as plain numbers of six digits. Rates are in units of h, losses in nats.

    Args:
        errors: of :func:`~hyfreedp.experiments.studies.bias_variance.batch_errors`, one row per slider position.
        fits: of :func:`~hyfreedp.experiments.studies.clouds.clouds`, its multiples being the slider positions.
        spread: of :func:`~hyfreedp.experiments.studies.clouds.eta_spread`.
        usual: (R_l, R_d, R_c) at multiple 1.
        marks: names and values of R_l to mark; the first is labelled at the bottom, the others at the top.
        exact: parabola through the raw mean losses.
        setting: one sentence on data, batch and noise.
        drawn: how many parabolas of each cloud the page holds.

    Raises:
        ValueError: the three tables are not of the same thresholds.
    """
    multiples = errors.threshold.to_numpy() / usual[0]
    positions = []
    for index, multiple in enumerate(multiples):
        row = errors.iloc[index]
        position: dict[str, Any] = {
            "multiple": _short(multiple),
            "thresholds": [_short(multiple * value) for value in usual],
            "bias": _short(row.bias),
            "noise": _short(row.noise),
            "total": _short(row.rmse),
        }
        for probe in ("losses", "contrasts"):
            cloud = fits[(fits.probe == probe) & np.isclose(fits.multiple, multiple)]
            of_eta = spread[(spread.probe == probe) & np.isclose(spread.multiple, multiple)]
            if cloud.empty or len(of_eta) != 1:
                raise ValueError(f"fits and spread must have every threshold of errors, {multiple:.6g} is missing")
            summary = of_eta.iloc[0]
            first = cloud.head(drawn)
            position[probe] = {
                "fits": [
                    [_short(slope * distance), _short(curvature * distance**2)]
                    for slope, curvature in zip(first.slope, first.curvature, strict=True)
                ],
                "quantiles": [_short(summary[name] / distance) for name in ("q5", "q25", "q50", "q75", "q95")],
                "near": _short(summary.near),
                "concave": _short(summary.concave),
                "uphill": _short(summary.uphill),
            }
        positions.append(position)
    return {
        "setting": setting,
        "usual": [_short(value) for value in usual],
        "marks": [[name, _short(value)] for name, value in marks.items()],
        "exact": [_short(exact.slope * distance), _short(exact.curvature * distance**2)],
        "positions": positions,
    }


def page(data: dict[str, Any]) -> str:
    """The page as text. It needs no server and no network, and works by keyboard."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    parts = {"STYLE": _read("slider.css"), "SCRIPT": _read("slider.js"), "DATA": text}
    return re.sub("@([A-Z]+)@", lambda place: parts[place[1]], _read("slider.html"))


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
