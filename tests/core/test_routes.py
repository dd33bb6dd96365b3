"""Factors or the gradients themselves, and samples at once: what takes least time within the memory there is."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from models import Example, assert_exact
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hyfreedp.gradients import AutomaticClipping, GradientEngine
from hyfreedp.gradients.mapped import Pass
from hyfreedp.gradients.per_sample import Instantiated, OuterProducts, keeps_factors
from hyfreedp.gradients.pieces import Partition


@pytest.mark.parametrize(("tokens", "p", "d"), [*itertools.product((1, 3, 17, 65), (8, 192), (10, 256))])
def test_the_route_is_the_cheaper_by_counted_multiplications(tokens, p, d) -> None:
    factors = OuterProducts(torch.randn(2, tokens, p).double(), torch.randn(2, tokens, d).double())
    counts = []
    for work in (factors.instantiate, lambda: (factors.squared_norms, factors.weighted_sum(torch.ones(2)))):
        with FlopCounterMode(display=False) as counter:
            work()
        counts.append(counter.get_total_flops() / 4)  # multiplications for each of two samples
    by_gradients, by_factors = counts[0] + 16 * p * d, counts[1]
    if tokens == 1:  # whose Gram matrices are numbers, and are not counted
        assert keeps_factors(tokens, p, d, True)
        return
    assert by_factors == tokens**2 * (p + d) + tokens * p * d
    smaller = factors.instantiate().rows.numel() <= factors.left.numel() + factors.right.numel()
    assert keeps_factors(tokens, p, d, True) == (by_factors <= by_gradients and not smaller)
    assert keeps_factors(tokens, p, d) == (not smaller)


@pytest.mark.parametrize(("tokens", "slack"), [(196, 0.008), (400, 0.004)])
def test_norms_of_many_tokens_count_what_rounding_may_take(tokens, slack) -> None:
    """From Gram matrices, or, of 400 tokens, from formed gradients: a small share unless tokens cancel."""
    left, right = torch.randn(3, tokens, 384), torch.randn(3, tokens, 1536)
    left[2, tokens // 2 :], right[2, tokens // 2 :] = 2 * left[2, : tokens // 2], -0.5 * right[2, : tokens // 2]
    squares = (left.double().mT @ right.double()).flatten(1).square().sum(1)
    more = OuterProducts(left, right).squared_norms.double() - squares
    uncancelled = (left.norm(dim=2) * right.norm(dim=2)).sum(1).square()
    assert -1e-5 * squares[0] < more.min() and max(more[:2] / squares[:2]) < slack
    assert squares[2] < 1e-10 * uncancelled[2] and more[2] > 1e-6 * uncancelled[2]


def test_the_form_of_a_gradient_does_not_depend_on_the_number_of_samples() -> None:
    model = nn.Linear(96, 96, bias=False)
    for size in (1, 4, 400):
        one_pass = Pass([model.weight], size, memory_budget=6 * 4 * 96 * 96, sharing=6)
        _, found = one_pass.computed(lambda tensors: model(*tensors).square().mean(), [torch.randn(size, 46, 96)])
        assert isinstance(found[model.weight], Instantiated)
    with pytest.raises(ValueError, match="sharing must be an integer of at least 1, got 0"):
        GradientEngine(model, AutomaticClipping(), sharing=0)


def test_a_pass_instantiates_within_its_room_and_is_exact_with_any() -> None:
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(3)))
    x = torch.randn(4, 46, 96).double()
    example = Example(model.double().train(), (x,), lambda model, x: model(x).square().mean((1, 2)))
    one = 4 * 96 * 96 * 8
    for room, number in ((0, 0), (one - 1, 0), (one, 1), (3 * one - 1, 2), (3 * one, 3)):
        engine = GradientEngine(model, AutomaticClipping())
        engine.memory_budget = room
        assert_exact(example, engine)
        one_pass = Pass(example.trainable, 4, memory_budget=room)
        _, found = one_pass.computed(lambda tensors: model(*tensors).square().mean(), [x])
        assert sum(isinstance(each, Instantiated) for each in found.values()) == number


@pytest.mark.parametrize(("samples", "sizes"), [(0, [1] * 7), (1, [1] * 7), (3, [3, 3, 1]), (6.9, [6, 1]), (7, [7])])
def test_copies_of_a_large_parameter_split_the_batch_within_the_room_and_are_exact_with_any(samples, sizes) -> None:
    """One that no rule knows, used twice, takes as much for each sample as it has numbers."""
    model = nn.ParameterList([nn.Parameter(torch.randn(5, 100).double())])
    x = torch.randn(7, 100).double()
    example = Example(model, (x,), lambda m, x: F.relu(x * m[0]).sum() + m[0].square().sum())
    engine, partition = GradientEngine(model, AutomaticClipping()), Partition.of(example.batch)
    engine.memory_budget = int(samples * 4000)
    engine.clipped_sums(lambda batch: example.loss(model, *batch), partition)
    assert [len(piece.group) for piece in partition.pieces] == sizes
    assert_exact(example, engine)
