"""Epsilon of a sum of independent privacy losses on a grid, by FFT with a bound on its rounding errors.

The T-fold convolution of a distribution by FFT has an error of about T 1e-16 everywhere, far more than a tail of mass
delta. So the losses are exponentially tilted first (Esscher): with q(l) = p(l) exp(tilt l - K), where K is the log of
the normaliser, the sum of T losses has p^T(x) = q^T(x) exp(T K - tilt x). A tilt that puts the mean of the sum near
epsilon moves the tail to the centre, where an error of q^T is a small part of delta (as Keich 2005, J. Comp. Biol.
12(4), does for p-values). Any tilt gives an upper bound, since bounds of all errors are added to delta:

* An FFT of n numbers has log2(n) stages, each of which rounds by less than 8 units in the last place (Higham, Accuracy
  and Stability, ch. 24). So the error of a coefficient is at most ``8 log2(n) u`` times the sum of magnitudes.
* Mass of q^T beyond the ends of the FFT, at most ``BEYOND`` at each by Chernoff's bound, wraps around to the other end,
  where it only adds to delta. Mass above also counts as an infinite loss, and epsilon is never below the lower end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy import fft, optimize

UNIT = 2.0**-53  # unit roundoff of float64
BEYOND = 1e-12  # mass that may be cut off at each end
NEGLIGIBLE = 1e-30  # mass too small to affect any result
LARGEST_EXPONENT = 700.0  # exp of a larger number could overflow
LARGEST_TRANSFORM = 2**22  # points of the FFT, which then takes a second and 300 MB


class GridTooFine(Exception):
    """The FFT for a sum would take too long, and too much memory."""


@dataclass(frozen=True)
class PrivacyLossDistribution:
    """A privacy loss distribution: mass ``exp(logs[i])`` at ``(lowest + i) * interval``, ``infinite`` at infinity."""

    lowest: int
    logs: NDArray[np.float64]
    infinite: float
    interval: float

    @classmethod
    def from_deltas(cls, lowest: int, deltas: NDArray[np.float64], interval: float) -> Self:
        """The tightest one on the grid with these ``deltas`` (at least two) at epsilon = ``(lowest + i) * interval``.

        In between, delta is linear in e^epsilon, which is above the true, convex curve (Doroshenko et al., Connect the
        Dots, PoPETs 2022, Alg. 1).
        """
        deltas = np.maximum.accumulate(deltas[::-1])[::-1]  # non-increasing despite rounding
        change, probs = np.diff(deltas), np.empty_like(deltas)
        probs[0] = 1 - deltas[0] + change[0] / math.expm1(interval)
        probs[1:-1] = (change[1:] - change[:-1] * math.exp(interval)) / math.expm1(interval)
        probs[-1] = change[-1] / math.expm1(-interval)
        with np.errstate(divide="ignore"):  # log(0) where there is no mass
            return cls(lowest, np.log(np.maximum(probs, 0)), float(deltas[-1]), interval)

    @cached_property
    def values(self) -> NDArray[np.float64]:
        return np.arange(self.lowest, self.lowest + len(self.logs), dtype=np.float64) * self.interval

    def log_normaliser(self, tilt: float) -> float:
        """K, the logarithm of the sum of p(l) exp(tilt l)."""
        exponents = self.logs + tilt * self.values
        largest = float(exponents.max())
        return largest + math.log(np.exp(exponents - largest).sum())

    def tilted(self, tilt: float) -> Self:
        """The tilted distribution q, with the ``infinite`` of p."""
        return replace(self, logs=self.logs + tilt * self.values - self.log_normaliser(tilt))

    def variance(self) -> float:
        """Variance of the finite losses."""
        probs = np.exp(self.logs)
        return float(probs @ (self.values - probs @ self.values) ** 2)


def epsilon_of_sum(parts: Sequence[tuple[PrivacyLossDistribution, int]], delta: float) -> float:
    """A tight upper bound of epsilon at ``delta`` for a sum of independent privacy losses.

    ``parts`` are distributions on the same grid, each with the number of its losses in the sum. May raise GridTooFine.
    """
    interval, count = parts[0][0].interval, sum(n for _, n in parts)
    infinite = sum(n * pld.infinite for pld, n in parts)
    if infinite >= delta:
        return math.inf
    tilt = _best_tilt(parts, delta)  # moves the mean of the sum near epsilon
    tilted = [(pld.tilted(tilt), n) for pld, n in parts]
    low, high = _ends(tilted)  # the places of the sum, in intervals, that are computed
    size = fft.next_fast_len(max(high - low + 1, *(len(pld.logs) for pld, _ in tilted)))
    if size > LARGEST_TRANSFORM:
        raise GridTooFine
    unit = 8 * math.ceil(math.log2(size)) * UNIT
    probs, error = _convolved(tilted, size, unit)
    probs = np.roll(probs, sum(n * pld.lowest for pld, n in tilted) - low)  # the first is now that of ``low``

    # Undo the tilt, and divide by delta: p^T(x) / delta = q^T(x) exp(T K - log(delta) - tilt x).
    rounding = (count + 64) * (8 * unit + size * UNIT)  # bounds the errors of K and of the sums
    scale = sum(n * pld.log_normaliser(tilt) for pld, n in parts) + rounding - math.log(delta)
    untilt = np.exp(np.minimum(scale - tilt * interval * np.arange(low, low + size), LARGEST_EXPONENT))
    cut = BEYOND if high < sum(n * (pld.lowest + len(pld.logs) - 1) for pld, n in parts) else 0.0  # mass above ``high``
    beyond = infinite / delta + cut * float(untilt[-1])
    return max(_read_off(low, interval, (np.maximum(probs, 0) + error) * untilt, beyond), low * interval)


def _best_tilt(parts: Sequence[tuple[PrivacyLossDistribution, int]], delta: float) -> float:
    """A tilt near the minimum of Chernoff's bound of epsilon (Canonne, Kamath & Steinke 2020, Proposition 12)."""
    normal = math.sqrt(-2 * math.log(delta)) / _deviation(parts)  # the solution for normal distributions

    def bound(log_ratio: float) -> float:
        tilt = normal * math.exp(log_ratio)
        largest = -math.log1p(tilt) - tilt * math.log1p(1 / tilt)  # log of max_l (1 - e^-l) e^(-tilt l)
        return (sum(n * pld.log_normaliser(tilt) for pld, n in parts) + largest - math.log(delta)) / tilt

    found = optimize.minimize_scalar(bound, bounds=(-12, 12), method="bounded", options={"xatol": 0.1})
    return normal * math.exp(found.x)


def _deviation(parts: Sequence[tuple[PrivacyLossDistribution, int]]) -> float:
    """Standard deviation of the sum, or the grid interval if that is larger."""
    return math.sqrt(max(sum(n * pld.variance() for pld, n in parts), parts[0][0].interval ** 2))


def _ends(parts: Sequence[tuple[PrivacyLossDistribution, int]]) -> tuple[int, int]:
    """First and last grid point to keep of the sum: by Chernoff's bound at most ``BEYOND`` lies outside at each end."""
    interval, deviation = parts[0][0].interval, _deviation(parts)
    low = sum(n * pld.lowest for pld, n in parts)
    high = sum(n * (pld.lowest + len(pld.logs) - 1) for pld, n in parts)

    def end(tilt: float) -> float:
        return (sum(n * pld.log_normaliser(tilt) for pld, n in parts) - math.log(BEYOND)) / tilt / interval

    tilts = [order / deviation for order in (0.5, 1, 2, 4, 8)]
    return max(low, *(math.floor(end(-tilt)) for tilt in tilts)), min(high, *(math.ceil(end(tilt)) for tilt in tilts))


def _convolved(
    parts: Sequence[tuple[PrivacyLossDistribution, int]], size: int, unit: float
) -> tuple[NDArray[np.float64], float]:
    """Cyclic convolution of all ``parts`` by FFTs of length ``size``, and a bound on the error of each number.

    Its FFT is the product, over all parts, of the n-th power of the part's FFT f. If each f is off by ``unit``, a
    product of T factors is off by T ``unit`` times the largest product of T - 1 of them. Products below ``NEGLIGIBLE``
    (most of them) are replaced by zero, and added to the error.
    """
    counts = [n for _, n in parts]
    transforms = [fft.rfft(np.exp(pld.logs), size) for pld, _ in parts]
    log_bounds = [np.log(np.abs(f) + unit) for f in transforms]  # of the largest |f|
    log_bound = sum(n * bound for n, bound in zip(counts, log_bounds, strict=True))  # of the product
    kept = log_bound > math.log(NEGLIGIBLE)
    log_size = phase = 0.0
    for f, n in zip(transforms, counts, strict=True):
        log_size = log_size + n * np.log(np.maximum(np.abs(f[kept]), 1e-300))
        phase = phase + n * np.angle(f[kept])
    product = np.zeros(len(kept), dtype=np.complex128)
    product[kept] = np.exp(log_size + 1j * phase)
    largest = log_bound[kept] - np.minimum.reduce([bound[kept] for bound in log_bounds])  # of T - 1 factors
    error = 2 * (sum(counts) + 1) * unit * float(np.exp(np.minimum(largest, LARGEST_EXPONENT)).sum())
    return fft.irfft(product, size), 2 * error / size + NEGLIGIBLE


def _read_off(lowest: int, interval: float, mass: NDArray[np.float64], beyond: float) -> float:
    """The smallest epsilon >= 0 at which sum_{l > epsilon} mass(l) (1 - e^(epsilon - l)) + ``beyond`` is at most 1.

    ``mass[i]`` is the mass, over delta, of the loss ``(lowest + i) * interval``. Nothing is subtracted or cancels.
    """
    from scipy.signal import lfilter  # loads scipy.stats, which takes a second, so not at `import hyfreedp`

    if beyond > 1:
        return math.inf
    mass = mass[max(1 - lowest, 0) :]  # of the positive losses
    losses = (max(lowest, 1) + np.arange(len(mass))) * interval
    if not len(losses):
        return 0.0
    step = -math.expm1(-interval)
    # sum_{l >= losses[i]} mass(l) e^(losses[i] - l), and the sum above for epsilon = losses[i]
    weighted = lfilter([1.0], [1.0, -math.exp(-interval)], mass[::-1])[::-1]
    deltas = beyond + step * np.append(np.cumsum(weighted[:0:-1])[::-1], 0)
    if deltas[0] - math.expm1(-losses[0]) * weighted[0] <= 1:
        return 0.0
    first = int(np.argmax(deltas <= 1))
    fall = (1 - deltas[first]) / weighted[first]
    return float(losses[first]) + math.log1p(-min(fall, 1 - UNIT))
