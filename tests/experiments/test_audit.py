"""Audits: their bounds are valid and have power, faults are refuted, and the library's own claims are not."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from hyfreedp.experiments.accounting_of_the_paper import Counting, calibrate
from hyfreedp.experiments.audits import releases
from hyfreedp.experiments.audits.attack import Score, release_epsilon


def test_bound_from_rates_is_the_definition_of_privacy():
    score = Score(hits=700, alarms=300, trials=1000)
    interval = {count: stats.binomtest(count, 1000).proportion_ci(0.95, method="exact") for count in (700, 300)}
    by_hand = math.log((interval[700].low - 0.01) / interval[300].high)
    assert releases.epsilon_bound(score, 0.01) == pytest.approx(by_hand, rel=1e-12)
    # With every record found, only the other direction says much: who is not accused was not there.
    found = releases.epsilon_bound(Score(1000, 900, 1000), 0.0)
    assert found > math.log(0.07 / 0.0037) > math.log(1 / 0.9)


def gaussian(mu, runs, random):
    return pd.DataFrame({"without": random.normal(0, 1, runs), "planted": random.normal(mu, 1, runs)})


def test_bounds_of_a_gaussian_are_below_the_truth_as_often_as_they_say_and_not_far_below():
    random, mu, delta = np.random.default_rng(0), 1.0, 1e-2
    truth = release_epsilon("losses", math.sqrt(3) / mu, delta)
    found = np.array([releases.bounds(gaussian(mu, 1000, random), [delta], 0.8).lower_bound.item() for _ in range(20)])
    # Each exceeds the truth with probability 20 % at most; of 20, more than 11 do with probability 1e-4.
    assert (found > truth).sum() <= 11
    large = releases.bounds(gaussian(mu, 200_000, random), [delta]).lower_bound.item()
    assert 0.8 * truth < large < truth


def test_nothing_is_found_where_nothing_is_and_the_threshold_is_judged_on_fresh_runs():
    assert releases.bounds(gaussian(0.0, 10_000, np.random.default_rng(1)), [0.0, 1e-3]).lower_bound.max() < 0.5
    without, planted = np.zeros(1000), np.concatenate([np.ones(500), np.zeros(500)])
    assert releases.best_score(without, planted, 0.0) == Score(0, 0, 500)


DELTAS = [1e-3, 1e-2]
RUNS = {"deltas": DELTAS, "runs": 60_000, "seed": 0, "confidence": 0.99}


def split_of(composition):
    plan = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 0.02, "steps": 10, "interval": 1}
    return calibrate(**plan, counting=Counting("rdp", composition))


def claims(split, composition):
    return [Counting("pld", composition).epsilon(split, delta=delta, coarseness=10) for delta in DELTAS]


def test_runs_refute_independent_composition_and_stay_below_the_same_batch_curve():
    """Ten steps that all probe: the noise of 'independent' really costs epsilon 10, of which these runs see a part."""
    split = split_of("independent")
    found = releases.joint_bounds(split=split.to_dict(), **RUNS).lower_bound
    assert (found > claims(split, "independent")).all()
    assert (found < claims(split, "same_batch")).all()


def test_runs_do_not_refute_same_batch_composition_unless_its_noise_is_halved():
    split = split_of("same_batch")
    claimed = claims(split, "same_batch")
    found = releases.joint_bounds(split=split.to_dict(), **RUNS).lower_bound
    assert (found < claimed).all() and found.max() > 0.2 * max(claimed)
    fields = ("sigma_gradient", "sigma_gradient_probe", "sigma_loss")
    weak = split.to_dict() | {name: getattr(split, name) / 2 for name in fields}
    assert (releases.joint_bounds(split=weak, **RUNS).lower_bound > claimed).any()
