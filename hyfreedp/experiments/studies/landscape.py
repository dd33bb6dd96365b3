"""The loss along the update direction of a real run, raw and as private probes see it (notebook 04).

Everything computed from raw losses here is NOT private. It shows what a run never sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from hyfreedp import QuadraticFit, fit_quadratic
from hyfreedp.accounting.split import SQUARED_L2_SENSITIVITY
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run, one_thread
from hyfreedp.experiments.studies.clouds import visits
from hyfreedp.privatize import loss_noise_std, privatize_loss

FIVE_POINTS = (-1.0, -0.5, 0.0, 0.5, 1.0)  # in units of h: where a run probes, and two points more


def loss_curves(*, spec: dict[str, Any], stages: list[float], grid: list[float], reach: float) -> pd.DataFrame:
    """Loss curves of one run at some of its probe steps, on the step's own batch. The run itself is not disturbed.

    Threshold and noise are the run's own at that step, the noise that of as many points at the price of three.

    Args:
        spec: fields of the run's :class:`~hyfreedp.experiments.runs.cells.Spec`; its method searches the rate.
        stages: shares of the run in [0, 1]; for each, the nearest step with a probe is taken.
        grid: points x in units of h, for the raw curve.
        reach: h in units of the run's rate; Algorithm 1 looks at the rate itself.

    Returns:
        One row per step, ``kind`` and ``x``, with the mean loss at w - x h G as ``value``. Kinds: "raw" on the grid,
        "points" and "clipped" at ``FIVE_POINTS``. In each row the step's ``distance`` h, ``threshold`` R_l, and
        ``noise``, the standard deviation of the noise that a clipped mean gets.

    Raises:
        ValueError: a stage outside [0, 1].
    """
    if bad := [share for share in stages if not 0 <= share <= 1]:
        raise ValueError(f"stages must be shares of the run in [0, 1], got {bad}")
    tables = []
    with one_thread():
        chosen = Spec(**spec)
        optimizer, loader = make_run(chosen)
        split, expected = optimizer.split, optimizer.expected_batch_size
        probes = [t for t in range(split.steps) if split.is_probe_step(t)]
        steps = {min(probes, key=lambda t: abs(t - share * split.steps)) for share in stages}
        for record, batch, along in visits(optimizer, loader, steps, f"{chosen.method}, seed {chosen.seed}"):
            assert record.probe is not None
            threshold = record.probe.loss_threshold
            five, raw = (along([reach * x for x in points], batch) for points in (FIVE_POINTS, grid))
            clipped = privatize_loss(five, threshold, 0.0, expected_batch_size=expected)
            values = {"raw": (grid, raw.mean(dim=1)), "points": (FIVE_POINTS, five.mean(dim=1))}
            noise = loss_noise_std(threshold, noise_for_points(split.sigma_loss, len(FIVE_POINTS)), expected)
            of_step = {"distance": reach * record.eta, "threshold": threshold, "noise": noise}
            for kind, (places, means) in (values | {"clipped": (FIVE_POINTS, clipped)}).items():
                table = pd.DataFrame({"step": record.step, "kind": kind, "x": places, "value": means.tolist()})
                tables.append(table.assign(**of_step))
    return pd.concat(tables, ignore_index=True)


def fits_at(curves: pd.DataFrame, step: int, repeats: int, seed: int) -> tuple[QuadraticFit, QuadraticFit, np.ndarray]:
    """Parabolas in x = distance / h at a step of :func:`loss_curves`: of raw losses, of clipped and of noised ones.

    Returns:
        The first two, and an array of shape ``(repeats, 3)`` with slope, curvature and intercept per draw.
    """
    here = curves[curves.step == step]
    raw, clipped = (here[here.kind == kind].value.to_numpy() for kind in ("points", "clipped"))
    draws = clipped + here.noise.iloc[0] * np.random.default_rng(seed).standard_normal((repeats, len(clipped)))
    noised = [fit_quadratic(FIVE_POINTS, draw) for draw in draws]
    return (
        fit_quadratic(FIVE_POINTS, raw),
        fit_quadratic(FIVE_POINTS, clipped),
        np.array([(fit.slope, fit.curvature, fit.intercept) for fit in noised]),
    )


def fit_table(curves: pd.DataFrame, repeats: int, seed: int) -> pd.DataFrame:
    """What clipping and noise do to slope b and curvature a, in nats over one h, a row per step.

    Returns:
        ``b raw``, ``b clipped`` and ``b noise``, its standard deviation over the draws; the same of a; ``b/a raw`` and
        ``b/a clipped`` in units of h; ``right signs``, the share of draws whose b and a have the signs of the raw ones.
    """
    rows = []
    for step, here in curves.groupby("step"):
        raw, clipped, noised = fits_at(curves, step, repeats, seed)
        b, a = noised[:, 0], noised[:, 1]
        rows.append(
            {"step": step, "h": here.distance.iloc[0], "R_l": here.threshold.iloc[0], "noise": here.noise.iloc[0]}
            | {"b raw": raw.slope, "b clipped": clipped.slope, "b noise": b.std()}
            | {"a raw": raw.curvature, "a clipped": clipped.curvature, "a noise": a.std()}
            | {"b/a raw": raw.minimizer, "b/a clipped": clipped.minimizer}
            | {"right signs": np.mean((b * raw.slope > 0) & (a * raw.curvature > 0))}
        )
    return pd.DataFrame(rows)


def noise_for_points(sigma_loss: float, points: int) -> float:
    """sigma_l for a probe of ``points`` losses that costs what one of three costs at ``sigma_loss``.

    Each loss is clipped to [0, R_l], so n losses of one record have squared L2 sensitivity n, in units of R_l. A step's
    effective multiplier (sigma_g^-2 + n sigma_l^-2)^(-1/2) stays the same if sigma_l grows with the square root of n.
    """
    return sigma_loss * math.sqrt(points / SQUARED_L2_SENSITIVITY["losses"])


def price_of_points(counts: Sequence[int]) -> pd.DataFrame:
    """Probes of n losses, evenly spaced from -h to h, at equal privacy; n odd and at least 3.

    Returns:
        One row per n: ``points``, ``forwards`` (beside the training's own), and ``loss_noise``, ``slope_noise`` and
        ``curvature_noise`` relative to three points.
    """
    rows = []
    for points in (3, *counts):
        sigma = noise_for_points(1.0, points)
        fit = fit_quadratic(np.linspace(-1, 1, points), np.zeros(points), sigma)
        rows.append((points, points - 1, sigma, fit.slope_std, fit.curvature_std))
    table = pd.DataFrame(rows, columns=["points", "forwards", "loss_noise", "slope_noise", "curvature_noise"])
    noises = ["loss_noise", "slope_noise", "curvature_noise"]
    table[noises] /= table.loc[0, noises]
    return table[1:].reset_index(drop=True)
