"""What tuning costs: the budget that each way of choosing hyperparameters takes from the training (notebook 09).

All costs here are by Renyi differential privacy, in which the analysis of random search is stated, so that every method
is compared under one accountant.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy.optimize import brentq

from hyfreedp.accounting import calibrate_noise
from hyfreedp.accounting.accountants import composed_epsilon
from hyfreedp.accounting.search import smallest_noise
from hyfreedp.experiments.accounting_of_the_paper import ORDERS
from hyfreedp.experiments.baselines.adaptive_clipping import update_noise
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.cache import cached
from hyfreedp.experiments.store.verdicts import Verdict, by_row

# Distributions of the number of runs of a random search, by the shape eta of the truncated negative binomial.
SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "Poisson": math.inf}
TOLERANCE = 1e-6  # relative, of the noise multipliers found here


def mean_runs(shape: float, gamma: float) -> float:
    """Expected number of runs E[k] of a truncated negative binomial distribution (Papernot and Steinke, 2022, Def. 1).

    Args:
        shape: eta >= 0; 1 is the geometric distribution, 0 the logarithmic one.
        gamma: in (0, 1).
    """
    log = math.log(gamma)
    if shape == 0:
        return math.expm1(-log) / -log
    return shape * math.expm1(-log) / -math.expm1(shape * log)


def gamma_for(shape: float, mean: float) -> float:
    """The gamma with ``mean_runs(shape, gamma) == mean``, for a mean above 1."""
    root = brentq(lambda log: mean_runs(shape, math.exp(log)) - mean, -60.0, -1e-9, xtol=1e-14)
    return float(math.exp(root))


def repeated_rdp(orders: ArrayLike, rdp: ArrayLike, *, mean: float, shape: float) -> np.ndarray:
    """Renyi DP of random search: run k times, k random, and release only the best run (Papernot and Steinke, 2022).

    For k from the truncated negative binomial distribution with parameters eta and gamma (Theorem 2), at each order
    lambda and for the best second order lambda',

        eps(lambda) + (1 + eta) [(1 - 1/lambda') eps(lambda') + log(1/gamma) / lambda'] + log E[k] / (lambda - 1),

    and for a Poisson k with mean mu (Theorem 6)

        eps(lambda) + mu delta + log(mu) / (lambda - 1),   one run being (log(1 + 1/(lambda - 1)), delta)-DP.

    Args:
        orders: lambda > 1.
        mean: expected number of runs, above 1.
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
    """Epsilon of a random search over runs of DP-SGD with noise multiplier sigma; arguments as elsewhere."""
    run = opacus_rdp.compute_rdp(q=sample_rate, noise_multiplier=sigma, steps=steps, orders=list(ORDERS))
    rdp = repeated_rdp(ORDERS, run, mean=mean, shape=shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the")  # still a bound, as in the accountants
        epsilon, _ = opacus_rdp.get_privacy_spent(orders=list(ORDERS), rdp=rdp, delta=target_delta)
    return max(float(epsilon), 0.0)


def dp_sgd_epsilon(sigma: float, *, target_delta: float, sample_rate: float, steps: int) -> float:
    """Epsilon of one run of DP-SGD, by RDP."""
    return composed_epsilon(((sigma, steps),), sample_rate=sample_rate, delta=target_delta, accountant="rdp")


# What is compared: gamma of HyFreeDP, the part of epsilon that a split search leaves to training (the paper's),
# sigma_b / B of adaptive clipping, and a vanilla grid of the paper's five rates and six thresholds.
GAMMA, KEPT, QUANTILE_PART = 1.01, 0.85, 0.05
RATES, THRESHOLDS = 5, 6


def budget_rows(*, budget: dict[str, float], batch_size: int, interval: int, runs: list[float]) -> pd.DataFrame:
    """The budget that each way of choosing hyperparameters takes from the gradients of the run that is kept.

    Args:
        budget: ``target_epsilon``, ``target_delta``, ``sample_rate`` and ``steps``.
        interval: of HyFreeDP (three losses, constant allocation, same batch).
        runs: mean numbers of runs of a random search; those of a grid search are all counted, by composition.

    Returns:
        One row per method and setting: ``method``, ``setting`` (a number), ``target_epsilon``, ``sigma`` (vanilla, the
        same for all), ``sigma_gradient``, ``noise_percent`` (how much larger it is) and ``share_percent``: the part of
        epsilon that the gradients of the kept run, counted alone, leave to everything else.
    """
    target, protocol = _split_budget(budget)
    sigma = _vanilla_noise(target, protocol)
    learned: dict[str, Any] = {"probe": "losses", "allocation": "constant", "accountant": "rdp", "interval": interval}

    split = calibrate_noise(target_epsilon=target, **protocol, **learned, gamma=GAMMA)
    noises = [
        ("vanilla", math.nan, sigma),
        ("hyfreedp", GAMMA, split.sigma_gradient),
        ("adaptive clipping", QUANTILE_PART, update_noise(sigma, QUANTILE_PART * batch_size)),
        ("split", KEPT, _vanilla_noise(KEPT * target, protocol)),
    ]
    for number in (RATES, RATES * THRESHOLDS):
        noises.append(("grid search", number, _vanilla_noise(target, protocol | {"steps": number * protocol["steps"]})))
    for name, shape in SHAPES.items():
        for mean in runs:
            noise = search_noise(target, mean=mean, shape=shape, start=sigma, **protocol)
            noises.append((f"random search, {name}", mean, noise))
    return pd.DataFrame(
        [
            {"method": method, "setting": setting, "target_epsilon": target, "sigma": sigma, "sigma_gradient": noise}
            | {"noise_percent": 100 * (noise / sigma - 1)}
            | {"share_percent": 100 * (1 - dp_sgd_epsilon(noise, **protocol) / target)}
            for method, setting, noise in noises
        ]
    )


def _split_budget(budget: dict[str, float]) -> tuple[float, dict[str, Any]]:
    return budget["target_epsilon"], {key: value for key, value in budget.items() if key != "target_epsilon"}


def _vanilla_noise(target_epsilon: float, protocol: dict[str, Any]) -> float:
    return calibrate_noise(**protocol, target_epsilon=target_epsilon, probe="none", accountant="rdp").sigma


def search_noise(target_epsilon: float, *, start: float, **search: Any) -> float:
    """The smallest noise multiplier at which a whole random search stays within the budget.

    Args:
        start: first noise to try.
        **search: of :func:`search_epsilon`.
    """
    return smallest_noise(lambda sigma: search_epsilon(sigma, **search), target_epsilon, start, TOLERANCE)


def quantile_noise_for_share(share: float, *, budget: dict[str, float]) -> float:
    """sigma_b at which adaptive clipping takes this share of epsilon from the gradients.

    Args:
        share: in (0, 1).
    """
    target, protocol = _split_budget(budget)
    total, kept = _vanilla_noise(target, protocol), _vanilla_noise((1 - share) * target, protocol)
    return 0.5 * (total**-2 - kept**-2) ** -0.5


# -- Tab. "hyperparam comparison", for notebook 09 ---------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A row of Tab. "hyperparam comparison".

    Attributes:
        method, setting: of the row of :func:`budget_rows`.
        title: for figures and tables.
        searches_rate, searches_threshold: "yes" or "no", as printed.
        paper_percent: as printed.
    """

    method: str
    setting: float
    title: str
    searches_rate: str
    searches_threshold: str
    paper_percent: str


def methods(runs: float) -> list[Method]:
    """What the notebook compares; random searches have ``runs`` runs on average."""
    searches = [
        Method(f"random search, {name}", runs, f"DP-hyper, {name}, {runs:g} runs on average", "yes", "no", "20")
        for name in SHAPES
    ]
    pairs = RATES * THRESHOLDS
    return [
        Method("hyfreedp", GAMMA, "HyFreeDP, gamma = 1.01", "no", "no", "<1"),
        Method("adaptive clipping", QUANTILE_PART, "adaptive clipping, sigma_b = B/20", "yes", "no", "20"),
        Method("split", KEPT, "DP-hyper as simulated: 85 % kept", "yes", "no", "15"),
        *searches,
        Method("grid search", RATES, f"automatic clipping, {RATES} rates, all counted", "yes", "no", "0"),
        Method("grid search", pairs, f"vanilla, {RATES} x {THRESHOLDS} pairs, all counted", "yes", "yes", "0"),
    ]


def costs(
    folder: Path, budgets: Sequence[dict[str, float]], *, batch_size: int, interval: int, runs: list[float]
) -> pd.DataFrame:
    """Rows of :func:`budget_rows` of all :func:`methods` at several budgets, kept in ``folder``.

    Returns:
        Its rows, with ``method``, ``setting`` and ``target_epsilon`` as index.
    """
    choices: dict[str, Any] = {"batch_size": batch_size, "interval": interval, "runs": runs}
    table = pd.concat(cached(folder, budget_rows, budget=budget, **choices) for budget in budgets)
    return table.set_index(["method", "setting", "target_epsilon"]).sort_index()


def comparison(found: pd.DataFrame, chosen: Sequence[Method], targets: Sequence[float]) -> pd.DataFrame:
    """Tab. "hyperparam comparison" with our numbers, a row per method and budget; ``found`` is of :func:`costs`."""
    rows = []
    for one in chosen:
        for target in targets:
            row = found.loc[(one.method, one.setting, target)]
            rows.append(
                {"method": one.title, "searches_eta": one.searches_rate, "searches_R_g": one.searches_threshold}
                | {"epsilon": target, "paper_percent": one.paper_percent}
                | {"share_percent": row.share_percent, "noise_percent": row.noise_percent}
            )
    return pd.DataFrame(rows)


def draw_costs(table: pd.DataFrame) -> Figure:
    """Share of epsilon and noise of every method of :func:`comparison`, and the paper's own number of the share."""
    names = list(dict.fromkeys(table.method))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    units = {"share_percent": r"share of $\varepsilon$ not left to training (%)", "noise_percent": "more noise (%)"}
    for axis, (column, label) in zip(axes, units.items(), strict=True):
        for shift, (epsilon, rows), style in zip(
            (-0.15, 0.0, 0.15), table.groupby("epsilon"), plots.SERIES[::3], strict=False
        ):
            places = rows.method.map(names.index) + shift
            axis.plot(rows[column], places, label=rf"$\varepsilon$ = {epsilon:g}", **plots.marks(style))
        axis.set(xscale="log", xlabel=label)
        plots.plain_log_ticks(axis.xaxis)
    printed = table[table.paper_percent.str.isdigit() & (table.paper_percent != "0")].drop_duplicates("method")
    look = {"marker": "D", "linestyle": "none", "color": "0.3", "markerfacecolor": "none", "markersize": 10}
    axes[0].plot(printed.paper_percent.astype(float), printed.method.map(names.index), label="the paper's", **look)
    axes[0].axvline(1, color="0.3", linewidth=1, linestyle=":", label="the paper's for HyFreeDP: below 1 %")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    figure.suptitle("Learning inside the run costs a few percent, a counted search a third or more")
    plots.shared_legend(figure, axes[:1], ncols=5)
    return figure


def cost_findings(
    found: pd.DataFrame, chosen: Sequence[Method], budget: dict[str, float], batch_size: int
) -> list[str]:
    """All methods at one budget, and what noise adaptive clipping would need to cost more.

    Args:
        found, chosen: as for :func:`comparison`.
        budget: as of :func:`budget_rows`.
        batch_size: B.
    """
    target = budget["target_epsilon"]
    at = found.xs(target, level="target_epsilon")
    a_fifth, a_percent = (quantile_noise_for_share(part, budget=budget) for part in (0.2, 0.01))
    return [
        *(
            f"{one.title}: {at.share_percent[one.method, one.setting]:.3g} % of epsilon = {target:g}, "
            f"{at.noise_percent[one.method, one.setting]:.3g} % more gradient noise"
            for one in chosen
        ),
        f"Adaptive clipping would take 20 % only with sigma_b = {a_fifth:.2f}, that is B / {batch_size / a_fifth:.0f}, "
        f"and 1 % with {a_percent:.2f}",
    ]


def verdicts(found: pd.DataFrame, chosen: Sequence[Method], target: float) -> list[Verdict]:
    """On Tab. "hyperparam comparison"; ``found`` and ``chosen`` as for :func:`comparison`, at one budget."""
    share = found.share_percent.xs(target, level="target_epsilon")
    ours = share["hyfreedp", GAMMA]
    adaptive = share["adaptive clipping", QUANTILE_PART]
    searches = [share[one.method, one.setting] for one in chosen if one.method.startswith("random search")]
    return [
        Verdict(
            "HyFreeDP takes less than 1 % of the budget",
            by_row([ours < 1]),
            f"{ours:.1f} % of epsilon = {target:g} at gamma = 1.01",
        ),
        Verdict(
            "Adaptive clipping takes about 20 %",
            by_row([10 < adaptive < 40]),
            f"{adaptive:.2f} % by its authors' own analysis",
        ),
        Verdict(
            "DP-hyper takes about 20 %",
            by_row([10 < one < 30 for one in searches]),
            f"{min(searches):.0f} to {max(searches):.0f} % for a random search of five runs",
        ),
    ]


def small_batches(sigma: float, sizes: Sequence[int]) -> pd.DataFrame:
    """What adaptive clipping with sigma_b = B/20 adds to the gradient noise ``sigma`` at several B."""
    more = [100 * (update_noise(sigma, size / 20) / sigma - 1) for size in sizes]
    return pd.DataFrame({"B": sizes, "more_noise_percent": more})
