"""Questions of Python about a sample's tensor: its value, whether it requires gradients, how it lies in memory."""

from typing import Any

import torch
from torch import Tensor

from hyfreedp.gradients import functorch, operations
from hyfreedp.gradients.functorch import is_wrapped
from hyfreedp.gradients.mapped import Pass, replaces, rule
from hyfreedp.gradients.pieces import Unmappable


@replaces(*operations.DECISIONS)
def _decided(one_pass: Pass, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The common answer of all samples to a decision."""
    if not is_wrapped(operations.tensors_in(*args, *kwargs.values())[0]):
        return NotImplemented
    func, x, arguments, named = operations.asked(func, *args, **kwargs)
    if not one_pass.level.is_innermost() or not one_pass.level.holds(x):
        raise Unmappable("a decision within a map")
    with one_pass.level.left():
        result = func(one_pass.decisions.answer(one_pass.level.samples(x)), *arguments, **named)
    for t in operations.tensors_in(result):
        one_pass.mark(t)
    return result


@replaces(*operations.REQUIRES_GRADIENT)
def _requires_gradient(one_pass: Pass, func: Any, t: Tensor, *value: Any, **named: Any) -> Any:
    """Whether a tensor requires gradients, which functorch would deny; or the tensor, where nothing is to be set."""
    has, value = functorch.requires_gradient(t), (*value, *named.values())
    if func == operations.HAS_GRADIENT:
        return has
    if value == (has,) or (one_pass.level.holds(t) and value in ((), (True,))):
        return t  # a sample's tensors have gradients anyway
    return NotImplemented


@replaces(*operations.MEMORY_LAYOUT)
def _memory_layout(one_pass: Pass, func: Any, t: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The answer for a contiguous tensor of one sample; functorch's would be that of all samples."""
    if not is_wrapped(t):
        return NotImplemented
    t._told_contiguous = True  # type: ignore[attr-defined]
    return func(torch.empty(t.shape, device="meta"), *args, **kwargs)


@rule(torch.as_strided, Tensor.as_strided)
def _as_strided(one_pass: Pass, func: Any, input: Any, size: Any, stride: Any, *offset: Any, **named: Any) -> Any:
    """By each sample's own entries in order, if the loss was told that this is how they lie in memory."""
    if offset or named or not one_pass.level.holds(input) or not hasattr(input, "_told_contiguous"):
        return NotImplemented
    x = one_pass.level.samples(input)
    places = func(torch.arange(x.shape[1:].numel(), device=x.device), size, stride)  # an error beyond these entries
    y = x.flatten(1)[:, places]
    one_pass.copied += [(t, t._version) for t in (x, y)]
    return one_pass.of_sample(y)
