"""Statistics over places and seeds: against scipy's own and against closed forms."""

import numpy as np
import pytest
from scipy import stats

from hyfreedp.experiments.tables.looks import profile, stratified_bootstrap


def test_a_profile_is_the_share_that_reaches_a_mark():
    values = np.array([-2.0, -1.0, 0.0, 3.0])
    assert profile(values, [-5, -1, 0.5, 4]).tolist() == [1, 0.75, 0.25, 0]
    marks = np.linspace(-3, 4, 29)
    assert np.allclose(profile(values, marks), 1 - stats.ecdf(values).cdf.evaluate(marks - 1e-9))


def test_seeds_are_drawn_within_their_place_alone():
    """Places far apart: their spread is no part of the interval of the mean, as the closed form has it."""
    rng = np.random.default_rng(1)
    places = [level + rng.standard_normal(5) for level in (0, 100, 1000)]
    low, high = stratified_bootstrap(places, np.mean, draws=4000)
    exact = np.sqrt(sum(np.var(runs) for runs in places) / 5) / 3  # of a mean of means, by resampling
    assert (high - low) / 2 == pytest.approx(stats.norm.ppf(0.975) * exact, rel=0.06)
    assert low < np.mean(places) < high
