"""One Poisson batch and its loss: clipped gradients, then losses at other weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyfreedp.checks import check_function, check_weights
from hyfreedp.data.batches import Loss, PhysicalBatchSize, Records
from hyfreedp.errors import Refused
from hyfreedp.gradients.engine import Begin, GradientEngine, Piece, Plan, one_number
from hyfreedp.gradients.mapped import SEEDED
from hyfreedp.noise import NoiseGenerator
from hyfreedp.noise.random_states import random_states_kept, random_states_of, seed_random_states

Weights = Callable[[Any], Tensor] | None
_LOOKED_AT = 0.1  # of the batches in which a decision of Python was answered


class StepBatch:
    """One batch and its loss function. An empty batch takes no pass, and its results have length 0.

    Results are in the order of the batch.

    Args:
        loss: maps one record, as ``collate_fn([record])`` gives it, to one number.
        batch: what the loader gave, or a plain structure of tensors whose dimension 0 is the samples.
        engine: of the model.
        max_physical_batch_size: samples that are mapped together at most, or a function of one that says how many.
        generator: of torch's random numbers in each piece.
        coins: of NumPy's and Python's, which are one for all samples mapped together, so that they must be the same in
            all pieces, whatever the records are.
        weights: maps one record to how much it counts, one number in [0, 1].

    Attributes:
        loss: of one sample, which is a record, or an owner, whose loss is the mean of its records'.
        owners: whether samples are owners.
        plan: how the samples go through the model.
        device, guard: of the model.
        weights: float64, shape ``(B,)``, on the model's device; None if all are 1.

    Raises:
        ValueError, TypeError: weights are no function, or one is out of range.
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
        self.owners = owners = isinstance(batch, Records) and batch.owners
        self.loss = _unseeded(_mean_over_records(loss) if owners else loss)
        self._engine, self._generator, self._coins = engine, generator, coins
        self.device, self.guard = engine.device, engine.guard
        self.plan = Plan.of(batch, max_physical_batch_size)
        self._first = list(self.plan.pieces)
        self._added = False  # whether the gradients are
        self.weights = None
        if weights is not None:
            check_function("weights", weights)
            its = _unseeded(_mean_over_records(weights) if owners else weights)
            plan, begin = Plan(list(self._first)), self._begin("weights")
            with random_states_kept(self.device):
                found = self._engine.losses(its, plan, begin=begin)
                self._check_forgotten(its, plan, found, begin)
            self.weights = check_weights(found.double())

    def add_gradients(self) -> tuple[Tensor, Tensor]:
        """Clipped per-sample gradients into the engine's sums; the losses and the gradients' norms, shape ``(B,)``."""
        self.plan = Plan(list(self._first))  # what a look found was at other weights
        begin = self._begin("piece")
        with random_states_kept(self.device):
            losses, norms = self._engine.add(self.loss, self.plan, self.weights, begin=begin)
            self._added = True
            self._check_forgotten(self.loss, self.plan, losses, begin)
        return losses.double(), norms

    def losses(self) -> Tensor:
        """Losses at the present weights, shape ``(B,)``; dropout is that of the gradients, once there are some."""
        begin = self._begin("piece" if self._added else "look")
        with random_states_kept(self.device):
            return self._engine.losses(self.loss, self.plan, begin=begin).double()

    def of_few(self, plan: Plan, key: bytes) -> Tensor:
        """Losses of the samples in ``plan``, in the order of the batch; random numbers are those of ``key``."""
        with random_states_of(key, self.device):
            return self._engine.losses(self.loss, plan)

    def weighted(self, losses: Tensor) -> Tensor:
        """Losses, shape ``(..., B)``, times the weights; a sample of weight 0 has loss 0, whatever it was."""
        return losses if self.weights is None else (losses * self.weights).masked_fill(self.weights == 0, 0.0)

    def _begin(self, what: str) -> Begin:
        """Sets random numbers: torch's of each piece its own, and so of each sample that is computed alone."""

        def begin(piece: Piece, attempt: int) -> None:
            stream = (what, *piece.stream) if attempt == 0 else (f"{what} alone", piece.stream[0], attempt)
            key = self._generator.child(*stream).key
            seed_random_states(key, self.device, self._coins)

        return begin

    def _check_forgotten(self, function: Loss, plan: Plan, values: Tensor, begin: Begin) -> None:
        """Refuse what keeps, for the next samples, what Python has been told of one; looked for now and then.

        Always where samples are computed one at a time, beside which it costs nothing.
        """
        now_and_then = float(self._generator.child("memory").uniform(1)) < _LOOKED_AT
        told = bool(self._engine.looped) or (self._engine.told and now_and_then)
        if told and not self._engine.forgets(function, plan, values, begin):
            raise Refused(
                "the loss (or weight) of a record depends on those that were computed before it: let loss and model "
                "keep nothing of a record, and draw from the global generators of torch, NumPy or Python"
            )


def _unseeded(loss: Loss) -> Loss:
    """The same, refused where it seeds torch's random numbers."""

    def checked(record: Any) -> Tensor:
        seed = torch.initial_seed()
        value = loss(record)
        if torch.initial_seed() != seed:
            raise Refused(SEEDED)
        return value

    return checked


def _mean_over_records(loss: Loss) -> Loss:
    """Of an owner, whose records come one by one, the mean."""
    return lambda records: torch.stack([one_number(loss(record)) for record in records]).mean()
