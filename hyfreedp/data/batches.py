"""The batches over which a step maps its loss: records, each as ``collate_fn([record])`` returned it, stacked."""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor

from hyfreedp.checks import check_count

Loss = Callable[[Any], Tensor]  # maps one record, as collate_fn([record]) returns it, to one number
PhysicalBatchSize = int | Callable[[Any], int] | None  # most samples at once, or a function from a record to it

_PLAIN_TYPES = {bool, int, float, str, bytes, type(None)}
_WHOLE = (
    "a batch of records that were collated one by one is not taken apart: pass it to optimizer.step as it is, whose "
    "loss gets each record as collate_fn([record]) gives it; batch.to(device) moves it"
)
_SHARED = "what all samples share is no part of a batch; let the loss have it from outside"


class Slot(int):
    """Stands for the tensor of this number in the structure of a record."""


@dataclass(frozen=True, eq=False, repr=False)
class Group:
    """Stacked records of the same structure, shapes and types."""

    rows: Tensor  # the records' positions in the batch, int64, shape (n,), on the CPU
    tensors: list[Tensor]  # each of shape (n, ...); row i is a tensor of record i, as collate_fn([record]) returned it
    form: Any  # the structure of one record, with a Slot in place of each tensor

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_values(self) -> bool:
        """Whether records also hold other values than tensors, such as strings."""
        return not all(isinstance(leaf, Slot) for leaf in leaves(self.form))

    def record(self, tensors: Sequence[Tensor], meet: Callable[[Tensor], Any] = lambda t: t) -> Any:
        """A record with these tensors. Other values are copied; ``meet`` is called with each tensor in the copies."""
        return map_leaves(lambda leaf: tensors[leaf] if isinstance(leaf, Slot) else copied(leaf, meet), self.form)

    def take(self, rows: Tensor | slice) -> Self:
        """The records at positions ``rows`` within the group."""
        some = [t[rows if isinstance(rows, slice) else rows.to(t.device, non_blocking=True)] for t in self.tensors]
        return replace(self, rows=self.rows[rows], tensors=some)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """The same records, with ``move`` applied to each tensor."""
        form = map_leaves(lambda leaf: move(leaf) if isinstance(leaf, Tensor) else leaf, self.form)
        return replace(self, tensors=[move(tensor) for tensor in self.tensors], form=form)


@dataclass(frozen=True, eq=False, repr=False)
class Records:
    """A batch of ``size`` samples, collated record by record; if ``owners``, each is a tuple of an owner's records."""

    groups: list[Group]
    size: int
    owners: bool = False

    def __len__(self) -> int:
        return self.size

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        move = partial(Tensor.to, device=device, non_blocking=non_blocking)
        return replace(self, groups=[group.moved(move) for group in self.groups])

    def pin_memory(self) -> Self:
        return replace(self, groups=[group.moved(Tensor.pin_memory) for group in self.groups])

    def __getitem__(self, _: Any) -> NoReturn:  # iteration, too, calls it
        raise TypeError(_WHOLE)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no {name!r}: {_WHOLE}")


def stack_records(records: Iterable[Any], *, owners: bool = False) -> Records:
    """Stack records that agree in structure, shapes, types, devices and all values that are not tensors.

    Each record is copied before the next is fetched, which may reuse its memory. A record that cannot be stacked
    (sparse, nested and quantised tensors) or compared (objects other than numbers and strings) is a group of its own.
    """
    by_form: dict[Hashable, tuple[Any, list[int], list[list[Tensor]]]] = {}
    for row, record in enumerate(records):
        tensors, form = _taken_apart(record)
        shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        _, rows, stacked = by_form.setdefault((shapes, key_of(form, _value)), (form, [], []))
        rows.append(row)
        stacked.append(tensors)
    groups = [
        Group(torch.tensor(rows), [torch.stack(column) for column in zip(*stacked, strict=True)], form)
        for form, rows, stacked in by_form.values()
    ]
    return Records(groups, sum(map(len, groups)), owners)


def groups_of(batch: Any) -> list[Group]:
    """The groups of a batch, [] if it is empty; each record of a plain batch becomes a batch of one row."""
    if isinstance(batch, Records):
        return batch.groups
    size, columns = batch_length(batch), leaves(batch, _is_column)
    if size == 0:
        return []
    if all(isinstance(column, Tensor) for column in columns):
        slots = map(Slot, count())
        form = map_leaves(lambda _: next(slots), batch)
        return [Group(torch.arange(size), [tensor.unsqueeze(1) for tensor in columns], form)]
    rows = (slice(row, row + 1) for row in range(size))
    return stack_records(map_leaves(itemgetter(row), batch, _is_column) for row in rows).groups


def batch_length(batch: Any) -> int:
    """Number of samples in a batch; in a plain one, the size of dimension 0 of every tensor.

    TypeError if it has no tensor, or a value that cannot be divided among samples; ValueError if tensors, or lists
    without tensors, have different lengths.
    """
    if isinstance(batch, Records):
        return len(batch)
    columns = leaves(batch, _is_column)
    tensors = [column for column in columns if isinstance(column, Tensor)]
    if not tensors:
        raise TypeError(
            "batch must be a tensor, or a tuple, list, mapping or dataclass that holds one, whose first dimension "
            f"counts the samples, got {type(batch).__name__}: let the loader's collate_fn return a dict of tensors"
        )
    size = len(tensors[0]) if tensors[0].dim() else 0
    needed = "batch must hold tensors, whose first dimension counts the samples, and lists with one entry per sample"
    for column in columns:
        if not isinstance(column, Tensor | list | tuple):
            raise TypeError(f"{needed}, got {type(column).__name__}, which cannot be divided among samples: {_SHARED}")
        shape = tuple(column.shape) if isinstance(column, Tensor) else (len(column),)
        if shape[:1] != (size,):
            raise ValueError(f"{needed}, got one of shape {shape} beside {size} samples: {_SHARED}")
    return size


def fields_of(value: Any) -> Mapping[Any, Any] | None:
    """The entries of a mapping or a dataclass; None for anything else."""
    if type(value) in _PLAIN_TYPES or isinstance(value, Tensor | list | tuple):
        return None
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def leaves(value: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> list[Any]:
    """The leaves of a structure, in order, see :func:`map_leaves`."""
    found: list[Any] = []
    map_leaves(found.append, value, is_leaf)
    return found


def _is_column(value: Any) -> bool:
    """Whether a part of a plain batch is a list without tensors, which holds one entry of each sample."""
    return isinstance(value, list | tuple) and not any(isinstance(leaf, Tensor) for leaf in leaves(value))


def map_leaves(function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> Any:
    """A copy of a structure of mappings, dataclasses, tuples and lists, with ``function`` applied to each leaf."""
    kind: Any = type(value)
    named = fields_of(value)
    if is_leaf(value) or (named is None and not isinstance(value, list | tuple)):
        return function(value)
    if named is None:
        parts = [map_leaves(function, part, is_leaf) for part in value]
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    entries = {key: map_leaves(function, part, is_leaf) for key, part in named.items()}
    if isinstance(value, Mapping):
        try:
            return kind(entries)  # such as the BatchEncoding of a tokenizer
        except TypeError:  # its constructor takes other arguments
            return entries
    made = object.__new__(kind)  # copies fields only: other attributes may depend on more than this record
    for name, part in entries.items():
        object.__setattr__(made, name, part)  # works for a frozen dataclass, too
    return made


def of_one_form(records: Sequence[Any]) -> bool:
    """Whether records have the same structure of tensors, arrays and numbers, with the same types and shapes."""
    first = key_of(records[0], _type)
    # The first is compared with itself, too: other objects get a new key each time, which equals no other.
    return all(key_of(record, _type) == first for record in records)


def token_budget(tokens_of: Callable[[Any], int], budget: int) -> Callable[[Any], int]:
    """A function for ``max_physical_batch_size``: as many records as have ``budget`` tokens together, at least one.

    Args:
        tokens_of: maps a record to its number of tokens, by its shape and not its values, such as
            ``lambda record: record["input_ids"].shape[1]``.
    """
    check_count("budget", budget, 1)
    named = "what tokens_of returns, as record['input_ids'].shape[1],"
    return lambda record: max(1, budget // max(1, check_count(named, tokens_of(record), 0)))


def copied(leaf: Any, meet: Callable[[Tensor], Any] = lambda t: t) -> Any:
    """A copy of a leaf that shares no memory with it; ``meet`` is called with each tensor in the copy."""
    parts: dict[int, Any] = {}  # deepcopy's memory of all that it has copied
    made = leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf, parts)
    for tensor in [part for part in (made, *parts.values()) if isinstance(part, Tensor)]:
        meet(tensor)
    return made


def _taken_apart(record: Any) -> tuple[list[Tensor], Any]:
    """Copies of a record's stackable tensors, as plain tensors, and its structure with slots in their places."""
    tensors: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if not is_plain(leaf):
            return copied(leaf)
        tensors.append(leaf.as_subclass(Tensor).clone())
        return Slot(len(tensors) - 1)

    return tensors, map_leaves(take, record)


def is_plain(leaf: Any) -> bool:
    """Whether a value is a strided tensor with storage of its own, so that it can be stacked."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        return False
    return type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__  # wrapper subclasses override it


def key_of(value: Any, leaf_key: Callable[[Any], Hashable]) -> Hashable:
    """A dictionary key that is equal for values of the same structure whose leaves have equal keys."""
    if (named := fields_of(value)) is not None:
        return type(value), *[(key_of(name, _value), key_of(part, leaf_key)) for name, part in named.items()]
    if isinstance(value, list | tuple):
        return type(value), *[key_of(part, leaf_key) for part in value]
    return leaf_key(value)


def _value(leaf: Any) -> Hashable:
    """A key that is equal for equal numbers or strings, and for all slots; the key of another object equals none."""
    if type(leaf) is float:
        return leaf.hex()
    if type(leaf) is Slot:
        return Slot
    return (type(leaf), leaf) if type(leaf) in _PLAIN_TYPES else object()


def _type(leaf: Any) -> Hashable:
    """A key that is equal for leaves that torch's default_collate can stack; the key of another object equals none."""
    if is_plain(leaf) or isinstance(leaf, np.ndarray | np.number | np.bool_):
        return type(leaf), leaf.dtype, leaf.shape
    return type(leaf) if isinstance(leaf, int | float) else object()
