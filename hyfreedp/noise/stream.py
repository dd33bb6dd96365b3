"""Gaussian noise from a cryptographic stream, drawn in float64, as a function of the sums that it hides.

**Construction.** A generator holds a secret key of 256 bits. The noise of one release comes from its own key,

    BLAKE2b(key; path, number of the release, scale, shapes, Poly1305(un-noised sums)),

where the path names the run, the purpose and the step, and the key of Poly1305 is derived in the same way. That key
drives ChaCha20 (RFC 8439), whose output becomes normal numbers in float64 by the Box-Muller transform.

**Consequences.** A step repeated on the same data draws the same noise, bit for bit, so the release is the same and
reveals nothing new. Repeated on other data, or with another scale, it draws independent noise. So do other purposes,
steps and runs. Seeing some noise (a weight without gradient receives pure noise) reveals neither the key nor any other
noise, past or future. Two different sums have the same hash with probability at most 2^-70.

**Assumption.** The numbers are pseudorandom, so the guarantee is computational: it holds against adversaries that
cannot distinguish ChaCha20 and BLAKE2b under a secret key from random functions. A guessable seed voids it.

**Floating point.** Drawn numbers lie within 9.4 standard deviations; a true normal lies beyond with probability 4e-21.
Sums and noise are added in float64, rounded to multiples of about 2^-32 of the scale, and then to the type of the sums.
Without this rounding, the last bits of a floating-point sum reveal what was added (Mironov, CCS 2012). About 2^20
numbers round to one multiple, so probabilities are off by about one part in a million, at random. If ``secure``, each
number is the halved sum of four, which are much harder to infer (Holohan and Braghin, ESORICS 2021).
"""

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Self

import torch
from torch import Tensor

from hyfreedp.checks import check_type
from hyfreedp.noise.cipher import Keystream, derive, noise_device, universal_hash
from hyfreedp.pytorch.devices import CPU

_CHUNK = 2**16  # numbers drawn at a time on a CPU, few enough to stay in its cache
_ACCELERATOR_CHUNK = 2**24
_GRID_BITS = 32  # a release is a multiple of 2^-32 times the power of two above the scale


class NoiseGenerator:
    """A source of noise and of random choices; the module docstring says what it guarantees.

    It consists of a key and a count of releases, which have independent noise. :meth:`child` returns generators that
    are independent of it and of each other.

    Args:
        seed: an integer of at least 0 (else ValueError), for reproducible runs without privacy; None: 256 secret bits.
        secure: make each normal number the halved sum of four, against floating-point attacks; four times as slow.
    """

    releases = 0  # the number of releases and other draws so far
    tag = 0  # identifies them, see :meth:`add_noise`

    def __init__(self, seed: int | None = None, *, secure: bool = False) -> None:
        if seed is not None and not (isinstance(seed, Integral) and seed >= 0):
            raise ValueError(f"seed must be None or an integer of at least 0, got {seed!r}")
        self.key = secrets.token_bytes(32) if seed is None else derive(b"", "seed", int(seed))
        self.secure = secure

    def child(self, *path: str | int) -> Self:
        """The generator of this name: the same at each call, whatever was drawn before."""
        made = object.__new__(type(self))  # without new numbers of the operating system
        made.key, made.secure = derive(self.key, "child", *path), self.secure
        return made

    @torch.no_grad()
    def add_noise(self, sums: Sequence[Tensor], scale: float) -> None:
        """Add independent Gaussian noise to every number of one release, in place.

        Afterwards ``tag`` (63 bits) identifies all releases so far: it is equal if their sums, scales and noise are.

        Args:
            sums: un-noised sums, float32 or float64, of any shapes, all on one device.
            scale: standard deviation of the noise.

        ValueError for sums in half precision, which would round noise away, or a scale not positive and finite.
        """
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {scale}")
        for total in sums:
            if total.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"sums must be float32 or float64, got {total.dtype}: round after the noise is added")
        filled = [total for total in sums if total.numel()]
        flat = [total.reshape(-1) for total in filled]  # a copy if the tensor is not contiguous
        device = noise_device(flat[0].device) if flat else CPU
        groups = list(_groups(flat, _CHUNK if device == CPU else _ACCELERATOR_CHUNK))
        joined = [group[0] if len(group) == 1 else torch.cat(group) for group in groups]
        shapes = [(str(total.dtype), tuple(total.shape)) for total in sums]
        digest = universal_hash(joined, derive(self.key, "hash", self.releases))
        path = ("release", self.releases, "gaussian", float(scale).hex(), self.secure, shapes, digest)
        self.releases += 1
        self.tag = int.from_bytes(derive(self.key, "tag", self.tag, *path)[:8]) >> 1
        normals = _Normals(derive(self.key, *path), device, self.secure)
        coarse = math.ldexp(1.5, 52 + math.frexp(scale)[1] - _GRID_BITS)  # so large that floats are one grid step apart
        for group, together in zip(groups, joined, strict=True):
            released = normals.added_to(together, scale).add_(coarse).sub_(coarse)  # rounds to the grid
            torch._foreach_copy_(group, released.split([piece.numel() for piece in group]))
        for total, noised in zip(filled, flat, strict=True):
            if total.data_ptr() != noised.data_ptr():
                total.copy_(noised.view(total.shape))

    def normal(self, *shape: int, device: torch.device = CPU) -> Tensor:
        """Standard normal numbers, new at each call, float64, on ``device`` if it computes noise, else on the CPU."""
        device = noise_device(device)
        normals = _Normals(self._next_key("normal"), device, self.secure)
        drawn = torch.zeros(math.prod(shape), dtype=torch.float64, device=device)
        for piece in drawn.split(_CHUNK if device == CPU else _ACCELERATOR_CHUNK):
            piece.copy_(normals.added_to(piece, 1.0))
        return drawn.view(shape)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1), new at each call, multiples of 2^-53, float64, on the CPU."""
        words = Keystream(self._next_key("uniform"), CPU).take(math.prod(shape))
        return (words >> 11 & 2**53 - 1).double().mul_(2.0**-53).view(shape)

    def integer(self) -> int:
        """A number of 63 bits, the same at each call: a seed for generators of other libraries."""
        return int.from_bytes(derive(self.key, "integer")[:8]) >> 1

    def state_dict(self) -> dict[str, Any]:
        """Key and count as plain values. Keep them as secret as the data. Threat model: CK."""
        return {"key": self.key.hex(), "releases": self.releases}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.key, self.releases = bytes.fromhex(state["key"]), state["releases"]

    def _next_key(self, purpose: str) -> bytes:
        self.releases += 1
        return derive(self.key, purpose, self.releases)


def as_generator(generator: NoiseGenerator | None) -> NoiseGenerator:
    """``generator``, or a new one if None; TypeError for others, such as torch's generators, which are not secure."""
    if generator is None:
        return NoiseGenerator()
    check_type("generator", generator, NoiseGenerator, "a hyfreedp.NoiseGenerator, or None")
    return generator


def _groups(tensors: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Split one-dimensional tensors into pieces, and collect these in groups of at most ``size`` numbers each."""
    group: list[Tensor] = []
    room = size
    for tensor in tensors:
        for piece in tensor.split(size) if tensor.numel() > size else (tensor,):
            if piece.numel() > room:
                yield group
                group, room = [], size
            group.append(piece)
            room -= piece.numel()
    if group:
        yield group


class _Normals:
    """Normal numbers from a keystream, in pairs r cos(theta), r sin(theta) (Box-Muller).

    They are computed in place, in few calls of torch, each of which takes as long as 1,000 numbers, in the memory of
    the keystream's words and in one buffer of the same size, so that both stay in the cache.
    """

    def __init__(self, key: bytes, device: torch.device, secure: bool) -> None:
        self._stream, self._secure = Keystream(key, device), secure
        self._words = self._memory = torch.empty(0, dtype=torch.float64, device=device)
        self._views = (self._memory,) * 6

    def added_to(self, sums: Tensor, scale: float) -> Tensor:
        """``sums`` plus noise of standard deviation ``scale``: float64, shape ``(n,)``, valid until the next call."""
        count = sums.numel()
        if not self._secure:
            normals, buffer = self._draw(count)
            return buffer.copy_(sums).add_(normals, alpha=scale)
        for _ in range(4):
            before = sums.clone()  # which ``_draw`` overwrites
            normals, buffer = self._draw(count)
            sums = buffer.copy_(before).add_(normals, alpha=scale / 2)
        return sums

    def _draw(self, count: int) -> tuple[Tensor, Tensor]:
        """The next ``count`` normal numbers, and a buffer of as many; both valid until the next call."""
        half = -(-count // 2)
        words = self._stream.take(2 * half)
        if words is not self._words:  # else the same memory is used again, as for most calls
            if 2 * half > self._memory.numel():  # allocating takes longer than drawing
                self._memory = self._memory.new_empty(2 * half)
            pair, normals = self._memory[: 2 * half], words.view(torch.float64)
            self._words = words
            self._views = (pair, pair[:half], pair[half:], normals, normals[:half], normals[half:])
        pair, radius, angle, normals, cosines, sines = self._views
        pair.copy_(words)
        # +-(k + 1/2) 2^-63 for k below 2^63: never 0, and finest near 0, where the tail of the normal comes from
        radius.add_(0.5).mul_(2.0**-63).square_().log_().neg_().sqrt_()
        angle.mul_(math.pi * 2.0**-63)
        torch.cos(angle, out=cosines).mul_(radius)
        torch.sin(angle, out=sines).mul_(radius)
        return normals[:count], pair[:count]
