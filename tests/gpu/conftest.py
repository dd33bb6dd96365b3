"""Tests on an accelerator, skipped where there is none: ``make test-gpu``. ``--on cpu`` tries them elsewhere."""

import pytest
import torch

from hyfreedp.experiments.store.device import default_device
from hyfreedp.pytorch.devices import CPU, exact_convolutions


def pytest_addoption(parser):
    parser.addoption("--on", metavar="DEVICE", help="run the tests of tests/gpu on this device (default: accelerator)")


@pytest.fixture(scope="session")
def device(request):
    chosen = request.config.getoption("--on", None)
    found = torch.device(chosen) if chosen else default_device()
    if chosen is None and found == CPU:
        pytest.skip("there is no accelerator: torch.accelerator.is_available() is false")
    return found if found == CPU or found.index is not None else torch.device(found.type, 0)


@pytest.fixture(autouse=True)
def _exact():
    """Convolutions in float32, not TF32, so that sums can be compared."""
    with exact_convolutions():
        yield
