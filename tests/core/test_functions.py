"""Functions of autograd that a user writes: forward and backward see one record, in a map as alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import assert_exact, classifier
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from twins import Built, function

from hyfreedp.errors import Refused
from hyfreedp.gradients import AutomaticClipping, GradientEngine


def scaled(ctx: Any, x: Tensor, p: Tensor, power: int = 1) -> Tensor:
    ctx.save_for_backward(x, p)
    ctx.power, ctx.shape = power, x.shape
    return x * p**power


@once_differentiable
def scaled_back(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, p = ctx.saved_tensors
    assert ctx.shape == x.shape == g.shape and ctx.needs_input_grad[:2] == (True, True)
    return g * p**ctx.power, g * x * ctx.power * p ** (ctx.power - 1), None  # the second has more dimensions than p


def top(ctx: Any, x: Tensor, *unused: Tensor) -> tuple[Tensor, Tensor, str]:
    values, places = x.max(-1)
    ctx.save_for_backward(None, places)
    ctx.mark_non_differentiable(least := x.amin(-1))
    ctx.set_materialize_grads(not unused)
    return values, least, "max"


def top_back(ctx: Any, g: Tensor | None, none: Tensor | None, text: None) -> Any:
    nothing, places = ctx.saved_tensors
    assert nothing is None and text is None and (none is None or not none.any())
    return None if g is None else F.one_hot(places, 6) * g[..., None], *(None for _ in ctx.needs_input_grad[1:])


def clipped_back(ctx: Any, g: Tensor) -> Tensor:
    """By a decision for each record, which no exception handler answers for others."""
    try:
        return g / 2 if g.abs().max() > 0.1 else -g
    except Exception:
        return 3 * g


def exp(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(y := x.exp())
    return y


def windows(x: Tensor) -> Tensor:
    return x.as_strided((1, 3, 6), (x.stride(0), 2 * x.stride(1), x.stride(2)))


def windows_back(ctx: Any, g: Tensor) -> Tensor:
    windows(out := torch.zeros_like(g[:, [0, 0, 1, 1, 2]])).add_(g)
    return out


def half_back(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    x, p = ctx.saved_tensors
    assert (x @ p).dtype == torch.bfloat16
    return g @ p, (g.mT @ x)[0]


def in_half(h: Tensor, p: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return Half.apply(h, torch.outer(p, p)).float()


Reversed = function(lambda ctx, x, by: setattr(ctx, "by", by) or x.view_as(x), lambda ctx, g: (-ctx.by * g, None))
Rounded = function(lambda ctx, x: x.mul(9).round(), lambda ctx, g: g)
Scaled, Top = function(scaled, scaled_back), function(top, top_back)
Exp = function(exp, lambda ctx, g: g * ctx.saved_tensors[0])
Clipped = function(lambda ctx, x: x * 2, clipped_back)
By_vjp = function(exp, lambda ctx, g: torch.func.vjp(torch.exp, ctx.saved_tensors[0].log())[1](g)[0])
Both = function(lambda ctx, x: (y := x.exp(), y), lambda ctx, g, h: g + 3 * h)
Masked = function(
    lambda ctx, x, p: ctx.save_for_backward(x, p) or x * p,
    lambda ctx, g: (g * ctx.saved_tensors[1], g * ctx.saved_tensors[0]),
)
Windows = function(lambda ctx, x: windows(x).clone(), windows_back)
Same = function(lambda ctx, x: x, lambda ctx, g: g[None])  # its gradient has a dimension more
Fixed = function(lambda ctx, x: torch.ones(6).to(x), lambda ctx, g: torch.ones(1, 5, 6).to(g))
Doubled = function(lambda ctx, x: ctx.mark_dirty(x) or x.mul_(2), lambda ctx, g: 2 * g)
Twice = function(lambda ctx, x: Exp.apply(Same.apply(x)), lambda ctx, g: Reversed.apply(g, 0.5))
New = function(
    lambda x, p=2: x**p,
    lambda ctx, g: (g * ctx.p * ctx.saved_tensors[0] ** (ctx.p - 1), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]) or setattr(ctx, "p", inputs[1]),
    vmap=lambda info, dims, x, p: (x.sum(0, keepdim=True).expand_as(x), 0),
)
Half = function(
    custom_fwd(lambda ctx, x, p: ctx.save_for_backward(x, p) or F.linear(x, p), device_type="cpu"),
    custom_bwd(half_back, device_type="cpu"),
)

USES = {  # of h (1, 5, 6) and a parameter p (6)
    "gradient reversal": lambda h, p: Reversed.apply(h, 0.3) * p,
    "straight through": lambda h, p: Rounded.apply(h * p).mul_(p),
    "saved and kept": lambda h, p: Scaled.apply(h, p, 3) + Scaled.apply(h, p.exp().expand(5, 6)),
    "an output without gradient": lambda h, p: h * p + sum(Top.apply(h * p)[:2])[..., None],
    "gradients that are not made": lambda h, p: h * p + (Top.apply(h, p, h)[1] + Top.apply(h)[0])[..., None],
    "a saved output, of one number, too": lambda h, p: Exp.apply(h) * p + Exp.apply(p.sum()),
    "a decision in the backward pass": lambda h, p: Clipped.apply(h * p),
    "constants": lambda h, p: h + Fixed.apply(h) * p,
    "constants, written into": lambda h, p: h * p + Fixed.apply(h).mul_(h[0, 0] * p),
    "within another": lambda h, p: Twice.apply(h) * p,
    "of the new style": lambda h, p: New.apply(h * p) + New.apply(h, 3),
    "recomputed": lambda h, p: checkpoint(lambda h: Exp.apply(Scaled.apply(h, p, 2)) * p, h, use_reentrant=False),
    "autocast": in_half,
    "a gradient of a constant": lambda h, p: Masked.apply(h * p, torch.arange(6.0)),
    "vjp in the backward pass": lambda h, p: By_vjp.apply(h) * p,
    "an output twice": lambda h, p: sum(Both.apply(h * p)),
    "windows": lambda h, p: h * p + Windows.apply(h * p).sum(1, keepdim=True),
    "written into": lambda h, p: Doubled.apply(h * p),
}


SLOW = {"written into": "writes into its input", "an output twice": "one twice", "windows": "a write into"}


@pytest.mark.parametrize("use", USES)
def test_a_function_is_what_it_is_for_a_record_alone(use) -> None:
    parts = {"inner": nn.Linear(4, 6), "head": nn.Linear(6, 3), "p": nn.Parameter(torch.randn(6))}
    model = Built(lambda m, x: m.head(torch.tanh(USES[use](m.inner(x), m.p))).mean(1), **parts)
    dtype, rtol = (torch.float, 0.02) if use == "autocast" else (torch.double, 1e-9)
    assert_exact(classifier(model, torch.randn(4, 5, 4).to(dtype), 3), slow=SLOW.get(use), rtol=rtol)


KEEPING = {  # something of an earlier call
    "a mean, as on the class": (lambda ctx, x: x - KEPT.setdefault("", x.mean()), lambda ctx, g: g),
    "a mean of gradients": (lambda ctx, x: x * 1, lambda ctx, g: g - KEPT.setdefault("", g.mean())),
    "a gradient": (lambda ctx, x: x * 1, lambda ctx, g: KEPT.setdefault("", g)),
    "an output": (lambda ctx, x: KEPT.setdefault("", x * 1), lambda ctx, g: g),
    "an input": (
        lambda ctx, x: ctx.save_for_backward(KEPT.setdefault("", x)) or x * 1,
        lambda ctx, g: g * ctx.saved_tensors[0],
    ),
    "a ctx": (lambda ctx, x: KEPT.setdefault("", (ctx, setattr(ctx, "x", x)))[0].x * x, lambda ctx, g: g),
    "a parameter": (lambda ctx, x, p: p.__setitem__(0, x.sum()) or x * p, lambda ctx, g: (g, None)),
}
KEPT: dict[str, Any] = {}


@pytest.mark.parametrize("what", KEEPING)
def test_a_function_sees_nothing_of_another_record(what) -> None:
    KEPT.clear()
    own, model = function(*KEEPING[what]), nn.Linear(4, 4)
    engine, more = GradientEngine(model, AutomaticClipping()), [model.bias] if what == "a parameter" else []
    with pytest.raises(Refused, match=r"of another pass|parameters of the model"):
        for x in torch.randn(2, 6, 1, 4):
            engine.clipped_sums(lambda x: own.apply(model(x), *more).square().sum(), x)
    assert engine.fallback_reason is None


def test_a_function_writes_into_no_parameter_of_the_model_also_for_one_record() -> None:
    own, model = function(lambda ctx, x, p: x * p.add_(x.sum()), lambda ctx, g: (g, g)), nn.Linear(4, 4)
    before = model.bias.clone()
    GradientEngine(model, AutomaticClipping()).clipped_sums(
        lambda x: own.apply(model(x), model.bias).sum(), torch.ones(1, 1, 4)
    )
    assert torch.equal(model.bias, before)
