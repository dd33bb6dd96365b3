"""Checks that all processes hold the same records in the same order, since each takes its part of a batch by index.

If orders differ, say after a split without a seed or ``os.listdir``, a record may be in several parts and count several
times. So the processes compare keyed hashes of a few records.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyfreedp.data.batches import is_plain, key_of, leaves
from hyfreedp.noise import NoiseGenerator
from hyfreedp.noise.random_states import random_states_of
from hyfreedp.processes.group import Processes

_COMPARED_RECORDS = 8  # two random orders agree in all of these with probability N^-8


def check_same_records(processes: Processes, dataset: Any, generator: NoiseGenerator, device: torch.device) -> None:
    """ValueError if the data sets of the processes differ in one of a few records, chosen at random.

    Random augmentation does not matter, since all processes draw the same random numbers for it. Records that differ
    from one access to the next, or hold anything but numbers, text and arrays of numbers, are skipped. All processes
    must have the same number of records, and the same ``generator``, which chooses records and the key of the hash.
    """
    if processes.size == 1:
        return
    rows = (generator.child("rows").uniform(_COMPARED_RECORDS) * len(dataset)).long().tolist()

    def digest(row: int) -> str | None:
        with random_states_of(generator.child("random", row).key, device):
            record = dataset[row]
            form, contents = key_of(record, type), [_content(leaf) for leaf in leaves(record)]
        if None in contents or form != key_of(record, type):  # names that are other objects get a new key each time
            return None
        return hashlib.blake2b(repr((form, contents)).encode(), key=generator.child("hash").key).hexdigest()

    with processes.all_or_none():
        twice = [(digest(row), digest(row)) for row in rows]
    digests = [first if first == second else None for first, second in twice]
    of_rank_0, *of_others = processes.gather(digests)
    for rank, theirs in enumerate(of_others, start=1):
        for row, here, there in zip(rows, of_rank_0, theirs, strict=True):
            if None not in (here, there) and here != there:
                raise ValueError(
                    f"data_loader must be over the same records in the same order on every process, but record {row} "
                    f"of rank 0 is not that of rank {rank}: give all of them the whole data set, sort what lists files "
                    "(sorted(os.listdir(...))), and seed what splits (generator=torch.Generator().manual_seed(0))"
                )


def _content(leaf: Any) -> str | None:
    """A text that is the same for the same number, text or array on every process; None for other objects."""
    if isinstance(leaf, Tensor) and is_plain(leaf):
        plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return f"{leaf.dtype} {tuple(leaf.shape)} {plain.reshape(-1).view(torch.uint8).numpy().tobytes()!r}"
    if isinstance(leaf, str | bytes | int | float | complex | type(None)):
        return repr(leaf)
    if isinstance(leaf, Tensor) or not (hasattr(leaf, "__array__") or hasattr(leaf, "__array_interface__")):
        return None
    array = np.asarray(leaf)
    return None if array.dtype.hasobject else f"{array.dtype} {array.shape} {array.tobytes()!r}"
