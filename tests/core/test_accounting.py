"""The noise split and its epsilon: never above the target, closed forms, other people's accountants, bad input."""

import dataclasses
import json
import math

import mpmath
import numpy as np
import pytest
from cases import each
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import from_mixture_gaussian_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from scipy.stats import binom, norm

from hyfreedp.accounting import NoiseSplit, calibrate_noise, epsilon, privacy_loss
from hyfreedp.accounting.accountants import composed_epsilon, grid
from hyfreedp.accounting.calibrate import recounted
from hyfreedp.accounting.composition import shares, spent
from hyfreedp.accounting.groups import SampledGaussian
from hyfreedp.accounting.privacy_loss import epsilon_of_sum
from hyfreedp.accounting.search import LARGEST_NOISE, SMALLEST_NOISE, smallest_noise

# A budget that asks for a noise multiplier of 4, so that a PLD takes a few ms.
CHEAP = dict(target_epsilon=0.5, target_delta=1e-5, sample_rate=0.1, steps=20, interval=4, probe="losses")
PAPER = dict(allocation="constant")


def vanilla(split: NoiseSplit) -> NoiseSplit:
    """DP-SGD without probes at the split's sigma."""
    noise = {"sigma_gradient": split.sigma, "sigma_gradient_probe": split.sigma}
    return dataclasses.replace(split, probe="none", vote_steps=(), **noise)


def effective(split: NoiseSplit) -> float:
    """sigma_eff of a step that probes losses, written out."""
    return (split.sigma_gradient_probe**-2 + 3 * split.sigma_loss**-2) ** -0.5


# ---- never above the target, and not needlessly below --------------------------------------------------------------


PLANS = {
    "target_epsilon": st.floats(0.1, 20),
    "target_delta": st.floats(-9, -3).map(lambda exponent: 10**exponent),
    "sample_rate": st.floats(1e-3, 1),
    "steps": st.integers(10, 1000),
    "probe": st.just("losses"),
    "interval": st.integers(1, 10),
    "gamma": st.floats(1.001, 2),
    "allocation": st.sampled_from(["per_step", "constant"]),
}


@given(plan=st.fixed_dictionaries(PLANS), warmup=st.floats(0, 1))
@settings(max_examples=2)
def test_epsilon_is_never_above_the_target(plan, warmup):
    split = calibrate_noise(**plan, warmup_steps=int(warmup * plan["steps"]), accountant="rdp")
    assert 0.99 * plan["target_epsilon"] < split.epsilon <= plan["target_epsilon"]
    assert split.epsilon == epsilon(split) and split.guarantee


BUDGETS = [(0.5, 0.01, 250, 1e-5), (1.0, 0.1, 20, 1e-8), (2.0, 1.0, 10, 1e-6), (0.5, 0.3, 3, 1e-3)]
SLOW = [(eps, q, steps, 1e-5) for eps in (0.3, 3.0, 20.0) for q, steps in ((0.001, 5000), (0.02, 250), (0.3, 100))]


@pytest.mark.parametrize("budget", [*BUDGETS, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
@pytest.mark.parametrize("allocation", ["per_step", "constant"])
def test_epsilon_is_never_above_the_target_under_pld(budget, allocation):
    plan = dict(zip(("target_epsilon", "sample_rate", "steps", "target_delta"), budget, strict=True))
    split, target_epsilon = calibrate_noise(**plan, interval=min(5, plan["steps"]), allocation=allocation), budget[0]
    assert (1 - 1e-5) * target_epsilon < split.epsilon <= target_epsilon
    assert epsilon(dataclasses.replace(vanilla(split), sigma_gradient=split.sigma * (1 - 1e-5))) > target_epsilon


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_loss_noise_is_the_smallest_within_the_budget(accountant):
    split = calibrate_noise(**CHEAP, **PAPER, gamma=1.05, accountant=accountant)
    budget = epsilon(vanilla(split))
    assert split.epsilon <= budget
    assert epsilon(dataclasses.replace(split, sigma_loss=split.sigma_loss * (1 - 1e-5))) > budget


# ---- closed forms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_probe_at_every_step_meets_the_closed_form(accountant):
    split = calibrate_noise(**{**CHEAP, "interval": 1}, **PAPER, gamma=1.01, accountant=accountant)
    expected = split.sigma * math.sqrt(3 / (1 - 1.01**-2))
    assert split.sigma_loss == pytest.approx(expected, rel=1e-6)
    assert split.sigma_loss / split.sigma == pytest.approx(12.339, abs=1e-3)

    # The same number by root finding on the accountant's own epsilon, which knows nothing of the closed form.
    budget = epsilon(vanilla(split))

    def excess(sigma_loss):
        return epsilon(dataclasses.replace(split, sigma_loss=sigma_loss)) - budget

    assert optimize.brentq(excess, expected / 1.5, expected * 1.5, xtol=1e-9) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("warmup_steps", [0, 3, 20])
def test_a_per_step_split_costs_what_vanilla_does_under_every_accountant(warmup_steps):
    split = calibrate_noise(**CHEAP, warmup_steps=warmup_steps, gamma=1.02)
    assert effective(split) == pytest.approx(split.sigma, rel=1e-12)
    for accountant in ("pld", "rdp"):
        cost = epsilon(vanilla(split), accountant=accountant)
        assert epsilon(split, accountant=accountant) == pytest.approx(cost, rel=1e-9)
    variances = [split.gradient_noise_multiplier(t) ** 2 for t in range(split.steps)]
    assert np.mean(variances) == pytest.approx((1.02 * split.sigma) ** 2, rel=1e-12)


def gaussian_delta(mu, eps):
    return math.exp(norm.logcdf(mu / 2 - eps / mu)) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))


@each(steps=[1, 30, 1000, 10**5], mu=[0.3, 1.0, 3.0], delta=[1e-2, 1e-5, 1e-8, 1e-12, 1e-15], records=[1, 2, 3, 1])
def test_without_subsampling_no_epsilon_is_below_that_of_one_gaussian(steps, mu, delta, records):
    """T steps of noise sigma are for k records one of sigma / (k sqrt(T)). Above it by rounding, which grows with T."""
    noise, run = records * math.sqrt(steps) / mu, {"sample_rate": 1.0, "records_per_person": records}
    found = composed_epsilon([(noise, steps)], delta=delta, accountant="pld", **run)
    exact = optimize.brentq(lambda eps: gaussian_delta(mu, eps) - delta, 0, 100, xtol=1e-13)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 2e-5 + 1e-4 * steps / 10**5 / mu**2)


@pytest.mark.parametrize("sample_rate", [0.003, 0.6])
@pytest.mark.parametrize("sigma", [0.6, 2.0])
def test_no_epsilon_is_below_that_of_convolution_without_fft(sample_rate, sigma):
    """Sums of products that are not negative, which round by a few parts in 10^15 however small they are."""
    interval = 0.1
    for losses in SampledGaussian(sigma, sample_rate, 1).distributions(interval):
        probs = np.exp(losses.logs)
        for _ in range(5):
            probs = np.convolve(probs, probs)
        values = (32 * losses.lowest + np.arange(len(probs))) * interval
        for delta in (1e-2, 1e-5, 1e-9, 1e-13):

            def excess(eps, delta=delta, values=values, probs=probs, infinite=32 * losses.infinite):
                return probs @ np.maximum(-np.expm1(eps - values), 0) + infinite - delta

            exact = optimize.brentq(excess, 0, values[-1], xtol=1e-13) if excess(0) > 0 else 0.0
            found = epsilon_of_sum([(losses, 20), (losses, 12)], delta)
            assert exact - 1e-9 <= found <= exact * (1 + 1e-6)


@pytest.mark.parametrize(("sigma", "sample_rate"), [(50.0, 1e-8), (50.0, 1e-6), (1e4, 1e-4), (1e6, 1e-3), (1.0, 0.01)])
def test_no_epsilon_of_one_release_is_below_that_of_fifty_digits(sigma, sample_rate):
    """At multiples of the grid interval, where rounding is not hidden by the grid; losses go down to 1e-10."""
    one = SampledGaussian(sigma, sample_rate, 1)
    with mpmath.workdps(50):
        for place in (1, 3, 7, 20, 200, 500):
            eps, q, s = mpmath.mpf(place * grid([(one, 1)])), mpmath.mpf(sample_rate), mpmath.mpf(sigma)
            t = 0.5 + s**2 * mpmath.log1p(mpmath.expm1(eps) / q)  # {x > t} is the best event
            without, present = mpmath.ncdf(-t / s), mpmath.ncdf((1 - t) / s)
            delta = float(q * present + (1 - q) * without - mpmath.exp(eps) * without)
            if delta > 1e-16:
                found = composed_epsilon([(sigma, 1)], sample_rate=sample_rate, delta=delta, accountant="pld")
                assert eps * (1 - 1e-9) <= found <= eps + grid([(one, 1)])


def test_losses_smaller_than_the_grid_cost_next_to_nothing():
    for steps in (1, 1000):
        assert composed_epsilon([(1e6, steps)], sample_rate=1e-12, delta=1e-15, accountant="pld") == 0


def test_a_transform_that_would_be_too_large_is_done_on_a_coarser_grid(monkeypatch):
    run = dict(sample_rate=1.0, delta=1e-6, accountant="pld")
    found = composed_epsilon([(500.0, 250_000)], **run)
    monkeypatch.setattr(privacy_loss, "LARGEST_TRANSFORM", 2**17)
    coarse = composed_epsilon([(1000.0, 10**6)], **run)
    exact = optimize.brentq(lambda eps: gaussian_delta(1.0, eps) - 1e-6, 0, 100, xtol=1e-13)
    assert exact <= found <= exact * (1 + 1e-4) and exact <= coarse <= exact * (1 + 4e-3)


@each(records=[1, 2, 5], sample_rate=[0.01, 0.2], sigma=[1.0, 4.0, 0.7])
def test_a_persons_records_cost_what_dp_accounting_says(records, sample_rate, sigma):
    """Its mixtures take a second on so coarse a grid."""
    counts = range(records + 1)
    chances = binom.pmf(counts, records, sample_rate)
    theirs = from_mixture_gaussian_mechanism(sigma, counts, chances, value_discretization_interval=0.02)
    ours = SampledGaussian(sigma, sample_rate, records).distributions(0.02)
    for delta in (1e-3, 1e-6):
        epsilon = max(epsilon_of_sum([(losses, 10)], delta) for losses in ours)
        assert epsilon == pytest.approx(theirs.self_compose(10).get_epsilon_for_delta(delta), rel=1e-6)


def test_the_budget_of_a_person_needs_more_noise_than_that_of_a_record():
    one, two = (calibrate_noise(**CHEAP, records_per_person=k) for k in (1, 2))
    assert one == calibrate_noise(**CHEAP) and "records_per_person" not in one.to_dict()
    assert two.epsilon <= 0.5 and two.guarantee and two.sigma > 1.5 * one.sigma
    alone = dataclasses.replace(two, records_per_person=1)
    delta = optimize.brentq(lambda x: x * (1 + math.exp(epsilon(alone, target_delta=x))) - 1e-5, 1e-8, 1e-5)
    assert two.epsilon < 2 * epsilon(alone, target_delta=delta)  # group privacy that knows epsilon and delta alone
    assert str(one).endswith("of one record") and str(two).endswith("of one person's 2 records")
    assert NoiseSplit.from_dict(json.loads(json.dumps(two.to_dict()))) == two
    with pytest.raises(ValueError, match="accountant must be 'pld' if records_per_person > 1"):
        calibrate_noise(**CHEAP, records_per_person=2, accountant="rdp")


# ---- other people's accountants ------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ["per_step", "constant"])
def test_agrees_with_dp_accounting_pld(allocation):
    split = calibrate_noise(**CHEAP, allocation=allocation, gamma=1.1)
    steps = [(split.sigma_gradient, 15), (effective(split), 5)]
    events = [SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GaussianDpEvent(sigma)), n) for sigma, n in steps]
    for delta in (1e-6, 1e-4):
        reference = PLDAccountant().compose(ComposedDpEvent(events)).get_epsilon(delta)
        assert epsilon(split, target_delta=delta) == pytest.approx(reference, abs=1e-4)


# ---- the plan and its record ---------------------------------------------------------------------------------------


@given(steps=st.integers(1, 60), interval=st.integers(1, 60), warmup_steps=st.integers(0, 60))
def test_probe_steps_are_counted_as_planned(steps, interval, warmup_steps):
    interval, warmup_steps = min(interval, steps), min(warmup_steps, steps)
    plan = dict(target_epsilon=math.inf, target_delta=1e-5, sample_rate=0.1, steps=steps, probe="losses")
    split = calibrate_noise(**plan, interval=interval, warmup_steps=warmup_steps)
    planned = [t < warmup_steps or (t - warmup_steps) % interval == 0 for t in range(steps)]
    assert [split.is_probe_step(t) for t in range(steps)] == planned
    assert split.probe_steps == sum(planned) == warmup_steps + math.ceil((steps - warmup_steps) / interval)
    assert [split.probe_steps_before(t) for t in range(steps + 1)] == [sum(planned[:t]) for t in range(steps + 1)]


def test_a_split_survives_json():
    split = calibrate_noise(**CHEAP)
    assert NoiseSplit.from_dict(json.loads(json.dumps(split.to_dict()))) == split
    assert NoiseSplit.from_dict(split.to_dict() | {"probe_steps": 150}) == split  # its probes are counted, not believed
    with pytest.raises(ValueError, match=r"to_dict.*unexpected keyword argument 'sigmas'"):
        NoiseSplit.from_dict({("sigmas" if k == "sigma" else k): v for k, v in split.to_dict().items()})
    assert f"sigma_l {split.sigma_loss:.6g}" in str(split) and "epsilon 0.5 at delta 1e-05" in str(split)


def test_epsilon_of_a_prefix_grows_to_that_of_the_run_and_its_parts_are_less():
    split = calibrate_noise(**CHEAP)
    prefix = [spent(split, t) for t in range(split.steps + 1)]
    assert prefix[0] == 0 and prefix[-1] == split.epsilon
    assert all(np.diff(prefix) > 0)
    parts = shares(split)
    assert 0 < parts["probes"] < parts["gradients"] < parts["together"] == split.epsilon
    assert parts["vanilla"] == pytest.approx(split.epsilon, rel=1e-9)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(steps=21), "split must be of this run, got steps=21, which is 20 here"),
        (dict(sigma_gradient=0.0), r"split.sigma_gradient must be in \(0, inf\), got 0.0"),
    ],
)
def test_a_split_of_another_run_or_without_noise_is_refused(wrong, message):
    split = calibrate_noise(**CHEAP)
    with pytest.raises(ValueError, match=message):
        recounted(dataclasses.replace(split, **wrong), accountant="pld", **CHEAP)


# ---- the search ----------------------------------------------------------------------------------------------------


@given(exponent=st.floats(0.5, 6), root=st.floats(0.1, 1e5), start=st.floats(0.01, 1e6))
def test_search_ends_just_above_the_root(exponent, root, start):
    calls = []

    def cost(noise):
        calls.append(noise)
        return (noise / root) ** -exponent

    noise = smallest_noise(cost, 1.0, start)
    assert root * (1 - 1e-15) <= noise <= root * (1 + 1e-6)
    assert cost(noise) <= 1
    assert len(calls) < 40


def test_search_copes_with_infinite_and_vanishing_costs():
    def cliff(noise):
        return math.inf if noise < 3 else 1.5 - noise / 10 if noise < 7 else 0.0

    noise = smallest_noise(cliff, 1.0, 0.5)
    assert 5 <= noise <= 5 * (1 + 1e-6)
    assert smallest_noise(lambda noise: 2.0, 1.0, 1.0) == math.inf
    assert smallest_noise(lambda noise: 1.0 if noise > LARGEST_NOISE / 2 else 2.0, 1.0, 1.0) < LARGEST_NOISE
    assert smallest_noise(lambda noise: 0.0, 1.0, 1.0) == SMALLEST_NOISE


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(gamma=1.0), "gamma must be above 1, or no budget is left for probes, .* got 1.0"),
        (dict(target_epsilon=1e-9, target_delta=1e-30), "no noise up to 1e.08 reaches .*accountant='pld'"),
        (dict(target_epsilon=1e6, accountant="rdp"), "noise multiplier below 0.05, which protects nobody"),
        (dict(target_delta=0.9), "asks for no noise at all, since a record is ever sampled with probability 0.878"),
    ],
)
def test_bad_input_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        calibrate_noise(**{**CHEAP, **wrong})
