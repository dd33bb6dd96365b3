"""Privacy losses of one subsampled release where a person has k records, each drawn into the batch independently.

j of them are in the batch with the probability of a binomial distribution, and then the released sum moves by at most j
sensitivities. What tells most is a mixture of Gaussians on a line, N(j, sigma^2) with these probabilities, against
N(0, sigma^2): it dominates all others, in any number of dimensions, and so do compositions of it (Choquette-Choo et
al., Privacy Amplification for Matrix Mechanisms, ICLR 2024, Corollary 4.7; Ganesh, Tight Group-Level DP Guarantees for
DP-SGD with Sampling via Mixture of Gaussians Mechanisms, 2024). For k = 1 it is the subsampled Gaussian. The bound of
group privacy that knows epsilon alone, k epsilon at a larger delta, is much larger.

dp-accounting has it too, for k = 1 (``from_gaussian_mechanism``) ten times slower, since it goes from loss to loss in
Python, and for more (``from_mixture_gaussian_mechanism``) a thousand times. Time grows with k: k = 64 is calibrated in
12 seconds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

_NUMBERS = 10**7  # at a time, for memory's sake
_TAIL = 10.0  # standard deviations; what lies beyond counts as an infinite loss
_STARTS, _NEWTON, _FLAT = 2**14, 5, 1e-200  # where and how often Newton's method looks for a loss


def group_pmfs(sigma: float, sample_rate: float, records: int, interval: float) -> list[Any]:
    """dp-accounting's distributions where a person's ``records`` are removed, and where they are added.

    Args:
        sigma: noise multiplier.
        sample_rate: q in (0, 1].
        records: k >= 1.
        interval: of the grid of losses.
    """
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap

    present = np.arange(records + 1.0)[:, None]
    log_probs = -math.log(records + 1) - special.betaln(records - present + 1, present + 1)
    log_probs += special.xlogy(present, sample_rate) + special.xlog1py(records - present, -sample_rate)
    present, log_probs = present[log_probs[:, 0] > -math.inf], log_probs[log_probs[:, 0] > -math.inf]

    def exponents(x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Logarithms of the summands of the mixture's density over that of N(0, sigma^2)."""
        return log_probs + (2 * present * x - present**2) / (2 * sigma**2)

    def loss(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return special.logsumexp(exponents(x), axis=0)  # convex, and grows with x

    ends = np.array([-_TAIL * sigma, records + _TAIL * sigma])
    starts = np.linspace(ends[0], ends[1], _STARTS)
    width = float(starts[1] - starts[0])
    losses = loss(starts)

    def one_record(found: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            t = 0.5 + sigma**2 * (found + np.log1p((sample_rate - 1) * np.exp(-found)) - math.log(sample_rate))
        return np.fmax(t, -1e3 * sigma)  # no x has so small a loss as -inf or NaN stand for

    def newton(wanted: NDArray[np.float64]) -> NDArray[np.float64]:
        t = start = np.interp(wanted, losses, starts)
        for _ in range(_NEWTON):
            terms = exponents(t)
            found = special.logsumexp(terms, axis=0)
            slope = (np.exp(terms - found) * present).sum(0) / sigma**2
            t = np.clip(t - (found - wanted) / np.maximum(slope, _FLAT), start - width, start + width)
        return t

    def deltas(epsilons: NDArray[np.float64], sign: int) -> NDArray[np.float64]:
        # Any set {x > t} or {x < t} bounds delta from below, and the best one meets it: the error of t is squared.
        t = one_record(sign * epsilons) if records == 1 else newton(sign * epsilons)
        alone = special.log_ndtr(-sign * t / sigma)
        mixture = special.logsumexp(log_probs + special.log_ndtr(sign * (present - t) / sigma), axis=0)
        more, fewer = (mixture, alone) if sign > 0 else (alone, mixture)
        best = np.exp(more) * -np.expm1(np.minimum(epsilons + fewer - more, 0))
        return np.clip(best, -np.expm1(np.minimum(epsilons, 0)), 1)

    removed = np.arange(math.floor(losses[0] / interval), math.ceil(losses[-1] / interval) + 1)
    pmfs = []
    for places, sign in ((removed, 1), (-removed[::-1], -1)):
        pieces = np.array_split(places * interval, 1 + len(places) * len(present) // _NUMBERS)
        found = np.concatenate([deltas(piece, sign) for piece in pieces])
        falling = np.maximum.accumulate(found[::-1])[::-1]
        pmfs.append(create_pmf_pessimistic_connect_dots_fixed_gap(interval, int(places[0]), int(places[-1]), falling))
    return pmfs
