"""Losses and models that mix samples: no record reaches another's gradient, and who mixes in good faith is told.

Each let one record move the clipped sum by up to 50 clips, or passed some check that compared samples.
"""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPMultiheadAttention
from torch import nn
from twins import Built, by_hand, cross_entropy, flat, make_batches, moved, refused, steps

MIXES = "the loss of a batch must be made of its records' losses alone, but"


def network(*first):
    return nn.Sequential(*first, nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double().train()


def outlier(size=24, scale=300.0):
    """A batch whose last record is far from all others."""
    (batch,) = make_batches([size])
    batch[0][-1] *= scale
    return batch


def of_inputs(change):
    """A loss of inputs that are changed."""
    return lambda model: lambda b: cross_entropy(model)((change(b[0]), b[1]))


def of_losses(change):
    """A loss whose losses are changed, beside the batch."""
    return lambda model: lambda b: change(cross_entropy(model)(b), b)


def trimmed(share, largest):
    """As co-teaching and the mining of hard examples have it: zero for those of the largest, or smallest, losses."""

    def kept(losses, batch):
        rows = losses.detach().topk(math.ceil(len(losses) * (1 - share)), largest=largest).indices
        return losses * torch.zeros_like(losses).scatter(0, rows, 1.0)

    return of_losses(kept)


def mixed_up(model):
    def loss(batch):
        x, y = batch[0], F.one_hot(batch[1], 3).double()
        if torch.rand(()) < 0.3:  # now and then, as timm has it
            share = torch.rand(())
            x, y = (share * t + (1 - share) * t.roll(1, 0) for t in (x, y))
        return F.cross_entropy(model(x), y, reduction="none")

    return loss


def shifted(model):
    """A softmax by hand, which subtracts the maximum of the batch."""

    def loss(batch):
        outputs = model(batch[0])
        powers = (outputs - outputs.max()).exp()
        return -((powers + 1e-8) / (powers.sum(1, keepdim=True) + 1e-8)).gather(1, batch[1][:, None])[:, 0].log()

    return loss


def contrasted(model):
    """Each against the others in the batch: alone there are none, and the loss is zero."""

    def loss(batch):
        z = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)), reduction="none") + 0 * z.sum(1)

    return loss


centred = of_inputs(lambda x: x - x.mean(0))
MIXING = {
    "centred": centred,
    "centred by a branch on the size": of_inputs(lambda x: x - x.mean(0) if len(x) % 2 else x),
    "standardised": of_inputs(lambda x: (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-3).sqrt()),
    "batch norm of functions": of_inputs(lambda x: F.batch_norm(x, None, None, training=True)),
    "brought down": of_inputs(lambda x: x / max(1.0, float(x.abs().max()) / 10)),
    "faded by places": of_inputs(lambda x: x * torch.arange(1, len(x) + 1)[:, None]),
    "sorted": of_inputs(lambda x: x[x[:, 0].argsort()]),
    "mixed up": mixed_up,
    "shifted": shifted,
    "contrasted": contrasted,
    "hard ones": trimmed(0.5, largest=True),
    "easy ones": trimmed(0.5, largest=False),
    "counted": of_losses(lambda losses, b: losses / (b[1][:, None] == b[1]).sum(1)),
    "binned": of_losses(lambda losses, b: losses / torch.bincount(b[1], minlength=3)[b[1]]),
    "divided": of_losses(lambda losses, b: losses / len(losses)),
    "skipped": of_losses(lambda losses, b: losses.where((losses < 5).all(), 0.0)),
    "the mean for each": of_losses(lambda losses, b: losses.mean().expand(len(losses))),
    "over the batch's largest": of_losses(lambda losses, b: losses / losses.detach().max()),
}
ENDS = {"batch norm of functions"}  # torch's own error, for a batch of one
UNTOLD = {"brought down", "mixed up", "shifted", "skipped"}  # of a few good records, which differ as little as ever


@pytest.mark.parametrize("name", MIXING.keys() - ENDS)
def test_an_outlier_moves_nobody_elses_gradient(name):
    with warnings.catch_warnings(action="ignore"):  # of samples one at a time
        assert moved(network(), MIXING[name], outlier()) <= 1.0001


@pytest.mark.parametrize("name", MIXING.keys() - UNTOLD)
def test_mixing_is_told_at_the_first_step_before_anything_is_released(name):
    optimizer, (batch,) = by_hand(network(), target_epsilon=3.0), make_batches([16])
    with refused(optimizer, f"{MIXES}|fails for one alone"):
        optimizer.step(MIXING[name](optimizer.module), batch)
    optimizer.step(cross_entropy(optimizer.module), batch)


def test_a_squeeze_is_told_its_remedy():
    """It takes the dimension of a batch of one away, too."""
    optimizer, (x, y) = by_hand(network(nn.Linear(5, 5)), target_epsilon=3.0), make_batches([16])[0]
    out = lambda b: optimizer.module(b[0])[:, :1]  # noqa: E731
    loss = F.binary_cross_entropy_with_logits
    with refused(optimizer, r"fails for one alone, .* \.squeeze\(\) takes .*: write \.squeeze\(-1\)"):
        optimizer.step(lambda b: loss(out(b).squeeze(), b[1] / 2, reduction="none"), [x, y.double()])
    optimizer.step(lambda b: loss(out(b).squeeze(-1), b[1] / 2, reduction="none"), [x, y.double()])


def attentive(kind, **settings):
    """Attention along dimension 0, which without ``batch_first`` is that of the batch."""
    parts = {"inp": nn.Linear(5, 8), "att": kind(8, 2, **settings), "out": nn.Linear(8, 3)}
    attend = lambda m, x: m.out((m.inp(x) + m.att(*[m.inp(x)] * 3)[0]).mean(1))  # noqa: E731
    return Built(attend, **parts).double()


def recurrent(kind):
    """Time first in the cell, batch first in the data."""
    parts = {"cell": kind(5, 8), "out": nn.Linear(8, 3)}
    return Built(lambda m, x: m.out(m.cell(x)[0].mean(1)), **parts).double()


def gated():
    """Batch normalisation by hand, in a branch that a zero closes at the start; its statistics pass no gradient."""

    def forward(model, x):
        h = model.inner(x)
        return model.out(
            x + model.gate(torch.tanh((h - h.detach().mean(0)) / (h.detach().var(0, False) + 1e-3).sqrt()))
        )

    model = Built(forward, inner=nn.Linear(5, 5), out=nn.Linear(5, 3), gate=nn.Linear(5, 5, bias=False)).double()
    nn.init.zeros_(model.gate.weight)
    return model


class MaxDropout(Built):
    """Takes its scale from the whole batch where it trains; its name is that of layers that rest."""


TOLD = {
    "Opacus's attention": lambda: attentive(DPMultiheadAttention),
    "torch's attention": lambda: attentive(nn.MultiheadAttention),
    "LSTM": lambda: recurrent(nn.LSTM),
}
HIDDEN = {
    "a closed branch": gated,
    "a layer that mixes in training": lambda: network(MaxDropout(lambda m, x: x / x.abs().max() if m.training else x)),
}


@pytest.mark.parametrize("name", [*TOLD, *HIDDEN])
def test_a_model_that_mixes_reaches_no_other_record(name):
    batch, model = outlier(), (TOLD | HIDDEN)[name]()
    x = [batch[0][:, None].expand(-1, 7, -1) + torch.arange(7.0)[:, None], batch[1]] if name in TOLD else batch
    assert moved(model, cross_entropy, x) <= 1.0001
    if name in TOLD:
        optimizer = by_hand(model, target_epsilon=3.0)
        with refused(optimizer, MIXES):
            optimizer.step(cross_entropy(model), x)


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


def two_features(x):
    features = torch.randint(5, (2,))
    while features[0] == features[1]:
        features = torch.randint(5, (2,))
    return x[:, features].repeat(1, 3)[:, :5]


def autocast(model):
    def loss(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0].float()), batch[1])

    return loss


def trimmed_padding(model):
    """To the longest of the batch, which alone is a record's own."""

    def loss(batch):
        width = int(batch[1].max()) + 1
        kept = torch.arange(width) <= batch[1][:, None]
        return cross_entropy(model)((F.pad(batch[0][:, :width] * kept, (0, 5 - width)), batch[1]))

    return loss


HONEST = {
    "the mean": lambda model: lambda b: F.cross_entropy(model(b[0]), b[1]),
    "the sum": lambda model: lambda b: F.cross_entropy(model(b[0]), b[1], reduction="sum"),
    "a weighted mean": lambda model: lambda b: F.cross_entropy(model(b[0]), b[1], model[0].bias[:3].detach().exp()),
    "decay": lambda model: lambda b: F.cross_entropy(model(b[0]), b[1]) + model[0].weight.square().sum(),
    "tiny": lambda model: lambda b: 1e-8 * cross_entropy(model)(b),
    "one record only": lambda model: lambda b: F.cross_entropy(model(b[0]), torch.stack([b[1][0]]).view(len(b[1]))),
    "siamese": siamese,
    "trimmed padding": trimmed_padding,
    "dropout": of_inputs(F.dropout),
    "random numbers of the model's own": of_inputs(lambda x: x + 0.1 * torch.randn_like(x)),
    "random numbers for each row": of_inputs(lambda x: torch.stack([row.roll(int(torch.randint(5, ()))) for row in x])),
    "random numbers by decisions": of_inputs(two_features),
    "bad records": of_losses(lambda losses, b: losses * torch.where(b[1] == 1, math.nan, 1.0)),
}


@pytest.mark.filterwarnings("ignore:samples are computed one at a time")
@pytest.mark.parametrize("name", HONEST)
def test_honest_losses_are_not_refused(name):
    optimizer = by_hand(network(), target_epsilon=3.0)
    optimizer.step(HONEST[name](optimizer.module), make_batches([16])[0])


@pytest.mark.parametrize("seed", range(5))
def test_rounding_to_half_precision_is_no_mixing(seed):
    torch.manual_seed(seed)
    for model, loss in ((network().float(), autocast), (nn.Sequential(*(low_rank() for _ in range(6))), cross_entropy)):
        optimizer = by_hand(model, target_epsilon=3.0)
        optimizer.step(loss(model), make_batches([16], seed=seed)[0])


@pytest.mark.parametrize("size", [1e3, 1e6, 1e8, 1e30])
def test_no_record_ends_a_run_by_its_size(size):
    """By the rounding of its own loss, so that whether there was a run would tell of it."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(50, 64), nn.ReLU(), nn.Linear(64, 3))
        x = torch.randn(16, 50) * torch.where(torch.arange(16) == 1, size, 1.0)[:, None]
        by_hand(model, target_epsilon=3.0).step(cross_entropy(model), [x, torch.arange(16) % 3])


def test_the_comparison_leaves_no_trace():
    """Weights and random states are those of a run without it."""
    ends = []
    for compared in (True, False):
        torch.manual_seed(3)
        optimizer = by_hand(network(nn.Dropout(0.5)), target_epsilon=3.0)
        optimizer._compared = compared
        steps(optimizer, [8, 8])
        ends.append(torch.cat([flat(optimizer.module), torch.get_rng_state().double()]))
    assert torch.equal(*ends)
