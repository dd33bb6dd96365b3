"""Records in memory, of which a batch is one indexing, and which of them are held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset


class Records(TensorDataset):
    """A tensor data set that gives a batch by one indexing instead of one per record; use :func:`as_is` to collate."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        rows = torch.tensor(indices, dtype=torch.int64)
        return tuple(tensor[rows] for tensor in self.tensors)


def as_is(batch: Any) -> Any:
    """The collation of :class:`Records`, whose batches are made already."""
    return batch


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
