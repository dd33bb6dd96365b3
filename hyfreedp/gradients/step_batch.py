"""One Poisson batch, its loss, and the random numbers of each pass over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hyfreedp.checks import check_function, check_weights
from hyfreedp.data.batches import Loss, PhysicalBatchSize, Records
from hyfreedp.gradients.engine import GradientEngine, one_number
from hyfreedp.gradients.per_sample import widened
from hyfreedp.gradients.pieces import Partition, Piece
from hyfreedp.noise import NoiseGenerator
from hyfreedp.noise.random_states import seed_random_states

Weights = Callable[[Any], Tensor] | None
_MEMORY_CHECK_SHARE = 0.1  # of the batches in which samples determined a decision of Python


class StepBatch:
    """One batch and its loss function. Results have shape ``(B,)``, in the order of the batch, also if B is 0.

    Args:
        loss: maps one record, as ``collate_fn([record])`` returns it, to one number.
        batch: what the loader yielded, or a plain structure of tensors whose dimension 0 is the samples.
        engine: of the model.
        max_physical_batch_size: the most samples mapped together, or a function of one sample that returns it.
        generator: of torch's random numbers, for each piece its own.
        coins: key of NumPy's and Python's random numbers, which samples of a map share, so all pieces must share them.
        weights: maps one record to its weight, one number in [0, 1].

    Attributes:
        loss: of one sample: a record, or an owner, whose loss is the mean over its records.
        owners: whether samples are owners.
        partition: the samples in pieces as memory allows, from which each pass begins.
        weights: float64, shape ``(B,)``, on the model's device; None if all are 1.
    """

    def __init__(
        self,
        loss: Loss,
        batch: Any,
        engine: GradientEngine,
        *,
        max_physical_batch_size: PhysicalBatchSize,
        generator: NoiseGenerator,
        coins: bytes,
        weights: Weights = None,
    ) -> None:
        self.owners = isinstance(batch, Records) and batch.owners
        self.loss = _of_sample(loss, self.owners)
        self.engine, self._generator, self._coins = engine, generator, coins
        self.partition = Partition.of(batch, max_physical_batch_size)
        self._passes = 0  # so far, each with random numbers of its own
        self.weights = None
        if weights is not None:
            check_function("weights", weights)
            values = engine.losses(_of_sample(weights, self.owners), self.new_pass())
            self.weights = check_weights(values.double())

    def losses(self) -> Tensor:
        """Losses at the model's current weights, shape ``(B,)``."""
        return self.engine.losses(self.loss, replace(self.new_pass(), coin=None)).double()

    def weighted(self, losses: Tensor) -> Tensor:
        """Losses, shape ``(..., B)``, times the weights; 0 for a sample of weight 0, even if its loss is not finite."""
        if self.weights is None:
            return losses
        return (losses * self.weights).masked_fill(self.weights == 0, 0.0)

    def new_pass(self) -> Partition:
        """A partition that a pass may split, with random numbers of its own; passes share neither.

        Else a record that splits a piece in one pass alone changes whether others' masks are those of another.
        """
        number, self._passes = self._passes, self._passes + 1

        def begin(piece: Piece, attempt: int) -> None:
            stream = ("mapped", number, *piece.stream) if attempt == 0 else ("alone", number, piece.stream[0], attempt)
            key = self._generator.child(*stream).key
            seed_random_states(key, self.engine.device, self._coins)

        def coin() -> bool:
            return float(self._generator.child("memory").uniform(1)) < _MEMORY_CHECK_SHARE

        return Partition(list(self.partition.pieces), begin, coin)


def _of_sample(function: Loss, owners: bool) -> Loss:
    """A loss or weight function of a sample, from one of a record: an owner's is the mean over its records."""
    if not owners:
        return function
    return lambda records: torch.stack([widened(one_number(function(record))) for record in records]).mean()
