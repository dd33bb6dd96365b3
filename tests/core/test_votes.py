"""The rule of preset "robust": its one released number, its accounting, and what it makes of the weights.

Batches of these tests have a third tensor, by which each record can be told how to vote: ``scripted`` adds it, times
100, to the losses of the average. Without noise the margins are then known, and with the noise of a large batch, too.
"""

import copy
import dataclasses
import functools
import gc
import io
import itertools
import json
import math
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import each, pairs, together
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn.utils import vector_to_parameters
from torch.utils.checkpoint import checkpoint
from twins import (
    BASES,
    adamw,
    cross_entropy,
    flat,
    make_batches,
    make_data,
    make_model,
    make_private,
    sgd_momentum,
    three_groups,
    trainable,
)

from hyfreedp import HyFreeDPOptimizer, votes
from hyfreedp.accounting import BudgetExhausted, NoiseSplit, calibrate_noise
from hyfreedp.clipping import AutomaticClipping
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_votes
from hyfreedp.votes import VotedRate, displacement_per_gradient, vote_steps

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


@given(st.lists(records, max_size=12))
def test_who_stands_for_election_does_not_matter(pairs):
    """The votes for the one are those against the other."""
    assert sum_of_votes([(there, here) for here, there in pairs]) == -sum_of_votes(pairs)


@together("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_losses_in_half_precision_vote_too(dtype):
    here = torch.tensor([math.nan, 1.0, 2.0, -math.inf], dtype=dtype)
    there = torch.tensor([7.0, 1.5, 2.0, 1.0], dtype=dtype)
    assert privatize_votes(here, there, 0.0, expected_batch_size=1) == -1 + 1 + 0 + 1


@pytest.mark.parametrize("pairs", [[], [(0.0, 1.0)] * 5 + [(1.0, math.nan)] * 3], ids=["empty", "unanimous"])
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_noise_has_the_stated_distribution(mechanism, pairs, generator):
    """Kolmogorov-Smirnov and, for the size, chi-square on 4,000 releases; an empty batch is noised like any other."""
    settings = {"expected_batch_size": 10, "mechanism": mechanism, "generator": generator}
    margins = torch.tensor([sum_of_votes(pairs, 3.0, **settings) for _ in range(4000)], dtype=torch.float64)
    noise = ((margins - len(pairs) / 10) / (3.0 / 10)).numpy()
    assert stats.kstest(noise, "norm" if mechanism == "gaussian" else "laplace").pvalue > FALSE_ALARM
    # Of 4,000 numbers: squares of normal ones, or twice the absolute values of Laplace ones, are chi-square.
    size, df = ((noise**2).sum(), 4000) if mechanism == "gaussian" else (2 * abs(noise).sum(), 8000)
    assert FALSE_ALARM / 2 < stats.chi2(df).cdf(size) < 1 - FALSE_ALARM / 2


def test_processes_add_up_their_votes_before_the_one_noise():
    """A shard's release is that of the whole batch, also where the shard is empty."""
    pairs = [(0.0, 1.0), (1.0, 0.0), (math.nan, 0.0), (2.0, 3.0), (0.0, 5.0)]
    whole = sum_of_votes(pairs, 2.0, generator=NoiseGenerator(4))
    for cut in range(len(pairs) + 1):
        rest = []
        sum_of_votes(pairs[cut:], add_up=lambda sums, rest=rest: rest.append(sums[0].clone()))

        def add_up(sums, rest=rest):
            sums[0] += rest[0]

        assert sum_of_votes(pairs[:cut], 2.0, generator=NoiseGenerator(4), add_up=add_up) == whole


@together(
    ("here", "there", "settings", "named"),
    [
        (torch.ones(3), torch.ones(2), {}, r"same shape \(B,\), got torch.Size\(\[3\]\) and torch.Size\(\[2\]\)"),
        (torch.ones(3, 1), torch.ones(3, 1), {}, r"same shape \(B,\), got torch.Size\(\[3, 1\]\)"),
        (torch.tensor(1.0), torch.tensor(1.0), {}, r"same shape \(B,\)"),
        (torch.ones(3), torch.ones(3), {"noise_multiplier": -1.0}, "noise_multiplier .* got -1.0"),
        (torch.ones(3), torch.ones(3), {"noise_multiplier": math.inf}, "noise_multiplier .* got inf"),
        (torch.ones(3), torch.ones(3), {"expected_batch_size": 0}, "expected_batch_size .* got 0"),
        (torch.ones(3), torch.ones(3), {"mechanism": "cauchy"}, "got 'cauchy'"),
    ],
)
def test_bad_input_is_named(here, there, settings, named):
    with pytest.raises(ValueError, match=named):
        privatize_votes(here, there, **({"noise_multiplier": 1.0, "expected_batch_size": 3} | settings))


# -- the plan and its price --------------------------------------------------------------------------------------------

PLAN = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 20, "probe": "votes"}


def test_the_plan_of_votes():
    """The opening, and the reviews at their shares; none where the run is too short to have a weight to compare."""
    assert vote_steps(100) == (2, 12, 20, 30, 40, 50, 60, 70)
    assert vote_steps(10) == (2, 4, 5, 6, 7)
    assert vote_steps(3) == (2,)
    assert vote_steps(2) == vote_steps(1) == ()


@given(st.integers(1, 3000))
def test_every_vote_comes_within_the_run_and_once(steps):
    plan = vote_steps(steps)
    assert plan == tuple(sorted(set(plan))) and all(2 <= step < steps for step in plan)
    assert (2 in plan) == (steps > 2) and len(plan) <= 1 + len(votes.REVIEWS)


@pytest.mark.filterwarnings("ignore::hyfreedp.accounting.UnsoundAccountingWarning")
@given(
    st.floats(1e-6, 1e-3),
    st.integers(1, 200).flatmap(lambda steps: st.tuples(st.just(steps), st.sets(st.integers(0, steps - 1)))),
    st.floats(1.001, 2),
)
def test_a_split_with_votes_meets_the_closed_form(delta, plan, gamma):
    """A voting step costs what a step of DP-SGD at sigma costs: s = 1. The mean gradient noise is gamma times sigma."""
    steps, voting = plan
    split = calibrate_noise(
        **(PLAN | {"steps": steps, "target_delta": delta, "target_epsilon": 1.0}),
        vote_steps=sorted(voting, reverse=True),
        gamma=gamma,
        accountant="gdp",
    )
    n = len(voting)
    assert split.probe_steps == n and split.sigma_gradient == split.sigma
    if n:
        assert split.sigma_gradient_probe**-2 + split.sigma_loss**-2 == pytest.approx(split.sigma**-2, rel=1e-9)
        mean_square = ((steps - n) * split.sigma_gradient**2 + n * split.sigma_gradient_probe**2) / steps
        assert mean_square == pytest.approx((gamma * split.sigma) ** 2, rel=1e-9)
    else:
        assert (split.sigma_gradient_probe, split.sigma_loss) == (split.sigma, 0.0)


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


@pytest.mark.parametrize("voting", [(), (2, 8, 10, 12, 14)])
def test_votes_cost_what_dp_sgd_at_sigma_costs(voting):
    """By dp-accounting's privacy loss distributions."""
    split = calibrate_noise(**PLAN, vote_steps=voting, accountant="pld")
    vanilla = PoissonSampledDpEvent(0.1, GaussianDpEvent(split.sigma))
    other = PLDAccountant().compose(SelfComposedDpEvent(vanilla, 20)).get_epsilon(1e-5)
    assert split.epsilon == pytest.approx(other, rel=1e-3) and split.epsilon <= 2 and split.guarantee


def test_the_plan_is_kept_and_survives_json():
    split = calibrate_noise(**PLAN, vote_steps=[14, 2, 8], accountant="rdp")
    assert [t for t in range(20) if split.is_probe_step(t)] == [2, 8, 14]
    assert [split.probe_steps_before(t) for t in (0, 2, 3, 8, 9, 14, 15, 20)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {split.gradient_noise_multiplier(t) for t in (2, 8, 14)} == {split.sigma_gradient_probe}
    assert split.gradient_noise_multiplier(3) == split.sigma_gradient < split.sigma_gradient_probe
    again = NoiseSplit.from_dict(json.loads(json.dumps(split.to_dict())))
    assert again == split and hash(again) == hash(split)


@together(
    ("wrong", "message"),
    [
        ({"vote_steps": [-1]}, "vote_steps must be an integer of at least 0 and at most steps - 1=19, got -1"),
        ({"vote_steps": [20]}, "vote_steps must be an integer of at least 0 and at most steps - 1=19, got 20"),
        ({"vote_steps": [2.5]}, "vote_steps must be an integer .* got 2.5"),
        ({"vote_steps": [True]}, "vote_steps must be an integer .* got True"),
        ({"vote_steps": [2, 2]}, r"vote_steps must differ.* got \[2, 2\] for probe='votes'"),
        ({"vote_steps": [2], "probe": "losses"}, r"left out unless probe='votes', got \[2\] for probe='losses'"),
        ({"vote_steps": [2], "probe": "none"}, r"left out unless probe='votes', got \[2\] for probe='none'"),
    ],
)
def test_bad_vote_steps_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        calibrate_noise(**(PLAN | wrong), accountant="rdp")


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_too_short_to_vote_trains_and_pays_for_no_vote(steps):
    model = make_model()
    before = flat(model)
    settings = {"target_epsilon": 3.0, "accountant": "rdp", "steps": steps}
    _, optimizer, _ = make_private(model, adamw(model), **settings)
    for batch in make_batches([8] * steps):
        assert optimizer.step(cross_entropy(model), batch).vote is None
    assert not torch.equal(flat(model), before)
    assert optimizer.split.sigma_gradient == optimizer.split.sigma and optimizer.split.sigma_loss == 0
    assert optimizer.ledger.probe_steps == 0 and 0.999 * 3 < optimizer.epsilon_spent() <= 3


# -- the rule ----------------------------------------------------------------------------------------------------------

STEPS = 20
REVIEWS = (8, 10, 12, 14)

# How many of the eight records of a batch vote for the present weights; 4 of each other batch. Margins are multiples of
# 1/4, so -0.25, 0.0 and -0.75 are just not below what is needed.
ELECTIONS = {
    "all kept": {2: 3, 8: 4, 10: 8, 12: 5},
    "reviews lost": {2: 8, 8: 3, 12: 0},
    "opening lost": {2: 2, 8: 8, 10: 5, 12: 4, 14: 8},
    "nearly all against": {2: 1, 8: 5, 10: 5, 12: 5, 14: 5},
    "rout": {2: 0, 8: 4, 10: 6, 12: 0, 14: 7},
    # Of 64 steps, whose first review comes at an eighth of the run.
    "early review lost": {2: 5, 8: 3, 13: 8, 19: 4, 26: 0},
    "second review lost": {2: 5, 8: 4, 13: 0, 19: 8},
    "opening and early review lost": {2: 1, 8: 3, 13: 4, 19: 3, 26: 5},
    "opening lost, early review by a little": {2: 1, 8: 4, 13: 8, 19: 4, 26: 8, 32: 8, 38: 8, 45: 8},
}
LOST = {
    "all kept": (),
    "reviews lost": (8, 12),
    "opening lost": (2, 12),
    "nearly all against": (2,),
    "rout": (2, 8, 12),
    "early review lost": (8, 26),
    "second review lost": (13,),
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


class Twin:
    """The rule once more: all weights are kept, the average is that of its definition, torch's optimizer does the rest.

    Args:
        model: without anybody's hooks.
        optimizer: a torch optimizer over its trainable parameters; its rates are kept as ratios.
        unit: whether the first gradient's size sets the unit; ``reach`` is how far a gradient moves weights in all.
    """

    def __init__(self, model, optimizer, steps, *, unit, reach):
        self.model, self.optimizer, self.steps, self.reach = model, optimizer, steps, reach
        self.plan = {2} | {round(share * steps) for share in votes.REVIEWS if share >= 0.4 or share * steps >= 8}
        self.rate, self.warm, self.unit = votes.PEAK / math.sqrt(steps), False, None if unit else 1.0
        self.path, self.t, self.lost, self.review_margin = [flat(model)], 0, [], 0.0
        self.first = self.path[0]
        self.ratios = [group["lr"] / optimizer.param_groups[0]["lr"] for group in optimizer.param_groups]

    def place(self, weights):
        vector_to_parameters(weights.clone(), trainable(self.model))  # whose memory the parameters take

    def step(self, margin_beside, gradient):
        """Make one step.

        Args:
            margin_beside: the average to the margin of the present weights.
            gradient: of the model's present weights, one tensor per parameter.
        """
        if self.t in self.plan:
            present, opening, early = flat(self.model), self.t == 2, self.t == round(self.steps / 8)
            weights = torch.arange(1, len(self.path) + 1, dtype=torch.float64)
            average = (weights / weights.sum()) @ torch.stack(self.path)
            margin = margin_beside(average)
            self.place(present)
            if margin < (votes.OPENING_MARGIN if opening else self.review_margin):
                self.lost.append(self.t)
                again = opening or (early and margin < 0)
                self.place(self.first if again else average)
                if again:
                    self.path, self.warm = [self.first], True
                    self.review_margin = 0.2 if opening else 0.0
                if not opening or margin < votes.SHATTERED or "betas" not in self.optimizer.param_groups[0]:
                    self.rate *= votes.BRAKE
        for parameter, value in zip(trainable(self.model), gradient(), strict=True):
            parameter.grad = value
        if self.unit is None:
            self.unit = torch.cat([p.grad.flatten() for p in trainable(self.model)]).square().mean().sqrt().item()
        betas = self.optimizer.param_groups[0].get("betas")
        warm_up = 1 - betas[0] ** (self.t + 1) if self.warm and betas else 1.0
        eta = self.rate * warm_up * (1 - self.t / self.steps) / (self.unit * self.reach)
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            group["lr"] = eta * ratio
        self.optimizer.step()
        self.path.append(flat(self.model))
        self.t += 1
        return eta


def rmsprop_reach(steps):
    return 2.0 * math.sqrt(np.mean([1 / (1 - 0.99**t) for t in range(1, steps + 1)]))


def rmsprop(model):
    return torch.optim.RMSprop(trainable(model), lr=0.5, momentum=0.5)


def damped(model):
    return torch.optim.SGD(trainable(model), lr=0.5, momentum=0.8, dampening=0.25, weight_decay=0.1)


KINDS = {  # whether the gradient sets the unit, and the reach
    "sgd": (sgd_momentum, True, 10.0),
    "adamw": (adamw, False, 1.0),
    "groups": (three_groups, False, 1.0),
    "rmsprop": (rmsprop, False, rmsprop_reach(STEPS)),
    "damped": (damped, True, 0.75 / 0.2),
}


def start(base=adamw, *, tuning="full", dropout=0.0, model_seed=0, **settings):
    """A run about to begin, of ten steps; without privacy unless the settings say so."""
    model = make_model(tuning, dropout=dropout, seed=model_seed)
    _, optimizer, _ = make_private(model, base(model), **settings)
    optimizer._checks_due = []  # which would call the loss more often
    return model, optimizer


@together(*each(name=ELECTIONS, kind=KINDS).args)
def test_a_run_is_that_of_the_twin(kind, name):
    """Weights, rates and decisions at every step, through votes kept and lost, just and clearly."""
    base, unit, reach = KINDS[kind]
    steps = 64 if 13 in ELECTIONS[name] else STEPS
    model, optimizer = start(base, steps=steps)
    twin_model = make_model()
    if kind == "rmsprop":
        reach = rmsprop_reach(steps)
    twin = Twin(twin_model, base(twin_model), steps, unit=unit, reach=reach)
    for batch in election(ELECTIONS[name], [8] * steps):

        def mean_gradient(batch=batch):
            return torch.autograd.grad(cross_entropy(twin_model)(batch).sum() / 8, trainable(twin_model))

        eta = twin.step(lambda average, batch=batch: batch[2].sum().item() / 8, mean_gradient)
        record = optimizer.step(scripted(model), batch)
        assert record.eta == pytest.approx(eta, rel=1e-9)
        torch.testing.assert_close(flat(model), flat(twin_model), rtol=1e-8, atol=1e-11)
        if record.vote:
            assert record.vote.margin == batch[2].sum().item() / 8 and record.vote.margin_std == 0
    lost = tuple(row["step"] for row in optimizer.history if row.get("lost"))
    assert lost == tuple(twin.lost) == LOST[name]
    assert tuple(row["step"] for row in optimizer.history if "margin" in row) == vote_steps(steps)


def test_records_really_compare_the_weights_with_the_average():
    """Margins of a run without a script are those that the twin counts, in both directions."""
    model, optimizer = start(sgd_momentum, steps=STEPS)
    twin_model = make_model()
    twin = Twin(twin_model, sgd_momentum(twin_model), STEPS, unit=True, reach=10.0)
    counted = []
    for batch in make_batches([9, 8, 7, 6, 0] * 4):

        def margin_beside(average, batch=batch):
            here = cross_entropy(twin_model)(batch)
            twin.place(average)
            there = cross_entropy(twin_model)(batch)
            counted.append(sum(itertools.starmap(vote_of, zip(here.tolist(), there.tolist(), strict=True))) / 8)
            return counted[-1]

        def mean_gradient(batch=batch):
            total = cross_entropy(twin_model)(batch).sum() / 8
            return torch.autograd.grad(total, trainable(twin_model))

        twin.step(margin_beside, mean_gradient)
        optimizer.step(cross_entropy(model), batch)
    assert [row["margin"] for row in optimizer.history if "margin" in row] == counted
    assert max(counted) > 0 > min(counted)
    torch.testing.assert_close(flat(model), flat(twin_model), rtol=1e-8, atol=1e-11)


NOISY = {"target_epsilon": 3.0, "accountant": "rdp", "steps": STEPS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_private_run_follows_from_its_released_numbers_alone(kind):
    """The twin sees first weights, margins and private gradients, and no data, and ends at the same weights."""
    base, unit, reach = KINDS[kind]
    lost = set()
    for seed in range(20):
        model, optimizer = start(base, seed=seed, **NOISY)
        released = []
        optimizer.base.register_step_pre_hook(
            lambda o, *_, released=released: (
                released.append([p.grad.clone() for p in o.param_groups[0]["params"]])
                if len(o.param_groups) == 1
                else released.append([p.grad.clone() for group in o.param_groups for p in group["params"]])
            )
        )
        for batch in make_batches([8, 3, 9, 0] * 5):
            optimizer.step(cross_entropy(model), batch)
        twin_model = make_model()
        twin = Twin(twin_model, base(twin_model), STEPS, unit=unit, reach=reach)
        for row, gradients in zip(optimizer.history, released, strict=True):
            twin.step(lambda average, row=row: row["margin"], lambda gradients=gradients: gradients)
        torch.testing.assert_close(flat(model), flat(twin_model), rtol=1e-9, atol=1e-11)
        lost |= {("opening" if t == 2 else "review") for t in twin.lost}
    assert lost == {"opening", "review"}  # so that these runs show something


# -- what the fallback reads -------------------------------------------------------------------------------------------

LARGE = {"data": make_data(400), "batch_size": 100, "target_epsilon": 3.0, "accountant": "rdp"}  # ten steps
VOTING = (2, 4, 5, 6, 7)
BALLOTS = {2: 0, 4: 80, 5: 10, 6: 90, 7: 20}  # of 100: margins -1, 0.6, -0.8, 0.8, -0.6, their noise below 0.07


def ten_steps(model, optimizer, loss=None, batches=None):
    for batch in election(BALLOTS, [100] * 10) if batches is None else batches:
        optimizer.step(loss or scripted(model), batch)
    return optimizer


@functools.cache
def undisturbed():
    """Weights and history of the run that the tests below disturb."""
    model, optimizer = start(**LARGE)
    ten_steps(model, optimizer)
    assert [row["lost"] for row in optimizer.history if "lost" in row] == [True, False, True, False, True]
    return flat(model), optimizer.history, optimizer.epsilon_spent()


@together("bad", [math.nan, math.inf, -math.inf])
def test_a_record_that_is_not_finite_does_not_hide_the_others_from_the_noise(bad):
    """Equally many votes, one bad record, other losses: other noise."""
    margins = [
        privatize_votes(
            torch.tensor([bad, 1.0, first]),
            torch.tensor([0.5, 2.0, 3.0]),
            2.0,
            expected_batch_size=4,
            generator=NoiseGenerator(3),
        )
        for first in (4.0, 5.0)
    ]
    assert margins[0] != margins[1]


def test_losses_matter_by_the_sum_of_their_signs_only(unbound_noise):
    """Other raw losses, with the same gradients and equally many votes for the one and the other, in another order."""
    weights, history, epsilon = undisturbed.__wrapped__()
    model, optimizer = start(**LARGE)

    def loss(batch):
        values = cross_entropy(model)(batch)
        shifted = values + (1e3 * torch.rand(len(values))).double()  # no gradient comes of it
        return shifted if torch.is_grad_enabled() else shifted.detach() + 1e5 * batch[2].flip(0)

    ten_steps(model, optimizer, loss)
    assert torch.equal(flat(model), weights)
    assert (optimizer.history, optimizer.epsilon_spent()) == (history, epsilon)


def test_noise_is_bound_to_the_losses_and_not_to_their_votes_alone():
    """Else a step made again on other data with equally many votes would show that, without noise."""
    losses, rival = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 5.0])
    margins = {
        privatize_votes(losses, other, 1.0, expected_batch_size=3, generator=NoiseGenerator(0).child("vote"))
        for other in (rival, rival, rival + torch.tensor([1e-12, 0, 0]).double(), rival.flip(0) - 0.5)
    }
    assert len(margins) == 3  # the same losses again are the same release


def test_one_vote_more_is_another_release():
    """Noise is bound to the sum: the test above would notice if it were not the sums that are equal."""
    model, optimizer = start(**LARGE)
    ten_steps(model, optimizer, batches=election(BALLOTS | {2: 1}, [100] * 10))
    margin, before = optimizer.history[2]["margin"], undisturbed()[1][2]["margin"]
    assert margin not in (before, pytest.approx(before + 0.02, rel=1e-9))


@together("mechanism", ["gaussian", "laplace"])
def test_an_empty_batch_votes_with_noise_alone(mechanism):
    """That of the plan's mechanism and multiplier, from a key of the step's own, and it decides."""
    model, optimizer = start(**NOISY, loss_mechanism=mechanism)
    margins = []
    for t, batch in enumerate(make_batches([0] * STEPS)):
        record = optimizer.step(cross_entropy(model), batch)
        if record.vote:
            margins.append(record.vote.margin)
            generator = optimizer._generator.child("vote", t)
            noise = [torch.zeros(3, dtype=torch.float64)]  # the votes, and what binds their noise to the losses
            generator.add_noise(noise, optimizer.split.sigma_loss, mechanism)
            assert record.vote.margin == noise[0][0].item() / 8
            unit = 1.0 if mechanism == "gaussian" else math.sqrt(2)
            assert record.vote.margin_std == pytest.approx(unit * optimizer.split.sigma_loss / 8)
            assert record.vote.lost == (record.vote.margin < record.vote.needed)
    assert len(set(margins)) == 5 and optimizer.ledger.probe_steps == 5
    assert optimizer.epsilon_spent() == pytest.approx(optimizer.split.epsilon)


@together(("kind", "lost"), [("all kept", ()), ("opening lost", (2, *REVIEWS))])
def test_without_noise_an_empty_batch_is_a_tie(kind, lost):
    """A tie is enough for weights that have lost nothing yet."""
    model, optimizer = start(steps=STEPS)
    sizes = [0 if t in REVIEWS else 8 for t in range(STEPS)]
    for batch in election({2: ELECTIONS[kind][2]}, sizes):
        optimizer.step(scripted(model), batch)
    assert tuple(row["step"] for row in optimizer.history if row.get("lost")) == lost


# -- a retreat is atomic -----------------------------------------------------------------------------------------------


class Breaks:
    """The scripted loss; fails once, at a call of a step: 1 is at the weights, 2 at the average, 3 after the vote."""

    def __init__(self, model, optimizer, step, call):
        self.loss, self.optimizer, self.place = scripted(model), optimizer, (step, call)
        self.calls = [0] * 10
        self.broken = False

    def __call__(self, batch):
        t = self.optimizer.ledger.steps
        self.calls[t] += 1
        if not self.broken and (t, self.calls[t]) == self.place:
            self.broken = True
            raise MemoryError("out of memory")
        return self.loss(batch)


def snapshot(model, optimizer):
    """What an error within a step must leave alone."""
    probe = copy.deepcopy(optimizer.rate_learner.state_dict())
    return flat(model), repr(probe), repr(optimizer.base.state_dict()), optimizer.eta, optimizer.ledger.steps


@together(*each(call=[1, 2, 3], step=[2, 5]).args)
def test_an_error_leaves_all_as_it_was_and_the_same_batch_votes_the_same(step, call):
    """Whether the opening or a review is lost: weights, average, rate; the second attempt counts nothing twice."""
    model, optimizer = start(**LARGE)
    loss, caught = Breaks(model, optimizer, step, call), 0
    for batch in election(BALLOTS, [100] * 10):
        before = snapshot(model, optimizer)
        try:
            optimizer.step(loss, batch)
        except MemoryError:
            caught += 1
            after = snapshot(model, optimizer)
            assert torch.equal(after[0], before[0]) and after[1:] == before[1:]
            assert all(parameter.grad is None for parameter in model.parameters())
            counted = optimizer.ledger.repeated
            assert counted == (call == 3)  # the vote of a step that is not made yet
            optimizer.step(loss, batch)
            assert optimizer.ledger.repeated == 0
    assert caught == 1
    weights, history, epsilon = undisturbed()
    assert torch.equal(flat(model), weights)
    assert (optimizer.history, optimizer.epsilon_spent()) == (history, epsilon)


def test_a_step_made_again_after_an_error_drops_out_the_same():
    """Dropout draws once more what it drew, so that the vote is the same release, and nothing is counted twice."""
    released = []
    for step in (None, 2, 5):
        model, optimizer = start(**LARGE)
        inner = Breaks(model, optimizer, step, 3)

        def loss(batch, inner=inner):
            return inner(batch) + 0.01 * F.dropout(torch.ones(len(batch[0])), 0.5)

        torch.manual_seed(7)
        for batch in election(BALLOTS, [100] * 10):
            try:
                optimizer.step(loss, batch)
            except MemoryError:
                assert optimizer.ledger.repeated == 1  # a vote, whose step is not made yet
                optimizer.step(loss, batch)
            assert optimizer.ledger.repeated == 0
        assert inner.broken == (step is not None)
        released.append((optimizer.history, flat(model).tolist()))
    assert released[0] == released[1] == released[2]


def test_another_batch_after_an_error_is_a_further_release():
    """The first vote is out, and its step is voted on again by others: two votes of one draw; the run ends early."""
    model, optimizer = start(**LARGE)
    loss = Breaks(model, optimizer, 5, 3)
    batches, others = election(BALLOTS, [100] * 10), election({5: 12}, [100] * 10)
    ten_steps(model, optimizer, loss, batches[:5])
    first = optimizer.epsilon_spent()
    with pytest.raises(MemoryError):
        optimizer.step(loss, batches[5])
    once = optimizer.epsilon_spent()
    assert once > first and (optimizer.ledger.steps, optimizer.ledger.repeated) == (5, 1)
    optimizer.step(loss, others[5])
    assert optimizer.epsilon_spent() > once and (optimizer.ledger.steps, optimizer.ledger.repeated) == (6, 1)
    with pytest.raises(BudgetExhausted, match="step 9 was to be released once more with other data, or after"):
        for batch in batches[6:]:
            before = snapshot(model, optimizer)
            optimizer.step(loss, batch)
    after = snapshot(model, optimizer)
    assert torch.equal(after[0], before[0]) and after[1:] == before[1:]
    assert optimizer.ledger.steps == 9 and optimizer.epsilon_spent() <= 3


@together("step", VOTING)
def test_a_vote_counts_before_anything_follows_from_it(step):
    """In the ledger's words: the release of the vote and that of the gradient, with tags of their own."""
    model, optimizer = start(**LARGE)
    ten_steps(model, optimizer, batches=election(BALLOTS, [100] * 10)[: step + 1])
    (gradient,), (vote,) = dict((t, both) for t, *both in optimizer.ledger.state_dict()["released"])[step]
    assert gradient != vote and vote != 0
    if step - 1 not in VOTING:
        assert dict((t, both) for t, *both in optimizer.ledger.state_dict()["released"])[step - 1][1] == []


# -- the unit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("dampening", "nesterov"), [(0.0, False), (0.0, True), (0.25, False)])
def test_the_reach_is_how_far_torch_moves_on_one_gradient(momentum, dampening, nesterov):
    """A gradient of 1 among zeros, after one that torch does not dampen, moves the weight so far in all."""
    if nesterov and not momentum:
        return
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum, dampening=dampening, nesterov=nesterov)
    for t in range(400):
        weight.grad = torch.full_like(weight, float(t == 1))
        optimizer.step()
    reach, proportional = displacement_per_gradient(optimizer, 400)
    expected = -weight.item() if momentum else 1.0 - dampening
    assert proportional and reach == pytest.approx(expected, rel=1e-9)


@together(
    *pairs(
        steps=[50, 400], size=[1e-6, 1.0, 1e4], kind=["adam", "adamw", "nadam", "rmsprop", "rmsprop with momentum"]
    ).args
)
def test_optimizers_that_normalise_move_the_reach_whatever_the_size_of_gradients(kind, size, steps):
    """Independent gradients: the variance of a whole run's walk is steps times the square of the reach, within 25 %."""
    makers = {
        "adam": lambda p: torch.optim.Adam(p, lr=1.0, betas=(0.9, 0.99)),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1.0, betas=(0.9, 0.99), weight_decay=0.0),
        "nadam": lambda p: torch.optim.NAdam(p, lr=1.0, betas=(0.9, 0.99), momentum_decay=0.0),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1.0, eps=1e-12),
        "rmsprop with momentum": lambda p: torch.optim.RMSprop(p, lr=1.0, momentum=0.8, eps=1e-12),
    }
    weight = nn.Parameter(torch.zeros(2000, dtype=torch.float64))
    optimizer = makers[kind]([weight])
    for group in optimizer.param_groups:
        group["eps"] = 1e-12
    reach, proportional = displacement_per_gradient(optimizer, steps)
    for _ in range(steps):
        weight.grad = size * torch.randn_like(weight)
        optimizer.step()
    walked = weight.detach().square().mean().sqrt().item()
    assert not proportional and walked == pytest.approx(reach * math.sqrt(steps), rel=0.25)


@together("kind", KINDS)
def test_the_rate_is_unknown_before_the_first_gradient_only_where_that_sets_the_unit(kind):
    base, proportional, reach = KINDS[kind]
    model, optimizer = start(base, steps=STEPS)
    assert math.isnan(optimizer.eta) == proportional
    if not proportional:
        assert optimizer.eta == pytest.approx(votes.PEAK / math.sqrt(STEPS) / reach, rel=1e-12)
    (batch,) = make_batches([8])
    gradients = torch.autograd.grad(cross_entropy(model)(batch).sum() / 8, trainable(model))
    size = torch.cat([g.flatten() for g in gradients]).square().mean().sqrt().item() if proportional else 1.0
    optimizer.step(cross_entropy(model), batch)
    assert optimizer.eta == pytest.approx(votes.PEAK / math.sqrt(STEPS) / reach / size, rel=1e-9)
    first = optimizer.eta
    optimizer.step(lambda b: 100 * cross_entropy(model)(b), batch)
    assert optimizer.eta == first  # later gradients change nothing


@together("scale", [1e-3, 1e3])
def test_the_unit_of_a_loss_does_not_matter(scale):
    """SGD on a loss in other units makes the same steps."""
    runs = []
    for factor in (1.0, scale):
        model, optimizer = start(lambda m: torch.optim.SGD(trainable(m), lr=1.0, momentum=0.9))
        for batch in make_batches([8] * 10):
            optimizer.step(lambda b, m=model, f=factor: f * cross_entropy(m)(b), batch)
        runs.append(flat(model))
    torch.testing.assert_close(*runs, rtol=1e-8, atol=1e-10)


@together("empty", [1, 4])
def test_gradients_of_zeros_at_first_move_nothing_and_set_no_unit(empty):
    """Empty batches before the first other one, without noise: the run begins with that."""
    model, optimizer = start(sgd_momentum)
    before = flat(model)
    batches = make_batches([0] * empty + [8] * (10 - empty))
    for batch in batches[:empty]:
        assert optimizer.step(cross_entropy(model), batch).eta == 0
    assert torch.equal(flat(model), before) and math.isnan(optimizer.eta)
    gradients = torch.autograd.grad(cross_entropy(model)(batches[empty]).sum() / 8, trainable(model))
    optimizer.step(cross_entropy(model), batches[empty])
    size = torch.cat([g.flatten() for g in gradients]).square().mean().sqrt().item()
    assert optimizer.eta == pytest.approx(votes.PEAK / math.sqrt(10) / 10 / size, rel=1e-9)
    for batch in batches[empty + 1 :]:
        optimizer.step(cross_entropy(model), batch)
    assert flat(model).isfinite().all() and not torch.equal(flat(model), before)


@together(("name", "value"), [("momentum", 1.0), ("momentum", 1.5), ("dampening", 1.0)])
def test_momentum_that_never_ends_is_refused(name, value):
    with pytest.raises(ValueError, match=f"optimizer must have {name} below 1, got {value}"):
        start(lambda m: torch.optim.SGD(trainable(m), lr=0.1, **({"momentum": 0.9} | {name: value})))


@together("kind", ["ASGD", "Adadelta", "Adagrad", "Rprop", "Adafactor", "RAdam"])
def test_optimizers_whose_steps_may_be_of_any_size_are_refused(kind):
    """Before anything is done to the model."""
    model = make_model()
    optimizer = getattr(torch.optim, kind)(trainable(model), lr=0.1)
    with pytest.raises(ValueError, match=f"optimizer must be SGD, RMSprop or .* got {kind}, .* preset='paper'"):
        make_private(model, optimizer)
    assert not any(module._forward_hooks for module in model.modules())


def test_votes_must_be_at_the_steps_that_were_paid_for():
    _, optimizer = start(steps=20)
    other = dataclasses.replace(optimizer.split, vote_steps=vote_steps(20)[1:])
    with pytest.raises(ValueError, match=r"probe must be what VotedRate.* got 'votes', with votes at \(8, 10"):
        HyFreeDPOptimizer(
            adamw(optimizer.module),
            module=optimizer.module,
            gradient_engine=optimizer.gradient_engine,
            split=other,
            generator=NoiseGenerator(0),
            expected_batch_size=8,
            rate_learner=optimizer.rate_learner,
        )


@together(*each(base=[adamw, sgd_momentum], rate=[1e-5, 1e-4, 1e-1]).args)
def test_no_rate_that_a_caller_gives_matters(base, rate):
    """That of the base optimizer; bit for bit, with noise."""
    runs = []
    for given_rate in (1e-3, rate):

        def with_rate(model, given_rate=given_rate):
            optimizer = base(model)
            optimizer.param_groups[0]["lr"] = given_rate
            return optimizer

        model, optimizer = start(with_rate, **(NOISY | {"steps": 10}))
        for batch in make_batches([8, 0, 9, 5, 8] * 2):
            optimizer.step(cross_entropy(model), batch)
        runs.append((flat(model).tolist(), repr(optimizer.history)))
    assert runs[0] == runs[1]


# -- pieces, types, memory ---------------------------------------------------------------------------------------------


def shuffled(batch):
    """Pieces of several sizes in an order of their own."""
    order = torch.randperm(len(batch[1]), generator=torch.Generator().manual_seed(len(batch[1])))
    return [piece for piece in (order[:2], order[2:3], *order[3:].split(4)) if len(piece)]


CLIPPED = {"clipping": AutomaticClipping()}  # without noise


def run_ten(wrap=lambda model: None, partition=None, *, tuning="full", **settings):
    """Ten steps with two lost votes, real and scripted; weights and margins."""
    model = make_model(tuning)
    wrap(model)
    _, optimizer, _ = make_private(model, adamw(model), max_physical_batch_size=partition, **settings)
    for batch in election({2: 0, 4: 8, 5: 1}, [8, 3, 8, 0, 9, 5, 8, 7, 0, 6]):
        optimizer.step(scripted(model), batch)
    return model, optimizer


def margins(optimizer):
    return [(row["margin"], row["lost"]) for row in optimizer.history if "margin" in row]


@together(*each(privacy=[{}, NOISY | {"steps": 10}], pieces=[1, 3, shuffled]).args)
def test_pieces_make_the_run_of_a_whole_batch(pieces, privacy, unbound_noise):
    """Backward, vote and backward again: the same margins exactly, and the same weights but for rounding."""
    (whole, one), (cut, other) = run_ten(**privacy), run_ten(partition=pieces, **privacy)
    assert margins(one) == margins(other)
    assert any(lost for _, lost in margins(one)) and not all(lost for _, lost in margins(one))
    torch.testing.assert_close(flat(whole), flat(cut), rtol=1e-8, atol=1e-11)


def test_dropout_is_the_same_for_both_candidates():
    """At an average that is the present weights all records tie, which they do only if the same units drop."""
    model, optimizer = start(lambda m: torch.optim.Adam(trainable(m)), dropout=0.5)
    before = flat(model)
    batches = make_batches([8] * 3)
    for batch in batches[:2]:
        optimizer.step(lambda b: 0 * cross_entropy(model)(b), batch)
    assert torch.equal(flat(model), before)
    assert not torch.equal(cross_entropy(model)(batches[2]), cross_entropy(model)(batches[2]))
    assert optimizer.step(cross_entropy(model), batches[2]).vote.margin == 0


@together("tuning", ["biases", "frozen", "lora"])
def test_what_is_frozen_stays_and_is_not_copied(tuning):
    model, optimizer = start(tuning=tuning)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    for batch in election({2: 0, 4: 0}, [8] * 10):
        optimizer.step(scripted(model), batch)
        state = optimizer.rate_learner.state_dict()
        shapes = [tuple(p.shape) for p in trainable(model)]
        for kept in ("average", "start"):
            assert [tuple(w.shape) for w in state[kept]] in ([], shapes)
    assert [lost for _, lost in margins(optimizer)][:2] == [True, True]
    assert frozen and all(torch.equal(value, dict(model.named_parameters())[name]) for name, value in frozen.items())


def test_either_gradient_engine_makes_the_run():
    """The pass at the average disturbs the clipped sum that waits in neither of them."""
    (one, first), (other, second) = (run_ten(**CLIPPED, gradient_engine=name) for name in ("bookkeeping", "hooks"))
    assert margins(first) == margins(second) and {lost for _, lost in margins(first)} == {True, False}
    torch.testing.assert_close(flat(one), flat(other), rtol=1e-8, atol=1e-11)


def test_gradient_checkpointing_changes_nothing():
    """A model whose activations are computed again in the backward pass votes and retreats like any other."""

    def checkpointed(model):
        forward = model[2].forward  # behind a layer with parameters
        model[2].forward = lambda x: checkpoint(forward, x, use_reentrant=False)

    (plain, one), (saving, other) = run_ten(**CLIPPED), run_ten(checkpointed, **CLIPPED)
    assert margins(one) == margins(other) and {lost for _, lost in margins(one)} == {True, False}
    assert torch.equal(flat(plain), flat(saving))


@together("dtype", [torch.bfloat16, torch.float32])
def test_the_average_is_kept_in_single_precision_at_least(dtype):
    """And the weights come back to the bit after each vote that they won; the average is not rounded by the way."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(50, generator=generator).to(dtype))
    rate = VotedRate(torch.optim.AdamW([weight]), 100)
    rate.arrive(0)
    path = [weight.detach().clone()]
    for _ in range(30):
        with torch.no_grad():
            weight.copy_(torch.randn(50, generator=generator))
        path.append(weight.detach().clone())
        rate.advance()
    shares = torch.arange(1, 32, dtype=torch.float64)
    expected = (shares / shares.sum()) @ torch.stack(path).double()
    (average,) = rate.state_dict()["average"]
    assert average.dtype == torch.float32
    before = average.clone()
    torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-6)
    with rate.at_average():
        assert torch.equal(weight, average.to(dtype)) and not torch.equal(weight, path[-1])
    assert torch.equal(weight, path[-1]) and torch.equal(average, before)
    with pytest.raises(MemoryError), rate.at_average():
        raise MemoryError
    assert torch.equal(weight, path[-1])


def test_half_precision_weights_train_vote_and_go_back():
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).bfloat16()
    _, optimizer, _ = make_private(model, adamw(model), **LARGE)
    optimizer._checks_due = []
    first = flat(model)

    def loss(batch):
        values = nn.functional.cross_entropy(model(batch[0].bfloat16()), batch[1], reduction="none")
        return values if torch.is_grad_enabled() else values + 100 * batch[2]

    for t, batch in enumerate(election(BALLOTS, [100] * 10)):
        record = optimizer.step(loss, batch)
        if t == 1:
            away = (flat(model) - first).abs().max()
        if t == 2:  # from the start again: one step of one warmed-up gradient away from it
            assert record.vote.lost and (flat(model) - first).abs().max() < 3 * record.eta < away
    assert [lost for _, lost in margins(optimizer)] == [True, False, True, False, True]
    assert flat(model).dtype == torch.bfloat16 and flat(model).isfinite().all()


def test_copies_of_the_weights_live_as_long_as_a_vote_needs_them():
    """The first weights for an eighth of the run, the average until the last review is over, and nobody else's."""
    model, optimizer = start()
    kept = {"start": [], "average": []}
    alive = {name: [] for name in kept}
    gc.freeze()  # what is there already need not be looked through at every step
    for batch in make_batches([8] * 10):
        optimizer.step(cross_entropy(model), batch)
        state = optimizer.rate_learner.state_dict()
        for name, references in kept.items():
            references.extend(map(weakref.ref, state[name]))
        del state
        gc.collect()
        for name, references in kept.items():
            alive[name].append(any(reference() is not None for reference in references))
    gc.unfreeze()
    assert alive["start"] == [True] * 2 + [False] * 8
    assert alive["average"] == [True] * 7 + [False] * 3  # the last review is that of step 7


@together("steps", [1, 2])
def test_a_run_that_never_votes_keeps_no_copies(steps):
    model, optimizer = start(steps=steps)
    for batch in make_batches([8] * steps):
        optimizer.step(cross_entropy(model), batch)
        state = optimizer.rate_learner.state_dict()
        assert state["start"] == state["average"] == []


# -- going on ----------------------------------------------------------------------------------------------------------


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each(base=BASES.values(), interruption=range(11))
def test_resumes_bitwise_from_every_step(interruption, base):
    """Before the opening vote, which is lost; between reviews, of which two are; after the last; with dropout."""
    settings = LARGE | {"dropout": 0.5}
    batches = election(BALLOTS, [100] * 10)
    model, optimizer = start(base, **settings)
    torch.manual_seed(1)
    ten_steps(model, optimizer, batches=batches[:interruption])
    state = through_a_file(optimizer.state_dict())
    ten_steps(model, optimizer, batches=batches[interruption:])
    assert [lost for _, lost in margins(optimizer)] == [True, False, True, False, True]

    other, resumed = start(base, model_seed=5, seed=6, **settings)
    torch.manual_seed(7)
    resumed.load_state_dict(state)
    resumed._checks_due = []
    ten_steps(other, resumed, batches=batches[interruption:])
    assert torch.equal(flat(other), flat(model))
    assert repr(resumed.history) == repr(optimizer.history) and resumed.epsilon_spent() == optimizer.epsilon_spent()
    assert repr(resumed.rate_learner.state_dict()) == repr(optimizer.rate_learner.state_dict())


def test_a_loaded_state_is_not_the_runs_own_memory():
    """Training on changes neither the state nor, through it, a second run from it."""
    batches = election(BALLOTS, [100] * 10)
    model, optimizer = start(**LARGE)
    ten_steps(model, optimizer, batches=batches[:4])
    state = through_a_file(optimizer.state_dict())
    ends = []
    for _ in range(2):
        other, resumed = start(model_seed=5, **LARGE)
        resumed.load_state_dict(state)
        resumed._checks_due = []
        ten_steps(other, resumed, batches=batches[4:])
        ends.append(flat(other))
    assert torch.equal(*ends)


def test_going_back_to_an_earlier_state_votes_the_same():
    """Within one object: from before the opening, on the same data, the same releases, which count once."""
    model, optimizer = start(**LARGE)
    batches = election(BALLOTS, [100] * 10)
    ten_steps(model, optimizer, batches=batches[:2])
    state = copy.deepcopy(optimizer.state_dict())
    ten_steps(model, optimizer, batches=batches[2:6])
    optimizer.load_state_dict(state)
    optimizer._checks_due = []
    ten_steps(model, optimizer, batches=batches[2:])
    weights, history, epsilon = undisturbed()
    assert torch.equal(flat(model), weights)
    assert (optimizer.history, optimizer.epsilon_spent()) == (history, epsilon)


# -- bad use -----------------------------------------------------------------------------------------------------------


def test_a_loss_of_the_wrong_form_at_the_average_is_refused_and_nothing_is_released():
    model, optimizer = start(**LARGE)
    batches = election(BALLOTS, [100] * 10)
    ten_steps(model, optimizer, batches=batches[:2])
    before, spent = snapshot(model, optimizer), optimizer.epsilon_spent()

    def loss(batch):
        values = cross_entropy(model)(batch)
        return values if torch.is_grad_enabled() else values.mean()

    with pytest.raises(ValueError, match=r"must return shape \(100,\)"):
        optimizer.step(loss, batches[2])
    after = snapshot(model, optimizer)
    assert torch.equal(after[0], before[0]) and after[1:] == before[1:] and optimizer.epsilon_spent() == spent
    ten_steps(model, optimizer, batches=batches[2:])
    assert torch.equal(flat(model), undisturbed()[0])


def test_losses_may_be_negative():
    """Votes compare; nothing is clipped at zero."""
    runs = []
    for shift in (0.0, 7.0):
        model, optimizer = start()
        for batch in make_batches([8] * 10):
            optimizer.step(lambda b, m=model, s=shift: cross_entropy(m)(b) - s, batch)
        runs.append((flat(model), margins(optimizer)))
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-9, atol=1e-12)


def test_steps_beyond_the_plan_and_raw_steps_are_refused():
    model, optimizer = start(**LARGE)
    ten_steps(model, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(BudgetExhausted, match="all 10 steps"):
        optimizer.step(scripted(model), None)
    with pytest.raises(RuntimeError, match="its own step would train on raw gradients"):
        optimizer.base.step()
    after = snapshot(model, optimizer)
    assert torch.equal(after[0], before[0]) and after[1:] == before[1:]
    assert math.isclose(optimizer.epsilon_spent(), optimizer.split.epsilon)
