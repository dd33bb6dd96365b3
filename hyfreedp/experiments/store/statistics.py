"""Statistics over places and seeds as in Agarwal et al., Deep RL at the Edge of the Statistical Precipice, 2021.

Their package, rliable, takes a table with equally many seeds at every place, which ours have not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]


def interquartile_mean(values: ArrayLike) -> float:
    """The mean of the middle half: an outlier does not move it, and it needs fewer runs than a median."""
    return float(stats.trim_mean(values, 0.25, axis=None))


def profile(values: ArrayLike, marks: ArrayLike) -> Floats:
    """The share of runs that reach each mark."""
    return np.mean(np.asarray(values)[:, None] >= np.asarray(marks), axis=0)


def stratified_bootstrap(
    strata: Sequence[ArrayLike],
    statistic: Callable[[Floats], ArrayLike],
    *,
    draws: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[Floats, Floats]:
    """Ends of the percentile interval of a statistic of all runs, where seeds are drawn again within each place.

    Args:
        strata: the runs of each place.
        statistic: of all runs of all places, as one array.
    """
    rng = np.random.default_rng(seed)
    places = [np.asarray(runs, dtype=float) for runs in strata]
    drawn = [np.concatenate([rng.choice(runs, len(runs)) for runs in places]) for _ in range(draws)]
    ends = np.quantile([statistic(runs) for runs in drawn], [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return ends[0], ends[1]
