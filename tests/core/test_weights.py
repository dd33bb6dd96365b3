"""Weights of records multiply what is clipped already: no record counts for more than the noise is made for."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from models import Example
from twins import by_hand, cross_entropy, flat, make_batches, make_model, refused, sgd

from hyfreedp.gradients import AbadiClipping, AutomaticClipping
from hyfreedp.privatize import privatize_votes

CLASS_WEIGHTS = torch.tensor([1.0, 0.1, 0.0], dtype=torch.float64)


def by_class(batch):
    return CLASS_WEIGHTS[batch[1]]


@each(pieces=[None, 4, lambda record: 1 + len(record[1])], clipping=[AutomaticClipping(), AbadiClipping(0.1)])
def test_a_step_multiplies_the_clipped_gradients_whatever_its_pieces(pieces, clipping):
    model, (batch,) = make_model(), make_batches([9])
    example = Example(model, tuple(batch), lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"))
    gradients = example.gradients()
    expected = (clipping.factors(gradients.norm(dim=1)) * by_class(batch)) @ gradients
    before = flat(model)
    optimizer = by_hand(model, sgd(model), preset="fixed", clipping=clipping, max_physical_batch_size=pieces)
    optimizer.step(cross_entropy(model), batch, weights=by_class)
    moved = (before - flat(model)) * optimizer.expected_batch_size
    torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("preset", ["robust", "paper", "fixed"])
def test_a_record_of_weight_zero_is_no_record_and_of_weight_one_a_whole_one(preset, unbound_noise):
    """Also in votes and in the losses of a line search, with noise, over a whole run."""

    def run(weigh):
        settings = {"steps": 6, "target_epsilon": 20.0, "preset": preset, "batch_size": 20}
        optimizer, ends = by_hand(**settings), []
        model = optimizer.module
        for batch in make_batches([20] * 6):
            weights, batch = weigh(batch)
            step = optimizer.step(cross_entropy(model), batch, weights=weights)
            released = step.look.margins if step.look else [step.probe.private_loss] if step.probe else []
            ends += [one for one in released if one is not None]
        return flat(model), ends

    kept = lambda batch: batch[1] < 2  # noqa: E731
    without, released = run(lambda batch: (None, [tensor[kept(batch)] for tensor in batch]))
    zero, same = run(lambda batch: (lambda batch: kept(batch).double(), batch))
    torch.testing.assert_close(zero, without, rtol=1e-6, atol=1e-9)
    assert same == pytest.approx(released, rel=1e-6) and (preset == "fixed" or any(released))
    everything, whole = run(lambda batch: (lambda batch: torch.ones(1), batch)), run(lambda batch: (None, batch))
    assert torch.equal(everything[0], whole[0]) and everything[1] == whole[1]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=6), st.integers(0, 5)
)
def test_one_record_moves_a_vote_by_one_at_most(records, out):
    def margin(rows):
        weights, *losses = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).T
        return privatize_votes(torch.stack(losses), 0.0, expected_batch_size=1, weights=weights)[0]

    out %= len(records)
    weight, here, there = records[out]
    moved = margin(records) - margin(records[:out] + records[out + 1 :])
    size = abs(there) + abs(here)
    assert math.isclose(moved, weight * (there - here) / size if size else 0.0, abs_tol=1e-6)
    assert abs(moved) <= 1 + 1e-12


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (lambda batch: 2 * by_class(batch), r"in \[0, 1\], got one outside: divide all by the largest possible"),
        (lambda batch: torch.full((1,), math.nan), r"in \[0, 1\], got one outside"),
        (lambda batch: CLASS_WEIGHTS, r"one number for a record, got shape \(3,\)"),
        (lambda batch: 0.5, "a tensor of one number for a record, got float"),
        (torch.ones(8), r"a function of one record, as lambda record: of_class\[record\[1\]\], got Tensor"),
    ],
)
def test_bad_weights_are_refused_before_anything_is_released(weights, message):
    optimizer, (batch,) = by_hand(target_epsilon=3.0), make_batches([8])
    with refused(optimizer, message, (TypeError, ValueError)):
        optimizer.step(cross_entropy(optimizer.module), batch, weights=weights)
