"""Hooks that an engine puts on a model, that stay behind where it is copied or saved, and that the next run ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

if TYPE_CHECKING:
    from hyfreedp.clipping.base import GradientEngine

# The engine that trains a layer; it lives as long as its hooks on the model.
_TRAINS: WeakKeyDictionary[nn.Module, ref[GradientEngine]] = WeakKeyDictionary()


class EngineHook(partial):
    """A function, with arguments given beforehand, that serves this model alone.

    A copy of the model, or one that is pickled or saved by ``torch.save(model)`` and loaded again, is a plain model: it
    has a hook that does nothing instead. torch.compile leaves it alone and compiles what lies between hooks.
    """

    def __new__(cls, function: Callable[..., Any], /, *args: Any) -> EngineHook:
        return super().__new__(cls, torch.compiler.disable(function), *args)

    def __reduce__(self) -> Any:
        return partial, (_nothing,)


def _nothing(*_: Any) -> None:
    """What a hook is that changes nothing."""


def take_over(engine: GradientEngine) -> bool:
    """Let a layer that ``engine`` trains have its hooks alone: engines of earlier runs over such layers are detached.

    Two engines would follow each other's stand-ins for parameters. A frozen layer may serve several runs.

    Returns:
        Whether one of these had seen a batch.
    """
    trained = False
    for layer in engine.module.modules():
        if layer is engine.module or any(p.requires_grad for p in layer.parameters(recurse=False)):
            earlier = _TRAINS.get(layer, lambda: None)()
            if earlier is not None and earlier is not engine:
                earlier.detach()
                earlier.ended = True
                trained |= earlier.batches > 0
            _TRAINS[layer] = ref(engine)
    return trained
