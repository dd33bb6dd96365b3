"""The map over records: what a loss may do in it, what is computed by a loop instead, and what is refused."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import together
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Example, assert_exact
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from twins import Built, by_hand, make_batches, refused

from hyfreedp.gradients import AbadiClipping, AutomaticClipping, make_engine
from hyfreedp.gradients.engine import Piece, Plan
from hyfreedp.running.checks import Refused

Loss = Callable[..., Tensor]
looping = pytest.mark.filterwarnings("ignore:samples are computed one at a time:UserWarning")


def example_of(loss: Loss, model: nn.Module | None = None) -> Example:
    """Records of three numbers, of which each has its own sign, and of a small whole number."""
    numbers = torch.tensor([0, 1, 2, 1, 0, 3])
    x = torch.randn(6, 3).double().abs() * torch.tensor([1, 1, -1, -1, 1, 1])[:, None]
    return Example((model or nn.Linear(3, 1)).double().train(), (x, numbers), loss)


def seeded_by_name(piece: Piece, alone: bool) -> None:
    torch.manual_seed(1000 * piece.stream[0] + piece.stream[1])


def pieces_of(example: Example) -> int:
    """How many groups of records are mapped one after the other."""
    plan = Plan.of(example.batch)
    make_engine(example.model, AutomaticClipping()).add(lambda batch: example.loss(example.model, *batch), plan)
    return len(plan.pieces)


# -- decisions of Python -----------------------------------------------------------------------------------------------


def nested(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    """Where numbers are odd, signs count."""
    if k % 2:
        return m(x).sum() if x.sum() > 0 else m(-x).square().sum()
    return 3 * m(x.exp()).sum()


def collatz(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    steps, k = 1, k.clone()
    while k > 1:
        k, steps = (3 * k + 1 if k % 2 else k // 2), steps + 1
    return m(steps * x).sum()


def not_a_number(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    ratio = float(k / k)
    return m(x).sum() * (2 if math.isnan(ratio) else ratio)


def caught(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    """What the map raises is no answer to a loss that catches it."""
    number = 7
    with suppress(Exception):
        number = int(k)
    return m(x).sum() * (number + 1)


DECISIONS: dict[str, tuple[Loss, int]] = {
    "all agree": (lambda m, x, k: m(x).sum() if (k >= 0).all() else m(x).exp().sum(), 1),
    "if": (lambda m, x, k: m(x).sum() if x.sum() > 0 else m(x).exp().sum(), 2),
    "item": (lambda m, x, k: m(x).sum() * (1 + k.item()), 4),
    "int": (lambda m, x, k: sum(m(x).sum() for _ in range(int(k) + 1)), 4),
    "tolist": (lambda m, x, k: m(x).sum() * (1 + k.tolist()[0]), 4),
    "index": (lambda m, x, k: [m(x), m(x) * 2, m(x).exp(), m(x).sin()][k].sum(), 4),
    "in": (lambda m, x, k: m(x).sum() * (1 + (0 in k)), 2),
    "sorted": (lambda m, x, k: m(x).sum() * sorted(torch.cat([k, 2 - k, k - 2]))[1], 2),
    "without gradients": (lambda m, x, k: m(x).sum() * (1 + torch.no_grad()(lambda: bool(m(x) > 0))()), 2),
    "nested": (nested, 3),
    "collatz": (collatz, 3),
    "not a number": (not_a_number, 2),
    "caught": (caught, 4),
}


@together("decision", DECISIONS)
def test_samples_are_mapped_with_those_that_decide_alike(decision) -> None:
    loss, pieces = DECISIONS[decision]
    example = example_of(loss)
    assert_exact(example)
    assert pieces_of(example) == pieces


def test_a_random_decision_has_its_law_and_goes_with_the_number_that_decided() -> None:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        drawn, waited = torch.rand(()), 0
        while torch.rand(()) < 0.5:  # geometric
            waited += 1
        return m.w * (drawn if drawn < 0.3 else 1 + drawn) + 10 * m.w * waited

    model, x = Built(None, w=nn.Parameter(torch.ones(()))), torch.ones(1000, 1)
    engine = make_engine(model, AutomaticClipping())
    losses, norms = engine.add(lambda x: loss(model, x), x, begin=seeded_by_name)
    torch.testing.assert_close(losses, norms)
    waited, rest = losses.div(10, rounding_mode="floor"), losses.remainder(10)
    small = rest < 1
    assert rest[small].max() < 0.3 + 1e-5 and rest[~small].min() > 1.3 - 1e-5 and engine.slow is None
    assert abs(small.double().mean() - 0.3) < 0.06 and abs(waited.mean() - 1) < 0.2
    assert abs(rest[small].mean() - 0.15) < 0.03 and abs(rest[~small].mean() - 1.65) < 0.06
    assert len(losses.unique()) > 980


def test_layers_are_dropped_for_each_sample() -> None:
    """A loss of powers of two tells which were left out."""
    layers = nn.ParameterList(nn.Parameter(torch.tensor(2.0**i)) for i in range(4))
    engine = make_engine(layers, AutomaticClipping())
    plan = Plan.of(torch.ones(400, 1))
    loss = lambda x: sum(w for w in layers if torch.rand([]) > 0.25) + 0 * layers[0]  # noqa: E731
    losses, _ = engine.add(loss, plan, begin=seeded_by_name)
    left_out = 1 - losses[:, None].div(2.0 ** torch.arange(4)).floor().remainder(2)
    assert (left_out.mean(0) - 0.25).abs().max() < 0.1 and len(plan.pieces) == len(losses.unique()) == 16


# -- what is mapped, and what is not -----------------------------------------------------------------------------------


def own_zeros(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    out, more = torch.zeros(4, dtype=x.dtype), torch.full_like(m.weight[0], 2.0)
    out[1] = m(x).sum()
    out[2:] += x[0, 1:]
    more *= x[0]
    return (out.square().sum() + m(more)).sum()


def own_numbers(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    return m(torch.empty(3, dtype=x.dtype).normal_(2.0, 0.0) + x).sum()  # of which all are two


class Mixing(torch.autograd.Function):
    """Subtracts the mean over what it takes for the batch, in a rule of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x - x.mean(dims[0], keepdim=True), dims[0]


class MixingBackward(torch.autograd.Function):
    generate_vmap_rule = True
    forward, setup_context = Mixing.forward, Mixing.setup_context

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - 0.5 * g.mean(0)


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def within(context: Callable[[], Any]) -> Loss:
    def loss(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
        with context():
            return m(x.sin()).square().sum()

    return loss


def hooked(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    h = m(x)
    h.register_hook(lambda g: 3 * g)
    return h.square().sum()


def penalty(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    """As of a critic, whose slope is to be one."""
    x = x.clone().requires_grad_(True)
    (g,) = torch.autograd.grad(m(x).tanh().sum(), x, create_graph=True)
    return (g.norm() - 1).square()


def packed(t: Tensor) -> Tensor:
    return t.clone()


def compiled(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    found = torch.compile(m, backend="eager")(x).square().sum()
    torch.compiler.reset()
    return found


GRADIENT, SCRIPT, OWN = "does not require grad", "no operation of torch shows|compiled script", "own code"
LOSSES: dict[str, tuple[Loss, str | None]] = {  # and why they are not mapped
    "writes into new tensors": (own_zeros, None),
    "draws into a new tensor": (own_numbers, None),
    "a map of tokens": (lambda m, x, k: torch.vmap(lambda row: m(x * row))(x.T).square().sum(), None),
    "a map of parameters": (lambda m, x, k: torch.vmap(lambda row: (x * row).sum())(m.weight).square().sum(), SCRIPT),
    "a gradient": (lambda m, x, k: torch.func.grad(lambda x: m(x).tanh().sum())(x).square().sum(), GRADIENT),
    "a Jacobian": (lambda m, x, k: torch.func.jacrev(lambda x: m(x).tanh())(x).square().sum(), SCRIPT),
    "a gradient penalty": (penalty, GRADIENT),
    "mixing in a map's rule": (lambda m, x, k: Mixing.apply(m(x)).square().sum(), OWN),
    "mixing in a backward pass": (lambda m, x, k: MixingBackward.apply(m(x)).square().sum(), OWN),
    "a hook": (hooked, OWN),
    "hooks on saved tensors": (
        within(lambda: torch.autograd.graph.saved_tensors_hooks(packed, packed)),
        "hooks on saved",
    ),
    "a mode of functions": (within(Functions), None),
    "a mode of operations": (within(Operations), "TorchDispatchMode"),
    "memory": (lambda m, x, k: m(torch.from_numpy(x.numpy())).sum() * (1 + np.asarray(k)[0]), "memory"),
    "its text": (lambda m, x, k: m(x).sum() * (1 + ("1" in repr(k))), "memory"),
    "checkpointing": (lambda m, x, k: checkpoint(m, x, use_reentrant=False).square().sum(), None),
    "torch.compile": (compiled, None),
    "changes its record": (lambda m, x, k: m(x.mul_(2)).sum() * k.add_(1), None),
    "an operation of shapes": (lambda m, x, k: m(x[x > 0].sum() * x).sum(), "dynamic shape"),
}


@looping
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@together("name", LOSSES)
def test_what_a_loss_may_do(name) -> None:
    loss, slow = LOSSES[name]
    example = example_of(lambda m, x, k: loss(m, x.clone(), k.clone()))
    before = [tensor.clone() for tensor in example.batch]
    assert_exact(example, slow=slow)
    make_engine(example.model, AutomaticClipping()).add(lambda batch: loss(example.model, *batch), example.batch)
    assert all(map(torch.equal, before, example.batch))  # whatever it wrote into its record


def test_autocast_within_the_loss_is_mapped() -> None:
    model, x = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1)).train(), torch.randn(6, 3)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m(x).float().square().sum()

    example, engine = Example(model, (x,), loss), make_engine(model, AutomaticClipping())
    torch.testing.assert_close(example.by_engine(engine)[0], example.clipped()[0], rtol=0.02, atol=0)
    assert engine.slow is None


# -- what is refused ---------------------------------------------------------------------------------------------------


def keeps(detached: bool) -> Loss:
    """Adds what it kept of the record before, or of the batch."""
    kept: list[Tensor] = []

    def loss(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
        if x.sum() < 0:
            kept.append(x.abs() if detached else m(x).abs())
        return m(x).sum() + sum(one.sum() for one in kept)

    return loss


def returns_kept() -> Loss:
    kept: list[Tensor] = []

    def loss(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
        kept.append(m(x).sum())
        return kept[0]

    return loss


def drawn_from(generator: torch.Generator) -> Loss:
    return lambda m, x, k: m(x + torch.rand(x.shape, generator=generator)).sum()


def seeded(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    torch.manual_seed(5)
    return m(x).sum()


@together(
    ("loss", "message"),
    [
        (keeps(True), "uses a tensor of another pass"),
        (keeps(False), "uses a tensor of another pass"),
        (returns_kept(), "uses a tensor of another pass"),
        (drawn_from(torch.Generator()), "a random generator of its own"),
        (seeded, "were seeded while"),
    ],
)
def test_what_another_record_or_a_count_of_records_could_reach_is_refused(loss, message) -> None:
    example = example_of(loss)
    with pytest.raises(Refused, match=message):
        for _ in range(2):
            example.by_engine(make_engine(example.model, AutomaticClipping()))


@looping
@together(("written", "loop"), [(written, loop) for written in ("buffer", "data", "parameter") for loop in (0, 1)])
def test_writes_into_a_model_are_refused_and_put_back(written, loop) -> None:
    """By value in the loop; a map refuses what reaches memory, and so comes to the loop."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            match written:
                case "buffer":
                    m.seen += 1
                case "data":
                    m.seen.data.fill_(7.0)
                case _:
                    m.seen = x.sum()
        return m.layer(x)

    model = Built(forward, layer=nn.Linear(3, 1), seen=nn.Buffer(torch.zeros(())))
    example = example_of(lambda m, x, k: m(x).sum(), model)
    buffer = model.seen
    with pytest.raises(Refused, match=r"changed these buffers or parameters of the model: 'seen'"):
        (example.looped() if loop else example).by_engine(make_engine(model, AutomaticClipping()))
    assert model.seen is buffer and not buffer


@looping
@together("loop", [False, True])
def test_what_a_model_keeps_as_an_attribute_or_in_a_cache_is_put_back(loop) -> None:
    """So a memory of the record before is no memory."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.layer(x) + m.last + m.cache.sum()
        m.last, m.cache = h.abs().sum(), x.detach()
        m.new = h
        return h

    parts = {"layer": nn.Linear(3, 1), "last": 0.0, "cache": nn.Buffer(torch.zeros(1), persistent=False)}
    model = Built(forward, **parts)
    example = example_of(lambda m, x, k: m(x).sum(), model)
    attributes = set(vars(model))
    found = (example.looped() if loop else example).by_engine(make_engine(model, AutomaticClipping()))
    assert set(vars(model)) == attributes and model.last == 0 and not model.cache.any()
    x = example.batch[0]
    gradients = torch.cat([x, torch.ones(6, 1)], 1).double()
    torch.testing.assert_close(found[1], AutomaticClipping().factors(found[0]) @ gradients)


def memory(shown: str, model: nn.Module) -> Callable[[list[Tensor]], Tensor]:
    """A loss that remembers whether a large record was seen, of which it was told by a decision, or in a loop."""
    seen = [1.0]

    def loss(batch: list[Tensor]) -> Tensor:
        x, y = batch
        if (x.abs().max() if shown == "decision" else x.numpy().max()) > 20:
            seen.append(3.0)
        h = model(x)
        if shown == "gradient":
            h.register_hook(lambda g: g * (-1) ** len(seen))
        return F.cross_entropy(h * (1 if shown == "gradient" else len(seen)), y)

    return loss


@looping
@pytest.mark.parametrize("shown", ["decision", "loss", pytest.param("gradient", marks=pytest.mark.xfail(strict=True))])
def test_a_memory_of_earlier_records_is_refused_where_it_is_looked_for(shown, monkeypatch) -> None:
    """A gradient's alone, as of a loss balancer: a record moved the sum by five clips."""
    monkeypatch.setattr("hyfreedp.gradients.passes._LOOKED_AT", 1.0)
    (batch,) = make_batches((8,))
    batch[0][3] = batch[0][3].abs() * 100
    optimizer = by_hand(preset="fixed")
    with refused(optimizer, "depends on those that were computed before it"):
        optimizer.step(memory(shown, optimizer.module), batch)


# -- one record moves the sum by one clip ------------------------------------------------------------------------------


def moving_average(m: nn.Module, x: Tensor) -> Tensor:
    m.average = 0.9 * m.average + 0.1 * x.mean()
    return (m.body(x) - m.average).square().sum()


def remembering(m: nn.Module, x: Tensor) -> Tensor:
    m.kept.append(x.detach())
    return (m.body(x) - sum(one.mean() for one in m.kept)).square().sum()


def shared(m: nn.Module, x: Tensor) -> Tensor:
    total = torch.zeros(4, dtype=x.dtype)
    total += x.mean((0, 1))
    return (m.body(x) * total).square().sum()


def routes(m: nn.Module, x: Tensor) -> Tensor:
    """Experts of a capacity, first come, first served."""
    h = m.body(x).flatten(0, 1)
    best = m.head(h).argmax(1)
    place = F.one_hot(best, 3).cumsum(0).gather(1, best[:, None])[:, 0]
    return (h * (place <= 2)[:, None]).square().sum()


def clipped_together(m: nn.Module, x: Tensor) -> Tensor:
    h = m.body(x)
    h.register_hook(lambda g: g / (1e-6 + g.norm()) - g.mean(0))
    return h.sin().square().sum()


def contrastive(m: nn.Module, x: Tensor) -> Tensor:
    h = F.normalize(m.body(x).mean(1), dim=1)
    return F.cross_entropy(h @ h.T, torch.arange(len(h))) + h.sum()


STRANGE: list[Loss] = [
    lambda m, x: (m.body(x) - m.body(x).mean(0)).square().sum() + m.body(x).sum(),
    lambda m, x: F.batch_norm(m.body(x).mT, None, None, training=True).pow(3).sum(),
    lambda m, x: m.body(x.flip(0).cumsum(0)).square().sum(),
    lambda m, x: m.body(x.roll(1, 0)[x[:, 0, 0].argsort()]).square().sum(),
    lambda m, x: m.rnn(m.body(x))[0].square().sum(),  # tokens first
    lambda m, x: m.body(x / x.abs().max()).exp().sum(),
    lambda m, x: m.body(x).square().sum() if x.max() > 2 else m.body(x).sum(),
    lambda m, x: m.body(x[x[..., 0] > 0]).square().sum() + m.body(x).sum(),
    lambda m, x: m.body(torch.from_numpy(np.sort(x.numpy(), 0))).square().sum(),
    lambda m, x: m.body(Mixing.apply(x)).square().sum(),
    lambda m, x: MixingBackward.apply(m.body(x)).square().sum(),
    lambda m, x: m.body(x.mul_(2)).square().sum(),
    lambda m, x: m.body(x).square().sum() * (1 + float(x.mean() > 0)),
    lambda m, x: m.body(x).square().sum() * (m.head.weight * x.shape[0]).exp().sum(),
    moving_average,
    remembering,
    shared,
    routes,
    clipped_together,
    contrastive,
]


@looping
@together("number", range(len(STRANGE)))
@settings(max_examples=5)
@given(
    scale=st.sampled_from([1.0, 1e3, 1e-3, 1e150, math.nan]), size=st.integers(2, 5), seed=st.integers(0, 99),
    clipping=st.sampled_from([AbadiClipping(1e-3), AutomaticClipping()]),
)  # fmt: skip
def test_one_record_moves_the_sum_by_one_clip(number, scale, size, seed, clipping) -> None:
    """Whatever the loss does, unless it is refused."""
    torch.manual_seed(seed)
    parts = {"body": nn.Linear(4, 4), "head": nn.Linear(4, 3), "rnn": nn.GRU(4, 4), "average": 0.0, "kept": []}
    model = Built(None, **parts).double().train()
    x, sums = torch.randn(size, 3, 4).double(), []
    x[0] *= scale
    for batch in (x, x[1:]):
        engine = make_engine(model, clipping)
        try:
            engine.add(lambda x: STRANGE[number](model, x), batch)
        except Refused:
            assert STRANGE[number] is remembering
            return
        sums.append(torch.cat([total.flatten() for total in engine.clipped_sums(list(model.parameters()))]))
    assert (sums[0] - sums[1]).norm() <= 1.0001 * clipping.sensitivity
