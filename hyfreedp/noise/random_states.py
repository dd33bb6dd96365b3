"""The global random generators of torch, NumPy and Python: saved, restored, and seeded from a secret key.

Dropout and augmentation draw from these generators, record after record. Suppose that an observer knows the seed, as
after ``torch.manual_seed(0)``. One more record then shifts the numbers of all records after it, in a way that they can
compute, and the clipped sum changes by far more than one clipped gradient. So these generators are seeded from the
run's secret key for each piece in each pass of a step, and for each batch of the loader. docs/threat-model.md, "Random
numbers", says why that is enough, and what its limits are.
"""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import numpy as np
import torch
from numpy.random import mtrand
from torch import Generator

from hyfreedp.noise.cipher import derive
from hyfreedp.pytorch.devices import backend

_UNUSED = Generator().manual_seed(0).get_state().numpy()  # torch's CPU state, before any number is drawn
_TWISTER_WORDS = slice(3, 3 + 624)  # where the words of the Mersenne Twister are in it, read as int64
_LOCKS: dict[int, RLock] = {}  # by process id, since a forked child would inherit what another thread has locked
_SPARE: list[np.random.MT19937] = []  # NumPy generators that no context uses now; making one takes half a millisecond


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """A context that restores all states at its end; for one thread at a time, since all threads share the states.

    NumPy gets another generator, since copying is slow. (If its own has kept a second normal number, that is lost.)
    """
    with _LOCKS.setdefault(os.getpid(), RLock()):
        module = backend(device)
        on_device = None if module is None else module.get_rng_state(device)
        of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), mtrand.get_bit_generator()
        own = _SPARE.pop() if _SPARE else np.random.MT19937()
        mtrand.set_bit_generator(own)
        try:
            yield
        finally:
            mtrand.set_bit_generator(of_numpy)
            _SPARE.append(own)
            random.setstate(of_python)
            torch.set_rng_state(of_torch)
            if module is not None:
                module.set_rng_state(on_device, device)


@contextmanager
def random_states_of(key: bytes, device: torch.device) -> Iterator[None]:
    """A context whose random numbers come from ``key``; the caller's states are restored at its end."""
    with random_states_kept(device):
        seed_random_states(key, device)
        yield


def seed_random_states(key: bytes, device: torch.device, shared: bytes | None = None) -> None:
    """Seed torch from all 256 bits of ``key``; seed NumPy and Python from ``shared``, a key, or ``key`` if None.

    (``torch.manual_seed`` uses only 32 bits of its seed on a CPU.)
    """
    state = _UNUSED.copy()
    seed = int.from_bytes(derive(key, "seed")[:8]) >> 1
    words = np.frombuffer(hashlib.shake_256(derive(key, "torch")).digest(4 * 624), np.uint32)
    state.view(np.int64)[0] = seed  # what torch.initial_seed() returns
    state.view(np.int64)[_TWISTER_WORDS] = words
    torch.set_rng_state(torch.from_numpy(state))
    if (module := backend(device)) is not None:
        module.set_rng_state(Generator(device).manual_seed(seed).get_state(), device)
    shared = shared or key
    np.random.seed(np.frombuffer(derive(shared, "numpy"), np.uint32))
    random.seed(int.from_bytes(derive(shared, "python")))
