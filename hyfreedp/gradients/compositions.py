"""Functions of torch as the operations that they are made of, each of which a pass intercepts, or functorch maps.

Without these functorch would map them by a loop over the samples, which is slow, or not at all.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyfreedp.gradients.mapped import composed


def entered(function: Any, **replaced: Any) -> Any:
    """A Python function of torch, such that a pass intercepts each of its operations; some may be ``replaced``."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = function.__globals__ | dict.fromkeys(checks, lambda *tensors: False) | replaced
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / ||v||, with a norm for each index of dimension ``dim``; -1: one norm."""
    others = [d for d in range(v.dim()) if dim == -1 or d != dim % v.dim()]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias


def _embedding_bag(
    input: Tensor, weight: Tensor, *, mode: str, per_sample_weights: Any, padding_idx: int | None, **named: Any
) -> Any:
    """Of bags of one length, (R, L): sums or means of rows, none of which is of the padding."""
    if input.dim() != 2 or mode == "max" or named["max_norm"] is not None or named["scale_grad_by_freq"]:
        return NotImplemented
    counted = torch.ones_like(input) if padding_idx is None else (input != padding_idx % len(weight)).long()
    weights = counted if per_sample_weights is None else counted * per_sample_weights
    sums = (F.embedding(input, weight, padding_idx) * weights[..., None]).sum(1)
    return sums / counted.sum(1, keepdim=True).clamp(min=1) if mode == "mean" else sums


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    if reduction == 0:
        return losses
    return losses.mean() if reduction == 1 else losses.sum()


def _kl_div(input: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False) -> Tensor:
    if log_target:
        return _reduced(target.exp() * (target - input), reduction)
    return _reduced(torch.xlogy(target, target) - target * input, reduction)


def _margin_ranking_loss(a: Tensor, b: Tensor, target: Tensor, margin: float = 0.0, reduction: int = 1) -> Tensor:
    return _reduced((margin - target * (a - b)).clamp_min(0), reduction)


def _triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = 1,
) -> Tensor:
    near, far = F.pairwise_distance(anchor, positive, p, eps), F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = far.minimum(F.pairwise_distance(positive, negative, p, eps))
    return _reduced((margin + near - far).clamp_min(0), reduction)


def _soft_margin_loss(input: Tensor, target: Tensor, reduction: int) -> Tensor:
    return _reduced(F.softplus(-target * input), reduction)


def _written_back(name: str, x: Tensor, *args: Any, **named: Any) -> Tensor:
    return x.copy_(getattr(x.clone(), name)(*args, **named))  # a backward pass may need the clone


for _name in ("clamp", "pow", "square"):
    composed(partial(_written_back, _name), getattr(Tensor, f"{_name}_"))
composed(_weight_norm, torch._weight_norm)
composed(_bilinear, F.bilinear)
composed(_embedding_bag, F.embedding_bag)
composed(_kl_div, torch.kl_div)
composed(_margin_ranking_loss, torch.margin_ranking_loss)
composed(_triplet_margin_loss, torch.triplet_margin_loss)
composed(_soft_margin_loss, torch._C._nn.soft_margin_loss)
for _function in (F.kl_div, F.margin_ranking_loss, F.triplet_margin_loss, F.soft_margin_loss):
    composed(entered(_function), _function)  # they call the functions above
composed(entered(F.gaussian_nll_loss), F.gaussian_nll_loss)  # it asks for values
composed(entered(F.triplet_margin_with_distance_loss), F.triplet_margin_with_distance_loss)  # it calls back
