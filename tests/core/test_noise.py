"""The noise: its distribution, what its key depends on, and its two computations against each other."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hyfreedp import NoiseGenerator
from hyfreedp.noise import cipher
from hyfreedp.noise import stream as noise

CPU = torch.device("cpu")


def noised(total, scale=1.0, *, seed=0, path=(), **settings):
    """What one release adds to a copy of ``total``."""
    changed = total.clone()
    NoiseGenerator(seed, **settings).child(*path).add_noise([changed], scale)
    return changed - total


# -- ciphers and hashes ------------------------------------------------------------------------------------------------


def test_chacha20_is_that_of_rfc_8439():
    words = cipher.chacha20(bytes(32), 0, 2, CPU)
    expected = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"  # appendix A.1, test vector 1
    assert words.numpy().tobytes()[:32].hex() == expected
    assert words.numpy().tobytes()[64:72].hex() == "9f07e7be5551387a"  # test vector 2, block 1


@given(st.binary(min_size=32, max_size=32), st.integers(0, 50), st.integers(1, 40))
def test_both_computations_of_chacha20_agree(key, first, blocks):
    stream = cipher.Keystream(key, CPU).take(8 * (first + blocks))
    assert torch.equal(cipher.chacha20(key, first, blocks, CPU), stream[8 * first :])


@pytest.mark.whole
def test_the_kernel_for_gpus_gives_the_same_stream():
    """By Triton's interpreter, which needs no GPU; past the end of the counter's 32 bits, too."""
    pytest.importorskip("triton")
    program = (
        "import torch; from hyfreedp.noise import fused; key = bytes(range(32))\n"
        "for first, blocks in ((0, 1), (5, 300), (2**32 - 3, 7)):\n"
        "    print(fused.chacha20(key, first, blocks, torch.device('cpu')).tolist())"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    key = bytes(range(32))
    assert found == [cipher.chacha20(key, *of, CPU).tolist() for of in ((0, 1), (5, 300), (2**32 - 3, 7))]


@each(dtype=[torch.float32, torch.float64], size=[1, 7, 1024, 5000])
def test_compress_is_the_exact_product_with_secret_integers(size, dtype):
    key, numbers = bytes(range(32)), torch.randn(size, dtype=dtype)
    found = cipher.compress(numbers, cipher.secret_table(key, cipher.CPU)).view(-1, cipher.COLUMNS)
    words = cipher.Keystream(cipher.derive(key, "rows"), CPU).take(cipher.ROW * cipher.COLUMNS)
    table = [[int(word) % 2**26 for word in row] for row in words.view(cipher.ROW, cipher.COLUMNS)]
    halves = np.frombuffer(numbers.numpy().tobytes(), dtype=np.int16).tolist()
    rows = [halves[start : start + cipher.ROW] for start in range(0, len(halves), cipher.ROW)]
    expected = [[sum(x * k[c] for x, k in zip(row, table, strict=False)) for c in range(4)] for row in rows]
    assert found.tolist() == expected


# -- what noise depends on ---------------------------------------------------------------------------------------------


BASE = torch.linspace(-1, 1, 4000, dtype=torch.float64)
SMALLEST_CHANGE = BASE.clone()
SMALLEST_CHANGE[1234] = math.nextafter(float(BASE[1234]), 2)
OTHERS = {
    "data": lambda: noised(SMALLEST_CHANGE),
    "scale": lambda: noised(BASE, math.nextafter(1.0, 2)),
    "seed": lambda: noised(BASE, seed=1),
    "seed of the same low 32 bits": lambda: noised(BASE, seed=2**32),
    "seed of the same low 128 bits": lambda: noised(BASE, seed=2**128),
    "purpose": lambda: noised(BASE, path=("probe", 3)),
    "step": lambda: noised(BASE, path=("gradient", 4)),
    "path of the same letters": lambda: noised(BASE, path=("gradient3",)),
    "secure": lambda: noised(BASE, secure=True),
    "shape": lambda: noised(BASE.view(40, 100)).flatten(),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_release_has_independent_noise(what):
    """Correlation of 4,000 pairs: beyond 4.5 / sqrt(4000) with probability 7e-6."""
    for reference in (noised(BASE), noised(BASE, path=("gradient", 3))):
        assert abs(np.corrcoef(reference, OTHERS[what]())[0, 1]) < 4.5 / math.sqrt(4000)


def test_the_key_is_never_printed():
    generator = NoiseGenerator(0)
    assert generator.key.hex() not in repr(generator) and "key" not in repr(generator)


# -- where noise goes --------------------------------------------------------------------------------------------------


def test_every_number_gets_noise_once_in_any_memory_format():
    sums = [torch.full((size,), 7.0) for size in (70_000, 2, 140_001, 0, 64)]
    NoiseGenerator(0).add_noise(sums, 0.5)
    drawn = torch.cat(sums) - 7
    assert len(drawn.unique()) >= 0.97 * len(drawn) and drawn.std() == pytest.approx(0.5, rel=0.02)
    scalar, image = torch.tensor(1.0), torch.zeros(4, 3, 5, 6).contiguous(memory_format=torch.channels_last)
    strided, every_second = torch.zeros(8, 6)[:, ::2], torch.zeros(10)[::2]
    NoiseGenerator(0).add_noise([scalar, image, strided], 1.0)
    NoiseGenerator(0).add_noise([every_second], 1.0)
    assert scalar != 1 and image.unique().numel() == 360 and strided.unique().numel() == 24
    assert every_second.unique().numel() == 5
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_sum_and_noise_are_added_in_float64_and_rounded_once(monkeypatch):
    drawn = torch.randn(5000, dtype=torch.float64)
    monkeypatch.setattr(noise._Normals, "added_to", lambda self, sums, scale: sums + drawn * scale)
    total = torch.randn(5000)
    released = total.clone()
    NoiseGenerator(0).add_noise([released], 0.3)
    grid = 2.0**-33  # 0.3 is below 2^-1
    exact = (drawn * (0.3 / grid) + total.double() / grid).round() * grid
    assert torch.equal(released, exact.float())
    assert not torch.equal(released, total + (0.3 * drawn).float())


@each(scale=[0.3, 1.0, 4.0, 1e-9, 1e9], dtype=[torch.float32, torch.float64])
def test_the_last_bits_do_not_tell_what_was_added(scale, dtype):
    """A number near zero has the same spacing whether noise alone or noise and a record made it (Mironov 2012)."""
    for share in (0.0, 0.1, 1.0, 2.0):
        total = torch.full((200_000,), share * scale, dtype=dtype)
        NoiseGenerator(0).add_noise([total], scale)
        near = total[total.abs() < 1e-3 * scale].double()
        multiples = near / (2.0 ** math.frexp(scale)[1] * 2.0**-32)
        assert len(near) and torch.equal(multiples, multiples.round()) and (multiples % 2 == 1).any()


@pytest.mark.parametrize(
    ("scale", "dtype", "message"), [(0.0, torch.float, "scale must be positive"), (1.0, torch.bfloat16, "bfloat16")]
)
def test_a_scale_that_makes_no_noise_is_refused_and_so_are_numbers_in_half_precision(scale, dtype, message):
    with pytest.raises(ValueError, match=message):
        NoiseGenerator(0).add_noise([torch.zeros(3, dtype=dtype)], scale)


# -- distributions -----------------------------------------------------------------------------------------------------


def far_from(sample, distribution):
    """p-value of Kolmogorov and Smirnov; with a fixed seed, below 1e-4 only where the distribution is another."""
    return stats.kstest(np.asarray(sample).ravel(), distribution).pvalue


@pytest.mark.parametrize("secure", [False, True])
def test_gaussian_noise_is_normal(secure):
    sample = noised(torch.zeros(300_001, dtype=torch.float64), 2.5, secure=secure)
    assert far_from(sample / 2.5, "norm") > 1e-4
    assert far_from(noised(torch.zeros(300_001), secure=secure), "norm") > 1e-4
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 4.5 / math.sqrt(300_000)
    assert far_from(sample[::2] ** 2 / 6.25, stats.chi2(1).cdf) > 1e-4


def test_normal_and_uniform_numbers_have_their_distributions():
    generator = NoiseGenerator(0)
    assert far_from(generator.normal(300, 1000), "norm") > 1e-4
    uniform = generator.uniform(300, 1000)
    assert far_from(uniform, "uniform") > 1e-4 and 0 <= uniform.min() and uniform.max() < 1


def test_secure_noise_is_the_halved_sum_of_four():
    plain, secure = (noise._Normals(bytes(32), torch.device("cpu"), flag) for flag in (False, True))
    zero = torch.zeros(7, dtype=torch.float64)
    four = sum(plain.added_to(zero, 1.0).clone() for _ in range(4))
    torch.testing.assert_close(secure.added_to(zero, 1.0), four / 2)


def test_releases_one_after_the_other_are_independent():
    generator, found = NoiseGenerator(0), []
    for _ in range(3):
        total = BASE.clone()
        generator.add_noise([total], 1.0)
        found.append(total - BASE)
    assert np.abs(np.corrcoef(found) - np.eye(3)).max() < 4.5 / math.sqrt(4000)


def test_without_a_seed_the_key_is_the_systems():
    keys = {NoiseGenerator().key for _ in range(100)}
    assert len(keys) == 100 and all(len(key) == 32 for key in keys)
