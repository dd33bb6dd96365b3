"""What the optimizer asks of anything that learns the rate, and what a learner is given of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hyfreedp.gradients.step_batch import StepBatch
from hyfreedp.noise import NoiseGenerator
from hyfreedp.processes.group import Processes
from hyfreedp.pytorch.records import LookResult, ProbeResult


@dataclass(frozen=True)
class BatchView:
    """One batch, for a learner of the rate. What it makes of the raw losses is private once it is released with noise.

    Attributes:
        noise_multiplier: sigma_l, of what is released.
        expected_batch_size: sample rate times number of records.
        generator: of the noise of this release alone.
        batch: gives raw losses at the weights that the model has now, and the samples' weights.
        processes: those that train together.
        count: takes the tag of the release into the ledger.
    """

    noise_multiplier: float
    expected_batch_size: float
    generator: NoiseGenerator
    batch: StepBatch
    processes: Processes
    count: Callable[[int], None]

    def released(self) -> None:
        """Count the release whose noise was just drawn. To be called before anything follows from it."""
        self.processes.check_same(self.generator.tag)
        self.count(self.generator.tag)


class RateLearner:
    """What the optimizer asks of each. Its ``repr`` says all that must be the same where a state is resumed."""

    @property
    def eta(self) -> float:
        """The learning rate in force, without decay."""
        raise NotImplementedError

    def on_step_start(self, step: int) -> None:
        """Before step t = 0, 1, ..."""

    def vote_before_step(self, view: BatchView) -> LookResult:
        """Release votes before the step's gradient; may move the weights, and the rate (see :meth:`undo`)."""
        raise NotImplementedError

    def undo(self) -> None:
        """Take back what :meth:`vote_before_step` moved: the step could not be made."""

    def on_gradient(self) -> None:
        """The private gradient is in ``.grad``."""

    def probe_after_step(
        self, view: BatchView, here: Tensor, move: Callable[[float], None]
    ) -> tuple[ProbeResult, Tensor]:
        """Release losses along the update G of the step: ``move(x)`` sets the weights to w - x G.

        Args:
            view: the batch.
            here: raw per-sample losses at w, shape ``(B,)``.
            move: see above.

        Returns:
            What was released and decided, and the raw losses, for diagnostics.
        """
        raise NotImplementedError

    def on_step_end(self) -> None:
        """The step was made."""

    def averaged(self) -> AbstractContextManager[None]:
        """Around an evaluation: the weights are those at which the run would end."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and live tensors, that :meth:`load_state_dict` restores exactly."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""


class FixedRate(RateLearner):
    """The base optimizer's own rate, which nothing is released for.

    Args:
        rate: what gives it, as a scheduler of torch's may have set it.
    """

    def __init__(self, rate: Callable[[], float]) -> None:
        self._rate = rate

    @property
    def eta(self) -> float:
        return self._rate()

    def __repr__(self) -> str:
        return "a fixed rate"
