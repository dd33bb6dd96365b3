"""The study of persons: its features by hand, and a table that goes on where it was."""

import numpy as np
import pandas as pd
import pytest
import torch

from hyfreedp.experiments.studies import persons


def test_a_slope_of_brightness_has_one_direction():
    """Of -4, ..., 3: brighter to the right is 0, downwards 2, to the left -4."""
    ramp = np.broadcast_to(np.arange(0, 256, 8, dtype=np.uint8), (32, 32))
    images = np.stack([ramp, ramp.T, ramp[:, ::-1]])[..., None].repeat(3, axis=3)
    found = persons.features(images).unflatten(1, (8, 36))
    torch.testing.assert_close(found.norm(dim=(1, 2)), torch.full((3,), 10.0))
    weights = found[..., 0]
    assert weights.argmax(1).tolist() == [4, 6, 0]
    torch.testing.assert_close(weights.max(1).values, torch.full((3,), 10 / 6), rtol=1e-3, atol=0)  # of 36 cells


@pytest.fixture
def small(monkeypatch):
    """Two ways, one budget, two steps and four persons."""
    made, labels = torch.Generator().manual_seed(0), torch.arange(120) % 43
    parts = {name: (torch.randn(120, 5, generator=made), labels) for name in ("train", "validation", "test")}
    monkeypatch.setattr(persons, "load", lambda: (parts, np.arange(120) // 30))
    monkeypatch.setattr(persons, "WAYS", {way: persons.WAYS[way] for way in ("owners, 1", persons.TEXTBOOK)})
    monkeypatch.setattr(persons, "EPSILONS", (8.0,))
    monkeypatch.setattr(persons, "STEPS", 2)


@pytest.mark.usefixtures("small")
def test_a_run_that_is_recorded_is_not_made_again_and_one_that_is_not_is_the_same(tmp_path):
    table = tmp_path / "persons.csv"
    whole = persons.record(table, seeds=(0,))
    assert len(whole) == 4 and whole.version_torch.notna().all() and whole.date.notna().all()
    pd.read_csv(table).drop(index=1).to_csv(table, index=False)
    again = persons.record(table, seeds=(0,))
    released = [*persons.CELL, "noise", "accuracy"]
    pd.testing.assert_frame_equal(again.iloc[[0, 3, 1, 2]][released].reset_index(drop=True), whole[released])
    assert (again.seconds[:3] == whole.seconds[[0, 2, 3]].to_numpy()).all()
