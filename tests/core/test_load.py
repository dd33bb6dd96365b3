"""Long runs, large batches, small and large models: bounded memory, right sums."""

import math
import time
import tracemalloc

import pytest
import torch

from hyfreedp.accounting import PrivacyLedger, calibrate_noise
from hyfreedp.privatize import privatize_loss

STEPS = 100_000


def plan(steps=STEPS):
    return calibrate_noise(
        target_epsilon=3.0, target_delta=1e-5, sample_rate=0.001, steps=steps, accountant="rdp", interval=5
    )


def test_a_ledger_of_100_000_steps_takes_less_memory_than_their_history():
    """It keeps a tag of each release, to know one that is made again with other data."""
    started = time.perf_counter()
    ledger = PrivacyLedger(plan())
    tracemalloc.start()
    for _ in range(STEPS):
        ledger.record()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 300 * STEPS and ledger.steps == STEPS
    assert ledger.epsilon() == pytest.approx(3.0, abs=0.05) and ledger.epsilon() <= 3
    assert time.perf_counter() - started < 60


def test_the_mean_of_a_million_losses_is_their_mean():
    """Without noise; a sum in single precision would be off by more than a hundred times the tolerance."""
    losses = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = privatize_loss(losses, 0.5, 0.0, expected_batch_size=1e6)
    assert float(mean) == pytest.approx(math.fsum(losses.clamp(max=0.5).tolist()) / 1e6, rel=1e-12)
    single = privatize_loss(torch.full((1_000_000,), 0.1), 0.5, 0.0, expected_batch_size=1e6)
    assert float(single) == pytest.approx(float(torch.tensor(0.1)), rel=1e-10)
