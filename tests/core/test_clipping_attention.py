"""PyTorch's own attention, which uses its projections without calling them and moves samples to dimension 1."""

import itertools
from functools import partial

import pytest
import torch
from cases import pairs, together
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
]


def example_of(model: nn.Module) -> Example:
    return Example(model.double().train(), (torch.randn(7, 5, 4).double(),), lambda model, x: model(x))


@together(*pairs(samples=[7, 5, 2], batch_first=[True, False], settings=SETTINGS).args)
def test_every_kind_of_call(settings, batch_first, samples) -> None:
    """Also where there are as many samples as tokens."""
    assert_exact(example_of(attention(batch_first, **settings)), rows=slice(0, samples))


@pytest.mark.filterwarnings("ignore:gradients are computed one sample at a time:UserWarning")
@together(*pairs(samples=[7, 3, 1], batch_first=[True, False], settings=[(True, ()), (False, (2,))]).args)
def test_queries_and_masks_that_are_learned(settings, batch_first, samples) -> None:
    """Learned queries attend to the samples, with a trained mask of shape (3, 5) or (2, 3, 5)."""
    need_weights, heads = settings

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
    example = example_of(Built(forward, **numbers, **layers))
    example.batch = (example.batch[0][:samples],)
    found = example.by_engine(make_engine(example.model, AutomaticClipping()))
    torch.testing.assert_close(found, example.clipped(), rtol=1e-9, atol=1e-12)


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
@together(("trained", "norm_first"), itertools.product(["full", "biases"], [True, False]))
def test_a_transformer(norm_first, trained) -> None:
    example = example_of(transformer(norm_first))
    if trained == "biases":
        biases_only(example.model, "head")
    assert_exact(example)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
@together(
    "build",
    [
        partial(attention, need_weights=True, dropout=0.4),
        partial(attention, need_weights=False, dropout=0.4),
        partial(transformer, True, dropout=0.4),
        partial(transformer, False, dropout=0.4),
    ],
)
def test_dropout_draws_what_it_draws_without_an_engine(build) -> None:
    """So does a pass without gradients, such as a probe's; later layers draw in the order of what they are given."""
    example = example_of(build())
    engine, state = make_engine(example.model, AutomaticClipping()), torch.get_rng_state()
    plain = example.losses()
    for _ in range(2):
        torch.set_rng_state(state)
        losses, _ = engine.add(example.model, example.batch[0])
        torch.testing.assert_close(losses, plain.detach(), rtol=1e-12, atol=1e-12)
        torch.set_rng_state(state)
        torch.testing.assert_close(engine.losses(example.model, example.batch[0]), losses, rtol=1e-12, atol=1e-12)
    assert engine.slow is None


@together("settings", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_tokens_that_are_added_are_slow(settings) -> None:
    assert_exact(example_of(attention(**settings)), slow="MultiheadAttention|Linear")
