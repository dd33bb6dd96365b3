"""Privacy loss distributions of Poisson-subsampled releases, built with dp-accounting.

Subsampled Gaussian and Laplace mechanisms are dp-accounting's own. Their products, which it cannot subsample, are
composed unsampled by dp-accounting, amplified here through their hockey-stick curve, and handed back to it. Every step
rounds up, so the epsilon is never below the truth, but for floating-point errors (about 1e-14 in delta).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_gaussian_mechanism,
    from_laplace_mechanism,
    identity,
)
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

from hyfreedp.accounting.mechanisms import Mechanism, Release

INTERVAL = 1e-4  # discretisation of the privacy loss, dp-accounting's default
LARGEST_GRID = 300_000  # points; only noise multipliers below 0.4 need more


def privacy_loss_distribution(
    releases: tuple[Release, ...], sample_rate: float, coarseness: int = 1
) -> PrivacyLossDistribution:
    """PLD of all releases, each on its own Poisson batches; its methods give epsilon at delta and delta at epsilon.

    Losses are discretised to ``coarseness * INTERVAL``, doubled until those of one release fit into ``LARGEST_GRID``.
    """
    interval = coarseness * INTERVAL
    while any(_largest_loss(mechanism, interval) > LARGEST_GRID for mechanism, _ in releases):
        interval *= 2
    total = identity(interval)
    for mechanism, count in releases:
        total = total.compose(_repeated(mechanism, count, sample_rate, interval))
    return total


@lru_cache(maxsize=8)  # a few megabytes each; a search varies one release and keeps the others
def _repeated(mechanism: Mechanism, count: int, sample_rate: float, interval: float) -> PrivacyLossDistribution:
    return _subsampled(mechanism, sample_rate, interval).self_compose(count)


@lru_cache(maxsize=4)  # made in most of a second; a run asks for its few mechanisms with many counts
def _subsampled(mechanism: Mechanism, sample_rate: float, interval: float) -> PrivacyLossDistribution:
    if mechanism.coordinates == 0:
        return from_gaussian_mechanism(
            mechanism.gaussian, value_discretization_interval=interval, sampling_prob=sample_rate
        )
    if mechanism.coordinates == 1 and math.isinf(mechanism.gaussian):
        return from_laplace_mechanism(
            mechanism.laplace, value_discretization_interval=interval, sampling_prob=sample_rate
        )
    product = from_laplace_mechanism(mechanism.laplace, value_discretization_interval=interval)
    product = product.self_compose(mechanism.coordinates)
    if math.isfinite(mechanism.gaussian):
        product = product.compose(_unsampled_gaussian(mechanism.gaussian, interval))
    return amplify_by_sampling(product, _largest_loss(mechanism, interval), sample_rate, interval)


@lru_cache(maxsize=2)
def _unsampled_gaussian(noise_multiplier: float, interval: float) -> PrivacyLossDistribution:
    return from_gaussian_mechanism(noise_multiplier, value_discretization_interval=interval)


def _largest_loss(mechanism: Mechanism, interval: float) -> int:
    """Grid point of the largest finite privacy loss of the unsampled mechanism, each part rounded up as in its PLD."""
    loss = mechanism.coordinates * math.ceil(1 / (mechanism.laplace * interval))
    if math.isfinite(mechanism.gaussian):
        loss += math.ceil(GaussianPrivacyLoss(mechanism.gaussian).connect_dots_bounds().epsilon_upper / interval)
    return loss


def amplify_by_sampling(
    unsampled: PrivacyLossDistribution, largest_loss: int, sample_rate: float, interval: float = INTERVAL
) -> PrivacyLossDistribution:
    """PLD of a mechanism on a Poisson batch, from its PLD on a fixed batch.

    With (P, Q) the outputs with and without the record, the subsampled pair is ((1-q)Q + qP, Q) when a record is
    removed and its reverse when one is added (Zhu, Dong and Wang, AISTATS 2022, Theorem 11). Their hockey-stick curves
    follow from the unsampled delta0 as a function of e^epsilon,

        remove:  q delta0((e^eps - 1 + q) / q),                  but 1 - e^eps where that argument is negative,
        add:     (1 - (1-q) e^eps) delta0(q / (e^-eps - 1 + q)), but 0 where that denominator is negative,

    and grow with delta0, so that an upper bound on delta0 gives upper bounds. They are rounded up to the grid by
    connecting the dots (Doroshenko et al., PoPETs 2022).

    Args:
        unsampled: pessimistic PLD of a symmetric pair, that is of noise symmetric about its centre.
        largest_loss: the largest finite privacy loss of ``unsampled``, in units of ``interval``.
        sample_rate: q in (0, 1].
        interval: discretisation, the same as that of ``unsampled``.
    """
    if sample_rate == 1:
        return unsampled
    losses = np.arange(largest_loss + 1) * interval
    atoms, deltas = np.exp(losses), unsampled.get_delta_for_epsilon(losses)

    def delta0(x: np.ndarray) -> np.ndarray:
        # Between the atoms of a discrete pair delta0 is linear in x = e^epsilon. Below x = 1 symmetry gives it.
        above = np.interp(np.where(x >= 1, x, 1 / np.maximum(x, 1e-300)), atoms, deltas)
        return np.where(x >= 1, above, 1 - x + x * above)

    lower = math.floor(math.log1p(sample_rate * math.expm1(-largest_loss * interval)) / interval)
    upper = math.ceil(math.log1p(sample_rate * math.expm1(largest_loss * interval)) / interval)

    epsilon = np.arange(lower, upper + 1) * interval
    argument = 1 + np.expm1(epsilon) / sample_rate
    remove = np.where(argument > 0, sample_rate * delta0(np.maximum(argument, 0)), -np.expm1(epsilon))

    epsilon = np.arange(-upper, -lower + 1) * interval
    denominator = np.expm1(-epsilon) + sample_rate
    argument = sample_rate / np.where(denominator > 0, denominator, 1)
    add = np.where(denominator > 0, np.exp(epsilon) * denominator * delta0(argument), 0)
    return PrivacyLossDistribution(
        pmf_remove=_connect_the_dots(lower, upper, remove, interval),
        pmf_add=_connect_the_dots(-upper, -lower, add, interval),
    )


def _connect_the_dots(lower: int, upper: int, deltas: np.ndarray, interval: float) -> pld_pmf.PLDPmf:
    # Rounding may make the curve rise by 1e-16 somewhere; the running maximum from the right is the safe repair.
    falling = np.maximum.accumulate(np.clip(deltas, 0, 1)[::-1])[::-1]
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, lower, upper, falling)
