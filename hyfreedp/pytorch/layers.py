"""A model's layers in eval mode for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


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
