"""Privacy losses of one subsampled release if a person has k records, each drawn into the batch independently.

The number j of them in the batch is binomial, and the released sum moves by at most j sensitivities. The dominating
pair is one-dimensional: the mixture of N(j, sigma^2) with these probabilities against N(0, sigma^2). It dominates in
any number of dimensions, and so do its compositions (Choquette-Choo et al., Privacy Amplification for Matrix
Mechanisms, ICLR 2024, Corollary 4.7; Ganesh, Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of
Gaussians Mechanisms, 2024). For k = 1 it is the subsampled Gaussian. Generic group privacy, k epsilon at a larger
delta, is much looser.

dp-accounting computes the same in Python loops: ten times slower for k = 1 (``from_gaussian_mechanism``), a thousand
times for more (``from_mixture_gaussian_mechanism``). Time grows with k: calibration for k = 64 takes 12 seconds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

_NUMBERS_AT_ONCE = 10**7  # limits memory
_TAIL_STDS = 10.0  # standard deviations; outcomes beyond count as an infinite loss
_NEWTON_STARTS, _NEWTON_STEPS = 2**14, 5
_SMALLEST_SLOPE = 1e-200  # avoids a division by zero


def group_pmfs(sigma: float, sample_rate: float, records: int, interval: float) -> list[Any]:
    """dp-accounting's privacy loss distributions for removing and for adding a person's ``records``, k >= 1.

    ``sigma`` is the noise multiplier, ``interval`` the grid interval of the losses.
    """
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap

    present = np.arange(records + 1.0)[:, None]
    log_probs = -math.log(records + 1) - special.betaln(records - present + 1, present + 1)
    log_probs += special.xlogy(present, sample_rate) + special.xlog1py(records - present, -sample_rate)
    present, log_probs = present[log_probs[:, 0] > -math.inf], log_probs[log_probs[:, 0] > -math.inf]

    def exponents(x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Logarithms of the terms of the density ratio of the mixture and N(0, sigma^2); shape (k + 1, len(x))."""
        return log_probs + (2 * present * x - present**2) / (2 * sigma**2)

    def loss(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return special.logsumexp(exponents(x), axis=0)  # convex and increasing

    starts = np.linspace(-_TAIL_STDS * sigma, records + _TAIL_STDS * sigma, _NEWTON_STARTS)
    width = float(starts[1] - starts[0])
    losses = loss(starts)

    def inverse_closed_form(wanted: NDArray[np.float64]) -> NDArray[np.float64]:
        """The x whose loss is ``wanted``, for k = 1."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            x = 0.5 + sigma**2 * (wanted + np.log1p((sample_rate - 1) * np.exp(-wanted)) - math.log(sample_rate))
        return np.fmax(x, -1e3 * sigma)  # -inf or NaN where no x has so small a loss

    def inverse_newton(wanted: NDArray[np.float64]) -> NDArray[np.float64]:
        """The x whose loss is ``wanted``, for any k."""
        x = start = np.interp(wanted, losses, starts)
        for _ in range(_NEWTON_STEPS):
            terms = exponents(x)
            reached = special.logsumexp(terms, axis=0)
            slope = (np.exp(terms - reached) * present).sum(0) / sigma**2
            x = np.clip(x - (reached - wanted) / np.maximum(slope, _SMALLEST_SLOPE), start - width, start + width)
        return x

    inverse = inverse_closed_form if records == 1 else inverse_newton

    def deltas(epsilons: NDArray[np.float64], sign: int) -> NDArray[np.float64]:
        # delta is the maximum over thresholds t of sets {x > t} or {x < t}, so an error of t has a squared effect.
        t = inverse(sign * epsilons)
        alone = special.log_ndtr(-sign * t / sigma)
        mixture = special.logsumexp(log_probs + special.log_ndtr(sign * (present - t) / sigma), axis=0)
        more, fewer = (mixture, alone) if sign > 0 else (alone, mixture)
        best = np.exp(more) * -np.expm1(np.minimum(epsilons + fewer - more, 0))
        return np.clip(best, -np.expm1(np.minimum(epsilons, 0)), 1)

    removed = np.arange(math.floor(losses[0] / interval), math.ceil(losses[-1] / interval) + 1)
    pmfs = []
    for places, sign in ((removed, 1), (-removed[::-1], -1)):
        pieces = np.array_split(places * interval, 1 + len(places) * len(present) // _NUMBERS_AT_ONCE)
        curve = np.concatenate([deltas(piece, sign) for piece in pieces])
        curve = np.maximum.accumulate(curve[::-1])[::-1]  # non-increasing, which rounding may have spoiled
        pmfs.append(create_pmf_pessimistic_connect_dots_fixed_gap(interval, int(places[0]), int(places[-1]), curve))
    return pmfs
