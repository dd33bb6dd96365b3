"""Notebook 01's numbers: simulations of Theorem 1, and the threshold of least error."""

import math

import numpy as np
import pytest
from scipy import optimize

from hyfreedp import clipping_bias
from hyfreedp.experiments.studies import bias_variance


@pytest.mark.parametrize("expected", [40, 80])
def test_simulated_releases_are_theorem_1(expected):
    losses = np.random.default_rng(0).gamma(2.0, 0.5, 40)
    plan = {"noise_multiplier": 3.0, "expected_batch_size": expected, "runs": 4000, "seed": 1}
    dots = bias_variance.release_dots(losses, [0.5, 2.0], **plan)
    bias = clipping_bias(losses, [0.5, 2.0]) * 40 / expected
    noise = 3.0 * np.array([0.5, 2.0]) / expected
    # Four standard errors each: a false alarm in one of 2,600 seeds.
    assert (np.abs(dots.bias - bias) < 4 * dots.bias_error).all()
    assert (np.abs(dots.noise - noise) < 4 * dots.noise_error).all()
    assert (np.abs(dots.rmse - np.hypot(bias, noise)) < 4 * dots.rmse_error).all()


@pytest.mark.parametrize(("batch_size", "golden"), [(50, 1.614), (5000, 2.818)])
def test_the_marked_optimum_is_the_lowest_point_of_the_curve(batch_size, golden):
    setting = {"noise_multiplier": 23.2845, "expected_batch_size": batch_size}

    def error(threshold):
        return bias_variance.normal_errors(threshold, mean=2.0, std=0.4, **setting).rmse[0]

    lowest = optimize.minimize_scalar(lambda t: error([t]), bounds=(0.1, 10), method="bounded", options={"xatol": 1e-9})
    assert bias_variance.optimal_threshold(2.0, 0.4, **setting) == pytest.approx(lowest.x, abs=1e-5)
    assert lowest.x == pytest.approx(golden, abs=1e-3)
    trade = bias_variance.trade_off(mean=2.0, std=0.4, noise_multiplier=23.2845, batch_size=batch_size)
    assert trade.error_at(trade.best) == pytest.approx(lowest.fun, rel=2e-3)


def test_errors_of_several_probes_are_root_mean_squares():
    losses = np.random.default_rng(0).exponential(1.0, (3, 20))
    table = bias_variance.errors(losses, [0.3, 1.0], noise_multiplier=2.0, expected_batch_size=25)
    for row, threshold in zip(table.itertuples(), [0.3, 1.0], strict=True):
        biases = [sum(max(x - threshold, 0) for x in probe) / 20 for probe in losses]
        assert row.bias == pytest.approx(math.sqrt(sum(b**2 for b in biases) / 3))
        assert row.noise == pytest.approx(2.0 * threshold / 25)
        assert row.rmse == pytest.approx(math.sqrt(row.bias**2 + row.noise**2))
