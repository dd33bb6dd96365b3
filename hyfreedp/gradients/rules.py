"""Rules for known layers: compute them on the plain tensors of all samples, and keep what parameter gradients need.

A rule replaces a torch function within a :class:`~.mapped.Pass` if the function gets trained parameters as they are: it
computes the layer on the tensors (B, ...) behind the samples'. To add one, decorate a function with
:func:`~.mapped.rule` that calls :meth:`~.mapped.Pass.layer` with the layer and its backward pass. No rule is needed for
correctness: a parameter without one gets a copy for each sample, which is as fast for positions or scales. Layer and
group norm have rules in :mod:`~hyfreedp.gradients.normalization`, since copies would cost them time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyfreedp.gradients.attention import multi_head_attention
from hyfreedp.gradients.convolution import convolution, each_dimension, padded_to_same
from hyfreedp.gradients.functorch import is_wrapped
from hyfreedp.gradients.mapped import Pass, Unmappable, composed, rule
from hyfreedp.gradients.per_sample import EmbeddingRows, Instantiated, products, sum_positions, sum_tokens
from hyfreedp.gradients.recurrent import cell_step, recurrence, unrolled

Result = Any  # a tensor, or NotImplemented


def given(one_pass: Pass, x: Tensor, *parameters: Tensor | None) -> Tensor | None:
    """The samples (B, ...) of x, if a parameter is trained and all samples share all parameters; else None."""
    if any(map(one_pass.is_trained, parameters)) and not any(map(is_wrapped, parameters)):
        return one_pass.samples(x)
    return None


# -- linear maps -------------------------------------------------------------------------------------------------------


@rule(F.linear)
def _linear(one_pass: Pass, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Result:
    x = given(one_pass, input, weight, bias)
    if x is None or x.dim() < 2 or weight.dim() != 2:
        return NotImplemented
    return _product(one_pass, x, weight, bias, transposed=False)


@rule(torch.addmm)
def _addmm(one_pass: Pass, func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any) -> Result:
    x = given(one_pass, mat1, mat2, input)
    if x is None or scales or input.dim() != 1:
        return NotImplemented
    return _product(one_pass, x, mat2, input, transposed=True)


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def _matmul(one_pass: Pass, func: Any, input: Tensor, other: Tensor) -> Result:
    x = None if one_pass.is_trained(input) else given(one_pass, input, other)
    if x is None or x.dim() < 3 or other.dim() != 2:
        return NotImplemented
    return _product(one_pass, x, other, None, transposed=True)


def _product(one_pass: Pass, x: Tensor, weight: Any, bias: Any, *, transposed: bool) -> Tensor:
    """x W^T + b, or, ``transposed``, x W + b."""
    matrix = weight.detach().mT if transposed else weight.detach()
    added = None if bias is None else bias.detach()

    def backward(x: Tensor | None, g: Tensor, wanted: bool) -> Tensor | None:
        if one_pass.is_trained(bias):
            one_pass.add(bias, Instantiated(sum_tokens(g, 1)))
        if x is not None:
            x = x.to(g.dtype)  # rounded as autocast does
            one_pass.add(weight, products(x, g) if transposed else products(g, x))
        return g @ matrix.to(g.dtype) if wanted else None

    return one_pass.layer(lambda x: F.linear(x, matrix, added), backward, x, keeps_input=one_pass.is_trained(weight))


# -- convolutions ------------------------------------------------------------------------------------------------------


_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@rule(F.conv1d, F.conv2d, F.conv3d, *_TRANSPOSED)
def _convolution(
    one_pass: Pass, func: Any, input: Tensor, weight: Any, bias: Any = None, *args: Any, **named: Any
) -> Result:
    """A convolution, or a transposed one; dimension 0 of the inner tensors is (samples * rows)."""
    transposed = func in _TRANSPOSED
    names = "stride padding output_padding groups dilation" if transposed else "stride padding dilation groups"
    sizes = dict(zip(names.split(), args, strict=False)) | named
    groups = sizes.get("groups", 1)
    x = given(one_pass, input, weight, bias)
    if x is None or x.dim() != weight.dim() + 1:  # an unbatched image
        return NotImplemented
    rows = x.shape[1]
    x, dims = x.flatten(0, 1), weight.dim() - 2
    if (padding := sizes.get("padding", 0)) == "same":
        x = padded_to_same(x, weight.shape, sizes.get("dilation", 1))
    sizes["padding"] = 0 if isinstance(padding, str) else padding
    stride, padding, dilation, output_padding = (
        each_dimension(sizes.get(name, default), dims)
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0))
    )
    kernel, added = weight.detach(), None if bias is None else bias.detach()
    if transposed and any(more >= s for more, s in zip(output_padding, stride, strict=True)):
        return NotImplemented  # some output positions are reached by no input
    shape, geometry = x.shape, (stride, padding, dilation, groups)
    arguments = (stride, padding, output_padding, groups, dilation) if transposed else geometry

    def joined(gradients: Any) -> Any:
        """Sum the gradients over the rows of each sample."""
        if rows == 1:
            return gradients
        return Instantiated(gradients.instantiate().unflatten(0, (-1, rows)).sum(1))

    def backward(x: Tensor | None, g: Tensor, wanted: bool) -> Tensor | None:
        if one_pass.is_trained(bias):
            one_pass.add(bias, joined(Instantiated(sum_positions(g))))
        if x is not None:
            small, large = (x.to(g.dtype), g) if transposed else (g, x.to(g.dtype))
            one_pass.add(weight, joined(convolution(large, small, kernel.shape, *geometry)))
        if not wanted:
            return None
        how = (stride, padding, dilation, transposed, output_padding, groups, (True, False, False))
        input = g.new_empty(1).expand(shape)  # only its shape is used
        return torch.ops.aten.convolution_backward(g, input, kernel.to(g.dtype), None, *how)[0]

    trains = one_pass.is_trained(weight)
    return one_pass.layer(lambda x: func(x, kernel, added, *arguments), backward, x, keeps_input=trains, rows=rows)


# -- tables ------------------------------------------------------------------------------------------------------------


@rule(F.embedding)
def _embedding(
    one_pass: Pass, func: Any, input: Tensor, weight: Any, padding_idx: int | None = None, *args: Any, **named: Any
) -> Result:
    by_counts = args or named.get("max_norm") is not None or named.get("scale_grad_by_freq")
    ids = None if by_counts else given(one_pass, input, weight)
    if ids is None and padding_idx is not None and one_pass.is_trained(weight):
        raise Unmappable("an embedding with padding whose gradients are scaled by counts")  # functorch ignores both
    if ids is None:
        return NotImplemented
    table, entries = weight.detach(), len(weight)
    padding = None if padding_idx is None else padding_idx % entries

    def backward(ids: Any, g: Tensor, wanted: bool) -> None:
        rows = g.reshape(len(g), -1, g.shape[-1])
        one_pass.add(weight, EmbeddingRows(ids.reshape(len(g), -1), rows, entries, padding))

    return one_pass.layer(lambda ids: F.embedding(ids, table), backward, ids)


def _padded_embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **named: Any
) -> Result:
    """Of a table that is computed from each sample's copy of parameters; functorch ignores the padding."""
    if padding_idx is None or not is_wrapped(weight):
        return NotImplemented
    rows = F.embedding(input, weight, None, *args, **named)
    return torch.where((input == padding_idx % len(weight))[..., None], rows.detach(), rows)


def _rolled(x: Tensor, *args: Any, **named: Any) -> Result:
    """A number stays as it is; functorch rolls numbers of samples along the samples."""
    return x.clone() if is_wrapped(x) and x.dim() == 0 else NotImplemented


# -- attention, and functions of other functions -----------------------------------------------------------------------


@rule(F.scaled_dot_product_attention)
def _attention(
    one_pass: Pass,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **named: Any,
) -> Result:
    """Joins samples and batch dimensions, since functorch has no batching rule for it on CPUs."""
    tensors: list[Any] = [one_pass.samples(t) for t in (query, key, value, attn_mask) if t is not None]
    if any(t is None for t in tensors) or any(t.dim() < 4 for t in tensors[:3]):
        return NotImplemented
    most = max(t.dim() for t in tensors[:3])
    if tensors[-1].dim() > most:
        return NotImplemented
    # Broadcasting tensors of fewer dimensions as they are would take the samples of one for the rows of another.
    tensors = [t.reshape(len(t), *[1] * (most - t.dim()), *t.shape[1:]) for t in tensors]
    batch = torch.broadcast_shapes(*(t.shape[:-3] for t in tensors[:3]))
    q, k, v, *mask = (t.expand(*batch, *t.shape[len(batch) :]).flatten(0, len(batch) - 1) for t in tensors)
    return one_pass.of_sample(func(q, k, v, *mask or [None], *args, **named).unflatten(0, batch))


@rule(F.cross_entropy)
def _cross_entropy(one_pass: Pass, func: Any, input: Any, target: Any, weight: Any = None, **named: Any) -> Result:
    """Computes all samples at once: functorch decomposes it in Python, which is slow and needs a second of imports."""
    x, y = one_pass.samples(input), one_pass.samples(target)
    reduction = named.pop("reduction", "mean")
    if x is not None and y is not None and x.dim() == 2 and y.dim() >= 2:
        raise RuntimeError(f"input of shape {tuple(input.shape)} and target of shape {tuple(target.shape)}")
    if x is None or y is None or x.dim() < 3 or y.is_floating_point() or weight is not None:
        return NotImplemented
    losses = func(x.flatten(0, 1), y.flatten(0, 1), reduction="none", **named).unflatten(0, x.shape[:2])
    if reduction != "none":
        losses = losses.flatten(1).sum(1)
    if reduction == "mean":
        losses = losses / (y != named.get("ignore_index", -100)).flatten(1).sum(1)
    return one_pass.of_sample(losses)


composed(F.embedding, _padded_embedding)
composed(torch.roll, _rolled)
composed(Tensor.roll, _rolled)


@rule(recurrence)
def _recurrence(one_pass: Pass, func: Any, inputs: Tensor, weight: Any, bias: Any, mode: str, *state: Tensor) -> Result:
    """A recurrent layer in one direction; its time steps are computed outside of the map, which would slow each."""
    x, starts = given(one_pass, inputs, weight, bias), [one_pass.samples(one) for one in state]
    if x is None or x.dim() != 4:
        return NotImplemented
    rows, x, before = x.shape[1], x.flatten(0, 1), [one.flatten(0, 1) for one in starts if one is not None]
    if len(before) < len(starts):
        return NotImplemented
    outputs = x  # known when the backward pass begins

    def backward(x: Tensor | None, g: Tensor, wanted: bool) -> None:
        """From the gradient g by what the hidden states contribute to the gates, (B rows, T, G H)."""
        g = g.unflatten(0, (-1, rows)).flatten(1, 2)
        hidden = torch.cat([before[0][:, None].to(outputs), outputs[:, :-1]], 1).detach().to(g.dtype)
        if one_pass.is_trained(weight):
            one_pass.add(weight, products(g, hidden.unflatten(0, (-1, rows)).flatten(1, 2)))
        if one_pass.is_trained(bias):
            one_pass.add(bias, Instantiated(sum_tokens(g, 1)))

    added: Any = one_pass.samples(one_pass.layer(torch.zeros_like, backward, x, keeps_input=False))
    kernel, shift = weight.detach(), None if bias is None else bias.detach()
    if mode != "gru":  # both contributions are only summed, which one addition does for all time steps
        x, added = x + added, None
    outputs, *ends = func(x, kernel, shift, mode, *before, added=added)
    return tuple(one_pass.of_sample(one.unflatten(0, (-1, rows))) for one in (outputs, *ends))


composed(F.multi_head_attention_forward, multi_head_attention)
for mode in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    composed(getattr(torch, mode), partial(unrolled, mode))
    composed(getattr(torch, f"{mode}_cell"), partial(cell_step, mode))
