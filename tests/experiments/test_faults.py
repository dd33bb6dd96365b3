"""Damaged checkpoints, full disks and folders that may not be written to; `make faults` adds kills, for real."""

import os
import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyfreedp.experiments.runs import __main__ as cell
from hyfreedp.experiments.runs.cells import Spec, read_cell, run_cell
from hyfreedp.experiments.store import checkpoints
from hyfreedp.experiments.store.files import check_writable
from hyfreedp.experiments.store.paths import ROOT

SPEC = Spec(method="linear", learning_rate=0.02, steps=6)


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
    checkpoints.save(path, {"weights": torch.arange(6.0), "step": 2})
    return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(-1, 7))
def test_no_damage_goes_unnoticed(content, folder, place, bit):
    """One bit flipped anywhere, or all cut off from there: the one before is taken."""
    path, at = folder / "a.ckpt", int(place * len(content))
    checkpoints.save(path, {"step": 1})
    os.replace(path, folder / "a.ckpt.previous")
    path.write_bytes(content[:at] + (bytes([content[at] ^ 1 << bit]) + content[at + 1 :] if bit >= 0 else b""))
    with pytest.warns(RuntimeWarning, match=r"a\.ckpt is damaged; the run starts from the one before it"):
        assert checkpoints.load(path) == {"step": 1}


def test_the_newest_is_loaded_and_the_one_before_kept(tmp_path):
    path = tmp_path / "a.ckpt"
    assert checkpoints.load(path) is None
    for step in (1, 2, 3):
        checkpoints.save(path, {"step": step})
    assert checkpoints.load(path) == {"step": 3}
    path.unlink()  # as a kill between two renamings leaves it
    assert checkpoints.load(path) == {"step": 2}
    checkpoints.discard(path)
    assert not list(tmp_path.iterdir())


def test_a_damaged_one_never_becomes_the_one_before(tmp_path):
    path = tmp_path / "a.ckpt"
    for step in (1, 2):
        checkpoints.save(path, {"step": step})
    path.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="damaged"):
        checkpoints.load(path)
    checkpoints.save(path, {"step": 3})
    path.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert checkpoints.load(path) == {"step": 1}


def test_a_full_disk_leaves_the_checkpoint_that_was_there(tmp_path):
    path = tmp_path / "a.ckpt"
    checkpoints.save(path, {"step": 1})
    with (
        files_of_at_most(100_000),
        pytest.warns(RuntimeWarning, match=r"no checkpoint was written to .*; the run"),
    ):
        checkpoints.save(path, {"weights": torch.zeros(100_000)})
    assert checkpoints.load(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_at_the_record_is_one_sentence_and_nothing_half_written(tmp_path, capsys):
    (tmp_path / "spec.json").write_text(SPEC.to_json())
    cells = tmp_path / "cells"
    with files_of_at_most(100):
        assert cell.main([str(tmp_path / "spec.json"), "--cells", str(cells)]) == 1
    assert capsys.readouterr().err.startswith("failed: [Errno 27] File too large: ")
    assert not [path for path in cells.iterdir() if path.suffix in (".csv", ".json")]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    """That nothing is trained before: `make faults`."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write to the folder for results: .*file.cells"):
        check_writable(tmp_path / "file" / "cells")


def test_reading_a_finished_cell_removes_what_a_kill_left(tmp_path):
    record = run_cell(SPEC, tmp_path)
    for name in (f"{SPEC.key}.ckpt", f"{SPEC.key}.ckpt.previous", f".{SPEC.key}.lock"):
        (tmp_path / name).touch()
    assert run_cell(SPEC, tmp_path) == record == read_cell(SPEC, tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".json"]


@pytest.mark.slow
def test_every_fault_ends_as_it_should(tmp_path):
    table = tmp_path / "FAULTS.md"
    command = [sys.executable, str(ROOT / "tests" / "faults.py"), "--kills", "5", "--table", str(table)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert table.read_text().count("\n| ") >= 15
