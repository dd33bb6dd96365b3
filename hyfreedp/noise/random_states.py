"""The global random generators of torch, NumPy and Python: saved, restored, and seeded from a secret key.

Dropout and augmentation draw from these generators, in the order of the batch. If an observer knows the seed, as after
``torch.manual_seed(0)``, one record more shifts the numbers of all records after it in a way that they can compute, and
the clipped sum moves by far more than one record's gradient. So each pass of a step and each batch of the loader seeds
them from the run's secret key.

**Why a key is enough.** The numbers of a batch's rows are independent and unknown to the observer. Couple two runs that
differ in one record by giving every other record the same numbers; each run alone keeps its distribution. Given the
numbers, the clipped sums differ by the one record's contribution, and a mixture of mechanisms that have the guarantee
has it too. This also holds if a record decides how many numbers it draws.

**Limits.** The Mersenne Twister of torch, NumPy and Python is no cipher. Its whole state is derived from the key for
each pass, and its output is seen through noised sums only.
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

_TWISTER_WORDS = slice(3, 3 + 624)  # of torch's CPU state, read as int64


@dataclass(frozen=True)
class RandomStates:
    """States of the global generators: torch's for the CPU and, if used, an accelerator; NumPy's; Python's."""

    torch: list[Tensor]
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]

    def same(self, other: RandomStates) -> bool:
        """Whether the states are equal, so that nothing was drawn in between."""
        return (
            all(map(torch.equal, self.torch, other.torch))
            and self.numpy[2:] == other.numpy[2:]
            and np.array_equal(self.numpy[1], other.numpy[1])
            and self.python == other.python
        )


def random_states(device: torch.device) -> RandomStates:
    """The current states, as tensors on the CPU where they are torch's."""
    of_torch = [torch.get_rng_state()]
    if (module := backend(device)) is not None:
        of_torch.append(module.get_rng_state(device))
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
    """Restore the states at the end."""
    before = random_states(device)
    try:
        yield
    finally:
        set_random_states(device, before)


@contextmanager
def random_states_of(key: bytes, device: torch.device) -> Iterator[None]:
    """Seed the states from ``key``; restore the caller's at the end."""
    with random_states_kept(device):
        seed_random_states(key, device)
        yield


def seed_random_states(key: bytes, device: torch.device, coins: bytes | None = None) -> None:
    """Seed torch from 256 secret bits, and NumPy and Python from ``coins``, or from ``key`` if None.

    (``torch.manual_seed`` uses only 32 bits of its seed on a CPU.)
    """
    state = Generator().manual_seed(0).get_state()  # of a generator that has drawn nothing
    seed = int.from_bytes(derive(key, "seed")[:8]) >> 1
    words = np.frombuffer(hashlib.shake_256(derive(key, "torch")).digest(4 * 624), np.uint32)
    state.view(torch.int64)[0] = seed  # what torch.initial_seed() returns
    state.view(torch.int64)[_TWISTER_WORDS] = torch.from_numpy(words.astype(np.int64))
    torch.set_rng_state(state)
    if (module := backend(device)) is not None:
        module.set_rng_state(Generator(device).manual_seed(seed).get_state(), device)
    coins = coins or key
    np.random.seed(np.frombuffer(derive(coins, "numpy"), np.uint32))
    random.seed(int.from_bytes(derive(coins, "python")))
