"""Real batches probed again and again, and the thresholds to look at (notebook 02)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hyfreedp import QuadraticFit, fit_quadratic
from hyfreedp.accounting.mechanisms import Probe
from hyfreedp.experiments.store.cache import cached, key_of
from hyfreedp.experiments.studies.bias_variance import batch_errors
from hyfreedp.experiments.studies.clouds import clouds, distance_of, eta_spread, losses_of, usual_thresholds


@dataclass(frozen=True)
class Cloud:
    """What repeated probes of one batch see.

    Attributes:
        losses: at (w - hG, w, w + hG), shape ``(3, B)``.
        distance: h.
        exact: parabola through the raw mean losses.
        usual: :func:`usual_thresholds`.
        fits: of :func:`clouds`.
        spread: of :func:`eta_spread`.
        cell: where ``fits`` are kept.
    """

    losses: np.ndarray
    distance: float
    exact: QuadraticFit
    usual: tuple[float, float, float]
    fits: pd.DataFrame
    spread: pd.DataFrame
    cell: str

    @property
    def sum_rule(self) -> float:
        """The sum of the three mean losses, the paper's R_l in practice."""
        return float(self.losses.mean(axis=1).sum())


def repeated_probes(
    folder: Path,
    probed: Sequence[pd.DataFrame],
    step: int,
    *,
    sigmas: dict[Probe, float],
    expected_batch_size: float,
    multiples: list[float],
    runs: int,
) -> list[Cloud]:
    """The cloud of each run's batch at ``step``; arguments as for :func:`clouds`, whose tables ``folder`` keeps."""
    found = []
    for seed, table in enumerate(probed):
        losses, distance = losses_of(table, step, "batch"), distance_of(table, step)
        arguments: dict[str, Any] = {
            "losses": losses.tolist(),
            "distance": distance,
            "sigmas": sigmas,
            "expected_batch_size": expected_batch_size,
            "multiples": multiples,
            "runs": runs,
            "seed": seed,
        }
        fits = cached(folder, clouds, **arguments)
        exact = fit_quadratic([distance, 0, -distance], losses.mean(axis=1))
        spread = eta_spread(fits, exact.minimizer)
        name = f"cell clouds-{key_of(arguments)}"
        found.append(Cloud(losses, distance, exact, usual_thresholds(losses), fits, spread, name))
    return found


def errors_of(
    cloud: Cloud, multiples: Sequence[float], *, noise_multiplier: float, expected_batch_size: float
) -> pd.DataFrame:
    """``bias_variance.batch_errors`` of the three mean losses together, at multiples of the mean loss."""
    noise: dict[str, Any] = {"noise_multiplier": noise_multiplier, "expected_batch_size": expected_batch_size}
    return batch_errors(cloud.losses, np.array(multiples) * cloud.usual[0], **noise)


def nearest_multiple(multiples: Sequence[float], value: float) -> float:
    """The one nearest to ``value``, by ratio."""
    return min(multiples, key=lambda multiple: abs(np.log(multiple / value)))


def right_multiples(cloud: Cloud, optimum: float) -> dict[str, float]:
    """The right threshold of each probe in its usual one: the optimum of the losses, the contrasts' own rule."""
    return {"losses": optimum / cloud.usual[0], "contrasts": 1.0}


def threshold_choices(right: dict[str, float], multiples: Sequence[float]) -> dict[str, dict[str, float]]:
    """Multiples to look at: a quarter of the right one of each probe, that and ten times it."""
    factors = {"too small": 0.25, "right": 1.0, "too large": 10.0}
    return {
        probe: {name: nearest_multiple(multiples, factor * value) for name, factor in factors.items()}
        for probe, value in right.items()
    }


def spread_table(
    found: Sequence[Cloud], choices: dict[str, dict[str, float]], multiples: Sequence[float]
) -> pd.DataFrame:
    """How far b/a strays at the chosen thresholds and at the paper's two: means over the clouds.

    Args:
        found: of :func:`repeated_probes`.
        choices: of :func:`threshold_choices`.
        multiples: that the clouds have.

    Returns:
        One row per probe and threshold: ``multiple``, the columns of :func:`eta_spread` with quantiles in units of h,
        and the smallest and largest ``near`` of the clouds.
    """
    quantiles = ["q5", "q25", "q50", "q75", "q95"]
    tables = []
    for cloud in found:
        table = cloud.spread.copy()
        table[quantiles] = table[quantiles].div(cloud.distance)
        tables.append(table)
    spread = pd.concat(tables)
    papers = {
        "R_l = L": 1.0,
        "sum of three losses": nearest_multiple(multiples, found[0].sum_rule / found[0].usual[0]),
    }
    rows = []
    for probe, chosen in choices.items():
        for name, multiple in (papers | chosen if probe == "losses" else chosen).items():
            part = spread[(spread.probe == probe) & np.isclose(spread.multiple, multiple)]
            means = part[[*quantiles, "near", "concave", "uphill"]].mean().to_dict()
            limits = {"near_low": part.near.min(), "near_high": part.near.max()}
            rows.append({"probe": probe, "threshold": name, "multiple": multiple} | means | limits)
    return pd.DataFrame(rows)
