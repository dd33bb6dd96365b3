"""Long runs, large batches, small and large models: bounded memory, right sums."""

import math
import time
import tracemalloc

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset
from twins import by_hand, sgd

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


def step_once(model, features):
    """The weights' change by one plain step on an empty batch, in units of the noise that it should have."""
    data = TensorDataset(torch.zeros(10, features))
    optimizer = by_hand(model, sgd(model), data, batch_size=2, target_epsilon=3.0, preset="fixed", steps=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step(lambda batch: model(batch[0]).mean(dim=1), [torch.zeros(0, features)])
    scale = optimizer.split.gradient_noise_multiplier(0) / optimizer.expected_batch_size
    pairs = zip(model.parameters(), before, strict=True)
    return torch.cat([((new - old) / scale).detach().flatten() for new, old in pairs])


def test_a_model_of_ten_million_parameters_has_the_noise_that_was_paid_for():
    """False alarms: one in 10^6 for the standard deviation, and for the mean."""
    change = step_once(nn.Linear(10_000, 1_000, bias=False), 10_000).double()
    n = change.numel()
    assert n == 10_000_000
    low, high = np.sqrt(stats.chi2.ppf([5e-7, 1 - 5e-7], n - 1) / (n - 1))
    assert low < change.std().item() < high  # within 0.12 percent
    assert abs(change.mean().item()) < stats.norm.isf(5e-7) / math.sqrt(n)
