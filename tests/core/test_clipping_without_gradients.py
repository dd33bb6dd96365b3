"""A pass without gradients, such as a probe's, computes what one with them does, and what the model does by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import each, together
from models import Example
from torch import Tensor, nn

from hyfreedp.clipping import AutomaticClipping, make_engine


class Recurrent(nn.Module):
    """A dropout after the layer draws in the order in which its output lies in memory."""

    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.inner, self.dropout, self.batch_first = kind(4, 6, batch_first=batch_first), nn.Dropout(0.5), batch_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.inner(x if self.batch_first else x.transpose(0, 1))[0])
        return h if self.batch_first else h.transpose(0, 1)


class Mixed(nn.Module):
    """By a parameter on the tokens, which is mapped over the samples."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.weight, self.dropout, self.equation = nn.Parameter(torch.randn(5, 4)), nn.Dropout(0.5), equation

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.einsum(self.equation, x, self.weight))


class Windowed(nn.Module):
    """Attention with a hint that its mask does not bear out, for which PyTorch takes the hint."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        apart = torch.arange(5)[:, None] - torch.arange(5)
        mask = (apart < 0) | (apart > 2)
        return self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


class Target(nn.Module):
    """A part that is computed without gradients, by keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = F.linear(input=x, weight=self.weight)
        return F.linear(x, self.weight) - 2 * target


class Experts(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.randn(4, 3)), dropout

    def forward(self, rows: Tensor) -> Tensor:
        return F.dropout(rows @ self.weight, self.dropout)


class Mixture(nn.Module):
    """Calls its experts by keywords."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.experts = Experts(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(rows=x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.dropout, self.head = nn.Embedding(5, 4), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.positions(torch.arange(5)[None])) + x)


MODELS = {
    **{
        f"{kind.__name__}, {'samples' if batch_first else 'tokens'} first": lambda k=kind, b=batch_first: Recurrent(
            k, b
        )
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for batch_first in (True, False)
    },
    "einsum": lambda: Mixed("btd,ts->bsd"),
    "einsum to other places": lambda: Mixed("btd,te->bedt"),
    "a causal hint": Windowed,
    "a part without gradients": Target,
    "experts by keywords": Mixture,
}


def passes(model: nn.Module, x: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of the model at one random state: by itself, and with an engine with gradients and without."""
    found = []
    for attach, gradients in ((False, True), (True, True), (False, False)):
        if attach:
            make_engine(model, AutomaticClipping(), kind)
        torch.manual_seed(0)
        with torch.set_grad_enabled(gradients):
            found.append(model(x).detach())
    return tuple(found)


@together("build", MODELS.values())
def test_all_passes_compute_the_same(build) -> None:
    model, x = build().double().train(), torch.randn(7, 5, 4).double()
    plain, with_gradients, without = passes(model, x, "bookkeeping")
    torch.testing.assert_close(with_gradients, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(without, plain, rtol=1e-12, atol=1e-12)


def test_a_map_whose_channels_come_last_is_dropped_alike() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 4, 3), nn.Dropout(0.5)).double().train()
    x = torch.randn(7, 8, 6, 6).double().contiguous(memory_format=torch.channels_last)
    plain, with_gradients, without = passes(model, x, "bookkeeping")
    torch.testing.assert_close(with_gradients, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(without, plain, rtol=1e-12, atol=1e-12)


@together(*each(mode=["mean", "sum"], padding_idx=[-1, 8, None]).args)
def test_padding_counted_from_the_end_is_padding(mode, padding_idx) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, 4))

        def forward(self, ids: Tensor) -> Tensor:
            return F.embedding_bag(ids, self.weight, mode=mode, padding_idx=padding_idx)

    ids = torch.tensor([[1, 2, 8], [3, 8, 8], [4, 5, 6]])
    example = Example(Bag().double().train(), (ids,), lambda model, ids: model(ids).square().sum(1))
    norms, clipped = example.clipped(AutomaticClipping())
    plain = example.losses()
    engine = make_engine(example.model, AutomaticClipping())
    torch.testing.assert_close(example.losses(), plain)
    torch.testing.assert_close(engine.backward(example.losses()), norms)
    torch.testing.assert_close(example.collected(), clipped)


def test_positions_of_the_engine_hooks_are_dropped_alike() -> None:
    """Expanded to the samples, in passes without gradients too; the model by itself draws once for all of them."""
    _, with_gradients, without = passes(Positions().double().train(), torch.randn(7, 5, 4).double(), "hooks")
    torch.testing.assert_close(with_gradients, without, rtol=0, atol=0)


def test_experts_that_draw_random_numbers_are_refused() -> None:
    model = Mixture(dropout=0.5).train()
    make_engine(model, AutomaticClipping())
    with pytest.raises(ValueError, match=r"layer 'experts' \(Experts\) draws random numbers.* set its dropout to 0"):
        model(torch.randn(7, 5, 4))
