"""Factors or the gradients themselves, and samples at once: what takes least time within the memory there is."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from models import Example, assert_exact
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hyfreedp.gradients import AutomaticClipping, make_engine
from hyfreedp.gradients.mapped import Pass
from hyfreedp.gradients.per_sample import Instantiated, OuterProducts, keeps_factors, norms_of
from hyfreedp.gradients.pieces import Partition


@pytest.mark.parametrize(("tokens", "p", "d"), [*itertools.product((1, 3, 17, 65), (8, 192), (10, 256))])
def test_the_route_is_the_cheaper_by_counted_multiplications(tokens, p, d) -> None:
    factors = OuterProducts(torch.randn(2, tokens, p).double(), torch.randn(2, tokens, d).double())
    counts = []
    for work in (factors.instantiate, lambda: (factors.squared_norms, factors.weighted_sum(torch.ones(2)))):
        with FlopCounterMode(display=False) as counter:
            work()
        counts.append(counter.get_total_flops() / 4)  # multiplications for each of two samples
    by_gradients, by_factors = counts[0] + 16 * p * d, tokens**2 * (p + d) + tokens * p * d
    if tokens == 1:  # whose Gram matrices are numbers, and are not counted
        assert keeps_factors(tokens, p, d, True)
        return
    assert counts[1] == (by_factors if by_factors <= by_gradients else 2 * tokens * p * d)
    smaller = factors.instantiate().numel() <= factors.left.numel() + factors.right.numel()
    assert keeps_factors(tokens, p, d, True) == (by_factors <= by_gradients and not smaller)
    assert keeps_factors(tokens, p, d) == (not smaller)


def test_norms_of_many_tokens_are_those_of_formed_gradients() -> None:
    """Gram matrices of 197 tokens are inexact: what did not fit into memory was computed anew, at 14 plain steps."""
    left, right = torch.randn(3, 197, 384), torch.randn(3, 197, 1536)
    left[2, 99:], right[2, 99:] = 2 * left[2, :98], -0.5 * right[2, :98]  # tokens 99 to 196 undo 98 others
    left[2, 98] = 0
    factors = OuterProducts(left, right)
    squares = (left.double().mT @ right.double()).flatten(1).square().sum(1)
    torch.testing.assert_close(factors.squared_norms[:2].double(), squares[:2], rtol=1e-5, atol=0)
    assert norms_of([factors])[1].tolist() == [False, False, True]


@pytest.mark.parametrize("tokens", [33, 49])
def test_a_norm_does_not_depend_on_whether_the_gradient_fits(tokens) -> None:
    """One record more, with which it did not, moved the sum of 3,970 equal ones by 1.27 clips."""
    signs = torch.ones(tokens, 1).index_fill(0, torch.arange(tokens // 2, tokens), -0.76)
    factors = OuterProducts((0.9 * signs).expand(2, tokens, 130), torch.rand(130).expand(2, tokens, 130))
    assert torch.equal(factors.squared_norms, factors.cheaper(2**40).squared_norms)


def test_where_tokens_cancel_sums_do_not_depend_on_it() -> None:
    """What rounding left of the norms of 2,322 equal records, one record more moved the sum by: 1.19 clips."""
    signs = torch.ones(84, 1).index_fill(0, torch.arange(42, 84), -1)
    factors = OuterProducts((signs + 0.01).expand(2, 84, 170), torch.ones(2, 84, 170))
    assert norms_of([factors])[1].all()


def test_a_pass_instantiates_within_its_room_and_is_exact_with_any() -> None:
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(3)))
    x = torch.randn(4, 46, 96).double()
    example = Example(model.double().train(), (x,), lambda model, x: model(x).square().mean((1, 2)))
    one = 4 * 96 * 96 * 8
    for room, number in ((0, 0), (one - 1, 0), (one, 1), (3 * one - 1, 2), (3 * one, 3)):
        engine = make_engine(model, AutomaticClipping())
        engine.memory_budget = room
        assert_exact(example, engine)
        one_pass = Pass(example.trainable, 4, memory_budget=room)
        found = one_pass.gradients(one_pass.losses(lambda tensors: model(*tensors).square().mean(), [x]))
        assert sum(isinstance(each, Instantiated) for each in found.values()) == number


@pytest.mark.parametrize(("samples", "sizes"), [(0, [1] * 7), (1, [1] * 7), (3, [3, 3, 1]), (6.9, [6, 1]), (7, [7])])
def test_copies_of_a_large_parameter_split_the_batch_within_the_room_and_are_exact_with_any(samples, sizes) -> None:
    """One that no rule knows, used twice, takes as much for each sample as it has numbers."""
    model = nn.ParameterList([nn.Parameter(torch.randn(5, 100).double())])
    x = torch.randn(7, 100).double()
    example = Example(model, (x,), lambda m, x: F.relu(x * m[0]).sum() + m[0].square().sum())
    engine, partition = make_engine(model, AutomaticClipping()), Partition.of(example.batch)
    engine.memory_budget = int(samples * 4000)
    engine.add(lambda batch: example.loss(model, *batch), partition)
    assert [len(piece.group) for piece in partition.pieces] == sizes
    assert_exact(example, engine)
