"""The names of functorch that the map over samples needs and that PyTorch keeps private, all in one place.

A *level* of ``torch.vmap`` shows a tensor (B, ...) to the code within it as one of shape (...): a sample. Other than by
``torch.vmap`` itself, a :class:`Level` can be left for a moment and entered again. ``tests/core/test_functorch.py``
holds each name to what is said of it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch import vmap


class Level:
    """A level at which ``size`` samples are mapped together; random numbers are drawn for each.

    Attributes:
        size: B.
        number: of the level, once it was entered; the outermost is 1.
    """

    def __init__(self, size: int) -> None:
        self.size, self.number = size, 0

    def __enter__(self) -> Level:
        vmap.lazy_load_decompositions()
        number = _functorch._vmap_increment_nesting(self.size, "different")
        if self.number not in (0, number):
            _functorch._vmap_decrement_nesting()
            raise RuntimeError("samples were mapped at another level")
        self.number = number
        return self

    def __exit__(self, *_: Any) -> None:
        _functorch._vmap_decrement_nesting()

    def mapped(self, samples: Tensor) -> Tensor:
        """A tensor (B, ...) as that of one sample, (...)."""
        return _functorch._add_batch_dim(samples, 0, self.number)

    def holds(self, t: Tensor) -> bool:
        """Whether a tensor is one that :meth:`mapped` made, or was computed from such."""
        return _functorch.is_batchedtensor(t) and _functorch.maybe_get_level(t) == self.number

    def samples(self, t: Tensor) -> Tensor:
        """The tensor (B, ...) behind one that this level holds."""
        dim = _functorch.maybe_get_bdim(t)
        values = _functorch.get_unwrapped(t)
        return values if dim == 0 else values.movedim(dim, 0)

    def is_innermost(self) -> bool:
        """Whether no other map or gradient of functorch is under way within this level."""
        top = _functorch.peek_interpreter_stack()
        return top is not None and top.level() == self.number

    @contextmanager
    def left(self) -> Iterator[None]:
        """Out of this level, and of those within, where its tensors (B, ...) are computed with."""
        inner = []
        while (top := _functorch.peek_interpreter_stack()) is not None and top.level() >= self.number:
            inner.append(_functorch.pop_dynamic_layer_stack())
        try:
            yield
        finally:
            for layer in reversed(inner):
                _functorch.push_dynamic_layer_stack(layer)


def is_wrapped(t: Any) -> bool:
    """Whether a value belongs to a level of functorch."""
    return isinstance(t, Tensor) and _functorch.is_functorch_wrapped_tensor(t)


def unwrapped(t: Tensor) -> Tensor:
    """What a tensor of a level is one level further out."""
    return _functorch.get_unwrapped(t)


def innermost(t: Tensor) -> Tensor:
    """The plain tensor that a tensor of levels is at last."""
    while is_wrapped(t):
        t = unwrapped(t)
    return t


@contextmanager
def maps_marked(mark: Callable[[Any], Any]) -> Iterator[None]:
    """Within, ``mark`` sees what other calls of ``torch.vmap`` return, which no mode does."""
    unwrap = vmap._unwrap_batched

    def marked(*args: Any, **kwargs: Any) -> Any:
        return mark(unwrap(*args, **kwargs))

    vmap._unwrap_batched = marked
    try:
        yield
    finally:
        vmap._unwrap_batched = unwrap
        mark = lambda result: result  # noqa: E731, where torch.compile keeps the other


def saved_hook() -> Any:
    """What now packs tensors that autograd saves; None if nothing does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def backward(losses: Tensor, ends: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of the sum of ``losses``; ``torch.autograd.grad``, but that no mode is out of force meanwhile."""
    engine: Any = torch.autograd.Variable._execution_engine
    return engine.run_backward(
        (losses,), (torch.ones_like(losses),), False, False, tuple(ends), True, accumulate_grad=False
    )
