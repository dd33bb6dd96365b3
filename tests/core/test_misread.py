"""The adversary against the engine: no record moves the clipped sum by more than one, whatever a model's rows are.

Where the engine could take rows of one sample for another's, it compares, computes one sample at a time, or refuses.
"""

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from cases import each, together
from models import Example
from torch import Tensor, nn
from twins import Built, by_hand, cross_entropy, flat, sgd

from hyfreedp.gradients import AbadiClipping, AutomaticClipping, GradientEngine, make_engine

pytestmark = pytest.mark.filterwarnings("ignore:gradients are computed one sample at a time:UserWarning")

CLIPPING = AbadiClipping(0.05)
Loss = Callable[[list[Tensor]], Tensor]


def squared(model: nn.Module) -> Loss:
    return lambda batch: (model(batch[0]) - batch[1]).square()


def by_loop(model: nn.Module, loss: Loss, batch: list[Tensor]) -> Tensor:
    """The clipped sum of a loop over the samples, which leaves out gradients that are not finite."""
    return Example(model, tuple(batch), lambda _, *batch: loss(list(batch))).clipped(CLIPPING)[1]


def by_engine(engine: GradientEngine, loss: Loss, batch: list[Tensor]) -> Tensor:
    return Example(engine.module, tuple(batch), lambda _, *batch: loss(list(batch))).by_engine(engine)[1]


def attack(model: nn.Module, batches: list[list[Tensor]]) -> GradientEngine:
    """Each batch's sum is the loop's, also where a record is left out: so one moves it by 0.05 at most."""
    engine, loss = make_engine(model.train(), CLIPPING), squared(model)
    for batch in batches:
        expected, found = by_loop(model, loss, batch), by_engine(engine, loss, batch)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)
        if len(batch[0]) > 2:
            without = by_engine(engine, loss, [tensor[1:] for tensor in batch])
            assert (found - without).norm() <= CLIPPING.sensitivity * (1 + 1e-9)
    return engine


# -- tensors that have as many rows as there are samples ---------------------------------------------------------------


def positions(numbers) -> nn.Module:
    """A table of positions beside samples, read in the way that ``numbers`` knows."""
    parts = {"table": nn.Embedding(48, 8), "inner": nn.Linear(4, 8), "outer": nn.Linear(8, 1)}
    return Built(lambda m, x: m.outer(F.gelu(m.inner(x) + m.table(numbers(x))).mean(1))[:, 0], **parts)


def grid_of_the_first(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]).expand(len(x), -1).clone()[0]


def batch_of(samples: int, *shape: int) -> list[Tensor]:
    """Of 24 tokens and 4 features, unless the shape of a record is given."""
    batch = [torch.randn(samples, *(shape or (24, 4))).double(), torch.randn(samples).double()]
    batch[1][0] = 1e3
    return batch


@together(
    ("numbers", "sizes"),
    itertools.product(
        [lambda x: torch.arange(x.shape[1]), grid_of_the_first, lambda x: torch.arange(x.shape[1])[None]],
        [(13, 12, 24, 8), (24, 13, 12), (12, 13), (5, 1, 24, 2), (1, 24)],
    ),
)
def test_as_many_positions_as_samples(numbers, sizes) -> None:
    """In the first batch or in a later one, or a multiple of it: a model whose first batch told stays fast."""
    engine = attack(positions(numbers).double(), [batch_of(size) for size in sizes])
    assert engine.slow is None


def words(m: nn.Module, ids: Tensor) -> Tensor:
    """One table of words and of positions."""
    return (m.table(ids.long()).tanh() + m.table(torch.arange(ids.shape[1]))).mean(1)


def tokens_first(m: nn.Module, ids: Tensor) -> Tensor:
    return m.body(m.table(ids.t())).mean(0)


BODIES = {  # of which the last three have tokens first, as in PyTorch's tutorials
    "words and positions": (nn.Identity, words),
    "lstm": (lambda: nn.LSTM(8, 8), lambda m, ids: m.body(m.table(ids.t()))[0].mean(0)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), tokens_first),
    "bag": (nn.Tanh, tokens_first),
}


@together(*each(kind=BODIES, sizes=[(13, 12, 24, 6), (13, 12, 24), (24, 12), (6, 24)]).args)
def test_one_table_of_words_and_positions_and_time_major_models(kind, sizes) -> None:
    body, read = BODIES[kind]
    parts = {"table": nn.Embedding(30, 8), "body": body(), "outer": nn.Linear(8, 1)}
    model = Built(lambda m, ids: m.outer(read(m, ids))[:, 0], **parts)
    attack(model.double(), [[torch.randint(30, (n, 24)), torch.randn(n).double()] for n in sizes])


@together(
    "change",
    [
        lambda h: h.register_hook(lambda g: g * (1 / g.norm()).clamp(max=1)) and h,  # one record moved the sum by 14
        lambda h: h.grad_fn.register_hook(lambda g, _: (g[0] * (1 / g[0].norm()).clamp(max=1),)) and h,
        lambda h: h / h.detach().norm(),  # where gradients are on, that is
    ],
)
def test_gradients_that_mix_are_seen_where_no_loss_shows_it(change) -> None:
    parts = {"inner": nn.Linear(4, 8), "outer": nn.Linear(8, 1)}
    changed = lambda h: change(h) if h.requires_grad else h  # noqa: E731
    model = Built(lambda m, x: m.outer(changed(m.inner(x).tanh()))[:, 0], **parts).double()
    assert "disagree with autograd's" in attack(model, [batch_of(9, 4), batch_of(2, 4)]).slow


@together("tokens", [16, 17, 272, 32])
def test_no_number_of_rows_fits_both_batches_of_a_comparison(tokens) -> None:
    """272 = 16 * 17 does, as other multiples: of which the engine asks that they be the same."""

    def first(m: nn.Module, x: Tensor) -> Tensor:
        return m.outer(m.inner(x).transpose(0, 1).tanh().contiguous()).mean(0)[:, 0]

    model = Built(first, inner=nn.Linear(4, 3), outer=nn.Linear(3, 1))
    assert attack(model.double(), [batch_of(20, tokens, 4)]).slow is not None


# -- what the first records do not show --------------------------------------------------------------------------------


def turned(m: nn.Module, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """A layer sees all first tokens, then all second ones, behind a gate."""
    h = m.inner(x).tanh()
    other = m.middle(h.transpose(0, 1).flatten(0, 1)).tanh().unflatten(0, (x.shape[1], -1)).transpose(0, 1)
    return m.outer((h + (m.gate if gate is None else gate) * other).mean(1))[:, 0]


def steep(m: nn.Module, x: Tensor) -> Tensor:
    """A record overflows once weights are perturbed, which opens the gate."""
    return turned(m, x[..., :4]) + (m.q * x[:, 0, 4]) ** 2


def gated(run: Callable[..., Tensor] = turned, gate: float = 1.0) -> nn.Module:
    parts = {"inner": nn.Linear(4, 8), "middle": nn.Linear(8, 8), "outer": nn.Linear(8, 1)}
    numbers = {"gate": nn.Parameter(torch.full((8,), gate)), "q": nn.Parameter(torch.zeros(()))}
    return Built(run, **parts, **numbers).double().train()


def test_records_that_are_all_alike_tell_by_how_loud_they_are() -> None:
    alike = [torch.ones(16, 6, 4).double(), torch.zeros(16).double()]
    assert attack(gated(), [alike, batch_of(16, 6, 4)]).slow is not None


@together(
    "first", [lambda batch: [tensor[:1] for tensor in batch], lambda batch: [tensor * math.nan for tensor in batch]]
)
def test_nor_do_batches_of_one_sample_or_of_none_that_is_finite(first) -> None:
    batch = batch_of(16, 6, 4)
    assert attack(gated(), [first(batch), batch]).slow is not None


def test_a_closed_gate_is_looked_behind() -> None:
    assert attack(gated(gate=0.0), [batch_of(16, 6, 4)]).slow is not None


def test_a_record_that_overflows_behind_the_gate_does_not_hide_it() -> None:
    model = gated(steep, gate=0.0)
    batch = batch_of(16, 6, 5)
    batch[0][..., 4], batch[0][3, 0, 4] = 0, 1e150
    engine = attack(model, [batch])
    with torch.no_grad():
        model.gate.fill_(1.0)
    batch[0][3, 0, 4] = 0
    torch.testing.assert_close(by_engine(engine, squared(model), batch), by_loop(model, squared(model), batch))


def test_a_branch_that_one_record_opens_is_compared_then() -> None:
    batches = [batch_of(16, 6, 4), batch_of(16, 6, 4)]
    batches[1][0][0, 0, 0] = 10
    model = gated(lambda m, x: turned(m, x) if (x[..., 0] > 9).any() else m.outer(m.inner(x).mean(1))[:, 0])
    engine, loss = make_engine(model.train(), CLIPPING), squared(model)
    for batch in batches:
        try:
            found = by_engine(engine, loss, batch)
        except ValueError as error:  # it is one by which samples mix
            assert "depend on which other samples" in str(error)
        else:
            torch.testing.assert_close(found, by_loop(model, loss, batch))


def three_layers(run) -> nn.Module:
    return Built(run, inner=nn.Linear(4, 8), middle=nn.Linear(8, 8), outer=nn.Linear(8, 1)).double()


def routed(m: nn.Module, x: Tensor) -> Tensor:
    """Gathers the tokens of one kind from all samples."""
    h, chosen = m.inner(x).tanh(), x[..., 0] > 0
    out = torch.zeros_like(h)
    out[chosen] = m.middle(h[chosen]).tanh()
    return m.outer((h + out).mean(1))[:, 0]


def test_tokens_that_are_gathered_by_routing() -> None:
    """Those that happen to fit, too: one token of each sample; then other numbers of some, and as many of all."""
    assert attack(three_layers(routed), [batch_of(16, 6, 4)]).slow is not None
    even = batch_of(16, 6, 4)
    even[0][..., 0] = -1
    even[0][:, 2, 0] = 1
    odd = [tensor.clone() for tensor in even]
    odd[0][0, :, 0], odd[0][1:5, 2, 0] = torch.tensor([-1, 1, 1, 1, 1, 1.0]).double(), -1
    attack(three_layers(routed), [even, odd])


def test_a_feature_that_the_first_records_have_not() -> None:
    batches = [batch_of(16, 6, 5), batch_of(16, 6, 5)]
    batches[0][0][..., 4] = 0
    attack(gated(lambda m, x: turned(m, x[..., :4], x[..., 4:])), batches)


@together(*each(how=["alone", "seen", "after samples"], size=[12, 6, 60]).args)
def test_constants_whose_gradient_no_first_record_shows(how, size) -> None:
    """A rate of change at times that are the same for all samples, so small that only an odd record shows it."""

    def clock(m: nn.Module, x: Tensor) -> Tensor:
        times = torch.arange(60, dtype=x.dtype)[:, None] / 1e6
        h = m.inner(x)[:, None] * (1 + m.alpha if how == "seen" else 1)
        if how == "after samples":
            h = h + (m.alpha * x.detach().norm(dim=1, keepdim=True))[:, None]
        return m.outer((h + m.alpha * times).tanh().mean(1))[:, 0]

    parts = {"inner": nn.Linear(5, 16, bias=False), "outer": nn.Linear(16, 1, bias=False)}
    model = Built(clock, **parts, alpha=nn.Parameter(torch.zeros(16))).double()
    first, odd = ([torch.randn(size, 5).double(), torch.randn(size).double()] for _ in range(2))
    odd[0][2], odd[1][2] = 0, 1e9
    engine = make_engine(model.train(), CLIPPING)
    for batch in (first, odd):
        expected = by_loop(model, squared(model), batch)
        torch.testing.assert_close(by_engine(engine, squared(model), batch), expected, rtol=1e-5, atol=1e-8)


# -- what a comparison may overlook ------------------------------------------------------------------------------------


@together(("dtype", "large", "scale"), [
    (torch.float64, 1e9, 1.0), (torch.float32, 1e9, 1.0), (torch.float32, 1e12, 1.0), (torch.float32, 0.0, 1e17),
])  # fmt: skip
def test_a_large_gradient_does_not_hide_a_misread_one(dtype, large, scale) -> None:
    """A record's last feature makes that of ``q`` as large as it likes. Sums that overflow are no agreement."""
    torch.manual_seed(0)
    model = gated(lambda m, x: turned(m, x[..., :4]) + m.q * x[:, 0, 4]).to(dtype)
    batch = [tensor.to(dtype) for tensor in batch_of(16, 6, 5)]
    batch[0][..., 4], batch[0][3, 0, 4] = 0, large
    loss = lambda batch: (model(batch[0]) - batch[1]) * scale  # noqa: E731
    engine = make_engine(model.train(), CLIPPING)
    torch.testing.assert_close(
        by_engine(engine, loss, batch), by_loop(model, loss, batch), rtol=1e-4, atol=1e-5, check_dtype=False
    )
    assert not engine.verified


@together(
    *each(
        dtype=[torch.bfloat16, torch.float16, torch.float32],
        clipping=[AbadiClipping(0.1), AutomaticClipping(), AutomaticClipping(1e-8)],
    ).args
)
def test_gradients_that_are_all_rounding_end_no_run(dtype, clipping) -> None:
    """Those of records at their optimum: as released, they are as large as others', and no two computations agree."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16)).to(dtype).train()
    inputs = torch.randn(16, 32).to(dtype)
    with torch.no_grad():
        targets = model(torch.randn(16, 32).to(dtype))
        targets[:4] = model(inputs[:4])

    def loss(batch: list[Tensor]) -> Tensor:
        return 30 * (1 - F.cosine_similarity(model(batch[0]), batch[1], dim=1))

    optimizer = by_hand(model, sgd(model, 1e-9), preset="fixed", clipping=clipping, steps=3)
    for _ in range(3):
        optimizer.step(loss, [inputs, targets])
    assert optimizer.steps_left == 0


def test_records_that_are_all_alike_raise_no_false_alarm() -> None:
    """Their weighted sum cancels where the weights do, of which no rounding of its addends knows."""
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16))
    x = torch.randn(1, 64).expand(64, 64)
    for _ in range(8):
        engine = make_engine(model, CLIPPING)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.add(lambda x: model(x).float().square().mean(1), x)
        assert engine.slow is None


# -- runs --------------------------------------------------------------------------------------------------------------


def test_seams_18_a_siamese_model_is_exact_and_told_how_it_is_fast() -> None:
    """Its inputs in one batch, one after the other, are no samples of it; each in a call of its own are."""
    batch, ends = [torch.randn(8, 4).double() for _ in range(3)], []
    for together_ in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double().train()
        optimizer = by_hand(model, sgd(model, 0.1), preset="fixed", clipping=CLIPPING)

        def loss(batch, model=model, together_=together_):
            branches = model(torch.cat(batch)).chunk(3) if together_ else map(model, batch)
            return nn.functional.triplet_margin_loss(*branches, reduction="none")

        with pytest.warns(UserWarning, match="call it once for each of them") if together_ else nullcontext():
            optimizer.step(loss, batch)
        ends.append(flat(model))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)


def test_seams_07_a_record_that_is_not_finite_costs_no_time() -> None:
    """Its step takes the passes of any other."""
    passes = []
    for value in (1.0, math.nan):
        model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double().train()
        optimizer, loss = by_hand(model, sgd(model), preset="fixed"), cross_entropy(model)
        passes.append([])
        for size in (16, 30):
            batch = [torch.randn(size, 5).double(), torch.randint(3, (size,))]
            batch[0][size // 2] *= value

            def counted(batch, loss=loss):
                passes[-1].append(len(batch[0]))
                return loss(batch)

            optimizer.step(counted, batch)
    assert [sizes.count(30) for sizes in passes] == [1, 1] and passes[0][-1] == passes[1][-1] == 30
    assert len(passes[1]) <= len(passes[0]) + 2


def test_samples_that_move_to_another_dimension_later_are_found_by_a_check() -> None:
    def turning(m: nn.Module, x: Tensor) -> Tensor:
        h = m.inner(x.transpose(0, 1) if m.on else x).tanh() * m.p
        return (h.transpose(0, 1) if m.on else h).square().sum((1, 2))

    model = Built(turning, inner=nn.Linear(4, 6), p=nn.Parameter(torch.randn(6)), on=False)
    x = torch.randn(5, 5, 4)
    optimizer = by_hand(model, sgd(model), preset="fixed", steps=100)
    optimizer.step(model, x)
    model.on, optimizer._checks_due = True, [1]
    with pytest.warns(match="one sample at a time"):
        optimizer.step(model, x)


def test_a_check_in_which_nothing_could_be_compared_stays_due() -> None:
    model = gated(steep).float()
    optimizer = by_hand(model, sgd(model), preset="fixed", steps=100)
    for size, due in ((1, True), (0, True), (6, False)):
        batch = [tensor.float()[:size] for tensor in batch_of(6, 6, 5)]
        optimizer.step(squared(model), batch)
        assert (0 in optimizer._checks_due) == due


@together("scale", [math.nan, 1e6])
def test_no_record_ends_a_run_by_hindering_the_comparison(scale) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double().train()
    optimizer = by_hand(model, sgd(model), preset="fixed", clipping=CLIPPING)
    for size in (2, 0, 1, 8):
        batch = [torch.randn(size, 5).double(), torch.randint(3, (size,))]
        batch[0][1:2] *= scale
        before = flat(model)
        expected = by_loop(model, cross_entropy(model), batch) if size else 0 * before
        optimizer.step(cross_entropy(model), batch)
        moved = (before - flat(model)) * optimizer.expected_batch_size
        torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-12)
    loss, before = cross_entropy(model), flat(model)
    optimizer.step(lambda batch: loss(batch) * math.nan, batch)
    assert torch.equal(before, flat(model)) and optimizer.ledger.steps == 5


MOVES = {
    "product": lambda h, order: torch.eye(len(h), dtype=h.dtype)[order] @ h,
    "product from the right": lambda h, order: (h.t() @ torch.eye(len(h), dtype=h.dtype)[order].t()).t(),
    "batched product": lambda h, order: torch.bmm(torch.eye(len(h), dtype=h.dtype)[order][None], h[None])[0],
    "gathered": lambda h, order: h.gather(0, order[:, None].expand_as(h)),
    "selected": lambda h, order: h.index_select(0, order),
    "by index": lambda h, order: h[order],
    "by Python's numbers": lambda h, order: torch.stack([h[i] for i in order.tolist()]),
    "by them where they differ": lambda h, order: MOVES["by Python's numbers"](h, order) if order[0] else h,
    "in another dimension": lambda h, order: h[:, None].transpose(0, 1)[:, order].transpose(0, 1)[:, 0],
    "flipped": lambda h, order: h if order[0] == 0 else h.flip(0),
}


@together(*each(move=MOVES, layer=["middle", "scale"]).args)
def test_rows_that_only_a_later_batch_moves(move, layer) -> None:
    """Nor the first, whose records have not the last feature; put back behind a layer, so samples do not mix."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        order = (-x[:, 4]).argsort(stable=True)
        h = MOVES[move](m.inner(x[:, :4]).tanh(), order)
        if layer == "middle":
            h = F.linear(input=h, weight=m.middle.weight, bias=m.middle.bias).tanh()
        else:
            h = h * m.middle.bias
        return m.outer(MOVES[move](h, order.argsort()))[:, 0]

    batches = [batch_of(16, 5), batch_of(16, 5)]
    for number, (x, _) in enumerate(batches):
        x.mul_(2).round_()[:, 4] = number * torch.arange(16.0)  # whole: none is made NaN, which products would spread
    assert attack(three_layers(forward), batches).slow is not None
