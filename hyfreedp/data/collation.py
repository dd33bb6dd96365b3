"""Does a row of a batch depend on its own record alone? Looked for by collating some records with others, and without.

Clipping bounds what one row contributes. Where collation mixes records (MixUp, CutMix), scales by a statistic of the
batch, or makes several rows of a record, one record moves many rows, and clipping bounds nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from hyfreedp.data.batches import leaves
from hyfreedp.noise import NoiseGenerator
from hyfreedp.running.random_states import RandomStates, random_states, random_states_of

_RECORDS = 16  # that are looked at, of a batch


def check_rows_apart(
    collate: Callable[[list[Any]], Any], records: list[Any], generator: NoiseGenerator, device: torch.device
) -> None:
    """Refuse a collate function by which the row of one record depends on others.

    Half of some records are collated among all of them, among copies of themselves, and alone. Random numbers are the
    same, so no row may differ. Where other records draw other numbers, nothing can be compared. A tensor that is padded
    to the longest record keeps its shape with one of the halves, and is compared there.

    Args:
        collate: makes a batch of a list of records; it gets copies.
        records: of a batch, or positions in a data set that makes batches itself.
        generator: chooses records and random numbers.
        device: whose random numbers are set too.
    """
    chosen = generator.permutation(len(records))[:_RECORDS].tolist()
    size = len(chosen)
    if size < 2:
        return

    def collated(rows: list[int]) -> tuple[list[Any], RandomStates]:
        with random_states_of(generator.child("collation").key, device):
            batch = collate([_copy(records[chosen[row]]) for row in rows])
            return leaves(batch), random_states(device)

    whole, drawn = collated(list(range(size)))
    if any(len(one) != size for one in whole if isinstance(one, list | tuple) or (torch.is_tensor(one) and one.dim())):
        raise ValueError(_MIXES.format("the number"))
    for half in (list(range(size // 2)), list(range(size // 2, size))):
        copies = [row if row in half else half[row % len(half)] for row in range(size)]
        for rows, places in ((copies, half), (half, list(range(len(half))))):
            apart, drawn_apart = collated(rows)
            if not drawn.same(drawn_apart):
                continue  # fewer records, or others, draw other random numbers
            for one, other in zip(whole, apart, strict=False):
                if not _same(one, half, other, places):
                    raise ValueError(_MIXES.format("values"))


def _copy(record: Any) -> Any:
    """A copy, since some functions take records apart; itself where it cannot be copied, as with an open file."""
    try:
        return copy.deepcopy(record)
    except TypeError:
        return record


def _same(one: Any, rows: list[int], other: Any, places: list[int]) -> bool:
    """Whether rows of one batch are those of another; also where nothing can be compared, as of another width."""
    if torch.is_tensor(one) and torch.is_tensor(other):
        if one.dim() == 0 or one.shape[1:] != other.shape[1:]:
            return True
        here, there = one[rows], other[places]
        if not any(value.is_floating_point() or value.is_complex() for value in (one, other)):
            return torch.equal(here, there)
        here, there = here.to(torch.complex128), there.to(torch.complex128)  # of any type
        return torch.allclose(here, there, rtol=1e-4, atol=1e-6, equal_nan=True)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = [(one[row], other[place]) for row, place in zip(rows, places, strict=True)]
        return all(here == there for here, there in pairs if isinstance(here, str | int | float))
    return True


_MIXES = (
    "collate_fn must make one row of each record, of its own record alone, but {} of rows changed with the other "
    "records, so clipping bounds nothing: take no statistics over the batch, mix no records (MixUp, CutMix), pack no "
    "two into one row, and draw random numbers from torch, NumPy or Python"
)
