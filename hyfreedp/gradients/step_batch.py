"""The Poisson batch of a step: its loss, the random numbers of each pass over it, and the release of its losses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hyfreedp.accounting import PrivacyLedger
from hyfreedp.checks import check_function, check_weights
from hyfreedp.data.batches import Loss, PhysicalBatchSize, Records
from hyfreedp.gradients.engine import GradientEngine, one_number
from hyfreedp.gradients.per_sample import widened
from hyfreedp.gradients.pieces import Partition, Piece
from hyfreedp.noise import NoiseGenerator
from hyfreedp.noise.random_states import seed_random_states
from hyfreedp.processes.group import Processes

Weights = Callable[[Any], Tensor] | None
_MEMORY_CHECK_SHARE = 0.1  # share of the batches with decisions of Python that are checked for memory of samples


class StepBatch:
    """One batch and its loss function. Results have shape ``(B,)``, B >= 0, in the order of the batch.

    Losses are raw: a learner of the rate may use them only through one noisy release of the batch.

    Args:
        loss: maps one record, as ``collate_fn([record])`` returns it, to one number.
        batch: what the loader yielded, or a plain structure of tensors whose dimension 0 is the samples.
        weights: maps one record to its weight, one number in [0, 1].
        engine: the model's gradient engine.
        max_physical_batch_size: the most samples mapped together, or a function from one sample to it.
        step: number of the step.
        generator: that of the run, of which each purpose gets a child.
        ledger: counts the release.

    Attributes:
        loss: the loss of one sample: of a record, or the mean over an owner's records.
        owners: whether samples are owners.
        partition: the pieces that memory allows, with which each pass begins.
        weights: float64, shape ``(B,)``, on the model's device; None if all are 1.
        noise_multiplier, generator: sigma_l of the release, and the source of its noise.
        expected_batch_size, processes: those of the run.
    """

    def __init__(
        self,
        loss: Loss,
        batch: Any,
        weights: Weights,
        *,
        engine: GradientEngine,
        max_physical_batch_size: PhysicalBatchSize,
        step: int,
        generator: NoiseGenerator,
        ledger: PrivacyLedger,
        expected_batch_size: float,
        processes: Processes,
    ) -> None:
        self.owners = isinstance(batch, Records) and batch.owners
        self.loss = _of_sample(loss, self.owners)
        self.engine, self._step, self._ledger = engine, step, ledger
        self.expected_batch_size, self.processes = expected_batch_size, processes
        self.noise_multiplier = ledger.split.sigma_loss
        self.generator = generator.child("look" if ledger.split.probe == "look" else "probe", step)
        self._of_torch = generator.child("torch", step, processes.rank)  # different random numbers for each piece
        # Key of NumPy's and Python's random numbers. All samples of a map share these, so all pieces must, too.
        self._coins = generator.child("coins", step).key
        self._passes = 0  # the number of passes so far; each has its own random numbers
        self.partition = Partition.of(batch, max_physical_batch_size)
        self.weights = None
        if weights is not None:
            check_function("weights", weights)
            values = engine.losses(_of_sample(weights, self.owners), self.new_pass())
            self.weights = check_weights(values.double())

    def losses(self) -> Tensor:
        """Losses at the model's current weights, shape ``(B,)``."""
        return self.engine.losses(self.loss, replace(self.new_pass(), coin=None)).double()

    def weighted(self, losses: Tensor) -> Tensor:
        """Losses (..., B) times the weights; 0 for a sample of weight 0, even if its loss is not finite."""
        if self.weights is None:
            return losses
        return (losses * self.weights).masked_fill(self.weights == 0, 0.0)

    def released(self) -> None:
        """Count the release in the ledger. Call this once its noise is drawn, before its values are used."""
        self.processes.check_same(self.generator.tag)
        self._ledger.record_probe(self._step, self.generator.tag)

    def new_pass(self) -> Partition:
        """A partition for one pass, which may split it, with random numbers of its own.

        If passes shared these, a record that splits a piece in one pass only would change whether the dropout masks of
        others are the same in two passes.
        """
        number, self._passes = self._passes, self._passes + 1

        def begin(piece: Piece, attempt: int) -> None:
            stream = ("mapped", number, *piece.stream) if attempt == 0 else ("alone", number, piece.stream[0], attempt)
            seed_random_states(self._of_torch.child(*stream).key, self.engine.device, self._coins)

        def coin() -> bool:
            return float(self._of_torch.child("memory").uniform(1)) < _MEMORY_CHECK_SHARE

        return Partition(list(self.partition.pieces), begin, coin)


def _of_sample(function: Loss, owners: bool) -> Loss:
    """The function (loss or weight) of a sample, from that of a record: for an owner the mean over the records."""
    if not owners:
        return function
    return lambda records: torch.stack([widened(one_number(function(record))) for record in records]).mean()
