"""What is told to a user who does the obvious thing that is wrong here: the cause, and what to do instead."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from twins import by_hand, cross_entropy, make_batches, make_private, refused, steps

from hyfreedp import PrivacyEngine

PRIVATE = {"target_epsilon": 3.0}


def test_the_wiring_cell_run_twice_is_told_of_the_private_loader():
    model, optimizer, loader = make_private()
    with pytest.raises(ValueError, match=r"data_loader is private already, .* give the plain DataLoader"):
        make_private(model, optimizer, loader=loader)


@pytest.mark.parametrize(
    ("wrong", "instead"),
    [
        ("target_epsilonn", "; did you mean 'target_epsilon'"),
        ("clip", "; did you mean 'clipping'"),
        ("batch_size", ": it is the data_loader's, of records or, with owners=, of owners"),
        ("max_grad_norm", r": .*clipping=hyfreedp.AbadiClipping\(max_grad_norm\)"),  # Opacus's
        ("noise_multiplier", ": .*target_epsilon, target_delta and the length of the run"),
    ],
)
def test_an_unknown_argument_is_refused_with_what_to_write_even_where_one_is_missing(wrong, instead):
    with pytest.raises(TypeError, match=f"unknown argument '{wrong}'{instead}"):
        PrivacyEngine().make_private_with_epsilon(module=torch.nn.Linear(5, 3), **{wrong: 1})


@pytest.mark.parametrize("loss", [lambda x, y: F.cross_entropy(x, y), torch.nn.CrossEntropyLoss()])
def test_a_loss_of_two_arguments_is_told_to_take_the_batch_apart(loss):
    _, optimizer, loader = make_private()
    with refused(optimizer, r"must take one argument, .* got a function of \(.*\).*: .* x, y = record", TypeError):
        optimizer.step(loss, next(iter(loader)))


def test_a_delta_of_one_in_n_is_warned_of():
    message = r"target_delta=0.025 is not below 1/N, with N = 40 .* 1/\(10 N\) = 0.0025"
    with pytest.warns(UserWarning, match=message) as told:
        make_private(target_delta=0.025, **PRIVATE)
    assert told[0].filename.endswith("twins.py")  # who called
    make_private(target_delta=0.0249, **PRIVATE)  # without a word, which would be an error here
    make_private(target_delta=0.5)  # as is one without privacy


@pytest.mark.parametrize("diagnostics", [False, True])
def test_a_batch_without_a_finite_loss_is_told_with_diagnostics_only(diagnostics):
    """Whether losses are finite is raw: who did not ask for raw values is told nothing that depends on it."""
    optimizer = by_hand(diagnostics=diagnostics, preset="fixed", **PRIVATE)
    for broken, count in (([True, False], 0), ([True, True], diagnostics), ([], 0)):
        factor = torch.where(torch.tensor(broken, dtype=torch.bool), math.nan, 1.0)
        batch = [*make_batches([len(broken)])[0], factor]
        with pytest.warns(UserWarning, match="no sample of this batch") if count else nullcontext():
            optimizer.step(lambda b: cross_entropy(optimizer.module)(b) * b[2], batch)


def test_a_model_that_was_trained_before_is_warned_of():
    """What a second run of a notebook's cells does: epsilon begins at zero again. test_wrapper.py has it in turn."""
    first = by_hand()
    second = by_hand(first.module)  # wired before the first has made a step
    steps(first, [8, 8])
    with pytest.warns(UserWarning, match="trained privately before: epsilon of the new run does not include"):
        steps(second, [8])
    steps(second, [8])


def test_what_is_slow_is_told():
    """A number of each record, as for a log, and names."""
    optimizer, (batch,) = by_hand(), make_batches([9])
    loss = cross_entropy(optimizer.module)
    with pytest.warns(UserWarning, match=r"one at a time, since the loss asks each for a number, by \.item\(\)"):
        optimizer.step(lambda record: loss(record) + 0 * loss(record).item(), batch)
    with pytest.warns(UserWarning, match="one at a time, since nearly each has a shape, text, array or number"):
        record = optimizer.step(loss, [*batch, [*"aabbcdefg"]])
    with pytest.raises(AttributeError, match=r"no 'item', only step, eta, .*: the loss of a batch is not private"):
        record.item()
