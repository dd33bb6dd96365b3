"""Adaptive clipping: what is counted, what it costs, where the threshold goes."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from hyfreedp import NoiseGenerator
from hyfreedp.experiments.baselines.adaptive_clipping import NOISE_PART, RATE, AdaptiveClipping
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run


def test_one_record_changes_the_centred_count_by_a_half():
    def count(*norms):
        clipping = AdaptiveClipping(1.0)
        clipping.start(sigma=0.0, expected_batch_size=1.0, generator=NoiseGenerator(0))
        clipping.factors(torch.tensor(norms))
        return clipping.update()

    changes = [count(0.1, 3.0, 0.2, norm) - count(0.1, 3.0, 0.2) for norm in (0.2, 2.0, math.nan)]
    assert changes == pytest.approx([0.5, -0.5, -0.5])


def test_without_noise_the_threshold_moves_by_the_formula_and_physical_batches_add_up():
    norms = torch.rand(40, generator=torch.Generator().manual_seed(0))
    whole, pieces = AdaptiveClipping(0.9), AdaptiveClipping(0.9)
    for clipping in (whole, pieces):
        clipping.start(sigma=0.0, expected_batch_size=40.0, generator=NoiseGenerator(0))
    whole.factors(norms)
    for some in norms.split(7):
        pieces.factors(some)
    share = whole.update()
    assert share == pytest.approx((norms <= 0.9).float().mean().item())
    assert whole.threshold == pytest.approx(0.9 * math.exp(-RATE * (share - 0.5)))
    assert pieces.update() == pytest.approx(share) and pieces.threshold == pytest.approx(whole.threshold)


def test_the_noise_on_the_count_is_what_is_accounted_for():
    """Its variance by a chi-square test of 2,000 draws, two-sided, false alarms once in 10^4."""
    clipping = AdaptiveClipping(1.0)
    clipping.start(sigma=1.0, expected_batch_size=100.0, generator=NoiseGenerator(1))
    draws = np.array([(clipping.update() - 0.5) * 100 for _ in range(2000)])
    statistic = (draws**2).sum() / (NOISE_PART * 100) ** 2
    assert stats.chi2.ppf(0.5e-4, 2000) < statistic < stats.chi2.ppf(1 - 0.5e-4, 2000)


def test_a_runs_gradients_and_count_together_cost_what_sigma_costs():
    """Two Gaussians on one batch: sensitivity R_g of the sum, and 1/2 of the centred count."""
    spec = Spec(method="adaptive", learning_rate=0.01, clipping_threshold=0.1, steps=5)
    optimizer, _ = make_run(spec)
    clipping = optimizer.gradient_engine.clipping
    assert clipping.count_noise == 25
    expected = 0.1 * (optimizer.split.sigma**-2 - (2 * 25) ** -2) ** -0.5
    assert optimizer.split.sigma * clipping.sensitivity == pytest.approx(expected)


def test_a_run_counts_the_norms_of_its_batch():
    """Its engine gives each norm a copy of the rule. All norms are beyond a threshold so small."""
    spec = Spec(method="adaptive", learning_rate=0.01, clipping_threshold=1e-6, steps=1, epsilon=math.inf)
    optimizer, loader = make_run(spec)
    (batch,) = loader
    optimizer.step(spec.problem.losses_of(optimizer.module), batch)
    share = optimizer.gradient_engine.clipping.update()
    assert share == pytest.approx(0.5 - len(batch[1]) / 2 / optimizer.expected_batch_size)
