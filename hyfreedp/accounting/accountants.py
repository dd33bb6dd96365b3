"""Epsilon of a list of releases, each on its own Poisson batches, by dp-accounting: a bound by either accountant.

A release is a Gaussian vector with noise of standard deviation sigma times its L2 sensitivity, on one Poisson batch.
Several such vectors about one batch are a single one: their sigma^-2 add up. Adjacency: one record more or less.

* "pld": privacy loss distributions, the tightest.
* "rdp": Renyi differential privacy.

dp-accounting is imported where it is used, since that takes a second.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal

Accountant = Literal["pld", "rdp"]

# A noise multiplier and the number of batches, each sampled afresh, on which there is such a release.
Release = tuple[float, int]

INTERVAL = 1e-4  # discretisation of the privacy loss, dp-accounting's default
LARGEST_GRID = 300_000  # points; only noise multipliers below 0.4 need more


def composed_epsilon(
    releases: Iterable[Release], *, sample_rate: float, delta: float, accountant: Accountant, coarseness: int = 1
) -> float:
    """Epsilon at ``delta`` of all releases together. Results are cached within the process.

    Args:
        releases: none cost 0.
        sample_rate: probability q in (0, 1] with which a record enters a batch.
        delta: in (0, 1).
        accountant: "pld" or "rdp".
        coarseness: how many times coarser than usual the grid of privacy losses is ("pld" only).
    """
    merged = merge(releases)
    if not merged:
        return 0.0
    if any(sigma == 0 for sigma, _ in merged):
        return math.inf
    if accountant == "rdp":
        return _rdp_epsilon(merged, sample_rate, delta)
    return _pld_epsilon(merged, sample_rate, delta, coarseness)


def merge(releases: Iterable[Release]) -> tuple[Release, ...]:
    """In order of noise; multipliers equal to 1e-12, as a closed form and its parts are, count as the smaller."""
    merged: list[Release] = []
    for sigma, count in sorted(releases):
        if merged and math.isclose(merged[-1][0], sigma, rel_tol=1e-12):
            merged[-1] = merged[-1][0], merged[-1][1] + count
        elif count:
            merged.append((sigma, count))
    return tuple(merged)


@lru_cache(maxsize=4096)
def _pld_epsilon(releases: tuple[Release, ...], sample_rate: float, delta: float, coarseness: int) -> float:
    return float(privacy_loss_distribution(releases, sample_rate, coarseness).get_epsilon_for_delta(delta))


def privacy_loss_distribution(releases: Iterable[Release], sample_rate: float, coarseness: int = 1) -> Any:
    """dp-accounting's PLD of all releases; its methods give epsilon at delta and delta at epsilon, rounded up.

    Losses are discretised to ``coarseness * INTERVAL``, doubled until those of one release fit into ``LARGEST_GRID``.
    """
    from dp_accounting.pld.privacy_loss_distribution import identity
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    merged = merge(releases)
    largest = max(GaussianPrivacyLoss(sigma).connect_dots_bounds().epsilon_upper for sigma, _ in merged)
    interval = coarseness * INTERVAL
    while math.ceil(largest / interval) > LARGEST_GRID:
        interval *= 2
    total = identity(interval)
    for sigma, count in merged:
        total = total.compose(_repeated(sigma, count, sample_rate, interval))
    return total


@lru_cache(maxsize=8)  # a few megabytes each; a search varies one release and keeps the others
def _repeated(sigma: float, count: int, sample_rate: float, interval: float) -> Any:
    return _subsampled(sigma, sample_rate, interval).self_compose(count)


@lru_cache(maxsize=4)  # made in most of a second; a run asks for its two with many counts
def _subsampled(sigma: float, sample_rate: float, interval: float) -> Any:
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    return from_gaussian_mechanism(sigma, value_discretization_interval=interval, sampling_prob=sample_rate)


@lru_cache(maxsize=4096)
def _rdp_epsilon(releases: tuple[Release, ...], sample_rate: float, delta: float) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant, logger = RdpAccountant(), logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it tells of orders that it leaves out, without which epsilon is a bound as well
    try:
        for sigma, count in releases:
            accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(sample_rate, GaussianDpEvent(sigma)), count))
        return float(accountant.get_epsilon(delta))
    finally:
        logger.setLevel(level)
