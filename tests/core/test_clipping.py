"""Clipped sums of small plain models against a loop over samples, and on awkward batches."""

import gc
import math
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Example, assert_exact, biases_only, conv1d_net, groupnorm_convnet, mlp, tied_language_model
from torch import Tensor, nn
from twins import Built

from hyfreedp.data.batches import stack_records
from hyfreedp.gradients import AbadiClipping, AutomaticClipping, GradientEngine, NoClipping
from hyfreedp.gradients.per_sample import products
from hyfreedp.gradients.pieces import Partition

EXAMPLES = [mlp, groupnorm_convnet, conv1d_net, tied_language_model]
Loss = Callable[..., Tensor]  # of a model and a record
some_by_the_loop = pytest.mark.filterwarnings("ignore:samples are computed one at a time:UserWarning")


@each(build=EXAMPLES, clipping=[AutomaticClipping(), AbadiClipping(0.5), NoClipping()])
def test_equals_a_loop_over_samples(build, clipping) -> None:
    assert_exact(build(), clipping=clipping)


@pytest.mark.parametrize(("build", "head"), [*((build, "none") for build in EXAMPLES), (groupnorm_convnet, "10.")])
def test_biases_and_heads_alone_are_exact(build, head) -> None:
    example = build()
    biases_only(example.model, head)
    assert_exact(example)


# -- every shape -------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    batch=st.integers(1, 4), tokens=st.integers(1, 9), width=st.integers(1, 9), out=st.integers(1, 9),
    bias=st.booleans(),
)  # fmt: skip
def test_linear_layers_of_any_shape_are_exact(batch, tokens, width, out, bias) -> None:
    model = nn.Sequential(nn.Linear(width, out, bias=bias), nn.Tanh(), nn.Linear(out, width)).double()
    x = torch.randn(batch, tokens, width).double()
    assert_exact(Example(model, (x,), lambda model, x: model(x).square().sum((1, 2))), clipping=NoClipping())


@settings(max_examples=15)
@given(
    groups=st.integers(1, 2), kernel=st.integers(1, 3), stride=st.integers(1, 3), padding=st.integers(0, 2),
    dilation=st.integers(1, 2), size=st.integers(5, 8), out=st.sampled_from([2, 30]), dims=st.integers(1, 3),
)  # fmt: skip
def test_convolutions_of_any_shape_are_exact(groups, kernel, stride, padding, dilation, size, out, dims) -> None:
    model = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, out, kernel, stride, padding, dilation, groups).double()
    x = torch.randn(3, 4, *[size] * dims).double()
    assert_exact(Example(model, (x,), lambda model, x: model(x).square().flatten(1).sum(1)))


# -- batches -----------------------------------------------------------------------------------------------------------


@some_by_the_loop
@each(poison=[math.nan, math.inf], loop=[False, True], build=EXAMPLES)
def test_a_sample_that_is_not_finite_contributes_zero(build, loop, poison) -> None:
    """Whether it is in the first batch or in a later one, and whether samples are computed one at a time."""
    example, plain = build(), build()
    plain.model, plain.batch = example.model, example.batch
    factors = torch.ones(len(example.batch[0])).double()
    factors[2] = poison
    example.batch = (*example.batch, factors)
    loss, example.loss = example.loss, lambda model, *batch: loss(model, *batch[:-1]) * batch[-1]
    kept = factors.isfinite()
    norms, _ = plain.clipped()
    clipped = (AutomaticClipping().factors(norms) * kept) @ plain.gradients()
    engine, example = GradientEngine(example.model, AutomaticClipping()), example.looped() if loop else example
    for _ in range(2):
        measured, total = example.by_engine(engine)
        assert measured.isinf().equal(~kept) and bool(engine.fallback_reason) == loop
        torch.testing.assert_close(measured[kept], norms[kept], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(total, clipped, rtol=1e-9, atol=1e-12)
        example.by_engine(engine, slice(3, 5))
        none, total = example.by_engine(engine, slice(0, 0))
        assert none.shape == (0,) and none.dtype == torch.float64 and not total.any()
    example.batch[-1][:] = poison
    measured, total = example.by_engine(engine)
    assert measured.isinf().all() and not total.any()


@pytest.mark.parametrize("scale", [5.0, -5.0, math.nan])
def test_a_rule_of_ones_own_is_kept_to_its_sensitivity(scale) -> None:
    """One of 5 / n moved the sum by five clips."""
    example, rule = mlp(), SimpleNamespace(sensitivity=2.0, factors=lambda norms: torch.nan_to_num(scale / norms))
    norms, total = example.by_engine(GradientEngine(example.model, rule))
    torch.testing.assert_close(total, ({5.0: 2.0, -5.0: -2.0}.get(scale, 0.0) / norms) @ example.gradients())
    tiny = Example(nn.Linear(1, 1), (torch.ones(1, 1),), lambda model, x: 1e-24 * model(x)[:, 0])  # its square is zero
    assert tiny.by_engine(GradientEngine(tiny.model, rule))[1].norm() <= 2


def test_sums_over_many_pieces_lose_nothing() -> None:
    """In float32 the later ones were lost; where records were chosen so, one moved 8,192 pieces by five clips."""
    model = nn.Linear(1, 1, bias=False)
    many, few = Partition.of(torch.cat([torch.ones(4096, 1), torch.full((1000, 1), 1e-4)])).pieces
    partition = Partition([many, *few.cut(2)])
    sums, *_ = GradientEngine(model, AbadiClipping(1.0)).clipped_sums(lambda x: model(x).sum(), partition)
    assert sums[model.weight].item() == pytest.approx(4096.1, abs=3e-4)


@pytest.mark.parametrize("big", [1.0, 1e12])
def test_rows_of_one_token_that_cancel_take_nothing_from_others_sums(big) -> None:
    """In float32 a record whose values of one id are +-1e12 moved the sum of 2,000 by 209 clips."""
    table, values = nn.Embedding(5, 8), torch.cat([torch.ones(300, 8), big * torch.tensor([[1.0, -1.0] * 4])])
    loss = lambda b: (table(b[0]) * b[1][..., None]).sum((1, 2))  # noqa: E731
    sums = []
    for size in (300, 301):
        engine = GradientEngine(table, AbadiClipping(1.0))
        sums.append(engine.clipped_sums(loss, (torch.full((size, 8), 3), values[:size]))[0][table.weight])
    assert sums[0].norm() == pytest.approx(300, rel=1e-4) and (sums[1] - sums[0]).norm() <= 1.001


def test_a_device_may_add_rows_in_any_order(monkeypatch) -> None:
    """Norms, and sums of the samples that are finite, rounded each in their way: a record counted as 300 clips."""
    add, calls, table = Tensor.index_add_, iter(range(99)), nn.Embedding(5, 1)
    ordered = lambda given: [t.flip(0) for t in given] if next(calls) % 4 > 1 else given  # noqa: E731
    monkeypatch.setattr(Tensor, "index_add_", lambda to, dim, *given: add(to, dim, *ordered(given)))
    engine, values = GradientEngine(table, AutomaticClipping()), torch.tensor([[3.0, 1e8, -1e8], [math.nan] * 3])
    sums, *_ = engine.clipped_sums(lambda b: (table(b[0])[..., 0] * b[1]).sum(), (torch.zeros(2, 3).long(), values))
    assert sums[table.weight].norm() <= 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_record_that_is_not_finite_leaves_the_others_theirs_where_raw_inputs_meet_parameters(value) -> None:
    """Carried back with others' zeros it took all 200 clips."""

    def forward(m: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
        return (m.layer(x * m.norm.weight) + m.table(ids)).square().sum(1)

    model = Built(forward, layer=nn.Linear(4, 3), norm=nn.LayerNorm(4), table=nn.Embedding(5, 3)).train()
    x, ids = torch.randn(8, 4), torch.arange(8) % 5
    engine = GradientEngine(model, AutomaticClipping())
    engine.clipped_sums(lambda batch: model(*batch), (x, ids))
    x[2] = value
    *_, norms = engine.clipped_sums(lambda batch: model(*batch), (x, ids))
    assert norms.isfinite().tolist() == [row != 2 for row in range(8)] and engine.fallback_reason is None


@some_by_the_loop
def test_pieces_of_a_batch_and_its_noise_have_one_sensitivity() -> None:
    """A schedule that counts calls lowered it between two pieces: one record moved the sum by four clips."""
    example, rule = mlp().looped(), SimpleNamespace(sensitivity=1.0)
    # From the second piece, a record, on they are four times as large as the batch allows.
    rule.factors = lambda norms: (rule.sensitivity / norms, setattr(rule, "sensitivity", 4.0))[0]
    _, total = example.by_engine(engine := GradientEngine(example.model, rule))
    torch.testing.assert_close(total, example.clipped(AbadiClipping(1e-9))[1] * 1e9)
    assert engine.sensitivity == 1.0 and example.by_engine(engine)[1].norm() > 0 and engine.sensitivity == 4.0


# -- a record of several rows: views, windows, sentences; its loss is their mean ---------------------------------------


@each(views=[2, 3, 6], build=EXAMPLES)
def test_the_gradient_of_a_record_is_the_mean_of_its_views(views, build) -> None:
    """Also where some views occur in two records."""
    example, rows, clipping = build(), torch.tensor([0, 3, 1, 4, 2, 0]), AutomaticClipping()
    batch = tuple(tensor[rows % len(tensor)] for tensor in example.batch)
    gradients = Example(example.model, batch, example.loss).gradients().unflatten(0, (-1, views)).mean(1)

    def mean(model: nn.Module, *record: Tensor) -> Tensor:
        return example.loss(model, *(tensor.squeeze(0) for tensor in record)).mean()

    records = Example(example.model, tuple(tensor.unflatten(0, (-1, views)) for tensor in batch), mean)
    engine = GradientEngine(example.model, clipping)
    norms, total = records.by_engine(engine)
    assert engine.fallback_reason is None
    torch.testing.assert_close(norms, gradients.norm(dim=1), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(total, clipping.factors(norms) @ gradients, rtol=1e-8, atol=1e-12)


def test_records_have_as_many_rows_as_they_have() -> None:
    """Those of one number are mapped together, in the order of the batch."""
    model, numbers = nn.Linear(5, 1, bias=False).double(), [2, 1, 3, 1, 2]
    records = [torch.randn(number, 5).double() for number in numbers]
    engine = GradientEngine(model, AutomaticClipping())
    _, losses, norms = engine.clipped_sums(lambda x: model(x).mean(), stack_records(records))
    means = torch.stack([x.mean(0) for x in records])
    torch.testing.assert_close((losses, norms), (model(means)[:, 0].detach(), means.norm(dim=1)))


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's own RMSNorm
@pytest.mark.parametrize("build", EXAMPLES)
def test_half_precision_autocast_is_close(build) -> None:
    example = build()
    example.model.float()
    example.batch = tuple(t.float() if t.is_floating_point() else t for t in example.batch)
    norms, clipped = example.clipped()
    with torch.autocast("cpu", torch.bfloat16):
        engine = GradientEngine(example.model, AutomaticClipping())
        measured, total = example.by_engine(engine)
    assert measured.dtype == torch.float32 and engine.fallback_reason is None
    torch.testing.assert_close(measured, norms, rtol=0.05, atol=0)
    assert (total - clipped).norm() < 0.05 * clipped.norm()


@some_by_the_loop
@pytest.mark.parametrize("loop", [False, True])
def test_norms_of_half_precision_gradients_are_those_of_single_precision(loop) -> None:
    """3,000 weights and a bias with gradient one each: in half precision the norm would be 0.3 % off."""
    x = torch.ones(4, 3000, dtype=torch.bfloat16)
    example = Example(nn.Linear(3000, 1).bfloat16(), (x,), lambda model, x: model(x)[:, 0])
    example = example.looped() if loop else example
    norms, total = example.by_engine(GradientEngine(example.model, AutomaticClipping()))
    torch.testing.assert_close(norms, torch.full((4,), math.sqrt(3001)), rtol=1e-6, atol=0)
    assert total.dtype == torch.float32


@some_by_the_loop
@pytest.mark.parametrize("loop", [False, True])
def test_sums_of_many_records_are_of_single_precision_under_autocast(loop) -> None:
    """In bfloat16 one record of 2,048 moved the sum by three clips."""
    example = Example(nn.Linear(64, 1), (torch.rand(512, 64),), lambda model, x: model(x)[:, 0].float())
    g = torch.cat([example.batch[0].bfloat16().double(), torch.ones(512, 1)], 1)
    example = example.looped() if loop else example
    with torch.autocast("cpu", torch.bfloat16):
        _, total = example.by_engine(GradientEngine(example.model, AutomaticClipping()))
    assert (total - (g / (g.norm(dim=1, keepdim=True) + 0.01)).sum(0)).norm() < 1e-3


def test_an_autocast_around_the_step_sees_that_weights_have_moved():
    """It keeps the weights that it has cast: all votes of a look, and losses of a probe, were of those before."""
    layer, x = nn.Linear(5, 1), torch.ones(1, 5)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        engine = GradientEngine(layer, AutomaticClipping())
        before = engine.losses(lambda x: layer(x), x)
        layer.weight.mul_(2), layer.bias.mul_(2)
        torch.testing.assert_close(engine.losses(lambda x: layer(x), x), 2 * before)


@each(dtype=[torch.bfloat16, torch.float16], kind=[nn.LayerNorm, nn.Embedding])
def test_long_sums_in_half_precision_are_close(kind, dtype) -> None:
    """Where autograd's own, as of a plain step, are off by a third and more."""
    y = torch.tensor([-1.0, 1.0, 2.0, -2.0], dtype=torch.float64)[:, None, None]
    if kind is nn.LayerNorm:
        model, x = nn.LayerNorm(8), torch.randn(4, 2048, 8).double()
    else:
        model, x = nn.Embedding(5, 8), (torch.rand(4, 4096) < 0.2) + torch.arange(4)[:, None]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().mean((1, 2)).to(torch.promote_types(y.dtype, torch.float))

    norms, _ = Example(model.double(), (x, y), loss).clipped()
    example = Example(model.to(dtype), tuple(t.to(dtype) if t.is_floating_point() else t for t in (x, y)), loss)
    measured, _ = example.by_engine(GradientEngine(model, AutomaticClipping()))
    torch.testing.assert_close(measured.double(), norms, rtol=0.05, atol=0)


# -- the model stays what it was ---------------------------------------------------------------------------------------


def interrupted(model: nn.Module, x: Tensor) -> Tensor:
    model(x)
    raise KeyboardInterrupt


def looping(model: nn.Module, x: Tensor) -> Tensor:
    return model(torch.from_numpy(x.numpy()))


@some_by_the_loop
@pytest.mark.parametrize("loss", [lambda model, x: model(x * 2), interrupted, looping])
def test_nothing_is_left_behind(loss) -> None:
    """Neither of a pass nor of one that was interrupted: inputs die with their graph, parameters are back."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    engine = GradientEngine(model, AutomaticClipping())
    with suppress(KeyboardInterrupt):
        engine.clipped_sums(lambda x: loss(model, x), torch.randn(43, 3))
    gc.collect()
    assert not any(type(o) is Tensor and o.shape in ((43, 3), (43, 1, 3)) for o in gc.get_objects())
    assert all(type(p) is nn.Parameter for p in model.parameters())


def moved(model: nn.Module, loss: Loss, batch: tuple[Tensor, ...], clip: float | None = None, **settings: Any) -> float:
    """How far the first record moves the sum, in clips: of Abadi's rule, or, without a threshold, of the other."""
    example, clipping = Example(model, batch, loss), AbadiClipping(clip) if clip else AutomaticClipping()
    engines = [GradientEngine(model, clipping, **settings) for _ in range(2)]
    whole, rest = (example.by_engine(one, slice(i, None))[1].double() for i, one in enumerate(engines))
    return float((whole - rest).norm()) / clipping.sensitivity


def rounded_layer(count: int) -> tuple[nn.Module, Tensor]:
    """Its gradients, in bfloat16, and inputs of equal records; one gradient has 64 x 64 numbers."""
    x = torch.randn(1, 24, 64).expand(count, 24, 64).to(torch.bfloat16)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()).to(torch.bfloat16), x


def tied_table(count: int) -> tuple[nn.Module, Tensor]:
    """Whose norms have some slack for rounding where they are computed from factors; 256 x 64 numbers."""
    table, head = nn.Embedding(256, 64), nn.Linear(64, 256, bias=False)
    head.weight = table.weight
    return nn.Sequential(table, nn.Tanh(), head), torch.randint(256, (1, 32)).expand(count, 32)


@pytest.mark.parametrize(("build", "numbers"), [(rounded_layer, 64 * 64), (tied_table, 256 * 64)])
def test_one_record_more_moves_a_sum_of_equal_ones_by_one_clip(build, numbers):
    """Where it no longer fits into memory, others' gradients could have another form, and another norm or rounding."""
    model, x = build(1024 + 1)
    signs = torch.ones(1025).index_fill(0, torch.tensor(0), -1)  # the first one's gradient is the opposite
    loss = lambda m, x, sign: sign * m(x).float().square().mean()  # noqa: E731
    assert moved(model, loss, (x, signs), memory_budget=4 * numbers * 1024) < 1.0001


def hovering(records: int, tokens: int = 1, level: int = 2048) -> Tensor:
    """(records, tokens): one in 2 ``level`` decides whether sums of those after it round up, above level, or down."""
    spacing = level * 2.0**-24  # of the float32 numbers below the level
    around = torch.tensor([1 - 0.9 * spacing, -1 + 3.1 * spacing]).repeat(level * tokens // 2)
    climbing = torch.eye(1, tokens).repeat(level, 1)
    return torch.cat([climbing, around.view(level, tokens)]).repeat(-(-records // (2 * level)), 1)[:records]


def test_one_record_more_does_not_decide_how_the_sum_of_others_rounds() -> None:
    """It moved the sum of 16,385 records by two clips, and of 65,537 by five."""
    table = nn.Embedding(1, 64)
    loss = lambda table, x: (table(torch.zeros(1, dtype=torch.long)) * x).sum()  # noqa: E731
    assert moved(table, loss, (hovering(16385) / 8,), 1.0) < 1.01


def test_one_record_more_does_not_decide_how_the_sum_of_others_tokens_rounds() -> None:
    """It moved the sum of 65,537 records of seven tokens by 2.7 clips."""
    layer, x = nn.Linear(10, 32, bias=False), torch.eye(1, 10).expand(7, 10)
    loss = lambda layer, numbers: (layer(x)[:, 0] * numbers).sum()  # noqa: E731
    assert moved(layer, loss, (hovering(16385, tokens=7, level=128),), 1.0) < 1.01


def test_accelerators_add_up_at_most_4096_tokens_in_turn() -> None:
    """A million of 1,000 samples' would be off by several clips."""
    for tokens, samples in ((1, 256), (197, 20), (1000, 4), (10_000, 1)):
        assert products(*torch.empty(2, 64, tokens, 16, device="meta")).block == samples


def test_uses_of_a_table_that_cancel_in_a_record_do_not_in_the_rounding_of_sums() -> None:
    """It moved the sum of 4,096 records by 77 clips."""
    table, embedded = nn.Embedding(4, 64), hovering(4096) * 128
    hidden = torch.cat([1 / 8 - embedded[:1], -embedded[1:]])[..., None].expand(-1, 1, 64)

    def loss(table: nn.Module, embedded: Tensor, hidden: Tensor) -> Tensor:
        embedding = (table(torch.ones(1, 1, dtype=torch.long)) * embedded).sum()
        return embedding + nn.functional.linear(hidden, table.weight)[..., 1].sum()

    norms, _ = Example(table, (embedded, hidden), loss).by_engine(GradientEngine(table, NoClipping()))
    assert moved(table, loss, (embedded, hidden), float(norms.max())) < 1.01


@some_by_the_loop
def test_an_error_of_one_record_that_the_loss_catches_leaves_others_mapped() -> None:
    """Else theirs are computed alone, where autocast rounds them: it moved the sum of 2,000 records by 3.7 clips."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    x, matrices = torch.randn(1, 32).expand(400, 32), torch.eye(2).repeat(400, 1, 1)
    matrices[0] = -1

    def loss(model: nn.Module, x: Tensor, matrix: Tensor) -> Tensor:
        with suppress(torch.linalg.LinAlgError):
            torch.linalg.cholesky(matrix)
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().logsumexp(1)

    assert moved(model, loss, (x, matrices)) < 1.0001
