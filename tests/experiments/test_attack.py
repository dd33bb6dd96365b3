"""The membership attack of notebook 11: its statistics, its bound, and that privacy holds where it should."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from hyfreedp.experiments.audits import attack


def test_bound_is_the_papers_of_record_and_not_below_what_a_gaussian_allows():
    for epsilon, delta in ((0.0, 1e-3), (0.5, 1e-5), (3.0, 0.01)):
        naive = (math.exp(epsilon) - 1 + 2 * delta) / (math.exp(epsilon) + 1)
        assert attack.advantage_bound(epsilon, delta) == pytest.approx(naive, rel=1e-12)
    assert attack.advantage_bound(math.inf, 1e-5) == 1
    for sigma in (1.0, 5.0, 25.0):
        mu = math.sqrt(3) / sigma  # three losses, each moved by its clip
        best_attack = 2 * stats.norm.cdf(mu / 2) - 1  # total variation
        epsilon = attack.release_epsilon("losses", sigma, 1e-4)
        # Balle and Wang (2018), Theorem 8.
        delta = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
        assert delta == pytest.approx(1e-4, rel=1e-2)
        assert best_attack <= attack.advantage_bound(epsilon, 1e-4)


def test_threshold_is_chosen_on_one_half_and_judged_on_the_other():
    without, planted = np.arange(10.0), np.arange(10.0) + 100
    assert attack.judge(without, planted) == attack.Score(5, 0, 5)
    assert attack.judge(planted, without).advantage == 1  # in either direction
    # Separated on the first half only: what was learned there is worth nothing on the second.
    only_first = np.concatenate([np.arange(5.0) + 100, np.arange(5.0, 10.0)])
    assert attack.judge(without, only_first).advantage == 0


@pytest.fixture(scope="module")
def result():
    """200 records on nearly one parabola, and an outlier that bends it."""
    rng = np.random.default_rng(0)
    slope, curvature = rng.normal(1.0, 0.3, 200), rng.normal(1.0, 0.3, 200)
    others = np.stack([3 - 0.5 * slope + 0.125 * curvature, np.full(200, 3.0), 3 + 0.5 * slope + 0.125 * curvature])
    sigmas = {"losses": 20.0}
    tables = []
    known = {"others": others.tolist(), "outlier": [90.0, 30.0, 1.0], "distance": 0.5, "sigmas": sigmas}
    for observer, rate in (("random", 0.5), ("knows", 1.0)):
        play = {"sample_rate": rate, "expected_batch_size": 200 * rate, "weakenings": [1.0, 0.002], "runs": 200}
        tables.append(attack.game(**known, **play, seed=0).assign(observer=observer, seed=0))
    table = attack.advantages(pd.concat(tables), sigmas, 1e-4)
    return table.set_index(["observer", "probe", "weakening"])


def test_raw_rates_give_the_outlier_away(result):
    assert (result.xs("raw", level="probe").low > 0.8).all()
    assert result.loc[("knows", "raw", 0.0), "advantage"] == 1


def test_private_rates_stay_below_the_bound_of_their_epsilon(result):
    private = result.drop("raw", level="probe")
    # Each interval lies wholly above the true advantage with probability 2.5 % at most: 4 of them, one of five seeds.
    assert (private.low <= private.bound).all()
    calibrated = private.xs(1.0, level="weakening")
    assert (calibrated.bound < 0.2).all() and (calibrated.advantage < 0.2).all()


def test_without_enough_noise_the_attack_succeeds(result):
    """So the attack is able to fail the test above."""
    weak = result.loc[("knows", "losses", 0.002)]
    assert weak.epsilon > 5 and weak.low > 0.5
