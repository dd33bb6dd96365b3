"""Keys, ChaCha20 and a universal hash: the cryptography under the noise, on CPUs and accelerators.

On CPUs ChaCha20 and Poly1305 are OpenSSL's. On an accelerator the keystream is one Triton kernel, or elementwise
operations where there is no Triton; data to be hashed is first compressed there to a hundredth of its size, so that
nothing large is moved. An accelerator is used only if a test shows that it computes the same bits as OpenSSL. Otherwise
(MPS, say, has no float64) noise is drawn on the CPU; the engine refuses runs on such devices.

Why not AES: it has no elementwise form, and a run that moves to another device must keep its stream.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from hyfreedp.pytorch.devices import CPU

_WORDS_PER_BLOCK = 8  # 64-bit words in a block of ChaCha20
_ZEROS = memoryview(bytes(2**17))  # the plaintext; small enough to stay in the cache

# The hash on accelerators sums products of 16-bit and 26-bit integers over rows of 2^11: below 2^53, exact in float64.
ROW, COLUMNS, KEY_BITS = 2**11, 4, 26


def derive(key: bytes, *path: object) -> bytes:
    """A key of 32 bytes, independent for each ``path`` of plain values (with an unambiguous repr)."""
    return hashlib.blake2b(repr(path).encode(), key=key, digest_size=32, person=b"hyfreedp noise 1").digest()


def noise_device(device: torch.device) -> torch.device:
    """The device on which noise for tensors on ``device`` is drawn: the same if it computes noise, else the CPU."""
    return device if computes_noise(device) else CPU


@cache
def computes_noise(device: torch.device) -> bool:
    """Whether a device has float64 and int64, and computes keystream and hash as the CPU does, bit for bit.

    Tested once per process and device.
    """
    if device.type == CPU.type:
        return True
    key, numbers = bytes(range(32)), torch.arange(1, 2 * ROW, dtype=torch.float32).sqrt()

    def computed(on: torch.device) -> tuple[Tensor, Tensor]:
        return chacha20(key, 5, 3, on).cpu(), compress(numbers.to(on), secret_table(key, on)).cpu()

    try:
        there = computed(device)
    except (RuntimeError, TypeError):  # a backend lacks a type or an operation
        return False
    return all(map(torch.equal, there, computed(CPU)))


class Keystream:
    """ChaCha20's output as 64-bit words, under a key that must be used for nothing else."""

    def __init__(self, key: bytes, device: torch.device) -> None:
        self._key, self._device, self._blocks = key, device, 0
        self._cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
        self._words, self._output = torch.empty(0, dtype=torch.int64), memoryview(b"")

    def take(self, count: int) -> Tensor:
        """The next ``count`` words, int64, valid until the next call; the rest of the last block is dropped.

        On a CPU calls with the same ``count`` return the same tensor, with new values.
        """
        blocks = -(-count // _WORDS_PER_BLOCK)
        if self._device.type != "cpu":
            self._blocks += blocks
            return chacha20(self._key, self._blocks - blocks, blocks, self._device)[:count]
        if count != self._words.numel():
            words = torch.empty(_WORDS_PER_BLOCK * blocks, dtype=torch.int64)
            self._words, self._output = words[:count], memoryview(cast(Any, words.numpy())).cast("B")
        for start in range(0, len(self._output), len(_ZEROS)):
            part = self._output[start : start + len(_ZEROS)]
            self._cipher.update_into(_ZEROS[: len(part)], part)
        return self._words


def chacha20(key: bytes, first: int, blocks: int, device: torch.device) -> Tensor:
    """ChaCha20 with nonce 0 on devices without OpenSSL (RFC 8439, section 2.3).

    Returns the keystream of ``blocks`` blocks, from block ``first`` on, as little-endian int64 words (8 * blocks,).
    """
    return (_kernel(device) or _elementwise)(key, first, blocks, device)


@cache
def _kernel(device: torch.device) -> Callable[[bytes, int, int, torch.device], Tensor] | None:
    """ChaCha20 as one Triton kernel; None if Triton is missing, cannot compile, or computes other bits."""
    if device.type != "cuda":  # "cuda" also means ROCm
        return None
    key = bytes(range(32))
    try:
        from hyfreedp.noise.fused import chacha20 as fused

        same = torch.equal(fused(key, 2**32 - 2, 5, device).cpu(), _elementwise(key, 2**32 - 2, 5, CPU))
    except Exception:  # Triton passes on errors of any kind, of its compiler and of the driver
        return None
    return fused if same else None


def _elementwise(key: bytes, first: int, blocks: int, device: torch.device) -> Tensor:
    words = struct.unpack("<16i", b"expand 32-byte k" + key + bytes(16))
    # Made on the CPU and sent without blocking: making it on the device would wait for it.
    start = torch.tensor(words, dtype=torch.int32).to(device, non_blocking=True)[:, None].repeat(1, blocks)
    start[12] = torch.arange(first, first + blocks, dtype=torch.int64, device=device).to(torch.int32)
    a, b, c, d = start.view(4, 4, blocks).clone().unbind()
    for _ in range(10):
        _quarter_round(a, b, c, d)  # of the columns
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        _quarter_round(a, b, c, d)  # of the diagonals
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    output = torch.cat([a, b, c, d]).add_(start)
    return output.T.reshape(-1).view(torch.int64)


def _quarter_round(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    for into, by, changed, places in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        into.add_(by)
        changed.bitwise_xor_(into)
        high = changed << places
        changed.bitwise_right_shift_(32 - places).bitwise_and_(2**places - 1).bitwise_or_(high)


def universal_hash(sums: Sequence[Tensor], key: bytes) -> bytes:
    """16 bytes that differ for different ``sums`` with overwhelming probability; use each ``key`` for one hash only."""
    mac = Poly1305(key)
    for data in _to_host(sums, key):
        mac.update(memoryview(cast(Any, data.view(torch.uint8).numpy())))
    return mac.finalize()


def _to_host(tensors: Sequence[Tensor], key: bytes) -> list[Tensor]:
    """What is hashed of each tensor, on the CPU. All are on one device, and are moved in one transfer, which waits."""
    parts = [tensor.detach().reshape(-1).contiguous() for tensor in tensors]
    if not parts or noise_device(parts[0].device) == CPU:
        return [part.cpu() for part in parts]
    table = secret_table(key, parts[0].device)
    short = [compress(part, table) for part in parts]
    return list(torch.cat(short).cpu().split([len(data) for data in short]))


def secret_table(key: bytes, device: torch.device) -> Tensor:
    """The secret integers by which :func:`compress` multiplies rows, float64, shape ``(ROW, COLUMNS)``.

    They are made on the CPU and sent, which is faster than many small kernels on an accelerator.
    """
    words = Keystream(derive(key, "rows"), CPU).take(ROW * COLUMNS)
    return (words & 2**KEY_BITS - 1).double().view(ROW, COLUMNS).to(device, non_blocking=True)


def compress(flat: Tensor, table: Tensor) -> Tensor:
    """A universal hash of ``flat``, on its device, to a hundredth of its size: sums of products with secret integers.

    The bits of ``flat``, shape ``(n,)``, are read as rows of 2^11 integers x in [-2^15, 2^15). Each row becomes four
    sums of k x, with integers k in [0, 2^26) from :func:`secret_table`, computed exactly: float64, shape
    ``(rows * 4,)``. Two different rows have the same four sums with probability at most 2^-104.
    """
    parts = []
    for piece in flat.view(torch.int16).split(ROW * 2**13):
        padded = torch.nn.functional.pad(piece, (0, -len(piece) % ROW))
        parts.append(padded.view(-1, ROW).double() @ table)
    return torch.cat(parts).view(-1) if parts else table.new_zeros(0)
