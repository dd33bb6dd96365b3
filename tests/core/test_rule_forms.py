"""Each rule, in the forms in which a model may call it: a record gets the loss and gradient that it has alone."""

import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import Built

from hyfreedp.gradients import GradientEngine, NoClipping

FORMS = {  # of tokens x (1, T, 6): with fewer dimensions, with more, and with several rows of a record
    "batch": lambda x: x,
    "no batch": lambda x: x[0],
    "one token": lambda x: x[0, 0],
    "more dimensions": lambda x: x[None, None],
    "rows": lambda x: torch.cat([x, 2 * x, -x]),
    "expanded": lambda x: x.expand(4, *x.shape[1:]),
}


def parameter(*shape):
    return nn.Parameter(torch.randn(shape, dtype=torch.float64))


def attention(pick, tokens):
    as_heads = {**FORMS, "one head": lambda h: h[:, :1]}
    del as_heads["rows"]  # three do not broadcast with the four of "expanded"
    forms = [as_heads[pick(*as_heads)] for _ in range(3)]
    mask = parameter(*pick((tokens, tokens), (1, tokens, tokens), (2, tokens, tokens), (1, 2, tokens, tokens)))
    masked = pick(True, False)

    def call(m, x):
        h = (x @ m.weight).unflatten(2, (2, 3)).transpose(1, 2)  # (1, 2 heads, T, 3)
        return F.scaled_dot_product_attention(*(form(h) for form in forms), attn_mask=m.mask if masked else None)

    return call, {"weight": parameter(6, 6), "mask": mask}


def linear(pick, tokens):
    form, function = FORMS[pick(*FORMS)], pick(lambda m, x: F.linear(x, m.weight, m.bias), lambda m, x: x @ m.weight.T)
    return lambda m, x: function(m, form(x)), {"weight": parameter(4, 6), "bias": parameter(4)}


def layer_norm(pick, tokens):
    form, shape = FORMS[pick("batch", "no batch", "rows", "more dimensions")], pick((6,), (tokens, 6))
    parts = {"matrix": parameter(6, 6), "scale": parameter(*shape), "shift": parameter(*shape)}
    return lambda m, x: F.layer_norm(form(x @ m.matrix), shape, m.scale, m.shift), parts


def group_norm(pick, tokens):
    form, groups = FORMS[pick("batch", "rows")], pick(1, 2, 3)
    parts = {"matrix": parameter(6, 6), "scale": parameter(6), "shift": parameter(6)}
    return lambda m, x: F.group_norm(form((x @ m.matrix).transpose(1, 2)), groups, m.scale, m.shift), parts


def convolution(pick, tokens):
    form, groups, stride = FORMS[pick("batch", "no batch", "rows")], pick(1, 2), pick(1, 2)
    if pick(True, False):
        parts, more = {"weight": parameter(6, 4 // groups, 2), "bias": parameter(4)}, pick(0, stride - 1)
        return lambda m, x: F.conv_transpose1d(form(x.mT), m.weight, m.bias, stride, 0, more, groups), parts
    padding = pick(1, "same") if stride == 1 else 1
    parts = {"weight": parameter(4, 6 // groups, 3), "bias": parameter(4)}
    return lambda m, x: F.conv1d(form(x.mT), m.weight, m.bias, stride, padding, 1, groups), parts


def embedding(pick, tokens):
    form, padding = FORMS[pick("batch", "no batch", "one token", "rows")], pick(None, 0, -1)
    table = pick(lambda m, x: m.table, lambda m, x: m.table * (1 + x.mean()))
    return lambda m, x: F.embedding((3 * form(x)).long().abs() % 5, table(m, x), padding), {"table": parameter(5, 3)}


def recurrent(pick, tokens):
    first, form = pick(True, False), pick("batch", "no batch")
    options = {"num_layers": pick(1, 2), "bidirectional": pick(True, False), "batch_first": first}
    layer = pick(nn.LSTM, nn.GRU, nn.RNN)(6, 3, **options).double()

    def call(m, x):
        x = x * m.scale
        output, end = m.layer(FORMS[form](x) if first or form == "no batch" else x.transpose(0, 1))
        return output.sum() + sum(state.square().sum() for state in (end if isinstance(end, tuple) else (end,)))

    return call, {"layer": layer, "scale": parameter(1)}


def cross_entropy(pick, tokens):
    reduction, smoothing = pick("mean", "sum", "none"), pick(0.0, 0.1)
    options = {"reduction": reduction, "label_smoothing": smoothing}

    def call(m, x):
        logits, labels = x @ m.weight, (3 * x[..., 0]).long().abs() % 4
        return F.cross_entropy(logits[0], labels[0], **options) + F.cross_entropy(logits.mT, labels, **options)

    return call, {"weight": parameter(6, 4)}


RULES = [attention, linear, layer_norm, group_norm, convolution, embedding, recurrent, cross_entropy]


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(3, 12))])
@pytest.mark.parametrize("rule", RULES)
def test_a_record_gets_what_it_has_alone(rule, seed):
    chance, tokens = random.Random(f"{rule.__name__} {seed}"), 3
    torch.manual_seed(seed)
    call, parts = rule(lambda *choices: chance.choice(choices), tokens)
    model, x = Built(call, **parts), torch.randn(3, tokens, 6, dtype=torch.float64)
    parameters, engine = [*model.parameters()], GradientEngine(model, NoClipping())

    def loss(record):
        y = model(record)
        return (y * torch.arange(1.0, 1 + y.numel()).cos().view(y.shape)).sum().tanh()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one says that records are computed one at a time
        for place, weights in enumerate(torch.eye(3, dtype=torch.float64)):
            sums, losses, _ = engine.clipped_sums(loss, x, weights)
            alone = loss(x[place : place + 1])
            gradients = torch.autograd.grad(alone, parameters, allow_unused=True, materialize_grads=True)
            torch.testing.assert_close(losses[place].double(), alone.detach())
            torch.testing.assert_close([sums[p].double() for p in parameters], [*gradients], rtol=1e-6, atol=1e-8)
