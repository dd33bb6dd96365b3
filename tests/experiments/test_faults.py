"""Damaged checkpoints, full disks and folders that may not be written to; test_grid.py has the kills."""

import os
import resource
from contextlib import contextmanager

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyfreedp import HyFreeDPOptimizer
from hyfreedp.experiments.runs import __main__ as cell
from hyfreedp.experiments.runs import cells, train
from hyfreedp.experiments.runs.cells import Spec, read_cell, read_steps, run_cell
from hyfreedp.experiments.store import checkpoints

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
    folder = tmp_path / "cells"
    with files_of_at_most(100):
        assert cell.main([str(tmp_path / "spec.json"), "--cells", str(folder)]) == 1
    assert capsys.readouterr().err.startswith("failed: [Errno 27] File too large: ")
    assert not [path for path in folder.iterdir() if path.suffix in (".csv", ".json")]


def test_a_folder_that_cannot_be_written_to_is_named_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "train", None)  # would fail if called
    (tmp_path / "cells").symlink_to(tmp_path / "gone")
    with pytest.raises(OSError, match=r"cannot write to the folder for results: .*cells"):
        run_cell(SPEC, tmp_path / "cells")


@pytest.mark.parametrize(("damaged", "trained"), [("*.ckpt", 2), ("*.ckpt*", 6)])
def test_a_run_with_damaged_checkpoints_ends_in_the_same_numbers(tmp_path, monkeypatch, damaged, trained):
    """Killed at its sixth step, after five checkpoints: the last is cut short, or the one before it too."""
    step, steps = HyFreeDPOptimizer.step, []

    def counted(self, *args):
        steps.append(self.ledger.steps)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return step(self, *args)

    run_cell(SPEC, tmp_path / "whole")
    monkeypatch.setattr(train, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(HyFreeDPOptimizer, "step", counted)
    with pytest.raises(KeyboardInterrupt):
        run_cell(SPEC, tmp_path / "killed")
    for path in (tmp_path / "killed").glob(damaged):
        os.truncate(path, path.stat().st_size * 2 // 3)
    with pytest.warns(RuntimeWarning, match="is damaged; the run starts from"):
        run_cell(SPEC, tmp_path / "killed")
    assert len(steps) == 6 + trained
    pd.testing.assert_frame_equal(read_steps(SPEC, tmp_path / "killed"), read_steps(SPEC, tmp_path / "whole"))


def test_reading_a_finished_cell_removes_what_a_kill_left(tmp_path):
    record = run_cell(SPEC, tmp_path)
    for name in (f"{SPEC.key}.ckpt", f"{SPEC.key}.ckpt.previous", f".{SPEC.key}.lock"):
        (tmp_path / name).touch()
    assert run_cell(SPEC, tmp_path) == record == read_cell(SPEC, tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".json"]
