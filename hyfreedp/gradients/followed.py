"""Parameters during a forward pass: tensors that tell the engine what is done with them.

Every trainable parameter is replaced by a :class:`Followed` tensor while the model computes. What is made of parameters
and of tensors without gradient is followed too. Where a followed value meets a tensor that depends on samples, the
rules of :mod:`hyfreedp.gradients.rules` say how its copies, one for each sample, get their gradients. An operation
without a rule is carried out as it is: the engine then finds, in the graph of the losses, a parameter that it has not
followed, and computes one sample at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import Signature
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hyfreedp.gradients.recurrent import unrolled, unrolls
from hyfreedp.running.layers import layers_of, replaced

if TYPE_CHECKING:
    from hyfreedp.gradients.recorder import Recorder

_LIKE_ANOTHER = frozenset({"to", "type_as", "view_as", "reshape_as"})  # which gives a type or shape only
_ATTRIBUTES = frozenset({"__get__", "__set__", "__len__", "size", "dim", "is_floating_point", "numel", "stride"})

# (recorder, function, arguments) to the result; NotImplemented where the rule does not cover these arguments.
OperationRule = Callable[..., Any]
RULES: dict[str, OperationRule] = {}  # of operations in which parameters meet samples
SIGNATURES: dict[OperationRule, Signature] = {}  # of the rules
COMPOSED: dict[str, Callable[..., Any]] = {}  # operations that are computed by others instead


class Followed(Tensor):
    """A value computed from parameters and tensors without gradient, with its autograd graph.

    Attributes:
        recorder: which follows it.
        parameter: the parameter that it is; None if it was computed.
        origin: name of the first parameter that it was computed from.
        repeated: what it repeats in dimension 0, which has size 1 there; and its version then, since it may be changed
            in place.
        looked_up: (ids, padding index, parameter) if it is rows of a parameter.
    """

    recorder: Recorder
    origin: str
    parameter: nn.Parameter | None = None
    repeated: tuple[Followed, int] | None = None
    looked_up: tuple[Tensor, int | None, nn.Parameter] | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name in COMPOSED and (result := COMPOSED[name](*args, **kwargs)) is not NotImplemented:
            return result
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ATTRIBUTES:  # a transpose is one
                return _follow_on(func(*args, **kwargs), args[0])
            leaves = _leaves((*args, *kwargs.values()))
            values = [leaf for leaf in leaves if isinstance(leaf, Followed)]
            if torch.is_grad_enabled() and values[0].recorder.size:
                others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Followed)]
                if name in _LIKE_ANOTHER and isinstance(args[0], Followed):
                    others = []
                rule = RULES.get(name)
                if rule is not None and _takes(rule, len(args), tuple(kwargs)):
                    result = rule(values[0].recorder, func, *args, **kwargs)
                    if result is not NotImplemented:
                        return result
                if any(other.requires_grad for other in others):  # samples, and no rule
                    return func(*args, **kwargs)
            return tree_map(lambda t: _follow_on(t, values[0]), func(*args, **kwargs))


def _takes(rule: OperationRule, positional: int, named: tuple[str, ...]) -> bool:
    """Whether a rule knows arguments of these names."""
    if not named:
        return True
    try:
        SIGNATURES[rule].bind(*[None] * (2 + positional), **dict.fromkeys(named))
    except TypeError:
        return False
    return True


def _leaves(values: Iterable[Any]) -> list[Any]:
    """What stands in arguments, also in lists and tuples within (dicts are no arguments of torch's operations)."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            found += _leaves(value)
        else:
            found.append(value)
    return found


def follow(parameter: nn.Parameter, name: str, recorder: Recorder) -> Followed:
    """``parameter`` as a followed value."""
    with torch.enable_grad():  # also where checkpointing computes a layer again, within a backward pass
        value = cast(Followed, parameter.as_subclass(Followed))
    value.recorder, value.parameter, value.origin = recorder, parameter, name
    return value


def _follow_on(result: Any, origin: Followed) -> Any:
    """What was computed from ``origin`` and others alone, followed too; itself if it needs no gradient."""
    if not isinstance(result, Tensor) or not result.requires_grad or isinstance(result, Followed):
        return result
    if not isinstance(origin, Followed):
        return result
    return derived(result, origin)


def derived(result: Tensor, origin: Followed) -> Followed:
    """``result``, computed from ``origin`` and others, as a followed value."""
    value = cast(Followed, result.as_subclass(Followed))
    value.recorder, value.origin = origin.recorder, origin.origin
    return value


def plain(value: Tensor) -> Tensor:
    """The same tensor, with its autograd graph, followed no longer."""
    return value.as_subclass(Tensor)


@contextmanager
def followed_parameters(module: nn.Module, recorder: Recorder, names: Mapping[nn.Parameter, str]) -> Iterator[None]:
    """Around a forward pass: the module's trainable parameters, which are given with their names, are followed.

    They stand in the place of the registered ones, so that what replaces these (``torch.func.functional_call``)
    replaces them.
    """
    if (compiler := sys.modules.get("torch._dynamo")) is not None:  # is to leave operations on followed values alone
        getattr(compiler.config, "nontraceable_tensor_subclasses", set[Any]()).add(Followed)
    unrolling = [layer for layer in layers_of(module) if isinstance(layer, nn.RNNBase) and unrolls(layer)]
    try:
        for layer in unrolling:
            layer.__dict__["forward"] = partial(unrolled, layer)
        with replaced(module, {p: follow(p, name, recorder) for p, name in names.items()}):
            yield
    finally:
        for layer in unrolling:
            layer.__dict__.pop("forward", None)
