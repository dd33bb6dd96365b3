"""One rule per kind of layer: from its input and its output's gradient to the per-sample gradients of its parameters.

Biases and the affine parameters of norm layers are summed over tokens at once, to (B, p). Weights that multiply tokens
keep input and gradient as factors unless the product is smaller (see ``persample.products``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyfreedp.clipping.convolution import convolution
from hyfreedp.clipping.persample import EmbeddingRows, Instantiated, PerSampleGradients, products

Gradients = Iterator[tuple[nn.Parameter, PerSampleGradients]]
# (layer, its input x or None, its output's gradient g) -> the gradients of its trainable parameters
Rule = Callable[[nn.Module, Tensor | None, Tensor], Gradients]


def rule_of(layer: nn.Module) -> Rule | None:
    """The rule for ``layer``, None if there is none.

    Subclasses share their parent's rule, provided that they compute the same on a random input.
    """
    for kind, (rule, input_shape) in _RULES.items():
        if isinstance(layer, kind):
            own_forward = type(layer).forward is not kind.forward
            return None if own_forward and not _computes_the_same(layer, kind, input_shape(layer)) else rule
    if type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers."):
        return _transposed_linear
    return None


def input_to_keep(layer: nn.Module, x: Tensor, output: Tensor) -> Tensor | None:
    """What the rule for ``layer`` will need of its input: nothing for bias gradients alone."""
    if not is_trainable(layer.weight):
        return None
    # Under autocast products are computed in the output's half precision; the input rounded to it is half the size.
    multiplies = x.is_floating_point() and not isinstance(layer, _NORMS)
    return x.detach().to(output.dtype) if multiplies else x.detach()


def is_trainable(p: Tensor | None) -> bool:
    return p is not None and p.requires_grad


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
        normalized = F.layer_norm(x.to(g.dtype), layer.normalized_shape, eps=layer.eps)
        yield layer.weight, Instantiated(_sum_tokens(normalized.mul_(g), len(layer.normalized_shape)))


def _rms_norm(layer: nn.RMSNorm, x: Tensor | None, g: Tensor) -> Gradients:
    # In the dtype of x, on which the default eps depends.
    normalized = F.rms_norm(x, layer.normalized_shape, eps=layer.eps).to(g.dtype)
    yield layer.weight, Instantiated(_sum_tokens(normalized.mul_(g), len(layer.normalized_shape)))


def _group_norm(layer: nn.GroupNorm, x: Tensor | None, g: Tensor) -> Gradients:
    if is_trainable(layer.bias):
        yield layer.bias, Instantiated(_sum_positions(g))
    if is_trainable(layer.weight):
        normalized = F.group_norm(x.to(g.dtype), layer.num_groups, eps=layer.eps)
        yield layer.weight, Instantiated(_sum_positions(normalized.mul_(g)))


def _convolution(layer: nn.Conv1d | nn.Conv2d, x: Tensor | None, g: Tensor) -> Gradients:
    if is_trainable(layer.bias):
        yield layer.bias, Instantiated(_sum_positions(g))
    if is_trainable(layer.weight):
        yield layer.weight, convolution(layer, x, g)


def _embedding(layer: nn.Embedding, ids: Tensor | None, g: Tensor) -> Gradients:
    ids, rows = ids.reshape(len(ids), -1), g.reshape(len(g), -1, g.shape[-1])
    if layer.padding_idx is not None:
        rows = rows.masked_fill((ids == layer.padding_idx)[..., None], 0)
    yield layer.weight, EmbeddingRows(ids, rows, layer.num_embeddings)


def _computes_the_same(layer: nn.Module, kind: type[nn.Module], shape: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)
    if kind is nn.Embedding:
        x = torch.randint(layer.num_embeddings, shape, generator=generator).to(layer.weight.device)
    else:
        x = torch.randn(shape, generator=generator).to(layer.weight)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            output = layer.forward(x)
        except Exception:  # whatever a foreign forward dislikes about x, the answer is no
            return False
        expected = kind.forward(layer, x)
    return output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-3, atol=1e-5)


def _convolution_input(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, ...]:
    sizes = (dilation * kernel + 2 for dilation, kernel in zip(layer.dilation, layer.kernel_size, strict=True))
    return (2, layer.in_channels, *sizes)


def _sum_tokens(t: Tensor, kept: int) -> Tensor:
    """(B, ..., *S) to (B, *S), where S has ``kept`` dimensions."""
    dims = tuple(range(1, t.dim() - kept))
    return t.sum(dims) if dims else t


def _sum_positions(t: Tensor) -> Tensor:
    """(B, C, ...) to (B, C)."""
    return t.flatten(2).sum(2) if t.dim() > 2 else t


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
# Each kind's rule, and the shape of an input to try a subclass on.
_RULES: dict[type[nn.Module], tuple[Rule, Callable[[nn.Module], tuple[int, ...]]]] = {
    nn.Linear: (_linear, lambda layer: (2, 3, layer.in_features)),
    nn.Conv1d: (_convolution, _convolution_input),
    nn.Conv2d: (_convolution, _convolution_input),
    nn.LayerNorm: (_layer_norm, lambda layer: (2, 3, *layer.normalized_shape)),
    nn.RMSNorm: (_rms_norm, lambda layer: (2, 3, *layer.normalized_shape)),
    nn.GroupNorm: (_group_norm, lambda layer: (2, layer.num_channels, 5)),
    nn.Embedding: (_embedding, lambda layer: (2, 3)),
}
