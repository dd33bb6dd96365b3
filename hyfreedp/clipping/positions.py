"""Positions that a model embeds once for all samples, embedded once for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hyfreedp.batches import tensors_in
from hyfreedp.clipping.engine_hook import EngineHook


class PositionExpander:
    """Repeats embedding ids of shape (1, ...) for every sample of the batch that ``module`` is called with.

    GPT-2 and BERT look positions up once, shape (1, T), and add the result to every sample; the gradient of that
    embedding would arrive already summed. Its value is the same for (B, T).
    """

    def __init__(self, module: nn.Module) -> None:
        self._batch_size: int | None = None
        self._handles = [
            module.register_forward_pre_hook(EngineHook(self._start), prepend=True, with_kwargs=True),
            module.register_forward_hook(EngineHook(self._stop), always_call=True),
        ]
        for layer in module.modules():
            if isinstance(layer, nn.Embedding):
                self._handles.append(layer.register_forward_pre_hook(EngineHook(self._expand), with_kwargs=True))

    @contextmanager
    def batch_of(self, size: int) -> Iterator[None]:
        """Around a backward pass of ``size`` samples: checkpointing calls layers again in it, but not the module."""
        self._batch_size = size
        try:
            yield
        finally:
            self._batch_size = None

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next(tensors_in((args, kwargs)), None)
        self._batch_size = first.shape[0] if first is not None and first.dim() else None

    def _stop(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._batch_size = None

    def _expand(
        self, layer: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        ids = next(tensors_in((args, kwargs)), None)
        records = layer.training and layer.weight.requires_grad
        if not records or ids is None or self._batch_size is None or ids.dim() < 2 or ids.shape[0] != 1:
            return None
        return (ids.expand(self._batch_size, *ids.shape[1:]),), {}
