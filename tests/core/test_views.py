"""Several views of each record: their gradients are averaged before clipping, and one record still counts for one."""

import pytest
import torch
import torch.nn.functional as F
from cases import each, together
from models import Example, assert_exact, conv1d_net, groupnorm_convnet, mlp, tied_language_model, vit
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import Built, by_hand, cross_entropy, flat, make_batches, make_model, make_private, refused, sgd, trainable

from hyfreedp.gradients import AutomaticClipping, make_engine


def several(model, views, augment=lambda x: x):
    """Per-sample losses of so many views of every record, shape (B, views)."""

    def per_sample_loss(batch):
        x, y = (tensor.repeat_interleave(views, 0) for tensor in batch)
        return F.cross_entropy(model(augment(x)), y, reduction="none").view(-1, views)

    return per_sample_loss


def assert_averages(example, views, rows=(0, 3, 1, 4, 2, 0)):
    """The norms and the clipped sum are those of a loop over single views; some occur in two records."""
    rows, clipping = torch.tensor(rows), AutomaticClipping()
    batch = tuple(tensor[rows % len(tensor)] for tensor in example.batch)
    gradients = Example(example.model, batch, example.loss).gradients().unflatten(0, (-1, views)).mean(1)
    norms = gradients.norm(dim=1)

    def averaged(model, *records):
        return example.loss(model, *(tensor.flatten(0, 1) for tensor in records)).view(-1, views).mean(1)

    records = tuple(tensor.unflatten(0, (-1, views)) for tensor in batch)
    for alone in (False, True):
        engine = make_engine(example.model, clipping, views=views)
        found = Example(example.model, records, averaged).by_engine(engine, alone=alone)
        assert engine.slow is None and bool(engine.verified) == (len(rows) > views and not alone)
        torch.testing.assert_close(found[0], norms, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(found[1], clipping.factors(norms) @ gradients, rtol=1e-8, atol=1e-12)


@together(*each(views=[2, 3, 6], build=[mlp, groupnorm_convnet, conv1d_net, tied_language_model, vit]).args)
def test_equals_a_loop_over_single_views(views, build):
    assert_averages(build(), views)


def test_checkpointing():
    """A parameter that is broadcast, in a block that is computed again in the backward pass."""
    parts = {"token": nn.Parameter(torch.randn(1, 1, 4)), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 1)}

    def forward(model, x):
        h = checkpoint(lambda x: torch.tanh(model.inner(x) * model.token), x, use_reentrant=False)
        return model.head(h)[..., 0].sin().sum(1)

    model = Built(forward, **parts).double()
    assert_averages(Example(model, (torch.randn(5, 2, 4).double(),), lambda model, x: model(x)), 2)


def test_views_of_a_record_may_mix():
    """A loss that compares them with each other, say; each record's is still its own."""
    model = nn.Linear(3, 4).double()

    def losses(model, x):
        features = model(x.flatten(0, 1)).unflatten(0, (-1, 3))
        return (features - features.mean(1, keepdim=True)).square().sum((1, 2))

    example = Example(model, (torch.randn(4, 3, 3).double(),), losses)
    for views in (1, 3):  # rows of a sample, or views: to a layer they are the same
        assert_exact(example, make_engine(model, AutomaticClipping(), views=views))


@together("size", [None, 3, 1, lambda batch: [[3, 0], [1, 2, 4], [5]]])
def test_a_step_is_that_of_a_loop_over_records_and_views(size):
    """Whatever the pieces; what counts is records. The loss of a record is the mean of its views'."""
    model, views, rate = make_model(), 3, 0.5
    (batch,) = make_batches((6,))
    noise = torch.randn(6, views, 5, dtype=torch.float64)
    batch = [batch[0], batch[1], noise]

    def loss(batch):
        x = (batch[0][:, None] + batch[2]).flatten(0, 1)
        return F.cross_entropy(model(x), batch[1].repeat_interleave(views), reduction="none").view(-1, views)

    weights, total, means = flat(model), 0.0, []
    for i in range(6):
        each = [F.cross_entropy(model(batch[0][i] + noise[i, k]), batch[1][i]) for k in range(views)]
        gradients = [torch.cat([g.flatten() for g in torch.autograd.grad(one, trainable(model))]) for one in each]
        mean = sum(gradients) / views
        total += mean / (mean.norm() + 0.01)
        means.append(sum(each).item() / views)
    settings = {"preset": "fixed", "clipping": AutomaticClipping(), "diagnostics": True}
    optimizer = by_hand(model, sgd(model, rate), views=views, max_physical_batch_size=size, **settings)
    record = optimizer.step(loss, batch)
    torch.testing.assert_close(flat(model), weights - rate * total / optimizer.expected_batch_size)
    assert record.diagnostics["mean_loss"] == pytest.approx(sum(means) / 6)


@together("preset", ["robust", "paper", "fixed"])
def test_views_that_are_equal_are_a_run_without_views(preset, unbound_noise):
    """Votes, probes, thresholds and an empty batch included: the loss of a record is the mean over its views."""
    runs = []
    for views in (1, 4):
        optimizer = by_hand(preset=preset, target_epsilon=3.0, accountant="rdp", views=views)
        model = optimizer.module
        loss = cross_entropy(model) if views == 1 else several(model, views)
        for batch in make_batches((8, 5, 0, 9, 8)):
            optimizer.step(loss, batch)
        runs.append((flat(model), optimizer.eta, optimizer.epsilon_spent()))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-8, atol=1e-10)
    assert runs[0][1:] == pytest.approx(runs[1][1:])


@together("views", [0, -1, 2.5, "2", True, None])
def test_a_number_of_views_that_is_none_is_refused(views):
    with pytest.raises(ValueError, match="views must be an integer of at least 1, got"):
        make_private(views=views)


@together(
    ("views", "wrong", "shape"),
    [
        (2, lambda losses: losses.flatten(), r"\(12,\)"),
        (2, lambda losses: losses.mean(1), r"\(6,\)"),
        (2, lambda losses: losses.T, r"\(2, 6\)"),
    ],
)
def test_losses_of_another_form_are_refused(views, wrong, shape):
    optimizer, (batch,) = by_hand(views=views), make_batches((6,))
    with refused(optimizer, rf"must return shape \(6, {views}\), got {shape}: with views={views}, those"):
        optimizer.step(lambda batch: wrong(several(optimizer.module, 2)(batch)), batch)


def test_views_in_the_wrong_order_are_refused():
    """Row by row they would be views of different records, each of which could then move several of the sum."""
    optimizer = by_hand(views=3)

    def loss(batch):
        x, y = batch[0].repeat(3, 1), batch[1].repeat(3)  # the first view of all records, then the second
        return F.cross_entropy(optimizer.module(x), y, reduction="none").view(-1, 3)

    with refused(optimizer, "depend on which other samples are in the batch"):
        optimizer.step(loss, make_batches((8,))[0])
