"""Epsilon of a list of releases, each on its own Poisson batches, a bound by either accountant.

A release is a Gaussian vector with noise of standard deviation sigma times its L2 sensitivity, on one Poisson batch.
Several such vectors about one batch are a single one: their sigma^-2 add up. Adjacency: one record more or less, or
those of one person, see :mod:`hyfreedp.accounting.groups`.

* "pld": privacy loss distributions, the tightest; :mod:`hyfreedp.accounting.groups` makes those of one release,
  :mod:`hyfreedp.accounting.privacy_loss` adds them up.
* "rdp": Renyi differential privacy.

dp-accounting is imported where it is used, since that takes a second.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

import numpy as np

from hyfreedp.accounting.groups import group_pmfs
from hyfreedp.accounting.privacy_loss import PrivacyLossDistribution, epsilon_of_sum

Accountant = Literal["pld", "rdp"]

# A noise multiplier and the number of batches, each sampled afresh, on which there is such a release.
Release = tuple[float, int]

INTERVAL = 1e-4  # discretisation of the privacy loss, dp-accounting's default
LARGEST_GRID = 300_000  # points; only noise multipliers below 0.4 need more


def composed_epsilon(
    releases: Iterable[Release],
    *,
    sample_rate: float,
    delta: float,
    accountant: Accountant,
    coarseness: int = 1,
    records_per_person: int = 1,
) -> float:
    """Epsilon at ``delta`` of all releases together. Results are cached within the process.

    Args:
        releases: none cost 0.
        sample_rate: probability q in (0, 1] with which a record enters a batch.
        delta: in (0, 1).
        accountant: "pld" or "rdp".
        coarseness: how many times coarser than usual the grid of privacy losses is ("pld" only).
        records_per_person: k >= 1, how many records neighbours may differ in ("pld" only).

    Raises:
        ValueError: several records per person by "rdp".
    """
    if records_per_person > 1 and accountant == "rdp":
        raise ValueError(
            f"accountant must be 'pld' where records_per_person is more than 1, got 'rdp' and {records_per_person}"
        )
    merged = merge(releases)
    if not merged:
        return 0.0
    if any(sigma < 1e-3 for sigma, _ in merged):  # whose losses are beyond what dp-accounting's floats hold
        return math.inf
    if accountant == "rdp":
        return _rdp_epsilon(merged, sample_rate, delta)
    return _pld_epsilon(merged, sample_rate, delta, coarseness, records_per_person)


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
def _pld_epsilon(
    releases: tuple[Release, ...], sample_rate: float, delta: float, coarseness: int, records: int
) -> float:
    interval = grid([(sigma / records, count) for sigma, count in releases], coarseness)
    kinds = [_subsampled(sigma, sample_rate, interval, records) for sigma, _ in releases]
    counts = [count for _, count in releases]
    removed_and_added = zip(*kinds, strict=True)
    return max(epsilon_of_sum(list(zip(losses, counts, strict=True)), delta) for losses in removed_and_added)


def grid(releases: Iterable[Release], coarseness: int = 1) -> float:
    """Interval of privacy losses: ``coarseness * INTERVAL``, doubled until one release's fit into ``LARGEST_GRID``."""
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    largest = max(GaussianPrivacyLoss(sigma).connect_dots_bounds().epsilon_upper for sigma, _ in releases)
    interval = coarseness * INTERVAL
    while math.ceil(largest / interval) > LARGEST_GRID:
        interval *= 2
    return interval


@lru_cache(maxsize=4)  # a run asks for its two with many counts
def _subsampled(
    sigma: float, sample_rate: float, interval: float, records: int = 1
) -> tuple[PrivacyLossDistribution, ...]:
    """The privacy loss where a person's records are removed, and where they are added."""
    kinds = group_pmfs(sigma, sample_rate, records, interval)
    dense = [one.to_dense_pmf() for one in kinds]
    with np.errstate(divide="ignore"):  # of no mass
        return tuple(
            PrivacyLossDistribution(one._lower_loss, np.log(one._probs), one._infinity_mass, interval) for one in dense
        )


@lru_cache(maxsize=4096)
def _rdp_epsilon(releases: tuple[Release, ...], sample_rate: float, delta: float) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant, logger = RdpAccountant(), logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it tells of orders that it leaves out, without which epsilon is a bound as well
    try:
        for sigma, count in releases:
            sigma = min(sigma, 1e6 * math.sqrt(sample_rate))  # of more noise it finds nothing, but for rounding
            accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(sample_rate, GaussianDpEvent(sigma)), count))
        return float(accountant.get_epsilon(delta))
    finally:
        logger.setLevel(level)
