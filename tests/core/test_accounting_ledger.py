"""The ledger: it counts what was released, stays within the plan and survives interruption."""

import dataclasses
import json
import math

import pytest
from cases import together
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from hyfreedp.accounting import BudgetExhausted, PrivacyLedger, UnsoundAccountingWarning, calibrate_noise, epsilon
from hyfreedp.accounting.composition import warned_reasons


def make_split(**changes):
    settings = dict(
        target_epsilon=1.0,
        target_delta=1e-5,
        sample_rate=0.1,
        steps=12,
        interval=4,
        warmup_steps=2,
        accountant="rdp",
    )
    return calibrate_noise(**{**settings, **changes})


def run(ledger, steps):
    for _ in range(steps):
        ledger.record()


def test_counts_what_was_released_and_reports_it():
    split = make_split()
    ledger = PrivacyLedger(split)
    assert (ledger.steps, ledger.probe_steps, ledger.epsilon()) == (0, 0, 0.0)
    spent = [0.0]
    for t in range(split.steps):
        ledger.record()
        assert ledger.steps == t + 1
        assert ledger.probe_steps == sum(map(split.is_probe_step, range(t + 1)))
        spent.append(ledger.epsilon())
        assert spent[-1] > spent[-2]
    assert spent[-1] == split.epsilon <= 1.0
    assert ledger.epsilon(target_delta=1e-3) == epsilon(split, target_delta=1e-3) < split.epsilon
    assert ledger.epsilon(accountant="pld") == epsilon(split, accountant="pld") < split.epsilon
    assert repr(ledger) == "PrivacyLedger(12 of 12 steps, 5 of 5 probes)"


def test_a_step_beyond_the_plan_is_refused_and_not_counted():
    ledger = PrivacyLedger(make_split())
    run(ledger, 12)
    for act in (ledger.check, ledger.record, ledger.record_vote):
        with pytest.raises(BudgetExhausted, match=r"all 12 steps .* would exceed epsilon=1"):
            act()
    assert (ledger.steps, ledger.probe_steps) == (12, 5)


def test_a_probe_out_of_turn_is_refused_and_not_counted():
    ledger = PrivacyLedger(make_split())
    run(ledger, 3)
    counted = ledger.state_dict()
    with pytest.raises(BudgetExhausted, match=r"step 3 must not probe by the plan .*interval=4\), but it does"):
        ledger.record_vote(11)
    ledger.record()
    with pytest.raises(BudgetExhausted, match="step 3 must not probe by the plan"):
        ledger.record_probe(11)
    assert ledger.state_dict() == counted | {"steps": 4, "released": [*counted["released"], [3, [0], []]]}


def test_a_planned_probe_counts_from_the_gradient_on():
    """Whether it is released after it, or not at all: the gradient's noise is that of a step with a probe."""
    left_out, released = PrivacyLedger(make_split()), PrivacyLedger(make_split())
    for ledger in (left_out, released):
        ledger.record(10)
    released.record_probe(11)
    assert released.epsilon() == left_out.epsilon() and left_out.probe_steps == 1


def test_check_counts_nothing():
    ledger = PrivacyLedger(make_split())
    ledger.check()
    assert (ledger.steps, ledger.probe_steps) == (0, 0)


@together("interrupted_after", [0, 1, 5, 12])
def test_a_resumed_ledger_equals_the_uninterrupted_one(interrupted_after):
    split = make_split()
    ledger = PrivacyLedger(split)
    run(ledger, interrupted_after)
    state = json.loads(json.dumps(ledger.state_dict()))
    resumed = PrivacyLedger(split)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == ledger.state_dict()
    run(resumed, split.steps - interrupted_after)
    assert resumed.epsilon() == split.epsilon
    with pytest.raises(BudgetExhausted):
        resumed.check()


def test_the_state_of_another_split_is_refused():
    state = PrivacyLedger(make_split()).state_dict()
    ledger = PrivacyLedger(make_split(interval=3))
    with pytest.raises(ValueError, match=r"another noise split \(.*interval: 4 != 3"):
        ledger.load_state_dict(state)


@together("counts", [dict(steps=13), dict(steps=-1), dict(steps=6)])
def test_impossible_counts_are_refused(counts):
    ledger = PrivacyLedger(make_split())
    with pytest.raises(ValueError, match="which the plan of 12 steps does not allow"):
        ledger.load_state_dict({**ledger.state_dict(), **counts})
    assert ledger.steps == 0


def test_a_run_without_probes_counts_plain_dp_sgd():
    split = make_split(probe="none")
    ledger = PrivacyLedger(split)
    run(ledger, 6)
    assert ledger.probe_steps == 0
    assert ledger.epsilon() == epsilon(dataclasses.replace(split, steps=6))
    with pytest.raises(BudgetExhausted, match="step 6 must not probe"):
        ledger.record_vote()


def test_a_non_private_run_is_counted_and_costs_everything():
    ledger = PrivacyLedger(make_split(target_epsilon=math.inf))
    assert ledger.epsilon() == 0.0
    run(ledger, 1)
    assert ledger.epsilon() == math.inf
    run(ledger, 11)
    with pytest.raises(BudgetExhausted):
        ledger.check()


def test_epsilon_so_far_keeps_the_composition_and_its_warning():
    warned_reasons.clear()
    with pytest.warns(UnsoundAccountingWarning, match="share one"):
        split = make_split(composition="independent")
    ledger = PrivacyLedger(split)
    run(ledger, 12)
    assert ledger.epsilon() == split.epsilon < epsilon(split, composition="same_batch")
    warned_reasons.clear()
    with pytest.warns(UnsoundAccountingWarning, match="share one") as caught:
        ledger.epsilon()
    assert [w.filename for w in caught] == [__file__]


# -- votes, which come before the gradient of their step ---------------------------------------------------------------


def test_a_vote_and_the_gradient_after_it_are_one_step():
    """Released at once in the books: the vote counts the whole step, and its gradient nothing more."""
    split = make_split(probe="votes", vote_steps=(1, 4))
    ledger = PrivacyLedger(split)
    ledger.record(10)
    ledger.record_vote(11)
    after_vote = ledger.epsilon()
    assert (ledger.steps, ledger.repeated) == (1, 1)
    ledger.record_vote(11)  # the same batch once more: the same release
    ledger.record(12)
    assert ledger.epsilon() == after_vote and (ledger.steps, ledger.probe_steps, ledger.repeated) == (2, 1, 0)
    again = PrivacyLedger(split)
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    again.record(13)
    assert after_vote < again.epsilon() < epsilon(split) <= 1


def test_a_vote_of_others_is_a_further_release():
    """About the same draw of the batch: it costs more than a step, and the run ends so much earlier."""
    split = make_split(probe="votes", vote_steps=(1, 4))
    ledger = PrivacyLedger(split)
    ledger.record(10)
    ledger.record_vote(11)
    one = ledger.epsilon()
    ledger.record_vote(21)
    assert ledger.epsilon() > one and ledger.repeated == 2
    with pytest.raises(BudgetExhausted, match="was to be released once more with other data, or after steps that were"):
        run(ledger, 11)
    assert 1 < ledger.steps < 12 and ledger.repeated == 1 and ledger.epsilon() <= 1


def same_batch(sigma, count, probe, votes):
    """Slow twin of one sampled batch with so many gradients and votes."""
    return PoissonSampledDpEvent(0.1, GaussianDpEvent((count / sigma**2 + votes / probe**2) ** -0.5))


@pytest.mark.parametrize(("again", "gradients", "votes"), [(0, 2, 0), (0, 5, 0), (1, 2, 1), (1, 1, 3), (1, 4, 2)])
def test_releases_about_one_draw_are_one_sampled_mechanism(again, gradients, votes):
    """Not as many steps: dp-accounting's answer for the whole of it."""
    split = make_split(probe="votes", vote_steps=(1, 4), accountant="pld", target_epsilon=2.0)
    ledger = PrivacyLedger(split)
    run(ledger, again)
    released = [*ledger.state_dict()["released"], [again, list(range(1, gradients + 1)), list(range(1, votes + 1))]]
    ledger.load_state_dict(ledger.state_dict() | {"released": released})
    events = [same_batch(split.sigma_gradient, 1, 1.0, 0)] * again
    sigma = split.gradient_noise_multiplier(again)
    events.append(same_batch(sigma, gradients, split.sigma_loss, votes))
    twin = PLDAccountant().compose(ComposedDpEvent(events)).get_epsilon(1e-5)
    assert ledger.epsilon() == pytest.approx(twin, rel=2e-3)
    apart = [same_batch(sigma, 1, split.sigma_loss, int(votes > 0))] * max(gradients, votes)
    if gradients * max(votes, 1) > 2:
        assert ledger.epsilon() > 1.05 * PLDAccountant().compose(ComposedDpEvent(events[:-1] + apart)).get_epsilon(1e-5)


@pytest.mark.parametrize(
    ("mechanism", "allocation", "again"),
    [
        ("gaussian", "per_step", 1),
        ("gaussian", "constant", 0),
        ("laplace", "per_step", 0),
        ("laplace", "constant", 1),  # so far every pair of them
        pytest.param("gaussian", "per_step", 0, marks=pytest.mark.slow),
        pytest.param("gaussian", "constant", 1, marks=pytest.mark.slow),
        pytest.param("laplace", "per_step", 1, marks=pytest.mark.slow),
        pytest.param("laplace", "constant", 0, marks=pytest.mark.slow),
    ],
)
def test_the_same_step_on_ever_other_data_stays_within_the_target(mechanism, allocation, again):
    settings = {"accountant": "pld", "gamma": 1.5, "target_epsilon": 2.0, "loss_mechanism": mechanism}
    split = make_split(probe="votes", vote_steps=(1, 4), allocation=allocation, **settings)
    ledger = PrivacyLedger(split)
    run(ledger, again)
    with pytest.raises(BudgetExhausted):
        for tag in range(1, 14):
            ledger.record(tag)
            ledger.load_state_dict(ledger.state_dict() | {"steps": again})
    assert 1 < ledger.epsilon() <= 2
    state = json.loads(json.dumps(ledger.state_dict()))
    other = PrivacyLedger(split)
    other.load_state_dict(state)
    assert other.epsilon() == ledger.epsilon() and other.repeated == ledger.repeated
    with pytest.raises(BudgetExhausted):  # also after a resumption
        other.record(99)


def test_a_vote_out_of_turn_is_refused_and_not_counted():
    ledger = PrivacyLedger(make_split(probe="votes", vote_steps=(1, 4)))
    with pytest.raises(BudgetExhausted, match=r"step 0 must not probe .*probe='votes', vote_steps=\(1, 4\)\), but it"):
        ledger.record_vote(11)
    assert (ledger.steps, ledger.repeated, ledger.epsilon()) == (0, 0, 0)
