"""PyTorch's own attention, which uses its projections without calling them and moves samples to dimension 1."""

import itertools
from functools import partial

import pytest
import torch
from cases import pairs
from models import Example, assert_exact, biases_only
from torch import Tensor, nn
from twins import Built

from hyfreedp.gradients import AutomaticClipping, make_engine


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


SETTINGS = [
    {},
    {"need_weights": False},
    {"kind": "memory"},
    {"kind": "three", "need_weights": False},
    {"kind": "memory", "kdim": 6},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
]


def example_of(model: nn.Module) -> Example:
    return Example(model.double().train(), (torch.randn(7, 5, 4).double(),), lambda model, x: model(x))


@pytest.mark.parametrize(("batch_first", "settings"), itertools.product([True, False], SETTINGS))
def test_every_kind_of_call(settings, batch_first) -> None:
    assert_exact(example_of(attention(batch_first, **settings)))


@pairs(need_weights=[True, False], batch_first=[True, False], heads=[(), (2,)])
def test_queries_and_masks_that_are_learned(need_weights, batch_first, heads) -> None:
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


def transformer(norm_first: bool, dropout: float = 0.0) -> nn.Module:
    """PyTorch's encoder and decoder with its own layers."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(5).to(x)
        h = m.inner(x)
        h = m.decoder(h.flip(1), m.encoder(h, mask, is_causal=True), tgt_mask=mask)
        return m.head(h).tanh().sum((1, 2))

    settings = {"dropout": dropout, "batch_first": True, "norm_first": norm_first}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, **settings), 2)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, **settings), 1)
    return Built(forward, inner=nn.Linear(4, 8), head=nn.Linear(8, 3), encoder=encoder, decoder=decoder)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
@pytest.mark.parametrize(("trained", "norm_first"), itertools.product(["full", "biases"], [True, False]))
def test_a_transformer(norm_first, trained) -> None:
    example = example_of(transformer(norm_first))
    if trained == "biases":
        biases_only(example.model, "head")
    assert_exact(example)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
@pytest.mark.parametrize(
    "build", [lambda **p: attention(need_weights=False, **p), attention, partial(transformer, True)]
)
def test_dropout_is_drawn_anew_for_each_sample(build) -> None:
    """Equal samples have other losses, and the same as a look's; what drops all is exact."""
    example = example_of(build(dropout=0.4))
    engine = make_engine(example.model, AutomaticClipping())
    x, seeded = example.batch[0][:1].expand(7, -1, -1), lambda *_: torch.manual_seed(3)
    losses, _ = engine.add(example.model, x, begin=seeded)
    torch.testing.assert_close(engine.losses(example.model, x, begin=seeded), losses)
    assert len(losses.unique()) == 7
    assert_exact(example_of(build(dropout=1.0)))
