"""Rules for known layers: compute them on the plain tensors of all samples, and keep what parameter gradients need.

Within a :class:`~.mapped.Pass` a rule replaces a torch function, mostly one with trained parameters: it computes the
layer on the tensors (B, ...) behind the samples' tensors. Rules are for speed only: without one, a parameter gets a
copy for each sample, which is as fast for positions or scales. CONTRIBUTING.md says how to add one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyfreedp.gradients.functorch import is_wrapped
from hyfreedp.gradients.mapped import Pass, rule
from hyfreedp.gradients.per_sample import Instantiated, products, sum_to, widened
from hyfreedp.gradients.tables import EmbeddingRows

NN: Any = torch._C._nn  # type: ignore[attr-defined]  # functions of F may be replaced, by code that would see all samples
_INPUT_ONLY = (True, False, False)  # which gradients a backward function of torch computes: the input's


def samples_if_trained(one_pass: Pass, x: Tensor, *parameters: Tensor | None) -> Tensor | None:
    """The samples (B, ...) of x, if a parameter is trained and the others are constants, equal for all; else None."""
    others: list[Any] = [p for p in parameters if p is not None and not one_pass.is_trained(p)]
    if any(map(one_pass.is_trained, parameters)) and not any(is_wrapped(p) or p.requires_grad for p in others):
        return one_pass.samples(x)
    return None


def samples_if_frozen(one_pass: Pass, x: Any, *parameters: Any) -> Tensor | None:
    """The samples (B, ...) of x, if no parameter is trained; else None. (functorch would decompose some layers.)"""
    frozen = not any(is_wrapped(p) or one_pass.is_trained(p) for p in parameters)
    return one_pass.level.samples(x) if frozen and one_pass.level.holds(x) and x.dim() > 0 else None


@rule(NN.linear)
def _linear(one_pass: Pass, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if (x := samples_if_frozen(one_pass, input, weight, bias)) is not None:
        return one_pass.of_sample(NN.linear(x, weight, bias))
    return _product(one_pass, input, weight, bias, transposed=False)


@rule(torch.addmm)
def _addmm(one_pass: Pass, func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any) -> Any:
    return NotImplemented if scales else _product(one_pass, mat1, mat2, input, transposed=True)


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def _matmul(one_pass: Pass, func: Any, input: Tensor, other: Tensor) -> Any:
    return _product(one_pass, input, other, None, transposed=True)


def _product(one_pass: Pass, input: Tensor, weight: Any, bias: Any, *, transposed: bool) -> Any:
    """x W^T + b, or, ``transposed``, x W + b."""
    x, outputs = samples_if_trained(one_pass, input, weight, bias), weight.shape[transposed:][:1]
    if x is None or x.dim() < 2 or weight.dim() != 2 or (bias is not None and bias.shape != outputs):
        return NotImplemented

    def call(x: Tensor) -> Tensor:
        return NN.linear(x, weight.mT if transposed else weight, bias)

    def backward(x: Tensor | None, g: Tensor, wanted: bool) -> Tensor | None:
        if one_pass.is_trained(bias):
            one_pass.add(bias, Instantiated(sum_to(g, -1)))
        if x is not None:
            x = x.to(g.dtype)  # rounded as autocast does
            one_pass.add(weight, products(x, g) if transposed else products(g, x))
        return g @ (weight.mT if transposed else weight).to(g.dtype) if wanted else None

    return one_pass.layer(call, backward, x, keeps_input=one_pass.is_trained(weight))


@rule(F.embedding)
def _embedding(
    one_pass: Pass, func: Any, input: Tensor, weight: Any, padding_idx: int | None = None, **named: Any
) -> Any:
    ids = samples_if_trained(one_pass, input, weight)
    if ids is None or named["max_norm"] is not None or named["scale_grad_by_freq"]:
        return NotImplemented
    entries = len(weight)
    padding = None if padding_idx is None else padding_idx % entries

    def backward(ids: Any, g: Tensor, wanted: bool) -> None:
        rows = g.reshape(len(g), -1, g.shape[-1])
        one_pass.add(weight, EmbeddingRows(ids.reshape(len(g), -1), rows, entries, padding))

    return one_pass.layer(lambda ids: torch.embedding(weight, ids), backward, ids)


@rule(F.layer_norm)
def _layer_norm(
    one_pass: Pass, func: Any, input: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Not by copies of its parameters for each sample, which would take passes over all activations."""
    if (x := samples_if_frozen(one_pass, input, weight, bias)) is not None:
        return one_pass.of_sample(torch.layer_norm(x, shape, weight, bias, eps))
    x = _samples_of_one_type(one_pass, input, weight, bias)
    if x is None or x.dim() < 2 or len(shape) != 1:
        return NotImplemented
    mean = rstd = x  # set by each computation of the layer, as in a checkpoint

    def call(x: Tensor) -> Tensor:
        nonlocal mean, rstd
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        return y

    def backward(x: Any, g: Tensor, wanted: bool) -> Tensor | None:
        if one_pass.is_trained(bias):
            one_pass.add(bias, Instantiated(sum_to(g, -1)))
        if one_pass.is_trained(weight):
            one_pass.add(weight, Instantiated(sum_to((x - mean).mul_(rstd).mul_(g), -1)))
        if not wanted:
            return None
        return torch.ops.aten.native_layer_norm_backward(g, x, shape, mean, rstd, weight, bias, _INPUT_ONLY)[0]

    return one_pass.layer(call, backward, x)


@rule(F.group_norm)
def _group_norm(
    one_pass: Pass, func: Any, input: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Of inputs (B, R, C, ...): each sample is a batch of R rows."""
    x = _samples_of_one_type(one_pass, input, weight, bias)
    if x is None or x.dim() < 4:
        return NotImplemented
    x = x.contiguous()
    sizes = (x.shape[:2].numel(), x.shape[2], x.shape[3:].numel(), groups)
    mean = rstd = x  # as above

    def call(x: Tensor) -> Tensor:
        nonlocal mean, rstd
        y, mean, rstd = torch.ops.aten.native_group_norm(x.flatten(0, 1), weight, bias, *sizes, eps)
        return y.view_as(x)

    def backward(x: Any, g: Tensor, wanted: bool) -> Tensor | None:
        g = g.contiguous()
        sums = widened(g).flatten(3).sum(3)  # (B, R, C)
        if one_pass.is_trained(bias):
            one_pass.add(bias, Instantiated(sums.sum(1)))
        if one_pass.is_trained(weight):  # sum g (x - mean) rstd
            means, rstds = (t.repeat_interleave(sizes[1] // groups, 1).view_as(sums) for t in (mean, rstd))
            products = widened(g * x).flatten(3).sum(3)
            one_pass.add(weight, Instantiated(((products - sums * means) * rstds).sum(1)))
        if not wanted:
            return None
        flat = g.flatten(0, 1), x.flatten(0, 1)
        return torch.ops.aten.native_group_norm_backward(*flat, mean, rstd, weight, *sizes, _INPUT_ONLY)[0].view_as(x)

    return one_pass.layer(call, backward, x)


@rule(F.batch_norm)
def _batch_norm(one_pass: Pass, func: Any, input: Tensor, mean: Any, var: Any, **named: Any) -> Any:
    """By constant statistics, an affine map, which functorch would decompose; inputs are (B, R, C, ...)."""
    weight, bias = named["weight"], named["bias"]
    x = samples_if_frozen(one_pass, input, mean, var, weight, bias)
    if named["training"] or x is None or x.dim() < 3:
        return NotImplemented
    scale = (widened(var) + named["eps"]).rsqrt() * (1 if weight is None else weight)
    shift, ones = (0 if bias is None else bias) - mean * scale, [1] * (x.dim() - 3)
    return one_pass.of_sample(torch.addcmul(shift.view(x.shape[2], *ones), x, scale.view(-1, *ones)).to(x.dtype))


def _samples_of_one_type(one_pass: Pass, input: Tensor, weight: Any, bias: Any) -> Tensor | None:
    """As :func:`samples_if_trained` if all tensors have one type and there is no autocast; else None."""
    types = {t.dtype for t in (input, weight, bias) if t is not None}
    if len(types) > 1 or torch.is_autocast_enabled(input.device.type):
        return None
    return samples_if_trained(one_pass, input, weight, bias)


@rule(NN.scaled_dot_product_attention)
def _attention(
    one_pass: Pass, func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **named: Any
) -> Any:
    """Joins samples and other batch dimensions, since functorch cannot map this function on CPUs."""
    tensors: list[Any] = [one_pass.samples(t) for t in (query, key, value, attn_mask) if t is not None]
    if any(t is None for t in tensors) or any(t.dim() < 4 for t in tensors[:3]):
        return NotImplemented
    most = max(t.dim() for t in tensors[:3])
    if tensors[-1].dim() > most:
        return NotImplemented
    # Otherwise broadcasting would match the samples of a tensor with fewer dimensions with the rows of another.
    tensors = [t.reshape(len(t), *[1] * (most - t.dim()), *t.shape[1:]) for t in tensors]
    batch = torch.broadcast_shapes(*(t.shape[:-3] for t in tensors[:3]))
    q, k, v, *mask = (t.expand(*batch, *t.shape[len(batch) :]).flatten(0, len(batch) - 1) for t in tensors)
    return one_pass.of_sample(func(q, k, v, *mask or [None], *args, **named).unflatten(0, batch))


@rule(F.cross_entropy)
def _cross_entropy(one_pass: Pass, func: Any, input: Any, target: Any, weight: Any = None, **named: Any) -> Any:
    """All samples at once: functorch would decompose it in Python, which is slow and takes a second of imports."""
    x, y = one_pass.samples(input), one_pass.samples(target)
    reduction, ignored = named["reduction"], named["ignore_index"]
    if x is not None and y is not None and x.dim() == 2 and y.dim() >= 2:
        raise RuntimeError(f"input of shape {tuple(input.shape)} and target of shape {tuple(target.shape)}")
    if x is None or y is None or x.dim() < 3 or y.is_floating_point() or not (is_wrapped(input) or is_wrapped(target)):
        return NotImplemented
    if is_wrapped(weight) or one_pass.is_trained(weight) or {named["size_average"], named["reduce"]} != {None}:
        return NotImplemented
    losses = NN.cross_entropy_loss(x.flatten(0, 1), y.flatten(0, 1), weight, 0, ignored, named["label_smoothing"])
    losses = losses.unflatten(0, x.shape[:2])
    if reduction != "none":
        losses = losses.flatten(1).sum(1)
    if reduction == "mean":
        counted = y != ignored
        weights = counted if weight is None else weight[y.where(counted, 0)] * counted
        losses = losses / weights.flatten(1).sum(1)
    return one_pass.of_sample(losses)
