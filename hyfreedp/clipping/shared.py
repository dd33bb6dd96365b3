"""Values that all samples share, followed from a parameter to the operation at which they meet the samples.

A parameter without a layer rule (class tokens, scales, tables of relative positions, standardised weights, adapters) is
replaced during a forward pass by a :class:`Shared` tensor. What the model computes from it and from constants alone is
shared too, and nothing is done to it. Where it meets samples, :mod:`hyfreedp.clipping.operations` takes over.

Only operations that a shared value takes part in pass through here, and they do so in the forward pass itself: nothing
is computed again, so dropout and other random numbers are those of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_LIKE_ANOTHER = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})  # which gives a type or shape only
_ATTRIBUTES = frozenset({"__get__", "__set__", "__len__", "size", "dim", "is_floating_point", "numel", "stride"})


class Follower(Protocol):
    """Who knows the samples of a forward pass.

    Attributes:
        serial: counts the uses of parameters that were recorded.
    """

    serial: int

    def meets_samples(self, name: str, args: Any, values: list[Shared], others: list[Tensor]) -> bool:
        """Whether a function of shared ``values`` and of ``others`` has samples among the latter or makes rows of them.

        Asked once per operation, of all those that gradients may pass through.
        """

    def meet(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of such a function: no shared value."""


class Shared(Tensor):
    """A value that is the same for every sample, with its autograd graph.

    Attributes:
        follower: is asked at every operation.
        parameters: those it was computed from.
        is_parameter: whether it is a parameter itself.
        ids: if it is rows of a parameter that were looked up by an embedding, their numbers; with ``padding_idx``.
        serial: the follower's count of uses when a parameter's layer was entered, or rows were looked up.
        met: its version when it met samples first.
    """

    follower: Follower
    parameters: tuple[nn.Parameter, ...]
    is_parameter: bool
    ids: Tensor | None
    padding_idx: int | None
    serial: int
    met: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ATTRIBUTES or not torch.is_grad_enabled():
                result = func(*args, **kwargs)
                if not isinstance(result, Tensor):
                    return result
                return as_shared(result, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Shared)])
            leaves = tree_leaves((args, kwargs))
            values = [leaf for leaf in leaves if isinstance(leaf, Shared)]
            if any(_trainable(leaf) for leaf in leaves):  # such as a layer's own weight, where its input is shared
                follower = values[0].follower
                args, kwargs = tree_map(lambda t: share(t, follower) if _trainable(t) else t, (args, kwargs))
                leaves = tree_leaves((args, kwargs))
                values = [leaf for leaf in leaves if isinstance(leaf, Shared)]
            others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Shared)]
            if name in _LIKE_ANOTHER and others:
                if not isinstance(args[0], Shared):
                    return func(*args, **kwargs)
                others = []
            if values[0].follower.meets_samples(name, args, values, others):
                return values[0].follower.meet(func, args, kwargs)
            result = func(*args, **kwargs)
            if (
                args and isinstance(args[0], Tensor) and (result is args[0] or name == "__setitem__")
            ):  # changed in place
                if type(args[0]) is Tensor:
                    args[0].__class__ = cls
                _set_origin(cast(Shared, args[0]), values)
            result = tree_map(lambda t: as_shared(t, values) if isinstance(t, Tensor) else t, result)
            if name == "embedding" and values[-1].is_parameter and others:
                _set_looked_up(result, *args, **kwargs)
            return result


def share(parameter: nn.Parameter, follower: Follower, serial: int | None = None) -> Shared:
    """``parameter`` as a shared value."""
    value = cast(Shared, parameter.as_subclass(Shared))
    value.follower, value.parameters, value.is_parameter, value.ids = follower, (parameter,), True, None
    value.serial = follower.serial if serial is None else serial
    return value


def plain(value: Tensor) -> Tensor:
    """The same tensor, with its autograd graph, which is followed no longer."""
    return value.as_subclass(Tensor)


def _trainable(leaf: Any) -> bool:
    return isinstance(leaf, nn.Parameter) and leaf.requires_grad


def as_shared(result: Tensor, values: Iterable[Shared]) -> Tensor:
    """What was computed from ``values`` and constants alone; itself if it needs no gradient."""
    if not result.requires_grad or isinstance(result, Shared):
        return result
    return _set_origin(cast(Shared, result.as_subclass(Shared)), values)


def _set_origin(value: Shared, values: Iterable[Shared]) -> Shared:
    value.follower = next(iter(values)).follower
    value.parameters = tuple(dict.fromkeys(p for v in values for p in v.parameters))
    value.is_parameter, value.ids, value.serial = False, None, value.follower.serial
    return value


def _set_looked_up(
    rows: Shared, input: Tensor, weight: Shared, padding_idx: int | None = None, *args: Any, **kwargs: Any
) -> None:
    rows.ids, rows.serial = input, rows.follower.serial
    rows.padding_idx = None if padding_idx is None else padding_idx % len(weight)
