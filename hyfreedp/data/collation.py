"""Does a row of a batch depend on its own record alone? Looked for by collating some records with others, and without.

Clipping bounds what one row contributes. Where collation mixes records (MixUp, CutMix), scales by a statistic of the
batch, or makes several rows of a record, one record moves many rows, and clipping bounds nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyfreedp.data.batches import tensors_in
from hyfreedp.noise import NoiseGenerator
from hyfreedp.running.random_states import random_states, random_states_of

_RECORDS = 16  # that are looked at, of a batch


def check_rows_apart(
    collate: Callable[[list[Any]], Any], records: list[Any], generator: NoiseGenerator, device: torch.device
) -> None:
    """Refuse a collate function by which the row of one record depends on others.

    Half of some records are collated among all of them, among copies of themselves, and alone. Random numbers are the
    same, so no row may differ; alone only where none are drawn, since fewer records draw fewer. A tensor that is padded
    to the longest record keeps its shape with one of the halves, and is compared there.

    Args:
        collate: makes a batch of a list of records; it gets copies.
        records: of a batch, or positions in a data set that makes batches itself.
        generator: chooses records and random numbers.
        device: whose random numbers are set too.

    Raises:
        ValueError: a row changed with the other records, or its width did so for no record's sake.
    """
    chosen = generator.permutation(len(records))[:_RECORDS].tolist()
    size = len(chosen)
    if size < 2:
        return

    def collated(rows: list[int]) -> tuple[list[Tensor], bool]:
        with random_states_of(generator.child("collation").key, device):
            before = random_states(device)
            batch = collate([copy.deepcopy(records[chosen[row]]) for row in rows])
            return list(tensors_in(batch)), not before.same(random_states(device))

    whole, draws = collated(list(range(size)))
    seen = [False] * len(whole)
    for half in (list(range(size // 2)), list(range(size // 2, size))):
        copies = [row if row in half else half[row % len(half)] for row in range(size)]
        for rows, places in [(copies, half), *([] if draws else [(half, list(range(len(half))))])]:
            apart, _ = collated(rows)
            for number, (one, other) in enumerate(zip(whole, apart, strict=False)):
                if one.shape[:1] != (size,) or other.shape != (len(rows), *one.shape[1:]):
                    continue
                seen[number] = True
                here, there = (value.to(torch.complex128) for value in (one[half], other[places]))  # of any type
                if not torch.allclose(here, there, rtol=1e-4, atol=1e-6, equal_nan=True):
                    raise ValueError(_MIXES.format("values"))
    if not all(seen):
        raise ValueError(_MIXES.format("shapes"))


_MIXES = (
    "collate_fn must make one row of each record, of its own record alone, but {} of rows changed with the other "
    "records, so clipping bounds nothing: take no statistics over the batch, mix no records (MixUp, CutMix), pack no "
    "two into one row, and draw random numbers from torch, NumPy or Python"
)
