"""Per-sample gradients of convolution weights: products over the T output positions of input patches with g."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import ceil, prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyfreedp.clipping.persample import Instantiated, PerSampleGradients, gram_norms, prefers_factors


def convolution(layer: nn.Conv1d | nn.Conv2d, x: Tensor, g: Tensor) -> PerSampleGradients:
    """Gradients of ``layer.weight`` from its input x (B, C, ...) and output gradient g (B, P, ...)."""
    padding = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = F.pad(x, layer._reversed_padding_repeated_twice, layer.padding_mode), 0
    elif isinstance(padding, str):  # "same" may pad one side more than the other
        x, padding = F.pad(x, layer._reversed_padding_repeated_twice), 0
    factors = ConvolutionFactors(layer, x, g, padding)
    p, d = layer.out_channels // layer.groups, prod(layer.weight.shape[1:])
    keep = prefers_factors(tokens=prod(g.shape[2:]), p=p, d=d)
    return factors if keep else Instantiated(factors.instantiate())


class ConvolutionFactors(PerSampleGradients):
    """g_i is the weight gradient of one convolution. Keeps its input and output gradient, not the (larger) patches."""

    def __init__(self, layer: nn.Conv1d | nn.Conv2d, x: Tensor, g: Tensor, padding: int | tuple[int, ...]) -> None:
        self.layer, self.x, self.g, self.padding = layer, x, g, padding

    @cached_property
    def squared_norms(self) -> Tensor:
        norms = [
            gram_norms(left, right).unflatten(0, (-1, self.layer.groups)).sum(1) for left, right in self._factors()
        ]
        return torch.cat(norms)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        layer = self.layer
        g = self.g * weights.to(self.g.dtype).view(-1, *[1] * (self.g.dim() - 1))
        weight_gradient = nn.grad.conv1d_weight if isinstance(layer, nn.Conv1d) else nn.grad.conv2d_weight
        return weight_gradient(self.x, layer.weight.shape, g, layer.stride, self.padding, layer.dilation, layer.groups)

    def instantiate(self) -> Tensor:
        return torch.cat([(left.mT @ right).view(-1, *self.layer.weight.shape) for left, right in self._factors()])

    def select(self, samples: Tensor) -> ConvolutionFactors:
        return ConvolutionFactors(self.layer, self.x[samples], self.g[samples], self.padding)

    def _factors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of n samples: g as (n groups, T, P / groups) and patches as (n groups, T, C / groups * kernel).

        Patches repeat the input up to kernel-size times, so a chunk has so few samples that they stay near its size.
        """
        layer, as_2d = self.layer, isinstance(self.layer, nn.Conv1d)
        chunk = ceil(len(self.x) / prod(layer.kernel_size))
        for x, g in zip(self.x.split(chunk), self.g.split(chunk), strict=True):
            padding, kernel, stride, dilation = self.padding, layer.kernel_size, layer.stride, layer.dilation
            if as_2d:
                x = x.unsqueeze(2)
                padding = (0, *padding) if padding else 0
                kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
            patches = F.unfold(x, kernel, dilation, padding, stride)
            groups = len(x) * layer.groups
            yield g.reshape(groups, -1, patches.shape[-1]).mT, patches.view(groups, -1, patches.shape[-1]).mT
