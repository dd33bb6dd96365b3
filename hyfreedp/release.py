"""The releases of a run: noisy sums over a batch, each counted by the ledger before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn

from hyfreedp.accounting import PrivacyLedger
from hyfreedp.gradients import GradientEngine
from hyfreedp.gradients.step_batch import StepBatch
from hyfreedp.learner import BatchView
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_gradient
from hyfreedp.processes.group import Processes


@dataclass(frozen=True, eq=False, repr=False)
class Releases:
    """The releases of one run, in the order of its plan; the noise of each has its own key."""

    ledger: PrivacyLedger
    engine: GradientEngine
    generator: NoiseGenerator
    expected_batch_size: float
    processes: Processes

    def gradient(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The private mean gradient of the next step (line 4): float32 or wider, one for each of the ``parameters``."""
        t = self.ledger.steps
        sums = self.engine.clipped_sums(parameters)
        self.processes.add_up(sums)
        generator = self.generator.child("gradient", t)
        privatize_gradient(
            sums,
            self.ledger.split.gradient_noise_multiplier(t),
            sensitivity=self.engine.sensitivity,
            expected_batch_size=self.expected_batch_size,
            generator=generator,
        )
        self.processes.check_same(generator.tag)
        self.ledger.record(generator.tag)
        return sums

    def view(self, t: int, batch: StepBatch, what: Literal["look", "probe"]) -> BatchView:
        """The batch of step t for the rate learner: for votes before its gradient, or for a probe along its update."""
        return BatchView(
            noise_multiplier=self.ledger.split.sigma_loss,
            expected_batch_size=self.expected_batch_size,
            generator=self.generator.child(what, t),
            batch=batch,
            processes=self.processes,
            count=partial(self.ledger.record_probe, t),
        )
