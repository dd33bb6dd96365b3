"""Upper bounds of the epsilon of several releases, each on its own Poisson batches.

A release is the sum of a batch plus Gaussian noise of standard deviation sigma times the sum's L2 sensitivity. Several
releases of one batch count as a single one whose sigma^-2 is the sum of theirs. Neighbours differ in one record, or in
the records of one person (:mod:`hyfreedp.accounting.groups`).

* "pld": privacy loss distributions, the tightest; :mod:`hyfreedp.accounting.groups` makes that of one release,
  :mod:`hyfreedp.accounting.privacy_loss` composes them.
* "rdp": Renyi differential privacy.

dp-accounting is imported inside functions, since importing it takes a second.
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

# A noise multiplier, and the number of independently drawn batches that are released with it.
Release = tuple[float, int]

INTERVAL = 1e-4  # grid interval of the privacy loss, dp-accounting's default
LARGEST_GRID = 300_000  # points; only noise multipliers below 0.4 would need more


def composed_epsilon(
    releases: Iterable[Release],
    *,
    sample_rate: float,
    delta: float,
    accountant: Accountant,
    coarseness: int = 1,
    records_per_person: int = 1,
) -> float:
    """Epsilon at ``delta`` of all releases together, 0 if there are none. Results are cached within the process.

    Args:
        releases: in any order.
        sample_rate: probability q in (0, 1] with which a record enters a batch.
        delta, accountant: in (0, 1); "pld" or "rdp".
        coarseness: factor on the grid interval of the privacy losses ("pld" only).
        records_per_person: k >= 1, in how many records neighbours may differ ("pld" only; else ValueError).
    """
    if records_per_person > 1 and accountant == "rdp":
        raise ValueError(
            f"accountant must be 'pld' where records_per_person is more than 1, got 'rdp' and {records_per_person}"
        )
    merged = merge(releases)
    if not merged:
        return 0.0
    if any(sigma < 1e-3 for sigma, _ in merged):  # the losses would overflow dp-accounting's floats
        return math.inf
    if accountant == "rdp":
        return _rdp_epsilon(merged, sample_rate, delta)
    return _pld_epsilon(merged, sample_rate, delta, coarseness, records_per_person)


def merge(releases: Iterable[Release]) -> tuple[Release, ...]:
    """Sort by noise and add up counts; multipliers that agree to a relative 1e-12 count as the smaller of them."""
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
    both_directions = [_subsampled(sigma, sample_rate, interval, records) for sigma, _ in releases]
    counts = [count for _, count in releases]
    removed_and_added = zip(*both_directions, strict=True)
    return max(epsilon_of_sum(list(zip(losses, counts, strict=True)), delta) for losses in removed_and_added)


def grid(releases: Iterable[Release], coarseness: int = 1) -> float:
    """Grid interval: ``coarseness * INTERVAL``, doubled until the losses of a release fit into ``LARGEST_GRID``."""
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    largest = max(GaussianPrivacyLoss(sigma).connect_dots_bounds().epsilon_upper for sigma, _ in releases)
    interval = coarseness * INTERVAL
    while math.ceil(largest / interval) > LARGEST_GRID:
        interval *= 2
    return interval


@lru_cache(maxsize=4)  # a run has two multipliers, which are composed with many counts
def _subsampled(
    sigma: float, sample_rate: float, interval: float, records: int = 1
) -> tuple[PrivacyLossDistribution, ...]:
    """The privacy loss distributions of one release, for removing and for adding a person's records."""
    dense = [pmf.to_dense_pmf() for pmf in group_pmfs(sigma, sample_rate, records, interval)]
    with np.errstate(divide="ignore"):  # log(0) where there is no mass
        return tuple(
            PrivacyLossDistribution(pmf._lower_loss, np.log(pmf._probs), pmf._infinity_mass, interval) for pmf in dense
        )


@lru_cache(maxsize=4096)
def _rdp_epsilon(releases: tuple[Release, ...], sample_rate: float, delta: float) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant, logger = RdpAccountant(), logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of orders that it leaves out; epsilon is an upper bound without them too
    try:
        for sigma, count in releases:
            sigma = min(sigma, 1e6 * math.sqrt(sample_rate))  # with more noise its result is only rounding error
            accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(sample_rate, GaussianDpEvent(sigma)), count))
        return float(accountant.get_epsilon(delta))
    finally:
        logger.setLevel(level)
