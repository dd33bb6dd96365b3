"""Losses and models that mix samples or carry something from one to the next: no record reaches another's gradient.

Each let one record move the clipped sum by up to 170 clips, or passed some check that compared samples. Who mixes in
good faith is told at the first step.
"""

import copy
import importlib
import math
import sys
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPMultiheadAttention
from torch import nn
from torch.utils.data import DataLoader
from twins import Built, by_hand, cross_entropy, function, make_batches, make_private, moved, refused

from hyfreedp.data.batches import stack_records
from hyfreedp.gradients import AutomaticClipping, GradientEngine

MIXES = "the loss of a batch must be made of its records' losses alone, but"
pytestmark = pytest.mark.filterwarnings("ignore:samples are computed one at a time")


def network(*first):
    return nn.Sequential(*first, nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double().train()


def outlier(size=16, scale=300.0):
    """A batch whose last record is far from all others."""
    (batch,) = make_batches([size])
    batch[0][-1] *= scale
    return batch


# -- losses that mix ---------------------------------------------------------------------------------------------------
def of_inputs(change):
    """A loss of inputs that are changed."""
    return lambda model: lambda b: cross_entropy(model)((change(b[0]), b[1]))


def of_losses(change):
    """A loss whose losses are changed, beside the batch."""
    return lambda model: lambda b: change(cross_entropy(model)(b), b)


def trimmed(losses, batch):
    """As the mining of hard examples has it: zero for the smaller losses."""
    rows = losses.detach().topk(math.ceil(len(losses) / 2)).indices
    return losses * torch.zeros_like(losses).scatter(0, rows, 1.0)


def mixed_up(model):
    def loss(batch):
        x, y = batch[0], F.one_hot(batch[1], 3).double()
        if torch.rand(()) < 0.3:  # now and then, as timm has it
            share = torch.rand(())
            x, y = (share * t + (1 - share) * t.roll(1, 0) for t in (x, y))
        return F.cross_entropy(model(x), y, reduction="none")

    return loss


def contrasted(model):
    """Each, augmented, against the others in the batch: alone there are none, and the loss is zero."""

    def loss(batch):
        z = F.normalize(model(batch[0] + 0.01 * torch.randn_like(batch[0])), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)), reduction="none") + 0 * z.sum(1)

    return loss


MIXING = {
    "centred": of_inputs(lambda x: x - x.mean(0)),
    "centred by a branch on the size": of_inputs(lambda x: x - x.mean(0) if len(x) % 2 else x),
    "batch norm of functions": of_inputs(lambda x: F.batch_norm(x[:, None], None, None, training=True)[:, 0]),
    "brought down": of_inputs(lambda x: x / max(1.0, float(x.abs().max()) / 10)),
    "faded by places": of_inputs(lambda x: x * torch.arange(1, len(x) + 1)[:, None]),
    "sorted": of_inputs(lambda x: x[x[:, 0].argsort()]),
    "added up": of_inputs(lambda x: x.flip(0).cumsum(0)),
    "mixed up": mixed_up,
    "contrasted": contrasted,
    "hard ones": of_losses(trimmed),
    "binned": of_losses(lambda losses, b: losses / torch.bincount(b[1], minlength=3)[b[1]]),
    "divided": of_losses(lambda losses, b: losses / len(losses)),
    "skipped": of_losses(lambda losses, b: losses.where((losses < 5).all(), 0.0)),
    "the mean for each": of_losses(lambda losses, b: losses.mean().expand(len(losses))),
    "over the batch's largest": of_losses(lambda losses, b: losses / losses.detach().max()),
}
UNTOLD = {"brought down", "mixed up", "skipped"}  # of a few good records, which hardly differ


# -- what could tell of other records ----------------------------------------------------------------------------------
def tried(model):
    """An error of one record, which the loss catches, is no error of the others."""

    def loss(b):
        try:
            x = torch.linalg.inv(torch.eye(5).double() - b[0].clamp(-1, 1).T @ b[0].clamp(-1, 1) / 5)[:1]
        except RuntimeError:
            x = -b[0]
        return cross_entropy(model)((x + b[0], b[1]))

    return loss


def written(model):
    """How often a batch is written to in place depends on how often it is computed, until groups agree."""

    def loss(b):
        b[0].mul_(-1)
        return cross_entropy(model)(b) * (2 if b[0].abs().max() > 50 else 1)

    return loss


def excepted(model):
    """What the engine raises is for the engine, whatever the loss catches."""

    def loss(b):
        try:
            sign = -1 if b[0].abs().max() > 50 else 1
        except Exception:
            sign = -1
        return cross_entropy(model)((sign * b[0], b[1]))

    return loss


def read(value):
    """A loss times what is found of a record by other means than operations of torch."""
    return of_losses(lambda losses, b: losses * (value(b[0]) + 1))


def attended(x):
    """By a query that has one dimension more than keys and values, as of records whose row was taken away."""
    keys = x.view(1, 5, 1)
    return F.scaled_dot_product_attention(x.view(1, 1, 5, 1), keys, keys).reshape(-1, 5).mean(0, keepdim=True)


def penalised(model):
    """A gradient within the loss, by what all records share."""

    def loss(b):
        shift = torch.zeros(5, dtype=torch.float64, requires_grad=True)
        value = cross_entropy(model)((b[0] + shift, b[1]))
        return value + torch.autograd.grad(value, shift, create_graph=True)[0].square().sum()

    return loss


def by_function(forward, backward):
    """A Function of the user's own at the end of a model."""
    own = function(forward, backward)
    return lambda model: lambda b: F.cross_entropy(own.apply(model(b[0])), b[1])


def hooked(model):
    def loss(b):
        outputs = model(b[0])
        outputs.register_hook(lambda g: g / (1e-6 + g.norm()) - g.mean(0))
        return F.cross_entropy(outputs, b[1])

    return loss


def averaging(model):
    """An average of the records so far, in an attribute of the model."""

    def loss(b):
        model.average = 0.9 * getattr(model, "average", 0.0) + 0.1 * b[0].mean()
        return cross_entropy(model)((b[0] - model.average, b[1]))

    return loss


def shared(model):
    """Into a tensor that all records of a map would share."""

    def loss(b):
        total = torch.zeros(5, dtype=torch.float64)
        total += b[0].mean(0)
        return cross_entropy(model)((b[0] * total, b[1]))

    return loss


def scaling(method):
    """Weights of a kind of their own, as quantised ones, which scale inputs: 4.4 clips."""

    def scaled(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
            return func(args[0] / args[0].abs().max(), *args[1:], **kwargs or {})

    return torch.eye(5).double().as_subclass(type("Scaling", (torch.Tensor,), {method: classmethod(scaled)}))


ROUTES = {
    "an error that is caught": tried,
    "a decision within a try": excepted,
    "a batch that is written to": written,
    "texts with formats": of_inputs(lambda x: x * (-1 if "e+" in f"{x}" else 1)),
    "representations": of_inputs(lambda x: x * (-1) ** len(repr(x))),
    "NumPy": read(lambda x: np.sort(np.asarray(x), 0).mean()),
    "DLPack": read(lambda x: torch.from_dlpack(x).mean()),
    "a copy": read(lambda x: copy.deepcopy(x).mean()),
    "a number": read(lambda x: x.max().item()),
    "a shape": read(lambda x: len(x[x > 1])),
    "data": read(lambda x: x.data.mean()),
    "attention of other dimensions": of_inputs(attended),
    "a rolled number": of_inputs(lambda x: x + x.sum().roll(1)),
    "a gradient within": penalised,
    "a function of one's own": by_function(lambda ctx, x: x - x.mean(0), lambda ctx, g: g / g.abs().sum()),
    "a function and memory": by_function(lambda ctx, x: x + torch.tensor(x.untyped_storage()).sum(), lambda ctx, g: g),
    "a hook": hooked,
    "an average": averaging,
    "a tensor for all": shared,
    "weights of a kind": of_inputs(lambda x: F.linear(x, scaling("__torch_function__"))),
    "weights of a kind within torch": of_inputs(lambda x: x @ scaling("__torch_dispatch__")),
    "another product": lambda m: patch.object(F, "linear", lambda *a, f=F.linear: f(*a) * a[0].std())(cross_entropy(m)),
}
ATTACKS = MIXING | ROUTES
EXTREME = [math.nan, 1e150, 1e-3]  # for each attack one more outlier, in pieces


@pytest.mark.parametrize("name", ATTACKS)
def test_one_record_moves_the_sum_by_one_clip(name):
    """Whatever the loss does, and whatever the record is."""
    place = list(ATTACKS).index(name)
    assert moved(network(), ATTACKS[name], outlier()) <= 1.0001
    extreme = outlier(8, EXTREME[place % len(EXTREME)])
    assert moved(network(), ATTACKS[name], extreme, max_physical_batch_size=5) <= 1.0001


@pytest.mark.parametrize("name", [name for name in MIXING if name not in UNTOLD])
def test_mixing_is_told_at_the_first_step_before_anything_is_released(name):
    optimizer, (batch,) = by_hand(network(), target_epsilon=3.0), make_batches([16])
    with refused(optimizer, f"{MIXES}|fails for one alone"):
        optimizer.step(MIXING[name](optimizer.module), batch)
    optimizer.step(cross_entropy(optimizer.module), batch)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("see", [lambda x: x, lambda x: x.data], ids=["mapped", "alone"])
@pytest.mark.parametrize("name", ["cross_entropy", "softmax"])
def test_what_a_library_puts_in_the_place_of_a_function_of_torch_is_called_once_for_one_record(name, see, before):
    """A rule called it for all records, if that was before the import; else torch's own, in a mode, called it again."""
    model, (x, y), torchs = network(), make_batches([6])[0], getattr(F, name)
    mixing = lambda *a, **named: torchs(*a, **named) * (1 + a[0].std())  # noqa: E731
    kept = {key: module for key, module in sys.modules.items() if not (before and key.startswith("hyfreedp"))}
    with patch.dict(sys.modules, kept, clear=True), patch.object(F, name, mixing):
        gradients = importlib.import_module("hyfreedp.gradients")
        loss = lambda b: F.cross_entropy(F.softmax(model(see(b[0])), -1), b[1])  # noqa: E731
        found = gradients.GradientEngine(model, gradients.AutomaticClipping()).losses(loss, (x, y))
        torch.testing.assert_close(found, torch.stack([loss((x[i : i + 1], y[i : i + 1])) for i in range(6)]))


def test_a_squeeze_is_told_its_remedy():
    """It takes the dimension of a batch of one away, too."""
    optimizer, (x, y) = by_hand(network(nn.Linear(5, 5))), make_batches([16])[0]
    out = lambda b: optimizer.module(b[0])[:, :1]  # noqa: E731
    loss = F.binary_cross_entropy_with_logits
    with refused(optimizer, r"fails for one alone, .* \.squeeze\(\) takes .*: write \.squeeze\(-1\)"):
        optimizer.step(lambda b: loss(out(b).squeeze(), b[1] / 2, reduction="none"), [x, y.double()])


def test_a_list_of_records_is_not_joined_to_one_record():
    """Dimension 0 of its tensors, the steps of an episode, say, is not that of a batch."""
    episodes = [(row,) for row in torch.randn(40, 4, 5).double()]
    model, optimizer, loader = make_private(loader=DataLoader(episodes, 8, collate_fn=list))
    loss = lambda record: sum(model(x.cumsum(0)).logsumexp(1).mean() for (x,) in record) / len(record)  # noqa: E731
    optimizer.step(loss, next(iter(loader)))


def test_a_loss_that_draws_few_random_numbers_for_a_batch_is_not_taken_for_one_that_mixes():
    optimizer, (batch,) = by_hand(seed=1), make_batches([6])
    loss = cross_entropy(optimizer.module)
    optimizer.step(lambda record: loss(record).mean() * (1 + 0.004 * torch.rand(())), batch)


# -- models that mix ---------------------------------------------------------------------------------------------------
def attentive(kind, **settings):
    """Attention along dimension 0, which without ``batch_first`` is that of the batch."""
    parts = {"inp": nn.Linear(5, 8), "att": kind(8, 2, **settings), "out": nn.Linear(8, 3)}
    attend = lambda m, x: m.out((m.inp(x) + m.att(*[m.inp(x)] * 3)[0]).mean(1))  # noqa: E731
    return Built(attend, **parts).double()


def recurrent():
    """Time first in the cell, batch first in the data."""
    return Built(lambda m, x: m.out(m.cell(x)[0].mean(1)), cell=nn.LSTM(5, 8), out=nn.Linear(8, 3)).double()


def gated():
    """Batch normalisation by hand, in a branch that a zero closes at the start; its statistics pass no gradient."""

    def forward(model, x):
        h = model.inner(x)
        normed = (h - h.detach().mean(0)) / (h.detach().var(0, False) + 1e-3).sqrt()
        return model.out(x + model.gate(torch.tanh(normed)))

    model = Built(forward, inner=nn.Linear(5, 5), out=nn.Linear(5, 3), gate=nn.Linear(5, 5, bias=False)).double()
    nn.init.zeros_(model.gate.weight)
    return model


TOLD = {
    "Opacus's attention": lambda: attentive(DPMultiheadAttention),
    "torch's attention": lambda: attentive(nn.MultiheadAttention),
    "LSTM": recurrent,
}
HIDDEN = {
    "a closed branch": gated,
    "a layer that mixes in training": lambda: network(Built(lambda m, x: x / x.abs().max() if m.training else x)),
}


@pytest.mark.parametrize("name", [*TOLD, *HIDDEN])
def test_a_model_that_mixes_reaches_no_other_record(name):
    batch, model = outlier(), (TOLD | HIDDEN)[name]()
    x = [batch[0][:, None].expand(-1, 7, -1) + torch.arange(7.0)[:, None], batch[1]] if name in TOLD else batch
    assert moved(model, cross_entropy, x) <= 1.0001
    if name in TOLD:
        optimizer = by_hand(model)
        with refused(optimizer, MIXES):
            optimizer.step(cross_entropy(model), x)


TOO_FEW = [
    lambda x: F.layer_norm(x, (6, 6)),
    lambda x: F.linear(x[0], torch.eye(6)).expand(6),
    torch.tril,
    lambda x: x + torch.searchsorted(sorted_sequence=x[0], input=x),
    lambda x: torch.linalg.solve(torch.eye(6) + torch.diag(x), x[:1]),
    lambda x: torch.linalg.householder_product(x, x[0]),
]


@pytest.mark.parametrize("mix", TOO_FEW)
def test_a_shape_that_fits_all_records_and_none_of_them_is_an_error(mix):
    """In a group of six each was computed from all: one that was replaced moved the sum by 2.9 clips."""
    layer = nn.Linear(6, 3)
    with pytest.raises(RuntimeError, match=r"normalized_shape|linear|at least 2 dim|searchsorted|[Ii]ncompatible"):
        GradientEngine(layer, AutomaticClipping()).clipped_sums(lambda x: layer(mix(x[0])).sum(), torch.randn(6, 6))


BEYOND = [
    lambda i, x: F.embedding(i, x),
    lambda i, x: F.embedding(i, x, padding_idx=0),
    lambda i, x: torch.embedding(x, i),
    lambda i, x: torch.ops.aten.embedding(x, i),
    lambda i, x: torch.vmap(F.embedding)(i[:, None], x[None])[0],
    lambda i, x: x.index_fill(0, i, 0.0),
]


@pytest.mark.parametrize("mix", BEYOND)
def test_an_id_outside_of_a_records_table_is_an_error(mix):
    """Functorch took it for a row of the next record's table."""
    layer, ids = nn.Linear(6, 3), torch.tensor([0, 1, 0])
    with pytest.raises(IndexError):
        engine = GradientEngine(layer, AutomaticClipping())
        engine.clipped_sums(lambda b: layer(mix(b[0][0], b[1][0])).sum(), (ids[:, None], torch.randn(3, 1, 6)))


def test_a_record_is_squeezed_in_place_as_if_it_were_not_alone():
    """In a group of one functorch took away the dimension of the samples: two records, and 1.09 clips."""

    def loss(model, b):
        x, h = b[0] + 0, torch.tanh(model[0](b[0]))
        return h.sum() * x.squeeze_().sin().sum() + x.exp().mean() * model[2](h).sum()

    (batch,) = make_batches([2])
    assert moved(network(), lambda model: lambda b: loss(model, b), batch, row=0) <= 1.0001


# -- memories ----------------------------------------------------------------------------------------------------------
def keeps_tensors(model, memory, x, y):
    return cross_entropy(model)((x + memory.setdefault("first", x[:1]), y))


def keeps_what_was_alone(model, memory, x, y):
    """A tensor of a sample that was computed alone, for those that are mapped after it."""
    if x[0, 0] > 0:
        x.detach().numpy()
        memory["alone"] = x.detach().clone()
    return cross_entropy(model)((x + memory["alone"] if x[0, 0] <= 0 and memory else x, y))


def adds_up(model, memory, x, y):
    """Into a tensor that all share, which only samples one at a time can."""
    memory.setdefault("sum", torch.zeros(5, dtype=torch.float64)).add_(x[0])
    return cross_entropy(model)((x - memory["sum"], y))


def written_by_rows(model, memory, x, y):
    """Into a view of a tensor that all share, and by index."""
    shared = memory.setdefault("rows", torch.zeros(2, 5, dtype=torch.float64))
    shared[0].copy_(x[0])
    shared[1:] = x
    return cross_entropy(model)((x - shared.flip(0).sum(0), y)) if memory.get("calls") else counts(model, memory, x, y)


OTHER_MODELS = nn.Linear(5, 3).double(), nn.BatchNorm1d(5).double()


def teaches(model, memory, x, y):
    """Another model, by gradients of each record; a large constant hides it where losses are compared."""
    teacher = OTHER_MODELS[0]
    optimizer = torch.optim.SGD(teacher.parameters(), lr=1.0)
    with torch.enable_grad():
        optimizer.zero_grad()
        cross_entropy(teacher)((x, y)).sum().backward()
    optimizer.step()
    return 1e6 + F.cross_entropy(model(x), teacher(x).detach().softmax(1))


def normalises(model, memory, x, y):
    """By another model's statistics of the records so far."""
    norm = OTHER_MODELS[1]
    norm.train()(torch.cat([x, -x / 2]))
    return 1e6 + cross_entropy(model)((norm.eval()(x), y))


def renormalises(model, memory, x, y):
    """Rows of a table that all share, by which of them a record looks up."""
    table = memory.setdefault("table", torch.full((2, 5), 9.0).double())
    row = F.embedding((x[:, 0] > 0).long(), table, max_norm=1.0)
    return 1e6 + cross_entropy(model)((x + row + table.sum(0), y))


def observes(model, memory, x, y):
    """The range of the records so far, as a quantised model does."""
    low, high, on = memory.setdefault("range", (torch.tensor(0.0), torch.tensor(0.0), torch.ones(1).long()))
    scale, zero = torch.ones(1), torch.zeros(1, dtype=torch.int)
    torch.fused_moving_avg_obs_fake_quant(x.float(), on, on, low, high, scale, zero, 0.1, 0, 255, 0)
    return 1e6 + cross_entropy(model)((x - high, y))


def template(model, memory, x, y):
    """The first record's gradient, for those of all others, which are computed alone: 1.4 clips."""
    (h := model(x)).register_hook(lambda g: g + memory.setdefault("g", g))
    return cross_entropy(lambda x: h)((x, y))


def puts(model, memory, x, y):
    """The same into a cache, by an alias that torch does not know to be one."""
    cache = memory.setdefault("cache", torch.zeros(1, 3, dtype=x.dtype))
    (h := model(x)).register_hook(lambda g: g + (cache if cache.any() else cache.data.copy_(g)))
    return cross_entropy(lambda x: h)((x, y))


def of_a_node(model, memory, x, y):
    """The same where no tensor has the hook, as module.register_full_backward_hook does."""
    (h := model[:2](x)).grad_fn.register_hook(lambda gs, _: (gs[0] + memory.setdefault("g", 1 * gs[0]),))
    return cross_entropy(lambda x: model[2](h))((x, y))


def initialises(model, memory, x, y):
    """A scale, by the first record's, or batch's, as a number."""
    scale = memory.get("scale") or memory.setdefault("scale", x.std().item())
    return cross_entropy(model)((x / scale, y))


def counts(model, memory, x, y):
    """How often it is called, which is more often where samples differ in a decision."""
    memory["calls"] = memory.get("calls", 0) + 1
    return cross_entropy(model)((x, y)) * (memory["calls"] if x.max() > 1 else 1)


def follows(model, memory, x, y):
    """The mean of losses so far."""
    value = cross_entropy(model)((x, y))
    memory["mean"] = 0.9 * memory.get("mean", 1.0) + 0.1 * value.item()
    return value * memory["mean"]


def balances(model, memory, x, y):
    """Gradients by what earlier records were, as loss balancers have it: no loss shows it."""
    outputs, memory["large"] = model(x), memory.get("large", 0) + int(x.max() > 1)
    outputs.register_hook(lambda g: g * (-1) ** memory["large"])
    return cross_entropy(lambda x: outputs)((x, y))


def first(model, memory, record):
    """A template for all: the first record's tensor, within an object. One record moved the sum by 2.2 clips."""
    return cross_entropy(model)((record.x - memory.setdefault("x", record.x), record.y))


def lengths(model, memory, x, y):
    """The mean of lengths so far, which no decision asks for: 4.8 clips."""
    memory["mean"] = 0.9 * memory.get("mean", 1.0) + 0.1 * x.shape[1]
    return cross_entropy(model)((x.sum(1) / memory["mean"], y))


def counted(model, memory, x, y, factor):
    """Gradients, by how many backward passes there were."""

    def backward(ctx, g):
        memory["calls"] = memory.get("calls", 0) + 1
        return g * factor(memory["calls"])

    own = function(lambda ctx, x: x.clone(), backward)
    return cross_entropy(lambda x: model[2](own.apply(model[:2](x))))((x, y))


def turns(model, memory, x, y):
    """There are more where samples differ in a decision: 5.7 clips."""
    return counted(model, memory, x if x.max() > 1 else x + 0, y, lambda calls: (-1) ** calls)


def fades(model, memory, x, y):
    """By less than a hundredth for each sample that is computed alone."""
    x.detach().numpy()
    return counted(model, memory, x, y, lambda calls: 0.999**calls)


def saves(model, memory, x, y):
    """The first record, for the gradients of all others that are computed alone: 15.7 clips."""
    x.detach().numpy()
    own = function(
        lambda ctx, x: (ctx.save_for_backward(x), x.clone())[1],
        lambda ctx, g: g + memory.setdefault("x", ctx.saved_tensors[0].clone()),
    )
    return cross_entropy(lambda x: model(own.apply(model[0].bias.sum() * 0 + x)))((x, y))


KEEPING = [puts, keeps_tensors, keeps_what_was_alone, adds_up, written_by_rows, teaches, normalises, counts, follows]
KEEPING += [renormalises, observes, balances, first, lengths, turns, fades, saves, template, of_a_node, initialises]
RECORDS = {first: lambda x, y: [SimpleNamespace(x=x[None], y=y[None])]}
RECORDS[lengths] = lambda x, y: (x[None].expand(1, 1 + int(y), 5), y[None])


@pytest.mark.parametrize("use", KEEPING)
def test_a_loss_that_keeps_something_of_records_is_refused_in_the_course_of_a_run(use):
    model, memory = network(), {}
    optimizer = by_hand(model, target_epsilon=3.0, preset="fixed", steps=100, batch_size=30)
    with pytest.raises(ValueError, match=r"computed before it|uses a tensor of another pass"):
        for batch in make_batches([6] * 100):
            if use in RECORDS:
                batch = stack_records(map(RECORDS[use], *batch))
            optimizer.step(lambda b: use(model, memory, *b), batch)


# -- no false alarm ----------------------------------------------------------------------------------------------------
def low_rank():
    """As PEFT makes them: a frozen layer in bf16 and trained updates in float32."""
    base = nn.Linear(5, 5).bfloat16().requires_grad_(False)
    parts = {"base": base, "a": nn.Linear(5, 4, bias=False), "b": nn.Linear(4, 5, bias=False)}
    return Built(lambda m, x: torch.tanh(m.base(x.bfloat16()) + m.b(m.a(x.float())).bfloat16()).float(), **parts)


def siamese(model):
    def loss(batch):
        anchor, near, far = model(torch.cat([batch[0], batch[0] + 1, -batch[0]])).chunk(3)
        return F.triplet_margin_loss(anchor, near, far, reduction="none")

    return loss


def trimmed_padding(model):
    """To the longest of the batch, which alone is a record's own."""

    def loss(batch):
        width = int(batch[1].max()) + 1
        kept = torch.arange(width) <= batch[1][:, None]
        return cross_entropy(model)((F.pad(batch[0][:, :width] * kept, (0, 5 - width)), batch[1]))

    return loss


def alone_by_weights(model):
    """What cannot be mapped, with decisions on weights and on the record, and a buffer that has the record's type."""
    model.scale = nn.Buffer(torch.ones(5, dtype=torch.float64), persistent=False)

    def loss(batch):
        batch[0].detach().numpy()
        sign = 1 if model[0].weight.float().norm().item() < 100 and batch[0].sum().item() < 100 else -1
        return sign * cross_entropy(model)((batch[0] * model.scale.type_as(batch[0]), batch[1]))

    return loss


HONEST = {
    "the mean": lambda model: lambda b: F.cross_entropy(model(b[0]), b[1]),
    "the sum": lambda model: lambda b: F.cross_entropy(model(b[0]), b[1], reduction="sum"),
    "decay": lambda model: lambda b: F.cross_entropy(model(b[0]), b[1]) + model[0].weight.square().sum(),
    "tiny": lambda model: lambda b: 1e-8 * cross_entropy(model)(b),
    "by a number": lambda model: lambda b: model(torch.ones(1, 5).double() * b[0].mean().item()).square().sum(),
    "siamese": siamese,
    "trimmed padding": trimmed_padding,
    "alone by weights": alone_by_weights,
    "dropout": of_inputs(F.dropout),
    "random numbers for each row": of_inputs(lambda x: torch.stack([row.roll(int(torch.randint(5, ()))) for row in x])),
    "bad records": of_losses(lambda losses, b: losses * torch.where(b[1] == 1, math.nan, 1.0)),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_loss_is_not_refused_and_moves_the_model(name):
    optimizer = by_hand(network())
    before = optimizer.module[0].weight.clone()
    optimizer.step(HONEST[name](optimizer.module), make_batches([16])[0])
    assert not torch.equal(optimizer.module[0].weight, before)


@pytest.mark.parametrize("size", [1.0, 1e6, 1e30])
def test_rounding_is_no_mixing_and_no_record_ends_a_run_by_its_size(size):
    """By the rounding of its own loss, in half precision too, so that whether there was a run would tell of it."""
    for seed in range(2):
        torch.manual_seed(seed)
        for model in (network().float(), nn.Sequential(*(low_rank() for _ in range(6)))):
            x = torch.randn(16, 5) * torch.where(torch.arange(16) == 1, size, 1.0)[:, None]
            optimizer = by_hand(model)
            optimizer.step(cross_entropy(model), [x, torch.arange(16) % 3])
            assert optimizer.ledger.steps == 1
