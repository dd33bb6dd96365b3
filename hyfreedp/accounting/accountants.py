"""Upper bounds of the epsilon of several releases, each on its own Poisson batches.

A release is the sum of a batch plus Gaussian noise of standard deviation sigma times the sum's L2 sensitivity.
Neighbours differ in one record, or in the records of one person.

* "pld": privacy loss distributions, the tightest: of one release in ``groups``, composed in ``privacy_loss``.
* "rdp": Renyi differential privacy, by dp-accounting, which takes a second to import.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from hyfreedp.accounting.groups import SampledGaussian
from hyfreedp.accounting.privacy_loss import epsilon_of_sum

Accountant = Literal["pld", "rdp"]

# A noise multiplier, and the number of independently drawn batches that are released with it.
Release = tuple[float, int]

FINENESS = 100  # grid intervals in a standard deviation of the privacy loss
LARGEST_GRID = 300_000  # points of one release; only rare losses that are large would need more
SMALLEST_INTERVAL = 1e-10  # where losses are as small as their rounding


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
        raise ValueError(f"accountant must be 'pld' if records_per_person > 1, got 'rdp' and {records_per_person}")
    merged = merge(releases)
    if not merged:
        return 0.0
    if any(sigma < 1e-3 for sigma, _ in merged):  # the losses would overflow
        return math.inf
    if accountant == "rdp":
        return _rdp_epsilon(merged, sample_rate, delta)
    return _pld_epsilon(merged, sample_rate, delta, coarseness, records_per_person)


def merge(releases: Iterable[Release]) -> tuple[Release, ...]:
    """Sort by noise and add up counts. Multipliers are rounded down to 40 bits, so that equal ones meet."""
    counts: dict[float, int] = {}
    for sigma, count in sorted(releases):
        if count:
            mantissa, exponent = math.frexp(sigma)
            sigma = math.ldexp(math.floor(mantissa * 2**40), exponent - 40)
            counts[sigma] = counts.get(sigma, 0) + count
    return tuple(counts.items())


@lru_cache(maxsize=4096)
def _pld_epsilon(
    releases: tuple[Release, ...], sample_rate: float, delta: float, coarseness: int, records: int
) -> float:
    return pld_epsilon([(sampled(sigma, sample_rate, records), count) for sigma, count in releases], delta, coarseness)


def pld_epsilon(releases: Sequence[tuple[SampledGaussian, int]], delta: float, coarseness: int = 1) -> float:
    """Epsilon at ``delta`` of releases, each with a count: the larger of removing and of adding a person's records."""
    interval = grid(releases, coarseness)
    both_directions = [one.distributions(interval) for one, _ in releases]
    counts = [count for _, count in releases]
    removed_and_added = zip(*both_directions, strict=True)
    return max(epsilon_of_sum(list(zip(losses, counts, strict=True)), delta) for losses in removed_and_added)


def grid(releases: Sequence[tuple[SampledGaussian, int]], coarseness: int = 1) -> float:
    """Grid interval of the privacy losses: ``coarseness / FINENESS`` of their standard deviation.

    Of several releases it is the root mean square. Rounding to the grid adds interval^2 / 4 at most to a variance.
    """
    counts = [count for _, count in releases]
    deviation = math.sqrt(np.average([one.deviation**2 for one, _ in releases], weights=counts))
    width = max(float(one.losses[-1] - one.losses[0]) for one, _ in releases)
    return coarseness * max(deviation / FINENESS, width / LARGEST_GRID, SMALLEST_INTERVAL)


sampled = lru_cache(maxsize=4)(SampledGaussian)  # a run has two multipliers


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
