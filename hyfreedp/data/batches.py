"""Batches of any structure: how many samples, some of them, and the pieces in which one goes through the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from hyfreedp.running.checks import check_count

PerSampleLoss = Callable[[Any], Tensor]  # maps a batch, or samples of it, to losses of shape (B,), each of its own
# Maps a batch to its pieces, each a list or tensor of samples' positions in the batch.
Partition = Callable[[Any], Sequence[Tensor | Sequence[int]]]
PhysicalBatchSize = int | Partition | None

_SHARED = "what all samples share is no part of a batch; let per_sample_loss have it from outside"


def batch_length(batch: Any) -> int:
    """Number of samples in a batch: the first dimension of every tensor in it.

    Raises:
        TypeError: the batch holds no tensor, or something that cannot be divided among samples.
        ValueError: a tensor is a scalar, or has another first dimension than the first; or a list without tensors has
            not one entry per sample.
    """
    parts = leaves(batch)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if not tensors:
        raise TypeError(
            "batch must be a tensor, or a tuple, list, mapping or dataclass that holds one, whose first dimension "
            f"counts the samples, got {type(batch).__name__}: let the loader's collate_fn return a dict of tensors"
        )
    size = tensors[0].shape[:1]
    wrong = next((tensor for tensor in tensors if tensor.shape[:1] != size or not size), None)
    if wrong is not None:
        seen = f"one of shape {tuple(wrong.shape)}" + (f" beside {size[0]} samples" if size else "")
        raise ValueError(f"batch must hold tensors whose first dimension counts the samples, got {seen}: {_SHARED}")
    for leaf in parts if len(parts) > len(tensors) else ():
        if isinstance(leaf, list | tuple) and len(leaf) != size[0]:
            seen = f"{len(leaf)} entries beside {size[0]} samples"
            raise ValueError(f"batch must hold lists with one entry per sample, got {seen}: {_SHARED}")
        if not isinstance(leaf, Tensor | list | tuple):
            raise TypeError(
                f"batch must hold tensors, and lists with one entry per sample, got {type(leaf).__name__}, which "
                f"cannot be divided among samples: {_SHARED}"
            )
    return size[0]


def fields_of(value: Any) -> Mapping[Any, Any] | None:
    """The entries of a mapping or a dataclass; None of anything else."""
    if isinstance(value, list | tuple):
        return None
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def leaves(value: Any) -> list[Any]:
    """What a batch is made of: tensors, lists without any, and other values, in order."""
    named = fields_of(value)
    if named is None and not isinstance(value, list | tuple):
        return [value]
    found = [leaf for child in (value if named is None else named.values()) for leaf in leaves(child)]
    return found if named is not None or holds_tensors(found) else [value]


def holds_tensors(parts: Iterable[Any]) -> bool:
    """Whether one of the leaves is a tensor."""
    return any(isinstance(part, Tensor) for part in parts)


def take(batch: Any, rows: slice | Tensor) -> Any:
    """The given samples of a batch, in the same structure of tensors, mappings, dataclasses, tuples and lists.

    Args:
        batch: samples are dimension 0 of every tensor; lists without a tensor have one entry per sample.
        rows: a slice, or positions in the batch, int64 of shape ``(n,)`` on the CPU, in any order.
    """
    if isinstance(batch, torch.Tensor):
        return batch[on_device(rows, batch.device)]
    kind: Any = type(batch)
    if (named := fields_of(batch)) is not None:
        entries = {key: take(value, rows) for key, value in named.items()}
        if isinstance(batch, Mapping):
            try:
                return kind(entries)  # such as the BatchEncoding of a tokenizer
            except TypeError:  # its constructor takes something else
                return entries
        piece = object.__new__(kind)  # fields alone: other attributes may be computed from the whole batch
        for name, value in entries.items():
            object.__setattr__(piece, name, value)  # also of a frozen one
        return piece
    if holds_tensors(leaves(batch)):
        parts = [take(child, rows) for child in batch]
        return kind(*parts) if hasattr(batch, "_fields") else kind(parts)
    # a list with one entry per sample, such as file names
    if isinstance(rows, slice):
        return batch[rows]
    chosen = [batch[row] for row in rows.tolist()]
    return tuple(chosen) if isinstance(batch, tuple) else chosen


def on_device(rows: slice | Tensor, device: torch.device) -> slice | Tensor:
    """Positions where they can choose from a tensor on ``device`` without waiting for it."""
    return rows if isinstance(rows, slice) else rows.to(device, non_blocking=True)


def token_budget(lengths_of: Callable[[Any], Tensor], budget: int) -> Partition:
    """Pieces of at most ``budget`` tokens, for ``max_physical_batch_size``: many short samples or few long ones.

    A piece of n samples, the longest of which has T tokens, counts n T. Pieces still have the width to which the whole
    batch was padded, so the loss function cuts them to their longest sample::

        def per_sample_loss(batch):
            width = int(batch["attention_mask"].sum(1).max())
            batch = {key: value[:, :width] for key, value in batch.items()}
            ...

        max_physical_batch_size=token_budget(lambda batch: batch["attention_mask"].sum(1), 8192)

    Samples are taken by falling length, so that too little memory shows at once. A sample longer than the budget is a
    piece of its own.

    Args:
        lengths_of: maps a batch to its samples' numbers of tokens, shape ``(B,)``.
        budget: tokens per piece, at least 1.

    Raises:
        ValueError: ``budget`` is no integer of at least 1; when called, lengths of another shape or negative ones.
    """
    check_count("budget", budget, 1)

    def pieces(batch: Any) -> list[Tensor]:
        lengths, size = torch.as_tensor(lengths_of(batch)).cpu(), batch_length(batch)
        if lengths.shape != (size,):
            raise ValueError(
                f"lengths_of must return one length per sample, shape ({size},), got {tuple(lengths.shape)}"
            )
        if bool((lengths < 0).any()):
            raise ValueError(f"lengths_of must return numbers of tokens, got {lengths.min().item()}")
        longest_first = lengths.argsort(descending=True, stable=True)
        found, start = [], 0
        while start < size:
            longest = max(1, int(lengths[longest_first[start]]))
            found.append(longest_first[start : start + max(1, budget // longest)])
            start += len(found[-1])
        return found

    return pieces


def split_rows(batch: Any, size: PhysicalBatchSize) -> Sequence[slice | Tensor]:
    """The pieces of a batch, each the rows that :func:`take` takes; none of an empty batch.

    Args:
        batch: of B samples.
        size: of the pieces at most, a function that chooses them, or None for one piece.

    Raises:
        ValueError: the function did not return every position 0 ... B - 1 exactly once. A sample that is left out or
            repeated would count for less or more than the noise is made for.
    """
    samples = batch_length(batch)
    if samples == 0:
        return []
    if not callable(size):
        step = size or samples
        return [slice(start, start + step) for start in range(0, samples, step)]
    pieces = [_as_rows(piece) for piece in size(batch)]
    rows = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long)
    outside = rows[(rows < 0) | (rows >= samples)].tolist()
    counts = rows.clamp(0, samples - 1).bincount(minlength=samples).tolist()
    if outside or any(count != 1 for count in counts):
        wrong = next((i for i, count in enumerate(counts) if count != 1), 0)
        problem = f"{outside[0]}, which is none of 0 ... {samples - 1}" if outside else f"{wrong} {counts[wrong]} times"
        raise ValueError(
            f"max_physical_batch_size must return each of the {samples} samples of a batch exactly once in all its "
            f"pieces, got position {problem}"
        )
    return pieces


def check_physical_batch_size(size: object) -> None:
    """Refuse what is neither a size nor a function."""
    if not (size is None or callable(size) or (isinstance(size, Integral) and int(size) >= 1 and size is not True)):
        raise ValueError(
            "max_physical_batch_size must be a function from a batch to its pieces, an integer of at least 1 or None, "
            f"got {size!r}"
        )


def _as_rows(piece: Tensor | Sequence[int]) -> Tensor:
    rows = torch.as_tensor(piece).cpu()
    if rows.dim() != 1 or len(rows) == 0 or rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise ValueError(
            "max_physical_batch_size must return pieces that are non-empty lists of integers or one-dimensional "
            f"integer tensors, got {piece!r}"
        )
    return rows.long()
