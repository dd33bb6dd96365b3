"""One rule per kind of layer: from its input x and its output's gradient g to its parameters' per-sample gradients.

Biases and the affine parameters of norm layers are summed over tokens at once, to (B, p). Weights that multiply tokens
keep x and g as factors unless their product is smaller (see ``per_sample.products``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyfreedp.clipping.convolution import Convolution, convolution
from hyfreedp.clipping.per_sample import (
    EmbeddingRows,
    Instantiated,
    PerSampleGradients,
    products,
    sum_positions,
    sum_tokens,
)
from hyfreedp.devices import random_states_kept
from hyfreedp.noise import NoiseGenerator

Gradients = Iterator[tuple[nn.Parameter, PerSampleGradients]]


@dataclass(frozen=True)
class LayerRule:
    """How to train one kind of layer: y = weight(x) + bias.

    Attributes:
        weight: (layer, x, g) to the gradients of the weight.
        example: the shape of a valid input, on which subclasses are tried.
        channels_first: whether the bias lies along dimension 1 of g rather than along its last dimensions.
    """

    weight: Callable[[Any, Tensor, Tensor], PerSampleGradients]
    example: Callable[[Any], tuple[int, ...]]
    channels_first: bool = False

    def gradients(self, layer: nn.Module, x: Tensor | None, g: Tensor) -> Gradients:
        """The gradients of the layer's trainable parameters; x is what ``input_to_keep`` kept."""
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        if bias is not None and bias.requires_grad:
            yield bias, Instantiated(sum_positions(g) if self.channels_first else sum_tokens(g, bias.dim()))
        if weight is not None and x is not None:
            yield weight, self.weight(layer, x, g)


def rule_of(layer: nn.Module) -> LayerRule | None:
    """The rule for ``layer``, None if there is none.

    Subclasses share their parent's rule, provided that they compute the same on a random input.
    """
    for kind, rule in _RULES.items():
        if isinstance(layer, kind):
            own_forward = type(layer).forward is not kind.forward
            return None if own_forward and not _computes_the_same(layer, kind, rule.example(layer)) else rule
    if type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers."):
        return _TRANSPOSED_LINEAR
    return None


def ruled_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters that the rule of ``layer`` takes care of."""
    candidates = (layer._parameters.get(name) for name in ("weight", "bias"))
    return [p for p in candidates if p is not None and p.requires_grad]


def input_to_keep(layer: nn.Module, x: Tensor, output: Tensor) -> Tensor | None:
    """What the rule for ``layer`` will need of its input: nothing if only the bias is trainable."""
    weight = layer._parameters.get("weight")
    if weight is None or not weight.requires_grad:
        return None
    # Under autocast products are computed in the output's half precision; the input rounded to it is half the size.
    multiplies = x.is_floating_point() and not isinstance(layer, _NORMS)
    return x.detach().to(output.dtype) if multiplies else x.detach()


def _linear(layer: nn.Linear, x: Tensor, g: Tensor) -> PerSampleGradients:
    return products(g, x)


def _transposed_linear(layer: nn.Module, x: Tensor, g: Tensor) -> PerSampleGradients:
    return products(x, g)


def _layer_norm(layer: nn.LayerNorm, x: Tensor, g: Tensor) -> Instantiated:
    normalized = F.layer_norm(x.to(g.dtype), layer.normalized_shape, eps=layer.eps)
    return Instantiated(sum_tokens(normalized.mul_(g), len(layer.normalized_shape)))


def _rms_norm(layer: nn.RMSNorm, x: Tensor, g: Tensor) -> Instantiated:
    # In the dtype of x, on which the default eps depends.
    normalized = F.rms_norm(x, layer.normalized_shape, eps=layer.eps).to(g.dtype)
    return Instantiated(sum_tokens(normalized.mul_(g), len(layer.normalized_shape)))


def _group_norm(layer: nn.GroupNorm, x: Tensor, g: Tensor) -> Instantiated:
    normalized = F.group_norm(x.to(g.dtype), layer.num_groups, eps=layer.eps)
    return Instantiated(sum_positions(normalized.mul_(g)))


def _instance_norm(layer: nn.InstanceNorm2d, x: Tensor, g: Tensor) -> Instantiated:
    normalized = F.instance_norm(x.to(g.dtype), eps=layer.eps)
    return Instantiated(sum_positions(normalized.mul_(g)))


def _embedding(layer: nn.Embedding, x: Tensor, g: Tensor) -> EmbeddingRows:
    ids, rows = x.reshape(len(x), -1), g.reshape(len(g), -1, g.shape[-1])
    if layer.padding_idx is not None:
        rows = rows.masked_fill((ids == layer.padding_idx)[..., None], 0)
    return EmbeddingRows(ids, rows, layer.num_embeddings)


def _image(layer: Convolution) -> tuple[int, ...]:
    sizes = (dilation * kernel + 2 for dilation, kernel in zip(layer.dilation, layer.kernel_size, strict=True))
    return (2, layer.in_channels, *sizes)


def _computes_the_same(layer: nn.Module, kind: type[nn.Module], shape: tuple[int, ...]) -> bool:
    some = next(layer.parameters())
    if isinstance(layer, nn.Embedding):
        x = (NoiseGenerator(0).uniform(*shape) * layer.num_embeddings).long().to(some.device)
    else:
        x = NoiseGenerator(0).normal(*shape).to(some)
    with torch.no_grad(), random_states_kept(some.device):
        try:
            output = layer.forward(x)
        except Exception:  # whatever a foreign forward dislikes about x, the answer is no
            return False
        expected = kind.forward(layer, x)
    return output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-3, atol=1e-5)


def _instance_norm_rule(positions: int) -> LayerRule:
    return LayerRule(_instance_norm, lambda layer: (2, layer.num_features, *[5] * positions), channels_first=True)


_CONVOLUTION = LayerRule(convolution, _image, channels_first=True)
_TRANSPOSED_LINEAR = LayerRule(_transposed_linear, lambda layer: (2, 3, layer.nx))  # transformers' Conv1D
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: LayerRule(_linear, lambda layer: (2, 3, layer.in_features)),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.LayerNorm: LayerRule(_layer_norm, lambda layer: (2, 3, *layer.normalized_shape)),
    nn.RMSNorm: LayerRule(_rms_norm, lambda layer: (2, 3, *layer.normalized_shape)),
    nn.GroupNorm: LayerRule(_group_norm, lambda layer: (2, layer.num_channels, 5), channels_first=True),
    nn.InstanceNorm1d: _instance_norm_rule(1),
    nn.InstanceNorm2d: _instance_norm_rule(2),
    nn.InstanceNorm3d: _instance_norm_rule(3),
    nn.Embedding: LayerRule(_embedding, lambda layer: (2, 3)),
}
