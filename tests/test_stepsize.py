"""Step rules against closed forms and brute-force expectations; thresholds; decay."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hyfreedp import stepsize
from hyfreedp.curvefit import QuadraticFit
from hyfreedp.stepsize import RuleState

START = RuleState()
values = st.floats(-1e3, 1e3)
stds = st.floats(1e-3, 1e3)
rates = st.floats(1e-6, 10)


def fit(slope, curvature, slope_std=0.0, curvature_std=0.0):
    return QuadraticFit(slope, curvature, 1.0, slope_std, curvature_std)


@given(values.filter(lambda b: abs(b) > 1e-3), values.filter(lambda a: abs(a) > 1e-3), rates)
def test_literal_is_b_over_a_with_whatever_sign(slope, curvature, eta):
    assert stepsize.literal(fit(slope, curvature), START, eta).eta == slope / curvature


@pytest.mark.parametrize(("slope", "curvature"), [(1.0, 0.0), (0.0, 0.0), (0.0, 1.0)])
def test_literal_keeps_eta_when_b_over_a_is_no_rate(slope, curvature):
    decision = stepsize.literal(fit(slope, curvature), START, 0.1)
    assert (decision.eta, decision.accepted) == (0.1, False) and "zero or not finite" in decision.reason


@given(values, values, rates)
def test_gen_moves_only_on_a_convex_descent_and_within_its_range(slope, curvature, eta):
    decision = stepsize.gen(fit(slope, curvature), START, eta)
    if slope > 0 and curvature > 0:
        clamped = min(max(slope / curvature, 0.5 * eta), 2 * eta)
        assert decision.accepted and decision.eta == pytest.approx(0.9 * clamped + 0.1 * eta)
    else:
        assert not decision.accepted and decision.eta == eta


@pytest.mark.parametrize("z", [-1e6, -1001, -999, -30, -3, -0.5, 0, 0.5, 3, 30, 1e6])
def test_positive_mean_is_the_mean_of_the_truncated_normal(z):
    """Against its definition in 60 digits, where nothing cancels."""
    std = 0.7
    with mpmath.workdps(60):
        expected = std * (mpmath.mpf(z) + mpmath.npdf(z) / mpmath.ncdf(z))
    assert stepsize.positive_mean(z * std, std) == pytest.approx(float(expected), rel=2e-6)


@given(values, stds)
def test_positive_mean_is_positive_and_at_least_the_mean(mean, std):
    result = stepsize.positive_mean(mean, std)
    assert result > 0 and result >= mean * (1 - 1e-12)


def test_positive_mean_without_noise():
    assert stepsize.positive_mean(2.0, 0.0) == 2.0 and stepsize.positive_mean(-2.0, 0.0) == 0.0


@given(values, values, stds, stds, rates, st.floats(0.05, 1))
def test_posterior_stays_in_its_range_and_says_why(slope, curvature, slope_std, curvature_std, eta, damping):
    decision = stepsize.posterior(fit(slope, curvature, slope_std, curvature_std), START, eta, damping=damping)
    assert decision.accepted and 0.5 * eta <= decision.eta <= 4 * eta
    assert ("clamped" in decision.reason) == (decision.eta in (0.5 * eta, 4 * eta))


def test_posterior_of_a_clear_parabola_is_the_damped_minimiser():
    decision = stepsize.posterior(fit(0.3, 1.5, 1e-9, 1e-9), START, 0.1, damping=0.5)
    assert decision.eta == pytest.approx(0.5 * 0.3 / 1.5)
    exact = stepsize.posterior(fit(0.3, 1.5), START, 0.1, damping=0.5)
    assert exact.eta == pytest.approx(0.5 * 0.3 / 1.5)


@pytest.mark.parametrize(("slope", "curvature", "factor"), [(-1.0, 1.0, 0.5), (1.0, -1.0, 4.0), (-1.0, -1.0, 0.5)])
def test_posterior_without_noise_on_the_wrong_side(slope, curvature, factor):
    assert stepsize.posterior(fit(slope, curvature), START, 0.1, damping=0.5).eta == pytest.approx(0.1 * factor)


def test_posterior_averages_by_precision():
    """Ten fits with unequal noise at one eta: the state's mean is the discounted inverse-variance weighted mean."""
    rng = np.random.default_rng(0)
    slopes, noise = rng.normal(1, 0.1, 10), rng.uniform(0.1, 2, 10)
    state = START
    for value, std in zip(slopes, noise, strict=True):
        state = stepsize.posterior(fit(value, 1.0, std, 1.0), state, 0.1, damping=0.5, forgetting=0.8).state
    weights = 0.8 ** np.arange(9, -1, -1) / noise**2
    assert state.slope_sum / state.slope_weight == pytest.approx((weights @ slopes) / weights.sum())
    assert state.slope_weight == pytest.approx(weights.sum())


@pytest.mark.parametrize("ratio", [0.25, 1.0, 4.0])
def test_posterior_forgets_fits_made_at_another_scale(ratio):
    state = stepsize.posterior(fit(1.0, 1.0, 0.5, 0.5), START, 0.1, damping=0.5, forgetting=0.8).state
    moved = stepsize.posterior(fit(1.0, 1.0, 0.5, 0.5), state, 0.1 * ratio, damping=0.5, forgetting=0.8).state
    assert moved.slope_weight == pytest.approx(4 + 4 * 0.8 * min(ratio, 1 / ratio))


def test_anchored_is_the_weighted_geometric_mean_with_the_anchor():
    plain = stepsize.posterior(fit(0.3, 1.5, 1e-9, 1e-9), START, 0.05, damping=0.5).eta
    anchored = stepsize.posterior(fit(0.3, 1.5, 1e-9, 1e-9), START, 0.05, damping=0.5, anchor=0.02).eta
    assert anchored == pytest.approx(max(plain**0.25 * 0.02**0.75, 0.025))


def test_momentum_damping_is_the_relative_spread_of_an_exponential_average():
    """Against the stationary variance of the recursion, summed directly."""
    beta = 0.9
    spread = math.sqrt(sum(((1 - beta) * beta**k) ** 2 for k in range(1000)))
    assert stepsize.momentum_damping(beta) == pytest.approx(spread)
    assert stepsize.momentum_damping(0.0) == 1.0
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got 1"):
        stepsize.momentum_damping(1)


def test_loss_threshold_rules_take_what_was_released_within_floor_and_cap():
    losses = (1.0, 2.0, 4.0)
    assert stepsize.loss_threshold_previous(losses, floor=0.1, cap=20) == 2.0
    assert stepsize.loss_threshold_sum(losses, floor=0.1, cap=20) == 7.0
    assert stepsize.loss_threshold_sum((-1.0, 0.5, 0.0), floor=0.1, cap=20) == 0.1
    assert stepsize.loss_threshold_previous((0.0, 50.0, 0.0), floor=0.1, cap=20) == 20


def test_contrast_threshold_finds_the_quantile():
    """From far above and far below, with exact fractions of a normal population."""
    for threshold in (1e-4, 10.0):
        for _ in range(40):
            threshold = stepsize.contrast_threshold(threshold, 2 * stats.norm.cdf(threshold / 0.3) - 1)
        assert threshold == pytest.approx(0.3 * stats.norm.ppf(0.9), rel=1e-3)


@given(st.floats(1e-6, 20), st.floats(-10, 10), st.floats(1e-3, 1e3))
def test_contrast_threshold_stays_in_its_range(threshold, fraction, scale):
    assert 1e-6 <= stepsize.contrast_threshold(threshold, fraction, scale=scale) <= 20


def test_contrast_threshold_follows_a_known_change_of_distance():
    assert stepsize.contrast_threshold(0.1, 0.8, scale=4.0) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("decay", "start", "expected"),
    [
        ("none", 0.0, [1, 1, 1, 1]),
        ("linear", 0.0, [1, 0.75, 0.5, 0.25]),
        ("linear", 0.5, [1, 1, 1, 0.5]),
        ("cosine", 0.0, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_decay(decay, start, expected):
    assert [stepsize.decay_factor(t, 4, decay, start) for t in range(4)] == pytest.approx(expected)
