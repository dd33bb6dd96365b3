"""The Poisson batch of a step: its losses, the random numbers of each pass over it, and what is released of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.accounting import PrivacyLedger
from hyfreedp.checks import check_type
from hyfreedp.data.batches import Loss, PhysicalBatchSize, Records
from hyfreedp.gradients.engine import GradientEngine, one_number
from hyfreedp.gradients.per_sample import widened
from hyfreedp.gradients.pieces import Partition, Piece
from hyfreedp.noise import NoiseGenerator
from hyfreedp.noise.random_states import seed_random_states
from hyfreedp.privatize import loss_noise_std, privatize_gradient
from hyfreedp.processes.group import Processes

Weights = Callable[[Any], Tensor] | None
_CHECKED = 26  # in 26 of 256 steps, chosen at random, pieces may be computed twice, to find a loss with memory


@dataclass(frozen=True)
class StepContext:
    """What the batch of a step needs of its run."""

    ledger: PrivacyLedger  # knows the number of the next step and its noise, and counts what is released
    generator: NoiseGenerator  # of which each step and purpose gets a child
    processes: Processes
    expected_batch_size: float
    max_physical_batch_size: PhysicalBatchSize  # the most samples mapped together, or a function from one sample to it


class StepBatch:
    """The batch of the next step and its loss function. Results have shape ``(B,)``, B >= 0, in the order of the batch.

    Losses are raw: a learner of the rate may use them only through one noisy release of the batch.

    Args:
        engine: the model's gradient engine.
        loss: maps one record, as ``collate_fn([record])`` returns it, to one number.
        batch: what the loader yielded, or a plain structure of tensors whose dimension 0 is the samples.
        weights: maps one record to its weight, one number in [0, 1].
    """

    def __init__(self, run: StepContext, engine: GradientEngine, loss: Loss, batch: Any, weights: Weights) -> None:
        self._run, self._engine, self._step = run, engine, run.ledger.steps
        split, generator = run.ledger.split, run.generator
        self.owners = isinstance(batch, Records) and batch.owners  # whether samples are owners
        self.loss = _of_sample(loss, self.owners)  # of a record, or the mean over an owner's records
        self._of_gradient = generator.child("gradient", self._step)
        self._of_probe = generator.child("look" if split.probe == "look" else "probe", self._step)
        # Arguments of privatize_loss and privatize_votes.
        self.terms: dict[str, Any] = {"noise_multiplier": split.sigma_loss, "generator": self._of_probe}
        self.terms |= {"expected_batch_size": run.expected_batch_size, "add_up": run.processes.add_up}
        # Random numbers that the user's code draws: of torch, others for each piece; and of NumPy and Python, which all
        # samples of a map share, so all pieces must, too.
        self._of_torch = generator.child("torch", self._step, run.processes.rank)
        self._shared_key = generator.child("coins", self._step).key
        self._checked = self._of_torch.child("memory").key[0] < _CHECKED
        self._passes = 0  # the number of passes so far; each has its own random numbers
        self.partition = Partition.of(batch, run.max_physical_batch_size)  # with which each pass begins
        self.weights = None  # float64, shape (B,), on the model's device; None if all are 1
        if weights is None:
            return
        check_type("weights", weights, Callable, "a function of one record, as lambda record: of_class[record[1]]")
        self.weights = engine.losses(_of_sample(weights, self.owners), self._new_pass(self._checked)).double()
        if not bool(((self.weights >= 0) & (self.weights <= 1)).all()):  # the noise is for samples that count once
            raise ValueError(
                "weights must be in [0, 1], got one outside: divide all by the largest possible, whoever is in the data"
            )

    def losses(self, move: Callable[[], None]) -> Tensor:
        """Losses at the weights that ``move`` gives the model."""
        with self._run.processes.all_or_none():
            move()
            return self._engine.losses(self.loss, self._new_pass(None)).double()

    def noise_std(self, clip: float) -> float:
        """Standard deviation of the noise in each number of a look or probe whose terms are clipped to ``clip``."""
        return float(loss_noise_std(clip, self._run.ledger.split.sigma_loss, self._run.expected_batch_size))

    def weighted(self, losses: Tensor) -> Tensor:
        """Losses (..., B) times the weights; 0 for a sample of weight 0, even if its loss is not finite."""
        if self.weights is None:
            return losses
        return (losses * self.weights).masked_fill(self.weights == 0, 0.0)

    def release_gradient(self, parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor], Tensor, Tensor]:
        """The private gradient of all processes' samples, in the parameters' types; the raw losses and norms here.

        It is in the ledger when this returns.
        """
        run, generator, B = self._run, self._of_gradient, self._run.expected_batch_size
        with run.processes.all_or_none():
            clipped, losses, norms = self._engine.clipped_sums(self.loss, self._new_pass(self._checked), self.weights)
            sums = [clipped[p] for p in parameters]
        run.processes.add_up(sums)
        sigma, R = run.ledger.split.gradient_noise_multiplier(self._step), self._engine.sensitivity
        privatize_gradient(sums, sigma, sensitivity=R, expected_batch_size=B, generator=generator)
        run.processes.check_same(generator.tag)
        run.ledger.record(generator.tag)
        return [total.to(p.dtype) for total, p in zip(sums, parameters, strict=True)], losses, norms

    def released(self) -> None:
        """Count a look or probe in the ledger. Call this once its noise is drawn, before its values are used."""
        self._run.processes.check_same(self._of_probe.tag)
        self._run.ledger.record_probe(self._step, self._of_probe.tag)

    def _new_pass(self, checked: bool | None) -> Partition:
        """A partition for one pass, which may split it, with random numbers of its own.

        If passes shared these, a record that splits a piece in one pass only would change whether the dropout masks of
        others are the same in two passes.
        """
        number, self._passes = self._passes, self._passes + 1

        def begin(piece: Piece) -> None:
            own = self._of_torch.child("alone" if piece.attempt else "mapped", number, *piece.stream)
            seed_random_states(own.key, self._engine.device, self._shared_key)

        return Partition(list(self.partition.pieces), begin, checked)


def _of_sample(function: Loss, owners: bool) -> Loss:
    """The function (loss or weight) of a sample, from that of a record: for an owner the mean over the records."""
    if not owners:
        return function
    return lambda records: torch.stack([widened(one_number(function(record))) for record in records]).mean()
