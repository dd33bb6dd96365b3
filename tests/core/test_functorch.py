"""Each private name of functorch does what is said of it, in whatever version of PyTorch this is."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.overrides import TorchFunctionMode

from hyfreedp.gradients import AutomaticClipping, GradientEngine
from hyfreedp.gradients.functorch import Level, backward


@pytest.fixture
def rows() -> Tensor:
    return torch.arange(12.0).view(3, 4)


def within(level: Level, look: Callable[[Tensor], Any], rows: Tensor) -> list[Any]:
    """What ``look`` says of a tensor of the level, in it, in a map and in a gradient within, and in both."""
    said = []

    def noted(x: Tensor) -> Tensor:
        said.append(look(x))
        return x.sum()

    with level:
        x = level.mapped(rows)
        noted(x)
        torch.vmap(lambda y: noted(x) * y)(torch.ones(2))
        grad(lambda y: noted(x) * y)(torch.ones(()))
        torch.vmap(grad(lambda y: noted(x) * y))(torch.ones(2))
    return said


def test_a_level_shows_samples_and_is_left_and_entered_again(rows) -> None:
    level = Level(3)
    with level:
        x = level.mapped(rows)
        assert level.number == 1 and x.shape == (4,) and level.holds(x) and level.holds(x.sum() + 1)
        assert not level.holds(rows) and level.samples(x) is rows
        y = torch.outer(torch.ones(2), x).movedim(0, 1)
        assert torch.equal(level.samples(y), rows[..., None].expand(3, 4, 2))
    assert torch.equal(level.samples(y), rows[..., None].expand(3, 4, 2)) and level.holds(y)
    with level:
        assert level.number == 1 and torch.equal(level.samples(x + y.sum()), rows + 2 * rows.sum(1, keepdim=True))
    with Level(2), pytest.raises(RuntimeError, match="at another level"), level:
        pass
    with Level(2) as other:  # which the refused entry has left as it was
        assert other.number == 1 and other.is_innermost()


def test_a_level_is_left_with_those_within(rows) -> None:
    level = Level(3)

    def outside(x: Tensor) -> tuple[int, int]:
        with level.left():
            assert not level.is_innermost()
            count = int((level.samples(x) > 4).sum())  # of all samples, as no map allows
        return count, x.dim()  # and it is back

    assert within(level, outside, rows) == [(7, 1)] * 4
    with level:
        with pytest.raises(KeyError), level.left():
            raise KeyError
        assert level.is_innermost() and level.holds(level.mapped(rows) + 1)


def test_a_level_maps_without_a_warning_what_functorch_has_no_rule_for(rows, recwarn) -> None:
    with Level(3) as level:
        level.mapped(rows).take(torch.tensor([1]))
    assert not recwarn
    torch.vmap(lambda x: x.take(torch.tensor([1])))(rows)
    assert "performance drop" in str(recwarn.pop().message)


def test_what_is_patched_for_all_threads_is_put_back(rows) -> None:
    """Two passes at once left it there."""
    layer, before = torch.nn.Linear(4, 1), vars(torch.autograd.Function)["apply"]
    engine = GradientEngine(layer, AutomaticClipping())
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: engine.losses(lambda x: (time.sleep(0.1), layer(x))[1], rows), range(2)))
    assert vars(torch.autograd.Function)["apply"] is before


def test_a_backward_pass_keeps_modes_in_force(rows) -> None:
    """Which ``torch.autograd.grad`` puts out of force."""
    met = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            met.append(func)
            return func(*args, **(kwargs or {}))

    x, unused = rows.requires_grad_(), torch.ones((), requires_grad=True)
    h = x.clone()
    h.register_hook(lambda g: torch.mul(g, 3))
    losses = h.sum(1)
    with Mode():
        torch.autograd.grad(losses.sum(), x, retain_graph=True)
        assert torch.mul not in met
        found = backward(losses, [x, unused])
    assert torch.mul in met and found[1] is None and torch.equal(found[0], torch.full((3, 4), 3.0)) and x.grad is None
