"""PyTorch's own LSTM, GRU and RNN, whose kernels show no weight at work."""

import copy

import pytest
import torch
from cases import each, pairs, together
from models import Example, biases_only
from models import assert_exact as exact
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from twins import Built

from hyfreedp.gradients import AutomaticClipping, make_engine
from hyfreedp.gradients.recurrent import unrolled

KINDS = [nn.LSTM, nn.GRU, nn.RNN]
SETTINGS = [
    {"batch_first": True},
    {},
    {"batch_first": True, "num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "bias": False},
]
SLOW = "Pack|no rule covers what (LSTM|GRU|RNN)"  # packed sequences go to torch's kernels
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


def assert_exact(model: nn.Module, samples: int = 7, **settings) -> None:
    batch = torch.randint(9, (7, 5))[:samples], LENGTHS[:samples]
    exact(Example(model.double().train(), batch, lambda model, *batch: model(*batch)), **settings)


@together(*pairs(samples=[7, 5, 2], packed=[False, True], settings=SETTINGS, kind=KINDS).args)
def test_every_kind(kind, settings, packed, samples) -> None:
    """Norms and clipped sum of a loop over samples; also with as many samples as tokens, or one."""
    assert_exact(recurrent(kind, packed, **settings), samples, slow=SLOW if packed else None)


def test_biases_projections_and_other_activations() -> None:
    model = recurrent(nn.LSTM)
    biases_only(model, "head")
    assert_exact(model)
    assert_exact(recurrent(nn.LSTM, proj_size=3, bidirectional=True))
    assert_exact(recurrent(nn.RNN, nonlinearity="relu"))


@together("packed", [False, True])
def test_states_that_are_learned(packed) -> None:
    model = recurrent(nn.GRU, packed, learned=True, batch_first=True, bidirectional=True)
    assert_exact(model, slow=SLOW if packed else None)


CELLS = [(nn.LSTMCell, {}), (nn.GRUCell, {}), (nn.RNNCell, {"bias": False}), (nn.RNNCell, {"nonlinearity": "relu"})]


@together(*pairs(cell=CELLS, start=[True, False], samples=[7, 2]).args)
def test_cells(cell, start, samples) -> None:
    """Steps by a cell, from zeros or from a state that is learned."""
    kind, settings = cell

    def forward(m: nn.Module, ids: Tensor, lengths: Tensor) -> Tensor:
        state = None if m.start is None else m.start.expand(len(ids), -1)
        state = (state, state) if state is not None and kind is nn.LSTMCell else state
        for token in m.inner(ids).unbind(1):
            state = m.cell(token, state)
        return sum(each.square().sum(1) for each in (state if isinstance(state, tuple) else (state,)))

    learned = nn.Parameter(torch.randn(1, 6)) if start else None
    assert_exact(Built(forward, inner=nn.Embedding(9, 4), cell=kind(4, 6, **settings), start=learned), samples)


@together(*each(sort=[True, False], kind=KINDS).args)
def test_steps_one_by_one_give_what_the_kernels_give(kind, sort) -> None:
    """Packed sequences too, part by part."""
    layer, x = kind(4, 6, 2, bidirectional=True).double(), torch.randn(5, 7, 4).double()
    lengths = LENGTHS.sort(descending=True).values if sort else LENGTHS
    packed = pack_padded_sequence(x, lengths, enforce_sorted=sort)
    state = torch.randn(4, 7, 6).double()
    state = (state, state.flip(0)) if kind is nn.LSTM else state
    for given in (x, packed):
        for start in (None, state):
            (output, last), (expected, end) = unrolled(layer, given, start), layer(given, start)
            parts = (output, expected) if given is x else (tuple(output), tuple(expected))  # a packed sequence has four
            torch.testing.assert_close(last, end)
            torch.testing.assert_close(*parts)


def test_dropout_between_layers_is_slow() -> None:
    """Its random numbers are PyTorch's own, and those of a probe are those of the gradient."""
    model = recurrent(nn.LSTM, num_layers=3, dropout=0.5, batch_first=True).double().train()
    example = Example(model, (torch.randint(9, (4, 5)), LENGTHS[:4]), lambda model, *batch: model(*batch))
    engine = make_engine(example.model, AutomaticClipping())
    with pytest.warns(match="what LSTM does with the parameter 'layer.weight"):
        example.by_engine(engine)
    torch.manual_seed(1)
    losses, norms = engine.add(lambda batch: example.model(*batch), example.batch)
    torch.manual_seed(1)
    for i in range(4):
        (loss,) = example.losses(slice(i, i + 1))
        gradients = torch.autograd.grad(loss, example.trainable)
        torch.testing.assert_close(losses[i], loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(norms[i], torch.cat([g.flatten() for g in gradients]).norm(), rtol=1e-9, atol=0)
    torch.manual_seed(1)
    torch.testing.assert_close(engine.losses(lambda batch: example.model(*batch), example.batch), losses)


@together(*each(shape=[(1, 1, 6), (5, 6), (1, 5, 4)], kind=KINDS).args)
def test_states_of_another_shape_are_refused_as_by_pytorch(kind, shape) -> None:
    """Those of one sample would be every sample's, and those without a layer's dimension the first sample's."""
    state = torch.zeros(shape)
    with pytest.raises(RuntimeError, match="Expected hidden"):
        unrolled(kind(4, 6), torch.randn(3, 5, 4), (state, state) if kind is nn.LSTM else state)


class Doubled(nn.LSTM):
    def forward(self, input: Tensor, hx=None):
        return super().forward(2 * input, hx)


@together("patched", [False, True])
def test_a_forward_of_its_own_is_not_replaced(patched) -> None:
    """What a subclass, or an instance, computes besides would be left out of the training."""
    layer = Doubled(4, 6)
    if patched:
        layer = nn.LSTM(4, 6)
        layer.forward = lambda input, hx=None: nn.LSTM.forward(layer, 2 * input, hx)
    model = nn.ModuleList([layer]).double().train()
    example = Example(
        model, (torch.randn(5, 3, 4).double(),), lambda model, x: model[0](x.mT.mT.transpose(0, 1))[0].sum((0, 2))
    )
    exact(example, slow=f"{type(layer).__name__} does with")


def test_checkpointing_and_copies() -> None:
    """Layers are called again in the backward pass; a copy of the model is a plain one."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = checkpoint(lambda x: m.layer(x)[0], x, use_reentrant=False)
        return checkpoint(m.attention, h.transpose(0, 1), use_reentrant=False).transpose(0, 1).square().sum((1, 2))

    layers = {"layer": nn.LSTM(4, 8, batch_first=True), "attention": nn.TransformerEncoderLayer(8, 2, 8, 0.0)}
    model = nn.Sequential(nn.Linear(4, 4), Built(forward, **layers)).double().train()
    model[1].attention.requires_grad_(False).self_attn.requires_grad_(True)
    example = Example(model, (torch.randn(7, 5, 4).double(),), lambda model, x: model(x))
    exact(example)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(*example.batch), example.losses(), rtol=1e-12, atol=1e-12)
    assert "forward" not in vars(copied[1].layer) and "forward" not in vars(model[1].layer)
