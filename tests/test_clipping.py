"""Both engines against a loop over samples with autograd, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyfreedp.clipping import AbadiClipping, AutomaticClipping, BookKeepingEngine, HooksEngine, NoClipping, make_engine


def test_factors() -> None:
    norms = torch.tensor([0.0, 0.5, 4.0, math.inf, math.nan])
    assert AutomaticClipping().factors(norms).tolist() == pytest.approx([100.0, 1 / 0.51, 1 / 4.01, 0.0, 0.0])
    assert AbadiClipping(2.0).factors(norms).tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert NoClipping().factors(norms).tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert [c.sensitivity for c in (AutomaticClipping(), AbadiClipping(2.0), NoClipping())] == [1.0, 2.0, math.inf]


@pytest.mark.parametrize("engine", [BookKeepingEngine, HooksEngine])
def test_mlp_equals_a_loop_over_samples(engine) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 3)).double()
    x, y = torch.randn(5, 6).double(), torch.randint(3, (5,))
    params = list(model.parameters())
    losses = F.cross_entropy(model(x), y, reduction="none")
    rows = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    gradients = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    norms = gradients.norm(dim=1)

    attached = engine(model, AutomaticClipping())
    measured = attached.backward(F.cross_entropy(model(x), y, reduction="none"))
    torch.testing.assert_close(measured, norms, rtol=1e-10, atol=1e-12)
    clipped = torch.cat([p.grad.flatten() for p in params])
    torch.testing.assert_close(clipped, AutomaticClipping().factors(norms) @ gradients, rtol=1e-10, atol=1e-12)


def test_auto_picks_book_keeping() -> None:
    assert isinstance(make_engine(nn.Linear(2, 2), AutomaticClipping()), BookKeepingEngine)
