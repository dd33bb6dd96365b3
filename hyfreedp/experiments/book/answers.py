"""Answers of exercises, computed here so that the cell that checks an answer does not show how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize, stats

from hyfreedp import calibrate_noise, fit_quadratic
from hyfreedp.accounting.accountants import composed_epsilon
from hyfreedp.accounting.composition import effective_noise
from hyfreedp.experiments.studies import bias_variance, noise_split
from hyfreedp.look import noise_to_come
from hyfreedp.reference import automatic


def _epsilon(noise: float, times: int) -> float:
    return composed_epsilon([(noise, times)], sample_rate=1.0, delta=1e-5, accountant="pld")


def _loss_noise(**plan: Any) -> float:
    split = calibrate_noise(**plan, probe="losses", allocation="per_step", accountant="rdp")
    return split.sigma_loss / split.sigma


def _noise_of_the_mean(B: int) -> float:
    budget: dict[str, Any] = noise_split.DataSet("", 50_000, B, 5).budget(3.0)
    return calibrate_noise(**budget, probe="losses", interval=5, gamma=1.01, allocation="constant").sigma_loss / B


_NORMAL: dict[str, Any] = {"noise_multiplier": 200, "expected_batch_size": 500}
_TRUTHS: dict[str, Callable[..., Any]] = {
    "00.1": lambda: stats.norm.sf(0.5, 1, 2.0) - stats.norm.sf(0.5, 0, 2.0),
    "00.2": lambda: optimize.brentq(lambda noise: _epsilon(noise, 100) - _epsilon(1.0, 1), 1, 100),
    "00.3": lambda: _epsilon(0.5, 10) / _epsilon(0.5, 1),
    "01.1": lambda: bias_variance.optimal_threshold(2.0, 0.4, **_NORMAL),
    "01.2": lambda cells, budget, records: bias_variance.fall_of_noise(cells, budget, records, 150, 1500),
    "01.3": lambda: stats.sem([1.6, 2.4] * 250, ddof=0),
    "02.1": lambda: automatic(0.02) * 0.02,
    "02.3": lambda: (np.mean([1] * 9) - np.mean([1] * 9 + [-1])) / (0.9 - 0.8),
    "02.2": lambda: effective_noise(1.1, 12.0, "losses"),
    "03.1": lambda plan: _loss_noise(**plan, interval=5, gamma=1.03),
    "03.3": lambda: (np.log1p(1e-4) / np.log1p(4e-4)) ** 0.5,  # e^(1/sigma^2) - 1 is proportional to K
    "03.2": lambda: optimize.brentq(lambda noise: effective_noise(2.0, noise, "losses") - 1.9, 1, 100),
    "03.4": lambda: effective_noise(1e9, 12.0, "losses"),  # a gradient that tells nothing
    "03.5": lambda: _noise_of_the_mean(4000) / _noise_of_the_mean(1000),
    "04.1": lambda: 2**0.5 * (2 / 3) ** 0.5 / fit_quadratic([1, 0, -1], [0] * 3, 1.0).slope_std,
    "04.2": lambda: (
        fit_quadratic([1, 0, -1], [0] * 3, 1.0).curvature_std / fit_quadratic([5, 0, -5], [0] * 3, 1.0).curvature_std
    ),
    "04.3": lambda: noise_to_come([1.0] * 80, 10),
    "11.1": lambda: np.diff(np.minimum([2, 2.1, 2.6], 2.1), n=2).item(),
    "11.3": lambda: np.tanh(0.5),  # (e - 1) / (e + 1)
    "12.1": lambda protocol, task: protocol["sample_rate"] * task.steps,
    "12.2": lambda history: history.margin_std.max(),
}


def truth(exercise: str, *given: Any) -> float:
    """The right answer of an exercise, named like "02.1"; some need values that the notebook computed."""
    return float(_TRUTHS[exercise](*given))
