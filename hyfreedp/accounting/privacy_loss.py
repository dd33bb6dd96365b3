"""Epsilon of a sum of independent privacy losses on a grid, with a bound of what its FFT rounds.

A distribution to the power of T by FFT has an error of about T 1e-16 everywhere, far more than a tail that holds a
small delta. So the losses are tilted first (Esscher): with q(l) = p(l) exp(tilt l - K), K the logarithm of the
normaliser, the sum of T losses has p^T(x) = q^T(x) exp(T K - tilt x). A tilt that puts the mean of the sum near epsilon
makes the tail the centre, and an error of q^T a small part of delta (Keich 2005, J. Comp. Biol. 12(4), does so for
p-values). Any tilt gives a bound: errors are bounded below and added to delta, whatever they are.

* An FFT's sum of n numbers passes through log2(n) stages, each of which rounds by less than 8 units in the last place
  (Higham, Accuracy and Stability, ch. 24). So each coefficient is right to ``8 log2(n) u`` times the sum of magnitudes.
* Mass of q^T beyond the ends of the FFT, at most ``BEYOND`` at each by Chernoff's bound, comes in at the other end,
  which adds to delta; what it was itself above the upper end counts as an infinite loss, and no epsilon below the
  lower end is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import fft, optimize

UNIT = 2.0**-53
BEYOND = 1e-16
LARGEST_EXPONENT = 700.0


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
        """log of the sum of p(l) exp(tilt l)."""
        exponents = self.logs + tilt * self.values
        largest = float(exponents.max())
        return largest + math.log(np.exp(exponents - largest).sum())

    def tilted(self, tilt: float) -> PrivacyLossDistribution:
        return replace(self, logs=self.logs + tilt * self.values - self.log_normaliser(tilt))

    def deviation(self) -> float:
        probs = np.exp(self.logs)
        return math.sqrt(probs @ (self.values - probs @ self.values) ** 2)


def epsilon_of_sum(parts: Sequence[tuple[PrivacyLossDistribution, int]], delta: float) -> float:
    """The smallest epsilon at ``delta``, or a little more, of so many independent losses of each kind.

    Args:
        parts: distributions of one ``interval``, and how often each occurs.
        delta: in (0, 1).
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

    # Back, in units of delta: log p^T(x) / delta = log q^T(x) + scale - tilt x. K is rounded, too, and so are sums.
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
    """That of Chernoff's bound of epsilon, (K(tilt) - log delta) / tilt, nearly."""

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return (sum(n * one.log_normaliser(tilt) for one, n in parts) - math.log(delta)) / tilt

    return math.exp(optimize.minimize_scalar(bound, bounds=(-12, 12), method="bounded", options={"xatol": 0.02}).x)


def _ends(parts: Sequence[tuple[PrivacyLossDistribution, int]]) -> tuple[int, int]:
    """First and last multiple of the interval that hold the sum but for ``BEYOND``, by Chernoff's bound."""
    interval = parts[0][0].interval
    low = sum(n * one.lowest for one, n in parts)
    high = sum(n * (one.lowest + len(one.logs) - 1) for one, n in parts)
    deviation = math.sqrt(sum(n * one.deviation() ** 2 for one, n in parts))
    for order in (0.5, 1, 2, 4, 8):
        for sign in (-1, 1):
            tilt = sign * order / (deviation + interval)
            end = (sum(n * one.log_normaliser(tilt) for one, n in parts) - math.log(BEYOND)) / tilt / interval
            low, high = (max(low, math.floor(end)), high) if sign < 0 else (low, min(high, math.ceil(end)))
    return low, high


def _power(
    parts: Sequence[tuple[PrivacyLossDistribution, int]], size: int, unit: float
) -> tuple[NDArray[np.float64], float]:
    """Convolution of all by FFT, modulo ``size``, and by how much each of its numbers may be off.

    A product of T factors, each off by ``unit``, is off by T ``unit`` times the largest product of T - 1 of them.
    """
    log_size, turn, log_bound = np.zeros(size // 2 + 1), np.zeros(size // 2 + 1), np.zeros(size // 2 + 1)
    log_largest = np.full(size // 2 + 1, -np.inf)
    for one, n in parts:
        factor = fft.rfft(np.exp(one.logs), size)
        magnitude = np.abs(factor)
        log_size += n * np.log(np.maximum(magnitude, 1e-300))
        turn += n * np.angle(factor)
        log_bound += n * np.log(magnitude + unit)
        log_largest = np.maximum(log_largest, -np.log(magnitude + unit))
    count = sum(n for _, n in parts)
    bound = np.exp(np.minimum(log_bound + log_largest, LARGEST_EXPONENT))
    probs = fft.irfft(np.exp(log_size + 1j * turn), size)
    return probs, (count + 1) * 2 * unit * float(2 * bound.sum()) / size


def _read_off(losses: NDArray[np.float64], mass: NDArray[np.float64], beyond: float) -> float:
    """Where sum_{l > epsilon} mass(l) (1 - e^(epsilon - l)) + ``beyond`` is 1, at least 0."""
    losses, mass = losses[losses > 0], mass[losses > 0]
    upper = np.cumsum(mass[::-1])[::-1] + beyond  # of this loss and all above it
    lower = np.cumsum((mass * np.exp(-losses))[::-1])[::-1]
    enough = np.append(upper[1:] - np.exp(np.minimum(losses[:-1], LARGEST_EXPONENT)) * lower[1:], beyond) <= 1
    if not enough[-1:].all():
        return math.inf
    if not len(losses) or upper[0] - lower[0] <= 1:
        return 0.0
    first = int(np.argmax(enough))
    with np.errstate(over="ignore"):  # of losses beyond e^709
        known = lower[first] > 0 and losses[first] < LARGEST_EXPONENT  # e^epsilon was not cut off
        inside = math.log((upper[first] - 1) / lower[first]) if known else math.inf
    return min(float(losses[first]), inside)
