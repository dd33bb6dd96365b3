"""Notebook 04's noisy quadratic: its recursion, the greedy rate, how short-sighted that is, and the private vote."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from cases import each, together
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from hyfreedp.experiments.studies import short_sighted
from hyfreedp.experiments.studies.short_sighted import CONSTANT, EXAMPLE, GREEDY, LINEAR, PEAKS, NoisyQuadratic

SMALL = NoisyQuadratic(np.array([1.0, 0.3, 0.05]), np.array([1.0, -2.0, 3.0]), noise=0.4)
STEPS = 100


def vectors(low, high, size):
    return st.lists(st.floats(low, high), min_size=size, max_size=size).map(np.array)


@st.composite
def problems(draw, least_noise=0.0, most_noise=1.0):
    size = draw(st.integers(1, 6))
    start = draw(vectors(0.5, 3, size)) * draw(vectors(-1, 1, size).map(lambda signs: np.where(signs < 0, -1, 1)))
    return NoisyQuadratic(draw(vectors(0.05, 3, size)), start, draw(st.floats(least_noise, most_noise)))


# -- the recursion -----------------------------------------------------------------------------------------------------


def test_recursion_is_what_sgd_does():
    rates = np.array([1.2, 0.7, 0.7, 0.1, 1.9])
    runs, generator = 40_000, np.random.default_rng(0)
    weights = np.tile(SMALL.start, (runs, 1))
    states = list(short_sighted.moments(SMALL, rates))
    expected = short_sighted.expected_losses(SMALL, rates)
    for step, rate in enumerate(rates, start=1):
        gradients = SMALL.curvatures * weights + SMALL.noise * generator.standard_normal(weights.shape)
        weights = weights - rate * gradients
        mean, variance = states[step]
        losses = 0.5 * (weights**2) @ SMALL.curvatures
        # Five standard errors, 35 comparisons in all: a false alarm in one of 50,000 seeds.
        assert (np.abs(weights.mean(axis=0) - mean) < 5 * np.sqrt(variance / runs)).all()
        assert (np.abs(weights.var(axis=0) - variance) < 5 * variance * math.sqrt(2 / runs)).all()
        assert abs(losses.mean() - expected[step]) < 5 * losses.std() / math.sqrt(runs)


def test_many_schedules_at_once_are_the_same_one_by_one():
    peaks = [0.1, 0.5, 2.5]
    for schedule in (short_sighted.constant, short_sighted.decayed):
        together = short_sighted.expected_losses(SMALL, schedule(peaks, 7))
        assert together.shape == (8, 3)
        for column, peak in zip(together.T, peaks, strict=True):
            assert column == pytest.approx(short_sighted.expected_losses(SMALL, schedule(peak, 7)), rel=1e-14)


def test_constant_rate_by_hand():
    """The closed form of the geometric series, with the stationary variance eta^2 nu^2 / (1 - (1 - eta h)^2)."""
    eta, steps = 0.6, 30
    kept = (1 - eta * SMALL.curvatures) ** 2
    second = kept**steps * SMALL.start**2 + (eta * SMALL.noise) ** 2 * (1 - kept**steps) / (1 - kept)
    end = short_sighted.expected_losses(SMALL, short_sighted.constant(eta, steps))[-1]
    assert end == pytest.approx(0.5 * SMALL.curvatures @ second, rel=1e-12)


def test_linear_decay_by_hand():
    assert short_sighted.decayed([1.0, 8.0], 4).tolist() == [[1.0, 8.0], [0.75, 6.0], [0.5, 4.0], [0.25, 2.0]]


@together(
    ("change", "error"),
    [
        ({"curvatures": np.ones(2)}, r"vectors of one length, got shapes \(2,\) and \(3,\)"),
        ({"curvatures": np.array([1.0, 0.0, 1.0])}, "curvatures must be positive and finite, got .* drop flat"),
        ({"curvatures": np.array([1.0, np.nan, 1.0])}, "curvatures must be positive and finite"),
        ({"noise": -0.1}, "noise must be finite and at least 0, got -0.1"),
    ],
)
def test_a_quadratic_without_a_lowest_point_is_refused(change, error):
    with pytest.raises(ValueError, match=error):
        replace(SMALL, **change)


# -- one step ahead ----------------------------------------------------------------------------------------------------


@given(problems(), st.floats(0, 1), st.floats(-1, 3))
def test_the_parabola_is_exact(problem, variance, rate):
    mean, variance = problem.start, np.full_like(problem.start, variance)
    b, a = problem.parabola(mean, variance)
    ahead = problem.loss(*problem.step(mean, variance, rate))
    scale = problem.loss(mean, variance) + abs(b * rate) + a * rate**2
    assert ahead == pytest.approx(problem.loss(mean, variance) - b * rate + a * rate**2 / 2, abs=1e-12 * scale)


@given(problems(least_noise=0.01))
def test_the_greedy_rate_minimises_the_loss_one_step_ahead(problem):
    rates = short_sighted.greedy(problem, 4)
    *before, _ = short_sighted.moments(problem, rates)
    for rate, state in zip(rates, before, strict=True):

        def ahead(eta, state=state):
            return problem.loss(*problem.step(*state, eta))

        # Brent's search ends where rounding of the loss hides the parabola: within sqrt(machine epsilon).
        found = optimize.minimize_scalar(ahead, bracket=(0.5 * rate, 2 * rate)).x
        assert found == pytest.approx(rate, rel=1e-4)


def test_slope_and_curvature_are_those_of_noisy_gradients():
    generator = np.random.default_rng(1)
    mean, variance = SMALL.start, np.array([0.1, 0.5, 2.0])
    weights = mean + np.sqrt(variance) * generator.standard_normal((40_000, 3))
    gradients = SMALL.curvatures * weights + SMALL.noise * generator.standard_normal(weights.shape)
    samples = (gradients * SMALL.curvatures * weights).sum(axis=1), gradients**2 @ SMALL.curvatures
    for sample, value in zip(samples, SMALL.parabola(mean, variance), strict=True):
        # Four standard errors: a false alarm in one of 8,000 seeds.
        assert abs(sample.mean() - value) < 4 * sample.std() / math.sqrt(len(sample))


@given(problems(most_noise=0.0))
def test_without_noise_greedy_is_steepest_descent_with_exact_line_search(problem):
    weights, losses = problem.start, short_sighted.expected_losses(problem, short_sighted.greedy(problem, 5))
    worst = problem.curvatures.max() / problem.curvatures.min()
    for before, after in itertools.pairwise(losses):
        gradient = problem.curvatures * weights
        along = gradient @ (problem.curvatures * gradient)
        weights = weights - (gradient @ gradient / along if along else 0.0) * gradient
        assert after == pytest.approx(0.5 * problem.curvatures @ weights**2, abs=1e-9 * losses[0])
        assert after <= ((worst - 1) / (worst + 1)) ** 2 * before + 1e-12 * losses[0]  # Kantorovich's bound


# -- one curvature: greedy is best (the exercise) ----------------------------------------------------------------------


@given(st.floats(0.01, 3), st.floats(0.1, 3), st.floats(0.01, 2), vectors(0, 3, 8))
def test_with_one_curvature_nothing_ends_lower_than_greedy(curvature, start, noise, rates):
    problem = NoisyQuadratic(np.array([curvature]), np.array([start]), noise)
    greedy = short_sighted.greedy(problem, 8)
    t = np.arange(8)
    assert greedy == pytest.approx(1 / (curvature * (t + 1 + (noise / (curvature * start)) ** 2)), rel=1e-9)
    best = short_sighted.expected_losses(problem, greedy)
    assert (best <= short_sighted.expected_losses(problem, rates / curvature) * (1 + 1e-12)).all()


# -- several: it is short-sighted --------------------------------------------------------------------------------------


@together("noise", [0.1, 0.3, 1.0])
def test_greedy_leads_first_and_ends_behind_a_decay_with_rates_far_below_the_best(noise):
    problem = replace(EXAMPLE, noise=noise)
    paths = short_sighted.runs(problem, PEAKS, STEPS)
    first, last = paths.loss.xs(1, level="step"), paths.loss.xs(STEPS, level="step")
    assert first.idxmin() == GREEDY and last.idxmin() == LINEAR
    peaks = paths.rate.xs(0, level="step")
    late = paths.rate[GREEDY].iloc[STEPS // 2 : -1].max()
    assert late < peaks[CONSTANT] < peaks[LINEAR] / 2
    if noise <= EXAMPLE.noise:  # with more of it, no constant rate is any good
        assert last.idxmax() == GREEDY and 2 * late < peaks[CONSTANT]


def test_the_example_is_as_described():
    assert EXAMPLE.loss(EXAMPLE.start, np.zeros(10)) == pytest.approx(1.0)
    assert EXAMPLE.curvatures * EXAMPLE.start**2 / 2 == pytest.approx(np.full(10, 0.1))
    assert (EXAMPLE.curvatures[0], EXAMPLE.curvatures[-1]) == pytest.approx((1.0, 0.01))


def test_tables_are_the_recursion():
    table = short_sighted.ends(SMALL, [0.1, 0.4], 9)
    for peak, row in table.iterrows():
        for name, schedule in ((CONSTANT, short_sighted.constant), (LINEAR, short_sighted.decayed)):
            assert row[name] == short_sighted.expected_losses(SMALL, schedule(peak, 9))[-1]
    paths = short_sighted.runs(SMALL, [0.1, 0.4], 9)
    for name in (CONSTANT, LINEAR):
        assert paths.loss[name].iloc[-1] == table[name].min() and paths.rate[name].iloc[0] == table[name].idxmin()


# -- the vote ----------------------------------------------------------------------------------------------------------


def test_share_of_records_is_that_of_simulated_records():
    generator = np.random.default_rng(2)
    first, second = generator.standard_normal((2, 5, 3))
    shares = short_sighted.preferring(SMALL.curvatures, first, second, spread=1.3)
    optima = 1.3 * generator.standard_normal((40_000, 1, 3))
    losses = [0.5 * (weights - optima) ** 2 @ SMALL.curvatures for weights in (first, second)]
    counted = (losses[0] < losses[1]).mean(axis=0)
    # Five standard errors, five shares: a false alarm in one of 300,000 seeds.
    assert (np.abs(counted - shares) < 5 * np.sqrt(shares * (1 - shares) / 40_000)).all()


@given(problems(), st.floats(0.1, 3), st.integers(0, 2**32 - 1))
def test_the_better_weights_win_the_majority_and_votes_are_symmetric(problem, spread, seed):
    first, second = np.random.default_rng(seed).standard_normal((2, len(problem.start)))
    share = short_sighted.preferring(problem.curvatures, first, second, spread)
    assert share + short_sighted.preferring(problem.curvatures, second, first, spread) == pytest.approx(1.0)
    zero = np.zeros_like(first)
    assert (share > 0.5) == (problem.loss(first, zero) < problem.loss(second, zero))


@together(*each(noise_multiplier=[1.0, 10.0], batch_size=[10, 100, 1000]).args)
def test_winning_is_nearly_the_exact_probability(batch_size, noise_multiplier):
    for share in (0.4, 0.5, 0.55, 0.7):
        votes = stats.skellam(batch_size * share, batch_size * (1 - share))
        middle, width = votes.mean(), 12 * votes.std()
        sums = np.arange(math.floor(middle - width), math.ceil(middle + width) + 1)
        exact = votes.pmf(sums) @ stats.norm.cdf(sums / noise_multiplier)
        assert short_sighted.winning(share, batch_size, noise_multiplier) == pytest.approx(exact, abs=0.01)


RACE = {
    "steps": STEPS,
    "raced": 5,
    "factor": 4,
    "spread": 1.5,
    "batch_sizes": [100, 1000],
    "noise_multiplier": 10.0,
    "draws": 1000,
    "seed": 0,
}


def test_the_race_is_that_of_two_trained_branches_and_a_noisy_vote():
    """Every step, record, sign and noise drawn one by one."""
    top, size, sigma, races = 1.2, 60, 5.0, 2000
    generator = np.random.default_rng(3)
    kept = []
    for _ in range(races):
        branches = []
        for rate in (top, top / 3):
            weights = SMALL.start
            for step in range(4):
                gradient = SMALL.curvatures * weights + SMALL.noise * generator.standard_normal(3)
                weights = weights - rate * (1 - step / 20) * gradient
            branches.append(weights)
        optima = 3.0 * generator.standard_normal((generator.poisson(size), 3))
        fast, slow = (0.5 * (weights - optima) ** 2 @ SMALL.curvatures for weights in branches)
        kept.append(np.sign(slow - fast).sum() + sigma * generator.standard_normal() > 0)
    arguments = {"steps": 20, "raced": 4, "decay_over": 20, "factor": 3, "spread": 3.0, "batch_sizes": [size]}
    (row,) = short_sighted.race(SMALL, [top], **arguments, noise_multiplier=sigma, draws=4000, seed=0).itertuples()
    error = math.hypot(np.std(kept) / math.sqrt(races), row.error)
    assert 0.1 < row.kept < 0.9
    # Four standard errors and the normal approximation's 0.01: a false alarm in less than one of 15,000 seeds.
    assert abs(np.mean(kept) - row.kept) < 4 * error + 0.01
    for value, peak in ((row.fast, top), (row.slow, top / 3)):
        assert value == short_sighted.expected_losses(SMALL, short_sighted.decayed(peak, 20))[-1]
    assert row.reached == pytest.approx(row.kept * row.fast + (1 - row.kept) * row.slow)


@together("noise", [0.15, 0.3, 0.6])
def test_a_vote_after_a_decay_sees_the_horizon_that_longer_branches_do_not(noise):
    """What the notebook says of panel 4: turning points with and without a decay before the vote."""
    problem, tops = replace(EXAMPLE, noise=noise), np.geomspace(0.05, 4, 60)
    plain, right = short_sighted.turning_points(short_sighted.race(problem, tops, **RACE, decay_over=STEPS))
    longer, _ = short_sighted.turning_points(
        short_sighted.race(problem, tops, **RACE | {"raced": 20}, decay_over=STEPS)
    )
    ahead, _ = short_sighted.turning_points(short_sighted.race(problem, tops, **RACE, decay_over=5))
    assert abs(math.log(ahead / right)) < 0.6 * abs(math.log(plain / right))
    assert abs(math.log(longer / plain)) < 0.25
    assert plain < right


def test_a_race_beats_the_one_step_rate_over_a_decade_of_starts():
    end = short_sighted.expected_losses(EXAMPLE, short_sighted.greedy(EXAMPLE, STEPS))[-1]
    votes = short_sighted.race(EXAMPLE, np.geomspace(0.4, 4, 20), **RACE, decay_over=STEPS)
    assert (votes.reached < end).all()


def test_a_vote_after_the_end_of_a_decay_is_refused():
    with pytest.raises(ValueError, match="raced must be between 1 and decay_over = 4, got 5"):
        short_sighted.race(EXAMPLE, [1.0], **RACE, decay_over=4)
