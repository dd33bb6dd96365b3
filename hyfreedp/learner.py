"""The interface of what learns the rate, and the view of a batch that it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hyfreedp.gradients.step_batch import StepBatch
from hyfreedp.noise import NoiseGenerator
from hyfreedp.processes.group import Processes
from hyfreedp.pytorch.base_optimizer import BaseOptimizer
from hyfreedp.pytorch.records import LookResult, ProbeResult


@dataclass(frozen=True)
class BatchView:
    """One batch as a learner sees it. Its losses are raw: a learner may use them only through one noisy release.

    Attributes:
        noise_multiplier: sigma_l of the release.
        expected_batch_size, processes: those of the run.
        generator: source of the noise, for this release only.
        batch: computes raw losses at the model's current weights, and has the samples' weights.
        count: records the tag of the release in the ledger.
    """

    noise_multiplier: float
    expected_batch_size: float
    generator: NoiseGenerator
    batch: StepBatch
    processes: Processes
    count: Callable[[int], None]

    def released(self) -> None:
        """Count the release in the ledger. Call this once its noise is drawn, before its values are used."""
        self.processes.check_same(self.generator.tag)
        self.count(self.generator.tag)


class RateLearner:
    """Base class of the learners. Its ``repr`` names all settings, which must be equal in a loaded state."""

    @property
    def eta(self) -> float:
        """The current learning rate, without decay."""
        raise NotImplementedError

    def on_step_start(self, step: int) -> None:
        """Called before step t = 0, 1, ..."""

    def vote_before_step(self, view: BatchView) -> LookResult:
        """Release votes before the step's gradient; may change weights and rate, which :meth:`undo` reverts."""
        raise NotImplementedError

    def undo(self) -> None:
        """Revert :meth:`vote_before_step` after a failed step. Does nothing once :meth:`on_gradient` was called."""

    def on_gradient(self) -> None:
        """Called when the private gradient is in ``.grad``."""

    def probe_after_step(
        self, view: BatchView, here: Tensor, move: Callable[[float], None]
    ) -> tuple[ProbeResult, Tensor]:
        """Release losses along the update direction G of the step, and set the next rate.

        Args:
            view: the batch.
            here: raw per-sample losses at w, shape ``(B,)``.
            move: ``move(x)`` sets the weights to w - x G.

        Returns:
            What was released and decided; and the raw losses, (3, B), for diagnostics.
        """
        raise NotImplementedError

    def on_step_end(self) -> None:
        """Called after the weights were updated."""

    def averaged(self) -> AbstractContextManager[None]:
        """See :meth:`hyfreedp.HyFreeDPOptimizer.averaged`."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and live tensors, which :meth:`load_state_dict` restores exactly."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""


class FixedRate(RateLearner):
    """Uses the base optimizer's own rate; nothing is released for it."""

    def __init__(self, base: BaseOptimizer) -> None:
        self._base = base

    @property
    def eta(self) -> float:
        return self._base.eta

    def __repr__(self) -> str:
        return "a fixed rate"
