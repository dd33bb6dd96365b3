"""Privacy losses of one subsampled Gaussian release for a person with k records, sampled independently.

The number j of their records in the batch is binomial, and the released sum moves by at most j sensitivities. So the
release is dominated by a one-dimensional pair: the binomial mixture of N(j, sigma^2), and N(0, sigma^2). This holds for
sums of any dimension, and for compositions (Choquette-Choo et al., Privacy Amplification for Matrix Mechanisms, ICLR
2024, Corollary 4.7; Ganesh, Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of Gaussians
Mechanisms, 2024). For k = 1 it is the usual subsampled Gaussian. Group privacy, k epsilon, is much looser.

dp-accounting computes the same in Python loops: a hundred times slower for k = 1, a thousand times for larger k.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from hyfreedp.accounting.privacy_loss import LARGEST_EXPONENT, PrivacyLossDistribution

_NUMBERS_AT_ONCE = 10**7  # in one array, to limit memory
_TAIL_STDS = 10.0  # outcomes beyond so many standard deviations count as an infinite loss
_RARE = 1e-32  # each j with a smaller probability counts as an infinite loss
_NEWTON_STARTS, _NEWTON_STEPS = 2**14, 5
_SMALLEST_SLOPE = 1e-200  # avoids a division by zero


class SampledGaussian:
    """The dominating pair of one release, the mixture and N(0, sigma^2), of outcomes x in units of the sensitivity.

    The privacy loss at x is the logarithm of the ratio of their densities. It is convex and increasing in x.

    Args:
        sigma: noise multiplier.
        sample_rate: q in (0, 1].
        records: k >= 1, the records of a person.

    Attributes:
        losses: the privacy losses at equally spaced x, increasing; beyond the last it counts as infinite.
        deviation: standard deviation of the privacy loss under the mixture.
    """

    def __init__(self, sigma: float, sample_rate: float, records: int) -> None:
        present = np.arange(records + 1.0)[:, None]
        log_probs = -math.log(records + 1) - special.betaln(records - present + 1, present + 1)
        log_probs += special.xlogy(present, sample_rate) + special.xlog1py(records - present, -sample_rate)
        likely = log_probs[:, 0] > math.log(_RARE)
        self._rest = float(np.exp(log_probs[~likely]).sum())
        self._present, self._log_probs = present[likely], log_probs[likely]
        self._sigma, self._sample_rate, self._records = sigma, sample_rate, records
        self._x = np.linspace(-_TAIL_STDS * sigma, self._present[-1, 0] + _TAIL_STDS * sigma, _NEWTON_STARTS)
        self.losses = self._log_mean(self._differences(self._x))
        weights = np.exp(self.losses - self._x**2 / (2 * sigma**2))
        weights /= weights.sum()
        self.deviation = math.sqrt(weights @ (self.losses - weights @ self.losses) ** 2)

    def distributions(self, interval: float) -> tuple[PrivacyLossDistribution, PrivacyLossDistribution]:
        """The privacy loss distributions of removing and of adding the records, on multiples of ``interval``."""
        places = np.arange(math.floor(self.losses[0] / interval), math.ceil(self.losses[-1] / interval) + 1)
        pieces = np.array_split(places * interval, 1 + len(places) * len(self._present) // _NUMBERS_AT_ONCE)
        removed, added = np.concatenate([self._deltas(piece) for piece in pieces], axis=1)
        return (
            PrivacyLossDistribution.from_deltas(int(places[0]), removed, interval),
            PrivacyLossDistribution.from_deltas(-int(places[-1]), added[::-1], interval),
        )

    def _deltas(self, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """delta of removing the records at epsilon = ``losses``, and of adding them at epsilon = -``losses``: two rows.

        The worst events are {x > t} and {x < t}, where t is the outcome with that loss; errors in t are second order.
        """
        t = self._outcomes_closed_form(losses) if self._records == 1 else self._outcomes_newton(losses)
        at = (self._present - t) / self._sigma
        above, below = special.log_ndtr(-t / self._sigma), special.log_ndtr(t / self._sigma)  # of N(0, sigma^2)
        ratio_above = self._log_mean(special.log_ndtr(at) - above)
        ratio_below = self._log_mean(special.log_ndtr(-at) - below)
        removed = _hockey_stick(losses, above + ratio_above, ratio_above) + self._rest
        return np.stack([np.minimum(removed, 1), _hockey_stick(-losses, below, -ratio_below)])

    def _differences(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log ratios of the densities of N(j, sigma^2) and N(0, sigma^2), shape (number of likely j, len(x))."""
        return (2 * self._present * x - self._present**2) / (2 * self._sigma**2)

    def _log_mean(self, differences: NDArray[np.float64]) -> NDArray[np.float64]:
        """Logarithm of the mean of exp(differences) over j, accurate near 0, too."""
        mean = (np.exp(self._log_probs) * np.expm1(np.minimum(differences, LARGEST_EXPONENT))).sum(0)
        result = np.log1p(np.maximum(mean, -0.5)) + math.log1p(-self._rest)
        far = (mean < -0.5) | (differences[-1] > LARGEST_EXPONENT)
        result[far] = _log_sum(self._log_probs + differences[:, far])
        return result

    def _outcomes_closed_form(self, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """The outcomes x at which the privacy loss is ``losses``, for k = 1."""
        q, sigma = self._sample_rate, self._sigma
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            far = losses + np.log1p((q - 1) * np.exp(-losses)) - math.log(q)
            near = np.log1p(np.expm1(losses) / q)  # the same, without cancellation where losses and q are tiny
        x = 0.5 + sigma**2 * np.where(np.abs(losses) < 1, near, far)
        return np.fmax(x, -1e3 * sigma)  # -inf or NaN where no x has so small a loss

    def _outcomes_newton(self, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """The outcomes x at which the privacy loss is ``losses``, for any k."""
        width = float(self._x[1] - self._x[0])
        x = start = np.interp(losses, self.losses, self._x)
        for _ in range(_NEWTON_STEPS):
            terms = self._log_probs + self._differences(x)
            reached = _log_sum(terms)
            slope = (np.exp(terms - reached) * self._present).sum(0) / self._sigma**2
            before, x = x, x - (reached - losses) / np.maximum(slope, _SMALLEST_SLOPE)
            x = np.clip(x, start - width, start + width)
            if np.abs(x - before).max() < 1e-6 * self._sigma:
                break
        return x


def _log_sum(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithm of the sum of exp over axis 0; scipy's logsumexp takes five times as long."""
    largest = terms.max(0)
    return largest + np.log(np.exp(terms - largest).sum(0))


def _hockey_stick(
    epsilons: NDArray[np.float64], log_more: NDArray[np.float64], log_ratio: NDArray[np.float64]
) -> NDArray[np.float64]:
    """delta = P - e^epsilon Q, clipped to its range, for an event with log P = log_more and log(P / Q) = log_ratio."""
    best = np.exp(log_more) * -np.expm1(np.minimum(epsilons - log_ratio, 0))
    return np.clip(best, -np.expm1(np.minimum(epsilons, 0)), 1)
