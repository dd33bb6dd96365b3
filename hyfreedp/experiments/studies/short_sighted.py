"""Why a parabola is short-sighted: SGD on a noisy quadratic, whose expected loss is exact (notebook 04).

The loss is L(w) = 1/2 sum_j l_j w_j^2 and a step is w <- w - eta g with g_j = l_j w_j + noise N(0, nu^2), so mean and
variance of each coordinate follow a recursion and nothing has to be sampled (Schaul et al., 2013). That rates chosen
one step ahead end too small on it is the short-horizon bias of Wu et al. (2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import special

from hyfreedp.step_rules import decay_factor

Array = NDArray[np.float64]

GREEDY, CONSTANT, LINEAR = "one-step rate b/a", "constant rate", "linear decay"


@dataclass(frozen=True)
class NoisyQuadratic:
    """A quadratic loss whose lowest point is the origin, and the noise of its gradients.

    Attributes:
        curvatures: l (lambda), positive, shape ``(d,)``.
        start: w_0, shape ``(d,)``.
        noise: nu, standard deviation of the gradient's noise in every coordinate: sigma_g R_g / B under DP.

    Raises:
        ValueError: shapes differ, a curvature is not positive, or the noise is negative.
    """

    curvatures: Array
    start: Array
    noise: float

    def __post_init__(self) -> None:
        if self.curvatures.ndim != 1 or self.curvatures.shape != self.start.shape:
            raise ValueError(
                f"curvatures and start must be vectors of one length, got shapes {self.curvatures.shape} and "
                f"{self.start.shape}: give each direction one of both"
            )
        if not (np.isfinite(self.curvatures) & (self.curvatures > 0)).all():
            raise ValueError(f"curvatures must be positive and finite, got {self.curvatures}: drop flat directions")
        if not 0 <= self.noise < np.inf:
            raise ValueError(f"noise must be finite and at least 0, got {self.noise}: give a standard deviation")

    def loss(self, mean: Array, variance: Array) -> Array:
        """E L(w) for coordinates of this mean and variance, shape ``(..., d)``; shape ``(...)``."""
        return np.asarray(0.5 * np.sum(self.curvatures * (mean**2 + variance), axis=-1))

    def parabola(self, mean: Array, variance: Array) -> tuple[float, float]:
        """b and a of E L(w - eta g) = E L(w) - b eta + a eta^2 / 2, which holds exactly.

        b = E g'grad L = sum l^2 u and a = E g'Hg = sum l (l^2 u + nu^2), with u = E w^2: what a probe along g would
        measure on average, were it neither clipped nor noised.
        """
        slopes = self.curvatures**2 * (mean**2 + variance)
        return float(slopes.sum()), float((self.curvatures * (slopes + self.noise**2)).sum())

    def step(self, mean: Array, variance: Array, rate: ArrayLike) -> tuple[Array, Array]:
        """Mean and variance after one step; ``rate`` is a number or has shape ``(n,)`` for moments ``(n, d)``."""
        eta = np.expand_dims(rate, -1)
        kept = 1 - eta * self.curvatures
        return kept * mean, kept**2 * variance + (eta * self.noise) ** 2


_CURVATURES = np.geomspace(1.0, 0.01, 10)
# The notebook's: ten directions that hold a tenth of the loss each, L(w_0) = 1.
EXAMPLE = NoisyQuadratic(_CURVATURES, np.sqrt(2 / (10 * _CURVATURES)), noise=0.3)
PEAKS = tuple(np.geomspace(0.03, 4, 160))


# -- schedules ---------------------------------------------------------------------------------------------------------


def decayed(peaks: ArrayLike, steps: int) -> Array:
    """Rates of a linear decay from each peak towards zero: shape ``(steps, *peaks.shape)``."""
    return np.multiply.outer([decay_factor(step, steps, "linear") for step in range(steps)], peaks)


def constant(peaks: ArrayLike, steps: int) -> Array:
    """Each rate at every step: shape ``(steps, *peaks.shape)``."""
    return np.multiply.outer(np.ones(steps), peaks)


_KINDS = {CONSTANT: constant, LINEAR: decayed}


def greedy(problem: NoisyQuadratic, steps: int) -> Array:
    """At each step the rate b/a, which makes the expected loss one step ahead the lowest: shape ``(steps,)``.

    At the lowest point itself, where without noise b = a = 0, the rate is 0.
    """
    mean, variance = problem.start, np.zeros_like(problem.start)
    rates = []
    for _ in range(steps):
        slope, curvature = problem.parabola(mean, variance)
        rates.append(slope / curvature if slope else 0.0)
        mean, variance = problem.step(mean, variance, rates[-1])
    return np.array(rates)


def moments(problem: NoisyQuadratic, rates: ArrayLike) -> Iterator[tuple[Array, Array]]:
    """Mean and variance of the weights before the first step and after each.

    Args:
        problem: where to descend.
        rates: shape ``(steps,)``, or ``(steps, n)`` for n schedules at once; the moments are then ``(n, d)``.
    """
    rates = np.asarray(rates, dtype=float)
    mean = np.broadcast_to(problem.start, (*rates.shape[1:], len(problem.start)))
    variance = np.zeros_like(mean)
    yield mean, variance
    for rate in rates:
        mean, variance = problem.step(mean, variance, rate)
        yield mean, variance


def expected_losses(problem: NoisyQuadratic, rates: ArrayLike) -> Array:
    """Expected loss before the first step and after each: shape ``(steps + 1,)`` or ``(steps + 1, n)``."""
    return np.array([problem.loss(*state) for state in moments(problem, rates)])


# -- tables ------------------------------------------------------------------------------------------------------------


def ends(problem: NoisyQuadratic, peaks: Sequence[float], steps: int) -> pd.DataFrame:
    """Expected loss after ``steps`` for each peak rate (the index): one column per kind of schedule."""
    table = {name: expected_losses(problem, kind(peaks, steps))[-1] for name, kind in _KINDS.items()}
    return pd.DataFrame(table, index=pd.Index(peaks, name="peak"))


def runs(problem: NoisyQuadratic, peaks: Sequence[float], steps: int) -> pd.DataFrame:
    """The greedy schedule, and the constant and the decaying one whose peak of ``peaks`` ends lowest.

    Returns:
        Expected ``loss`` before each step and its ``rate`` (none after the last), by ``schedule`` and ``step``.
    """
    best = ends(problem, peaks, steps).idxmin()
    schedules = {GREEDY: greedy(problem, steps)} | {name: kind(best[name], steps) for name, kind in _KINDS.items()}
    columns = {
        name: {"loss": expected_losses(problem, r), "rate": np.append(r, np.nan)} for name, r in schedules.items()
    }
    step = pd.RangeIndex(steps + 1, name="step")
    return pd.concat({name: pd.DataFrame(table, step) for name, table in columns.items()}, names=["schedule"])


# -- the private vote --------------------------------------------------------------------------------------------------


def preferring(curvatures: Array, first: Array, second: Array, spread: float) -> Array:
    """Share of the records whose loss is lower at ``first`` than at ``second``.

    A record's loss is 1/2 sum_j l_j (w_j - c_j)^2 with c ~ N(0, spread^2 I), so that L is the mean loss less a
    constant, and the difference of the two losses is normal over records: the share is Phi of its mean over its
    standard deviation, (L(second) - L(first)) / (spread ||H (first - second)||).

    Args:
        curvatures: l (lambda), shape ``(d,)``.
        first, second: two different weights, shape ``(..., d)``.
        spread: standard deviation of the records' own optima in every coordinate.
    """
    gain = 0.5 * np.sum(curvatures * (second**2 - first**2), axis=-1)
    deviation = spread * np.linalg.norm(curvatures * (first - second), axis=-1)
    return np.asarray(special.ndtr(gain / deviation))


def winning(share: ArrayLike, batch_size: ArrayLike, noise_multiplier: float) -> Array:
    """Probability that a private vote is won where this share of all records is in favour.

    A Poisson batch of B expected records holds Poisson(B share) votes +1 and Poisson(B (1 - share)) votes -1, and
    N(0, sigma^2) is added: mean B (2 share - 1), variance B + sigma^2, and taken as normal.

    Args:
        share: in favour.
        batch_size: B, small against the number of records.
        noise_multiplier: sigma_l; one record changes the sum of votes by at most 1.
    """
    expected = np.asarray(batch_size, dtype=float)
    mean = expected * (2 * np.asarray(share) - 1)
    return np.asarray(special.ndtr(mean / np.sqrt(expected + noise_multiplier**2)))


def race(
    problem: NoisyQuadratic,
    tops: Sequence[float],
    *,
    steps: int,
    raced: int,
    decay_over: int,
    factor: float,
    spread: float,
    batch_sizes: Sequence[int],
    noise_multiplier: float,
    draws: int,
    seed: int,
) -> pd.DataFrame:
    """Two branches from the same weights at rates ``factor`` apart, and the records' vote between them after a while.

    Args:
        problem: where both start.
        tops: peak rates of the faster branch; the slower one has ``top / factor``.
        steps: of the run.
        raced: after how many steps the records vote.
        decay_over: over how many steps the branches decay to zero: ``steps`` if they are the beginning of the run,
            ``raced`` if they are looks ahead, whose noise is gone when the records vote.
        factor: between the two rates.
        spread: of the records, see :func:`preferring`.
        batch_sizes: of the batch that votes; the noise of the gradients is that of ``problem`` whatever it is.
        noise_multiplier: sigma_l of the vote.
        draws: pairs of weights that are drawn to average over, from their exact distribution.
        seed: of the draws, the same ones for every rate.

    Returns:
        One row per rate and batch size: ``top``, ``batch_size``, probability ``kept`` of the faster branch and its
        standard ``error``, the expected losses ``fast`` and ``slow`` after a whole run with linear decay from either
        peak rate, and ``reached``, their mean where the vote decides.

    Raises:
        ValueError: the records would vote before the first step, or after the branches' decay has ended.
    """
    if not 1 <= raced <= decay_over:
        raise ValueError(
            f"raced must be between 1 and decay_over = {decay_over}, got {raced}: let the records vote while the "
            "branches still run"
        )
    normal = np.random.default_rng(seed).standard_normal((2, draws, len(problem.start)))
    rows = []
    for top in tops:
        pair = (top, top / factor)
        fast, slow = expected_losses(problem, decayed(pair, steps))[-1]
        *_, (mean, variance) = moments(problem, decayed(pair, decay_over)[:raced])
        first, second = mean[:, None] + np.sqrt(variance)[:, None] * normal
        share = preferring(problem.curvatures, first, second, spread)
        for size in batch_sizes:
            won = winning(share, size, noise_multiplier)
            rows.append((top, size, won.mean(), won.std(ddof=1) / np.sqrt(draws), fast, slow))
    table = pd.DataFrame(rows, columns=["top", "batch_size", "kept", "error", "fast", "slow"])
    return table.assign(reached=table.kept * table.fast + (1 - table.kept) * table.slow)


def turning_points(votes: pd.DataFrame) -> tuple[float, float]:
    """Highest of the raced rates that the vote of the largest batch keeps, and highest that does end lower."""
    clear = votes[votes.batch_size == votes.batch_size.max()]
    return clear.top[clear.kept > 0.5].max(), clear.top[clear.fast < clear.slow].max()
