"""Epsilon of a list of releases, each on its own Poisson batches, under three accountants.

* "pld": privacy loss distributions by dp-accounting, the tightest (module ``pld``).
* "rdp": Renyi differential privacy, by Opacus for Gaussians (exact at fractional orders too) and by autodp where
  Laplace noise takes part (integer orders).
* "gdp": the central limit approximation of Eq. (muGDP), by Opacus. It is not a bound.

All three are imported where they are used; the presets need dp-accounting alone.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from hyfreedp.accounting.mechanisms import Mechanism, Release, merge
from hyfreedp.checks import import_extra

Accountant = Literal["pld", "rdp", "gdp"]

# Opacus's default orders are 1.1, 1.2, ..., 10.9, 12, ..., 63; the larger ones keep small epsilons from being cut off.
INTEGER_ORDERS = (*range(2, 64), 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, 1024)
ORDERS = tuple(sorted({*INTEGER_ORDERS, *(1 + x / 10 for x in range(1, 100))}))


def composed_epsilon(
    releases: tuple[Release, ...],
    *,
    sample_rate: float,
    delta: float,
    accountant: Accountant,
    orders: tuple[float, ...] = ORDERS,
    coarseness: int = 1,
) -> float:
    """Epsilon at ``delta`` of all releases together. Results are cached within the process.

    Args:
        releases: pairs of a mechanism and the number of batches it is applied to; none cost 0.
        sample_rate: probability q in (0, 1] with which a record enters a batch.
        delta: in (0, 1).
        accountant: "pld", "rdp" or "gdp".
        orders: Renyi orders ("rdp" only); fractional ones are usable for Gaussians only.
        coarseness: how many times coarser than usual the grid of privacy losses is ("pld" only).
    """
    releases = merge(releases)
    if not releases:
        return 0.0
    if any(mechanism.gaussian == 0 or mechanism.laplace == 0 for mechanism, _ in releases):
        return math.inf
    if accountant == "pld":
        return _pld_epsilon(releases, sample_rate, delta, coarseness)
    if accountant == "rdp":
        return _rdp_epsilon(releases, sample_rate, delta, orders)
    return _gdp_epsilon(releases, sample_rate, delta)


@lru_cache(maxsize=4096)
def _pld_epsilon(releases: tuple[Release, ...], sample_rate: float, delta: float, coarseness: int) -> float:
    from hyfreedp.accounting.pld import privacy_loss_distribution  # dp-accounting takes a second to import

    return float(privacy_loss_distribution(releases, sample_rate, coarseness).get_epsilon_for_delta(delta))


@lru_cache(maxsize=4096)
def _rdp_epsilon(releases: tuple[Release, ...], sample_rate: float, delta: float, orders: tuple[float, ...]) -> float:
    rdp = sum(count * _subsampled_rdp(mechanism, sample_rate, orders) for mechanism, count in releases)
    with warnings.catch_warnings():
        # At the first or last order epsilon is still a bound, only perhaps not the tightest; the search probes such.
        warnings.filterwarnings("ignore", message="Optimal order is the")
        epsilon, _ = _opacus("rdp").get_privacy_spent(orders=orders, rdp=rdp, delta=delta)
    return max(float(epsilon), 0.0)


@lru_cache(maxsize=256)
def _subsampled_rdp(mechanism: Mechanism, sample_rate: float, orders: tuple[float, ...]) -> np.ndarray:
    if mechanism.coordinates == 0:
        rdp = [_gaussian_rdp(mechanism.gaussian, sample_rate, order) for order in orders]
    else:
        curve = _laplace_rdp(mechanism, sample_rate)
        rdp = [curve.RenyiDP(int(order)) if float(order).is_integer() else math.inf for order in orders]
    return np.maximum(rdp, 0.0)  # rounding can leave -1e-16


def _gaussian_rdp(noise_multiplier: float, sample_rate: float, order: float) -> float:
    try:
        rdp = _opacus("rdp").compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=[order])[0]
    except (ValueError, OverflowError):  # the series can fail at extreme parameters: do without that order
        return math.inf
    return math.inf if math.isnan(rdp) else float(rdp)


def _laplace_rdp(mechanism: Mechanism, sample_rate: float) -> Any:
    """autodp's RDP of the product on one Poisson batch: unsampled parts add up, then they are subsampled as one.

    The "improved bound" is the exact divergence when the record is removed, at integer orders. It also bounds the
    reverse direction where a reflection swaps the two outputs, as it does for noise symmetric about its centre
    (Mironov, Talwar and Zhang, 2019, Theorem 5).
    """
    mechanism_zoo, transformer_zoo = (
        import_extra(f"autodp.{name}", "accountant='rdp' with loss_mechanism='laplace'")
        for name in ("mechanism_zoo", "transformer_zoo")
    )
    parts = [mechanism_zoo.LaplaceMechanism(b=mechanism.laplace)]
    counts = [mechanism.coordinates]
    if math.isfinite(mechanism.gaussian):
        parts.append(mechanism_zoo.GaussianMechanism(sigma=mechanism.gaussian))
        counts.append(1)
    product = transformer_zoo.Composition()(parts, counts)
    if sample_rate == 1:
        return product
    product.RenyiDP = lru_cache(maxsize=None)(product.RenyiDP)  # each order's series asks for all lower ones again
    return transformer_zoo.AmplificationBySampling(PoissonSampling=True)(product, sample_rate, improved_bound_flag=True)


@lru_cache(maxsize=4096)
def _gdp_epsilon(releases: tuple[Release, ...], sample_rate: float, delta: float) -> float:
    """Epsilon of mu-GDP with mu^2 = q^2 sum_k count_k chi^2_k (Eq. muGDP; Bu et al., 2020).

    For small q the privacy loss of a subsampled release has variance q^2 chi^2, whatever the noise, where chi^2 is the
    divergence of the unsampled release: e^(1/sigma^2) - 1 for a Gaussian. 1 + chi^2 multiplies over independent parts,
    and is (2 e^(1/b) + e^(-2/b)) / 3 for a Laplace coordinate, which extends the formula to Laplace noise.
    """
    mu_squared = sample_rate**2 * sum(count * _chi_squared(mechanism) for mechanism, count in releases)
    mu = math.sqrt(mu_squared)
    gdp = _opacus("gdp")
    if mu == 0 or gdp.delta_eps_mu(eps=0, mu=mu) <= delta:
        return 0.0
    if gdp.delta_eps_mu(eps=500, mu=mu) >= delta:  # where Opacus's root search ends
        return math.inf
    return float(gdp.eps_from_mu(mu=mu, delta=delta))


def _opacus(accountant: Accountant) -> Any:
    return import_extra(f"opacus.accountants.analysis.{accountant}", f"accountant={accountant!r}")


def _chi_squared(mechanism: Mechanism) -> float:
    b = mechanism.laplace
    exponent = mechanism.gaussian**-2
    try:
        excess = (2 * math.expm1(1 / b) + math.expm1(-2 / b)) / 3  # chi^2 of one Laplace coordinate
        return math.expm1(exponent + mechanism.coordinates * math.log1p(excess))
    except OverflowError:
        return math.inf
