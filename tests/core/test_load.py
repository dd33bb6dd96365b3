"""Long runs, large batches, small and large models: bounded memory, right sums."""

import math
import time
import tracemalloc

import numpy as np
import pytest
import torch
from cases import together
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hyfreedp import NoiseGenerator, PrivacyEngine
from hyfreedp.accounting import PrivacyLedger, calibrate_noise
from hyfreedp.experiments.baselines.contrasts import privatize_contrasts
from hyfreedp.experiments.baselines.line_search import ContrastProbe
from hyfreedp.experiments.baselines.posterior import Rule
from hyfreedp.privatize import privatize_loss
from hyfreedp.records import StepRecord

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


def test_a_row_of_history_takes_less_than_a_kilobyte():
    """A hundred thousand steps, each with a probe, stay below 100 MB."""
    probe = ContrastProbe(Rule("posterior", 0.9), eta=1e-4)
    losses, generator = torch.rand(3, 10), NoiseGenerator(0)
    tracemalloc.start()
    rows = []
    for step in range(500):
        result = probe.update(losses, 1.0, 10.0, generator, held=False)
        rows.append(StepRecord(step, result.eta_next, result).to_dict())
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / len(rows) < 1000


def test_the_mean_of_a_million_losses_is_their_mean():
    """Without noise; a sum in single precision would be off by more than a hundred times the tolerance."""
    losses = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = privatize_loss(losses, 0.5, 0.0, expected_batch_size=1e6)
    assert float(mean) == pytest.approx(math.fsum(losses.clamp(max=0.5).tolist()) / 1e6, rel=1e-12)
    single = privatize_loss(torch.full((1_000_000,), 0.1), 0.5, 0.0, expected_batch_size=1e6)
    assert float(single) == pytest.approx(float(torch.tensor(0.1)), rel=1e-10)


def test_the_contrasts_of_a_million_losses_are_their_means():
    """Without noise, and with thresholds that clip nothing."""
    low = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = torch.stack([low, low + 0.25, low + 0.75])
    found = privatize_contrasts(losses, (10.0, 10.0), 0.0, expected_batch_size=1e6)
    assert float(found.difference) == pytest.approx(0.75, rel=1e-12)
    assert float(found.bend) == pytest.approx(0.25, rel=1e-12)


def private(model, data, batch_size, **settings):
    _, optimizer, loader = PrivacyEngine(seed=0).make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=batch_size),
        **({"target_epsilon": 3.0, "target_delta": 1e-3, "steps": 4, "accountant": "rdp"} | settings),
    )
    return optimizer, loader


@together("size", [0, 1, 50])
def test_batches_from_empty_to_the_whole_data_set(size):
    data = TensorDataset(torch.randn(50, 3), torch.randn(50, 1))
    model = nn.Linear(3, 1)
    optimizer, loader = private(model, data, 50)
    assert [len(batch) for batch in (loader.batch_sampler.batch(step) for step in range(4))] == [50] * 4  # rate 1
    before = model.weight.clone()
    batch = [tensor[:size] for tensor in data.tensors]
    for _ in range(4):
        optimizer.step(lambda b: (model(b[0]) - b[1]).square().mean(dim=1), batch)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not torch.equal(model.weight, before) and optimizer.epsilon_spent() <= 3  # noise, if nothing else


def step_once(model, features):
    """The weights' change by one plain step on an empty batch, in units of the noise that it should have."""
    data = TensorDataset(torch.zeros(10, features))
    optimizer, _ = private(model, data, 2, preset="fixed", steps=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step(lambda batch: model(batch[0]).mean(dim=1), [torch.zeros(0, features)])
    scale = optimizer.split.gradient_noise_multiplier(0) / optimizer.expected_batch_size
    pairs = zip(model.parameters(), before, strict=True)
    return torch.cat([((new - old) / scale).detach().flatten() for new, old in pairs])


def test_a_model_of_one_parameter():
    change = step_once(nn.Linear(1, 1, bias=False), 1)
    assert change.shape == (1,) and 0 < abs(float(change)) < 6


def test_a_model_of_ten_million_parameters_has_the_noise_that_was_paid_for():
    """False alarms: one in 10^6 for the standard deviation, and for the mean."""
    change = step_once(nn.Linear(10_000, 1_000, bias=False), 10_000).double()
    n = change.numel()
    assert n == 10_000_000
    low, high = np.sqrt(stats.chi2.ppf([5e-7, 1 - 5e-7], n - 1) / (n - 1))
    assert low < change.std().item() < high  # within 0.12 percent
    assert abs(change.mean().item()) < stats.norm.isf(5e-7) / math.sqrt(n)
