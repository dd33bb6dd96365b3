"""The noise split in numbers: what each way of counting allows, and what it really costs (notebook 03)."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.stats import norm
from tqdm import tqdm

from hyfreedp.accounting import NoiseSplit, UnsoundAccountingWarning, calibrate_noise
from hyfreedp.accounting.composition import releases, shares, spent, unsound_reasons
from hyfreedp.accounting.mechanisms import merge
from hyfreedp.accounting.pld import privacy_loss_distribution
from hyfreedp.accounting.search import smallest_noise
from hyfreedp.accounting.split import Composition, count_probe_steps
from hyfreedp.experiments.runs.methods import METHODS
from hyfreedp.experiments.store.cache import cached
from hyfreedp.noise import NoiseGenerator

# Costs are read off a grid of privacy losses ten times coarser than that of the calibration: ten times faster, rounded
# up like it, and at most 0.1 % above it.
COARSENESS = 10

LABELS = ("section", "data", "preset")  # keys of rows that tell where they belong

# The split of Alg. 2: three losses, the same gradient noise at every step.
PAPER_SPLIT: dict[str, Any] = {"probe": "losses", "allocation": "constant"}


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set of the paper with a stated length of training.

    Attributes:
        title: for tables.
        records: N, size of the training part.
        batch_size: expected size B of a Poisson batch.
        epochs: passes over the data.
    """

    title: str
    records: int
    batch_size: int
    epochs: float

    def budget(self, target_epsilon: float) -> dict[str, float]:
        """Arguments of :func:`hyfreedp.calibrate_noise`, with delta = N^-1.1 as in the paper."""
        return {
            "target_epsilon": target_epsilon,
            "target_delta": self.records**-1.1,
            "sample_rate": self.batch_size / self.records,
            "steps": max(1, round(self.epochs * self.records / self.batch_size)),
        }


# The sizes are those of the training parts that torchvision and the E2E challenge distribute. The paper states neither
# B nor the number of epochs; these are ours: 5 epochs of B = 1,000 to fine-tune on images, and 10 of B = 1,024 for E2E.
DATA_SETS = (
    DataSet("CIFAR-10", 50_000, 1000, 5),
    DataSet("CIFAR-100", 50_000, 1000, 5),
    DataSet("SVHN", 73_257, 1000, 5),
    DataSet("GTSRB", 26_640, 1000, 5),
    DataSet("Food-101", 75_750, 1000, 5),
    DataSet("E2E", 42_061, 1024, 10),
)


def settings(section: str, **choices: Any) -> list[dict[str, Any]]:
    """All combinations of the choices, each a list of values or one value, as rows for :func:`calibrations`.

    Args:
        section: name of the rows, to find them again in one table.
        **choices: of arguments of :func:`calibration`.
    """
    names = list(choices)
    values = [choice if isinstance(choice, list) else [choice] for choice in choices.values()]
    return [{"section": section, **dict(zip(names, row, strict=True))} for row in product(*values)]


def preset_split(method: str, steps: int) -> dict[str, Any]:
    """Arguments of :func:`hyfreedp.calibrate_noise` that the preset of a method fixes, for T = ``steps``."""
    return METHODS[method].settings.plan(steps)


def calibrations(rows: Iterable[dict[str, Any]], folder: Path) -> pd.DataFrame:
    """One long table of :func:`calibration`, each row computed once and kept in ``folder``; with a progress bar.

    Args:
        rows: arguments of :func:`calibration`; the keys of ``LABELS`` among them are copied to the table instead.
        folder: of the cells.
    """
    tables = []
    for row in tqdm(list(rows), desc="calibrations", unit="pair"):
        labels = {name: value for name, value in row.items() if name in LABELS}
        arguments = {name: value for name, value in row.items() if name not in LABELS}
        tables.append(cached(folder, calibration, **arguments).assign(**labels))
    return pd.concat(tables, ignore_index=True)


def calibration(*, even: bool = False, measured: bool = False, **arguments: Any) -> pd.DataFrame:
    """One calibrated pair of noises: one row.

    Args:
        even: the naive even split, :func:`even_split`, instead of the calibrated one.
        measured: whether to find out what the pair and its parts cost.
        **arguments: of :func:`even_split` or :func:`hyfreedp.calibrate_noise`.

    Returns:
        The fields of the :class:`~hyfreedp.NoiseSplit`, and ``even``, ``loss_std`` (standard deviation of each number
        of a probe, in units of its clip); if ``measured`` also ``true_epsilon`` (by PLD, gradient and probe on the same
        batch), ``gradients_epsilon`` and ``probes_epsilon`` (of these alone, by the split's own accounting) and
        ``probe_share``, the part of epsilon that the gradients leave to the probes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsoundAccountingWarning)  # the column "guarantee" says it
        split = (even_split if even else calibrate_noise)(**arguments)
    deviation = split.sigma_loss * (math.sqrt(2) if split.loss_mechanism == "laplace" else 1)
    row = split.to_dict() | {"even": even, "loss_std": deviation}
    if measured:
        parts = shares(split, coarseness=COARSENESS)
        row |= {
            "true_epsilon": true_epsilon(split),
            "gradients_epsilon": parts["gradients"],
            "probes_epsilon": parts["probes"],
            "probe_share": 1 - parts["gradients"] / parts["together"],
        }
    return pd.DataFrame([row])


def split_of(row: pd.Series) -> NoiseSplit:
    """The split in a row of the table of :func:`calibrations`."""
    values = row.replace({np.nan: ""})  # what a CSV makes of an empty reason
    names = [field.name for field in dataclasses.fields(NoiseSplit)]
    plain = {name: getattr(values[name], "item", lambda v=values[name]: v)() for name in names}
    return NoiseSplit.from_dict(plain | {"vote_steps": json.loads(plain["vote_steps"])})


def true_epsilon(split: NoiseSplit) -> float:
    """What a split really costs, however it was calibrated: by PLD, gradient and probe of a step on the same batch."""
    return spent(
        split, split.steps, split.probe_steps, accountant="pld", composition="same_batch", coarseness=COARSENESS
    )


def even_split(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    interval: int,
    accountant: str = "pld",
    composition: str = "same_batch",
) -> NoiseSplit:
    """The naive split of Fig. "noise grad loss": one Gaussian noise for the T gradients and the 3T/K losses alike.

    Arguments are those of :func:`hyfreedp.calibrate_noise`. The noise is the smallest within the budget, to 1e-5.
    """
    budget: dict[str, Any] = {
        "target_epsilon": target_epsilon,
        "target_delta": target_delta,
        "sample_rate": sample_rate,
        "steps": steps,
        "accountant": accountant,
    }
    vanilla = calibrate_noise(**budget, probe="none")
    reasons = unsound_reasons(vanilla.accountant, composition, "losses")  # type: ignore[arg-type]
    plan = NoiseSplit.from_dict(
        vanilla.to_dict()
        | {
            "probe": "losses",
            "interval": interval,
            "probe_steps": count_probe_steps(steps, interval, 0, "losses"),
            "allocation": "constant",
            "composition": composition,
            "guarantee": not reasons,
            "reason": "; ".join(reasons),
        }
    )

    def with_noise(sigma: float) -> NoiseSplit:
        return dataclasses.replace(
            plan, sigma_gradient=sigma, sigma_gradient_probe=sigma, sigma_loss=sigma, gamma=sigma / plan.sigma
        )

    def cost(sigma: float) -> float:
        return spent(with_noise(sigma), plan.steps, plan.probe_steps, coarseness=COARSENESS)

    noise = smallest_noise(cost, target_epsilon, start=vanilla.sigma, tolerance=1e-5)
    return dataclasses.replace(with_noise(noise), epsilon=cost(noise))


def mu_gdp(
    *, sample_rate: float, steps: int, sigma: float, probe_steps: int = 0, sigma_loss: float = math.inf
) -> float:
    """mu of Eq. (muGDP) as the paper prints it, with 3T/K written as 3 times the number of probe steps.

    Args:
        sample_rate: B/N.
        steps: T.
        sigma: noise multiplier of the gradient at every step.
        probe_steps: T/K; none for vanilla DP-SGD.
        sigma_loss: sigma_l, Gaussian.
    """
    mu_vanilla = math.sqrt(sample_rate**2 * steps * (math.exp(1 / sigma**2) - 1))
    return math.sqrt(mu_vanilla**2 + sample_rate**2 * 3 * probe_steps * (math.exp(1 / sigma_loss**2) - 1))


def gdp_delta(mu: float, epsilon: ArrayLike) -> np.ndarray:
    """delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu) of mu-GDP (Bu et al., 2020, Eq. (6))."""
    epsilon = np.asarray(epsilon, dtype=float)
    return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))


def gdp_epsilon(mu: float, delta: float) -> float:
    """The epsilon at which mu-GDP has this delta."""

    def excess(epsilon: float) -> float:
        return float(gdp_delta(mu, epsilon)) - delta

    if excess(0.0) <= 0:
        return 0.0
    upper = 1.0
    while excess(upper) > 0:
        upper *= 2
    return float(brentq(excess, 0.0, upper, xtol=1e-13))


def delta_curve(split: NoiseSplit, composition: Composition, epsilons: Sequence[float]) -> list[float]:
    """delta at each epsilon, by PLD, of a split whose releases are counted as one of its compositions does.

    Args:
        split: a finite one.
        composition: "same_batch" or "independent".
        epsilons: non-negative.

    Raises:
        ValueError: ``composition`` is "epsilon_sum", which has no single curve.
    """
    parts = releases(split, split.steps, split.probe_steps, composition)
    if len(parts) > 1:
        raise ValueError(f"composition must be 'same_batch' or 'independent', got {composition!r}")
    distribution = privacy_loss_distribution(merge(parts[0]), split.sample_rate, COARSENESS)
    return [float(distribution.get_delta_for_epsilon(float(value))) for value in epsilons]


def simulated_deltas(*, split: dict[str, Any], epsilons: list[float], runs: int, seeds: int) -> pd.DataFrame:
    """delta(epsilon) by running the mechanism itself on a worst-case record, without any accounting.

    In each simulated run the record is drawn into each batch with probability q; there it moves the gradient by its
    clip along one direction and each of the three losses by theirs, all by the same draw. The privacy loss of what is
    released is l = sum_t log(1 - q + q p_t/p'_t), and delta(epsilon) = E max(0, 1 - exp(epsilon - l)).

    Args:
        split: a :class:`~hyfreedp.NoiseSplit` as a dictionary, with probe "losses" and Gaussian noise.
        epsilons: where to estimate delta.
        runs: simulated runs per seed.
        seeds: number of independent repetitions.

    Returns:
        One row per epsilon: ``delta``, the mean over the seeds, and ``error``, its standard error over all runs.
    """
    plan = NoiseSplit.from_dict(split)
    if plan.probe != "losses" or plan.loss_mechanism != "gaussian":
        raise ValueError(
            f"split must probe 'losses' with 'gaussian' noise, got {plan.probe!r}, {plan.loss_mechanism!r}"
        )
    q = plan.sample_rate
    samples = []
    for seed in tqdm(range(seeds), desc="simulated mechanism", unit="seed"):
        generator = NoiseGenerator(seed)
        total = np.zeros(runs)
        for t in range(plan.steps):
            included = generator.uniform(runs).numpy() < q
            sigma = plan.gradient_noise_multiplier(t)
            ratio = (included + sigma * generator.normal(runs).numpy() - 0.5) / sigma**2
            if plan.is_probe_step(t):
                losses = included + plan.sigma_loss * generator.normal(3, runs).numpy()
                ratio += ((losses - 0.5) / plan.sigma_loss**2).sum(axis=0)
            total += np.logaddexp(math.log1p(-q), math.log(q) + ratio)
        samples.append(total)
    losses = np.concatenate(samples)
    values = np.array([np.maximum(-np.expm1(epsilon - losses), 0) for epsilon in epsilons])
    error = values.std(axis=1) / math.sqrt(losses.size)
    return pd.DataFrame({"epsilon": epsilons, "delta": values.mean(axis=1), "error": error})
