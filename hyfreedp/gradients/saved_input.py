"""A layer's input, saved for its gradients as autograd saves the tensors of its own operations."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class SavedInput:
    """An input that a forward hook sees and that the layer's gradients will need.

    It is handed to autograd, so that what handles the tensors of a graph handles it too: non-reentrant activation
    checkpointing drops it after the forward pass and recomputes it, ``save_on_cpu`` moves it.

    Args:
        x: the input, detached.
        layer: name of the layer, for the error.
    """

    def __init__(self, x: Tensor, layer: str) -> None:
        self._handle = cast(Tensor, _Save.apply(x, _NEEDS_GRADIENT))  # PyTorch 2.6 frees what it saves along with it
        self._version = x._version
        self._layer = layer

    def get(self) -> Tensor:
        """The input; once per backward pass, since checkpointing lets go of it then.

        Raises:
            ValueError: it was modified in place.
        """
        try:
            (x,) = cast(Any, self._handle.grad_fn).saved_tensors
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            x = None
        # Autograd does not compare versions of what passed through hooks. A copy that such hooks made may have a lower.
        if x is None or x._version > self._version:
            raise ValueError(f"the input of layer {self._layer!r} was modified in place after its forward pass")
        return x


class _Save(torch.autograd.Function):
    """No operation: a node that saves a tensor. It is part of no loss's graph."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, needs_gradient: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty(0)


_NEEDS_GRADIENT = torch.empty(0, requires_grad=True)  # autograd makes no node without
