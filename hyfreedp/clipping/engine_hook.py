"""Hooks that an engine puts on a model and that stay behind where the model is copied or saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


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
