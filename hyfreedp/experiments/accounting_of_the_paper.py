"""The paper's own accounting, for comparison: Alg. 2 as printed, and alternatives.

Only composition "same_batch" with accountant "rdp" or "pld" bounds the epsilon of Algorithm 1, as the core does, see
:mod:`hyfreedp.accounting`. Compositions:

* "independent": Alg. 2, line 8: T gradients and 3T/K losses, as if each were computed on its own batch.
* "epsilon_sum": the paper's appendix, f^{3T/K}(sigma_l) + f^T(sigma_g), each at the same delta.
* "same_batch": gradient and probe of a step are one release about one batch.

Accountants: "rdp", by Opacus, or with Laplace noise by autodp, which the paper used; "pld", by dp-accounting, without
Laplace noise; "gdp", the central limit approximation of Eq. (muGDP), which is no bound.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.stats import norm

from hyfreedp.accounting import NoiseSplit
from hyfreedp.accounting.accountants import composed_epsilon, grid, sampled
from hyfreedp.accounting.composition import effective_noise
from hyfreedp.accounting.search import TOLERANCE, smallest_noise

Accountant = Literal["rdp", "pld", "gdp"]
Composition = Literal["same_batch", "independent", "epsilon_sum"]
LossMechanism = Literal["gaussian", "laplace"]

# autodp's bound for Laplace noise needs integer orders; Opacus's Gaussians also have fractional ones.
INTEGER_ORDERS = (*range(2, 64), 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, 1024)
ORDERS = tuple(sorted({*INTEGER_ORDERS, *(1 + x / 10 for x in range(1, 100))}))


@dataclass(frozen=True)
class Mechanism:
    """A vector with Gaussian noise and numbers with Laplace noise, released together on one batch.

    Attributes:
        gaussian: noise multiplier of the vector; infinite if there is none.
        laplace: scale of the Laplace noise, for sensitivity 1; infinite if there is none.
        numbers: how many numbers have Laplace noise.
    """

    gaussian: float = math.inf
    laplace: float = math.inf
    numbers: int = 0


Release = tuple[Mechanism, int]  # and how often


@dataclass(frozen=True)
class Counting:
    """A way of accounting for a run whose probes are three losses; the module docstring explains its fields."""

    accountant: Accountant = "rdp"
    composition: Composition = "independent"
    loss_mechanism: LossMechanism = "gaussian"

    @property
    def sound(self) -> bool:
        """Whether its epsilon is an upper bound for Algorithm 1."""
        return self.accountant != "gdp" and self.composition == "same_batch"

    def releases(self, split: NoiseSplit) -> tuple[tuple[Release, ...], ...]:
        """The releases of a run, in parts whose epsilons are added: two for "epsilon_sum", otherwise one."""
        probes, sigma_loss, gaussian = split.probe_steps, split.sigma_loss, self.loss_mechanism == "gaussian"
        gradients = (Mechanism(split.sigma_gradient), split.steps)
        if not probes:
            return ((gradients,),)
        if self.composition != "same_batch":
            one = Mechanism(sigma_loss) if gaussian else Mechanism(laplace=sigma_loss, numbers=1)
            losses = (one, 3 * probes)
            return ((gradients, losses),) if self.composition == "independent" else ((gradients,), (losses,))
        if gaussian:
            together = Mechanism(effective_noise(split.sigma_gradient_probe, sigma_loss, "losses"))
        else:
            together = Mechanism(split.sigma_gradient_probe, sigma_loss, 3)
        return (((gradients[0], split.steps - probes), (together, probes)),)

    def epsilon(self, split: NoiseSplit, *, delta: float | None = None, coarseness: int = 1) -> float:
        """Epsilon of the run by this accounting; ``delta`` None: the split's."""
        at = split.target_delta if delta is None else delta
        return sum(self.cost(part, split.sample_rate, at, coarseness) for part in self.releases(split))

    def cost(self, part: tuple[Release, ...], sample_rate: float, delta: float, coarseness: int = 1) -> float:
        """Epsilon of some releases, each on its own batches."""
        part = tuple((mechanism, count) for mechanism, count in part if count)
        if self.accountant == "gdp":
            return gdp_epsilon(sample_rate * math.sqrt(sum(n * chi_squared(one) for one, n in part)), delta)
        if self.accountant == "pld":
            if any(one.numbers for one, _ in part):
                raise ValueError("accountant 'pld' counts no Laplace noise: take 'rdp' or 'gdp'")
            noises = [(one.gaussian, count) for one, count in part]
            return composed_epsilon(
                noises, sample_rate=sample_rate, delta=delta, accountant="pld", coarseness=coarseness
            )
        # The same orders for all parts of a run: with other orders gradients alone would look cheaper.
        orders = INTEGER_ORDERS if self.loss_mechanism == "laplace" else ORDERS
        return epsilon_of_rdp(orders, sum(count * rdp_of(one, sample_rate, orders) for one, count in part), delta)


SOUND = Counting("pld", "same_batch")


def vanilla_noise(*, target_epsilon: float, counting: Counting, **plan: Any) -> NoiseSplit:
    """A split with the sigma of DP-SGD without probes, and no other noise yet; arguments of :func:`calibrate`."""
    plan |= {"probe": "losses", "warmup_steps": 0, "vote_steps": (), "accountant": "pld", "allocation": "constant"}
    plan |= dict.fromkeys(("sigma", "sigma_gradient", "sigma_gradient_probe"), 0.0)
    split = NoiseSplit(target_epsilon=target_epsilon, gamma=1.0, sigma_loss=math.inf, epsilon=math.inf, **plan)
    rough = smallest_noise(lambda sigma: _gradients(split, counting, sigma, 10), target_epsilon, 1.0, 1e-3)
    return replace(split, sigma=smallest_noise(lambda sigma: _gradients(split, counting, sigma), target_epsilon, rough))


def _gradients(split: NoiseSplit, counting: Counting, sigma: float, coarseness: int = 1) -> float:
    return counting.cost(((Mechanism(sigma), split.steps),), split.sample_rate, split.target_delta, coarseness)


def calibrate(*, gamma: float = 1.01, counting: Counting = Counting(), **budget: Any) -> NoiseSplit:
    """Alg. 2: sigma_g = gamma sigma at all steps, and the smallest sigma_l that the rest of the budget allows.

    The paper takes the sigma_l whose epsilon is nearest to the target; here epsilon never exceeds the target.

    Args:
        gamma: as in Alg. 2.
        counting: the accounting.
        **budget: ``target_epsilon``, ``target_delta``, ``sample_rate``, ``steps`` and ``interval``.

    Returns:
        A split for ``make_private_with_epsilon(split=...)``. Its epsilon is infinite, since none is proven. With
        Laplace noise, which no run has, ``sigma_loss`` is the scale.

    Raises:
        ValueError: ``gamma`` leaves too little of the budget for the losses.
    """
    split = vanilla_noise(counting=counting, **budget)
    sigma = split.sigma
    split = replace(split, gamma=gamma, sigma_gradient=gamma * sigma, sigma_gradient_probe=gamma * sigma)

    def found(start: float, coarseness: int, tolerance: float) -> float:
        alone = _gradients(split, counting, gamma * sigma, coarseness)

        def of_losses(sigma_loss: float) -> float:
            return counting.epsilon(replace(split, sigma_loss=sigma_loss), coarseness=coarseness) - alone

        return smallest_noise(of_losses, _gradients(split, counting, sigma, coarseness) - alone, start, tolerance)

    sigma_loss = found(sigma * math.sqrt(3 / (1 - gamma**-2) * split.probe_steps / split.steps), 10, 1e-3)
    if math.isfinite(sigma_loss):
        sigma_loss = found(sigma_loss, 1, TOLERANCE)
    if math.isinf(sigma_loss):
        raise ValueError(f"gamma={gamma!r} leaves too little of the budget for the losses under {counting}")
    return replace(split, sigma_loss=sigma_loss)


def even_split(*, counting: Counting = SOUND, **budget: Any) -> NoiseSplit:
    """The naive split of Fig. "noise grad loss": the same noise multiplier for the T gradients and the 3T/K losses.

    It is the smallest within the budget, up to 1e-5. Arguments and result are those of :func:`calibrate`.
    """
    split = vanilla_noise(counting=counting, **budget)

    def with_noise(noise: float) -> NoiseSplit:
        return replace(split, sigma_gradient=noise, sigma_gradient_probe=noise, sigma_loss=noise)

    cost = partial(counting.epsilon, coarseness=10)
    noise = smallest_noise(lambda sigma: cost(with_noise(sigma)), split.target_epsilon, split.sigma, 1e-5)
    return replace(with_noise(noise), gamma=noise / split.sigma)


def delta_curve(split: NoiseSplit, composition: Composition, epsilons: Sequence[float]) -> list[float]:
    """delta at each epsilon, by dp-accounting's PLD on a coarse grid, for "same_batch" or "independent".

    It has the rounding errors of an FFT, see ``hyfreedp.accounting.privacy_loss``.
    """
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism, identity

    (part,) = Counting("pld", composition).releases(split)
    releases = [(one.gaussian, count) for one, count in part]
    interval = grid([(sampled(sigma, split.sample_rate, 1), count) for sigma, count in releases], 10)
    total = identity(interval)
    for sigma, count in releases:
        if count:
            one = from_gaussian_mechanism(
                sigma, value_discretization_interval=interval, sampling_prob=split.sample_rate
            )
            total = total.compose(one.self_compose(count))
    return [float(total.get_delta_for_epsilon(float(value))) for value in epsilons]


def epsilon_of_rdp(orders: Sequence[float], rdp: ArrayLike, delta: float) -> float:
    """Epsilon from Renyi DP at these orders: Opacus's conversion at the best order."""
    from opacus.accountants.analysis import rdp as opacus_rdp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the")  # largest or smallest: still a bound
        return max(float(opacus_rdp.get_privacy_spent(orders=orders, rdp=rdp, delta=delta)[0]), 0.0)


@lru_cache(maxsize=256)
def rdp_of(mechanism: Mechanism, sample_rate: float, orders: tuple[float, ...]) -> np.ndarray:
    """Renyi DP at each order, for one release on a Poisson batch."""
    if mechanism.numbers:
        curve = _laplace_rdp(mechanism, sample_rate)
        return np.maximum([curve.RenyiDP(int(order)) for order in orders], 0.0)  # rounding can leave -1e-16
    return np.array([_gaussian_rdp(mechanism.gaussian, sample_rate, order) for order in orders])


def _gaussian_rdp(noise_multiplier: float, sample_rate: float, order: float) -> float:
    from opacus.accountants.analysis import rdp as opacus_rdp

    try:
        rdp = opacus_rdp.compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=[order])[0]
    except (ValueError, OverflowError):  # the series can fail at extreme parameters: leave that order out
        return math.inf
    return math.inf if math.isnan(rdp) else max(float(rdp), 0.0)


def _laplace_rdp(mechanism: Mechanism, sample_rate: float) -> Any:
    """autodp's RDP of one release: the parts' RDP without sampling is added, then amplified by Poisson sampling.

    The "improved bound" is the exact divergence for removing a record, at integer orders. For symmetric noise it also
    bounds the divergence for adding one (Mironov, Talwar and Zhang, 2019, Theorem 5).
    """
    from autodp import mechanism_zoo, transformer_zoo

    parts, counts = [mechanism_zoo.LaplaceMechanism(b=mechanism.laplace)], [mechanism.numbers]
    if math.isfinite(mechanism.gaussian):
        parts.append(mechanism_zoo.GaussianMechanism(sigma=mechanism.gaussian))
        counts.append(1)
    product = transformer_zoo.Composition()(parts, counts)
    product.RenyiDP = lru_cache(maxsize=None)(product.RenyiDP)  # the series of each order uses all lower orders again
    return transformer_zoo.AmplificationBySampling(PoissonSampling=True)(product, sample_rate, improved_bound_flag=True)


def mu_gdp(
    *, sample_rate: float, steps: int, sigma: float, probe_steps: int = 0, sigma_loss: float = math.inf
) -> float:
    """mu of Eq. (muGDP) as printed, where T/K is the number of probe steps.

    Args:
        sample_rate: B/N.
        steps: T.
        sigma: noise multiplier of the gradient at every step.
        probe_steps: T/K; 0 for vanilla DP-SGD.
        sigma_loss: sigma_l of Gaussian noise.
    """
    mu_vanilla = math.sqrt(sample_rate**2 * steps * (math.exp(1 / sigma**2) - 1))
    return math.sqrt(mu_vanilla**2 + sample_rate**2 * 3 * probe_steps * (math.exp(1 / sigma_loss**2) - 1))


def chi_squared(mechanism: Mechanism) -> float:
    """chi^2 divergence of one release without sampling, for which Eq. (muGDP) adds q^2 chi^2 to mu^2 (Bu et al., 2020).

    1 + chi^2 is e^(1/sigma^2) for Gaussian noise and (2 e^(1/b) + e^(-2/b)) / 3 for Laplace noise, and multiplies over
    independent parts.
    """
    b = mechanism.laplace
    try:
        excess = (2 * math.expm1(1 / b) + math.expm1(-2 / b)) / 3
        return math.expm1(mechanism.gaussian**-2 + mechanism.numbers * math.log1p(excess))
    except OverflowError:
        return math.inf


def gdp_delta(mu: float, epsilon: ArrayLike) -> np.ndarray:
    """delta of mu-GDP: Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu) (Bu et al., 2020, Eq. (6))."""
    epsilon = np.asarray(epsilon, dtype=float)
    return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))


def gdp_epsilon(mu: float, delta: float) -> float:
    """The epsilon >= 0 at which mu-GDP has this delta; infinite for mu >= 40."""

    def excess(epsilon: float) -> float:
        return float(gdp_delta(mu, epsilon)) - delta

    if mu == 0 or (mu < 40 and excess(0.0) <= 0):
        return 0.0
    upper = 1.0
    while mu < 40 and excess(upper) > 0:
        upper *= 2
    return math.inf if mu >= 40 else float(brentq(excess, 0.0, upper, xtol=1e-13))
