"""The loss along the update direction of a real run, raw and as private probes see it (notebook 04).

Everything computed from raw losses here is NOT private. It shows what a run never sees.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

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


def noise_for_points(sigma_loss: float, points: int) -> float:
    """sigma_l for a probe of ``points`` losses that costs what one of three costs at ``sigma_loss``.

    Each loss is clipped to [0, R_l], so n losses of one record have squared L2 sensitivity n, in units of R_l. A step's
    effective multiplier (sigma_g^-2 + n sigma_l^-2)^(-1/2) stays the same if sigma_l grows with the square root of n.
    """
    return sigma_loss * math.sqrt(points / SQUARED_L2_SENSITIVITY["losses"])
