"""The interface of what learns the rate."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from hyfreedp.pytorch.base_optimizer import BaseOptimizer
from hyfreedp.pytorch.records import LookResult, ProbeResult
from hyfreedp.step_batch import StepBatch


class RateLearner:
    """Base class of the learners; itself it learns nothing, and uses the rate of the base optimizer.

    Its ``repr`` names all settings, which must be equal in a loaded state.
    """

    def __init__(self, base: BaseOptimizer) -> None:
        self._base = base

    @property
    def eta(self) -> float:
        """The current learning rate, without decay."""
        return self._base.eta

    def on_step_start(self, step: int) -> None:
        """Called before step t = 0, 1, ..."""

    def vote_before_step(self, batch: StepBatch) -> LookResult:
        """Release votes before the step's gradient; may change weights and rate, which :meth:`undo` reverts."""
        raise NotImplementedError

    def undo(self) -> None:
        """Revert :meth:`vote_before_step` after a failed step. Does nothing once :meth:`on_gradient` was called."""

    def on_gradient(self, gradient: Sequence[Tensor]) -> None:
        """Called with the private gradient, once it is released."""

    def probe_after_step(
        self, batch: StepBatch, here: Tensor, move: Callable[[float], None]
    ) -> tuple[ProbeResult, Tensor]:
        """Release losses along the update direction G of the step, and set the next rate.

        Args:
            here: raw per-sample losses at w, shape ``(B,)``.
            move: ``move(x)`` sets the weights to w - x G.

        Returns what was released and decided; and the raw losses, (3, B), for diagnostics.
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

    def __repr__(self) -> str:
        return "a fixed rate"
