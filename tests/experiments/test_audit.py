"""Audits: their bounds are valid and have power, faults are refuted, and the library's own claims are not."""

import itertools
import math
import warnings

import numpy as np
import pandas as pd
import pytest
from cases import together
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hyfreedp import calibrate_noise
from hyfreedp.accounting import UnsoundAccountingWarning
from hyfreedp.accounting.composition import spent
from hyfreedp.experiments.audits import one_run, releases
from hyfreedp.experiments.audits.attack import Score, release_epsilon

# -- from a threshold's hits and false alarms to epsilon ---------------------------------------------------------------


def test_bound_from_rates_is_the_definition_of_privacy():
    score = Score(hits=700, alarms=300, trials=1000)
    interval = {count: stats.binomtest(count, 1000).proportion_ci(0.95, method="exact") for count in (700, 300)}
    by_hand = math.log((interval[700].low - 0.01) / interval[300].high)
    assert releases.epsilon_bound(score, 0.01) == pytest.approx(by_hand, rel=1e-12)
    # With every record found, only the other direction says much: who is not accused was not there.
    found = releases.epsilon_bound(Score(1000, 900, 1000), 0.0)
    assert found > math.log(0.07 / 0.0037) > math.log(1 / 0.9)


@given(hits=st.integers(0, 99), alarms=st.integers(0, 99), delta=st.floats(0, 0.9), confidence=st.floats(0.5, 0.99))
def test_bound_grows_with_the_evidence(hits, alarms, delta, confidence):
    here = releases.epsilon_bound(Score(hits, alarms, 100), delta, confidence)
    assert here >= 0
    assert releases.epsilon_bound(Score(hits + 1, alarms, 100), delta, confidence) >= here
    assert releases.epsilon_bound(Score(hits, alarms + 1, 100), delta, confidence) <= here
    assert releases.epsilon_bound(Score(hits, alarms, 100), min(1, delta + 0.05), confidence) <= here
    assert releases.epsilon_bound(Score(hits, alarms, 100), delta, (1 + confidence) / 2) <= here


def gaussian(mu, runs, random):
    return pd.DataFrame({"without": random.normal(0, 1, runs), "planted": random.normal(mu, 1, runs)})


def test_bounds_of_a_gaussian_are_below_the_truth_as_often_as_they_say_and_not_far_below():
    random, mu, delta = np.random.default_rng(0), 1.0, 1e-2
    truth = release_epsilon("losses", math.sqrt(3) / mu, delta)
    found = np.array([releases.bounds(gaussian(mu, 1000, random), [delta], 0.8).lower_bound.item() for _ in range(60)])
    # Each exceeds the truth with probability 20 % at most; of 60, more than 24 do with probability 1e-4.
    assert (found > truth).sum() <= 24
    large = releases.bounds(gaussian(mu, 200_000, random), [delta]).lower_bound.item()
    assert 0.8 * truth < large < truth


def test_nothing_is_found_where_nothing_is_and_the_threshold_is_judged_on_fresh_runs():
    random = np.random.default_rng(1)
    assert releases.bounds(gaussian(0.0, 10_000, random), [0.0, 1e-3]).lower_bound.max() < 0.5
    without, planted = np.zeros(1000), np.concatenate([np.ones(500), np.zeros(500)])
    assert releases.best_score(without, planted, 0.0) == Score(0, 0, 500)
    with pytest.raises(ValueError, match=r"equally long, at least 2, got shapes \(3,\) and \(4,\)"):
        releases.best_score([1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0], 0.0)


def test_bounds_at_several_deltas_share_the_error():
    runs = gaussian(1.0, 2000, np.random.default_rng(2))
    alone, shared = releases.bounds(runs, [1e-3], 0.95), releases.bounds(runs, [1e-3, 1e-3], 0.9)
    pd.testing.assert_frame_equal(shared.iloc[[0]], alone)


# -- one probe ---------------------------------------------------------------------------------------------------------


@together(("probe", "sensitivity"), [("losses", 3.0), ("votes", 1.0)])
def test_the_record_moves_a_probe_by_all_that_its_sensitivity_allows(probe, sensitivity):
    noiseless = releases.probe_statistics(probe=probe, sigma_loss=0.0, runs=1, seed=0)
    moved = noiseless.planted - noiseless.without
    assert moved.item() == pytest.approx(sensitivity, rel=1e-12)  # projected on the move itself: its squared norm
    noisy = releases.probe_statistics(probe=probe, sigma_loss=2.0, runs=2000, seed=0)
    assert noisy.without.std() == pytest.approx(2 * math.sqrt(sensitivity), rel=0.08)  # five standard errors


@pytest.mark.parametrize(("probe", "runs"), [("losses", 400_000), ("votes", 3000)])
def test_a_probe_keeps_its_epsilon_and_one_with_half_the_noise_is_refuted(probe, runs):
    delta = 1e-2
    sigma = {"losses": math.sqrt(3), "votes": 1.0}[probe]  # both move by one standard deviation
    claim = release_epsilon(probe, sigma, delta)
    honest, faulty = (
        releases.probe_bounds(
            probe=probe, sigma_loss=factor * sigma, deltas=[delta], runs=runs, seed=1, confidence=0.99
        ).lower_bound.item()
        for factor in (1.0, 0.5)
    )
    assert 0.3 * claim < honest < claim < faulty < release_epsilon(probe, 0.5 * sigma, delta)


# -- gradient and probe of whole runs ----------------------------------------------------------------------------------

DELTAS = [1e-3, 1e-2]


def split_of(composition):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsoundAccountingWarning)
        return calibrate_noise(
            target_epsilon=3.0,
            target_delta=1e-5,
            sample_rate=0.02,
            steps=10,
            interval=1,
            probe="losses",
            accountant="rdp",
            allocation="constant",
            composition=composition,
        )


def claims(split, composition):
    return [
        spent(split, 10, 10, composition=composition, target_delta=delta, accountant="pld", coarseness=10)
        for delta in DELTAS
    ]


def test_runs_refute_independent_composition_and_stay_below_the_same_batch_curve():
    """Ten steps that all probe: the noise of 'independent' really costs epsilon 10, of which these runs see a part."""
    split = split_of("independent")
    found = releases.joint_bounds(
        split=split.to_dict(), deltas=DELTAS, runs=60_000, seed=0, confidence=0.99
    ).lower_bound
    assert (found > claims(split, "independent")).all()
    assert (found < claims(split, "same_batch")).all()


def test_runs_do_not_refute_same_batch_composition_unless_its_noise_is_halved():
    split = split_of("same_batch")
    claimed = claims(split, "same_batch")
    arguments = {"deltas": DELTAS, "runs": 60_000, "seed": 0, "confidence": 0.99}
    found = releases.joint_bounds(split=split.to_dict(), **arguments).lower_bound
    assert (found < claimed).all() and found.max() > 0.2 * max(claimed)
    fields = ("sigma_gradient", "sigma_gradient_probe", "sigma_loss")
    weak = split.to_dict() | {name: getattr(split, name) / 2 for name in fields}
    assert (releases.joint_bounds(split=weak, **arguments).lower_bound > claimed).any()


def test_statistic_of_a_run_is_its_likelihood_ratio():
    """E[e^L] without the record and E[e^-L] with it are 1 for a likelihood ratio, and for little else."""
    runs = releases.joint_statistics(split=split_of("same_batch").to_dict(), runs=40_000, seed=3)
    for values in (np.exp(runs.without), np.exp(-runs.planted)):
        assert values.mean() == pytest.approx(1, abs=4 * values.std() / math.sqrt(len(values)))
    assert runs.planted.mean() > 0 > runs.without.mean()


def test_other_probes_are_refused():
    split = split_of("same_batch").to_dict() | {"probe": "contrasts"}
    with pytest.raises(ValueError, match="must probe 'losses' with 'gaussian' noise, got 'contrasts', 'gaussian'"):
        releases.joint_statistics(split=split, runs=10, seed=0)


# -- one run with many canaries ----------------------------------------------------------------------------------------


def slow_p_value(right, guesses, canaries, epsilon, delta):
    """The theorem, sum by sum."""
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))

    def at_least(v):
        return sum(
            math.comb(guesses, k) * chance**k * (1 - chance) ** (guesses - k) for k in range(max(v, 0), guesses + 1)
        )

    largest = max((at_least(right - i) - at_least(right)) / i for i in range(1, canaries + 1))
    return min(1.0, at_least(right) + 2 * canaries * delta * largest)


COUNTS = [(0, 0, 5), (0, 4, 4), (3, 4, 10), (30, 40, 100), (40, 40, 60)]


@together(("counts", "epsilon", "delta"), itertools.product(COUNTS, [0.0, 0.5, 3.0], [0.0, 1e-4, 0.1]))
def test_p_value_is_that_of_the_theorem(counts, epsilon, delta):
    right, guesses, canaries = counts
    found = one_run.p_value(right, guesses, canaries, epsilon, delta)
    assert found == pytest.approx(slow_p_value(right, guesses, canaries, epsilon, delta), rel=1e-9, abs=1e-12)


def test_bound_without_delta_is_clopper_and_pearsons():
    """Then right guesses are at most binomial, and epsilon is the logit of their chance."""
    chance = stats.binomtest(180, 200).proportion_ci(0.9, method="exact").low
    assert one_run.epsilon_bound(180, 200, 1000, 0.0) == pytest.approx(math.log(chance / (1 - chance)), abs=1e-6)
    chance = 0.05 ** (1 / 100)  # all of a hundred right
    assert one_run.epsilon_bound(100, 100, 100, 0.0) == pytest.approx(math.log(chance / (1 - chance)), abs=1e-6)
    assert one_run.epsilon_bound(100, 200, 200, 0.0) == 0


@given(
    guesses=st.integers(1, 80),
    share=st.floats(0, 1),
    abstained=st.integers(0, 50),
    delta=st.floats(0, 0.01),
    epsilon=st.floats(0, 5),
)
def test_one_run_bound_is_monotone(guesses, share, abstained, delta, epsilon):
    right, canaries = int(share * (guesses - 1)), guesses + abstained
    value, bound = one_run.p_value, one_run.epsilon_bound
    assert (
        value(right, guesses, canaries, epsilon + 0.1, delta) >= value(right, guesses, canaries, epsilon, delta) - 1e-9
    )
    here = bound(right, guesses, canaries, delta)
    assert bound(right + 1, guesses, canaries, delta) >= here - 1e-6
    assert bound(right, guesses, canaries, delta + 0.01) <= here + 1e-6
    assert bound(right, guesses, canaries, delta, 0.99) <= here + 1e-6
    assert here == 0 or value(right, guesses, canaries, here, delta) == pytest.approx(0.05, abs=1e-6)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="0 <= right <= guesses <= canaries must hold, got 3, 2, 5"):
        one_run.p_value(3, 2, 5, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"epsilon must be at least 0 and delta in .*, got -1.0 and 0.0"):
        one_run.p_value(1, 2, 5, -1.0, 0.0)


def test_guesses_are_the_extremes():
    assert one_run.guess([5.0, 1.0, 4.0, 2.0, 3.0], [True, False, False, True, True], 2) == 2
    assert one_run.guess([5.0, 1.0, 4.0, 2.0, 3.0], [True, False, False, True, True], 5) == 2
    assert one_run.guess([1.0, 2.0], [True, False], 0) == 0


def randomized(epsilon, canaries, random):
    """Scores of a mechanism that tells each coin as randomized response does: exactly epsilon-DP."""
    included = random.random(canaries) < 0.5
    told = included ^ (random.random(canaries) > 1 / (1 + math.exp(-epsilon)))
    return pd.DataFrame({"included": included, "score": told + random.random(canaries)})


def test_one_run_bound_of_randomized_response_is_valid_and_tight():
    random = np.random.default_rng(4)
    found = np.array(
        [one_run.pooled_bound([randomized(1.0, 200, random)], 0.0, 0.8)["lower_bound"] for _ in range(100)]
    )
    assert (found > 1.0).sum() <= 35  # 20 are allowed on average; more than 35 with probability 1e-4
    runs = [randomized(1.0, 2000, random) for _ in range(5)]
    pooled, single = one_run.pooled_bound(runs, 0.0), one_run.pooled_bound(runs[:1], 0.0)
    assert 0.85 < pooled["lower_bound"] < 1.0 and pooled["canaries"] == 10_000
    assert single["lower_bound"] < pooled["lower_bound"]


def test_training_without_noise_is_detected_and_with_noise_is_not_refuted():
    arguments = {"method": "constant", "learning_rate": 0.02, "canaries": 300, "steps": 15, "seed": 0}
    bare = one_run.train_with_canaries(epsilon=math.inf, **arguments)
    assert one_run.pooled_bound([bare], 1e-4)["lower_bound"] > 1.5
    assert len(bare) == 300 and bare.included.mean() == pytest.approx(0.5, abs=0.12)
    private = one_run.train_with_canaries(epsilon=1.0, **arguments)
    assert one_run.pooled_bound([private], 1e-4)["lower_bound"] < private.epsilon.iloc[0] <= 1
    assert one_run.tuned([private, bare]) is bare
    with pytest.raises(ValueError, match="canaries must be at least 1 and fewer than the 1500 records, got 1500"):
        one_run.train_with_canaries(epsilon=math.inf, **arguments | {"canaries": 1500})
