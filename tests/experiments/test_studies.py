"""What the studies keep: contrasts of losses, their release and thresholds, and the rules that remember."""

import dataclasses
import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from cases import together
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from twins import adamw, make_model, make_private, sgd

from hyfreedp import Preset
from hyfreedp.curvefit import QuadraticFit, fit_quadratic
from hyfreedp.experiments.baselines.contrasts import (
    PrivateContrasts,
    contrast_threshold,
    fit_contrasts,
    privatize_contrasts,
)
from hyfreedp.experiments.baselines.line_search import LINE_SEARCH, ContrastProbe, LossProbe, StudiedRule
from hyfreedp.experiments.baselines.posterior import Rule, RuleState, momentum_damping, positive_mean, posterior

FALSE_ALARM = 1e-6  # of each statistical test below; the seeds are fixed, so a test that passes always passes

START = RuleState()
values = st.floats(-1e3, 1e3)
stds = st.floats(1e-3, 1e3)
rates = st.floats(1e-6, 10)


def fit(slope, curvature, slope_std=0.0, curvature_std=0.0):
    return QuadraticFit(slope, curvature, 1.0, slope_std, curvature_std)


# -- rules that remember -----------------------------------------------------------------------------------------------


@together("z", [-1e6, -1001, -999, -30, -3, -0.5, 0, 0.5, 3, 30, 1e6])
def test_positive_mean_is_the_mean_of_the_truncated_normal(z):
    """Against its definition in 60 digits, where nothing cancels."""
    std = 0.7
    with mpmath.workdps(60):
        expected = std * (mpmath.mpf(z) + mpmath.npdf(z) / mpmath.ncdf(z))
    assert positive_mean(z * std, std) == pytest.approx(float(expected), rel=2e-6)


@given(values, stds)
def test_positive_mean_is_positive_and_at_least_the_mean(mean, std):
    result = positive_mean(mean, std)
    assert result > 0 and result >= mean * (1 - 1e-12)


def test_positive_mean_without_noise():
    assert positive_mean(2.0, 0.0) == 2.0 and positive_mean(-2.0, 0.0) == 0.0


@given(values, values, stds, stds, rates, st.floats(0.05, 1))
def test_posterior_stays_in_its_range_and_says_why(slope, curvature, slope_std, curvature_std, eta, damping):
    decision, _ = posterior(fit(slope, curvature, slope_std, curvature_std), START, eta, damping=damping)
    assert decision.accepted and 0.5 * eta <= decision.eta <= 4 * eta
    assert ("clamped" in decision.reason) == (decision.eta in (0.5 * eta, 4 * eta))


def test_posterior_of_a_clear_parabola_is_the_damped_minimiser():
    decision, _ = posterior(fit(0.3, 1.5, 1e-9, 1e-9), START, 0.1, damping=0.5)
    assert decision.eta == pytest.approx(0.5 * 0.3 / 1.5)
    exact, _ = posterior(fit(0.3, 1.5), START, 0.1, damping=0.5)
    assert exact.eta == pytest.approx(0.5 * 0.3 / 1.5)


@together(("slope", "curvature", "factor"), [(-1.0, 1.0, 0.5), (1.0, -1.0, 4.0), (-1.0, -1.0, 0.5)])
def test_posterior_without_noise_on_the_wrong_side(slope, curvature, factor):
    decision, _ = posterior(fit(slope, curvature), START, 0.1, damping=0.5)
    assert decision.eta == pytest.approx(0.1 * factor)


def test_posterior_averages_by_precision():
    """Ten fits with unequal noise at one eta: the state's mean is the discounted inverse-variance weighted mean."""
    rng = np.random.default_rng(0)
    slopes, noise = rng.normal(1, 0.1, 10), rng.uniform(0.1, 2, 10)
    state = START
    for value, std in zip(slopes, noise, strict=True):
        _, state = posterior(fit(value, 1.0, std, 1.0), state, 0.1, damping=0.5, forgetting=0.8)
    weights = 0.8 ** np.arange(9, -1, -1) / noise**2
    assert state.slope_sum / state.slope_weight == pytest.approx((weights @ slopes) / weights.sum())
    assert state.slope_weight == pytest.approx(weights.sum())


@together("ratio", [0.25, 1.0, 4.0])
def test_posterior_forgets_fits_made_at_another_scale(ratio):
    _, state = posterior(fit(1.0, 1.0, 0.5, 0.5), START, 0.1, damping=0.5, forgetting=0.8)
    _, moved = posterior(fit(1.0, 1.0, 0.5, 0.5), state, 0.1 * ratio, damping=0.5, forgetting=0.8)
    assert moved.slope_weight == pytest.approx(4 + 4 * 0.8 * min(ratio, 1 / ratio))


def test_anchored_is_the_weighted_geometric_mean_with_the_anchor():
    plain = posterior(fit(0.3, 1.5, 1e-9, 1e-9), START, 0.05, damping=0.5)[0].eta
    anchored = posterior(fit(0.3, 1.5, 1e-9, 1e-9), START, 0.05, damping=0.5, anchor=0.02)[0].eta
    assert anchored == pytest.approx(max(plain**0.25 * 0.02**0.75, 0.025))


def test_momentum_damping_is_the_relative_spread_of_an_exponential_average():
    """Against the stationary variance of the recursion, summed directly."""
    beta = 0.9
    spread = math.sqrt(sum(((1 - beta) * beta**k) ** 2 for k in range(1000)))
    assert momentum_damping(beta) == pytest.approx(spread)
    assert momentum_damping(0.0) == 1.0
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got 1"):
        momentum_damping(1)


# -- contrasts ---------------------------------------------------------------------------------------------------------


signed = st.floats(-1e4, 1e4)


@given(st.lists(st.tuples(signed, signed, signed), max_size=10), st.tuples(signed, signed, signed), st.booleans())
def test_one_more_record_moves_the_contrasts_within_the_accountants_sensitivity(records, extra, laplace):
    """Squared L2 norm at most 1.5 (Gaussian), every coordinate at most 1/2 (Laplace), in units of the clip."""
    thresholds = (0.3, 0.02)
    mechanism = "laplace" if laplace else "gaussian"
    unit = 2.0 if laplace else 1.0

    def coordinates(rows):
        losses = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).T
        release = privatize_contrasts(losses, thresholds, 0.0, expected_batch_size=1, mechanism=mechanism)
        scaled = [release.difference / thresholds[0] / unit, release.bend / thresholds[1] / unit]
        return np.array([*scaled, *release.fractions])

    change = coordinates([*records, extra]) - coordinates(records)
    if laplace:
        assert np.abs(change).max() <= 0.5 + 1e-9
    else:
        assert change @ change <= 1.5 + 1e-9


def test_contrasts_inside_their_thresholds_are_exact():
    losses = torch.tensor([[1.0, 2.0], [1.1, 2.1], [1.3, 2.15]], dtype=torch.float64)  # at w - hG, w, w + hG
    for mechanism in ("gaussian", "laplace"):
        release = privatize_contrasts(losses, (1.0, 1.0), 0.0, expected_batch_size=2, mechanism=mechanism)
        assert release.difference == pytest.approx((0.3 + 0.15) / 2)
        assert release.bend == pytest.approx((0.1 - 0.05) / 2)
        assert release.fractions == (1.0, 1.0)


def test_contrast_noise_has_the_stated_standard_deviations(generator):
    """Chi-square over 2,000 empty batches: nothing but noise."""
    empty = torch.zeros(3, 0)
    releases = [
        privatize_contrasts(empty, (0.5, 0.1), 4.0, expected_batch_size=20, generator=generator) for _ in range(2000)
    ]
    scaled = np.array([[r.difference / r.difference_std, r.bend / r.bend_std] for r in releases])
    fractions = (np.array([r.fractions for r in releases]) - 0.5) / (4.0 / 20)
    assert releases[0].difference_std == pytest.approx(4.0 * 0.5 / 20)
    assert releases[0].bend_std == pytest.approx(4.0 * 0.1 / 20)
    for column in (*scaled.T, *fractions.T):
        assert FALSE_ALARM / 2 < stats.chi2.cdf(column @ column, df=2000) < 1 - FALSE_ALARM / 2


def test_a_bad_record_moves_contrasts_no_more_than_any_other():
    losses = torch.zeros(3, 3)
    for bad in (math.nan, math.inf, -math.inf):
        losses[:, 1] = torch.tensor([bad, 0.0, 1.0])
        release = privatize_contrasts(losses, (0.5, 0.1), 0.0, expected_batch_size=1)
        assert abs(release.difference) <= 0.5 and abs(release.bend) <= 0.1
        assert release.fractions == (1.0, 1.0)  # two of three inside, one out: 1/2 + (2 - 1)/2


def test_a_threshold_out_of_range_is_named():
    with pytest.raises(ValueError, match=r"thresholds\[1\] must be positive, got 0.0"):
        privatize_contrasts(torch.ones(3, 2), (1.0, 0.0), 1.0, expected_batch_size=3)


def test_contrasts_give_the_same_parabola_as_the_losses():
    ahead, here, behind, distance = 1.1, 1.3, 1.9, 0.05
    contrasts = PrivateContrasts(behind - ahead, behind + ahead - 2 * here, 0.2, 0.3, (1.0, 1.0))
    fit, reference = fit_contrasts(contrasts, distance), fit_quadratic([distance, 0, -distance], [ahead, here, behind])
    assert (fit.slope, fit.curvature) == pytest.approx((reference.slope, reference.curvature))
    assert (fit.slope_std, fit.curvature_std) == pytest.approx((0.2 / (2 * distance), 0.3 / distance**2))


@together("distance", [0.0, math.nan, math.inf])
def test_a_distance_from_where_nothing_is_seen_is_named(distance):
    with pytest.raises(ValueError, match=f"distance must be finite and not zero, got {distance}"):
        fit_contrasts(PrivateContrasts(1.0, 1.0, 0.0, 0.0, (1.0, 1.0)), distance)


def test_contrast_threshold_finds_the_quantile():
    """From far above and far below, with exact fractions of a normal population."""
    for threshold in (1e-4, 10.0):
        for _ in range(40):
            threshold = contrast_threshold(threshold, 2 * stats.norm.cdf(threshold / 0.3) - 1)
        assert threshold == pytest.approx(0.3 * stats.norm.ppf(0.9), rel=1e-3)


@given(st.floats(1e-6, 20), st.floats(-10, 10), st.floats(1e-3, 1e3))
def test_contrast_threshold_stays_in_its_range(threshold, fraction, scale):
    assert 1e-6 <= contrast_threshold(threshold, fraction, scale=scale) <= 20


def test_contrast_threshold_follows_a_known_change_of_distance():
    assert contrast_threshold(0.1, 0.8, scale=4.0) == pytest.approx(0.4)


# -- in a preset -------------------------------------------------------------------------------------------------------


def test_the_line_search_is_the_former_default():
    """Contrasts at every step of the first tenth and then at each fifth, two percent of noise, decay from half on."""
    model = make_model()
    _, optimizer, _ = make_private(model, adamw(model), preset=LINE_SEARCH, target_epsilon=3.0, steps=40)
    assert isinstance(optimizer.rate_learner, ContrastProbe) and optimizer.rate_learner.rule.name == "posterior"
    assert (optimizer.rate_learner.eta, optimizer.rate_learner.contrast_thresholds) == (1e-4, (0.01, 2e-4))
    assert optimizer.rate_learner.rule.momentum == 0.9
    split = optimizer.split
    assert [t for t in range(40) if split.is_probe_step(t)] == [0, 1, 2, 3, *range(4, 40, 5)]
    assert (split.probe, split.gamma, split.allocation, split.loss_mechanism) == (
        "contrasts",
        1.02,
        "per_step",
        "gaussian",
    )
    assert (split.composition, split.accountant, split.guarantee) == ("same_batch", "pld", True)
    assert (optimizer.decay, optimizer.decay_start) == ("linear", 0.5)


@together(("private", "probe"), itertools.product([True, False], ["contrasts", "losses"]))
def test_a_studied_rule_makes_the_line_search_of_its_preset(probe, private):
    model = make_model()
    preset = Preset(
        probe=probe,
        step_rule=StudiedRule("anchored"),
        initial_learning_rate=0.3,
        loss_threshold_rule="previous",
        loss_mechanism="laplace",
    )
    made = preset.step_rule(preset, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5), private)
    assert type(made) is {"contrasts": ContrastProbe, "losses": LossProbe}[probe] and made.kind == probe
    assert (made.eta, made.mechanism, made.rule.name, made.rule.momentum) == (0.3, "laplace", "anchored", 0.5)
    assert made.distance == pytest.approx(0.3 * math.sqrt(3))
    thresholds = made.contrast_thresholds if probe == "contrasts" else (made.loss_threshold,)
    assert all(math.isinf(threshold) != private for threshold in thresholds)
    plain = dataclasses.replace(preset, step_rule=StudiedRule("anchored", damping=False))
    assert plain.step_rule(plain, adamw(model), private).distance == 0.3
    # What other processes and checkpoints are compared with.
    assert repr(preset) == repr(dataclasses.replace(preset)) and " at 0x" not in repr(preset)
    assert "rule anchored, momentum 0.5, laplace noise" in repr(made) and " at 0x" not in repr(made)
    assert ("previous in (0.1, 20.0)" in repr(made)) == (probe == "losses")
    assert preset == dataclasses.replace(preset) != plain and hash(preset) == hash(dataclasses.replace(preset))


@together(
    "settings",
    [
        {"probe": "contrasts"},  # which the rule by name does not release
        {"preset": LINE_SEARCH, "step_rule": "gen"},
        {"preset": LINE_SEARCH, "step_rule": lambda *_: ContrastProbe(Rule("gen"), eta=0.1), "probe": "losses"},
    ],
)
def test_what_is_released_must_be_what_was_paid_for(settings):
    model = make_model()
    with pytest.raises(ValueError, match=r"probe must be what .*Probe\((contrasts|losses) .* releases, got '"):
        make_private(model, sgd(model), **settings)
    assert not any(module._forward_hooks for module in model.modules())


@together(
    ("make", "message"),
    [
        (lambda: Rule("greedy"), "rule must be one of .*'posterior'.*got 'greedy'"),
        (lambda: Rule("gen", 1.0), r"momentum must be in \[0, 1\), got 1.0"),
        (lambda: ContrastProbe(Rule("gen"), eta=0.0), "initial_learning_rate must be finite and positive, got 0.0"),
        (lambda: LossProbe(Rule("gen"), eta=math.nan), "initial_learning_rate must be finite and positive, got nan"),
    ],
)
def test_arguments_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()
