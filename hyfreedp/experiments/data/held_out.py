"""Which records of a data set are held out."""

from __future__ import annotations

import numpy as np


def shuffled_by_group(groups: np.ndarray) -> np.ndarray:
    """A fixed random order of records in which those of one group stay together; ``groups`` has one number each."""
    _, index = np.unique(groups, return_inverse=True)
    rank = np.random.default_rng(0).permutation(index.max() + 1)
    return np.argsort(rank[index], kind="stable")


def held_out_from(groups: np.ndarray) -> int:
    """Where the last fifth of the records begins, moved on to the next group so that none is on both sides."""
    start = len(groups) * 4 // 5
    while start < len(groups) and groups[start] == groups[start - 1]:
        start += 1
    return start
