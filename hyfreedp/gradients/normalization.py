"""Rules of layer and group normalisation: copies of their small parameters would take passes over all activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyfreedp.gradients.mapped import Pass, rule
from hyfreedp.gradients.per_sample import Instantiated, sum_positions, sum_tokens
from hyfreedp.gradients.rules import Result, given

_INPUT_ONLY = (True, False, False)  # the gradients that torch's backward passes compute


@rule(F.layer_norm)
def _layer_norm(
    one_pass: Pass,
    func: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Result:
    x, shape = _plain(one_pass, input, weight, bias), list(normalized_shape)
    if x is None or x.dim() <= len(shape):  # such a shape would take in the samples
        return NotImplemented
    scale, shift = _detached(weight), _detached(bias)
    mean = rstd = x  # set by each computation of the layer, as in a checkpoint

    def call(x: Tensor) -> Tensor:
        nonlocal mean, rstd
        y, mean, rstd = torch.native_layer_norm(x, shape, scale, shift, eps)
        return y

    def backward(x: Any, g: Tensor, wanted: bool) -> Tensor | None:
        if one_pass.is_trained(bias):
            one_pass.add(bias, Instantiated(sum_tokens(g, len(shape))))
        if one_pass.is_trained(weight):
            one_pass.add(weight, Instantiated(sum_tokens((x - mean).mul_(rstd).mul_(g), len(shape))))
        if not wanted:
            return None
        return torch.ops.aten.native_layer_norm_backward(g, x, shape, mean, rstd, scale, shift, _INPUT_ONLY)[0]

    return one_pass.layer(call, backward, x)


@rule(F.group_norm)
def _group_norm(
    one_pass: Pass,
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Result:
    x = _plain(one_pass, input, weight, bias)
    if x is None or x.dim() < 4:
        return NotImplemented
    rows, scale, shift = x.shape[1], _detached(weight), _detached(bias)
    x = x.flatten(0, 1).contiguous()
    sizes = (*x.shape[:2], x[0, 0].numel(), num_groups)
    mean = rstd = x  # set by each computation of the layer, as in a checkpoint

    def call(x: Tensor) -> Tensor:
        nonlocal mean, rstd
        y, mean, rstd = torch.ops.aten.native_group_norm(x, scale, shift, *sizes, eps)
        return y

    def of_samples(gradients: Tensor) -> Instantiated:
        return Instantiated(gradients.unflatten(0, (-1, rows)).sum(1))

    def backward(x: Any, g: Tensor, wanted: bool) -> Tensor | None:
        g = g.contiguous()
        sums = sum_positions(g)
        if one_pass.is_trained(bias):
            one_pass.add(bias, of_samples(sums))
        if one_pass.is_trained(weight):  # sum g (x - mean) rstd
            means, rstds = (t.repeat_interleave(sizes[1] // num_groups, 1) for t in (mean, rstd))
            one_pass.add(weight, of_samples((sum_positions(g * x) - sums * means) * rstds))
        if not wanted:
            return None
        return torch.ops.aten.native_group_norm_backward(g, x, mean, rstd, scale, *sizes, _INPUT_ONLY)[0]

    return one_pass.layer(call, backward, x, rows=rows)


def _plain(one_pass: Pass, input: Tensor, weight: Any, bias: Any) -> Tensor | None:
    """The samples (B, ...), if all tensors have one type that autocast leaves as it is; else None."""
    types = {t.dtype for t in (input, weight, bias) if t is not None}
    if len(types) > 1 or torch.is_autocast_enabled(input.device.type):
        return None
    return given(one_pass, input, weight, bias)


def _detached(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()
