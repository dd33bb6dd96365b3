"""Records in memory, of which a batch is one indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
