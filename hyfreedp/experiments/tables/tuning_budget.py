"""What tuning costs: the share of the budget that each way of choosing hyperparameters takes (notebook 09).

All costs are by Renyi differential privacy, which the analysis of random search needs, so that all methods are compared
by one accountant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from numpy.typing import ArrayLike
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy.optimize import brentq

from hyfreedp.accounting import calibrate_noise
from hyfreedp.accounting.accountants import composed_epsilon
from hyfreedp.accounting.search import smallest_noise
from hyfreedp.experiments.accounting_of_the_paper import ORDERS, epsilon_of_rdp
from hyfreedp.experiments.baselines.adaptive_clipping import update_noise
from hyfreedp.experiments.store.files import cached
from hyfreedp.experiments.store.verdicts import Verdict, by_row

# Distributions of the number of runs of a random search, by the shape eta of the truncated negative binomial.
SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "Poisson": math.inf}
TOLERANCE = 1e-6  # relative, of the noise multipliers found here


def mean_runs(shape: float, gamma: float) -> float:
    """The mean E[k] of a truncated negative binomial distribution with shape eta (Papernot and Steinke, Def. 1)."""
    log = math.log(gamma)
    if shape == 0:
        return math.expm1(-log) / -log
    return shape * math.expm1(-log) / -math.expm1(shape * log)


def gamma_for(shape: float, mean: float) -> float:
    """The gamma with ``mean_runs(shape, gamma) == mean``, for a mean above 1."""
    root = brentq(lambda log: mean_runs(shape, math.exp(log)) - mean, -60.0, -1e-9, xtol=1e-14)
    return float(math.exp(root))


def repeated_rdp(orders: ArrayLike, rdp: ArrayLike, *, mean: float, shape: float) -> np.ndarray:
    """Renyi DP of random search: k runs, k random, of which only the best is released (Papernot and Steinke, 2022).

    If k is truncated negative binomial with parameters eta and gamma (Theorem 2), it is, at each order lambda and for
    the best second order lambda',

        eps(lambda) + (1 + eta) [(1 - 1/lambda') eps(lambda') + log(1/gamma) / lambda'] + log E[k] / (lambda - 1),

    and if k is Poisson with mean mu (Theorem 6),

        eps(lambda) + mu delta + log(mu) / (lambda - 1),   one run being (log(1 + 1/(lambda - 1)), delta)-DP.

    Args:
        orders: lambda > 1.
        rdp: Renyi DP of one run at these orders.
        mean: E[k] > 1.
        shape: eta >= 0; infinite for the Poisson distribution.

    Returns:
        Renyi DP of the whole search at the same orders.
    """
    grid, one = np.asarray(orders, dtype=float), np.asarray(rdp, dtype=float)
    overall = one + math.log(mean) / (grid - 1)
    if math.isinf(shape):
        deltas = [compute_delta(grid, one, math.log1p(1 / (order - 1)))[0] for order in grid]
        return overall + mean * np.array(deltas)
    second = (1 - 1 / grid) * one - math.log(gamma_for(shape, mean)) / grid
    return overall + (1 + shape) * second.min()


def search_epsilon(
    sigma: float, *, target_delta: float, sample_rate: float, steps: int, mean: float, shape: float
) -> float:
    """Epsilon of a random search, see :func:`repeated_rdp`, over runs of DP-SGD with noise multiplier sigma."""
    run = opacus_rdp.compute_rdp(q=sample_rate, noise_multiplier=sigma, steps=steps, orders=list(ORDERS))
    return epsilon_of_rdp(ORDERS, repeated_rdp(ORDERS, run, mean=mean, shape=shape), target_delta)


def dp_sgd_epsilon(sigma: float, *, target_delta: float, sample_rate: float, steps: int) -> float:
    """Epsilon of one run of DP-SGD, by RDP."""
    return composed_epsilon(((sigma, steps),), sample_rate=sample_rate, delta=target_delta, accountant="rdp")


# What is compared: HyFreeDP's gamma, the share of epsilon that the paper's DP-hyper leaves to training, sigma_b / B of
# adaptive clipping, and a vanilla grid of the paper's five rates and six thresholds.
GAMMA, KEPT, QUANTILE_PART = 1.01, 0.85, 0.05
RATES, THRESHOLDS = 5, 6


def budget_rows(*, budget: dict[str, float], batch_size: int, interval: int, runs: list[float]) -> pd.DataFrame:
    """How much of the budget each way of choosing hyperparameters takes from the gradients of the released run.

    Args:
        budget: ``target_epsilon``, ``target_delta``, ``sample_rate`` and ``steps``.
        batch_size, interval: B, and K of HyFreeDP.
        runs: mean numbers of runs of a random search. All runs of a grid search count, by composition.

    Returns:
        One row per method and ``setting``: ``target_epsilon``, ``sigma`` (vanilla), ``sigma_gradient``,
        ``noise_percent`` (how much larger that is) and ``share_percent``, the share of epsilon that these gradients
        leave for everything else.
    """
    target, sigma = budget["target_epsilon"], dp_sgd_noise(**budget)
    protocol: dict[str, Any] = {name: value for name, value in budget.items() if name != "target_epsilon"}
    learned: dict[str, Any] = {"probe": "losses", "allocation": "constant", "accountant": "rdp", "interval": interval}

    split = calibrate_noise(target_epsilon=target, **protocol, **learned, gamma=GAMMA)
    noises = [
        ("vanilla", math.nan, sigma),
        ("hyfreedp", GAMMA, split.sigma_gradient),
        ("adaptive clipping", QUANTILE_PART, update_noise(sigma, QUANTILE_PART * batch_size)),
        ("split", KEPT, dp_sgd_noise(**budget | {"target_epsilon": KEPT * target})),
    ]
    for number in (RATES, RATES * THRESHOLDS):
        noises.append(("grid search", number, dp_sgd_noise(**budget | {"steps": number * budget["steps"]})))
    for name, shape in SHAPES.items():
        for mean in runs:
            noise = search_noise(**budget, mean=mean, shape=shape)
            noises.append((f"random search, {name}", mean, noise))
    rows = pd.DataFrame(noises, columns=["method", "setting", "sigma_gradient"])
    left = rows.sigma_gradient.map(lambda noise: dp_sgd_epsilon(noise, **protocol))
    rows = rows.assign(target_epsilon=target, sigma=sigma, share_percent=100 * (1 - left / target))
    return rows.assign(noise_percent=100 * (rows.sigma_gradient / sigma - 1))


def dp_sgd_noise(**budget: Any) -> float:
    """The noise multiplier of one run of DP-SGD, by RDP; arguments of :func:`hyfreedp.calibrate_noise`."""
    return calibrate_noise(**budget, probe="none", accountant="rdp").sigma


def search_noise(target_epsilon: float, *, mean: float, shape: float, **run: Any) -> float:
    """The smallest noise multiplier at which :func:`search_epsilon` is within the budget."""
    search = {"mean": mean, "shape": shape} | run
    start = dp_sgd_noise(target_epsilon=target_epsilon, **run)
    return smallest_noise(lambda sigma: search_epsilon(sigma, **search), target_epsilon, start, TOLERANCE)


def quantile_noise_for_share(share: float, *, budget: dict[str, float]) -> float:
    """The sigma_b at which adaptive clipping takes this share (in (0, 1)) of epsilon from the gradients."""
    left = budget | {"target_epsilon": (1 - share) * budget["target_epsilon"]}
    total, kept = dp_sgd_noise(**budget), dp_sgd_noise(**left)
    return 0.5 * (total**-2 - kept**-2) ** -0.5


def costs(
    folder: Path, budgets: Sequence[dict[str, float]], *, batch_size: int, interval: int, runs: list[float]
) -> pd.DataFrame:
    """:func:`budget_rows` for several budgets, cached in ``folder``; index: method, setting and target_epsilon."""
    choices: dict[str, Any] = {"batch_size": batch_size, "interval": interval, "runs": runs}
    table = pd.concat(cached(folder, budget_rows, budget=budget, **choices) for budget in budgets)
    return table.set_index(["method", "setting", "target_epsilon"]).sort_index()


def comparison(found: pd.DataFrame, targets: Sequence[float], runs: Sequence[float]) -> pd.DataFrame:
    """Tab. "hyperparam comparison" with our numbers from :func:`costs`: one row per method and budget."""
    pairs = RATES * THRESHOLDS
    printed = [
        ("hyfreedp", GAMMA, "HyFreeDP, gamma = 1.01", "no", "no", "<1"),
        ("adaptive clipping", QUANTILE_PART, "adaptive clipping, sigma_b = B/20", "yes", "no", "20"),
        ("split", KEPT, "DP-hyper as simulated: 85 % kept", "yes", "no", "15"),
        *(
            (f"random search, {name}", mean, f"DP-hyper, {name}, {mean:g} runs on average", "yes", "no", "20")
            for mean in runs
            for name in SHAPES
        ),
        ("grid search", RATES, f"automatic clipping, {RATES} rates, all counted", "yes", "no", "0"),
        ("grid search", pairs, f"vanilla, {RATES} x {THRESHOLDS} pairs, all counted", "yes", "yes", "0"),
    ]
    columns = ["way", "setting", "method", "searches_eta", "searches_R_g", "paper_percent"]
    numbers = found.rename_axis(["way", "setting", "epsilon"]).reset_index()
    rows = pd.DataFrame(printed, columns=columns).merge(numbers[numbers.epsilon.isin(targets)], on=["way", "setting"])
    return rows[[*columns[2:5], "epsilon", "paper_percent", "share_percent", "noise_percent"]]


def judged(share: pd.Series, by_gamma: pd.Series, epsilon: float, runs: Sequence[float]) -> list[Verdict]:
    """Verdicts on the paper's shares of the budget, most of which it calls estimates.

    Args:
        share: percent, by method, setting and budget.
        by_gamma: percent that HyFreeDP takes at ``epsilon``, by gamma.
        epsilon: the budget at which estimates are judged.
        runs: mean numbers of runs of a random search, one case each: the paper gives none.
    """
    ours, at = share["hyfreedp", GAMMA], share.xs(epsilon, level="target_epsilon")
    adaptive = at["adaptive clipping"].item()
    told = ", ".join(f"{percent:.1f} % of epsilon = {target:g}" for target, percent in ours.items())
    gammas = ", ".join(f"{percent:.1f} % at {gamma:g}" for gamma, percent in by_gamma.items())
    decided = [
        Verdict(
            f"HyFreeDP takes less than 1 % of the budget, at gamma = {GAMMA:g}",
            by_row(list(ours < 1)),
            f"{told}; by gamma, at epsilon = {epsilon:g}: {gammas}",
        ),
        Verdict(
            "Adaptive clipping takes about 20 % (an estimate)",
            by_row([10 < adaptive < 40]),
            f"{adaptive:.2f} % of epsilon = {epsilon:g} by its authors' own analysis",
        ),
    ]
    for mean in runs:
        searches = pd.DataFrame({name: share[f"random search, {name}", mean] for name in SHAPES})
        here = searches.loc[epsilon]
        decided.append(
            Verdict(
                "DP-hyper takes about 20 % (an estimate)",
                by_row(list((here > 10) & (here < 30))),
                f"{here.min():.0f} to {here.max():.0f} % of epsilon = {epsilon:g} ({searches.min(axis=None):.0f} to "
                f"{searches.max(axis=None):.0f} % of {', '.join(f'{budget:g}' for budget in searches.index)})",
                case=f"a random search of {mean:g} runs on average",
            )
        )
    return decided


def small_batches(sigma: float, sizes: Sequence[int]) -> pd.DataFrame:
    """How much noise, in percent of ``sigma``, adaptive clipping with sigma_b = B/20 adds, for several B."""
    more = [100 * (update_noise(sigma, size / 20) / sigma - 1) for size in sizes]
    return pd.DataFrame({"B": sizes, "more_noise_percent": more})
