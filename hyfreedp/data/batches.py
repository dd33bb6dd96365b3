"""What a step maps its loss over: records of one form, stacked, each as ``collate_fn([record])`` gives it alone."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from numbers import Integral
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from hyfreedp.checks import check_count

Loss = Callable[[Any], Tensor]  # maps one record, as collate_fn([record]) gives it, to one number
PhysicalBatchSize = int | Callable[[Any], int] | None  # samples at once; or a function of one: how many like it

_VALUES = {bool, int, float, str, bytes, type(None)}
_SHARED = "what all samples share is no part of a batch; let the loss have it from outside"


class Slot:
    """The place of a tensor in the structure of a record, and its number."""

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(frozen=True, eq=False, repr=False)
class Group:
    """Records of one form, stacked.

    Attributes:
        rows: their positions in the batch, int64 of shape ``(n,)``, on the CPU.
        tensors: each of shape ``(n, ...)``, its entries as ``collate_fn([record])`` gave them.
        form: the structure of one record, with a :class:`Slot` for each tensor.
    """

    rows: Tensor
    tensors: list[Tensor]
    form: Any

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, tensors: Sequence[Tensor]) -> Any:
        """One record of these tensors, made anew each time: what a loss writes into one is in no other."""

        def made(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return tensors[leaf.index]
            return leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

        return map_leaves(made, self.form)

    def take(self, rows: Tensor | slice) -> Group:
        """Some of the records, by their places in the group."""
        some = [t[rows if isinstance(rows, slice) else rows.to(t.device, non_blocking=True)] for t in self.tensors]
        return replace(self, rows=self.rows[rows], tensors=some)

    def to(self, device: torch.device | str, **options: Any) -> Group:
        return self._moved(lambda tensor: tensor.to(device, **options))

    def pin_memory(self) -> Group:
        return self._moved(Tensor.pin_memory)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Group:
        form = map_leaves(lambda leaf: move(leaf) if isinstance(leaf, Tensor) else leaf, self.form)
        return replace(self, tensors=[move(tensor) for tensor in self.tensors], form=form)


@dataclass(frozen=True, eq=False, repr=False)
class Records:
    """A batch whose records were collated one by one: so many samples, in groups.

    With ``owners`` each sample is the tuple of one owner's records.
    """

    groups: list[Group]
    size: int
    owners: bool = False

    def __len__(self) -> int:
        return self.size

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Records:
        return replace(self, groups=[group.to(device, non_blocking=non_blocking) for group in self.groups])

    def pin_memory(self) -> Records:
        return replace(self, groups=[group.pin_memory() for group in self.groups])

    def __getitem__(self, _: Any) -> NoReturn:  # also of iteration
        raise TypeError(
            "a batch of records that were collated one by one is not taken apart: pass it to optimizer.step as it is, "
            "whose loss gets each record as collate_fn([record]) gives it; batch.to(device) moves it"
        )


def stack_records(records: Iterable[Any], *, owners: bool = False) -> Records:
    """The records of a batch, grouped by shapes, types, devices and all else that is no tensor.

    Each is copied before the next is asked for, which may be made in the same memory. A group of its own has what
    cannot be stacked (sparse, nested and quantised tensors) or compared (other objects than numbers and strings).
    """
    alike: dict[Hashable, tuple[Any, list[int], list[list[Tensor]]]] = {}
    for row, record in enumerate(records):
        tensors, form = _copied(record)
        shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        _, rows, stacked = alike.setdefault((shapes, _key(form, _value)), (form, [], []))
        rows.append(row)
        stacked.append(tensors)
    groups = [
        Group(torch.tensor(rows), [torch.stack(column) for column in zip(*stacked, strict=True)], form)
        for form, rows, stacked in alike.values()
    ]
    return Records(groups, sum(map(len, groups)), owners)


def groups_of(batch: Any) -> list[Group]:
    """The groups of a batch; of a plain one each record is a batch of one row. None of an empty batch."""
    if isinstance(batch, Records):
        return batch.groups
    size, parts, slots = batch_length(batch), leaves(batch), map(Slot, count())

    def row_of(row: int) -> Any:
        is_leaf = lambda part: any(leaf is part for leaf in leaves(part))  # noqa: E731
        return map_leaves(lambda leaf: leaf[row : row + 1], batch, is_leaf)

    if not all(isinstance(part, Tensor) for part in parts):
        return stack_records(map(row_of, range(size))).groups
    tensors = [tensor.unsqueeze(1) for tensor in parts]
    return [Group(torch.arange(size), tensors, map_leaves(lambda _: next(slots), batch))] if size else []


def batch_length(batch: Any) -> int:
    """Number of samples in a batch: the first dimension of every tensor in it, unless its records are apart already.

    Raises:
        TypeError: the batch holds no tensor, or something that cannot be divided among samples.
        ValueError: a tensor is a scalar, or has another first dimension than the first; or a list without tensors has
            not one entry per sample.
    """
    if isinstance(batch, Records):
        return len(batch)
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
    if type(value) in _VALUES or isinstance(value, Tensor | list | tuple):
        return None
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def leaves(value: Any) -> list[Any]:
    """What a plain batch is made of: tensors, lists without any, and other values, in order."""
    named = fields_of(value)
    if named is None and not isinstance(value, list | tuple):
        return [value]
    found = [leaf for child in (value if named is None else named.values()) for leaf in leaves(child)]
    return found if named is not None or any(isinstance(leaf, Tensor) for leaf in found) else [value]


def map_leaves(function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> Any:
    """A structure of mappings, dataclasses, tuples and lists, made again with ``function`` of each of its leaves."""
    kind: Any = type(value)
    if is_leaf(value) or ((named := fields_of(value)) is None and not isinstance(value, list | tuple)):
        return function(value)
    if named is None:
        parts = [map_leaves(function, part, is_leaf) for part in value]
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    entries = {key: map_leaves(function, part, is_leaf) for key, part in named.items()}
    if isinstance(value, Mapping):
        try:
            return kind(entries)  # such as the BatchEncoding of a tokenizer
        except TypeError:  # its constructor takes something else
            return entries
    made = object.__new__(kind)  # fields alone: other attributes may be computed from more than the record
    for name, part in entries.items():
        object.__setattr__(made, name, part)  # also of a frozen one
    return made


def of_one_form(records: Sequence[Any]) -> bool:
    """Whether records are tensors, arrays and numbers of the same types and shapes, in the same structure."""
    first = _key(records[0], _type)
    return all(_key(record, _type) == first for record in records)  # also the first, which other objects make unequal


def pieces(groups: Iterable[Group], size: PhysicalBatchSize) -> list[Group]:
    """The groups, cut for memory into at most so many samples, or as many as ``size`` returns for one of them."""
    found: list[Group] = []
    for group in groups:
        most = size(group.record([tensor[0] for tensor in group.tensors])) if callable(size) else size
        most = len(group) if size is None else check_count("what max_physical_batch_size returns", most, 1)
        found += [group.take(slice(start, start + most)) for start in range(0, len(group), most)]
    return found


def token_budget(tokens_of: Callable[[Any], int], budget: int) -> Callable[[Any], int]:
    """For ``max_physical_batch_size``: as many records at once as have ``budget`` tokens; many short ones or few long.

    Args:
        tokens_of: the width of one record, by its shape, not its values, such as
            ``lambda record: record["input_ids"].shape[1]``.
        budget: tokens at once, at least 1. A longer record is taken alone.
    """
    check_count("budget", budget, 1)
    named = "what tokens_of returns, as record['input_ids'].shape[1],"
    return lambda record: max(1, budget // max(1, check_count(named, tokens_of(record), 0)))


def check_physical_batch_size(size: object) -> None:
    """Refuse what is neither a size nor a function."""
    if not (size is None or callable(size) or (isinstance(size, Integral) and int(size) >= 1 and size is not True)):
        raise ValueError(
            "max_physical_batch_size must be an integer of at least 1, None, or a function from one record to how many "
            f"like it are taken at once, got {size!r}"
        )


def _copied(record: Any) -> tuple[list[Tensor], Any]:
    """A copy of a record: its tensors that can be stacked, plain ones also of a subclass, and the rest."""
    tensors: list[Tensor] = []

    def copied(leaf: Any) -> Any:
        if not _stacks(leaf):
            return leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
        tensors.append(leaf.as_subclass(Tensor).clone())
        return Slot(len(tensors) - 1)

    form = map_leaves(copied, record)
    return tensors, form


def _stacks(leaf: Any) -> bool:
    """Whether a value is a tensor that holds its numbers itself, at strides."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        return False
    return type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__  # a wrapper of others has one of its own


def _key(value: Any, key_of: Callable[[Any], Hashable]) -> Hashable:
    """Equal for values of the same structure whose leaves have equal keys."""
    if (named := fields_of(value)) is not None:
        return type(value), *[(_value(name), _key(part, key_of)) for name, part in named.items()]
    if isinstance(value, list | tuple):
        return type(value), *[_key(part, key_of) for part in value]
    return key_of(value)


def _value(leaf: Any) -> Hashable:
    """Equal for the same number, string or slot; of any other object equal to nothing, as its parts are not known."""
    if type(leaf) is float:
        return leaf.hex()
    return Slot if type(leaf) is Slot else (type(leaf), leaf) if type(leaf) in _VALUES else object()


def _type(leaf: Any) -> Hashable:
    """Equal for what torch's default collate stacks without a change of type; of anything else equal to nothing."""
    if _stacks(leaf) or isinstance(leaf, np.ndarray | np.number | np.bool_):
        return type(leaf), leaf.dtype, leaf.shape
    return type(leaf) if isinstance(leaf, int | float) else object()
