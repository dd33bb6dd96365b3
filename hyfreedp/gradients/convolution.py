"""Per-sample gradients of convolution weights: sums over the T output positions of input patches times g."""

from __future__ import annotations

from functools import cached_property
from math import ceil, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from hyfreedp.gradients.per_sample import Factors, Instantiated, PerSampleGradients, gram_norms, keeps_factors, widened
from hyfreedp.pytorch.devices import exact_convolutions

Each = tuple[int, ...]  # a number for each dimension


def convolution(
    x: Tensor, g: Tensor, shape: torch.Size, stride: Each, padding: Each, dilation: Each, groups: int
) -> PerSampleGradients:
    """Gradients of a weight of ``shape`` (P, C / groups, ...): input x (B, C, ...), output gradient g (B, P, ...)."""
    factors = ConvolutionFactors(x, g, shape, stride, padding, dilation, groups)
    keep = keeps_factors(prod(g.shape[2:]), shape[0] // groups, prod(shape[1:])) and g.dim() < 5  # F.unfold lacks 3-D
    return factors if keep else Instantiated(factors.instantiate())


def padded_to_same(x: Tensor, shape: torch.Size, dilation: Any) -> Tensor:
    """An input padded as by padding="same"; of an odd total the larger half is at the end."""
    dilation = each_dimension(dilation, len(shape) - 2)
    both = [d * (k - 1) for d, k in zip(dilation, shape[2:], strict=True)]
    return F.pad(x, [side for total in reversed(both) for side in (total // 2, total - total // 2)])


def each_dimension(value: Any, dimensions: int) -> Each:
    """One number for each dimension."""
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return numbers if len(numbers) == dimensions else numbers * dimensions


class ConvolutionFactors(Factors):
    """The gradients in the form of a convolution's input x and output gradient g; its larger patches are not kept."""

    def __init__(
        self, x: Tensor, g: Tensor, shape: torch.Size, stride: Each, padding: Each, dilation: Each, groups: int
    ) -> None:
        self.x, self.g, self.shape, self.groups = x, g, shape, groups
        self.stride, self.padding, self.dilation = stride, padding, dilation

    @cached_property
    def gram_norms(self) -> tuple[Tensor, Tensor]:
        # Patches repeat the input up to kernel-size times: as many fewer samples at once keep memory near its size.
        chunk = ceil(len(self.x) / prod(self.shape[2:]))
        norms = []
        for x, g in zip(self.x.split(chunk), self.g.split(chunk), strict=True):
            patches = self._patches(x)
            left = g.reshape(len(g) * self.groups, -1, patches.shape[-1])
            right = patches.reshape(len(g) * self.groups, -1, patches.shape[-1])
            norms.append(torch.stack(gram_norms(left.mT, right.mT)).view(2, -1, self.groups).sum(2))
        return tuple(torch.cat(norms, 1))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        x, g = widened(self.x), widened(self.g)
        g = g * weights.to(g.dtype).view(-1, *[1] * (g.dim() - 1))
        return self._weight_gradient(x, g, self.groups)

    def instantiate(self) -> Tensor:
        # One convolution with the samples' channels side by side, in which each sample is a group.
        x, g = self.x.flatten(0, 1).unsqueeze(0), self.g.flatten(0, 1).unsqueeze(0)
        return self._weight_gradient(x, g, len(self.x) * self.groups).unflatten(0, (len(self.x), -1))

    def select(self, samples: Tensor) -> ConvolutionFactors:
        geometry = (self.shape, self.stride, self.padding, self.dilation, self.groups)
        return ConvolutionFactors(self.x[samples], self.g[samples], *geometry)

    def _weight_gradient(self, x: Tensor, g: Tensor, groups: int) -> Tensor:
        gradient = {3: conv1d_weight, 4: conv2d_weight, 5: conv3d_weight}[g.dim()]
        shape = (g.shape[1], *self.shape[1:])
        with exact_convolutions():  # as the norms are
            return gradient(x, shape, g, self.stride, self.padding, self.dilation, groups)

    def _patches(self, x: Tensor) -> Tensor:
        """(n, C, ...) to (n, C * kernel, T)."""
        geometry = (tuple(self.shape[2:]), self.dilation, self.padding, self.stride)
        if x.dim() == 4:
            return F.unfold(x, *geometry)
        # A signal as an image of height 1.
        kernel, dilation, padding, stride = ((one, *each) for one, each in zip((1, 1, 0, 1), geometry, strict=True))
        return F.unfold(x.unsqueeze(2), kernel, dilation, padding, stride)
