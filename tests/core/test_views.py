"""A record may have any number of rows: views, windows, sentences. Its loss is their mean, and it counts for one."""

import pytest
import torch
import torch.nn.functional as F
from cases import each
from models import Example, assert_exact, conv1d_net, groupnorm_convnet, mlp, tied_language_model, vit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import Built, by_hand, make_batches, refused

from hyfreedp.data.batches import stack_records
from hyfreedp.gradients import AutomaticClipping, make_engine


def checkpointed() -> Example:
    """A parameter that is broadcast, in a block that is computed again in the backward pass."""
    parts = {"token": nn.Parameter(torch.randn(1, 1, 4)), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 1)}

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        h = checkpoint(lambda x: torch.tanh(model.inner(x) * model.token), x, use_reentrant=False)
        return model.head(h)[..., 0].sin().sum(1)

    return Example(Built(forward, **parts).double(), (torch.randn(5, 2, 4).double(),), lambda model, x: model(x))


BUILDS = [mlp, groupnorm_convnet, conv1d_net, tied_language_model, vit, checkpointed]


@each(views=[2, 3, 6], build=BUILDS)
def test_the_gradient_of_a_record_is_the_mean_of_its_views(views, build) -> None:
    """Also where some views occur in two records."""
    example, rows, clipping = build(), torch.tensor([0, 3, 1, 4, 2, 0]), AutomaticClipping()
    batch = tuple(tensor[rows % len(tensor)] for tensor in example.batch)
    gradients = Example(example.model, batch, example.loss).gradients().unflatten(0, (-1, views)).mean(1)

    def mean(model: nn.Module, *record: Tensor) -> Tensor:
        return example.loss(model, *(tensor.squeeze(0) for tensor in record)).mean()

    records = Example(example.model, tuple(tensor.unflatten(0, (-1, views)) for tensor in batch), mean)
    engine = make_engine(example.model, clipping)
    norms, total = records.by_engine(engine)
    assert engine.fallback_reason is None
    torch.testing.assert_close(norms, gradients.norm(dim=1), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(total, clipping.factors(norms) @ gradients, rtol=1e-8, atol=1e-12)


def test_views_of_a_record_may_mix() -> None:
    """A loss that compares them with each other, say; each record's is still its own."""
    model = nn.Linear(3, 4).double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        features = model(x)
        return (features - features.mean(1, keepdim=True)).square().sum()

    assert_exact(Example(model, (torch.randn(4, 3, 3).double(),), loss))


def test_records_have_as_many_rows_as_they_have() -> None:
    """Those of one number are mapped together, in the order of the batch."""
    model, numbers = nn.Linear(5, 1, bias=False).double(), [2, 1, 3, 1, 2]
    records = [torch.randn(number, 5).double() for number in numbers]
    engine = make_engine(model, AutomaticClipping())
    losses, norms = engine.add(lambda x: model(x).mean(), stack_records(records))
    means = torch.stack([x.mean(0) for x in records])
    torch.testing.assert_close((losses, norms), (model(means)[:, 0].detach(), means.norm(dim=1)))


@pytest.mark.parametrize("views", [2, 3])
def test_a_loss_of_each_view_is_refused(views) -> None:
    optimizer, (batch,) = by_hand(), make_batches((6,))

    def each_view(batch: list[Tensor]) -> Tensor:
        x, y = (tensor.repeat_interleave(views, 0) for tensor in batch)
        return F.cross_entropy(optimizer.module(x), y, reduction="none")

    with refused(optimizer, rf"one number for a record, got shape \({views},\): return its mean"):
        optimizer.step(each_view, batch)
