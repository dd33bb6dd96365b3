"""Operations that move rows by what tensors hold, and not by their shapes: do they leave each sample's rows in place?

Rows gathered by a mask, or tokens routed to experts, may be as many as before and yet be another sample's, in some
batches and not in others. So the graph of the losses is looked through in every pass, and where such an operation moves
rows of dimension 0 from one sample to another, or cannot be looked into, nothing is followed any more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

_OPAQUE = frozenset("MaskedSelect MaskedScatter Take Put PackPaddedSequence".split())
_ALONG = frozenset(  # one dimension, by numbers that they save
    "Gather Scatter ScatterAdd ScatterReduce IndexAdd IndexCopy IndexFill IndexReduce "
    "Sort Topk Kthvalue Mode Median".split()
)


def keeps_rows(node: Node, size: int) -> bool:
    """Whether the rows of ``size`` samples, which are those of dimension 0, stay theirs in this operation."""
    if isinstance(node, BackwardCFunction):  # code of the model's own
        return False
    saved: Any = node
    name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
    if name in _OPAQUE:
        return False
    if name in _ALONG:
        return not _is_first(saved._saved_dim, node)
    if name == "IndexSelect":
        first = _is_first(saved._saved_dim, node)
        return not first or _own([saved._saved_index], int(saved._saved_self_sym_sizes[0]), size)
    if name == "Index":
        return _own(saved._saved_indices, int(saved._saved_self_sym_sizes[0]), size)
    if name == "IndexPut":
        return _own(saved._saved_indices, _shape(node)[0], size)
    return True


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


def _is_first(dimension: int, node: Node) -> bool:
    """Whether a saved dimension, which may be negative as an unsigned number, is dimension 0."""
    signed = dimension - 2**64 if dimension >= 2**63 else dimension
    return signed == 0 or signed == -len(_shape(node))


def _shape(node: Node) -> tuple[int, ...]:
    """Of the operation's first output."""
    return tuple(node._input_metadata[0].shape)  # type: ignore[attr-defined]
