"""ChaCha20 as one Triton kernel: the keystream of :mod:`hyfreedp.noise.cipher`, forty times as fast on a GPU.

A block's words stay in registers instead of going through memory. PyTorch for CUDA and ROCm includes Triton.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS = 256  # of the cipher, per program


@triton.jit
def _quarter_round(a, b, c, d):  # type: ignore[no-untyped-def]
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _rotated(x, places: tl.constexpr):  # type: ignore[no-untyped-def]
    return (x << places) | (x >> (32 - places))


@triton.jit
def _word(start, i: tl.constexpr, like):  # type: ignore[no-untyped-def]
    return tl.zeros_like(like) + tl.load(start + i).to(tl.uint32, bitcast=True)


@triton.jit
def _store(output, word, here):  # type: ignore[no-untyped-def]
    tl.store(output, word.to(tl.int32, bitcast=True), here)


@triton.jit(do_not_specialize=["first", "blocks"])
def _keystream(output, start, first, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    s12 = (first + n).to(tl.uint32)
    s0, s1, s2, s3 = _word(start, 0, s12), _word(start, 1, s12), _word(start, 2, s12), _word(start, 3, s12)
    s4, s5, s6, s7 = _word(start, 4, s12), _word(start, 5, s12), _word(start, 6, s12), _word(start, 7, s12)
    s8, s9, s10, s11 = _word(start, 8, s12), _word(start, 9, s12), _word(start, 10, s12), _word(start, 11, s12)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12 = s8, s9, s10, s11, s12
    x13, x14, x15 = tl.zeros_like(s12), tl.zeros_like(s12), tl.zeros_like(s12)  # the rest of the counter and the nonce
    for _ in range(10):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    here, output = n < blocks, output + 16 * n
    _store(output, x0 + s0, here)
    _store(output + 1, x1 + s1, here)
    _store(output + 2, x2 + s2, here)
    _store(output + 3, x3 + s3, here)
    _store(output + 4, x4 + s4, here)
    _store(output + 5, x5 + s5, here)
    _store(output + 6, x6 + s6, here)
    _store(output + 7, x7 + s7, here)
    _store(output + 8, x8 + s8, here)
    _store(output + 9, x9 + s9, here)
    _store(output + 10, x10 + s10, here)
    _store(output + 11, x11 + s11, here)
    _store(output + 12, x12 + s12, here)
    _store(output + 13, x13, here)
    _store(output + 14, x14, here)
    _store(output + 15, x15, here)


def chacha20(key: bytes, first: int, blocks: int, device: torch.device) -> Tensor:
    """As :func:`hyfreedp.noise.cipher.chacha20`: int64 words (8 * blocks,), equal bit for bit."""
    words = struct.unpack("<12i", b"expand 32-byte k" + key)
    start = torch.tensor(words, dtype=torch.int32).to(device, non_blocking=True)
    output = torch.empty(16 * blocks, dtype=torch.int32, device=device)
    with torch.cuda.device_of(output):  # else Triton launches on the current device, which may be another
        _keystream[(triton.cdiv(blocks, _BLOCKS),)](output, start, first, blocks, BLOCKS=_BLOCKS)
    return output.view(torch.int64)
