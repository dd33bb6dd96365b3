"""A run is that of ``hyfreedp.reference``, one sample at a time; probing changes nothing but the learning rate.

With noise, too: it is unbound from the bits of the sums, which the two add up in another order, and its own rounding
hides that order. So what is released is the same bit for bit.
"""

import copy
import math
import random

import numpy as np
import pytest
import torch
from cases import each, pairs
from torch import nn
from twins import BASES, TUNINGS, by_hand, cross_entropy, flat, make_batches, make_model, make_private, steps, twin_of

from hyfreedp import reference
from hyfreedp.gradients import AbadiClipping, AutomaticClipping, NoClipping

SIZES = (9, 6, 8, 0, 11, 7, 5)  # around the expected size, 8; one batch empty
PRIVATE = {"target_epsilon": 8.0}
FACTORS = {
    "automatic": (AutomaticClipping(), {}),
    "abadi": (AbadiClipping(0.3), {"factor": lambda norm: min(1.0, 0.3 / norm), "sensitivity": 0.3}),
    "none": (NoClipping(), {"factor": lambda norm: 1.0}),
}
DECAYS = {"none": lambda progress: 1.0, "linear": lambda progress: 1 - progress}
RULES = {"gen": reference.gen, "literal": reference.literal}


def compare(
    model, base, sizes=SIZES, *, eta=0.3, clipping="automatic", step_rule="gen", decay="none", loss=None, **settings
):
    """Train with preset "paper" and the reference beside it; compare weights, rates and fits at every step."""
    twin, loss = copy.deepcopy(model), loss or (lambda model, batch: cross_entropy(model)(batch))
    rule, written = FACTORS[clipping]
    searched = {"step_rule": step_rule, "initial_learning_rate": eta, "interval": 2, "decay": decay} | settings
    optimizer = by_hand(model, BASES[base](model), preset="paper", clipping=rule, **searched)
    if math.isinf(searched.get("target_epsilon", math.inf)):
        written = written | {"threshold": math.inf}
    if settings.get("loss_threshold_rule") == "previous":
        written = written | {"next_threshold": lambda private: private[1]}
    batches, start = make_batches(sizes), flat(model)
    written = written | {"rule": RULES[step_rule], "eta": eta, "decay": DECAYS[decay], "loss": loss}
    run = twin_of(twin, BASES[base](twin), optimizer, batches, **written)
    for batch, expected in zip(batches, run, strict=True):
        record = optimizer.step(lambda batch: loss(model, batch), batch).to_dict()
        assert {name: record.get(name) for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert ("slope" in record) == ("slope" in expected)
        torch.testing.assert_close(flat(model), flat(twin), rtol=1e-8, atol=1e-8)
    assert (flat(model) - start).abs().max() > 1e-3  # something was learned
    return optimizer


@each(base=BASES, tuning=TUNINGS, privacy=[{}, PRIVATE])
def test_equals_the_reference_for_every_tuning_mode_and_base_optimizer(tuning, base, privacy, unbound_noise):
    """Clipping, noise, direction, probes, fit, rule, decay and update, each as plain code would do it."""
    compare(make_model(tuning), base, decay="linear", warmup=0.2, **privacy)


@pairs(clipping=FACTORS, step_rule=RULES, privacy=[{}, PRIVATE])
def test_equals_the_reference_for_every_rule_and_clipping(step_rule, clipping, privacy, unbound_noise):
    """The rules' refusals on an empty batch included."""
    if privacy and clipping == "none":
        return
    sizes = SIZES if step_rule != "literal" else tuple(size or 8 for size in SIZES)
    compare(make_model(), "sgd", sizes, step_rule=step_rule, clipping=clipping, **privacy)


@pytest.mark.parametrize("threshold_rule", ["sum", "previous"])
def test_records_that_are_not_finite_count_as_zeros_and_as_the_threshold(threshold_rule, unbound_noise):
    """Some of the losses are beyond R_l, some are NaN or infinite, and so are their gradients."""

    def loss(model, batch):
        values = 3 * cross_entropy(model)(batch)
        values = torch.where(batch[0][:, 0] > 1.5, values * math.nan, values)
        return torch.where(batch[0][:, 0] < -2, values * math.inf, values)

    optimizer = compare(make_model(), "sgd", loss=loss, interval=1, loss_threshold_rule=threshold_rule, **PRIVATE)
    assert len({row["loss_threshold"] for row in optimizer.history}) > 3


@each(base=BASES, privacy=[{}, PRIVATE])
def test_fixed_rate_equals_the_base_optimizer_on_private_gradients_bit_for_bit(base, privacy, unbound_noise):
    """Preset "fixed" keeps the groups' own rates. With noise the same bits, else but for the order of the sums."""
    model = make_model()
    twin = copy.deepcopy(model)
    optimizer = by_hand(model, BASES[base](model), preset="fixed", clipping=AutomaticClipping(), **privacy)
    rates, batches = [group["lr"] for group in optimizer.param_groups], make_batches(SIZES)
    run = twin_of(twin, BASES[base](twin), optimizer, batches, eta=rates[0])
    for batch, expected in zip(batches, run, strict=True):
        assert optimizer.step(cross_entropy(model), batch).to_dict() == {"step": optimizer.ledger.steps - 1, **expected}
        assert [group["lr"] for group in optimizer.param_groups] == rates
        if privacy:
            assert torch.equal(flat(model), flat(twin))
        torch.testing.assert_close(flat(model), flat(twin), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("base", BASES)
def test_gen_rejects_a_parabola_that_opens_downwards_and_leaves_the_weights_bitwise(base):
    """By a loss that is concave in the weights (b > 0 > a): weights after a probe are copied, not computed back."""
    runs = []
    for preset in ("paper", "fixed"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 1)).double()
        optimizer = BASES[base](model)
        rate = optimizer.param_groups[0]["lr"]
        settings = {"initial_learning_rate": rate, "interval": 1} if preset == "paper" else {}
        optimizer = by_hand(model, optimizer, preset=preset, clipping=AutomaticClipping(), **settings)
        for batch in make_batches((6, 9)):
            record = optimizer.step(lambda batch, model=model: 999 - model(batch[0])[:, 0] ** 2, batch)
            if record.probe:
                assert record.probe.slope > 0 > record.probe.curvature
                assert not record.probe.accepted and "rejected" in record.probe.reason
            assert all(parameter.grad is None for parameter in model.parameters())
        runs.append((flat(model), optimizer.base.state_dict()["state"]))
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.mark.parametrize("failing_call", [1, 8])
def test_an_exception_inside_a_probe_leaves_the_plain_step(failing_call):
    """Samples one by one: calls 1 to 4 after the training forwards are the probe ahead, 5 to 8 the one behind."""
    model, plain = make_model(dropout=0.3), make_model(dropout=0.3)
    settings = {"max_physical_batch_size": 1}
    searched = settings | {"preset": "paper", "initial_learning_rate": 0.5, "interval": 2}
    _, optimizer, loader = make_private(model, **searched)
    fixed = by_hand(plain, preset="fixed", **settings)
    for _ in range(2):  # that compare losses, move nothing but by weight decay, and learn no other rate
        for one in (optimizer, fixed):
            one.step(lambda batch, one=one: 0 * sum(p.sum() for p in one.module.parameters()), make_batches((4,))[0])
    calls = []

    def fail(batch):
        calls.append(len(batch[0]))
        if len(calls) == 4 + failing_call:
            raise KeyboardInterrupt
        return cross_entropy(model)(batch)

    (batch,) = make_batches((4,))
    torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fail, batch)
    random = torch.get_rng_state()
    torch.manual_seed(1)
    fixed.step(cross_entropy(plain), batch)
    assert torch.equal(flat(model), flat(plain)) and torch.equal(random, torch.get_rng_state())
    assert optimizer.base.param_groups[0]["lr"] == 0.5
    # The noisy gradient is in the weights, so the release counts, and its batch must not be used again.
    assert (optimizer.ledger.steps, optimizer.split.probe_steps_before(3), optimizer.steps_left) == (3, 2, 7)
    assert loader.batch_sampler.position == 3


@pytest.mark.parametrize("pieces", [None, 3])
def test_a_step_draws_from_its_own_key_and_gives_the_callers_random_numbers_back(pieces):
    """Dropout masks of a step are those of the run's seed, whatever the caller has seeded; noise is never torch's."""
    ends = []
    for seed, settings in ((3, {"preset": "fixed"}), (4, {"preset": "fixed"}), (3, {"preset": "paper", "interval": 1})):
        model = make_model(dropout=0.5)
        private = {"target_epsilon": 3.0} | settings
        optimizer, drawn = by_hand(model, max_physical_batch_size=pieces, **private), []
        for sizes in ((), (8, 0, 7)):
            for seed_all in (torch.manual_seed, np.random.seed, random.seed):
                seed_all(seed)
            steps(optimizer, sizes)
            drawn.append((torch.rand(3).tolist(), np.random.rand(), random.random()))
        assert drawn[0] == drawn[1]
        ends.append(flat(model))
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])
