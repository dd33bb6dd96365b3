"""The rule of preset "robust": its one released number, its accounting, and what it makes of the weights.

Batches of these tests have a third tensor, by which each record can be told how to vote: ``scripted`` adds it, times
100, to the losses of the average. Without noise the margins are then known, and with the noise of a large batch, too.
"""

import itertools
import math

import pytest
import torch
from cases import each, together
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from hyfreedp.votes import vote_steps
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats
from twins import (
    adamw,
    by_hand,
    cross_entropy,
    flat,
    make_batches,
    make_data,
    make_model,
    make_private,
    sgd_momentum,
    three_groups,
    trainable,
    twin_of,
)

from hyfreedp import reference, votes
from hyfreedp.accounting import calibrate_noise
from hyfreedp.gradients import AutomaticClipping
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_votes

FALSE_ALARM = 1e-6  # of each statistical test below; the seeds are fixed, so a test that passes always passes

# -- the released number -----------------------------------------------------------------------------------------------

extremes = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, -5e-324, 1.7976931348623157e308, 1e300])
losses = extremes | st.sampled_from([0.5, 1.0]) | st.floats(allow_nan=True, allow_infinity=True)
records = st.tuples(losses, losses)  # at the present weights, and at the others


def sum_of_votes(pairs, noise_multiplier=0.0, **settings):
    """The release of a batch of such records, expected to have one record."""
    here, there = torch.tensor(pairs, dtype=torch.float64).view(-1, 2).T
    return privatize_votes(here, there, noise_multiplier, **({"expected_batch_size": 1} | settings))


def vote_of(here, there):
    """One record's, slow and obvious."""
    if math.isnan(here):
        here = math.inf
    if math.isnan(there):
        there = math.inf
    if here == there:
        return 0
    return 1 if here < there else -1


@given(st.lists(records, max_size=12), st.integers(1, 50))
@example([(-math.inf, -1.7976931348623157e308), (math.nan, math.inf), (1.0, math.nan), (0.0, -0.0)], 4)
def test_without_noise_the_sum_of_the_votes_over_the_expected_size(pairs, expected):
    assert sum_of_votes(pairs, expected_batch_size=expected) == sum(itertools.starmap(vote_of, pairs)) / expected


@given(st.lists(records, max_size=12), records, st.integers(0, 12))
@example([(math.nan, math.nan)], (math.inf, -math.inf), 0)
def test_one_more_record_of_any_losses_moves_the_sum_by_one_at_most(pairs, extra, place):
    """Exactly, so the accountant's sensitivity holds in floating point too; and by the record's own vote only."""
    change = sum_of_votes([*pairs[:place], extra, *pairs[place:]]) - sum_of_votes(pairs)
    assert change == vote_of(*extra) and abs(change) <= 1


@pytest.mark.parametrize("pairs", [[], [(0.0, 1.0)] * 5 + [(1.0, math.nan)] * 3], ids=["empty", "unanimous"])
def test_noise_has_the_stated_distribution(pairs, generator):
    """Kolmogorov-Smirnov and, for the size, chi-square on 4,000 releases; an empty batch is noised like any other."""
    settings = {"expected_batch_size": 10, "generator": generator}
    margins = torch.tensor([sum_of_votes(pairs, 3.0, **settings) for _ in range(4000)], dtype=torch.float64)
    noise = ((margins - len(pairs) / 10) / (3.0 / 10)).numpy()
    assert stats.kstest(noise, "norm").pvalue > FALSE_ALARM
    assert FALSE_ALARM / 2 < stats.chi2(4000).cdf((noise**2).sum()) < 1 - FALSE_ALARM / 2


# -- the plan and its price --------------------------------------------------------------------------------------------

PLAN = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 20, "probe": "votes"}


@given(st.integers(1, 3000))
def test_every_vote_comes_within_the_run_and_once(steps):
    plan = vote_steps(steps)
    assert plan == tuple(sorted(set(plan))) and all(2 <= step < steps for step in plan)
    assert (2 in plan) == (steps > 2) and len(plan) <= 1 + len(votes.REVIEWS)


@together("voting", [(), (2, 8, 10, 12, 14), tuple(range(20))])
def test_epsilon_agrees_with_dp_accounting(voting):
    """The gradient and the vote of a step, sensitivity 1 each, composed on one subsampled batch."""
    split = calibrate_noise(**PLAN, vote_steps=voting, accountant="rdp")
    plain = PoissonSampledDpEvent(0.1, GaussianDpEvent(split.sigma_gradient))
    composed = RdpAccountant()
    if len(voting) < 20:
        composed.compose(SelfComposedDpEvent(plain, 20 - len(voting)))
    if voting:
        both = ComposedDpEvent([GaussianDpEvent(split.sigma_gradient_probe), GaussianDpEvent(split.sigma_loss)])
        composed.compose(SelfComposedDpEvent(PoissonSampledDpEvent(0.1, both), len(voting)))
    assert split.epsilon == pytest.approx(composed.get_epsilon(1e-5), rel=5e-3)
    assert 0.999 * 2 < split.epsilon <= 2 and split.guarantee


# -- the rule ----------------------------------------------------------------------------------------------------------

STEPS = 20
REVIEWS = (8, 10, 12, 14)

# How many of the eight records of a batch vote for the present weights; 4 of each other batch. Margins are multiples of
# 1/4, so -0.25, 0.0 and -0.75 are just not below what is needed.
ELECTIONS = {
    "reviews lost": {2: 8, 8: 3, 12: 0},
    "opening lost": {2: 2, 8: 8, 10: 5, 12: 4, 14: 8},
    "rout": {2: 0, 8: 4, 10: 6, 12: 0, 14: 7},
    # Of 64 steps, whose first review comes at an eighth of the run.
    "opening and early review lost": {2: 1, 8: 3, 13: 4, 19: 3, 26: 5},
    "opening lost, early review by a little": {2: 1, 8: 4, 13: 8, 19: 4, 26: 8, 32: 8, 38: 8, 45: 8},
}
LOST = {
    "reviews lost": (8, 12),
    "opening lost": (2, 12),
    "rout": (2, 8, 12),
    "opening and early review lost": (2, 8, 19),
    "opening lost, early review by a little": (2, 8, 19),
}


def election(counts, sizes):
    """Batches whose records prefer the present weights, so many of each, or else the average."""
    batches = make_batches(sizes)
    for t, (inputs, _) in enumerate(batches):
        wishes = -torch.ones(len(inputs), dtype=torch.float64)
        wishes[: counts.get(t, len(inputs) // 2)] = 1
        batches[t].append(wishes)
    return batches


def scripted(model):
    """Cross-entropy; without a gradient, as at the average, records get what they wish."""

    def loss(batch):
        values = cross_entropy(model)(batch)
        return values if torch.is_grad_enabled() else values + 100 * batch[2]

    return loss


def rmsprop(model):
    return torch.optim.RMSprop(trainable(model), lr=0.5, momentum=0.5)


def damped(model):
    return torch.optim.SGD(trainable(model), lr=0.5, momentum=0.8, dampening=0.25, weight_decay=0.1)


KINDS = {"sgd": sgd_momentum, "adamw": adamw, "groups": three_groups, "rmsprop": rmsprop, "damped": damped}


def start(base=adamw, *, tuning="full", dropout=0.0, model_seed=0, **settings):
    """A run about to begin, of ten steps; without privacy unless the settings say so."""
    model = make_model(tuning, dropout=dropout, seed=model_seed)
    optimizer = by_hand(model, base(model), **settings)
    optimizer._checks_due = []  # which would call the loss more often
    return model, optimizer


def scripted_one_by_one(size):
    """``scripted`` for the reference, which looks at each of ``size`` records here, then at each there, then trains."""
    looks = 0

    def loss(model, batch):
        nonlocal looks
        looks = 0 if torch.is_grad_enabled() else looks + 1
        return cross_entropy(model)(batch) + (100 * batch[2] if looks > size else 0)

    return loss


def compare(base, batches, loss=cross_entropy, **settings):
    """A run, and the reference beside it: weights, rates and decisions at every step; the optimizer."""
    model, optimizer = start(base, clipping=AutomaticClipping(), **settings)
    twin, script = make_model(), {"loss": scripted_one_by_one(8)} if loss is scripted else {}
    expected = twin_of(twin, base(twin), optimizer, batches, train=reference.train_by_votes, **script)
    for batch, released in zip(batches, expected, strict=True):
        record = optimizer.step(loss(model), batch).to_dict()
        assert {name: record.get(name) for name in released} == pytest.approx(released, rel=1e-9)
        assert ("margin" in record) == ("margin" in released)
        torch.testing.assert_close(flat(model), flat(twin), rtol=1e-8, atol=1e-11)
    return optimizer


@together(*each(name=ELECTIONS, kind=KINDS).args)
def test_a_run_is_that_of_the_reference(kind, name):
    """Weights, rates and decisions at every step, through votes kept and lost, just and clearly."""
    steps = 64 if 13 in ELECTIONS[name] else STEPS
    batches = election(ELECTIONS[name], [8] * steps)
    optimizer = compare(KINDS[kind], batches, scripted, steps=steps)
    assert tuple(row["step"] for row in optimizer.history if row.get("lost")) == LOST[name]
    assert tuple(row["step"] for row in optimizer.history if "margin" in row) == vote_steps(steps)


NOISY = {"target_epsilon": 3.0, "accountant": "rdp", "steps": STEPS}


@together(("kind", "settings"), [("sgd", {"steps": STEPS}), *((kind, NOISY) for kind in KINDS)])
def test_records_really_compare_the_weights_with_the_average(kind, settings, unbound_noise):
    """Margins of a run without a script are those that the reference counts, with the same noise."""
    lost = set()
    for seed in range(4):
        batches = make_batches([9 if seed < 3 else 0, 8, 7, 6, 0] * 4, seed=seed)  # the first may be empty
        optimizer = compare(KINDS[kind], batches, seed=seed, **settings)
        lost |= {row["lost"] for row in optimizer.history if "lost" in row}
    assert lost == {False, True}  # so that these runs show something


# -- what the fallback reads -------------------------------------------------------------------------------------------

LARGE = {"data": make_data(400), "batch_size": 100, "target_epsilon": 3.0, "accountant": "rdp"}  # ten steps
BALLOTS = {2: 0, 4: 80, 5: 10, 6: 90, 7: 20}  # of 100: margins -1, 0.6, -0.8, 0.8, -0.6, their noise below 0.07


def test_noise_is_bound_to_the_losses_and_not_to_their_votes_alone():
    """Else a step made again on other data with equally many votes would show that, without noise."""
    losses, rival = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 5.0])
    margins = {
        privatize_votes(losses, other, 1.0, expected_batch_size=3, generator=NoiseGenerator(0).child("vote"))
        for other in (rival, rival, rival + torch.tensor([1e-12, 0, 0]).double(), rival.flip(0) - 0.5)
    }
    assert len(margins) == 3  # the same losses again are the same release


@together("kind", ["ASGD", "Adadelta", "Adagrad", "Rprop", "Adafactor", "RAdam"])
def test_optimizers_whose_steps_may_be_of_any_size_are_refused(kind):
    """Before anything is done to the model."""
    model = make_model()
    optimizer = getattr(torch.optim, kind)(trainable(model), lr=0.1)
    with pytest.raises(ValueError, match=f"optimizer must be SGD, RMSprop or .* got {kind}, .* preset='paper'"):
        make_private(model, optimizer)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_error_after_a_lost_vote_leaves_all_as_it_was_and_the_same_batch_votes_the_same():
    """Call 1 of a step is at the weights, 2 at the average, 3 after the lost vote. Units drop out as they did."""
    weights = []
    for broken in (None, (2, 3), (5, 2), (5, 3)):
        model, optimizer = start(dropout=0.5, **LARGE)
        torch.manual_seed(7)
        calls = []

        def loss(batch, model=model, optimizer=optimizer, broken=broken, calls=calls):
            calls.append(optimizer.ledger.steps)
            if (calls[-1], calls.count(calls[-1])) == broken:
                raise MemoryError("out of memory")
            return scripted(model)(batch)

        for batch in election(BALLOTS, [100] * 10):
            before = flat(model), optimizer.eta, optimizer.ledger.steps
            try:
                optimizer.step(loss, batch)
            except MemoryError:
                assert torch.equal(flat(model), before[0]) and (optimizer.eta, optimizer.ledger.steps) == before[1:]
                optimizer.step(loss, batch)
        weights.append(flat(model))
    assert all(torch.equal(weights[0], other) for other in weights[1:])
