"""The global random numbers of torch, NumPy and Python: kept, put back, and set from a secret key.

Dropout and augmentation draw from these generators, in the order of the batch. Where others know the seed, as after
``torch.manual_seed(0)``, one record more shifts the numbers of all records after it, in a way that others can compute:
the clipped sum then moves by far more than one record's gradient. So each pass of a step and each batch of the loader
sets them from the run's secret key.

**Why a key is enough.** The numbers of a batch's rows are independent of each other, and the observer knows none. Take
two runs that differ in one record. Give every other record the same numbers in both: each run by itself is distributed
as before. So coupled, their clipped sums differ by what the one record contributes, for any numbers, and a mixture of
mechanisms with a guarantee has it too. This holds as well where a record decides how many numbers it takes.

**Limits.** The Mersenne Twister of torch, NumPy and Python is no cipher. Its whole state comes from the key, anew for
every pass, and what it draws is seen through noised sums only.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Generator, Tensor

from hyfreedp.noise.cipher import derive
from hyfreedp.pytorch.devices import backend

_WORDS = slice(3, 3 + 624)  # of the Twister, in torch's state of a CPU as int64


@dataclass(frozen=True)
class RandomStates:
    """States of the global generators: torch's of the CPU and of an accelerator, if there is one, NumPy's, Python's."""

    torch: list[Tensor]
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]

    def same(self, other: RandomStates) -> bool:
        """Whether both are one state, so that nothing was drawn between them."""
        return (
            all(map(torch.equal, self.torch, other.torch))
            and self.numpy[2:] == other.numpy[2:]
            and np.array_equal(self.numpy[1], other.numpy[1])
            and self.python == other.python
        )


def random_states(device: torch.device) -> RandomStates:
    """The present states; those of torch are on the CPU."""
    module = backend(device)
    of_torch = [torch.get_rng_state(), *([] if module is None else [module.get_rng_state(device)])]
    return RandomStates(of_torch, cast(Any, np.random.get_state()), random.getstate())


def set_random_states(device: torch.device, states: RandomStates) -> None:
    """Restore what :func:`random_states` gave."""
    torch.set_rng_state(states.torch[0])
    if (module := backend(device)) is not None:
        module.set_rng_state(states.torch[1], device)
    np.random.set_state(states.numpy)
    random.setstate(states.python)


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Around what draws random numbers: the states are put back."""
    before = random_states(device)
    try:
        yield
    finally:
        set_random_states(device, before)


@contextmanager
def random_states_of(key: bytes, device: torch.device) -> Iterator[None]:
    """Around what draws random numbers: they are those of ``key``, and the caller's states are put back."""
    with random_states_kept(device):
        seed_random_states(key, device)
        yield


def seed_random_states(key: bytes, device: torch.device, coins: bytes | None = None) -> None:
    """Set all states from 256 secret bits, those of NumPy and Python from ``coins`` where they are given.

    (``torch.manual_seed`` takes 32 bits of its seed on a CPU.)
    """
    state = Generator().manual_seed(0).get_state()  # which has drawn nothing
    seed = int.from_bytes(derive(key, "seed")[:8]) >> 1
    words = np.frombuffer(hashlib.shake_256(derive(key, "torch")).digest(4 * 624), np.uint32)
    state.view(torch.int64)[0] = seed  # what torch.initial_seed() tells
    state.view(torch.int64)[_WORDS] = torch.from_numpy(words.astype(np.int64))
    torch.set_rng_state(state)
    if (module := backend(device)) is not None:
        module.set_rng_state(Generator(device).manual_seed(seed).get_state(), device)
    coins = coins or key
    np.random.seed(np.frombuffer(derive(coins, "numpy"), np.uint32))
    random.seed(int.from_bytes(derive(coins, "python")))
