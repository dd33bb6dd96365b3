"""Epsilon of several runs on the same records, by composing their privacy loss distributions; and zCDP."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hyfreedp.accounting.accountants import Release, merge, pld_epsilon, sampled
from hyfreedp.accounting.composition import releases
from hyfreedp.accounting.split import NoiseSplit


def released_by(split: NoiseSplit, steps: int) -> tuple[Release, ...]:
    """The releases of the first ``steps`` steps of a run."""
    return merge(releases(split, steps, split.probe_steps_before(steps)))


def epsilon_of_runs(runs: Iterable[tuple[NoiseSplit, int]], delta: float) -> float:
    """Epsilon at ``delta`` of several runs together, each given by its noise and the number of steps made.

    Their batches and noise are drawn independently. Noise, sample rates and lengths must be fixed before; all else may
    depend on what earlier runs released (adaptive composition). A record that is removed is removed from all runs, so
    their losses are summed for removal and for addition apart, and the larger epsilon counts.
    """
    counted = [(split, *release) for split, steps in runs for release in released_by(split, steps)]
    if not counted:
        return 0.0
    if any(sigma < 1e-3 for _, sigma, _ in counted):  # infinite for one run, too
        return math.inf
    each = [(sampled(sigma, split.sample_rate, split.records_per_person), n) for split, sigma, n in counted]
    return pld_epsilon(each, delta)


def zcdp(split: NoiseSplit, steps: int) -> float:
    """rho of zero-concentrated DP (Bun & Steinke 2016) of ``steps`` steps: the sum of k^2 / (2 sigma^2).

    k is the number of a person's records. Sampling gets no credit: no smaller rho bounds a sampled Gaussian at all
    orders.
    """
    return sum(count / 2 * (split.records_per_person / sigma) ** 2 for sigma, count in released_by(split, steps))


def epsilon_of_zcdp(rho: float, delta: float) -> float:
    """Epsilon at ``delta`` of rho-zCDP, rho + 2 sqrt(rho log(1 / delta)) (Bun & Steinke 2016, Proposition 1.3)."""
    return rho + 2 * math.sqrt(-rho * math.log(delta))
