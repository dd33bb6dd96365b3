"""One rule per operation: from its input x and its output's gradient g to its parameters' per-sample gradients.

Samples are rows of a tensor: dimension 0 has k rows for each of the B samples, sample by sample (k > 1 for windows of
an image, or for tokens).

* *Operations of layers* (linear maps, convolutions, embeddings, norms) keep input and output gradient: book-keeping.
* *Other operations* in which a followed value meets an operand that needs a gradient, and so depends on samples
  (broadcasting, concatenation, products of matrices): the value's copies are per sample.

What no rule covers is computed as it is, and found by the recorder in the graph of the losses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hyfreedp.gradients.attention import multi_head_attention
from hyfreedp.gradients.convolution import convolution
from hyfreedp.gradients.followed import COMPOSED, RULES, SIGNATURES, Followed, derived, plain
from hyfreedp.gradients.per_sample import (
    EmbeddingRows,
    Instantiated,
    PerSampleGradients,
    products,
    sum_positions,
    sum_tokens,
)
from hyfreedp.gradients.recorder import Gradients, Recorder
from hyfreedp.gradients.recurrent import one_step

Result = Any  # a tensor, or NotImplemented
OfWeight = Callable[[Tensor, Tensor], PerSampleGradients]  # input and output gradient to those of the weight

_ELEMENTWISE = (
    "add sub subtract rsub mul multiply div divide true_divide __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ "
    "__truediv__ __rtruediv__ pow __pow__ __rpow__ maximum minimum where lerp addcmul addcdiv clamp"
)
_IN_PLACE = "add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__"


# -- operations of layers ----------------------------------------------------------------------------------------------


def _linear(recorder: Recorder, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Result:
    call = partial(function, input, weight, bias)
    return _layer(recorder, call, input, weight, bias, lambda x, g: products(g, x), multiplies=True)


def _addmm(recorder: Recorder, function: Any, input: Tensor, mat1: Tensor, mat2: Tensor) -> Result:
    if input.dim() != 1:  # no bias
        return NotImplemented
    return _layer(recorder, partial(function, input, mat1, mat2), mat1, mat2, input, products, multiplies=True)


def _convolution(
    recorder: Recorder,
    function: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Result:
    def of_weight(x: Tensor, g: Tensor) -> PerSampleGradients:
        return convolution(x, g, weight.shape, stride, padding, dilation, groups)

    if input.dim() != weight.dim():  # one sample without its dimension
        return NotImplemented
    call = partial(function, input, weight, bias, stride, padding, dilation, groups)
    return _layer(recorder, call, input, weight, bias, of_weight, channels=True, by_row=True, multiplies=True)


def _transposed_convolution(
    recorder: Recorder,
    function: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Result:
    def of_weight(x: Tensor, g: Tensor) -> PerSampleGradients:  # of the convolution whose transpose this is
        return convolution(g, x, weight.shape, stride, padding, dilation, groups)

    if input.dim() != weight.dim():
        return NotImplemented
    call = partial(function, input, weight, bias, stride, padding, output_padding, groups, dilation)
    return _layer(recorder, call, input, weight, bias, of_weight, channels=True, by_row=True, multiplies=True)


def _bilinear(x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map of the products of two inputs."""
    return F.linear((x1.unsqueeze(-1) * x2.unsqueeze(-2)).flatten(-2), weight.flatten(1), bias)


def _embedding(
    recorder: Recorder,
    function: Any,
    ids: Tensor,
    table: Any,
    padding_idx: int | None = None,
    *args: Any,
    **named: Any,
) -> Result:
    padding = None if padding_idx is None else padding_idx % len(table)

    def gradients(ids: Tensor | None, g: Tensor) -> Gradients:
        numbers, rows = cast(Tensor, ids).reshape(len(g), -1), g.reshape(len(g), -1, g.shape[-1])
        yield table, EmbeddingRows(numbers, rows, len(table), padding)

    result = recorder.layer(partial(function, ids, table, padding_idx, *args, **named), ids, (table,), gradients)
    if isinstance(result, Followed) and table.parameter is not None:
        result.looked_up = (ids, padding, table.parameter)
    return result


def _layer_norm(
    recorder: Recorder,
    function: Any,
    x: Tensor,
    shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Result:
    def of_weight(x: Tensor, g: Tensor) -> PerSampleGradients:
        return Instantiated(sum_tokens(F.layer_norm(x.to(g.dtype), shape, eps=eps).mul_(g), weight.dim()))

    return _layer(recorder, partial(function, x, shape, weight, bias, eps), x, weight, bias, of_weight)


def _rms_norm(
    recorder: Recorder, function: Any, x: Tensor, shape: Any, weight: Any = None, eps: float | None = None
) -> Result:
    def of_weight(x: Tensor, g: Tensor) -> PerSampleGradients:  # in the type of x, on which the default eps depends
        return Instantiated(sum_tokens(F.rms_norm(x, shape, eps=eps).to(g.dtype).mul_(g), weight.dim()))

    return _layer(recorder, partial(function, x, shape, weight, eps), x, weight, None, of_weight)


def _group_norm(
    recorder: Recorder,
    function: Any,
    x: Tensor,
    groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Result:
    def of_weight(x: Tensor, g: Tensor) -> PerSampleGradients:
        return Instantiated(sum_positions(F.group_norm(x.to(g.dtype), groups, eps=eps).mul_(g)))

    call = partial(function, x, groups, weight, bias, eps)
    return _layer(recorder, call, x, weight, bias, of_weight, channels=True)


def _instance_norm(
    recorder: Recorder, function: Any, x: Tensor, *, weight: Any = None, bias: Any = None, **named: Any
) -> Result:
    def of_weight(x: Tensor, g: Tensor) -> PerSampleGradients:
        return Instantiated(sum_positions(F.instance_norm(x.to(g.dtype), eps=named.get("eps", 1e-5)).mul_(g)))

    call = partial(function, x, weight=weight, bias=bias, **named)
    return _layer(recorder, call, x, weight, bias, of_weight, channels=True)


def _layer(
    recorder: Recorder,
    call: Any,
    x: Tensor,
    weight: Any,
    bias: Any,
    of_weight: OfWeight,
    *,
    channels: bool = False,
    **how: bool,
) -> Result:
    """A weight, and a bias of the output's last dimensions, or of ``channels``: dimension 1, positions behind them."""

    def gradients(x: Tensor | None, g: Tensor) -> Gradients:
        if isinstance(bias, Followed):
            yield bias, Instantiated(sum_positions(g) if channels else sum_tokens(g, bias.dim()))
        if isinstance(weight, Followed) and x is not None:
            yield weight, of_weight(x, g)

    return recorder.layer(call, x, (weight, bias), gradients, **how)


# -- values that meet samples ------------------------------------------------------------------------------------------


def _matmul(recorder: Recorder, function: Any, x: Tensor, other: Tensor) -> Result:
    if isinstance(x, Followed) or not isinstance(other, Followed) or other.dim() != 2 or x.dim() < 2:
        return _batched(recorder, function, x, other)
    return _layer(recorder, partial(function, x, other), x, other, None, products, multiplies=True)


def _elementwise(recorder: Recorder, function: Any, *args: Any, **named: Any) -> Result:
    leaves = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
    rows, dims = recorder.rows_of_samples(leaves)
    if rows == 0:
        return NotImplemented
    if rows == recorder.size:
        return function(
            *tree_map(lambda t: _copies(t, rows, dims), args), **tree_map(lambda t: _copies(t, rows, dims), named)
        )

    def by_sample(leaf: Any) -> Any:
        if isinstance(leaf, Followed) or not isinstance(leaf, Tensor) or leaf.dim() < dims:
            return _copies(leaf, rows, dims)
        return leaf.unflatten(0, (recorder.size, -1)) if len(leaf) == rows else leaf.unsqueeze(0)

    return function(*tree_map(by_sample, args), **tree_map(by_sample, named)).flatten(0, 1)


def _in_place(recorder: Recorder, function: Any, target: Tensor, *args: Any, **named: Any) -> Result:
    if isinstance(target, Followed):
        return NotImplemented
    name = function.__name__
    another = getattr(Tensor, f"__{name[3:]}" if name.startswith("__i") else name[:-1])
    result = _elementwise(recorder, another, target.clone(), *args, **named)  # which the backward pass needs
    return result if result is NotImplemented else target.copy_(result)


def _batched(recorder: Recorder, function: Any, *args: Any, **named: Any) -> Result:
    """Products of matrices, one for each row of three or more dimensions."""
    leaves = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
    rows, dims = recorder.rows_of_samples(leaves)
    if rows == 0 or dims < 3 or any(leaf.dim() < 2 for leaf in leaves):
        return NotImplemented
    prepared = partial(_as_rows, rows=rows, dims=dims)
    return function(*tree_map(prepared, args), **tree_map(prepared, named))


def _join(recorder: Recorder, function: Any, tensors: Any, dim: int = 0) -> Result:
    rows, dims = recorder.rows_of_samples([t for t in tensors if not isinstance(t, Followed)])
    if rows == 0 or dim % (dims + (function.__name__ == "stack")) == 0 or any(len(t) != rows for t in tensors):
        return NotImplemented
    return function([_as_rows(t, rows, dims) for t in tensors], dim)


def _repeat(recorder: Recorder, function: Any, value: Any, *sizes: Any) -> Result:
    """Remembers what is repeated: its copies are smaller than gradients of the repetition."""
    if not isinstance(value, Followed):
        return NotImplemented
    result = derived(function(value, *sizes), value)
    new = result.dim() - value.dim()
    source = value if new == 0 else derived(plain(value)[(None,) * new], value)
    if source.dim() and len(source) == 1 and source.shape[1:] == result.shape[1:]:
        result.repeated = source, result._version
    return result


def _copies(leaf: Any, rows: int, dims: int) -> Any:
    """A followed value for an operation that broadcasts it over ``rows`` of ``dims`` dimensions: (B, ...), or, where a
    sample has k > 1 rows, (B, k or 1, ...). Others as they are.
    """
    if not isinstance(leaf, Followed):
        return leaf
    recorder, extra = leaf.recorder, () if rows == leaf.recorder.size else (1,)
    if leaf.dim() < dims:
        return recorder.copies(leaf, rows, *extra, *[1] * (dims - 1 - leaf.dim()), *leaf.shape)
    if len(leaf) == 1:
        return recorder.copies(leaf, rows, *extra, *leaf.shape[1:])
    if leaf.repeated is not None and leaf.repeated[1] == leaf._version:
        return recorder.copies(leaf.repeated[0], rows, *extra, *leaf.shape[1:])
    each = recorder.rows(leaf)
    return each if rows == recorder.size else each.unflatten(0, (recorder.size, -1))


def _as_rows(leaf: Any, rows: int, dims: int) -> Any:
    """The same for an operation that takes one for each row: (``rows``, ...)."""
    x = _copies(leaf, rows, dims)
    if x is leaf or rows == leaf.recorder.size:
        return x
    return x.expand(-1, rows // leaf.recorder.size, *x.shape[2:]).flatten(0, 1)


RULES |= {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_IN_PLACE.split(), _in_place),
    **dict.fromkeys(("matmul", "__matmul__", "mm"), _matmul),
    **dict.fromkeys(("bmm", "baddbmm", "scaled_dot_product_attention"), _batched),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _join),
    **dict.fromkeys(("expand", "repeat", "broadcast_to", "expand_as"), _repeat),
    "linear": _linear,
    "addmm": _addmm,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
}
SIGNATURES |= {rule: signature(rule) for rule in RULES.values()}
COMPOSED |= {
    "bilinear": _bilinear,
    "multi_head_attention_forward": multi_head_attention,
    "lstm_cell": partial(one_step, "LSTM"),
    "gru_cell": partial(one_step, "GRU"),
    "rnn_tanh_cell": partial(one_step, "RNN_TANH"),
    "rnn_relu_cell": partial(one_step, "RNN_RELU"),
}
