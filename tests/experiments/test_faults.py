"""Damaged checkpoints and full disks; test_grid.py has the kills."""

import resource
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyfreedp.experiments.store.files import load_checkpoint, save_checkpoint


@contextmanager
def files_of_at_most(size):
    """What a full disk does: a write fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "a.ckpt"
    save_checkpoint(path, {"weights": torch.arange(6.0), "step": 2})
    return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(-1, 7))
def test_no_damage_goes_unnoticed(content, folder, place, bit):
    """One bit flipped anywhere, or all cut off from there."""
    path, at = folder / "a.ckpt", int(place * len(content))
    path.write_bytes(content[:at] + (bytes([content[at] ^ 1 << bit]) + content[at + 1 :] if bit >= 0 else b""))
    with pytest.warns(RuntimeWarning, match=r"a\.ckpt is damaged; the run starts from its beginning"):
        assert load_checkpoint(path) is None
    assert not path.exists()


def test_the_newest_is_loaded_and_a_full_disk_leaves_it(tmp_path):
    path = tmp_path / "a.ckpt"
    assert load_checkpoint(path) is None
    for step in (1, 2):
        save_checkpoint(path, {"step": step})
    with files_of_at_most(100_000), pytest.warns(RuntimeWarning, match=r"no checkpoint was written to .*; the run"):
        save_checkpoint(path, {"weights": torch.zeros(100_000)})
    assert load_checkpoint(path) == {"step": 2}
    assert list(tmp_path.iterdir()) == [path]
