"""What the threshold R_l costs: bias and noise of private losses (notebooks 01 and 11)."""

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
    rates = {size: budget | {"sample_rate": size / records} for size in (small, large)}
    noise = {size: noise_of(folder, at, allocation="per_step").sigma_loss / size for size, at in rates.items()}
    return noise[small] / noise[large]


def calibrated(**arguments: Any) -> pd.DataFrame:
    """One row: the fields of :func:`hyfreedp.calibrate_noise`'s split, and the arguments it was made with."""
    return pd.DataFrame([calibrate_noise(**arguments).to_dict()])


def optimal_threshold(mean: float, std: float, *, noise_multiplier: float, expected_batch_size: float) -> float:
    """The R_l > 0 of the least error of the private mean of N(mean, std^2) losses; the noise must be positive.

    The error is against the mean of a batch as B grows (Corollary 1). The derivative of its square vanishes where
    ``bias(R) P(L > R) = (sigma_l / B)^2 R``; the left side falls with R, the right side grows, so the root is unique.
    """

    def slope(threshold: float) -> float:
        falls = normal_clipping_bias(threshold, mean, std) * stats.norm.sf(threshold, mean, std)
        return falls - (noise_multiplier / expected_batch_size) ** 2 * threshold

    upper = max(mean, 0.0) + std
    while slope(upper) > 0:
        upper *= 2
    return float(optimize.brentq(slope, 0.0, upper, xtol=1e-15 * upper, rtol=1e-14))
