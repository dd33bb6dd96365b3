"""Preset "paper" without privacy is GeN: step by step, the authors' own package (gen-optim) is the oracle.

That package lets the optimizer step once for the probe and once more for the update, so it is run on SGD without
momentum, which has no state to advance twice. Its curve fit is iterative; ours is in closed form.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import each
from GeN import lr_parabola
from twins import by_hand, cross_entropy, flat, make_batches, make_model, sgd

EXPECTED, STEPS = 8, 12
SIZES = (9, 6, 8, 12, 7, 5, 8, 10, 9, 6, 8, 7)  # of Poisson batches


def mean_cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum") / EXPECTED


class Oracle:
    """The loop of gen-optim's README: a gradient, now and then ``lr_parabola``, a step."""

    def __init__(self, model, eta):
        self.model, self.optimizer = model, sgd(model, eta)

    def step(self, batch, probing):
        """Returns the rate that the step took, learned from the batch on probe steps."""
        self.optimizer.zero_grad()
        mean_cross_entropy(self.model(batch[0]), batch[1]).backward()
        if probing:
            lr_parabola(
                self.model,
                self.optimizer,
                mean_cross_entropy,
                tr_iter=iter([batch]),
                device="cpu",
                task="image_cls",
                lr_factor=[-1, 0, 1],  # its default is one list, which every call changes
            )
        self.optimizer.step()
        return self.optimizer.param_groups[0]["lr"]


def compare(model, eta, interval):
    """Both on the same batches, rates and weights compared at every step; our history."""
    oracle = Oracle(copy.deepcopy(model), eta)
    settings = {"preset": "paper", "initial_learning_rate": eta, "steps": STEPS, "interval": interval}
    optimizer = by_hand(model, sgd(model), **settings)
    assert optimizer.expected_batch_size == EXPECTED
    for t, batch in enumerate(make_batches(SIZES)):
        probing = optimizer.split.is_probe_step(t)
        rate = oracle.step(batch, probing)
        record = optimizer.step(cross_entropy(model), batch)
        assert (record.probe is not None) == probing
        assert record.eta == pytest.approx(rate, rel=1e-6)
        torch.testing.assert_close(flat(model), flat(oracle.model), rtol=1e-6, atol=1e-9)
    return optimizer.history


@each(
    interval=[1, 5],
    expected=[(1e-3, "b/a above the range, clamped"), (2.0, "b/a"), (8.0, "b/a below the range, clamped")],
)
def test_equals_the_authors_package_step_by_step(interval, expected):
    """On both sides of the clamp and within it. Alg. 1 probes on the gradient's batch, the package on a given one."""
    eta, reason = expected
    assert reason in {row.get("reason") for row in compare(make_model(), eta, interval)}
