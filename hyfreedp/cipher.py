"""Keys, ChaCha20 and a universal hash: the cryptography under the noise, on CPUs and where accelerators hold data.

On CPUs ChaCha20 and Poly1305 are OpenSSL's. On CUDA the keystream is computed by elementwise operations, and what is to
be hashed is first compressed to a hundredth where it lies, so that nothing large is moved.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, cast

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

_BLOCK = 8  # words of 64 bits in a block of ChaCha20

# Of the hash on CUDA: 16-bit integers times 26-bit ones, summed over a row, stay below 2^53, where float64 is exact.
ROW, COLUMNS, KEY_BITS = 2**11, 4, 26


def derive(key: bytes, *path: object) -> bytes:
    """A key of 32 bytes, independent for each path; the representation of a tuple of plain values is unambiguous."""
    return hashlib.blake2b(repr(path).encode(), key=key, digest_size=32, person=b"hyfreedp noise 1").digest()


def where(tensor: Tensor) -> torch.device:
    """Where noise for ``tensor`` is drawn: float64 and 64-bit integers are not to be had everywhere."""
    return tensor.device if tensor.device.type == "cuda" else torch.device("cpu")


class Keystream:
    """ChaCha20's output under a key that is used for nothing else, as 64-bit words."""

    def __init__(self, key: bytes, device: torch.device) -> None:
        self._key, self._device, self._blocks = key, device, 0
        self._cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
        self._zeros, self._output = memoryview(b""), memoryview(bytearray())

    def take(self, count: int) -> Tensor:
        """The next ``count`` words, int64, valid until the next call; the rest of a block is left out."""
        blocks = -(-count // _BLOCK)
        if self._device.type != "cpu":
            self._blocks += blocks
            return chacha20(self._key, self._blocks - blocks, blocks, self._device)[:count]
        if blocks == 0:
            return torch.empty(0, dtype=torch.int64)
        size = 8 * _BLOCK * blocks
        if size > len(self._zeros):
            self._zeros, self._output = memoryview(bytes(size)), memoryview(bytearray(size))
        self._cipher.update_into(self._zeros[:size], self._output[:size])
        return torch.frombuffer(self._output, dtype=torch.int64, count=count)


def chacha20(key: bytes, first: int, blocks: int, device: torch.device) -> Tensor:
    """ChaCha20 with nonce 0 by elementwise operations, for devices that OpenSSL does not reach (RFC 8439, section 2.3).

    Args:
        key: 32 bytes.
        first: number of the first block.
        blocks: how many.
        device: where to compute.

    Returns:
        The keystream as int64 words, shape ``(8 * blocks,)``, in little-endian order.
    """
    words = struct.unpack("<16i", b"expand 32-byte k" + key + bytes(16))
    start = torch.tensor(words, dtype=torch.int32, device=device)[:, None].repeat(1, blocks)
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
    """16 bytes that differ for different bits of ``sums`` unless chance helps; the key is used for this only."""
    mac = Poly1305(key)
    for total in sums:
        flat = total.detach().reshape(-1).contiguous()
        data = compress(flat, key) if where(flat).type == "cuda" else flat.cpu()
        mac.update(memoryview(cast(Any, data.view(torch.uint8).numpy())))
    return mac.finalize()


def compress(flat: Tensor, key: bytes) -> Tensor:
    """Rows of 16-bit integers times secret integers: a universal hash to a hundredth of the size, where ``flat`` lies.

    The bits of ``flat`` are read as rows of integers x in [-2^15, 2^15), and each row becomes four sums of k x with
    secret k in [0, 2^26), computed exactly. Two different rows have the same four sums with probability at most 2^-104.

    Args:
        flat: floating-point numbers, shape ``(n,)``.
        key: 32 bytes.

    Returns:
        float64, shape ``(rows * 4,)``, on the CPU.
    """
    device = flat.device
    words = Keystream(derive(key, "rows"), device).take(ROW * COLUMNS)
    table = (words & 2**KEY_BITS - 1).double().view(ROW, COLUMNS)
    integers = flat.view(torch.int16)
    parts = []
    for piece in integers.split(ROW * 2**13):
        padded = torch.nn.functional.pad(piece, (0, -len(piece) % ROW))
        parts.append(padded.view(-1, ROW).double() @ table)
    return torch.cat(parts).view(-1).cpu() if parts else torch.zeros(0, dtype=torch.float64)
