"""What the threshold R_l costs: bias and noise of private losses in theory and simulation (notebook 01)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy import optimize, stats

from hyfreedp import PRESETS, NoiseSplit, calibrate_noise, clipping_bias, normal_clipping_bias
from hyfreedp.experiments.store.cache import cached
from hyfreedp.experiments.studies.noise_split import split_of
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import loss_noise_std, privatize_loss

_LAPTOP: dict[str, Any] = {
    "batches": 400,  # simulated batches of normal losses
    "releases": 2000,  # repeated releases of one batch
    "multiples": [10 ** (k / 12) for k in range(-8, 18)],  # thresholds: twelve per factor of ten
    "parabolas": 200,  # per threshold
    "attacks": 400,  # with and without the outlier, each
}
_LARGE = _LAPTOP | {"releases": 10_000, "parabolas": 1000, "attacks": 2000}
_SMOKE = _LAPTOP | {"batches": 50, "releases": 50, "parabolas": 20, "attacks": 20}
_SMOKE["multiples"] = _LAPTOP["multiples"][:-1:8]


def sizes_of(profile: str, step: int) -> dict[str, Any]:
    """How much notebook 01 simulates; ``stages`` are the steps of the training run that it looks at."""
    stages = [step] if profile == "smoke" else sorted({3, step, 40})
    return {"smoke": _SMOKE, "laptop": _LAPTOP}.get(profile, _LARGE) | {"stages": stages}


def digits_budget(epsilon: float) -> dict[str, float]:
    """Arguments of :func:`hyfreedp.calibrate_noise` for the task "digits"."""
    task = TASKS["digits"]
    budget = {"target_epsilon": epsilon, "target_delta": task.delta, "steps": task.steps}
    return budget | {"sample_rate": task.batch_size / task.train_size}


def noise_of(folder: Path, budget: dict[str, Any], **choices: Any) -> NoiseSplit:
    """The calibrated split of a budget in the paper's plan, but for ``choices``; kept in ``folder``."""
    arguments = budget | PRESETS["paper"].releases(budget["steps"]) | choices
    return split_of(cached(folder, calibrated, **arguments).iloc[0])


def fall_of_noise(folder: Path, budget: dict[str, Any], records: int, small: int, large: int) -> float:
    """sigma_l / B at the batch size ``small`` divided by that at ``large``, at the same number of steps."""
    noise = [
        noise_of(folder, budget | {"sample_rate": size / records}, allocation="per_step").sigma_loss / size
        for size in (small, large)
    ]
    return noise[0] / noise[1]


def calibrated(**arguments: Any) -> pd.DataFrame:
    """One row: the fields of :func:`hyfreedp.calibrate_noise`'s split, and the arguments it was made with."""
    return pd.DataFrame([calibrate_noise(**arguments).to_dict()])


# -- Theorem 1 and Corollary 1 -----------------------------------------------------------------------------------------


def release_dots(
    losses: ArrayLike,
    thresholds: Iterable[float],
    *,
    noise_multiplier: float,
    expected_batch_size: float,
    runs: int,
    seed: int,
) -> pd.DataFrame:
    """Theorem 1 by simulation: a batch, released ``runs`` times by :func:`hyfreedp.privatize_loss` at each threshold.

    Args:
        losses: of one batch, shape ``(B,)``, or of one batch per run, shape ``(runs, B)``.

    Returns:
        One row per threshold: ``bias`` (mean loss less mean release), ``noise`` (standard deviation about the clipped
        means), ``rmse`` (distance to the mean loss), each with its standard error ``*_error``.
    """
    batch = torch.as_tensor(np.asarray(losses, dtype=np.float64))
    batch = batch.expand(runs, batch.shape[-1])
    generator = NoiseGenerator(seed)
    rows = []
    for threshold in thresholds:
        arguments: dict[str, Any] = {"expected_batch_size": expected_batch_size, "generator": generator}
        released = privatize_loss(batch, threshold, noise_multiplier, **arguments)
        error = (released - batch.sum(dim=1) / expected_batch_size).numpy()
        noise = (released - privatize_loss(batch, threshold, 0.0, **arguments)).numpy()
        rmse = math.sqrt(np.mean(error**2))
        rows.append(
            {
                "threshold": threshold,
                "bias": -error.mean(),
                "bias_error": error.std(ddof=1) / math.sqrt(runs),
                "noise": noise.std(ddof=1),
                "noise_error": noise.std(ddof=1) / math.sqrt(2 * (runs - 1)),
                "rmse": rmse,
                "rmse_error": np.std(error**2, ddof=1) / math.sqrt(runs) / (2 * rmse),
            }
        )
    return pd.DataFrame(rows)


def errors(
    losses: ArrayLike, thresholds: ArrayLike, *, noise_multiplier: float, expected_batch_size: float
) -> pd.DataFrame:
    """Bias, noise and their root mean square against R_l, of real losses, whatever their distribution (Theorem 1).

    ``losses`` have shape ``(B,)`` or, of several probes, ``(n, B)``: the bias is then the root mean square of theirs.
    """
    biases = np.array([clipping_bias(probe, thresholds) for probe in np.atleast_2d(np.asarray(losses))])
    bias = np.sqrt(np.mean(biases**2, axis=0))
    noise = np.asarray(loss_noise_std(thresholds, noise_multiplier, expected_batch_size))
    return pd.DataFrame({"threshold": thresholds, "bias": bias, "noise": noise, "rmse": np.hypot(bias, noise)})


def normal_errors(
    thresholds: ArrayLike, *, mean: float, std: float, noise_multiplier: float, expected_batch_size: float
) -> pd.DataFrame:
    """The same for N(mean, std^2) losses (Corollary 1), against the mean of a batch as B grows."""
    bias = np.asarray(normal_clipping_bias(thresholds, mean, std))
    noise = np.asarray(loss_noise_std(thresholds, noise_multiplier, expected_batch_size))
    return pd.DataFrame({"threshold": thresholds, "bias": bias, "noise": noise, "rmse": np.hypot(bias, noise)})


def optimal_threshold(mean: float, std: float, *, noise_multiplier: float, expected_batch_size: float) -> float:
    """The R_l > 0 of the least error of :func:`normal_errors`; the noise must be positive.

    The derivative of the squared error vanishes where ``bias(R) P(L > R) = (sigma_l / B)^2 R``; the left side falls
    with R, the right side grows, so the root is unique.
    """

    def slope(threshold: float) -> float:
        falls = normal_clipping_bias(threshold, mean, std) * stats.norm.sf(threshold, mean, std)
        return falls - (noise_multiplier / expected_batch_size) ** 2 * threshold

    upper = max(mean, 0.0) + std
    while slope(upper) > 0:
        upper *= 2
    return float(optimize.brentq(slope, 0.0, upper, xtol=1e-15 * upper, rtol=1e-14))


@dataclass(frozen=True)
class TradeOff:
    """Errors of the private mean of normal losses against R_l: curves, the best threshold, and simulated releases."""

    curves: pd.DataFrame
    best: float
    releases: pd.DataFrame

    def error_at(self, threshold: float) -> float:
        """Root mean square error at a threshold."""
        return float(np.interp(threshold, self.curves.threshold, self.curves.rmse))


def trade_off(*, mean: float, std: float, noise_multiplier: float, batch_size: int, batches: int = 2) -> TradeOff:
    """The trade-off of N(mean, std^2) losses, with ``batches`` simulated batches of them."""
    thresholds = np.geomspace(0.2, 5, 200) * mean
    noise: dict[str, Any] = {"noise_multiplier": noise_multiplier, "expected_batch_size": batch_size}
    # A draw below zero, which no loss can be, counts as zero: rare enough to be invisible at these parameters.
    draws = np.maximum(np.random.default_rng(batch_size).normal(mean, std, (batches, batch_size)), 0)
    return TradeOff(
        curves=normal_errors(thresholds, mean=mean, std=std, **noise),
        best=optimal_threshold(mean, std, **noise),
        releases=release_dots(draws, thresholds[4::8], runs=batches, seed=batch_size, **noise),
    )


# -- Corollary 1 on real losses ----------------------------------------------------------------------------------------

RATIOS = np.geomspace(0.2, 50, 200)  # thresholds in units of the mean loss


def relative_biases(batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Clipping bias in units of the mean loss at ``RATIOS``: of a batch, shape ``(B,)``, and of a normal like it."""
    mean, thresholds = batch.mean(), batch.mean() * RATIOS
    actual = np.asarray(clipping_bias(batch, thresholds))
    return actual / mean, np.asarray(normal_clipping_bias(thresholds, mean, batch.std())) / mean
