"""The layers and parameters of a model, faster than by ``named_modules``, since every step needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The module and all within it, each once, in the order of ``module.modules()``."""
    found: dict[nn.Module, None] = {}
    stack = [module]
    while stack:
        layer = stack.pop()
        if layer not in found:
            found[layer] = None
            if within := layer._modules.values():
                stack.extend(child for child in reversed(list(within)) if child is not None)
    return list(found)


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """The module's parameters, each once, in the order of ``module.parameters()``."""
    found = {id(p): p for layer in layers_of(module) for p in layer._parameters.values() if p is not None}
    return list(found.values())


@contextmanager
def eval_mode(layers: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which all ``layers`` are in eval mode; at its end those in train mode before are so again."""
    training = [layer for layer in layers if layer.training]
    try:
        for layer in training:
            layer.training = False
        yield
    finally:
        for layer in training:
            layer.training = True
