"""PyTorch's own LSTM, GRU and RNN, which are unrolled, since their kernels show no weight at work."""

import itertools

import pytest
import torch
from cases import pairs
from models import Example, biases_only
from models import assert_exact as exact
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from twins import Built

from hyfreedp.gradients.recurrent import unrolled

KINDS = [nn.LSTM, nn.GRU, nn.RNN]
SETTINGS = [
    {"batch_first": True},
    {},
    {"batch_first": True, "num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "bias": False},
]
PACKED = "equal size"  # of sequences of other lengths
LENGTHS = torch.tensor([3, 5, 1, 5, 2, 4, 5])


def recurrent(kind, packed: bool = False, learned: bool = False, **settings) -> nn.Module:
    """Reads tokens, packed or not, from states of its own or from zeros; outputs and last states count."""

    def forward(m: nn.Module, ids: Tensor, lengths: Tensor) -> Tensor:
        first = m.layer.batch_first
        x = m.inner(ids) if first else m.inner(ids).transpose(0, 1)
        if packed:
            x = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        output, last = m.layer(x, m.start.expand(-1, len(ids), -1) if learned else None)
        if packed:
            output, _ = pad_packed_sequence(output, batch_first=first, total_length=5)
        output = output if first else output.transpose(0, 1)
        ends = sum(state.square().sum((0, 2)) for state in (last if isinstance(last, tuple) else (last,)))
        return m.head(output).tanh().sum((1, 2)) + ends

    layer = kind(4, 6, **settings)
    directions = 2 if layer.bidirectional else 1
    start = nn.Parameter(torch.randn(directions * layer.num_layers, 1, 6)) if learned else None
    head = nn.Linear(directions * (layer.proj_size or 6), 3)
    return Built(forward, inner=nn.Embedding(9, 4), layer=layer, head=head, start=start)


def assert_exact(model: nn.Module, **settings) -> None:
    batch = torch.randint(9, (7, 5)), LENGTHS
    exact(Example(model.double().train(), batch, lambda model, *batch: model(*batch)), **settings)


@pairs(packed=[False, True], settings=SETTINGS, kind=KINDS)
def test_every_kind(kind, settings, packed) -> None:
    assert_exact(recurrent(kind, packed, **settings), slow=PACKED if packed else None)


def test_biases_projections_other_activations_and_dropout() -> None:
    model = recurrent(nn.LSTM)
    biases_only(model, "head")
    assert_exact(model)
    assert_exact(recurrent(nn.LSTM, proj_size=3, bidirectional=True))
    assert_exact(recurrent(nn.RNN, nonlinearity="relu"))
    assert_exact(recurrent(nn.LSTM, num_layers=3, dropout=1.0, batch_first=True))  # between layers, not after the last


@pytest.mark.parametrize("packed", [False, True])
def test_states_that_are_learned(packed) -> None:
    model = recurrent(nn.GRU, packed, learned=True, batch_first=True, bidirectional=True)
    assert_exact(model, slow=PACKED if packed else None)


CELLS = [(nn.LSTMCell, {}), (nn.GRUCell, {}), (nn.RNNCell, {"bias": False}), (nn.RNNCell, {"nonlinearity": "relu"})]


@pytest.mark.parametrize(("cell", "start"), itertools.product(CELLS, [True, False]))
def test_cells(cell, start) -> None:
    """Steps by a cell, from zeros or from a state that is learned."""
    kind, settings = cell

    def forward(m: nn.Module, ids: Tensor, lengths: Tensor) -> Tensor:
        state = None if m.start is None else m.start.expand(len(ids), -1)
        state = (state, state) if state is not None and kind is nn.LSTMCell else state
        for token in m.inner(ids).unbind(1):
            state = m.cell(token, state)
        return sum(each.square().sum(1) for each in (state if isinstance(state, tuple) else (state,)))

    learned = nn.Parameter(torch.randn(1, 6)) if start else None
    assert_exact(Built(forward, inner=nn.Embedding(9, 4), cell=kind(4, 6, **settings), start=learned))


MODES = [("lstm", nn.LSTM), ("gru", nn.GRU), ("rnn_tanh", nn.RNN)]


@pytest.mark.parametrize(("mode", "kind"), MODES)
def test_steps_one_by_one_give_what_the_kernels_give(mode, kind) -> None:
    layer, x, state = kind(4, 6, 2, bidirectional=True), torch.randn(5, 7, 4), torch.randn(4, 7, 6)
    settings = layer._flat_weights, True, 2, 0.0, True, True
    given = x, (state, state.flip(0)) if mode == "lstm" else state, *settings, False
    torch.testing.assert_close(unrolled(mode, *given), getattr(torch, mode)(*given))
    assert unrolled(mode, x, LENGTHS, state, *settings) is NotImplemented  # a packed sequence


class Doubled(nn.LSTM):
    def forward(self, input: Tensor, hx=None):
        return super().forward(2 * input, hx)


def test_a_forward_of_its_own_counts() -> None:
    model = nn.ModuleList([Doubled(4, 6)]).double().train()
    exact(Example(model, (torch.randn(5, 3, 4).double(),), lambda model, x: model[0](x.transpose(0, 1))[0].sum((0, 2))))


def test_checkpointing() -> None:
    """Layers are called again in the backward pass."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = checkpoint(lambda x: m.layer(x)[0], x, use_reentrant=False)
        return checkpoint(m.attention, h.transpose(0, 1), use_reentrant=False).transpose(0, 1).square().sum((1, 2))

    layers = {"layer": nn.LSTM(4, 8, batch_first=True), "attention": nn.TransformerEncoderLayer(8, 2, 8, 0.0)}
    model = nn.Sequential(nn.Linear(4, 4), Built(forward, **layers)).double().train()
    model[1].attention.requires_grad_(False).self_attn.requires_grad_(True)
    exact(Example(model, (torch.randn(7, 5, 4).double(),), lambda model, x: model(x)))
