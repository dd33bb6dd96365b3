"""The private optimizer is a torch optimizer: schedulers, hooks, profiler, and what loops for other optimizers call."""

import collections
import copy
import pickle
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cases import pairs
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from twins import BASES, by_hand, cross_entropy, flat, make_batches, make_model, refused, steps

PRIVATE, SIZES = {"target_epsilon": 3.0}, (8, 5, 0, 9, 8, 7)
SCHEDULERS = {
    "steps": lambda base: lr_scheduler.StepLR(base, step_size=2, gamma=0.1),
    "warm-up": lambda base: lr_scheduler.LambdaLR(base, lambda t: min(1.0, (t + 1) / 3)),
    "two in turn": lambda base: lr_scheduler.SequentialLR(
        base, [lr_scheduler.ConstantLR(base, 0.5, 2), lr_scheduler.ExponentialLR(base, 0.5)], milestones=[2]
    ),
}


def make(base="adamw", **settings):
    model = make_model()
    return model, by_hand(model, BASES[base](model), **({"preset": "fixed"} | PRIVATE | settings))


def plain_loop(base, schedule, *, expected=8):
    """torch alone: the sum of losses over the expected batch size, by whatever rates the scheduler sets."""
    model = make_model()
    optimizer = BASES[base](model)
    scheduler, rates = schedule(optimizer), []
    for batch in make_batches(SIZES):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.zero_grad()
        (F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / expected).backward()
        optimizer.step()
        scheduler.step()
    return flat(model), rates


@pairs(on=["private", "base"], base=BASES, name=SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # of torch 2.8 itself
def test_a_fixed_rate_follows_a_scheduler_as_in_plain_torch(name, base, on):
    """Made for the private optimizer, or for the base optimizer before it was made private; rates of all groups."""
    model = make_model()
    inner = BASES[base](model)
    early = SCHEDULERS[name](inner) if on == "base" else None
    optimizer = by_hand(model, inner, preset="fixed")
    scheduler = early or SCHEDULERS[name](optimizer)
    weights, rates = plain_loop(base, SCHEDULERS[name])
    for batch, expected in zip(make_batches(SIZES), rates, strict=True):
        assert optimizer.eta == expected[0]
        assert optimizer.step(cross_entropy(model), batch).eta == expected[0]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected, rel=1e-14)
        scheduler.step()
    torch.testing.assert_close(flat(model), weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("settings", [{"preset": "robust"}, {"preset": "paper", "interval": 2}])
def test_a_learned_rate_says_once_that_it_follows_no_scheduler(settings):
    """And is bit for bit what it is without one."""
    model, optimizer = make(**settings)
    twin, plain = make(**settings)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.warns(UserWarning, match="learns .*preset='fixed'") as told:
        for batch in make_batches(SIZES):
            optimizer.step(cross_entropy(model), batch)
            scheduler.step()
            plain.step(cross_entropy(twin), batch)
    assert len(told) == 1 and torch.equal(flat(model), flat(twin))


@pytest.mark.parametrize("preset", ["fixed", "robust", "paper"])
def test_hooks_run_once_a_step(preset):
    """Those on the private optimizer around all of its step; those on the base and on all optimizers at the base's."""
    model, optimizer = make(preset=preset)
    count, seen = collections.Counter(), []
    note = lambda name: lambda which, args, kwargs: count.update([(name, type(which).__name__)])  # noqa: E731
    handles = [
        optimizer.register_step_pre_hook(note("before")),
        optimizer.register_step_post_hook(note("after")),
        optimizer.register_step_post_hook(lambda *_: seen.append(flat(model))),
        optimizer.base.register_step_post_hook(note("base")),
        register_optimizer_step_post_hook(note("all after")),
    ]
    try:
        for batch in make_batches(SIZES[:3]):
            optimizer.step(cross_entropy(model), batch)
            assert torch.equal(seen[-1], flat(model))  # after all that a step does, an average would be right
    finally:
        for handle in handles:
            handle.remove()
    of_base = dict.fromkeys([("base", "AdamW"), ("all after", "AdamW")], 3)
    assert count == {("before", "HyFreeDPOptimizer"): 3, ("after", "HyFreeDPOptimizer"): 3} | of_base
    steps(optimizer, SIZES[:1])
    assert len(seen) == 3 and sum(count.values()) == 12  # removed


@pytest.mark.parametrize(
    "call",
    [
        lambda step, loss, batch: step(),
        lambda step, loss, batch: step(lambda: loss(batch).mean()),
        lambda step, loss, batch: step(closure=lambda: loss(batch).mean()),
        lambda step, loss, batch: step(loss(batch), batch),
    ],
)
def test_a_step_as_of_another_optimizer_says_what_to_call(call):
    model, optimizer = make(preset="robust")
    lr_scheduler.ExponentialLR(optimizer, 1.0)  # wraps the method
    (batch,) = make_batches((8,))
    with refused(optimizer, r"call optimizer\.step\(loss, batch\), where loss\(record\) returns one number", TypeError):
        call(optimizer.step, cross_entropy(model), batch)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_run_cannot_be_copied(duplicate):
    """Two runs with one key would release two batches under the same noise."""
    with pytest.raises(TypeError, match=r"neither pickled nor copied.* state_dict\(\)"):
        duplicate(make()[1])


def test_a_process_makes_one_step_at_a_time():
    """A second thread, as of a watchdog that tries again, would release this step with the same key."""
    model, optimizer = make(steps=3)
    loss, batch = cross_entropy(model), make_batches([8])[0]
    with pytest.raises(RuntimeError, match="while a private step of this process is under way"):
        optimizer.step(lambda b: optimizer.step(loss, b), batch)
    several = mock.patch.multiple("torch.distributed", is_initialized=lambda: True, get_world_size=lambda: 2)
    with several, pytest.raises(RuntimeError, match="init_process_group was called after make_private_with_epsilon"):
        optimizer.step(loss, batch)
    with mock.patch.object(optimizer.base, "step", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        optimizer.step(loss, batch)
    assert all(p.grad is None for p in model.parameters()) and len(optimizer.history) == optimizer.ledger.steps == 1


def test_parameters_cannot_be_added_and_the_base_optimizers_own_step_stays_refused():
    model = make_model()
    old = BASES["adamw"](model)
    optimizer = by_hand(model, old, **PRIVATE)
    for step in (old.step, optimizer.base.step):
        with refused(optimizer, "own step would train on raw gradients", RuntimeError):
            step()
    lr_scheduler.ExponentialLR(old, 0.5)
    with pytest.raises(RuntimeError, match="own step would train on raw gradients"):
        old.step()
    with pytest.raises(RuntimeError, match="add_param_group before make_private_with_epsilon"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1


def test_a_later_run_begins_at_the_users_rates_and_the_earlier_one_is_refused():
    """Not at those that the first run has left, in the ratio between groups neither; before anything is counted."""
    model, first = make("groups", preset="robust", steps=6)
    given = [group["lr"] for group in first.base.param_groups]
    steps(first, SIZES[:3])
    (batch,) = make_batches([9])
    assert [group["lr"] for group in first.base.param_groups] != given
    second = by_hand(model, first.base, preset="fixed", **PRIVATE)
    assert [group["lr"] for group in second.param_groups] == given
    with pytest.raises(RuntimeError, match="was made private once more, for another run"):
        first.step(cross_entropy(model), batch)
    assert first.ledger.steps == 3
    with pytest.warns(UserWarning, match="trained privately before"):
        assert second.step(cross_entropy(model), batch).eta == given[0]
