"""Which operations leave each sample's rows in place? Those of a list; any other may move them.

Rows gathered by a mask, tokens routed to experts, or rows multiplied by a matrix made of data may be as many as before
and yet be another sample's, in some batches and not in others. So the graph of the losses is looked through in every
pass, and where it has an operation that is not listed, or moves rows of dimension 0, nothing is followed any more.
Operations that move rows by shapes alone (views, permutations, concatenations) are listed: they move them in every
batch alike, so the comparison with autograd shows it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

_KEEP = frozenset(  # elementwise, reductions, layers and views; names without "Backward0"
    "Abs Acos Acosh Add Addcdiv Addcmul Alias Amax Amin Angle AsStrided Asin Asinh Atan Atan2 Atanh Cat "
    "Ceil Celu Clamp ClampMax ClampMin Clone Complex Copy CopyBackwards CopySlices Cos Cosh Deg2Rad Detach "
    "Diagonal Digamma Div Elu Erf Erfc Erfinv Exp Exp2 Expand Expm1 Fill Floor Fmax Fmin Fmod Frac Gelu Glu "
    "Hardshrink Hardsigmoid Hardswish Hardtanh HuberLoss Hypot Imag Isnan LeakyRelu Lerp Lgamma LiftFresh "
    "LinalgVectorNorm Log Log10 Log1P Log2 LogSigmoid Logaddexp Logsumexp Logit MaskedFill Maximum Mean "
    "Minimum Mish MseLoss Mul NanToNum NativeDropout Neg Norm Polar Pow Prod Real Reciprocal Relu Remainder "
    "Repeat Reshape ReshapeAlias Round Rrelu Rsqrt Rsub Select Selu Sgn Sigmoid Sign Silu Sin Sinc Sinh "
    "Slice SmoothL1Loss SoftMarginLoss Softplus Softshrink Split SplitWithSizes Sqrt Squeeze Stack Std "
    "StdMean Sub Sum Tan Tanh Threshold ToCopy Tril Triu Trunc Unbind Unfold UnsafeSplit UnsafeView "
    "Unsqueeze Var VarMean View ViewAsComplex ViewAsReal Where Xlogy Zero BinaryCrossEntropy "
    "BinaryCrossEntropyWithLogits KlDiv NllLoss NllLoss2D AdaptiveAvgPool2D AdaptiveAvgPool3D "
    "AdaptiveMaxPool2D AdaptiveMaxPool3D AvgPool2D AvgPool3D ConstantPadNd Convolution CudnnBatchNorm "
    "CudnnConvolution FusedRmsNorm GridSampler2D Im2Col Col2Im MaxPool2DWithIndices MaxPool3DWithIndices "
    "MkldnnConvolution NativeBatchNorm NativeGroupNorm NativeLayerNorm PixelShuffle PixelUnshuffle "
    "PreluKernel ReflectionPad1D ReflectionPad2D ReplicationPad1D ReplicationPad2D UpsampleBicubic2D "
    "UpsampleBicubic2DAa UpsampleBilinear2D UpsampleBilinear2DAa UpsampleLinear1D UpsampleNearest1D "
    "UpsampleNearest2D UpsampleNearestExact2D UpsampleTrilinear3D CudnnRnn MkldnnRnnLayer ThnnFusedLstmCell "
    "ThnnFusedGruCell".split()
)
_ALONG = frozenset(  # which mix or move along one dimension, by the number that they save
    "Cummax Cummin Cumprod Cumsum FftC2C FftC2R FftR2C Flip Gather IndexAdd IndexCopy IndexFill IndexReduce "
    "Kthvalue LogSoftmax Logcumsumexp Max Median Min Mode Roll SafeSoftmax Scatter ScatterAdd ScatterReduce "
    "Softmax Sort Topk".split()
)

_MOVES = {*_ALONG, *"Select Slice Split SplitWithSizes Unbind UnsafeSplit Cat Stack Index IndexPut IndexSelect".split()}


def keeps_rows(node: Node, size: int) -> bool:
    """Whether the rows of ``size`` samples, which are those of dimension 0, stay theirs in this operation."""
    if isinstance(node, BackwardCFunction):  # code of the model's own
        return False
    saved: Any = node
    name = _operation(node.name())
    if name in _KEEP:
        return True
    if name in _ALONG:
        return not any(_is_first(dim, node) for dim in _dimensions(node))
    if name in ("Permute", "Transpose", "T"):  # to the last dimension, where a product from the right may mix rows
        return size == 1 or not _to_last(node, name)
    if name in ("Mm", "Addmm", "Mv", "Addmv"):  # rows are those of the left matrix; a right one would mix them
        return node.next_functions[-1][0] is None
    if name in ("Bmm", "Baddbmm") or name.startswith("ScaledDotProduct"):  # one product for each row of dimension 0
        return _shape(node)[0] % size == 0
    if name == "IndexSelect":
        first = _is_first(saved._saved_dim, node)
        return not first or _own([saved._saved_index], int(saved._saved_self_sym_sizes[0]), size)
    if name == "Index":
        return _own(saved._saved_indices, int(saved._saved_self_sym_sizes[0]), size)
    if name == "IndexPut":
        return _own(saved._saved_indices, _shape(node)[0], size)
    return False


def moves(node: Any) -> set[tuple[str, int, int]]:
    """What chooses, joins or moves along a dimension, by numbers of Python's or of tensors: the order of lengths, say.

    Tensors' numbers along dimension 0 are left to :func:`keeps_rows`.

    Returns:
        Operation, dimension, and its size.
    """
    name = "" if isinstance(node, BackwardCFunction) else _operation(node.name())
    if name not in _MOVES:
        return set()
    shape = _shape(node)
    sizes = tuple(getattr(node, "_saved_self_sym_sizes", None) or shape)
    if name in ("Index", "IndexPut"):
        dims = [d for d, index in enumerate(node._saved_indices) if index is not None]
    else:
        dims = [_signed(d) for d in _dimensions(node)]
    if name == "Unbind":
        at = dims[0] % (len(shape) + 1)
        sizes = (*shape[:at], len(node._input_metadata), *shape[at:])
    if not sizes or (name == "Slice" and shape == sizes):
        return set()
    dims = [d % len(sizes) for d in dims if d % len(sizes) or not name.startswith("Index")]
    return {(name, d, sizes[d]) for d in dims}


@cache
def _operation(name: str) -> str:
    """The operation of a node's name."""
    return name.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def _own(indices: Any, rows: int, size: int) -> bool:
    """Whether an index takes rows from each of ``size`` samples, equally many and in the order of the samples."""
    if not len(indices) or indices[0] is None:
        return True
    numbers: list[Tensor] = []
    for index in indices:
        if index is not None:
            numbers += index.nonzero(as_tuple=True) if index.dtype in (torch.bool, torch.uint8) else [index]
    picked = torch.broadcast_tensors(*numbers)[0]
    if picked.dim() == 0 or rows % size or len(picked) % size or len(picked) == 0:
        return False
    owners = (picked % rows).div(rows // size, rounding_mode="floor")
    expected = torch.arange(size, device=picked.device).repeat_interleave(len(picked) // size)
    return bool((owners.flatten(1) if owners.dim() > 1 else owners[:, None]).eq(expected[:, None]).all())


def _to_last(node: Any, name: str) -> bool:
    """Whether a permutation puts dimension 0 last."""
    count = len(_shape(node))
    if name == "T":
        return count > 1
    if name == "Permute":
        return count > 1 and _is_first(node._saved_dims[-1], node)
    dims = [_signed(node._saved_dim0) % count, _signed(node._saved_dim1) % count] if count else []
    return sorted(dims) == [0, count - 1] and count > 1


def _dimensions(node: Any) -> tuple[int, ...]:
    """Those along which an operation works, as autograd has saved them; (0,) where it works along all."""
    dims = getattr(node, "_saved_dims", None) or getattr(node, "_saved_dim", 0)
    return dims if isinstance(dims, tuple) else (dims,)


def _is_first(dimension: int, node: Any) -> bool:
    """Whether a saved dimension of an operation's input is dimension 0."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None and isinstance(getattr(node, "_saved_self", None), Tensor):
        sizes = node._saved_self.shape
    return _signed(dimension) in (0, -len(_shape(node) if sizes is None else sizes))


def _signed(dimension: int) -> int:
    """A dimension, which autograd may have saved as an unsigned number."""
    return dimension - 2**64 if dimension >= 2**63 else dimension


def _shape(node: Node) -> tuple[int, ...]:
    """Of the operation's first output."""
    return tuple(node._input_metadata[0].shape)  # type: ignore[attr-defined]
