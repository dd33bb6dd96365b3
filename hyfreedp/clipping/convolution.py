"""Per-sample gradients of convolution weights: sums over the T output positions of input patches times g."""

from __future__ import annotations

from functools import cached_property
from math import ceil, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from hyfreedp.clipping.per_sample import Instantiated, PerSampleGradients, gram_norms, prefers_factors, widened
from hyfreedp.devices import exact_convolutions

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def convolution(layer: Convolution, x: Tensor, g: Tensor) -> PerSampleGradients:
    """Gradients of ``layer.weight`` from its input x (B, C, ...) and output gradient g (B, P, ...)."""
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = F.pad(x, layer._reversed_padding_repeated_twice, layer.padding_mode), 0
    elif isinstance(padding, str):  # "same" may pad one side more than the other
        x, padding = F.pad(x, layer._reversed_padding_repeated_twice), 0
    factors = ConvolutionFactors(layer, x, g, padding)
    tokens, p, d = prod(g.shape[2:]), layer.out_channels // layer.groups, prod(layer.weight.shape[1:])
    keep = prefers_factors(tokens, p, d) and g.dim() < 5  # torch unfolds no volumes
    return factors if keep else Instantiated(factors.instantiate())


class ConvolutionFactors(PerSampleGradients):
    """The gradients as input x and output gradient g of one convolution, whose (larger) patches are not kept."""

    def __init__(self, layer: Convolution, x: Tensor, g: Tensor, padding: int | tuple[int, ...]) -> None:
        self.layer, self.x, self.g, self.padding = layer, x, g, padding

    @cached_property
    def squared_norms(self) -> Tensor:
        # Patches repeat the input up to kernel-size times: take so few samples at once that they stay near its size.
        chunk = ceil(len(self.x) / prod(self.layer.kernel_size))
        groups = self.layer.groups
        norms = []
        for x, g in zip(self.x.split(chunk), self.g.split(chunk), strict=True):
            patches = self._patches(x)
            left = g.reshape(len(g) * groups, -1, patches.shape[-1])
            right = patches.reshape(len(g) * groups, -1, patches.shape[-1])
            norms.append(gram_norms(left.mT, right.mT).view(-1, groups).sum(1))
        return torch.cat(norms)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        x, g = widened(self.x), widened(self.g)
        g = g * weights.to(g.dtype).view(-1, *[1] * (g.dim() - 1))
        return self._weight_gradient(x, g, self.layer.groups)

    def instantiate(self) -> Tensor:
        # All samples side by side as channels of one convolution, in which each sample is a group of its own.
        x, g = self.x.flatten(0, 1).unsqueeze(0), self.g.flatten(0, 1).unsqueeze(0)
        return self._weight_gradient(x, g, len(self.x) * self.layer.groups).unflatten(0, (len(self.x), -1))

    def select(self, samples: Tensor) -> ConvolutionFactors:
        return ConvolutionFactors(self.layer, self.x[samples], self.g[samples], self.padding)

    def _weight_gradient(self, x: Tensor, g: Tensor, groups: int) -> Tensor:
        layer = self.layer
        shape = (g.shape[1], *layer.weight.shape[1:])
        gradient = {3: conv1d_weight, 4: conv2d_weight, 5: conv3d_weight}[g.dim()]
        with exact_convolutions():  # as the norms are
            return gradient(x, shape, g, layer.stride, self.padding, layer.dilation, groups)

    def _patches(self, x: Tensor) -> Tensor:
        """(n, C, ...) to (n, C * kernel, T)."""
        layer, padding = self.layer, self.padding
        if isinstance(layer, nn.Conv2d):
            return F.unfold(x, layer.kernel_size, layer.dilation, padding, layer.stride)
        padding = (0, *padding) if isinstance(padding, tuple) else (0, padding)
        return F.unfold(x.unsqueeze(2), (1, *layer.kernel_size), (1, *layer.dilation), padding, (1, *layer.stride))
