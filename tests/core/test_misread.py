"""Constants with as many rows as samples: the engine takes them for samples, is corrected by autograd, reads again."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases import each, pairs, together
from peft import FourierFTConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from twins import cross_entropy, flat, make_private, sgd, trainable

from hyfreedp.clipping import (
    AbadiClipping,
    AutomaticClipping,
    BookKeepingEngine,
    GradientEngine,
    Misread,
)
from hyfreedp.clipping.base import _weights
from hyfreedp.clipping.hooks import HooksEngine
from hyfreedp.noise import NoiseGenerator

WIDTH = 8


class Adapter(nn.Module):
    """As DoRA: a magnitude over norms that its two small matrices make of an identity matrix, as wide as the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH, bias=False)
        self.magnitude = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(self.down(torch.eye(WIDTH, dtype=x.dtype)))
        return self.magnitude / (self.frozen.weight + made.T.detach()).norm(dim=1) * (self.frozen(x) + made.sum() * x)


class Heads(nn.Module):
    """A parameter repeated for as many heads as there may be samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.query = nn.Linear(WIDTH, WIDTH * WIDTH), nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x).unflatten(1, (WIDTH, WIDTH)) * self.query.expand(WIDTH, WIDTH)).tanh().mean(1)


class Gated(nn.Module):
    """Where the gate is zero, as adapters begin, no gradient of ``p`` shows whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.gate = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * (x @ (self.p * torch.linspace(-1, 1, WIDTH, dtype=x.dtype)[:, None])).tanh()


class Thinned(nn.Module):
    """A weight that is changed in place by a mask of its rows, as by LoKr: refused in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.p * 2
        weight *= torch.arange(WIDTH, dtype=x.dtype).sub(3).sign()[:, None]
        return x @ weight


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Adapter(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


def make(inner: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), inner(), nn.Dropout(0.0), nn.Linear(WIDTH, 3))
    return model.double().train()


def records(size: int = 64) -> TensorDataset:
    return TensorDataset(torch.randn(size, 5).double(), torch.randint(3, (size,)))


def trained(model: nn.Module, data: TensorDataset, pieces: int | None) -> Tensor:
    model, optimizer, loader = make_private(
        model,
        sgd(model, 0.1),
        data,
        batch_size=16,
        steps=4,
        clipping=AutomaticClipping(),
        preset="fixed",
        max_physical_batch_size=pieces,
    )
    for batch in loader:
        optimizer.step(cross_entropy(model), batch)
    assert optimizer.steps_left == 0
    return flat(model)


@together(*each(inner=[Adapter, Heads, Gated, Thinned, Both], pieces=[2, 4, 8]).args)
def test_a_run_is_that_of_one_sample_at_a_time(inner, pieces) -> None:
    """In which no gradient can go to a wrong sample."""
    data = records()
    torch.testing.assert_close(trained(make(inner), data, pieces), trained(make(inner), data, 1), rtol=1e-9, atol=1e-12)


ADAPTERS = {
    "DoRA": partial(LoraConfig, r=2, use_dora=True),
    "OFT": partial(OFTConfig, oft_block_size=4, use_cayley_neumann=False),
    "LoKr": partial(LoKrConfig, r=2, rank_dropout_scale=True, rank_dropout=1e-9),
    "FourierFT": partial(FourierFTConfig, n_frequency=10, init_weights=False),
}


@together(*each(name=ADAPTERS, pieces=[2, 4, 8]).args)
def test_adapters(name, pieces) -> None:
    def adapted() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
        return get_peft_model(layers, ADAPTERS[name](target_modules=["2"])).double().train()

    data = records()
    expected = trained(adapted(), data, 1)
    assert not torch.equal(expected, flat(adapted()))
    torch.testing.assert_close(trained(adapted(), data, pieces), expected, rtol=1e-9, atol=1e-12)


@together("inner", [Adapter, Both])
def test_the_batch_is_read_again_with_the_random_numbers_of_the_first_time(inner) -> None:
    model, states = make(inner), []
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed", max_physical_batch_size=4)
    model[3].p = 0.5
    loss = cross_entropy(model)

    def observed(batch):
        states.append((len(batch[0]), torch.get_rng_state()))
        return loss(batch)

    optimizer.step(observed, [tensor[:8] for tensor in records().tensors])
    sizes = [size for size, _ in states]
    at_first = [torch.equal(state, states[0][1]) for _, state in states]
    assert sizes[:4] == [4, 3, 4, 4]  # refused at the first piece; what has eight rows for three samples; both pieces
    assert at_first[:4] == [True, True, True, False]


def test_what_mixes_samples_is_refused_as_before() -> None:
    data = records()
    model = make(Adapter)
    _, optimizer, _ = make_private(model, sgd(model), data, preset="fixed", max_physical_batch_size=4)
    batch, loss = [tensor[:8] for tensor in data.tensors], cross_entropy(model)
    before = flat(model)
    with pytest.raises(ValueError, match="disagree with autograd"):
        optimizer.step(lambda batch: loss(batch) * loss(batch).mean(), batch)
    assert torch.equal(before, flat(model))
    assert all(p.grad is None for p in model.parameters())
    optimizer.step(loss, batch)


class Weighted(nn.Module):
    """Each sample's own weights, without gradient: samples that no more than their shape tells."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.skewed = nn.Parameter(torch.randn(WIDTH)), False

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().cos() * self.p
        return y * y.sum(0) if self.skewed else y


def test_a_right_decision_survives_an_error_that_it_did_not_cause() -> None:
    data, model = records(), make(Weighted)
    _, optimizer, _ = make_private(model, sgd(model), data, preset="fixed")
    model[2].skewed = True
    with pytest.raises(ValueError, match="disagree with autograd"):
        optimizer.step(cross_entropy(model), [tensor[:8] for tensor in data.tensors])
    model[2].skewed = False
    optimizer.step(cross_entropy(model), [tensor[:8] for tensor in data.tensors])


def test_what_a_released_gradient_rests_on_is_not_doubted() -> None:
    """It would be right from now on, but was not before: that is an error, not a repair."""
    x, y = records(4).tensors
    for released in (False, True):
        model = make(Gated)
        engine, loss = BookKeepingEngine(model, AutomaticClipping()), cross_entropy(model)
        engine.backward(loss([x, y]))
        if released:
            engine.clipped_sums(list(model.parameters()))
        with torch.no_grad():
            model[2].gate.fill_(1.0)
        with pytest.raises(Misread, match=r"disagree with autograd: '2\.p'") as caught:
            engine.verify(loss([x, y]))
        assert caught.value.sizes == (set() if released else {3})
        engine.detach()


def clipped_sum(model: nn.Module, batch: list[Tensor], threshold: float, loss_of=cross_entropy) -> Tensor:
    """By a loop over the samples, which leaves out gradients that are not finite."""
    total = torch.zeros_like(flat(model))
    for i in range(len(batch[0])):
        loss = loss_of(model)([tensor[i : i + 1] for tensor in batch])[0]
        gradients = torch.autograd.grad(loss, trainable(model), allow_unused=True, materialize_grads=True)
        gradient = torch.cat([g.flatten() for g in gradients])
        if gradient.isfinite().all():
            total += gradient * min(1.0, threshold / float(gradient.norm()))
    return total


def released(optimizer, model: nn.Module, batch: list[Tensor], loss_of=cross_entropy) -> Tensor:
    """The clipped sum that a step of rate 1 without noise moves the weights by."""
    before = flat(model)
    optimizer.step(loss_of(model), batch)
    return (before - flat(model)) * optimizer.expected_batch_size


class TwoKinds(nn.Module):
    """``p`` meets a constant of as many tokens as there are samples and features of the samples, without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.frozen = nn.Linear(2, WIDTH, bias=False).requires_grad_(False)
        self.p, self.on = nn.Parameter(torch.rand(WIDTH) + 0.5), True

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x[..., :3])
        if self.on:
            tokens = torch.linspace(0, 9, x.shape[1], dtype=x.dtype)
            h = h + self.p * torch.outer(tokens, torch.linspace(0.1, 1, WIDTH, dtype=x.dtype)).sin()
            features = self.p * self.frozen(x[..., 3:])
            h = (h.tanh().transpose(0, 1) + features.transpose(0, 1)).transpose(0, 1)  # tokens first, and back
        return self.head(h.mean(1))


def two_kinds() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return TwoKinds().double().train(), [torch.randn(16, 16, 5).double(), torch.randint(3, (16,))]


def test_what_the_first_records_do_not_show_is_not_given_up() -> None:
    """Their features are zero, so that a check could not tell if these were taken for a constant, too."""
    model, batch = two_kinds()
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed", clipping=AbadiClipping(0.05), steps=100)
    first = [torch.cat([batch[0][..., :3], torch.zeros(16, 16, 2)], dim=2), batch[1]]
    for records_of_a_step in (first, batch):
        expected = clipped_sum(model, records_of_a_step, 0.05)
        torch.testing.assert_close(released(optimizer, model, records_of_a_step), expected, rtol=1e-9, atol=1e-12)


@together("later", [False, True])
def test_a_record_that_is_not_finite_does_not_turn_the_check_off(later) -> None:
    """Neither in the first batch, nor where the model changes in another at which no check is due."""
    model, batch = two_kinds()
    model.on = not later
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed", clipping=AbadiClipping(0.05), steps=100)
    if later:
        optimizer.step(cross_entropy(model), [tensor.clone() for tensor in batch])
        optimizer._checks_due, model.on = [], True
    batch[0][3, 0, 0] = math.inf
    expected = clipped_sum(model, batch, 0.05)
    assert expected.norm() > 0.1
    torch.testing.assert_close(released(optimizer, model, batch), expected, rtol=1e-9, atol=1e-12)


class Outshone(nn.Module):
    """A misread ``p``, beside ``q`` at which a record's last feature makes the gradient as large as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.zeros(3))
        self.head, self.on = nn.Linear(WIDTH, 3).requires_grad_(False), True

    def forward(self, x: Tensor) -> Tensor:
        tokens, large = x[..., :WIDTH], x[:, 0, WIDTH:]
        positions = torch.linspace(1, 9, x.shape[1], dtype=x.dtype)
        if self.on:
            tokens = tokens + self.p * torch.outer(positions, torch.linspace(0.1, 1, WIDTH, dtype=x.dtype)).sin()
        return self.head(tokens.tanh().mean(1)) + self.q * large


@together(("later", "dtype"), itertools.product([False, True], [torch.float32, torch.float64]))
def test_a_large_gradient_does_not_hide_a_misread_one_from_the_check(dtype, later) -> None:
    """Neither in the first batch, nor where the model changes in another: gradients are compared as released, too."""
    model, batch = outshone()
    model, batch = model.to(dtype), [batch[0].to(dtype), batch[1]]
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed", clipping=AbadiClipping(0.05), steps=100)
    if later:
        model.on = False
        optimizer.step(cross_entropy(model), [tensor.clone() for tensor in batch])
    optimizer._checks_due, model.on = [], True  # of few samples, among which the large one need not be
    batch[0][3, 0, WIDTH] = 1e9
    expected = clipped_sum(model, batch, 0.05)
    assert expected.norm() > 0.1
    torch.testing.assert_close(released(optimizer, model, batch), expected, rtol=1e-5, atol=1e-6)


def scaled(model: nn.Module) -> Callable[[list[Tensor]], Tensor]:
    """Losses times the batch's third tensor."""
    loss = cross_entropy(model)
    return lambda batch: loss(batch) * batch[2]


def test_no_records_are_chosen_so_that_the_errors_of_a_misread_gradient_cancel() -> None:
    """They can be where the signs of a comparison are known; those of a run are not."""
    model, (x, y, _) = outshone()
    positions, twin = nn.Parameter(model.p.detach().expand(16, 16, WIDTH).clone()), copy.deepcopy(model)
    twin.p = positions
    (by_position,) = torch.autograd.grad(cross_entropy(twin)([x, y]).sum(), positions)  # (samples, positions, WIDTH)
    known = _weights(torch.zeros(16), NoiseGenerator(0))
    errors = ((known - known[:, None])[..., None] * by_position).sum(1)  # taken for samples' minus the samples'
    scale = torch.linalg.svd(errors.T)[2][-1]
    batch, clipping = [x, y, scale], AbadiClipping(2e-3)
    twin = copy.deepcopy(model)
    engine = BookKeepingEngine(twin, clipping)
    engine.signs = NoiseGenerator(0)
    engine.backward(scaled(twin)(batch))
    expected = clipped_sum(model, batch, 2e-3, scaled)
    assert (torch.cat([twin.p.grad, twin.q.grad]) - expected).norm() > 0.2 * expected.norm()
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed", clipping=clipping, steps=100)
    optimizer._checks_due = []
    torch.testing.assert_close(released(optimizer, model, batch, scaled), expected, rtol=1e-4, atol=1e-6)


@together("engine", [BookKeepingEngine, HooksEngine])
def test_records_that_are_all_alike_raise_no_false_alarm(engine: type[GradientEngine]) -> None:
    """Their weighted sum cancels where the weights do, of which no rounding of its addends knows."""
    sums = {seed: _weights(torch.zeros(64), NoiseGenerator(seed)).sum().abs().item() for seed in range(200)}
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16))
    x = torch.randn(1, 64).expand(64, 64)
    for seed in sorted(sums, key=lambda seed: sums[seed])[:5]:
        reader = engine(copy.deepcopy(model), AutomaticClipping())
        reader.signs = NoiseGenerator(seed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = reader.module(x).float().square().mean(1)
        reader.backward(losses)


class Clock(nn.Module):
    """A rate of change at times that are the same for all samples, so small that only an odd record shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.alpha = nn.Linear(5, 16, bias=False), nn.Parameter(torch.zeros(16))
        self.outer = nn.Linear(16, 1, bias=False)

    def at_times(self) -> Tensor:
        return self.alpha * torch.arange(60, dtype=self.alpha.dtype)[:, None] / 1e6

    def forward(self, x: Tensor) -> Tensor:
        return self.outer((self.inner(x)[:, None] + self.at_times()).tanh().mean(1))[:, 0]


class SeenClock(Clock):
    """Another use of the same parameter is read rightly, and large."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outer((self.inner(x)[:, None] * (1 + self.alpha) + self.at_times()).tanh().mean(1))[:, 0]


class ClockOfAnArgument(Clock):
    """The times are an argument of the model, as a batch would be."""

    def at_times(self) -> Tensor:
        return self.alpha * self.times

    def forward(self, x: Tensor, times: Tensor | None = None) -> Tensor:
        if times is None:
            return self(x, torch.arange(60, dtype=x.dtype)[:, None] / 1e6)
        self.times = times
        return super().forward(x)


class ExpandedClock(Clock):
    """The times are a buffer, repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("time", torch.full((1, 1), 1e-6))

    def at_times(self) -> Tensor:
        return self.alpha * self.time.expand(12, 1)


class LateClock(SeenClock):
    """Another use only where a record opens a branch; the first use tells nothing of it."""

    def forward(self, x: Tensor) -> Tensor:
        self.late = bool((x.abs().sum(1) == 0).any())
        with torch.no_grad():
            size = x.norm(dim=1, keepdim=True)
        return super().forward(x) + (self.alpha * size).sum(1)

    def at_times(self) -> Tensor:
        return super().at_times() if self.late else self.alpha * 0


class LargeBatchClock(SeenClock):
    """No pass of another size meets the other use."""

    def at_times(self) -> Tensor:
        return super().at_times() if self.samples in (1, 6, 12) else self.alpha * 0

    def forward(self, x: Tensor) -> Tensor:
        self.samples = len(x)
        return super().forward(x)


class ClockAfterSamples(Clock):
    """The parameter meets samples first, of which the shape tells the truth."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = x.norm(dim=1, keepdim=True)
        return self.outer((self.inner(x)[:, None] + (self.alpha * size)[:, None] + self.at_times()).tanh().mean(1))[
            :, 0
        ]


def after_two_steps(kind: type[nn.Module], pieces: object, *, at_once: bool = False) -> Tensor:
    """The weights; in the second batch, or in both, is a record all of whose gradient is in alpha."""
    torch.manual_seed(0)
    model = kind().train()  # in float32, whose rounding hides alpha in all records but one
    x, y = torch.randn(48, 5), torch.randn(48)
    odd = y.clone()
    x[[2, 15]], odd[[2, 15]] = 0, 1e9  # in the first piece and in a later one
    _, optimizer, _ = make_private(
        model,
        sgd(model, 1.0),
        preset="fixed",
        steps=2,
        clipping=AutomaticClipping(),
        max_physical_batch_size=pieces,
    )

    def squared(batch: list[Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square()

    optimizer.step(squared, [x, odd if at_once else y])
    with torch.no_grad():
        model.outer.weight.add_(1)
    optimizer.step(squared, [x[10:22], odd[10:22]])
    return flat(model)


def knowing_better(batch: list[Tensor]) -> list[list[int]]:
    """Sixty rows are no multiple of the seven of the second piece: gradients of the first rest on what it refutes."""
    rows = list(range(len(batch[0])))
    return [rows[11:], rows[:4], rows[4:11]] if len(rows) > 12 else [rows]


@together(
    *pairs(
        kind=[Clock, SeenClock, ClockOfAnArgument, ExpandedClock], pieces=[6, 12, knowing_better], at_once=[True, False]
    ).args
)
def test_what_no_gradient_of_the_first_records_shows_is_shown_by_passes_of_other_sizes(kind, pieces, at_once) -> None:
    """Else one record whose gradient is large there would count as several, each clipped by itself."""
    expected = after_two_steps(kind, 1, at_once=at_once)
    torch.testing.assert_close(after_two_steps(kind, pieces, at_once=at_once), expected, rtol=1e-4, atol=1e-5)


@together("pieces", [6, 12])
def test_what_no_pass_of_another_size_shows_is_computed_sample_by_sample(pieces) -> None:
    torch.manual_seed(0)
    model, sizes = LargeBatchClock().train(), []
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed", max_physical_batch_size=pieces)

    def squared(batch: list[Tensor]) -> Tensor:
        sizes.append(len(batch[0]))
        return (model(batch[0]) - batch[1]).square()

    for _ in range(2):
        sizes.clear()
        optimizer.step(squared, [torch.randn(24, 5), torch.randn(24)])
        assert sizes.count(1) == 24


class Prompted(nn.Module):
    """Nine tokens that all samples share: in a pass of nine samples they might be numbers of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.inner, self.outer = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.prompt(torch.arange(9).expand(len(x), -1))
        return self.outer((self.inner(x)[:, None] * tokens).tanh().mean(1))[:, 0]


def test_a_pass_that_tells_nothing_is_followed_by_one_of_another_size() -> None:
    torch.manual_seed(0)
    model, sizes = Prompted().train(), []
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed")

    def squared(batch: list[Tensor]) -> Tensor:
        sizes.append(len(batch[0]))
        return (model(batch[0]) - batch[1]).square()

    for _ in range(2):
        optimizer._checks_due = []
        optimizer.step(squared, [torch.randn(8, 5), torch.randn(8)])
    assert sizes == [8, 9, 10, 8]


@together("kind", [ClockAfterSamples, LateClock])
def test_what_meets_samples_and_then_a_constant_is_refused(kind) -> None:
    with pytest.raises(ValueError, match=r"cannot be told apart where they meet the parameters 'alpha'"):
        after_two_steps(kind, 12)


class Turned(nn.Module):
    """A layer that sees each sample in the place of its neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.roll(1, 0)).roll(-1, 0)


@together("engine", [BookKeepingEngine, HooksEngine])
def test_records_that_are_all_alike_show_nothing_of_a_layer_that_takes_one_for_another(engine) -> None:
    """Whoever has them first in the data is not done with the comparison."""
    model = make(Turned)
    reader, loss = engine(model, AutomaticClipping()), cross_entropy(model)
    x, y = records(16).tensors
    reader.backward(loss([x[:1].expand(16, -1), y[:1].expand(16)]))
    with pytest.raises(ValueError, match="disagree with autograd"):
        reader.backward(loss([x, y]))


def halved(model: nn.Module) -> Callable[[list[Tensor]], Tensor]:
    loss = cross_entropy(model)
    return lambda batch: loss(batch).half()


class LeavesOut:
    """A rule by which the largest gradients are not released."""

    sensitivity = 0.05

    def factors(self, norms: Tensor) -> Tensor:
        return torch.where(norms > 1e3, 0.0, AbadiClipping(0.05).factors(norms))


def outshone(large: float = 0.0, scale: float = 1.0) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    batch = [torch.randn(16, 16, WIDTH + 1), torch.randint(3, (16,)), torch.full((16,), scale)]
    batch[0][..., WIDTH] = 0
    batch[0][3, 0, WIDTH] = large
    return Outshone().train(), batch


@together(
    ("large", "scale", "loss_of", "clipping", "left_out"),
    [
        (0.0, 1.8e20, scaled, AbadiClipping(0.05), []),
        (1e9, 1.0, halved, AbadiClipping(0.05), []),
        (1e12, 1.0, halved, AbadiClipping(0.05), []),
        (1e9, 1.0, halved, AbadiClipping(1e-9), []),
        (1e9, 1.0, scaled, LeavesOut(), [3]),
    ],
)
def test_what_overflows_in_a_comparison_is_not_taken_for_agreement(large, scale, loss_of, clipping, left_out) -> None:
    """Sums of gradients each of which is finite; weights in the type of the losses; a factor of zero."""
    model, batch = outshone(large, scale)
    rate = 0.05 / clipping.sensitivity
    _, optimizer, _ = make_private(model, sgd(model, rate), preset="fixed", clipping=clipping, steps=100)
    optimizer._checks_due = []
    rest = [tensor[[i for i in range(16) if i not in left_out]] for tensor in batch]
    expected = clipped_sum(model, rest, clipping.sensitivity, loss_of) * rate
    assert expected.norm() > 0.1
    torch.testing.assert_close(released(optimizer, model, batch, loss_of), expected, rtol=1e-3, atol=1e-4)


@together("bad", [1e9, math.nan])
def test_a_model_misread_in_a_hindered_batch_is_read_again_in_the_next(bad) -> None:
    """Sums of single samples rest on no decision, so none is settled by their release."""
    model, batch = outshone(bad)
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed", clipping=AbadiClipping(0.05), steps=100)
    for _ in range(3):
        expected = clipped_sum(model, batch, 0.05)
        torch.testing.assert_close(released(optimizer, model, batch), expected, rtol=1e-4, atol=1e-5)
        batch[0][3, 0, WIDTH] = 0


class Steep(nn.Module):
    """A gate that is closed, and a record that overflows once weights are shaken, which opens the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gated = nn.Linear(5, WIDTH), Gated()
        self.q, self.head = nn.Parameter(torch.zeros(())), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        steep = (self.q * x[:, 5:]) ** 2
        return self.head(self.gated(self.inner(x[:, :5]).tanh())) + torch.cat([steep, 0 * steep, 0 * steep], 1)


def test_a_record_that_overflows_at_shaken_weights_does_not_hide_what_they_show() -> None:
    torch.manual_seed(0)
    model, batch = Steep().train(), [torch.randn(8, 6), torch.randint(3, (8,))]
    batch[0][:, 5], batch[1][3] = 0, 1
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed", clipping=AbadiClipping(0.05), steps=100)
    batch[0][3, 5] = 1e15
    for rate in [1e-3] * 4 + [100.0] + [10.0] * 3:  # the first open the gate by too little for a comparison
        optimizer.param_groups[0]["lr"] = rate
        expected, before = clipped_sum(model, batch, 0.05), flat(model)
        optimizer.step(cross_entropy(model), batch)
        got = (before - flat(model)) * optimizer.expected_batch_size / rate
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        batch[0][3, 5] = 0


def test_a_check_in_which_nothing_could_be_compared_stays_due() -> None:
    torch.manual_seed(0)
    model, batch = Steep().train(), [torch.randn(6, 6), torch.ones(6, dtype=torch.long)]
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed", steps=100)
    for steep, due in ((1e15, True), (1e15, True), (0.0, False)):
        batch[0][:, 5] = steep
        optimizer.step(cross_entropy(model), batch)
        assert (0 in optimizer._checks_due) == due


@together(
    *pairs(
        gradient_engine=["bookkeeping", "hooks"],
        clipping=[AbadiClipping(0.1), AutomaticClipping(), AutomaticClipping(1e-8)],
        dtype=[torch.bfloat16, torch.float16, torch.float32],
    ).args
)
def test_gradients_that_are_all_rounding_end_no_run(dtype, clipping, gradient_engine) -> None:
    """Those of records at their optimum: as released, they are as large as others', and no two computations agree."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16)).to(dtype).train()
    inputs = torch.randn(16, 32).to(dtype)
    with torch.no_grad():
        targets = model(torch.randn(16, 32).to(dtype))
        targets[:4] = model(inputs[:4])

    def loss(batch: list[Tensor]) -> Tensor:
        return 30 * (1 - nn.functional.cosine_similarity(model(batch[0]), batch[1], dim=1))

    _, optimizer, _ = make_private(
        model, sgd(model, 1e-9), preset="fixed", clipping=clipping, gradient_engine=gradient_engine, steps=3
    )
    for _ in range(3):
        optimizer.step(loss, [inputs, targets])
    assert optimizer.steps_left == 0


class Mapped(nn.Module):
    """A matrix product: misread, it gives every sample the gradient of the one that is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.p * torch.linspace(-1, 1, WIDTH, dtype=x.dtype)[:, None])


def test_nor_does_one_that_a_misread_model_spreads_over_all() -> None:
    model, batch = make(Mapped), [tensor[:8].clone() for tensor in records().tensors]
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed", clipping=AbadiClipping(0.05))
    batch[0][3, 0] = math.nan
    expected = clipped_sum(model, batch, 0.05)
    assert expected.norm() > 0.1
    torch.testing.assert_close(released(optimizer, model, batch), expected, rtol=1e-9, atol=1e-12)


@together("gradient_engine", ["bookkeeping", "hooks"])
def test_no_record_ends_a_run_by_hindering_the_check(gradient_engine) -> None:
    """A batch of two of which one is broken, an empty one, and a loss all of whose gradients are no numbers."""
    model, batch = make(nn.Identity), [tensor[:8] for tensor in records().tensors]
    settings = {"preset": "fixed", "gradient_engine": gradient_engine, "clipping": AbadiClipping(0.05)}
    _, optimizer, _ = make_private(model, sgd(model), **settings)
    two = [tensor[:2].clone() for tensor in batch]
    two[0][1] = math.nan
    for few in (two, [tensor[:0] for tensor in batch], [tensor[:1] for tensor in batch]):
        expected = clipped_sum(model, few, 0.05)
        torch.testing.assert_close(released(optimizer, model, few), expected, rtol=1e-9, atol=1e-12)
    loss, before = cross_entropy(model), flat(model)
    optimizer.step(lambda batch: torch.where(batch[1] < 3, loss(batch), loss(batch) * math.nan), batch)
    assert torch.equal(before, flat(model)) and optimizer.ledger.steps == 4


@together("scale", [math.nan, 1e6])
def test_a_step_made_again_after_a_resume_releases_the_same(scale) -> None:
    """Also where a check is due then that was not before, and a record hinders it: else its noise is new."""

    def wired(state=None):
        model = make(nn.Identity)
        model[3].p = 0.5
        settings = {"preset": "fixed", "target_epsilon": 3.0, "accountant": "rdp", "steps": 100}
        _, optimizer, _ = make_private(model, sgd(model, 0.1), **settings)
        if state:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        return model, optimizer

    model, optimizer = wired()
    first, second = ([*(t[k : k + 8].clone() for t in records().tensors), torch.ones(8)] for k in (0, 8))

    optimizer.step(scaled(model), first)
    optimizer._checks_due = []
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    second[2][3] = scale
    random = torch.get_rng_state()
    optimizer.step(scaled(model), second)
    after = torch.get_rng_state()
    again, resumed = wired(state)
    torch.set_rng_state(random)
    resumed.step(scaled(again), second)
    assert torch.equal(flat(again), flat(model)) and torch.equal(torch.get_rng_state(), after)


class Sometimes(nn.Module):
    """Its branch runs if a record asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mapped()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if (x.detach()[:, 0] > 0.999).any() or x.isnan().any() else x


@together(("pieces", "later"), itertools.product([4, 8], [False, True]))
def test_a_check_of_other_samples_does_not_stand_for_the_one_that_was_hindered(pieces, later) -> None:
    """They do not take the branch that is misread."""
    model, batch = make(Sometimes), [tensor[:8].clone() for tensor in records().tensors]
    settings = {"preset": "fixed", "clipping": AbadiClipping(0.05), "max_physical_batch_size": pieces}
    _, optimizer, _ = make_private(model, sgd(model), **settings)
    batch[0][:, 0] = -9.0
    if later:
        optimizer.step(cross_entropy(model), batch)
    batch[0][1, 1] = math.nan
    expected = clipped_sum(model, batch, 0.05)
    assert expected.norm() > 0.05
    torch.testing.assert_close(released(optimizer, model, batch), expected, rtol=1e-9, atol=1e-12)


@together("pieces", [2, 4])
def test_a_finite_gradient_in_each_piece_is_enough_for_the_check(pieces) -> None:
    model, batch = make(Mapped), [tensor[:8].clone() for tensor in records().tensors]
    _, optimizer, _ = make_private(
        model, sgd(model), preset="fixed", clipping=AbadiClipping(0.05), max_physical_batch_size=pieces
    )
    batch[0][torch.arange(8) % pieces > 0] = math.nan
    expected = clipped_sum(model, batch, 0.05)
    assert expected.norm() > 0.02
    torch.testing.assert_close(released(optimizer, model, batch), expected, rtol=1e-9, atol=1e-12)


def test_a_model_of_many_layers_takes_few_passes() -> None:
    """A pass of another size shows all layers at once, beyond the one where the first pass ended."""
    numbers = []
    for inner in (nn.Identity, Thinned):
        torch.manual_seed(0)
        layers = [nn.Linear(5, WIDTH), *(inner() for _ in range(20)), nn.Linear(WIDTH, 3)]
        model, sizes = nn.Sequential(*layers).double().train(), []
        _, optimizer, _ = make_private(model, sgd(model), preset="fixed")
        loss = cross_entropy(model)

        def counted(batch, loss=loss, sizes=sizes):
            sizes.append(len(batch[0]))
            return loss(batch)

        optimizer.step(counted, [tensor[:4] for tensor in records().tensors])
        numbers.append(len(sizes))
    assert sizes[:3] == [4, 3, 4]
    assert numbers[1] <= numbers[0] + 2


class OneUse(nn.Module):
    """The same product, of the same number of dimensions, of ``p`` with a constant and with features of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.frozen = nn.Linear(2, WIDTH, bias=False).requires_grad_(False)
        self.p = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x[..., :3])
        waves = torch.outer(torch.linspace(0, 9, 16, dtype=x.dtype), torch.linspace(0.1, 1, WIDTH, dtype=x.dtype)).sin()
        h = h + (self.p * waves[:, None]).mean(0)
        features = (self.p * self.frozen(x[..., 3:])).transpose(0, 1)
        return self.head((h.tanh().transpose(0, 1) + features).transpose(0, 1).mean(1))


def test_one_use_of_both_kinds_is_refused() -> None:
    torch.manual_seed(0)
    model = OneUse().double().train()
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed")
    with pytest.raises(Misread, match="disagree with autograd: 'p'"):
        optimizer.step(cross_entropy(model), [torch.randn(16, 48, 5).double(), torch.randint(3, (16,))])


def test_an_error_after_the_repair_is_not_hidden_by_the_first() -> None:
    model = make(Adapter)
    _, optimizer, _ = make_private(model, sgd(model), preset="paper", target_epsilon=3.0, accountant="rdp")
    loss = cross_entropy(model)
    with pytest.raises(ValueError, match="negative") as caught:
        optimizer.step(lambda batch: loss(batch) - 50, [tensor[:8] for tensor in records().tensors])
    assert isinstance(caught.value.__cause__, Misread)


class Skipped(nn.Module):
    """Drops out as a whole, as LoKr's modules may: not of the batch, but of the first pass that could tell."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = Adapter()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls == 2 else self.inner(x)


def test_a_layer_that_drops_out_of_the_telling_pass_gets_another() -> None:
    model, batch = make(Skipped), [tensor[:8] for tensor in records().tensors]
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed", clipping=AbadiClipping(0.05))
    model[2].calls = 2
    expected = clipped_sum(model, batch, 0.05)
    model[2].calls = 0
    torch.testing.assert_close(released(optimizer, model, batch), expected, rtol=1e-9, atol=1e-12)


class Asserting(nn.Module):
    """Does not work with another number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Adapter()

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 8, "eight"
        return self.inner(x)


def test_the_first_error_stays_and_what_hindered_its_repair_is_its_cause() -> None:
    model = make(Asserting)
    _, optimizer, _ = make_private(model, sgd(model), preset="fixed")
    with pytest.raises(Misread, match="disagree with autograd") as caught:
        optimizer.step(cross_entropy(model), [tensor[:8] for tensor in records().tensors])
    assert isinstance(caught.value.__cause__, AssertionError) and caught.value.sizes == {3}
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is Misread and str(copied) == str(caught.value)
