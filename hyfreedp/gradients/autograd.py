"""Autograd's gradient: that of one sample, and that with which per-sample gradients are compared.

On CPUs some of PyTorch's kernels add up the gradients of half precision in half precision, row by row: a sum of 1,000
equal numbers stops at a quarter, and an error that has nothing to do with samples would be theirs. Such a kernel gets
its arguments in float32 here; autograd rounds what it returns to the type that it expects.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_HALF = frozenset({torch.bfloat16, torch.float16})
_IN_HALF = frozenset(
    {torch.ops.aten.native_layer_norm_backward.default, torch.ops.aten.embedding_dense_backward.default}
)


def weighted_gradients(
    losses: Tensor, weights: Tensor, trainable: dict[nn.Parameter, str]
) -> dict[nn.Parameter, Tensor | None]:
    """Autograd's gradient of sum_i w_i L_i.

    Args:
        losses: shape (B,).
        weights: w, shape (B,).
        trainable: parameters, with their names; one that was not used has no gradient.

    Raises:
        ValueError: see :func:`explained`.
    """
    with explained(), sums_in_float32():
        gradients = torch.autograd.grad(losses, list(trainable), weights.to(losses.dtype), allow_unused=True)
    return dict(zip(trainable, gradients, strict=True))


@contextmanager
def explained() -> Iterator[None]:
    """Around a backward pass.

    Raises:
        ValueError: the model uses reentrant checkpointing.
    """
    try:
        yield
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower() or ".grad()" not in str(error):
            raise
        raise ValueError(
            "the model uses reentrant checkpointing, in whose backward pass no per-sample gradients can be taken: pass "
            "use_reentrant=False to torch.utils.checkpoint, or to transformers' gradient_checkpointing_enable "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        ) from error


class sums_in_float32(TorchDispatchMode):
    """Gives float32 to the kernels that would add up in half precision."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _IN_HALF:
            args, kwargs = tree_map(_wide, (args, kwargs))
        with torch._C.DisableTorchFunction():  # which has had its turn, above autograd
            return func(*args, **kwargs)


def _wide(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf
