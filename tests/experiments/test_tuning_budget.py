"""What tuning costs: random search against dp-accounting, shares against their inverse."""

import math

import numpy as np
import pytest
from cases import each
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, dp_event
from dp_accounting.rdp import RdpAccountant

from hyfreedp import calibrate_noise
from hyfreedp.experiments.accounting_of_the_paper import ORDERS
from hyfreedp.experiments.tables import tuning_budget

PROTOCOL = dict(target_delta=1e-5, sample_rate=0.1, steps=20)
BUDGET = dict(target_epsilon=2.0, **PROTOCOL)


@each(shape=[0.0, 0.5, 1.0, 3.0], gamma=[0.01, 0.3, 0.9])
def test_the_mean_number_of_runs_is_that_of_the_distribution(shape, gamma):
    # P(k) is proportional to (1 - gamma)^k Gamma(k + eta) / k! (Papernot and Steinke, 2022, Definition 1).
    k = np.arange(1, 20_000)
    log_weights = k * math.log1p(-gamma) + np.array([math.lgamma(i + shape) - math.lgamma(i + 1) for i in k])
    weights = np.exp(log_weights - log_weights.max())
    assert tuning_budget.mean_runs(shape, gamma) == pytest.approx(float((k * weights).sum() / weights.sum()), rel=1e-9)
    assert tuning_budget.gamma_for(shape, tuning_budget.mean_runs(shape, gamma)) == pytest.approx(gamma, rel=1e-9)


@each(shape=[0.0, 1.0, 2.5, math.inf], mean=[2.0, 5.0, 40.0])
def test_random_search_agrees_with_dp_accounting(shape, mean):
    run = SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0)), 20)
    orders = [order for order in ORDERS if float(order).is_integer()]  # where its RDP is exact, as ours is
    accountant = RdpAccountant(orders)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(run, mean, shape))
    theirs, single = dict(zip(orders, accountant._rdp, strict=True)), RdpAccountant(orders)
    single.compose(run)
    ours = tuning_budget.repeated_rdp(orders, single._rdp, mean=mean, shape=shape)
    if math.isfinite(shape):
        ours = np.minimum.accumulate(ours[::-1])[::-1]  # it also uses that Renyi DP grows with the order
    assert ours == pytest.approx([theirs[order] for order in orders], rel=1e-6)


def test_a_calibrated_search_meets_its_budget_and_its_noise_grows_with_the_runs():
    noises = [tuning_budget.search_noise(2.0, **PROTOCOL, mean=mean, shape=1.0) for mean in (2.0, 16.0)]
    assert noises == sorted(noises)
    for mean, noise in zip((2.0, 16.0), noises, strict=True):
        spent = tuning_budget.search_epsilon(noise, **PROTOCOL, mean=mean, shape=1.0)
        assert 2.0 * (1 - 1e-5) < spent <= 2.0
        assert tuning_budget.dp_sgd_epsilon(noise, **PROTOCOL) < 2.0


def test_quantile_noise_for_a_share_is_the_inverse():
    quantile_noise = tuning_budget.quantile_noise_for_share(0.2, budget=BUDGET)
    sigma = calibrate_noise(**BUDGET, probe="none", accountant="rdp").sigma
    kept = tuning_budget.dp_sgd_epsilon(tuning_budget.update_noise(sigma, quantile_noise), **PROTOCOL)
    assert kept == pytest.approx(0.8 * 2.0, rel=1e-5)
