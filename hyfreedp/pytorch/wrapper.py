"""What torch, its schedulers and tools built on them expect of an optimizer, for one that wraps another."""

from __future__ import annotations

import functools
import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from hyfreedp.checks import nearest

_STEPPING: dict[int, object] = {}  # the step under way of each process; a lock would be inherited by a fork

P = ParamSpec("P")
R = TypeVar("R")


class OptimizerWrapper(torch.optim.Optimizer):
    """A torch optimizer whose groups, state, defaults and hooks on ``state_dict`` are those of its base optimizer.

    Hooks on its step are its own, see :func:`run_step_hooks`.

    Args:
        base: the optimizer that it wraps.
    """

    def __init__(self, base: torch.optim.Optimizer) -> None:
        # torch's own constructor would make groups and a state beside the base optimizer's.
        self.base = base
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        for when in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            name = f"_optimizer_{when}_hooks"
            setattr(self, name, getattr(base, name))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base optimizer's groups; their "lr" is what the last step used. Threat model: WR."""
        return self.base.param_groups

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:  # type: ignore[override]
        """The base optimizer's state. Threat model: WR."""
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base optimizer's defaults."""
        return self.base.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused: a run's parameters are those that were made private."""
        raise RuntimeError(
            "the parameters of a private run cannot be added to: add_param_group belongs before "
            "make_private_with_epsilon"
        )

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """What torch's GradScaler asks before it steps an optimizer: refused."""
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
    """What ``Accelerator.prepare`` of accelerate refuses to take: it asks for this attribute before it wraps anything.

    accelerate's optimizer has no step of a loss and a batch; its loader would share out what is shared out already.
    """

    @property
    def _is_accelerate_prepared(self) -> NoReturn:
        raise TypeError(
            f"accelerator.prepare must not be given a private {type(self).__name__}. Leave out prepare, call "
            "model.to(accelerator.device) before make_private_with_epsilon, and move tensors in the loss (see "
            "docs/trainers.md)"
        )


def run_step_hooks(step: Callable[P, R]) -> Callable[P, R]:
    """Make a method ``step(loss, batch)`` one that runs its optimizer's hooks, and refuses other arguments.

    Hooks of all optimizers and the profiler's label belong to the base optimizer's step within.

    Raises:
        TypeError: the call was none of ``step(loss, batch)``, as of a loop that was written for plain torch.
    """
    signature = inspect.signature(step)

    @functools.wraps(step)
    def hooked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - signature.parameters.keys():
            if hint := nearest(name, signature.parameters):
                raise TypeError(f"step has no argument {name!r}{hint}")
        try:
            loss = signature.bind(*args, **kwargs).arguments["loss"]
        except TypeError:
            loss = None
        if not callable(loss):
            raise TypeError(
                "step takes a function and a batch: call optimizer.step(loss, batch), where loss(record) returns one "
                "number, the loss of one record as collate_fn([record]) gives it, without loss.backward(), closure or "
                "GradScaler"
            )
        check_arguments(loss, "the record")
        optimizer: Any = args[0]
        for before in list(optimizer._optimizer_step_pre_hooks.values()):
            if (changed := before(optimizer, args, kwargs)) is not None:
                args, kwargs = changed
        process, mine = os.getpid(), object()
        try:
            if _STEPPING.setdefault(process, mine) is not mine:
                raise RuntimeError(
                    "step was called while a private step of this process is under way, by another thread or by a "
                    "loss: both would use the same sums and random numbers. Train one after the other, or in processes"
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


def check_arguments(loss: Callable[..., Any], *names: str) -> None:
    """Refuse a loss function that cannot be called with so many arguments."""
    try:
        arguments = inspect.signature(loss, follow_wrapped=False)
    except (ValueError, TypeError):  # of a function written in C, or with a signature of its own
        return
    try:
        arguments.bind(*names)
    except TypeError:
        taken = f"{'one argument' if len(names) == 1 else 'two arguments'}, {' and '.join(names)}"
        raise TypeError(
            f"loss must take {taken}, got a function of {arguments}: let it take the record apart itself, as by "
            "x, y = record"
        ) from None
