"""What leaves a run: noisy sums over a batch, each counted by the ledger before anything can be made of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hyfreedp.accounting import PrivacyLedger
from hyfreedp.gradients import GradientEngine
from hyfreedp.gradients.step_batch import StepBatch
from hyfreedp.learner import BatchView
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_gradient
from hyfreedp.processes.group import Processes


class Releases:
    """The releases of one run, in the order of its plan; every one has noise of a key of its own.

    Args:
        ledger: counts them.
        engine: holds the clipped sums of a step.
        generator: of the noise.
        expected_batch_size: B, which divides all sums.
        processes: those whose sums are added up.
    """

    def __init__(
        self,
        ledger: PrivacyLedger,
        engine: GradientEngine,
        generator: NoiseGenerator,
        expected_batch_size: float,
        processes: Processes,
    ) -> None:
        self._ledger, self._engine, self._generator = ledger, engine, generator
        self._expected_batch_size, self._processes = expected_batch_size, processes

    def gradient(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The private mean gradient of the next step (line 4): float32 or wider, one for each of the ``parameters``."""
        t = self._ledger.steps
        sums = self._engine.clipped_sums(parameters)
        self._processes.add_up(sums)
        generator = self._generator.child("gradient", t)
        privatize_gradient(
            sums,
            self._ledger.split.gradient_noise_multiplier(t),
            sensitivity=self._engine.sensitivity,
            expected_batch_size=self._expected_batch_size,
            generator=generator,
        )
        self._processes.check_same(generator.tag)
        self._ledger.record(generator.tag)
        return sums

    def before_step(self, t: int, batch: StepBatch) -> BatchView:
        """The batch of step t for a learner that votes before its gradient."""
        return self._view(batch, self._generator.child("look", t), "look")

    def after_step(self, t: int, batch: StepBatch) -> BatchView:
        """The batch of step t for a learner that probes along its update."""
        return self._view(batch, self._generator.child("probe", t), "probe")

    def _view(self, batch: StepBatch, generator: NoiseGenerator, what: str) -> BatchView:
        return BatchView(
            noise_multiplier=self._ledger.split.sigma_loss,
            expected_batch_size=self._expected_batch_size,
            generator=generator,
            batch=batch,
            processes=self._processes,
            count=self._ledger.record_look if what == "look" else self._ledger.record_probe,
        )
