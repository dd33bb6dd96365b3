"""What a model broadcasts over the samples: parameters without a layer of their own, and positions embedded once.

Class tokens, position embeddings, scales: during a forward pass such a parameter is replaced by a view that repeats it
for every sample, so that autograd itself delivers one gradient per sample. The view has the same values wherever the
parameter is broadcast over the samples:

* a parameter of shape (1, ...) becomes (B, ...);
* a parameter of shape (d,) or () becomes (B, 1, ..., d) or (B, 1, ..., 1), with as many dimensions as the module's
  input. That is allowed only in a module without children whose output was seen to stay the same (RMSNorm and
  LayerScale of transformers, for instance).

Positions that are embedded once get their copies by :class:`PositionExpander`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.batches import tensors_in
from hyfreedp.clipping.engine_hook import EngineHook
from hyfreedp.noise import NoiseGenerator


def free_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters registered on ``layer`` that can be repeated for every sample."""
    own = {name: p for name, p in layer.named_parameters(recurse=False) if p.requires_grad}
    if type(layer).__module__.startswith("torch.nn."):
        return {}  # PReLU, Bilinear, LSTM, parameter lists: none of them broadcasts
    flat = {name: p for name, p in own.items() if p.dim() < 2}
    if flat and not _stays_the_same(layer, flat):
        flat = {}
    return {name: p for name, p in own.items() if name in flat or (p.dim() >= 2 and p.shape[0] == 1)}


def repeat(p: Tensor, batch_size: int, dims: int) -> Tensor:
    """The view of ``p`` with one copy per sample, for a module whose input has ``dims`` dimensions."""
    if p.dim() >= 2:
        return p.expand(batch_size, *p.shape[1:])
    return p.expand(batch_size, *[1] * (dims - 1 - p.dim()), *p.shape)


def substitute(layer: nn.Module, views: dict[str, Tensor]) -> None:
    """Let ``layer.name`` be ``views[name]``. Registered parameters, and so the state_dict, stay what they are."""
    # Python finds an entry of the instance's own dictionary before nn.Module looks among its parameters.
    layer.__dict__.update(views)


def restore(layer: nn.Module, names: Iterable[str]) -> None:
    """Undo ``substitute``."""
    for name in names:
        layer.__dict__.pop(name, None)


def _stays_the_same(layer: nn.Module, flat: dict[str, nn.Parameter]) -> bool:
    """Whether a random input gives the same output, row by row, with ``flat`` repeated for every sample."""
    if next(layer.children(), None) is not None:
        return False
    p = max(flat.values(), key=Tensor.numel)
    x = NoiseGenerator(0).normal(2, 3, p.numel()).to(p)
    views = {name: repeat(q.detach(), 2, 3).clone().requires_grad_() for name, q in flat.items()}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            expected = layer.forward(x)
            substitute(layer, views)
            output = layer.forward(x)
            gradients = torch.autograd.grad(output[0].sum(), list(views.values()))
        except Exception:  # whatever goes wrong in foreign code, the answer is no
            return False
        finally:
            restore(layer, views)
    same = output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-4, atol=1e-6)
    return same and not any(g[1].any() for g in gradients)


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
        records = layer.training and layer.weight.requires_grad and torch.is_grad_enabled()
        if not records or ids is None or self._batch_size is None or ids.dim() < 2 or ids.shape[0] != 1:
            return None
        return (ids.expand(self._batch_size, *ids.shape[1:]),), {}
