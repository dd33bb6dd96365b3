"""The noise split: never above its target, closed forms, every combination, the plan, the search, bad input."""

import dataclasses
import json
import math
import warnings

import numpy as np
import pytest
from cases import each, pairs, together
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from splits import effective, vanilla

from hyfreedp.accounting import NoiseSplit, UnsoundAccountingWarning, calibrate_noise, epsilon
from hyfreedp.accounting.accountants import INTEGER_ORDERS, ORDERS, _pld_epsilon, composed_epsilon
from hyfreedp.accounting.composition import spent, warned_reasons
from hyfreedp.accounting.mechanisms import Mechanism
from hyfreedp.accounting.search import LARGEST_NOISE, SMALLEST_NOISE, smallest_noise

pytestmark = pytest.mark.filterwarnings("ignore::hyfreedp.accounting.UnsoundAccountingWarning")

ACCOUNTANTS = ("pld", "rdp", "gdp")
# Little noise makes large grids; this budget asks for a noise multiplier of 4, so that a PLD takes 20 ms.
CHEAP = dict(target_epsilon=0.5, target_delta=1e-5, sample_rate=0.1, steps=20, interval=4)
PAPER = dict(probe="losses", allocation="constant")


# ---- never above the target, and not needlessly below --------------------------------------------------------------


@given(
    target_epsilon=st.floats(0.1, 20),
    log10_delta=st.floats(-9, -3),
    sample_rate=st.floats(1e-3, 1),
    steps=st.integers(10, 3000),
    interval=st.integers(1, 10),
    warmup=st.floats(0, 1),
    gamma=st.floats(1.001, 2),
    choices=st.tuples(
        st.sampled_from(["rdp", "gdp"]),
        st.sampled_from(["per_step", "constant"]),
        st.sampled_from(["contrasts", "losses"]),
        st.sampled_from(["same_batch", "independent"]),
    ),
)
@settings(max_examples=10)
def test_epsilon_is_never_above_the_target(
    target_epsilon, log10_delta, sample_rate, steps, interval, warmup, gamma, choices
):
    accountant, allocation, probe, composition = choices
    split = calibrate_noise(
        target_epsilon=target_epsilon,
        target_delta=10**log10_delta,
        sample_rate=sample_rate,
        steps=steps,
        interval=interval,
        warmup_steps=int(warmup * steps),
        gamma=gamma,
        accountant=accountant,
        allocation=allocation,
        probe=probe,
        composition=composition,
    )
    assert 0.99 * target_epsilon < split.epsilon <= target_epsilon
    assert split.epsilon == epsilon(split)


def test_an_epsilon_that_rounding_lifts_above_the_target_is_met_with_more_noise(monkeypatch):
    """Of the closed form's cost, since the search ends within the budget by itself."""
    plan = CHEAP | {"accountant": "rdp"}
    exact = calibrate_noise(**plan)
    lifted = 1 + 5e-7
    assert plan["target_epsilon"] < lifted * exact.epsilon  # so the case arises
    monkeypatch.setattr("hyfreedp.accounting.calibrate.spent", lambda *args, **kwargs: lifted * spent(*args, **kwargs))
    split = calibrate_noise(**plan)
    assert split.epsilon <= plan["target_epsilon"]
    assert split.sigma > exact.sigma and split.sigma_loss > exact.sigma_loss


@each(
    plan=[
        (0.5, 0.01, 250, 1e-5),
        (1.0, 0.1, 20, 1e-8),
        (3.0, 0.2, 100, 1e-5),
        (2.0, 1.0, 10, 1e-6),
        (0.5, 0.3, 3, 1e-3),
    ],
    allocation=["per_step", "constant"],
)
def test_epsilon_is_never_above_the_target_under_pld(plan, allocation):
    target_epsilon, sample_rate, steps, target_delta = plan
    split = calibrate_noise(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=sample_rate,
        steps=steps,
        interval=min(5, steps),
        allocation=allocation,
    )
    assert (1 - 1e-5) * target_epsilon < split.epsilon <= target_epsilon
    less_noise = dataclasses.replace(vanilla(split), sigma_gradient=split.sigma * (1 - 1e-5))
    assert epsilon(less_noise) > target_epsilon


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("loss_mechanism", ["gaussian", "laplace"])
def test_loss_noise_is_the_smallest_within_the_budget(accountant, loss_mechanism):
    split = calibrate_noise(
        **CHEAP, allocation="constant", gamma=1.05, accountant=accountant, loss_mechanism=loss_mechanism
    )
    budget = cheap_vanilla_epsilon(split)
    assert split.epsilon <= budget
    assert epsilon(dataclasses.replace(split, sigma_loss=split.sigma_loss * (1 - 1e-5))) > budget


def cheap_vanilla_epsilon(split):
    orders = INTEGER_ORDERS if split.loss_mechanism == "laplace" else ORDERS
    return composed_epsilon(
        ((Mechanism(split.sigma), split.steps),),
        sample_rate=split.sample_rate,
        delta=split.target_delta,
        accountant=split.accountant,
        orders=orders,
    )


# ---- closed forms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(("probe", "squared_sensitivity"), [("losses", 3), ("contrasts", 1.5)])
def test_a_probe_at_every_step_meets_the_closed_form(accountant, probe, squared_sensitivity):
    split = calibrate_noise(
        **{**CHEAP, "interval": 1}, probe=probe, allocation="constant", gamma=1.01, accountant=accountant
    )
    expected = split.sigma * math.sqrt(squared_sensitivity / (1 - 1.01**-2))
    assert split.sigma_loss == pytest.approx(expected, rel=1e-6)

    # The same number by root finding on the accountant's own epsilon, which knows nothing of the closed form.
    budget = epsilon(vanilla(split))
    root = optimize.brentq(
        lambda sigma_loss: epsilon(dataclasses.replace(split, sigma_loss=sigma_loss)) - budget,
        expected / 1.5,
        expected * 1.5,
        xtol=1e-9,
    )
    assert root == pytest.approx(expected, rel=1e-6)


def test_three_losses_at_every_step_need_12_34_sigma():
    split = calibrate_noise(**{**CHEAP, "interval": 1}, gamma=1.01, accountant="gdp", **PAPER)
    assert split.sigma_loss / split.sigma == pytest.approx(12.339, abs=1e-3)


@together(*each(probe=["losses", "contrasts"], warmup_steps=[0, 3, 20]).args)
def test_a_per_step_split_costs_what_vanilla_does_under_every_accountant(probe, warmup_steps):
    split = calibrate_noise(**CHEAP, probe=probe, warmup_steps=warmup_steps, gamma=1.02)
    assert effective(split) == pytest.approx(split.sigma, rel=1e-12)
    for accountant in ACCOUNTANTS:
        assert epsilon(split, accountant=accountant) == pytest.approx(
            epsilon(vanilla(split), accountant=accountant), rel=1e-9
        )
    variances = [split.gradient_noise_multiplier(t) ** 2 for t in range(split.steps)]
    assert np.mean(variances) == pytest.approx((1.02 * split.sigma) ** 2, rel=1e-12)


# ---- every combination ---------------------------------------------------------------------------------------------


@together(
    *pairs(
        accountant=ACCOUNTANTS,
        allocation=("per_step", "constant"),
        composition=("same_batch", "independent", "epsilon_sum"),
        probe=("contrasts", "losses", "none"),
        loss_mechanism=("gaussian", "laplace"),
    ).args
)
def test_every_combination_works_and_says_whether_it_is_sound(
    accountant, allocation, composition, probe, loss_mechanism
):
    split = calibrate_noise(
        **CHEAP,
        gamma=1.2,
        accountant=accountant,
        allocation=allocation,
        composition=composition,
        probe=probe,
        loss_mechanism=loss_mechanism,
    )
    assert 0.5 * (1 - 1e-4) < split.epsilon <= 0.5
    assert split.guarantee == (accountant != "gdp" and (composition == "same_batch" or probe == "none"))
    assert split.guarantee == (split.reason == "")
    if not split.guarantee:
        assert ("gdp" in split.reason) == (accountant == "gdp")
        assert (composition in split.reason) == (composition != "same_batch" and probe != "none")
    if probe == "none":
        assert (split.sigma_gradient, split.sigma_gradient_probe, split.sigma_loss) == (split.sigma, split.sigma, 0)
        assert (split.probe_steps, split.gamma) == (0, 1) and not any(map(split.is_probe_step, range(20)))
    else:
        assert split.probe_steps == 5
        assert split.sigma_gradient == pytest.approx(split.sigma * (1.2 if allocation == "constant" else 1), rel=1e-12)
        probe_gamma = 1.2 if allocation == "constant" else math.sqrt(1 + 4 * (1.2**2 - 1))
        assert split.sigma_gradient_probe == pytest.approx(probe_gamma * split.sigma, rel=1e-12)


def test_unsound_accounting_warns_once_per_reason():
    unsound = dict(CHEAP, composition="independent", accountant="gdp")
    warned_reasons.clear()
    with pytest.warns(UnsoundAccountingWarning) as caught:
        split = calibrate_noise(**unsound)
    assert [w.filename for w in caught] == [__file__] * 2
    assert "central limit" in str(caught[0].message) and "independent" in str(caught[1].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate_noise(**unsound)
        epsilon(split)
    warned_reasons.clear()
    with pytest.warns(UnsoundAccountingWarning, match="central limit") as caught:
        epsilon(split, composition="same_batch")
    assert [w.filename for w in caught] == [__file__]


def test_a_non_private_run_has_no_noise_and_no_warning():
    warned_reasons.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split = calibrate_noise(**{**CHEAP, "target_epsilon": math.inf}, composition="independent", accountant="gdp")
        assert epsilon(split) == math.inf
    assert (split.sigma, split.sigma_gradient, split.sigma_gradient_probe, split.sigma_loss) == (0, 0, 0, 0)
    assert split.epsilon == math.inf and not split.guarantee and "non-private" in split.reason
    assert split.probe_steps == 5 and split.is_probe_step(0)
    assert "non-private" in str(split)


def test_results_are_cached():
    calibrate_noise(**CHEAP)
    before = _pld_epsilon.cache_info().misses
    calibrate_noise(**CHEAP)
    assert _pld_epsilon.cache_info().misses == before


# ---- the plan and its record ---------------------------------------------------------------------------------------


@given(steps=st.integers(1, 60), interval=st.integers(1, 60), warmup_steps=st.integers(0, 60))
def test_probe_steps_are_counted_as_planned(steps, interval, warmup_steps):
    interval, warmup_steps = min(interval, steps), min(warmup_steps, steps)
    split = calibrate_noise(
        target_epsilon=math.inf,
        target_delta=1e-5,
        sample_rate=0.1,
        steps=steps,
        interval=interval,
        warmup_steps=warmup_steps,
    )
    planned = [t < warmup_steps or (t - warmup_steps) % interval == 0 for t in range(steps)]
    assert [split.is_probe_step(t) for t in range(steps)] == planned
    assert split.probe_steps == sum(planned) == warmup_steps + math.ceil((steps - warmup_steps) / interval)
    assert [split.probe_steps_before(t) for t in range(steps + 1)] == [sum(planned[:t]) for t in range(steps + 1)]


def test_a_split_survives_json():
    split = calibrate_noise(**CHEAP)
    assert NoiseSplit.from_dict(json.loads(json.dumps(split.to_dict()))) == split
    with pytest.raises(ValueError, match=r"missing \['sigma'\], unknown \['sigmas'\]"):
        NoiseSplit.from_dict({("sigmas" if k == "sigma" else k): v for k, v in split.to_dict().items()})
    assert f"sigma_l {split.sigma_loss:.6g}" in str(split) and "epsilon 0.5 at delta 1e-05" in str(split)


def test_epsilon_of_a_prefix_grows_to_that_of_the_run():
    split = calibrate_noise(**CHEAP, accountant="rdp")
    own = dict(target_delta=None, accountant=None, composition=None)
    prefix = [spent(split, t, split.probe_steps_before(t), **own) for t in range(split.steps + 1)]
    assert prefix[0] == 0 and prefix[-1] == split.epsilon
    assert all(np.diff(prefix) > 0)


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


# ---- bad input -----------------------------------------------------------------------------------------------------


@together(
    ("wrong", "message"),
    [
        (dict(target_epsilon=0), "target_epsilon must be positive, got 0"),
        (dict(target_epsilon=-1.0), "target_epsilon must be positive, got -1"),
        (dict(target_epsilon=math.nan), "target_epsilon must be a number, got nan"),
        (dict(target_epsilon="3"), "target_epsilon must be a number, got '3'"),
        (dict(target_delta=0), r"target_delta must be in \(0, 1\), got 0"),
        (dict(target_delta=1.0), r"target_delta must be in \(0, 1\), got 1.0"),
        (dict(target_delta=math.nan), "target_delta must be a number, got nan"),
        (dict(sample_rate=0.0), r"sample_rate must be in \(0, 1\], got 0.0"),
        (dict(sample_rate=1.5), r"sample_rate must be in \(0, 1\], got 1.5"),
        (dict(steps=0), "steps must be an integer of at least 1, got 0"),
        (dict(steps=10.0), "steps must be an integer of at least 1, got 10.0"),
        (dict(steps=True), "steps must be an integer of at least 1, got True"),
        (dict(interval=0), "interval must be an integer of at least 1 and at most steps=20, got 0"),
        (dict(interval=21), "interval must be an integer of at least 1 and at most steps=20, got 21"),
        (dict(warmup_steps=-1), "warmup_steps must be an integer of at least 0 and at most steps=20, got -1"),
        (dict(warmup_steps=21), "warmup_steps must be an integer of at least 0 and at most steps=20, got 21"),
        (dict(gamma=1.0), "gamma must be greater than 1 and finite, got 1.0: .* nothing of the budget is left"),
        (dict(gamma=0.5), "gamma must be greater than 1"),
        (dict(gamma=math.inf), "gamma must be greater than 1 and finite, got inf"),
        (dict(probe="contrast"), "probe must be one of 'votes', .*, got 'contrast' .did you mean 'contrasts'"),
        (dict(accountant="prv"), "accountant must be one of 'pld', 'rdp', 'gdp', got 'prv'"),
        (dict(allocation="perstep"), "allocation must be .* .did you mean 'per_step'"),
        (dict(composition="same"), "composition must be one of 'same_batch', 'independent', 'epsilon_sum', got 'same'"),
        (dict(loss_mechanism="gauss"), "loss_mechanism must be .* .did you mean 'gaussian'"),
        (dict(target_epsilon=1e-4, accountant="rdp"), "no noise multiplier up to 1e.08 reaches target_epsilon=0.0001"),
        (dict(target_delta=1e-17), "no noise multiplier up to 1e.08 reaches .*target_delta=1e-17 .*accountant='pld'"),
        (dict(target_epsilon=1e6, accountant="rdp"), "noise multiplier below 0.05, which protects nobody"),
        (dict(target_delta=0.9), "asks for no noise at all, since a record is ever sampled with probability 0.878"),
        (
            dict(composition="epsilon_sum", accountant="rdp", gamma=1.0001),
            "gamma=1.0001 leaves too little of the budget",
        ),
    ],
)
def test_bad_input_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        calibrate_noise(**{**CHEAP, **wrong})


@together(
    ("wrong", "message"),
    [
        (dict(target_delta=0.0), "target_delta must be in"),
        (dict(accountant="PLD"), "accountant must be one of"),
        (dict(composition="batch"), "composition must be one of"),
    ],
)
def test_epsilon_refuses_bad_input_by_name(wrong, message):
    split = calibrate_noise(**CHEAP, accountant="gdp")
    with pytest.raises(ValueError, match=message):
        epsilon(split, **wrong)


def test_plain_dp_sgd_ignores_what_concerns_probes_only():
    split = calibrate_noise(
        target_epsilon=1, target_delta=1e-5, sample_rate=0.5, steps=2, interval=5, gamma=0.3, probe="none"
    )
    assert split.guarantee and split.gamma == 1 and split.sigma_loss == 0
