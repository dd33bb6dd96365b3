"""What torch, its schedulers and other libraries expect of an optimizer, for one that wraps another."""

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

_STEPPING: dict[int, object] = {}  # the step under way, by process id: no lock, which a forked child would inherit

P = ParamSpec("P")
R = TypeVar("R")


class OptimizerWrapper(torch.optim.Optimizer):
    """A torch optimizer that shares groups, state, defaults and ``state_dict`` hooks with ``base``, which it wraps.

    Hooks on its ``step`` are its own, see :func:`run_step_hooks`.
    """

    def __init__(self, base: torch.optim.Optimizer) -> None:
        # torch's own constructor is not called: it would create groups and a state of its own.
        self.base, self.defaults = base, base.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        for when in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            setattr(self, f"_optimizer_{when}_hooks", getattr(base, f"_optimizer_{when}_hooks"))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base optimizer's groups; their "lr" is that of the last step. Threat model: WR."""
        return self.base.param_groups

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:  # type: ignore[override]
        """The base optimizer's state. Threat model: WR."""
        return self.base.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. A private step leaves none, but loops written for other optimizers call this."""
        self.base.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """RuntimeError: the parameters of a private run are fixed."""
        raise RuntimeError(
            "the parameters of a private run cannot be added to: call add_param_group before make_private_with_epsilon"
        )

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """TypeError for torch's GradScaler, which reads this attribute before it steps an optimizer."""
        raise TypeError(
            f"a GradScaler cannot step {type(self).__name__}: leave it out, and for half precision put "
            "torch.autocast(..., dtype=torch.bfloat16) around the model in the loss"
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can be neither pickled nor copied: two runs would release with the same noise. "
            "Save its state_dict(), or use PrivacyEngine.save_checkpoint"
        )


class Unprepared:
    """Raises TypeError in accelerate's ``Accelerator.prepare``, which reads the attribute below.

    accelerate's optimizer has no ``step(loss, batch)``, and its loader would split batches that are already split.
    """

    @property
    def _is_accelerate_prepared(self) -> NoReturn:
        raise TypeError(
            f"accelerator.prepare must not be given a private {type(self).__name__}. Leave out prepare, call "
            "model.to(accelerator.device) before make_private_with_epsilon, move tensors in the loss: docs/trainers.md"
        )


def run_step_hooks(step: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method ``step(loss, batch)``: check its arguments, run the optimizer's hooks, refuse nested steps.

    TypeError for calls in the way of plain torch; RuntimeError if another private step of this process is under way.
    Global optimizer hooks and the profiler's label are left to the base optimizer's step within.
    """

    @functools.wraps(step)
    def hooked(*args: P.args, **kwargs: P.kwargs) -> R:
        loss = args[1] if len(args) > 1 else kwargs.get("loss")  # after ``self``
        if len(args) + len(kwargs) < 3 or not callable(loss):
            raise TypeError(
                "step takes a function and a batch: call optimizer.step(loss, batch), where loss(record) returns one "
                "number, the loss of a record as collate_fn([record]) gives it. No backward(), closure or GradScaler"
            )
        optimizer: Any = args[0]
        for before in list(optimizer._optimizer_step_pre_hooks.values()):
            if (changed := before(optimizer, args, kwargs)) is not None:
                args, kwargs = changed
        process, mine = os.getpid(), object()
        try:
            if _STEPPING.setdefault(process, mine) is not mine:
                raise RuntimeError(
                    "step was called while a private step of this process is under way, by another thread or by a "
                    "loss: both would use the same random numbers. Train one after the other, or in processes"
                )
            result = step(*args, **kwargs)
        finally:
            if _STEPPING.get(process) is mine:
                del _STEPPING[process]
        for after in list(optimizer._optimizer_step_post_hooks.values()):
            after(optimizer, args, kwargs)
        return result

    return hooked


def stepping() -> bool:
    """Whether a private step of this process is under way."""
    return os.getpid() in _STEPPING
