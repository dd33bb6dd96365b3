"""Checks of the user's arguments, made before any private data is used; each error says what is allowed."""

import difflib
import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def check_choice(name: str, value: Any, choices: Any) -> None:
    """ValueError unless ``value`` is one of ``choices``: a Literal type, or an iterable of strings."""
    allowed = get_args(choices) or tuple(choices)
    if not isinstance(value, str) or value not in allowed:
        hint = nearest(str(value), allowed)
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


def check_number(name: str, value: Any, within: str = "[-inf, inf]") -> float:
    """``value`` as a float; ValueError unless it is a number ``within`` an interval such as "(0, 1]"."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    number = float(value)
    low, high = map(float, within[1:-1].split(","))
    if not low <= number <= high or (number == low and within[0] == "(") or (number == high and within[-1] == ")"):
        raise ValueError(f"{name} must be in {within}, got {value!r}")
    return number


def check_flag(name: str, value: Any) -> bool:
    """``value`` as a bool; TypeError for others, which Python would convert ("no" to True)."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_type(name: str, value: Any, kinds: Any, wanted: str) -> None:
    """TypeError unless ``value`` is an instance of ``kinds``, which the message calls ``wanted``."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}")


def check_array(name: str, value: Any) -> NDArray[np.float64]:
    """``value`` as an array of float64; TypeError if that is impossible."""
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a number or an array of numbers, got {value!r}: {error}") from None


def check_delta(target_delta: Any, records: int) -> None:
    """ValueError for a delta above 0.1; a warning for a delta of 1 / N or more, or if there is only one record."""
    delta = check_number("target_delta", target_delta, "(0, 1)")
    means = f"it would allow to publish each record with probability {delta:g}"
    advice = f"choose one below 1/N, such as 1/(10 N) = {0.1 / records:.2g}"
    if delta > 0.1:
        raise ValueError(f"target_delta must be at most 0.1, got {delta} with N = {records}: {means}; {advice}")
    if records == 1:
        warnings.warn(
            "the data set has one record: a private run hides whether it is there, so it cannot learn from it",
            stacklevel=4,
        )
    elif delta >= 1 / records:
        warnings.warn(
            f"target_delta={target_delta!r} is not below 1/N, with N = {records} records: {means}, that is "
            f"{delta * records:.2g} records on average; {advice}",
            stacklevel=4,
        )


def check_count(name: str, value: Any, smallest: int, largest: float = math.inf, limit: str = "") -> int:
    """``value`` as an int; ValueError unless from ``smallest`` to ``largest``, which the message calls ``limit``."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not smallest <= int(value) <= largest:
        upper = f" and at most {largest} ({limit})" if limit else ""
        raise ValueError(f"{name} must be an integer of at least {smallest}{upper}, got {value!r}")
    return int(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: "; did you mean ...?", or "" if no ``known`` name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def listed(problems: Sequence[str]) -> str:
    """The first three problems and the number of others, as text."""
    more = f"; and {len(problems) - 3} more like these" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def is_of(package: str, value: object) -> bool:
    """Whether the class of ``value``, or a base class, comes from ``package``, which is not imported for that."""
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(value).__mro__)


def made_by(thing: object) -> str | None:
    """ "Opacus" or "accelerate" if that library has wrapped the model, optimizer or loader; else None."""
    return next((library for library in ("Opacus", "accelerate") if is_of(library.lower(), thing)), None)


def check_arguments(loss: Callable[..., Any], *names: str) -> None:
    """TypeError if ``loss`` cannot be called with one positional argument for each of ``names``."""
    try:
        arguments = inspect.signature(getattr(loss, "forward", loss), follow_wrapped=False)
    except (ValueError, TypeError):  # a function in C, or with an invalid __signature__
        return
    try:
        arguments.bind(*names)
    except TypeError:
        taken = f"{'one argument' if len(names) == 1 else 'two arguments'}, {' and '.join(names)}"
        raise TypeError(f"loss must take {taken}, got a function of {arguments}: write x, y = record in it") from None


def check_optimizer(optimizer: Any) -> None:
    """TypeError unless it is a plain torch optimizer whose ``step`` needs no closure."""
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, such as AdamW(module.parameters()), got {kind.__name__}")
    if (library := made_by(optimizer)) is not None:
        remedy = "give its .original_optimizer" if library == "Opacus" else "leave out prepare, or give its .optimizer"
        raise TypeError(f"optimizer must be a plain one, got {library}'s {kind.__name__}: {remedy}")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(f"optimizer must step without a closure, got {kind.__name__}: choose AdamW or SGD")


def check_model(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """ValueError or TypeError for a wrapped or divided model, or unless the optimizer has its trainable parameters."""
    check_type("module", module, nn.Module, "a torch.nn.Module, the model to train")
    for name, layer in module.named_modules():
        if isinstance(layer, DistributedDataParallel | DataParallel):
            raise ValueError(
                f"module must not be wrapped in {type(layer).__name__} (layer {name!r}), which combines gradients "
                "before they are clipped: give the model itself, its .module"
            )
        if is_of("opacus.grad_sample", layer) or hasattr(layer, "autograd_grad_sample_hooks"):
            raise ValueError(
                f"module must not have Opacus's hooks, but layer {name!r} has: give the wrapper's .to_standard_module()"
            )
        if is_of("torch.distributed.fsdp", layer):
            raise ValueError(f"module must be whole on every process, but layer {name!r} is split by FSDP")
    for name, parameter in module.named_parameters():
        if is_of("torch.distributed.tensor", parameter):
            raise ValueError(f"module must be whole on every process, but parameter {name!r} is a DTensor")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"module must have values, but {name!r} is on the meta device: load weights after to_empty(device=...)"
            )
    names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
    optimized = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if foreign := [parameter for key, parameter in optimized.items() if key not in names]:
        raise ValueError(
            f"optimizer holds {len(foreign)} trainable parameter(s) that are not the model's, the first of shape "
            f"{tuple(foreign[0].shape)}: make it from module.parameters(), with the loss's own as a part of the module"
        )
    if missing := [name for key, name in names.items() if key not in optimized]:
        raise ValueError(
            f"optimizer lacks {len(missing)} trainable parameter(s) of the model, the first {missing[0]!r}: "
            f"add them or freeze them by requires_grad_(False)"
        )
