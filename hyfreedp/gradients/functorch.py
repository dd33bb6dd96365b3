"""The private parts of functorch that the map over samples uses, all in this file.

Within a *level* of ``torch.vmap``, code sees a tensor (B, ...) as one of shape (...): a sample. Unlike ``torch.vmap``
itself, a :class:`Level` can be left temporarily. ``tests/core/test_functorch.py`` tests each name used here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch import autograd_function, vmap
from torch.autograd import Function

# Sets whether functorch warns of an operation that it maps by a loop.
warn_of_loops: Any = _functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
# Called with False, it returns the active pair of hooks on tensors that autograd saves, or None.
saved_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # how many are active
unwrapped: Callable[[Tensor], Tensor] = _functorch.get_unwrapped  # the tensor that a wrapped one is one level outside
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack  # that are active
custom_function_call: Any = autograd_function.custom_function_call  # what function modes get for ``Function.apply``


class Level:
    """A level at which ``size`` samples are mapped together; each draws its own random numbers.

    ``number`` is functorch's number of the level: 1 for the outermost, 0 before it is entered.
    """

    def __init__(self, size: int) -> None:
        self.size, self.number, self.is_left = size, 0, False  # whether code runs within left()

    def __enter__(self) -> Self:
        vmap.lazy_load_decompositions()
        number = _functorch._vmap_increment_nesting(self.size, "different")
        if self.number not in (0, number):
            _functorch._vmap_decrement_nesting()
            raise RuntimeError("samples were mapped at another level")
        self.number = number
        warn_of_loops(False)
        return self

    def __exit__(self, *_: Any) -> None:
        warn_of_loops(True)  # as is the default
        _functorch._vmap_decrement_nesting()

    def mapped(self, samples: Tensor) -> Tensor:
        """The tensor (B, ...) as code within the level sees it: as a sample's tensor (...)."""
        return _functorch._add_batch_dim(samples, 0, self.number)

    def holds(self, t: Tensor) -> bool:
        """Whether a tensor comes from :meth:`mapped`, or was computed from such tensors."""
        return _functorch.is_batchedtensor(t) and _functorch.maybe_get_level(t) == self.number

    def samples(self, t: Tensor) -> Tensor:
        """The tensor (B, ...) behind a tensor that this level holds."""
        dim, values = _functorch.maybe_get_bdim(t), unwrapped(t)
        return values if dim == 0 else values.movedim(dim, 0)

    def is_innermost(self) -> bool:
        """Whether no other map or gradient of functorch is active within this level."""
        top = _functorch.peek_interpreter_stack()
        return top is not None and top.level() == self.number

    @contextmanager
    def left(self) -> Iterator[None]:
        """A context outside of this level (and of those within), in which one computes with tensors (B, ...)."""
        inner, before, self.is_left = [], self.is_left, True
        while (top := _functorch.peek_interpreter_stack()) is not None and top.level() >= self.number:
            inner.append(_functorch.pop_dynamic_layer_stack())
        try:
            yield
        finally:
            for layer in reversed(inner):
                _functorch.push_dynamic_layer_stack(layer)
            self.is_left = before


def requires_gradient(t: Tensor) -> bool:
    """What ``t.requires_grad`` says outside of the levels of ``vmap``; for a sample's tensor it would be False."""
    return requires_gradient(unwrapped(t)) if _functorch.is_batchedtensor(t) else t.requires_grad


def is_wrapped(t: Any) -> bool:
    """Whether a value belongs to a level of functorch."""
    return isinstance(t, Tensor) and _functorch.is_functorch_wrapped_tensor(t)


@contextmanager
def intercepted(mark: Callable[[Any], Any]) -> Iterator[None]:
    """A context in which function modes also get ``Function.apply``, and ``mark`` the results of ``torch.vmap``."""
    unwrap, apply = vmap._unwrap_batched, vars(Function)["apply"]

    def marked(*args: Any, **kwargs: Any) -> Any:
        return mark(unwrap(*args, **kwargs))

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._are_functorch_transforms_active() and cls.setup_context is Function.setup_context:
            return custom_function_call(cls, *args, **kwargs)
        return apply.__get__(None, cls)(*args, **kwargs)

    vmap._unwrap_batched, Function.apply = marked, classmethod(applied)
    try:
        yield
    finally:
        vmap._unwrap_batched, Function.apply = unwrap, apply
        mark = lambda result: result  # noqa: E731, for torch.compile, which may have cached ``marked``


def backward(losses: Tensor, ends: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of the sum of ``losses`` by ``ends``, like ``torch.autograd.grad``, but with modes active."""
    run: Any = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined]
    return run((losses,), (torch.ones_like(losses),), False, False, tuple(ends), True, accumulate_grad=False)
