"""One Poisson batch and its loss: clipped gradients, and losses at other weights of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hyfreedp.checks import check_function, check_weights
from hyfreedp.data.batches import Loss, PhysicalBatchSize, Records
from hyfreedp.errors import Refused
from hyfreedp.gradients.engine import GradientEngine, one_number
from hyfreedp.gradients.per_sample import widened
from hyfreedp.gradients.pieces import Begin, Partition, Piece
from hyfreedp.noise import NoiseGenerator
from hyfreedp.noise.random_states import random_states_kept, seed_random_states

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
        device: of the model.
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
        self._engine, self._generator, self._coins = engine, generator, coins
        self.device = engine.device
        self.partition = Partition.of(batch, max_physical_batch_size)
        self._passes = 0  # so far, each with random numbers of its own
        self.weights = None
        if weights is not None:
            check_function("weights", weights)
            weight = _of_sample(weights, self.owners)
            with self._pass() as (partition, begin):
                values = self._engine.losses(weight, partition, begin=begin)
                self._check_memoryless(weight, partition, values, begin)
            self.weights = check_weights(values.double())

    def add_gradients(self) -> tuple[Tensor, Tensor]:
        """Add clipped per-sample gradients to the engine's sums; returns losses and gradient norms, shape ``(B,)``."""
        with self._pass() as (partition, begin):
            losses, norms = self._engine.add(self.loss, partition, self.weights, begin=begin)
            self._check_memoryless(self.loss, partition, losses, begin)
        return losses.double(), norms

    def losses(self) -> Tensor:
        """Losses at the model's current weights, shape ``(B,)``."""
        with self._pass() as (partition, begin):
            return self._engine.losses(self.loss, partition, begin=begin).double()

    def of_few(self, partition: Partition, key: bytes) -> Tensor:
        """Losses of the samples in ``partition``, in the order of the batch, with random numbers of ``key``."""
        with random_states_kept(self.device):
            seed = lambda piece, attempt: seed_random_states(key, self.device)  # noqa: E731
            return self._engine.losses(self.loss, partition, begin=seed)

    def weighted(self, losses: Tensor) -> Tensor:
        """Losses, shape ``(..., B)``, times the weights; 0 for a sample of weight 0, even if its loss is not finite."""
        if self.weights is None:
            return losses
        return (losses * self.weights).masked_fill(self.weights == 0, 0.0)

    @contextmanager
    def _pass(self) -> Iterator[tuple[Partition, Begin]]:
        """A partition that the pass may split, and the function that seeds its random numbers; it shares neither.

        Else a record that splits a piece in one pass alone changes whether others' masks are those of another.
        """
        number, self._passes = self._passes, self._passes + 1

        def begin(piece: Piece, attempt: int) -> None:
            stream = ("mapped", number, *piece.stream) if attempt == 0 else ("alone", number, piece.stream[0], attempt)
            key = self._generator.child(*stream).key
            seed_random_states(key, self.device, self._coins)

        with random_states_kept(self.device):
            yield Partition(list(self.partition.pieces)), begin

    def _check_memoryless(self, function: Loss, partition: Partition, values: Tensor, begin: Begin) -> None:
        """Refuse a function that keeps something of a sample for later ones, see :meth:`GradientEngine.reproduces`.

        Checked always if samples were computed alone, where it costs little; for a share of the batches with decisions.
        """
        checks = bool(partition.alone)
        if not checks and partition.decided:
            checks = float(self._generator.child("memory").uniform(1)) < _MEMORY_CHECK_SHARE
        if checks and not self._engine.reproduces(function, partition, values, begin):
            raise Refused(
                "the loss (or weight) of a record depends on those that were computed before it: let loss and model "
                "keep nothing of a record, and draw from the global generators of torch, NumPy or Python"
            )


def _of_sample(function: Loss, owners: bool) -> Loss:
    """A loss or weight function of a sample, from one of a record: an owner's is the mean over its records."""
    if not owners:
        return function
    return lambda records: torch.stack([widened(one_number(function(record))) for record in records]).mean()
