"""The threshold at which the error of a private loss is least."""

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
