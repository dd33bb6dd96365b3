"""Attacks through what a step is given: rows, batches that remember, weights of others, or that change later.

Each let one record move the clipped sum by more than its clip, or told a raw value.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from twins import by_hand, cross_entropy, flat, make_batches, make_model, make_private, moved, sgd


@dataclasses.dataclass
class Remembers:
    """A batch that computes something of all its records when it is made, where no field shows it."""

    x: Tensor
    y: Tensor

    def __post_init__(self):
        self.centre = self.x.mean(0)


def test_a_batch_is_not_used_again_after_a_state_was_loaded():
    model, optimizer, loader = make_private(target_epsilon=3.0)
    batch = next(iter(loader))
    optimizer.step(cross_entropy(model), batch)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="must come from the private loader, which gave none so far"):
        optimizer.step(cross_entropy(model), batch)
    optimizer.step(cross_entropy(model), next(iter(loader)))


def test_what_a_batch_remembers_of_the_others_reaches_no_record():
    """A field or not: each record is made anew of its fields alone, and what a loss puts into one is in no other."""
    (batch,), ends = make_batches([12]), []
    remembered = lambda model: lambda b: cross_entropy(model)((b.x - getattr(b, "centre", 0), b.y))  # noqa: E731
    for loss, data in ((remembered, Remembers(*batch)), (cross_entropy, tuple(batch))):
        optimizer = by_hand(preset="fixed")
        optimizer.step(loss(optimizer.module), data)
        ends.append(flat(optimizer.module))
    assert torch.equal(*ends)  # the centre of all was not there

    def cached(model):
        kept = []

        def loss(batch):
            batch.append(batch[0].mean(0)) if len(batch) < 3 else kept.append(batch)
            return cross_entropy(model)((batch[0] - batch[2], batch[1]))

        return loss

    batch[0][-1] *= 300
    assert moved(make_model(), cached, batch) <= 1.0001


def test_one_outlier_does_not_scale_the_weights_of_all():
    (batch,) = make_batches([20])
    batch[0][-1] *= 300
    weights = lambda b: 1 / (1 + b[0].abs().max())  # noqa: E731
    assert moved(make_model(), cross_entropy, batch, weights=weights) <= 1.0001
    assert moved(make_model(), cross_entropy, batch, weights=lambda b: b[0][:, 0].softmax(0)) <= 1.0001


def test_weights_are_those_that_were_checked():
    """Whatever is written to their tensor afterwards, as by a loss, or by a function that uses it again."""

    def run(meddle):
        model, (batch,), weight = make_model(), make_batches([9]), torch.full((1,), 0.5, dtype=torch.float64)
        optimizer = by_hand(model, sgd(model), preset="fixed")

        def losses(batch):
            if meddle:
                weight.fill_(1000.0)
            return cross_entropy(model)(batch)

        optimizer.step(losses, batch, weights=lambda b: weight)
        return flat(model)

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("seen", ["seen", "0.bias"])
def test_a_function_of_weights_keeps_nothing_in_the_model(seen):
    """Not in a parameter either, through ``.data``."""
    optimizer = by_hand(target_epsilon=3.0)
    model = optimizer.module
    model.register_buffer("seen", torch.zeros(()))

    def weigh(batch):
        (model.seen if seen == "seen" else model[0].bias.data).fill_(batch[0].max())
        return torch.ones(1)

    with pytest.raises(ValueError, match=f"parameters of the model: '{seen}'"):
        optimizer.step(cross_entropy(model), make_batches([8])[0], weights=weigh)
    assert optimizer.epsilon_spent() == 0


def test_a_rule_of_clipping_sees_one_norm_and_bounds_it_whatever_it_says():
    (batch,) = make_batches([20])
    batch[0][-1] *= 300
    for factor in (lambda norms: 1 / norms.max().expand_as(norms), lambda norms: norms + 1e9):
        rule = SimpleNamespace(sensitivity=1.0, factors=factor)
        assert 0.9 < moved(make_model(), cross_entropy, batch, clipping=rule) <= 1.0001
