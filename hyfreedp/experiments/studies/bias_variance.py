"""The cost of a threshold R_l: clipping bias and noise of private losses (notebooks 01 and 11)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from scipy import optimize, stats

from hyfreedp import PRESETS, NoiseSplit, calibrate_noise, normal_clipping_bias
from hyfreedp.experiments.store.files import cached
from hyfreedp.experiments.studies.noise_split import split_of
from hyfreedp.experiments.tasks.registry import TASKS

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
    """How much notebooks 01 and 11 simulate; ``stages`` are the steps of a training run at which losses are probed."""
    stages = [step] if profile == "smoke" else sorted({3, step, 40})
    return {"smoke": _SMOKE, "laptop": _LAPTOP}.get(profile, _LARGE) | {"stages": stages}


def digits_budget(epsilon: float) -> dict[str, float]:
    """Arguments of :func:`hyfreedp.calibrate_noise` for the task "digits"."""
    task = TASKS["digits"]
    budget = {"target_epsilon": epsilon, "target_delta": task.delta, "steps": task.steps}
    return budget | {"sample_rate": task.batch_size / task.train_size}


def noise_of(folder: Path, budget: dict[str, Any], **choices: Any) -> NoiseSplit:
    """The calibrated split of a budget under preset paper with changed ``choices``, cached in ``folder``."""
    arguments = budget | PRESETS["paper"].releases(budget["steps"]) | choices
    return split_of(cached(folder, calibrated, **arguments).iloc[0])


def fall_of_noise(folder: Path, budget: dict[str, Any], records: int, small: int, large: int) -> float:
    """sigma_l / B at the batch size ``small``, divided by that at ``large``, for N = ``records`` and equal steps."""
    budgets = {size: budget | {"sample_rate": size / records} for size in (small, large)}
    noise = {size: noise_of(folder, one, allocation="per_step").sigma_loss / size for size, one in budgets.items()}
    return noise[small] / noise[large]


def calibrated(**arguments: Any) -> pd.DataFrame:
    """One row with the fields of the split from :func:`hyfreedp.calibrate_noise` with these arguments."""
    return pd.DataFrame([calibrate_noise(**arguments).to_dict()])


def optimal_threshold(mean: float, std: float, *, noise_multiplier: float, expected_batch_size: float) -> float:
    """The R_l > 0 with the smallest error of the private mean of N(mean, std^2) losses; ``noise_multiplier`` > 0.

    The mean squared error, for large B (Corollary 1), is bias(R)^2 + (R sigma_l / B)^2. Its derivative is zero where
    ``bias(R) P(L > R) = (sigma_l / B)^2 R``. The left side falls with R and the right side grows: one solution.
    """

    def slope(threshold: float) -> float:
        falls = normal_clipping_bias(threshold, mean, std) * stats.norm.sf(threshold, mean, std)
        return falls - (noise_multiplier / expected_batch_size) ** 2 * threshold

    upper = max(mean, 0.0) + std
    while slope(upper) > 0:
        upper *= 2
    return float(optimize.brentq(slope, 0.0, upper, xtol=1e-15 * upper, rtol=1e-14))
