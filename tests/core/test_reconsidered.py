"""Constants with as many rows as samples: the engine takes them for samples, is corrected by autograd, reads again."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from peft import FourierFTConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from twins import cross_entropy, flat, make_private, sgd

from hyfreedp.clipping import AutomaticClipping, BookKeepingEngine, Misread, base
from hyfreedp.clipping.reference import weighted_gradients

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


@pytest.mark.parametrize("inner", [Adapter, Heads, Gated, Thinned, Both])
@pytest.mark.parametrize("pieces", [2, 4, 8])
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


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_adapters(name, pieces) -> None:
    def adapted() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
        return get_peft_model(layers, ADAPTERS[name](target_modules=["2"])).double().train()

    data = records()
    expected = trained(adapted(), data, 1)
    assert not torch.equal(expected, flat(adapted()))
    torch.testing.assert_close(trained(adapted(), data, pieces), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("inner", [Adapter, Both])
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
    again = [k for k, (_, state) in enumerate(states) if torch.equal(state, states[0][1])]
    assert sizes[:3] == [4, 4, 4]  # refused at the first piece: then both
    assert again[:2] == [0, 1]


def test_what_mixes_samples_is_refused_as_before_and_nothing_learned_from_it() -> None:
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


def test_a_right_decision_is_open_again_after_an_error_that_it_did_not_cause() -> None:
    data, model = records(), make(Weighted)
    _, optimizer, _ = make_private(model, sgd(model), data, preset="fixed")
    model[2].skewed = True
    with pytest.raises(ValueError, match="disagree with autograd"):
        optimizer.step(cross_entropy(model), [tensor[:8] for tensor in data.tensors])
    model[2].skewed = False
    optimizer.step(cross_entropy(model), [tensor[:8] for tensor in data.tensors])


def test_what_a_released_gradient_rests_on_is_not_reconsidered() -> None:
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
        assert caught.value.again is not released
        engine.detach()


def test_the_next_batch_is_checked(monkeypatch) -> None:
    x, y = records(4).tensors
    model, checked = make(Gated), []
    engine, loss = BookKeepingEngine(model, AutomaticClipping()), cross_entropy(model)
    monkeypatch.setattr(base, "weighted_gradients", lambda *args: checked.append(1) or weighted_gradients(*args))
    for _ in range(4):
        engine.backward(loss([x, y]))
    assert len(checked) == 3  # at the first and, since p has not shown itself, the second and fourth
    with torch.no_grad():
        model[2].gate.fill_(1.0)
    with pytest.raises(Misread):
        engine.verify(loss([x, y]))
    engine.backward(loss([x, y]))
    assert len(checked) == 3 + 2
