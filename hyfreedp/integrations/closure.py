"""The private optimizer for trainers that call ``step(closure)`` themselves, and helpers for their logs."""

import functools
import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from hyfreedp.optimizer import HyFreeDPOptimizer
from hyfreedp.pytorch.checkpoint import read_key, write_key
from hyfreedp.pytorch.wrapper import OptimizerWrapper


class ClosureOptimizer(OptimizerWrapper):
    """An optimizer whose ``step(closure)`` only calls the closure, which makes the private step.

    Its groups and state are those of the private optimizer. Its ``state_dict`` may be published with the model: it
    holds released values, the public plan, and the name of a file in ``folder`` with the secrets.
    """

    def __init__(self, private: HyFreeDPOptimizer, folder: str | os.PathLike[str]) -> None:
        super().__init__(private.base)
        self.private, self.folder = private, folder

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Call ``closure`` and return what it returns."""
        return None if closure is None else closure()

    def state_dict(self) -> dict[str, Any]:
        """The private optimizer's state without the secret keys (saved to the file) and without raw diagnostics."""
        state = self.private.state_dict()
        name = write_key(self.folder, {part: state.pop(part) for part in ("generator", "sampler")})
        history = [{k: v for k, v in row.items() if not k.startswith("not_private_")} for row in state["history"]]
        return {**state, "key_file": name, "history": history}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; FileNotFoundError or ValueError without the right key file."""
        if "key_file" not in state_dict:
            raise ValueError("state_dict must have a 'key_file': give the optimizer's state of a trainer's checkpoint")
        self.private.load_state_dict({**state_dict, **read_key(self.folder, state_dict["key_file"])})


def epsilon_is_due(private: HyFreeDPOptimizer) -> bool:
    """Whether to update epsilon in a progress bar: about 100 times in a run, and at its end.

    Computing it takes up to a tenth of a second with accountant "pld".
    """
    steps, done = private.split.steps, private.ledger.steps
    return done == steps or done % math.ceil(steps / 100) == 0


@functools.cache
def warn_of_log(names: tuple[str, ...]) -> None:
    """Warn, once for the same ``names``, that values logged within a loss are ignored."""
    if names:
        warnings.warn(
            f"{', '.join(names)} is not logged: what the loss computes of records is not private. Epsilon and the "
            "learning rate are logged; log other values in the evaluation",
            stacklevel=2,
        )
