"""Preset "paper" without privacy is GeN: step by step, the authors' own package (gen-optim) is the oracle.

That package lets the optimizer step once for the probe and once more for the update, so it is run on SGD without
momentum, which has no state to advance twice. Its curve fit is iterative; ours is in closed form.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import each, together
from GeN import lr_parabola
from torch import nn
from twins import cross_entropy, flat, make_batches, make_model, make_private, sgd

from hyfreedp import PRESETS

EXPECTED, STEPS = 8, 12
SIZES = (9, 6, 8, 12, 7, 5, 8, 10, 9, 6, 8, 7)  # of Poisson batches
BATCHES = {"same": lambda t: t, "next": lambda t: t + 1}  # which one looks along the direction of step t


def mean_cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum") / EXPECTED


class Oracle:
    """The loop of gen-optim's README: a gradient, now and then ``lr_parabola``, a step."""

    def __init__(self, model, eta, criterion=mean_cross_entropy):
        self.model, self.criterion = model, criterion
        self.optimizer = sgd(model, eta)

    def step(self, batch, probed_by=None):
        """Returns the rate that the step took, learned from the batch ``probed_by`` if there is one."""
        self.optimizer.zero_grad()
        self.criterion(self.model(batch[0]), batch[1]).backward()
        if probed_by is not None:
            lr_parabola(
                self.model,
                self.optimizer,
                self.criterion,
                tr_iter=iter([probed_by]),
                device="cpu",
                task="image_cls",
                lr_factor=[-1, 0, 1],  # its default is one list, which every call changes
            )
        self.optimizer.step()
        return self.optimizer.param_groups[0]["lr"]


def wire(model, eta, **settings):
    """Preset "paper" without privacy."""
    _, optimizer, _ = make_private(
        model, sgd(model), preset="paper", initial_learning_rate=eta, steps=STEPS, **settings
    )
    assert optimizer.expected_batch_size == EXPECTED
    return optimizer


def compare(model, eta, interval, probe_batch, criterion=mean_cross_entropy, loss=cross_entropy):
    """Both on the same batches, rates and weights compared at every step; our history."""
    oracle = Oracle(copy.deepcopy(model), eta, criterion)
    optimizer = wire(model, eta, interval=interval, probe_batch=probe_batch)
    plan, batches = optimizer.split, make_batches(SIZES)
    rates, weights = [], []  # the oracle's rate and weights of each step
    for t, batch in enumerate(batches):
        by = BATCHES[probe_batch](t)
        probed_by = batches[by] if by < STEPS and plan.is_probe_step(by) else None
        rates.append(oracle.step(batch, probed_by))
        weights.append(flat(oracle.model))
    for t, batch in enumerate(batches):
        record = optimizer.step(loss(model), batch)
        looks = plan.is_probe_step(t) and (probe_batch == "same" or t > 0)
        assert (record.probe is not None) == looks
        if looks:
            step = t if probe_batch == "same" else t - 1
            assert record.probe.eta_next == pytest.approx(rates[step], rel=1e-6)
        corrected = probe_batch == "next" and t + 1 < STEPS and plan.is_probe_step(t + 1)
        if not corrected:  # else the next batch moves these weights, and what follows from them shows
            assert record.eta == pytest.approx(rates[t], rel=1e-6)
            torch.testing.assert_close(flat(model), weights[t], rtol=1e-6, atol=1e-9)
    return optimizer.history


@each(
    interval=[1, 2, 5],
    expected=[(1e-3, "b/a above the range, clamped"), (2.0, "b/a"), (8.0, "b/a below the range, clamped")],
)
@pytest.mark.parametrize("probe_batch", BATCHES)
def test_equals_the_authors_package_step_by_step(probe_batch, interval, expected):
    """From rates that are too small, about right and too large: on both sides of the clamp and within it."""
    eta, reason = expected
    assert reason in {row.get("reason") for row in compare(make_model(), eta, interval, probe_batch)}


@together("probe_batch", BATCHES)
def test_rejects_with_the_authors_package_where_the_parabola_opens_downwards(probe_batch):
    """A loss that is concave along every direction: b > 0 > a. Both keep their rate throughout."""
    torch.manual_seed(0)
    history = compare(
        nn.Linear(5, 1).double(),
        0.01,
        2,
        probe_batch,
        criterion=lambda outputs, _: (99 - outputs[:, 0] ** 2).sum() / EXPECTED,
        loss=lambda model: lambda batch: 99 - model(batch[0])[:, 0] ** 2,
    )
    probes = [row for row in history if "reason" in row]
    assert probes and all("rejected" in row["reason"] and row["slope"] > 0 > row["curvature"] for row in probes)
    assert {row["eta"] for row in history} == {0.01}


def test_the_other_smoothing_is_not_the_authors():
    """What they publish keeps 0.9 of the old rate; a weight of 0.9 for the new one leaves it at the first probe."""
    (batch,) = make_batches((8,))
    assert Oracle(make_model(), 1e-3).step(batch, batch) == pytest.approx(1.1e-3)
    for smoothing, expected in ((PRESETS["paper"].smoothing, 1.1e-3), (0.9, 1.9e-3)):
        model = make_model()
        record = wire(model, 1e-3, smoothing=smoothing).step(cross_entropy(model), batch)
        assert record.eta == pytest.approx(expected)
