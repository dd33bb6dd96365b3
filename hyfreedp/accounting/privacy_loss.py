"""Epsilon of a sum of independent privacy losses on a grid, with a bound on the rounding errors of its FFT.

The T-fold convolution of a distribution by FFT has an error of about T 1e-16 everywhere, far more than a tail of mass
delta. So the losses are tilted first (Esscher): with q(l) = p(l) exp(tilt l - K), K the logarithm of the normaliser,
the sum of T losses has p^T(x) = q^T(x) exp(T K - tilt x). A tilt that puts the mean of the sum near epsilon moves the
tail to the centre, and an error of q^T becomes a small part of delta (Keich 2005, J. Comp. Biol. 12(4), does so for
p-values). Any tilt gives an upper bound, since error bounds are added to delta:

* An FFT of n numbers has log2(n) stages, each of which rounds by less than 8 units in the last place (Higham, Accuracy
  and Stability, ch. 24). So each coefficient is right to ``8 log2(n) u`` times the sum of magnitudes.
* Mass of q^T beyond the ends of the FFT, at most ``BEYOND`` at each by Chernoff's bound, wraps around to the other end,
  where it only adds to delta. Mass beyond the upper end also counts as an infinite loss, and no epsilon below the lower
  end is returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import fft, optimize

UNIT = 2.0**-53  # unit roundoff of float64
BEYOND = 1e-16  # mass that each end may cut off
LARGEST_EXPONENT = 700.0  # exp of more could overflow


@dataclass(frozen=True)
class PrivacyLossDistribution:
    """A privacy loss distribution: mass ``exp(logs[i])`` at ``(lowest + i) * interval``, ``infinite`` at infinity."""

    lowest: int
    logs: NDArray[np.float64]
    infinite: float
    interval: float

    @property
    def values(self) -> NDArray[np.float64]:
        return np.arange(self.lowest, self.lowest + len(self.logs), dtype=np.float64) * self.interval

    def log_normaliser(self, tilt: float) -> float:
        """K, the logarithm of the sum of p(l) exp(tilt l)."""
        exponents = self.logs + tilt * self.values
        largest = float(exponents.max())
        return largest + math.log(np.exp(exponents - largest).sum())

    def tilted(self, tilt: float) -> PrivacyLossDistribution:
        """q; its ``infinite`` stays that of p."""
        return replace(self, logs=self.logs + tilt * self.values - self.log_normaliser(tilt))

    def deviation(self) -> float:
        """Standard deviation of the finite losses."""
        probs = np.exp(self.logs)
        return math.sqrt(probs @ (self.values - probs @ self.values) ** 2)


def epsilon_of_sum(parts: Sequence[tuple[PrivacyLossDistribution, int]], delta: float) -> float:
    """A tight upper bound of epsilon at ``delta`` for a sum of independent losses.

    ``parts`` are distributions with the same ``interval``, and how often each occurs in the sum.
    """
    interval, count = parts[0][0].interval, sum(n for _, n in parts)
    infinite = sum(n * one.infinite for one, n in parts)
    if infinite >= delta:
        return math.inf
    tilt = _best_tilt(parts, delta)
    tilted = [(one.tilted(tilt), n) for one, n in parts]
    low, high = _ends(tilted)
    size = fft.next_fast_len(max(high - low + 1, *(len(one.logs) for one, _ in tilted)))
    unit = 8 * math.ceil(math.log2(size)) * UNIT
    probs, error = _power(tilted, size, unit)
    probs = np.roll(probs, sum(n * one.lowest for one, n in tilted) - low)

    # Undo the tilt, in units of delta: log(p^T(x) / delta) = log q^T(x) + scale - tilt x. The second term of scale
    # bounds the rounding of K and of the sums.
    losses = (low + np.arange(size)) * interval
    scale = (
        sum(n * one.log_normaliser(tilt) for one, n in parts)
        + (count + 64) * (8 * unit + size * UNIT)
        - math.log(delta)
    )
    mass = (np.maximum(probs, 0) + error) * np.exp(np.minimum(scale - tilt * losses, LARGEST_EXPONENT))
    beyond = infinite / delta + BEYOND * math.exp(min(scale - tilt * float(losses[-1]), LARGEST_EXPONENT))
    return max(_read_off(losses, mass, beyond), low * interval)


def _best_tilt(parts: Sequence[tuple[PrivacyLossDistribution, int]], delta: float) -> float:
    """The tilt that nearly minimises Chernoff's bound of epsilon, (K(tilt) - log delta) / tilt."""

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return (sum(n * one.log_normaliser(tilt) for one, n in parts) - math.log(delta)) / tilt

    return math.exp(optimize.minimize_scalar(bound, bounds=(-12, 12), method="bounded", options={"xatol": 0.02}).x)


def _ends(parts: Sequence[tuple[PrivacyLossDistribution, int]]) -> tuple[int, int]:
    """First and last grid point of the sum: mass at most ``BEYOND`` lies outside on each side, by Chernoff's bound."""
    interval = parts[0][0].interval
    low = sum(n * one.lowest for one, n in parts)
    high = sum(n * (one.lowest + len(one.logs) - 1) for one, n in parts)
    deviation = math.sqrt(sum(n * one.deviation() ** 2 for one, n in parts))
    for order in (0.5, 1, 2, 4, 8):
        for sign in (-1, 1):
            tilt = sign * order / (deviation + interval)
            end = (sum(n * one.log_normaliser(tilt) for one, n in parts) - math.log(BEYOND)) / tilt / interval
            if sign < 0:
                low = max(low, math.floor(end))
            else:
                high = min(high, math.ceil(end))
    return low, high


def _power(
    parts: Sequence[tuple[PrivacyLossDistribution, int]], size: int, unit: float
) -> tuple[NDArray[np.float64], float]:
    """Cyclic convolution of all by FFT, length ``size``, and a bound on the error of each of its numbers.

    A product of T factors with errors of ``unit`` each is off by T ``unit`` times the largest product of T - 1 of them.
    """
    log_size, phase, log_bound = np.zeros(size // 2 + 1), np.zeros(size // 2 + 1), np.zeros(size // 2 + 1)
    log_largest = np.full(size // 2 + 1, -np.inf)
    for one, n in parts:
        factor = fft.rfft(np.exp(one.logs), size)
        magnitude = np.abs(factor)
        log_size += n * np.log(np.maximum(magnitude, 1e-300))
        phase += n * np.angle(factor)
        log_bound += n * np.log(magnitude + unit)
        log_largest = np.maximum(log_largest, -np.log(magnitude + unit))
    count = sum(n for _, n in parts)
    bound = np.exp(np.minimum(log_bound + log_largest, LARGEST_EXPONENT))
    probs = fft.irfft(np.exp(log_size + 1j * phase), size)
    return probs, (count + 1) * 2 * unit * float(2 * bound.sum()) / size


def _read_off(losses: NDArray[np.float64], mass: NDArray[np.float64], beyond: float) -> float:
    """The epsilon >= 0 at which sum_{l > epsilon} mass(l) (1 - e^(epsilon - l)) + ``beyond`` is at most 1."""
    losses, mass = losses[losses > 0], mass[losses > 0]
    upper = np.cumsum(mass[::-1])[::-1] + beyond  # sums over this loss and all larger ones
    lower = np.cumsum((mass * np.exp(-losses))[::-1])[::-1]
    enough = np.append(upper[1:] - np.exp(np.minimum(losses[:-1], LARGEST_EXPONENT)) * lower[1:], beyond) <= 1
    if not enough[-1:].all():
        return math.inf
    if not len(losses) or upper[0] - lower[0] <= 1:
        return 0.0
    first = int(np.argmax(enough))
    if lower[first] <= 0 or losses[first] >= LARGEST_EXPONENT:  # the exponential was cut off
        return float(losses[first])
    with np.errstate(over="ignore"):
        return min(float(losses[first]), math.log((upper[first] - 1) / lower[first]))
