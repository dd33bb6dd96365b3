"""Errors of private losses, and the threshold of the least."""

import math

import numpy as np
import pytest
from scipy import optimize

from hyfreedp import normal_clipping_bias
from hyfreedp.experiments.studies import bias_variance


@pytest.mark.parametrize(("batch_size", "golden"), [(50, 1.614), (5000, 2.818)])
def test_the_best_threshold_is_the_lowest_point_of_the_error(batch_size, golden):
    def error(threshold):
        return np.hypot(normal_clipping_bias(threshold, 2.0, 0.4), 23.2845 * threshold / batch_size)

    lowest = optimize.minimize_scalar(error, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-9})
    found = bias_variance.optimal_threshold(2.0, 0.4, noise_multiplier=23.2845, expected_batch_size=batch_size)
    assert found == pytest.approx(lowest.x, abs=1e-5)
    assert found == pytest.approx(golden, abs=1e-3)


def test_errors_of_several_probes_are_root_mean_squares():
    losses = np.random.default_rng(0).exponential(1.0, (3, 20))
    table = bias_variance.errors(losses, [0.3, 1.0], noise_multiplier=2.0, expected_batch_size=25)
    for row, threshold in zip(table.itertuples(), [0.3, 1.0], strict=True):
        biases = [sum(max(x - threshold, 0) for x in probe) / 20 for probe in losses]
        assert row.bias == pytest.approx(math.sqrt(sum(b**2 for b in biases) / 3))
        assert row.noise == pytest.approx(2.0 * threshold / 25)
        assert row.rmse == pytest.approx(math.sqrt(row.bias**2 + row.noise**2))
