"""The rule of preset "robust": its released numbers, their accounting, and what it makes of rate and weights."""

import itertools
import math
from collections import Counter
from contextlib import suppress

import pytest
import torch
from cases import each
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import example, given
from hypothesis import strategies as st
from twins import BASES, by_hand, cross_entropy, flat, make_batches, make_data, make_model, trainable, twin_of

from hyfreedp import look, reference
from hyfreedp.accounting import calibrate_noise
from hyfreedp.accounting.split import VOTES
from hyfreedp.gradients import AutomaticClipping
from hyfreedp.look import LADDER, choose, noise_to_come
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_votes
from hyfreedp.schedule import decay_factor, look_steps

# -- the released numbers ----------------------------------------------------------------------------------------------

extremes = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, -5e-324, 1.7976931348623157e308, 1e300])
losses = extremes | st.sampled_from([0.5, 1.0]) | st.floats(allow_nan=True, allow_infinity=True)
records = st.tuples(losses, losses, losses)  # at three weights


def sums_of_votes(rows, noise_multiplier=0.0, **settings):
    """The release of a batch of such records, expected to have one record."""
    values = torch.tensor(rows, dtype=torch.float64).view(-1, 3).T
    return privatize_votes(values, noise_multiplier, **({"expected_batch_size": 1} | settings))


def votes_of(record):
    """One record's, slow and obvious: what it would lose, as a share of both losses, in steps of a millionth."""
    values = [1e100 if math.isnan(one) else min(max(one, -1e100), 1e100) for one in record]
    pairs = [(b - a, abs(b) + abs(a)) for a, b in itertools.pairwise(values)]
    return [round(lost / size * 2**20) / 2**20 if size else 0 for lost, size in pairs]


@given(st.lists(records, max_size=12), st.integers(1, 50))
@example([(-math.inf, -1.7976931348623157e308, math.nan), (math.nan, math.inf, 1.0), (0.0, -0.0, math.nan)], 4)
@example([(math.nan, math.nan, 0.0), (math.inf, -math.inf, math.nan)], 1)
def test_without_noise_the_sums_of_the_votes_over_the_expected_size(rows, expected):
    """Exactly, so one more record moves each by one at most in floating point too, as the accountant counts."""
    sums = [sum(one) for one in zip(*map(votes_of, rows), strict=True)] or [0, 0]
    assert sums_of_votes(rows, expected_batch_size=expected) == [total / expected for total in sums]
    assert all(abs(vote) <= 1 for record in rows for vote in votes_of(record))


@given(st.lists(records, min_size=1, max_size=6), st.floats(1, 1e6))
def test_steep_votes_are_clipped(rows, steepness):
    ours = [sum_ * 2**20 for row in rows for sum_ in sums_of_votes([row], steepness=steepness)]
    plain = [vote for row in rows for vote in votes_of(row)]
    exact = [min(max(steepness * vote, -1), 1) * 2**20 for vote in plain]
    assert ours == pytest.approx(exact, abs=1 + steepness) and max(map(abs, ours)) <= 2**20


def test_a_floor_takes_the_votes_of_solved_records_away_and_leaves_those_of_others():
    """From 0.001 to 0 a loss of 1 at first counts a quarter of a vote, not a whole one; from 1 to 0.5 nearly all."""
    for one, (whole, floored) in enumerate([(-1, -0.25), (-1 / 3, -0.5 / 1.503)]):
        rows = torch.tensor([[0.001, 1.0], [0.0, 0.5]], dtype=torch.float64)[:, [one]]
        for floors, vote in ((None, whole), (torch.tensor([0.003]), floored)):
            given = privatize_votes(rows, 0.0, expected_batch_size=1, floors=floors)
            assert given == pytest.approx([vote], abs=1e-6)


@pytest.mark.parametrize(("share", "classes"), [(1 / 4, 4), (1 / 10, 10), (0.5, 2), (0.6, 2), (0.8, 2), (0.9, 4)])
def test_what_a_class_adds_is_as_small_as_the_move(share, classes):
    """As docs/step_rule.md has it: from the best head, by a shift of one class's logit. Signs would add 2 share - 1."""
    shares = torch.tensor([share] + (classes - 1) * [(1 - share) / (classes - 1)], dtype=torch.float64)
    losses = -torch.stack([shares.log(), (shares.log() - torch.eye(classes)[0] * 0.001).log_softmax(0)])
    slope = share * (1 - share) * (losses[0, 0] ** -1 - losses[0, 1] ** -1) / 2
    for steepness, expected, slack in ((1, 0.001 * slope.item(), 1e-6), (1e6, 2 * share - 1, 1e-3)):
        votes = [privatize_votes(one[:, None], 0.0, expected_batch_size=1, steepness=steepness)[0] for one in losses.T]
        assert sum(shares.tolist()[i] * vote for i, vote in enumerate(votes)) == pytest.approx(expected, 0.01, slack)


def test_noise_is_bound_to_the_losses_and_not_to_their_votes_alone():
    """Else a step made again on other data with equally many votes would show that, without noise."""
    here, rival = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([2.0, 1.0, 5.0]).double()
    margins = {
        privatize_votes(
            torch.stack([here, other]), 1.0, expected_batch_size=3, generator=NoiseGenerator(0).child("look")
        )[0]
        for other in (rival, rival, rival + torch.tensor([1e-12, 0, 0]).double(), rival.flip(0) - 0.5)
    }
    assert len(margins) == 3  # the same losses again are the same release


# -- the plan and its price --------------------------------------------------------------------------------------------

PLAN = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 20, "probe": "look"}


@pytest.mark.parametrize(
    ("steps", "plan"),
    [(1, ()), (2, (1,)), (8, (1, 4, 6)), (32, (1, 4, 16, 24)), (33, (1, 5, 17, 25)), (100, (1, 13, 50, 75))],
)
def test_the_looks_are_after_a_step_and_at_three_shares_of_the_run(steps, plan):
    assert look_steps(steps) == plan


def test_the_first_rate_falls_with_the_root_of_all_inputs_and_what_has_none_counts_once():
    """Of 20 x 64 and 3 x 20 matrices, a convolution of 3 x 3 over 8 channels, biases, a class token and a scale."""
    shapes = [(64, 20), (64,), (3, 64), (3,), (16, 8, 3, 3), (16,), (1, 1, 64), (1,)]
    inputs = 20 + 1 + 64 + 1 + 72 + 1 + 1 + 1
    assert look.public_start([torch.empty(*shape) for shape in shapes]) == pytest.approx(6 / math.sqrt(inputs))


def test_the_rows_of_a_table_are_inputs_of_which_a_record_has_few():
    """Their root counts, or their width if that is more; half of them before a norm. So says the reference."""
    tables = [torch.nn.Embedding(400, 8), torch.nn.Embedding(400, 1), torch.nn.EmbeddingBag(100, 8)]
    tables += [torch.nn.Embedding(9, 8), torch.nn.Embedding(10**4, 8).requires_grad_(False), torch.nn.Embedding(70, 6)]
    model = torch.nn.ModuleList([*tables, torch.nn.Linear(8, 400), torch.nn.LayerNorm(6)])
    first = 6 / math.sqrt((20 + 20 + 10 + 8 + 35 + 8 + 1 + 1 + 1) * 16)
    base = torch.optim.AdamW(trainable(model))
    twin = reference.Looks(model, base, 16, 0.0, None, lambda share: 1.0)
    optimizer = by_hand(model, base, steps=16)
    assert optimizer.eta == pytest.approx(first) and twin.first() == pytest.approx(first)


def test_a_group_of_another_rate_counts_by_the_square_of_its_ratio():
    """Ten times the rate moves a head ten times as far, and a pre-trained norm beside it. So says the reference."""
    body, head, norm = torch.nn.Linear(20, 5), torch.nn.Linear(5, 3), torch.nn.LayerNorm(5)
    model = torch.nn.ModuleList([body, head, norm])
    late = [*head.parameters(), *norm.parameters()]
    fresh = 6 / math.sqrt(20 + 1 + 100 * (5 + 1 + 1 + 1))
    for scales, first in [(torch.ones(5), fresh), (torch.arange(1.0, 6.0), 0.055 / math.sqrt(5))]:
        norm.weight.data = scales
        base = torch.optim.AdamW([{"params": [*body.parameters()]}, {"params": late, "lr": 1e-2}], lr=1e-3)
        twin = reference.Looks(model, base, 16, 0.0, None, lambda share: 1.0)
        assert (by_hand(model, base, steps=16).eta, twin.first()) == pytest.approx((first / 4, first / 4))


def test_only_norms_that_are_trained_and_fresh_tell_that_a_table_is_a_transformers():
    """Not a frozen norm, one of another width, or one without weights; nor if another of this width is pre-trained."""
    norm, rms, trained = torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.LayerNorm(6)
    torch.nn.init.normal_(trained.weight)
    table, half, root = torch.nn.Embedding(10**6, 6, device="meta"), 10**6 / 2, 10**3
    for norms, rows, vectors in [
        ([norm(6)], half, 2),
        ([rms(6), norm(6).requires_grad_(False)], half, 1),
        ([norm(6).requires_grad_(False)], root, 0),
        ([norm(7)], root, 2),
        ([norm((2, 6)), rms(6, elementwise_affine=False)], root, 12),
        ([norm(6), trained], root, 4),
        ([trained, norm(7)], root, 4),
    ]:
        model = torch.nn.ModuleList([table, *norms])
        first, parameters = 6 / math.sqrt(rows + vectors), trainable(model)
        twin = reference.Looks(model, torch.optim.AdamW(parameters), 16, 0.0, None, lambda share: 1.0)
        assert (look.public_start(parameters, [*model.modules()]), 4 * twin.first()) == pytest.approx((first, first))


def test_a_model_whose_norms_tell_that_it_was_trained_starts_lower():
    """Their scales differ. Those of the first step count, if they are trained; a run goes on from the start it had."""

    def run():
        model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.RMSNorm(9), torch.nn.Linear(9, 3)).double()
        return model, by_hand(model, torch.optim.AdamW(model.parameters()), steps=16, seed=1)

    (model, optimizer), (again, resumed), (other, late) = run(), run(), run()
    fresh, lower = 6 / math.sqrt(5 + 9 + 3) / 4, 0.55 / 3 / 4
    (batch,) = make_batches([8])
    optimizer.step(cross_entropy(model), batch)
    resumed.load_state_dict(optimizer.state_dict())
    torch.nn.init.normal_(other[1].weight)
    late.step(cross_entropy(other), batch)
    assert (optimizer.eta, resumed.eta, late.eta) == pytest.approx((fresh, fresh, lower))
    base = torch.optim.AdamW(again.parameters())  # which has norms as the run has made them
    for first in (lower, 6 / math.sqrt(5 + 9 + 2) / 4):
        twin = reference.Looks(again, base, 16, 0.0, None, lambda share: 1.0)
        assert by_hand(again, base, steps=16).eta == pytest.approx(first) == twin.first()
        again[1].requires_grad_(False)
        base = torch.optim.AdamW(trainable(again))


@pytest.mark.parametrize("looking", [(1, 4), tuple(range(20))])
def test_epsilon_agrees_with_dp_accounting(looking):
    """The gradient and the look of a step, sensitivities 1 and the root of 10, composed on one subsampled batch."""
    split = calibrate_noise(**PLAN, vote_steps=looking, accountant="rdp")
    plain, composed = PoissonSampledDpEvent(0.1, GaussianDpEvent(split.sigma_gradient)), RdpAccountant()
    if len(looking) < 20:
        composed.compose(SelfComposedDpEvent(plain, 20 - len(looking)))
    votes = GaussianDpEvent(split.sigma_loss / math.sqrt(10))
    both = ComposedDpEvent([GaussianDpEvent(split.sigma_gradient_probe), votes])
    composed.compose(SelfComposedDpEvent(PoissonSampledDpEvent(0.1, both), len(looking)))
    assert split.epsilon == pytest.approx(composed.get_epsilon(1e-5), rel=5e-3)
    assert 0.999 * 2 < split.epsilon <= 2 and split.guarantee


# -- what a look asks, and what it makes of the answers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("decay", "left", "done"), [("linear", 1 / 3, 0.5), ("none", 1.0, 1.0), ("cosine", 3 / 8, 0.5)]
)
def test_noise_to_come_is_the_integral_of_the_schedule(decay, left, done):
    """Of its square over what is left, by closed forms at the start; times a power of the share that was made."""
    steps = 20000
    schedule = [decay_factor(t, steps, decay) for t in range(steps)]
    assert noise_to_come(schedule, 0) == 0
    share = 1 / steps / done  # of the way, after one step
    assert noise_to_come(schedule, 1) == pytest.approx(math.sqrt(left * share**0.75), rel=1e-3)
    x = 0.25
    if decay == "linear":  # (1 - x)^3 / 3 of the squares are left, 1 - (1 - x)^2 of the way is made
        expected = math.sqrt((1 - x) ** 3 / 3 * (1 - (1 - x) ** 2) ** 0.75)
        assert noise_to_come(schedule, steps // 4) == pytest.approx(expected, rel=1e-3)
    way = 8 - (1 - 0.5**8)  # with momentum 1/2 the last gradients have moved by a half, three quarters, ... so far
    assert noise_to_come([1.0] * 20, 8, 0.5) == pytest.approx(math.sqrt(12 / 20 * (way / 20) ** 0.75))


def test_the_choice_is_where_the_votes_are_clear_no_longer():
    asked = []
    assert choose(lambda j: asked.append(j) or 0.0, 1, 0.1) == 1
    assert set(asked) == {VOTES // 2 - 1, VOTES // 2}  # the two beside the rate in force
    for best in range(1, VOTES):  # margins of rates above are negative, of those below positive
        margins = ([-0.4] * best + [0.4] * (VOTES - best)).__getitem__
        up = choose(margins, LADDER[-1], 0.1)  # where the line from 0.4 to -0.4 goes below 0.1: 3/8 of an octave up
        assert up == pytest.approx(LADDER[best] * 2 ** (3 / 8 - 0.5), rel=0.03)
        assert choose(margins, LADDER[0], 0.1) == pytest.approx(LADDER[best] * 2 ** (0.5 - 3 / 8), rel=0.03)
        assert choose(margins, LADDER[best], 0.1) == LADDER[best]
    assert choose(lambda j: 0.5, 1, 0.1) == LADDER[0] == 32 and choose(lambda j: -0.5, 1, 0.1) == LADDER[-1] == 1 / 32
    assert choose(lambda j: 0.09 * (-1) ** j, 1.3, 0.1) == 1.3  # those who do not care leave the rate


@given(st.lists(st.floats(-2, 2), min_size=VOTES, max_size=VOTES), st.floats(1 / 32, 32))
def test_the_choice_mirrors_and_lies_where_the_votes_lead(margins, level):
    chosen = choose(margins.__getitem__, level, 0.1)
    assert LADDER[-1] <= chosen <= LADDER[0]
    mirrored = choose([-margin for margin in reversed(margins)].__getitem__, 1 / level, 0.1)
    assert abs(math.log2(chosen * mirrored)) <= 2.01 / 32  # of ties between two places one is taken
    place = min(VOTES - 1, max(0, int(5 - math.log2(chosen) - 0.5 + 1e-9)))
    near = margins[max(0, place - 1) : place + 2]
    assert chosen in (level, LADDER[0], LADDER[-1]) or min(near) <= 0.1 or max(near) >= -0.1


# -- whole runs --------------------------------------------------------------------------------------------------------

STEPS = 33  # with four looks


def rmsprop(model):
    return torch.optim.RMSprop(trainable(model), lr=0.5, momentum=0.5)


def damped(model):
    return torch.optim.SGD(trainable(model), lr=0.5, momentum=0.8, dampening=0.25, weight_decay=0.1)


def with_a_frozen_layer(model):
    model[0].requires_grad_(False)
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1:].parameters(), "lr": 1.0}]
    return torch.optim.AdamW(groups)


KINDS = BASES | {"rmsprop": rmsprop, "damped": damped, "frozen": with_a_frozen_layer}
NOISY = {"target_epsilon": 3.0}


def start(base="adamw", *, dropout=0.0, model_seed=0, **settings):
    """A run about to begin; without privacy unless the settings say so."""
    model = make_model(dropout=dropout, seed=model_seed)
    optimizer = by_hand(model, KINDS[base](model), **({"steps": STEPS} | settings))
    return model, optimizer


def plain(model, batch):
    return cross_entropy(model)(batch)


def as_numbers(row):
    """Its margins, NaN where none was asked."""
    return [math.nan if one is None else one for one in row["margins"]]


def deciding(model, batch):
    """Where records differ is found anew at each rate, at its own weights."""
    value = cross_entropy(model)(batch)
    return value if value < 1.6 else 1.6 + (value - 0.6).log()


@each(kind=KINDS, noise=[{}, NOISY], eta=[None, 0.05, 0.05], first=[9, 0], loss=[plain, plain, plain, deciding])
def test_a_run_is_that_of_the_reference(kind, noise, eta, first, loss, unbound_noise):
    """Weights, rates and margins at every step, with empty batches, the first among them."""
    settings = noise | ({"initial_learning_rate": eta} if eta else {})
    model, optimizer = start(kind, clipping=AutomaticClipping(), **settings)
    twin, batches = make_model(), make_batches(([first, 8, 7, 6, 0] * 7)[:STEPS])
    expected = twin_of(twin, KINDS[kind](twin), optimizer, batches, eta=eta, loss=loss)  # a generator
    for batch, released in zip(batches, expected, strict=True):
        record = optimizer.step(lambda record: loss(model, record), batch).to_dict()
        assert record["eta"] == pytest.approx(released["eta"], rel=1e-9)
        assert ("margins" in record) == ("margins" in released)
        if "margins" in record:
            assert as_numbers(record) == pytest.approx(as_numbers(released), rel=1e-9, abs=1e-12, nan_ok=True)
            assert record["along"] == pytest.approx(released["along"], rel=1e-9)
        torch.testing.assert_close(flat(model), flat(twin), rtol=1e-7, atol=1e-8)
    looked = [row for row in optimizer.history if "margins" in row]
    assert tuple(row["step"] for row in looked) == look_steps(STEPS)


@pytest.mark.parametrize("target", [0.4, 1.0])
def test_without_privacy_a_look_finds_the_lowest_mean_loss_along_the_run(target):
    """Of a parabola, after one step to 0.05. z, which is public, stands for nine steps of that size, shown in part."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    base = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    optimizer = by_hand(model, base, steps=10, initial_learning_rate=0.05)
    goal = target + torch.tensor([-3.0, 1.0, 1.0, 1.0], dtype=torch.float64)  # most would vote for more
    for _ in range(2):
        batch = [torch.ones(4, 1).double(), goal]
        record = optimizer.step(lambda record: (model(record[0])[:, 0] - record[1]) ** 2, batch)
    assert record.look.margin_std == 0
    z = float(NoiseGenerator(0).child("look", 1).child("z", 0).normal(1))
    bottom = target / (1 + z * math.sqrt(9 * 0.1**0.75))
    assert record.look.chosen == pytest.approx(bottom, rel=0.25)  # between rates that are an octave apart


def test_a_run_may_be_evaluated_at_its_average_before_it_ends():
    """As if the t-th weights had been drawn t^8 times, nearly; and training goes on as if nobody had looked."""
    ends = []
    for asks in (False, True):
        (model, optimizer), path = start(seed=4, data=make_data(400), batch_size=100, **NOISY), []
        for batch in make_batches([100] * STEPS):
            optimizer.step(cross_entropy(model), batch)
            path.append(flat(model))
            if asks and optimizer.steps_left:
                with optimizer.averaged(), pytest.raises(RuntimeError, match="leave it before a step or a checkpoint"):
                    with optimizer.averaged():
                        average = flat(model)
                    optimizer.state_dict() if len(path) % 2 else optimizer.step(cross_entropy(model), batch)
                assert torch.equal(flat(model), path[-1])
        ends.append(flat(model))
    assert torch.equal(*ends)
    shares = torch.tensor([math.prod((t + i) / (STEPS - 1 + i) for i in range(8)) for t in range(1, STEPS)])
    expected = (shares[:, None] * torch.stack(path[:-1])).sum(0) / shares.sum()
    torch.testing.assert_close(average, expected.to(average.dtype), rtol=1e-5, atol=1e-6)


def test_weights_that_were_moved_in_part_are_put_back():
    for fatal in itertools.count(1):
        model, optimizer = start(steps=10, data=make_data(400), batch_size=100, target_epsilon=1e3)
        loss, learner, calls, first, batch = cross_entropy(model), optimizer.rate_learner, [], *make_batches([100] * 2)
        optimizer.step(loss, first)
        before, move = flat(model), learner._set

        def in_part(weights, calls=calls, move=move, fatal=fatal, parameters=learner._parameters):
            calls.append(weights)
            if len(calls) != fatal:
                return move(weights)
            parameters[0].data.copy_(weights[0])
            raise KeyboardInterrupt

        learner._set = in_part
        with suppress(KeyboardInterrupt):
            optimizer.step(loss, batch)
        if len(calls) < fatal:
            break
        assert torch.equal(flat(model), before)
    assert fatal > 4


def test_an_error_in_or_after_a_look_leaves_all_as_it_was_and_the_same_batch_looks_the_same():
    """The last call of a step is at where the look led, those before along the ray. Each look here moves the rate."""
    weights, last, number = [], look_steps(10)[-1], {}
    assert last > look.FIRST_LOOK_STEP
    for step, call in ((None, 0), (look.FIRST_LOOK_STEP, 2), (look.FIRST_LOOK_STEP, 0), (last, 1), (last, 0)):
        broken = (step, call or number.get(step))
        model, optimizer = start(dropout=0.5, seed=5, data=make_data(400), batch_size=100, steps=10, target_epsilon=1e3)
        torch.manual_seed(7)
        calls = []

        def loss(batch, model=model, optimizer=optimizer, broken=broken, calls=calls):
            calls.append(optimizer.ledger.steps)
            if (calls[-1], calls.count(calls[-1])) == broken:
                raise KeyboardInterrupt
            return cross_entropy(model)(batch)

        failed = 0
        for batch in make_batches([100] * 10):
            before = flat(model), optimizer.eta, optimizer.ledger.steps
            try:
                optimizer.step(loss, batch)
            except KeyboardInterrupt:
                failed += 1
                assert torch.equal(flat(model), before[0]) and (optimizer.eta, optimizer.ledger.steps) == before[1:]
                optimizer.step(loss, batch)
        assert failed == (step is not None)
        number = number or Counter(calls)
        weights.append(flat(model))
    assert all(torch.equal(weights[0], other) for other in weights[1:])
