"""What every test shares: the same seeds and threads on every machine, and no network."""

import os
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers and timm are imported
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import numpy as np
import pytest
import torch

torch.set_num_threads(1)  # the tests are small; threads would only wait for each other on a busy machine

# The same examples every time: a failure is a change of the code, never of luck or of a busy machine.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_terminal_summary(terminalreporter):
    """CPU time, which a busy machine hardly changes, in units of a computation like those of the tests."""
    spent, start = sum(os.times()[:4]), time.process_time()
    x = torch.ones(100)
    for _ in range(100_000):
        x = (x + 1).sin()
    reference = time.process_time() - start
    terminalreporter.write_line(f"{spent:.0f} s of CPU time, {spent / reference:.0f} times the reference")


@pytest.fixture(autouse=True)
def _seed():
    """No test depends on which tests ran before it."""
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """Folders of an empty repository, ``tmp_path``, in which the experiments work instead of in this one."""
    from hyfreedp.experiments.store import paths

    monkeypatch.setenv("HYFREEDP_ROOT", str(tmp_path))
    for name in ("CELLS", "CACHE"):
        monkeypatch.delenv(f"HYFREEDP_{name}", raising=False)
    return paths.workspace()


@pytest.fixture
def unbound_noise():
    """Noise that follows from seed, purpose and step alone, see :func:`twins.unbind_noise`."""
    from twins import unbind_noise

    undo = unbind_noise()
    yield
    undo()
