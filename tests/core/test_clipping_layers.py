"""PyTorch's own attention and recurrent layers, which use their weights without calling a layer that shows them."""

import pytest
import torch
from cases import each
from models import Example, assert_exact, biases_only
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from twins import Built

# -- attention, which may have its samples in dimension 1 --------------------------------------------------------------


def attention(
    batch_first: bool = True, kind: str = "self", need_weights: bool = True, kdim: int = 8, **settings
) -> nn.Module:
    """Attention to itself, to a memory, or to keys and values of their own; with its weights in the output."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.inner(x)
        keys = h if kind == "self" else m.memory(x[:, :3]).tanh()
        padding = torch.cat([torch.zeros_like(x[:, :1, 0], dtype=torch.bool), x[:, 1 : keys.shape[1], 0] > 1], 1)
        mask = torch.ones(5, keys.shape[1], dtype=torch.bool).triu(1)
        if not batch_first:
            h, keys = (h, h) if keys is h else (h, keys.transpose(0, 1))
            h = h.transpose(0, 1)
            keys = h if kind == "self" else keys
        values = keys.flip(2) if kind == "three" else keys
        average = kind != "memory"
        output, weights = m.attention(h, keys, values, padding, need_weights, mask, average_attn_weights=average)
        output = output if batch_first else output.transpose(0, 1)
        assert (weights is not None) == need_weights
        shares = 0 if weights is None else weights.square().flatten(1).sum(1)
        return m.head(output).tanh().sum((1, 2)) + shares

    parts = {"inner": nn.Linear(4, 8), "memory": nn.Linear(4, kdim), "head": nn.Linear(8, 3)}
    layer = nn.MultiheadAttention(8, 2, batch_first=batch_first, kdim=kdim, vdim=kdim, **settings)
    return Built(forward, **parts, attention=layer)


ATTENTIONS = [{}, {"need_weights": False}, {"kind": "memory"}, {"kind": "three", "need_weights": False}]
ATTENTIONS += [{"kind": "memory", "kdim": 6}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}]


def example_of(model: nn.Module) -> Example:
    return Example(model.double().train(), (torch.randn(7, 5, 4).double(),), lambda model, x: model(x))


@pytest.mark.parametrize("settings", ATTENTIONS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_every_kind_of_call_of_attention_is_exact(settings, batch_first) -> None:
    assert_exact(example_of(attention(batch_first, **settings)))


@each(need_weights=[True, False], batch_first=[True, False, False, True], heads=[(), (2,), (), (2,)])
def test_queries_and_masks_that_are_learned_are_exact(need_weights, batch_first, heads) -> None:
    """Learned queries attend to the samples, with a trained mask of shape (3, 5) or (2, 3, 5)."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        queries = m.queries.unsqueeze(0 if batch_first else 1)
        queries = queries.expand(*((len(x), -1, -1) if batch_first else (-1, len(x), -1)))
        h = m.inner(x) if batch_first else m.inner(x).transpose(0, 1)
        mask = m.mask.repeat(len(x), 1, 1) if heads else m.mask
        output, _ = m.attention(queries, h, h, attn_mask=mask, need_weights=need_weights)
        return m.head(output if batch_first else output.transpose(0, 1)).tanh().sum((1, 2))

    numbers = {"queries": nn.Parameter(torch.randn(3, 8)), "mask": nn.Parameter(torch.randn(*heads, 3, 5))}
    layers = {"inner": nn.Linear(4, 8), "head": nn.Linear(8, 3)}
    layers["attention"] = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    assert_exact(example_of(Built(forward, **numbers, **layers)))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
@each(norm_first=[True, False], trained=["full", "biases"])
def test_a_transformer_is_exact(norm_first, trained) -> None:
    """PyTorch's encoder and decoder with its own layers."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        mask, h = nn.Transformer.generate_square_subsequent_mask(5).to(x), m.inner(x)
        h = m.decoder(h.flip(1), m.encoder(h, mask, is_causal=True), tgt_mask=mask)
        return m.head(h).tanh().sum((1, 2))

    settings = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, **settings), 2)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, **settings), 1)
    layers = {"inner": nn.Linear(4, 8), "head": nn.Linear(8, 3), "encoder": encoder, "decoder": decoder}
    example = example_of(Built(forward, **layers))
    if trained == "biases":
        biases_only(example.model, "head")
    assert_exact(example)


# -- LSTM, GRU and RNN, which are unrolled -----------------------------------------------------------------------------

PACKED = "_pack_padded_sequence"
LENGTHS = torch.tensor([3, 5, 1, 5, 2, 4, 5])


def recurrent(kind, packed: bool = False, learned: bool = False, **settings) -> nn.Module:
    """Reads tokens, packed or not, from states of its own or from zeros; outputs and last states count."""

    def forward(m: nn.Module, ids: Tensor, lengths: Tensor) -> Tensor:
        first = m.layer.batch_first
        x = m.inner(ids) if first else m.inner(ids).transpose(0, 1)
        if packed:
            x = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        state = m.start.expand(-1, len(ids), -1) if learned else None
        output, last = m.layer(x, (state, state.flip(0)) if learned and kind is nn.LSTM else state)
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


def reading(model: nn.Module) -> Example:
    batch = torch.randint(9, (7, 5)), LENGTHS
    return Example(model.double().train(), batch, lambda model, *batch: model(*batch))


SETTINGS = [{"batch_first": True, "num_layers": 2, "bidirectional": True}, {"num_layers": 2, "bias": False}]
LAYERS = [
    *[(k, s | {"packed": p}) for k in (nn.LSTM, nn.GRU, nn.RNN) for s in SETTINGS for p in (False, True)],
    (nn.LSTM, {"proj_size": 3, "bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
    (nn.LSTM, {"num_layers": 3, "dropout": 1.0, "batch_first": True}),  # between layers, not after the last
    (nn.GRU, {"learned": True, "batch_first": True, "bidirectional": True}),
    (nn.LSTM, {"learned": True, "num_layers": 2}),
]


@pytest.mark.parametrize(("kind", "settings"), LAYERS)
def test_recurrent_layers_are_exact_also_with_packed_sequences(kind, settings) -> None:
    assert_exact(reading(recurrent(kind, **settings)), slow=PACKED if settings.get("packed") else None)


CELLS = [(nn.LSTMCell, {}), (nn.GRUCell, {}), (nn.RNNCell, {"bias": False}), (nn.RNNCell, {"nonlinearity": "relu"})]


@each(cell=CELLS, start=[True, False])
def test_recurrent_cells_are_exact(cell, start) -> None:
    """Steps by a cell, from zeros or from a state that is learned."""
    kind, settings = cell

    def forward(m: nn.Module, ids: Tensor, lengths: Tensor) -> Tensor:
        state = None if m.start is None else m.start.expand(len(ids), -1)
        state = (state, state) if state is not None and kind is nn.LSTMCell else state
        for token in m.inner(ids).unbind(1):
            state = m.cell(token, state)
        return sum(each.square().sum(1) for each in (state if isinstance(state, tuple) else (state,)))

    learned = nn.Parameter(torch.randn(1, 6)) if start else None
    assert_exact(reading(Built(forward, inner=nn.Embedding(9, 4), cell=kind(4, 6, **settings), start=learned)))
