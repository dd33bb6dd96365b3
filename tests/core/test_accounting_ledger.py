"""The ledger: it counts what was released, stays within the plan, refuses repeats and survives interruption."""

import pytest

from hyfreedp.accounting import PrivacyLedger, calibrate_noise
from hyfreedp.errors import BudgetExhausted


def make_split(**changes):
    plan = dict(target_epsilon=1, target_delta=1e-5, sample_rate=0.1, steps=12, interval=4, probe="losses")
    return calibrate_noise(**plan | changes)


def run(ledger, steps):
    for _ in range(steps):
        ledger.record(ledger.steps)
        if ledger.split.is_probe_step(ledger.steps - 1) and ledger.split.probe == "losses":
            ledger.record_probe(ledger.steps - 1, ledger.steps)


def test_a_run_spends_what_its_split_says_and_no_step_more():
    ledger = PrivacyLedger(make_split())
    run(ledger, 12)
    assert ledger.epsilon() == ledger.split.epsilon <= 1 and ledger.steps == 12
    for refused in (ledger.check, ledger.record):
        with pytest.raises(BudgetExhausted, match="all 12 steps that the noise was calibrated for have been made"):
            refused()
    assert ledger.steps == 12


def test_a_probe_or_look_out_of_turn_is_refused_and_not_counted():
    ledger = PrivacyLedger(make_split())
    run(ledger, 3)
    counted = ledger.state_dict()
    with pytest.raises(BudgetExhausted, match="step 3 must not probe by the plan"):
        ledger.record_probe(3, 11)
    ledger.record()
    assert ledger.state_dict() == counted | {"steps": 4, "released": [*counted["released"], [3, 0, None]]}


def test_a_look_and_the_gradient_after_it_are_one_step():
    """Released at once in the books: the look counts the whole step, and its gradient nothing more."""
    split = make_split(probe="look", vote_steps=(1, 4))
    ledger = PrivacyLedger(split)
    ledger.record(10)
    before = ledger.epsilon()
    ledger.record_probe(1, 11)
    after_look = ledger.epsilon()
    ledger.record_probe(1, 11)  # the same batch once more: the same release
    ledger.record(12)
    assert before < ledger.epsilon() == after_look and ledger.steps == 2


@pytest.mark.parametrize("counts", [dict(steps=13), dict(steps=6), dict(released=[[12, 0, None]])])
def test_impossible_counts_are_refused(counts):
    ledger = PrivacyLedger(make_split())
    with pytest.raises(ValueError, match="the plan of 12 steps does not allow the saved"):
        ledger.load_state_dict({**ledger.state_dict(), **counts})
    assert ledger.steps == 0
