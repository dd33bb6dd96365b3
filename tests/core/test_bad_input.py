"""Bad input gets one clear message, before any record is touched and before anything changes."""

import itertools
import math

import pytest
import torch
from cases import each, pairs
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch.utils.data import DataLoader
from twins import Made, by_hand, changed, cross_entropy, flat, make_batches, make_model, make_private, refused, steps

from hyfreedp.gradients import AutomaticClipping, NoClipping

FORBIDDEN = Made(40, lambda index: pytest.fail(f"record {index} was touched"))


# -- make_private_with_epsilon -----------------------------------------------------------------------------------------

REFUSED = {
    "delta that protects nobody": ({"target_delta": 0.95}, "target_delta must be at most 0.1, got 0.95"),
    "a model in eval mode": ({"model": make_model().eval()}, r"module must be in train mode: call module.train\(\)"),
    "both epochs and steps": ({"epochs": 2, "steps": 10}, "either epochs or steps, got epochs=2 and steps=10"),
    "too many steps": ({"steps": 10**9}, r"steps must be .* at most 10000000 \(the most accounted for\), got"),
    "clipping that bounds nothing": ({"clipping": NoClipping()}, r"clipping must bound .*, got NoClipping\(\)"),
    "clipping by a number": (
        {"clipping": 1.0, "error": TypeError},
        r"clipping must be a rule of hyfreedp.gradients, got 1.0: leave it out .*AbadiClipping\(max_grad_norm\)",
    ),
}


def refuse(error, message, *, model=None, optimizer=None, **settings):
    """The call raises, and leaves model, optimizer, data and random numbers alone."""
    model = model or make_model()
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    weights, groups, random = flat(model), repr(optimizer.param_groups), torch.get_rng_state()
    defaults = {"target_epsilon": 3.0, "loader": DataLoader(FORBIDDEN, batch_size=8)}
    with pytest.raises(error, match=message):
        make_private(model, optimizer, **(defaults | settings))
    assert torch.equal(flat(model), weights) and torch.equal(torch.get_rng_state(), random)
    assert repr(optimizer.param_groups) == groups


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_out_of_range_are_refused_by_name_value_and_range(case):
    settings, message = REFUSED[case]
    settings = dict(settings)
    refuse(settings.pop("error", ValueError), message, **settings)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda m: torch.optim.SGD(make_model().parameters()), "holds 6 .* not the model's, the first of shape .7, 5."),
        (lambda m: torch.optim.SGD(m[:3].parameters()), r"lacks 2 trainable .* of the model, the first '3.weight'"),
        (lambda model: torch.optim.SGD(model.parameters(), maximize=True), "must not have maximize=True"),
        (
            lambda model: DPOptimizer(
                torch.optim.SGD(model.parameters(), 1.0), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8
            ),
            r"got Opacus's DPOptimizer: give its \.original_optimizer",
        ),
        (lambda model: torch.optim.SGD(model.parameters(), 0.1, 1.0), "must have momentum below 1, got 1"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "without a closure, got LBFGS: choose AdamW or SGD"),
        (lambda model: torch.optim.SGD(model.parameters(), 0.0), r"must have positive learning rates, .*; got \[0.0\]"),
        (lambda m: torch.optim.SGD([{"params": p, "lr_scale": i} for i, p in enumerate(m.parameters())]), "only timm"),
    ],
)
def test_an_optimizer_of_other_parameters_or_without_a_rate_is_refused(optimizer, message):
    model = make_model()
    refuse((ValueError, TypeError), message, model=model, optimizer=optimizer(model))


def test_a_frozen_model_is_refused():
    model = make_model().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter is trainable: set requires_grad"):
        make_private(model, torch.optim.AdamW(model.parameters()))


def test_what_is_of_opacus_is_refused_with_what_to_give_instead():
    """A wrapped model, or the model within, whose hooks would fail in the middle of a step."""
    model = make_model()
    wrapped = GradSampleModule(model)
    for given in (model, wrapped):
        with pytest.raises(ValueError, match=r"must not have Opacus's hooks.* \.to_standard_module\(\)"):
            make_private(given)
    make_private(wrapped.to_standard_module())


# -- step --------------------------------------------------------------------------------------------------------------

WRONG_LOSSES = {
    "none": (lambda losses: losses[1:], r"one number for a record, got shape \(0,\)"),
    "several": (lambda losses: losses[:, None].expand(-1, 4), r"got shape \(1, 4\): return its mean"),
    "detached": (lambda losses: losses.detach(), "loss must have a gradient"),
    "of integers": (lambda losses: losses.long(), "loss must have a gradient"),
    "complex": (lambda losses: losses + 1j, "a real number, got a complex one: return its absolute value"),
    "of another model": (lambda losses: losses, "must have a gradient .* by another model"),
    "backward": (lambda losses: losses.sum().backward(), "gets one record, .* and calls no backward"),
    "undefined alone": (lambda losses: losses / (losses - losses.mean()), "of 3 together it is .* theirs are inf, inf"),
    "of nothing in the record": (lambda losses: torch.ones(1), "must depend on its argument, one record"),
    "finite for no record": (lambda losses: losses * math.nan, "no record of the first batch has a finite loss"),
    "samples mixed": (lambda losses: losses.sum() - losses, "records' losses alone.*a pair in place of in-batch"),
}


@each(preset=["robust", "fixed"], case=WRONG_LOSSES)
def test_a_loss_function_of_the_wrong_form_releases_nothing(case, preset):
    """It is found at the first forward pass; once corrected, training starts as if nothing had been."""
    (wrong, message), settings = WRONG_LOSSES[case], {"preset": preset, "target_epsilon": 3.0}
    optimizer, undisturbed = by_hand(**settings), by_hand(**settings)
    model, (batch,) = optimizer.module, make_batches((6,))
    trained = make_model(seed=1) if case == "of another model" else model
    with refused(optimizer, message, (TypeError, ValueError, RuntimeError)):
        optimizer.step(lambda batch: wrong(cross_entropy(trained)(batch)), batch)
    assert not optimizer.base.state
    optimizer.step(cross_entropy(model), batch)
    steps(undisturbed, [6])
    assert torch.equal(flat(model), flat(undisturbed.module))


def test_a_model_that_cannot_make_the_step_is_refused_before_the_loss_is_called():
    """After an evaluation that forgot ``model.train()``; in float16, where AdamW ends in NaN; with a flag for GPUs."""
    for message in (r"model.train\(\)", r"float16 with AdamW.*bfloat16\(\)", "on a CPU: leave it out"):
        model, random = make_model(dropout=0.5), torch.get_rng_state()
        optimizer = by_hand(model, torch.optim.AdamW(model.parameters(), capturable="CPU" in message))
        model.train("train" not in message)
        model.to(torch.float16 if "float16" in message else None)  # as precision="16-true" does
        with refused(optimizer, message):
            optimizer.step(lambda batch: pytest.fail("the loss function was called"), make_batches((6,))[0])
        assert torch.equal(torch.get_rng_state(), random)


# -- losses that are not finite, or negative ---------------------------------------------------------------------------

BROKEN = {
    "nan": lambda losses, rows: losses * torch.where(rows, math.nan, 1.0),
    "inf": lambda losses, rows: losses * torch.where(rows, math.inf, 1.0),
    "inf beside a finite gradient": lambda losses, rows: losses + torch.where(rows, math.inf, 0.0),
    "negative": lambda losses, rows: losses * torch.where(rows, -1.0, 1.0),
    "nan beside a finite gradient": lambda losses, rows: losses + torch.where(rows, math.nan, 0.0),
}


@pairs(target=[3.0, math.inf], preset=["robust", "paper", "fixed"], broken=BROKEN)
def test_losses_that_are_not_finite_or_negative_leave_all_that_is_learned_finite(broken, preset, target):
    """Weights, rate, thresholds and history, with one broken record in every batch, and then a whole broken batch."""
    settings = {"target_epsilon": target, "clipping": AutomaticClipping()}
    optimizer = by_hand(preset=changed(preset, interval=1), **settings)
    model = optimizer.module
    for t, batch in enumerate(make_batches((8, 6, 5, 7))):
        rows = torch.arange(len(batch[0])) == 1 if t < 3 else torch.ones(len(batch[0]), dtype=bool)
        optimizer.step(lambda b: BROKEN[broken](cross_entropy(model)(b), b[2]), [*batch, rows])
        assert flat(model).isfinite().all() and 0 < optimizer.eta < 1e3
    assert optimizer.ledger.steps == 4
    for key, value in itertools.chain.from_iterable(row.items() for row in optimizer.history):
        assert not isinstance(value, float) or math.isfinite(value) or ("threshold" in key and target == math.inf)
