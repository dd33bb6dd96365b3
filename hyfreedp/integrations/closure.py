"""The private optimizer for loops that call ``step`` themselves, and when they show epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hyfreedp.optimizer import HyFreeDPOptimizer
from hyfreedp.running.wrapper import OptimizerWrapper


class ClosureOptimizer(OptimizerWrapper):
    """An optimizer whose ``step(closure)`` calls the closure, which makes the private step; else it does nothing.

    Its groups and state are those of the private optimizer, and so is what it saves.

    Args:
        private: what ``make_private_with_epsilon`` returned.
    """

    def __init__(self, private: HyFreeDPOptimizer) -> None:
        super().__init__(private.base)
        self.private = private

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Call ``closure`` and return what it returns."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, which hold nothing between steps."""
        self.private.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """That of the private optimizer."""
        return self.private.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """That of the private optimizer."""
        self.private.load_state_dict(state_dict)


def epsilon_is_due(private: HyFreeDPOptimizer) -> bool:
    """Whether a progress bar shows epsilon anew after this step: at its last one, and about 100 times in a run.

    By the accountant "pld" it takes up to a tenth of a second.
    """
    steps, done = private.split.steps, private.ledger.steps
    return done == steps or done % math.ceil(steps / 100) == 0
