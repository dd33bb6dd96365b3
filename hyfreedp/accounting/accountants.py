"""Upper bounds of epsilon for a composition of releases, each on a Poisson batch of its own.

A release is a sum over a batch plus Gaussian noise of standard deviation sigma times the sum's L2 sensitivity.
Neighbouring data sets differ by adding or removing one record, or all records of one person.

* "pld": privacy loss distributions, the tightest: ``groups`` has that of one release, ``privacy_loss`` composes them.
* "rdp": Renyi differential privacy, by the package dp-accounting (which takes a second to import).
"""

import logging
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from hyfreedp.accounting.groups import SampledGaussian
from hyfreedp.accounting.privacy_loss import GridTooFine, epsilon_of_sum

Accountant = Literal["pld", "rdp"]

Release = tuple[float, int]  # a noise multiplier, and the number of releases with it
Sampled = tuple[float, float, int, int]  # noise multiplier, sample rate, records of a person, number of releases

FINENESS = 100  # grid intervals per standard deviation of the privacy loss
LARGEST_GRID = 300_000  # grid points for one release; the grid is coarser where rare losses are very large
SMALLEST_INTERVAL = 1e-10  # smaller losses are lost in their rounding errors


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
        releases: noise multipliers and counts, in any order.
        sample_rate: q in (0, 1], the probability with which a record enters a batch.
        delta, accountant: in (0, 1); "pld" or "rdp".
        coarseness: factor on the grid interval of the privacy losses ("pld" only).
        records_per_person: k >= 1, the number of records that neighbours differ in (k > 1: "pld", else ValueError).
    """
    if records_per_person > 1 and accountant == "rdp":
        raise ValueError(f"accountant must be 'pld' if records_per_person > 1, got 'rdp' and {records_per_person}")
    each = tuple((sigma, sample_rate, records_per_person, count) for sigma, count in merge(releases))
    return epsilon_of(each, delta, accountant, coarseness)


def epsilon_of(
    releases: tuple[Sampled, ...], delta: float, accountant: Accountant = "pld", coarseness: int = 1
) -> float:
    """As :func:`composed_epsilon`, for releases with sample rates, and numbers of records, of their own."""
    if not releases:
        return 0.0
    if any(sigma < 1e-3 for sigma, *_ in releases):  # the losses would overflow
        return math.inf
    return _rdp_epsilon(releases, delta) if accountant == "rdp" else _pld_epsilon(releases, delta, coarseness)


def merge(releases: Iterable[Release]) -> tuple[Release, ...]:
    """Sort by noise, and add the counts of equal multipliers, which are first rounded down to 40 bits."""
    counts: dict[float, int] = {}
    for sigma, count in sorted(releases):
        if count:
            mantissa, exponent = math.frexp(sigma)
            sigma = math.ldexp(math.floor(mantissa * 2**40), exponent - 40)
            counts[sigma] = counts.get(sigma, 0) + count
    return tuple(counts.items())


@lru_cache(maxsize=4096)
def _pld_epsilon(releases: tuple[Sampled, ...], delta: float, coarseness: int) -> float:
    """The larger epsilon of removing and adding a person's records."""
    each = [(sampled(sigma, q, records), count) for sigma, q, records, count in releases]
    interval = grid(each, coarseness)
    losses = [(*release.distributions(interval), count) for release, count in each]
    try:
        removing = epsilon_of_sum([(removed, count) for removed, _, count in losses], delta)
        adding = epsilon_of_sum([(added, count) for _, added, count in losses], delta)
    except GridTooFine:  # in runs of millions of steps
        return _pld_epsilon(releases, delta, 2 * coarseness)
    return max(removing, adding)


def grid(releases: Sequence[tuple[SampledGaussian, int]], coarseness: int = 1) -> float:
    """Grid interval of the privacy losses: ``coarseness / FINENESS`` of their standard deviation.

    For several releases that is the root mean square. Rounding to the grid adds at most interval^2 / 4 to a variance.
    """
    counts = [count for _, count in releases]
    deviation = math.sqrt(np.average([release.deviation**2 for release, _ in releases], weights=counts))
    width = max(float(release.losses[-1] - release.losses[0]) for release, _ in releases)
    return coarseness * max(deviation / FINENESS, width / LARGEST_GRID, SMALLEST_INTERVAL)


sampled = lru_cache(maxsize=4)(SampledGaussian)  # a run has two noise multipliers


@lru_cache(maxsize=4096)
def _rdp_epsilon(releases: tuple[Sampled, ...], delta: float) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant, logger = RdpAccountant(), logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of orders that it leaves out, without which the bound is still valid
    try:
        for sigma, q, _, count in releases:
            sigma = min(sigma, 1e6 * math.sqrt(q))  # with more noise dp-accounting returns rounding errors
            accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), count))
        return float(accountant.get_epsilon(delta))
    finally:
        logger.setLevel(level)
