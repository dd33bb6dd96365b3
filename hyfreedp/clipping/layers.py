"""One rule per kind of layer: from its input and its output's gradient to the per-sample gradients of its parameters.

Biases and the affine parameters of norm layers are summed over tokens at once, to (B, p). Weights that multiply tokens
keep input and gradient as factors unless the product is smaller (see ``persample.products``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from hyfreedp.clipping.persample import EmbeddingRows, Instantiated, PerSampleGradients, products

Gradients = Iterator[tuple[nn.Parameter, PerSampleGradients]]


@dataclass(frozen=True)
class LayerRule:
    """How to train one kind of layer.

    Attributes:
        gradients: (layer, input x or None, output gradient g) to pairs of a trainable parameter and its gradients.
        cast_input: whether autocast makes the layer compute in its output's dtype, so that x may be kept in it.
    """

    gradients: Callable[[nn.Module, Tensor | None, Tensor], Gradients]
    cast_input: bool = False


def needs_input(layer: nn.Module) -> bool:
    """Whether the rule needs the layer's input: all but bias gradients do."""
    return is_trainable(getattr(layer, "weight", None))


def is_trainable(p: Tensor | None) -> bool:
    return p is not None and p.requires_grad


def rule_of(layer: nn.Module) -> LayerRule | None:
    """The rule for ``layer``, None if there is none. Subclasses share their parent's rule.

    A subclass that computes something else is caught when the engine checks its first batch against autograd.
    """
    for kind, rule in _RULES.items():
        if isinstance(layer, kind):
            return rule
    if type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers."):
        return _TRANSPOSED_LINEAR
    return None


def _linear(layer: nn.Linear, x: Tensor | None, g: Tensor) -> Gradients:
    if is_trainable(layer.bias):
        yield layer.bias, Instantiated(_sum_tokens(g, 1))
    if is_trainable(layer.weight):
        yield layer.weight, products(g, x)


def _transposed_linear(layer: nn.Module, x: Tensor | None, g: Tensor) -> Gradients:
    """transformers' Conv1D: a linear layer whose weight has shape (d, p)."""
    if is_trainable(layer.bias):
        yield layer.bias, Instantiated(_sum_tokens(g, 1))
    if is_trainable(layer.weight):
        yield layer.weight, products(x, g)


def _layer_norm(layer: nn.LayerNorm, x: Tensor | None, g: Tensor) -> Gradients:
    if is_trainable(layer.bias):
        yield layer.bias, Instantiated(_sum_tokens(g, len(layer.normalized_shape)))
    if is_trainable(layer.weight):
        normalized = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        yield layer.weight, Instantiated(_sum_tokens(normalized * g, len(layer.normalized_shape)))


def _rms_norm(layer: nn.RMSNorm, x: Tensor | None, g: Tensor) -> Gradients:
    normalized = F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
    yield layer.weight, Instantiated(_sum_tokens(normalized * g, len(layer.normalized_shape)))


def _group_norm(layer: nn.GroupNorm, x: Tensor | None, g: Tensor) -> Gradients:
    if is_trainable(layer.bias):
        yield layer.bias, Instantiated(_sum_positions(g))
    if is_trainable(layer.weight):
        normalized = F.group_norm(x, layer.num_groups, eps=layer.eps)
        yield layer.weight, Instantiated(_sum_positions(normalized * g))


def _embedding(layer: nn.Embedding, ids: Tensor | None, g: Tensor) -> Gradients:
    ids, rows = ids.reshape(len(ids), -1), g.reshape(len(g), -1, g.shape[-1])
    if layer.padding_idx is not None:
        rows = rows.masked_fill((ids == layer.padding_idx)[..., None], 0)
    yield layer.weight, EmbeddingRows(ids, rows, layer.num_embeddings)


def _sum_tokens(t: Tensor, kept: int) -> Tensor:
    """(B, ..., *S) to (B, *S), where S has ``kept`` dimensions."""
    dims = tuple(range(1, t.dim() - kept))
    return t.sum(dims) if dims else t


def _sum_positions(t: Tensor) -> Tensor:
    """(B, C, ...) to (B, C)."""
    return t.flatten(2).sum(2) if t.dim() > 2 else t


_TRANSPOSED_LINEAR = LayerRule(_transposed_linear, cast_input=True)
_RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: LayerRule(_linear, cast_input=True),
    nn.LayerNorm: LayerRule(_layer_norm),
    nn.RMSNorm: LayerRule(_rms_norm),
    nn.GroupNorm: LayerRule(_group_norm),
    nn.Embedding: LayerRule(_embedding),
}
