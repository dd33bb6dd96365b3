"""Preset "paper" without privacy is GeN: step by step, the authors' own package (gen-optim) is the oracle.

That package lets the optimizer step once for the probe and once more for the update, so it is run on SGD without
momentum, which has no state to advance twice. Its curve fit is iterative; ours is in closed form.
"""

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


@each(
    interval=[1, 5],
    expected=[(1e-3, "b/a above the range, clamped"), (2.0, "b/a"), (8.0, "b/a below the range, clamped")],
)
def test_equals_the_authors_package_step_by_step(interval, expected):
    """Rates and weights, on both sides of the clamp and within it, beside the loop of the package's README."""
    eta, reason = expected
    model, twin = make_model(), make_model()
    theirs = sgd(twin, eta)
    settings = {"preset": "paper", "initial_learning_rate": eta, "steps": STEPS, "interval": interval}
    optimizer = by_hand(model, sgd(model), **settings)
    assert optimizer.expected_batch_size == EXPECTED
    for t, batch in enumerate(make_batches(SIZES)):
        theirs.zero_grad()
        mean_cross_entropy(twin(batch[0]), batch[1]).backward()
        if probing := optimizer.split.is_probe_step(t):  # by Alg. 1 on the gradient's batch, by the package on any
            given = {"tr_iter": iter([batch]), "device": "cpu", "task": "image_cls"}
            lr_parabola(twin, theirs, mean_cross_entropy, **given, lr_factor=[-1, 0, 1])  # whose default it changes
        theirs.step()
        record = optimizer.step(cross_entropy(model), batch)
        assert (record.probe is not None) == probing
        assert record.eta == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-6)
        torch.testing.assert_close(flat(model), flat(twin), rtol=1e-6, atol=1e-9)
    assert reason in {row.get("reason") for row in optimizer.history}
