"""The map over records: what models and losses may do in it, what is computed by a loop, and what is refused."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import Example, assert_exact, classifier
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from twins import Built

from hyfreedp.gradients import AutomaticClipping, GradientEngine
from hyfreedp.gradients.pieces import Partition

Loss = Callable[..., Tensor]
looping = pytest.mark.filterwarnings("ignore:samples are computed one at a time:UserWarning")
THREAD = ThreadPoolExecutor(1)
Kind = type("Kind", (Tensor,), {})  # of tensor, without code of its own
# Why a record is computed alone; parts of what functorch, or the map, says.
DYNAMIC, SCRIPT, OWN, GRADIENT = "dynamic shape", "no operation of torch|compiled script", "own code", "require"


# -- uses of a parameter -----------------------------------------------------------------------------------------------


def set_masked(h: Tensor, p: Tensor) -> Tensor:
    h = h.clone()
    h[h[..., 0] > 0] = p
    return h


def changed_in_place(h: Tensor, p: Tensor) -> Tensor:
    value, rows = p[:6, 0] * 2, F.embedding(torch.arange(5), p, padding_idx=-9)
    value += p[3]
    value[0] = p[2, 1]
    return h * value + rows.mul_(3)


def added_in_place(h: Tensor, p: Tensor) -> Tensor:
    tokens = p.repeat(len(h), 1, 1)
    tokens += h
    tokens[:, 0].mul_(3)
    return torch.cat([tokens, h], 1)


def changed_after_its_use(h: Tensor, p: Tensor) -> Tensor:
    value = p * 2
    h = h + value
    value.mul_(3)
    return h


USES = {  # the parameter's shape, what is done with it and h (1, 5, 6), and why that is not mapped
    "scale": ((6,), lambda h, p: h * p),
    "from the left": ((6,), lambda h, p: 1 / (1 + p * p) - h),
    "number": ((), lambda h, p: h * p.exp()),
    "in the middle": ((5,), lambda h, p: h * p[:, None]),
    "by index": ((1, 5, 6), lambda h, p: h + p[0]),
    "in place": ((1, 6), lambda h, p: (h + 1).mul_(p)),
    "where": ((6,), lambda h, p: torch.where(h > 0, p, h)),
    "expand twice": ((6,), lambda h, p: torch.cat([p.expand(len(h), 1, 6) + 1, h * p], 1)),
    "rows by number": ((9, 6), lambda h, p: h + p[torch.arange(5) + 2]),
    "rows looked up": ((9, 6), lambda h, p: h + F.embedding(torch.arange(5).flip(0), p)),
    "padding": ((9, 6), lambda h, p: h + F.embedding(8 * (h[..., 0] > 0).long(), p, padding_idx=-1)),
    "padding, computed": ((9, 6), lambda h, p: h + F.embedding(8 * (h[..., 0] > 0).long(), p * 2, padding_idx=-1)),
    "written into an output": ((6,), lambda h, p: h * p + torch.add(h.detach(), 1, out=torch.empty_like(h))),
    "changed in place": ((9, 6), changed_in_place),
    "repeated, and added to in place": ((1, 5, 6), added_in_place),
    "changed after its use": ((6,), changed_after_its_use),
    "set where": ((6,), set_masked, DYNAMIC),
    "along tokens": ((2, 6), lambda h, p: (h + 1).index_add_(1, torch.tensor([0, 2]), p.expand(len(h), 2, 6))),
    "filled": ((), lambda h, p: h.masked_fill(h > 1, p)),
    "folded": ((1, 6), lambda h, p: (h.flatten(0, 1) + p).view_as(h)),
    "windows": ((2, 3), lambda h, p: (h.reshape(-1, 2, 3) * p).view_as(h)),
    "tokens first": ((6,), lambda h, p: (h.transpose(0, 1) * p).transpose(0, 1)),
    "sorted tokens": ((5, 6), lambda h, p: h[:, h[0, :, 0].argsort()] * p),
    "linear": ((6, 6), lambda h, p: F.linear(h, p * 2, p[0])),
    "einsum": ((6, 6), lambda h, p: torch.einsum("btd,de->bte", h, p)),
    "product": ((6, 4), lambda h, p: h @ p @ p.T),
    "batched product": ((1, 2, 3, 3), lambda h, p: (h.view(len(h), 5, 2, 3).transpose(1, 2) @ p).reshape_as(h)),
    "addmm": ((6, 6), lambda h, p: torch.addmm(p[0], h[0], p)[None]),
    "one number for all outputs": (
        (1,),
        lambda h, p: F.linear(h, torch.eye(6).to(h), p) * torch.addmm(p, h[0], torch.eye(6).to(h)),
    ),
    "convolution": ((5, 5, 3), lambda h, p: F.conv1d(h, p - p.mean(), padding=1)),
    "transposed convolution": ((5, 5, 3), lambda h, p: F.conv_transpose1d(h, p, p[0, :, 0], padding=1)),
    "transposed, of stride 2": ((5, 1, 3), lambda h, p: F.conv_transpose1d(h, p, None, 2, 1, 1, 5)[..., ::2]),
    "bilinear": ((6, 6, 6), lambda h, p: F.bilinear(h, h, p)),
    "prelu": ((5,), F.prelu),
    "norm": ((6,), lambda h, p: F.layer_norm(h, (6,), p, p + 1)),
    "attention": ((1, 1, 5, 5), lambda h, p: F.scaled_dot_product_attention(*[h[:, None]] * 3, attn_mask=p)[:, 0]),
    "attention of other dimensions": ((5, 5), lambda h, p: F.scaled_dot_product_attention(h[:, None], h, h, p)[:, 0]),
    "penalty": ((6,), lambda h, p: h + p.square().sum()),
    "beside a thread's": ((6,), lambda h, p: F.linear(h, THREAD.submit(torch.diag, p).result(), p), SCRIPT),
    "numbers of samples": ((6,), lambda h, p: h.detach() * p),
    "mapped": ((3, 6), lambda h, p: torch.vmap(lambda row: h * row)(p).mean(0), SCRIPT),
}


def tokens_of(model: nn.Module) -> Example:
    return classifier(model, torch.randn(4, 5, 4).double(), 3)


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_parameter_is_exact(use) -> None:
    shape, function, *slow = USES[use]
    parts = {"inner": nn.Linear(4, 6), "head": nn.Linear(6, 3), "p": nn.Parameter(torch.randn(shape))}
    model = Built(lambda m, x: m.head(torch.tanh(function(m.inner(x), m.p)).flatten(1, -2).mean(1)), **parts)
    assert_exact(tokens_of(model), slow=slow[0] if slow else None)


# -- layers and models -------------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


LAYERS = [
    Doubled(6, 6),
    parametrizations.weight_norm(nn.LayerNorm(6)),
    parametrizations.weight_norm(nn.Linear(6, 6), dim=-2),
    parametrizations.orthogonal(nn.Linear(6, 6)),
    nn.InstanceNorm1d(5, affine=True),
    nn.Sequential(nn.Unflatten(1, (5, 1, 1)), nn.Conv3d(5, 5, (1, 1, 3), padding="same")),
]


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_exact_also_with_other_parameters(layer) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), layer, nn.Tanh(), nn.Flatten(), nn.Linear(30, 3))
    example = tokens_of(model)
    engine = assert_exact(example)
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
    assert_exact(example, engine)  # other parameters, and still exact


def empty_and_shared(m: nn.Module, x: Tensor) -> Tensor:
    """One weight is used inside and outside of its layer; one layer sees samples nowhere, one here and there."""
    numbers = torch.arange(5)
    x = F.linear(torch.tanh(m.square(x)), m.square.weight) + m.empty(x).sum()
    return m.inner(x) + m.middle(m.inner(m.table.weight))[numbers] + m.inner(m.table(numbers))


def gated(m: nn.Module, x: Tensor) -> Tensor:
    """A branch that few records open, in which the tokens come first."""
    h = m.inner(x).tanh()
    return m.middle(h.transpose(0, 1)).transpose(0, 1) if x[..., 0].max() > 1 else h


def node_hook(m: nn.Module, x: Tensor) -> Tensor:
    """Clips within the model: of a batch it would mix gradients."""
    h = m.inner(x).tanh()
    h.grad_fn.register_hook(lambda g, _: (g[0] / g[0].norm(),))
    return m.middle(h)


MODELS = {empty_and_shared: None, gated: None, node_hook: "NoneType"}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("forward", MODELS)
def test_a_model_may_share_layers_branch_and_have_hooks(forward) -> None:
    sizes = {"square": (4, 4), "inner": (4, 6), "middle": (6, 6), "empty": (4, 0), "head": (6, 3)}
    parts = {name: nn.Linear(*size) for name, size in sizes.items()} | {"table": nn.Embedding(9, 4)}
    model = Built(lambda m, x: m.head(forward(m, x)).mean(1), **parts)
    assert_exact(tokens_of(model), slow=MODELS[forward])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_script_is_computed_one_sample_at_a_time() -> None:
    model = nn.Sequential(nn.Linear(4, 6), torch.jit.script(nn.Linear(6, 6)), nn.Flatten(), nn.Linear(30, 3))
    assert_exact(tokens_of(model), slow=SCRIPT)


def example_of(loss: Loss, model: nn.Module | None = None) -> Example:
    """Records of three numbers, of which each has its own sign, and of a small whole number."""
    numbers = torch.tensor([0, 1, 2, 1, 0, 3])
    x = torch.randn(6, 3).double().abs() * torch.tensor([1, 1, -1, -1, 1, 1])[:, None]
    return Example((model or nn.Linear(3, 1)).double().train(), (x, numbers), loss)


def pieces_of(example: Example) -> int:
    """How many groups of records are mapped one after the other."""
    partition, engine = Partition.of(example.batch), GradientEngine(example.model, AutomaticClipping())
    engine.clipped_sums(lambda batch: example.loss(example.model, *batch), partition)
    return len(partition.pieces)


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
    "if": (lambda m, x, k: m(x).sum() if x.sum() > 0 else m(x).exp().sum(), 2),
    "item": (lambda m, x, k: m(x).sum() * (1 + k.item()), 4),
    "int": (lambda m, x, k: sum(m(x).sum() for _ in range(int(k) + 1)), 4),
    "tolist": (lambda m, x, k: m(x).sum() * (1 + k.tolist()[0]), 4),
    "index": (lambda m, x, k: [m(x), m(x) * 2, m(x).exp(), m(x).sin()][k].sum(), 4),
    "in": (lambda m, x, k: m(x).sum() * (1 + (0 in k)), 2),
    "nonzero": (lambda m, x, k: m(x).sum() * (1 + torch.nonzero(input=x > 0, as_tuple=True)[-1].sum()), 2),
    "where": (lambda m, x, k: m(x).sum() * (1 + torch.where(x > 0)[-1].sum()), 2),
    "where by name": (lambda m, x, k: m(x).sum() * (1 + torch.where(condition=x > 0)[-1].sum()), 2),
    "sorted": (lambda m, x, k: m(x).sum() * sorted(torch.cat([k, 2 - k]))[1], 2),
    "without gradients": (lambda m, x, k: m(x).sum() * (1 + torch.no_grad()(lambda: bool(m(x) > 0))()), 2),
    "the length of counts": (lambda m, x, k: m(x).sum() * (1 + torch.bincount(k, minlength=2)[-1]), 3),
    "nested": (nested, 3),
    "collatz": (collatz, 3),
    "not a number": (not_a_number, 2),
    "caught": (caught, 4),
}


@pytest.mark.parametrize("decision", DECISIONS)
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
    engine = GradientEngine(model, AutomaticClipping())
    seeded = lambda piece: torch.manual_seed(1000 * piece.stream[0] + piece.stream[1])  # noqa: E731
    _, losses, norms = engine.clipped_sums(lambda x: loss(model, x), Partition(Partition.of(x).pieces, seeded))
    torch.testing.assert_close(losses, norms)
    waited, rest = losses.div(10, rounding_mode="floor"), losses.remainder(10)
    small = rest < 1
    assert rest[small].max() < 0.3 + 1e-5 and rest[~small].min() > 1.3 - 1e-5 and engine.fallback_reason is None
    assert abs(small.double().mean() - 0.3) < 0.06 and abs(waited.mean() - 1) < 0.2
    assert abs(rest[small].mean() - 0.15) < 0.03 and abs(rest[~small].mean() - 1.65) < 0.06
    assert len(losses.unique()) > 980


def test_a_batch_norm_of_constants_in_half_precision_is_as_torch_computes_it() -> None:
    """Its scale and shift in bfloat16 made losses wrong by a tenth."""
    x, p = 30 * torch.randn(5, 6, 4), nn.Parameter(torch.ones(6, 1))
    model = Built(lambda m, x: F.batch_norm((x * m.p).bfloat16(), *constants).float(), p=p)
    constants = (30 * torch.randn(6)).bfloat16(), torch.rand(6).bfloat16() + 0.1
    _, losses, _ = GradientEngine(model, AutomaticClipping()).clipped_sums(lambda x: model(x).square().mean(), x)
    assert torch.equal(losses.float(), model(x).square().mean((1, 2)).detach())


def test_records_without_tokens_have_no_gradient() -> None:
    layer = nn.Linear(6, 2)
    *_, norms = GradientEngine(layer, AutomaticClipping()).clipped_sums(lambda x: layer(x).sum(), torch.zeros(3, 0, 6))
    assert norms.tolist() == [0, 0, 0]


# -- what is mapped, and what is not -----------------------------------------------------------------------------------


def own_zeros(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    out, more = torch.zeros(4, dtype=x.dtype), torch.full_like(m.weight[0], 2.0)
    out[1] = m(x).sum()
    out[2:] += x[0, 1:]
    more *= x[0]
    return (out.square().sum() + m(more)).sum()


def penalty(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    """As of a critic, whose slope is to be one."""
    x = x.clone().requires_grad_(True)
    (g,) = torch.autograd.grad(m(x).tanh().sum(), x, create_graph=True)
    return (g.norm() - 1).square()


def weighted(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    """Of two rows, one of which may be ignored."""
    logits, classes = m(torch.cat([x, x.square()])) * torch.arange(4.0), torch.cat([k, 3 - k])
    of_classes = torch.tensor([1, 2, 0.5, 4.0]).double()
    return F.cross_entropy(logits, classes, of_classes, ignore_index=3, label_smoothing=0.1)


def triplet(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    distance: Any = lambda a, b: (a - b).abs().sum(1)  # noqa: E731
    return F.triplet_margin_with_distance_loss(m(x), m(x.square()), m(-x), distance_function=distance)


def strided(m: nn.Module, x: Tensor, told: bool = True, stride: int = 1, written: bool = False) -> Tensor:
    """Overlapping windows of every other number."""
    numbers = torch.cat([x, m.weight * x], 1)[0, ::2]
    step = numbers.stride(0) if told else 2
    windows = numbers.as_strided((2, 2), (step * stride, step))
    if written:
        numbers.mul_(2)
    return windows.exp().sum() + windows[0].prod()


class Bags(nn.Module):
    """A table of eight rows, of which each record uses five, one twice, and perhaps that of the padding."""

    def __init__(self, **named: Any) -> None:
        super().__init__()
        self.table, self.factors = nn.EmbeddingBag(8, 3, **named), nn.Bilinear(3, 3, 1)

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        rows = torch.stack([k, k, k + 1, k + 2, 7 - k], 1)
        weights = None if self.table.mode != "sum" else x[:, [0, 1, 2, 1, 0]]
        return self.factors(self.table(rows, per_sample_weights=weights), x)


@pytest.mark.parametrize(
    "named", [{}, {"padding_idx": 2}, {"padding_idx": -7, "mode": "sum"}, {"padding_idx": 0, "mode": "max"}], ids=str
)
def test_bags_of_rows_are_exact(named) -> None:
    assert_exact(example_of(lambda m, x, k: m(x, k).square().sum(), Bags(**named)))


def divergences(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    found, sought = m(x * torch.arange(4.0)[:, None]).T.log_softmax(1), F.one_hot(k, 4).double()
    smooth = torch.log(0.9 * sought + 0.025)
    unreduced = torch.kl_div(found, sought) * torch.arange(4.0) + torch.kl_div(found, smooth, 1, log_target=True)
    return F.kl_div(found, sought, reduction="batchmean") + unreduced.sum()


def margins(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    better = F.margin_ranking_loss(m(x)[:, 0], m(x.square())[:, 0], 1.0 - k, margin=0.5)
    return better + F.triplet_margin_loss(m(x) * x, m(x.square()) * x, m(-x) + x, swap=True)


def test_losses_are_of_float32_under_autocast() -> None:
    """As without a map, though not the operations that they are made of."""
    engine = GradientEngine(model := nn.Linear(4, 4), AutomaticClipping())

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            losses = [F.kl_div(y, y, reduction="sum"), F.triplet_margin_loss(y, -y, y * y)]
        assert y.dtype == torch.bfloat16 and {value.dtype for value in losses} == {torch.float32}
        return torch.stack(losses).sum()

    engine.clipped_sums(loss, torch.randn(3, 4))
    assert engine.fallback_reason is None


WRONG: dict[str, Loss] = {
    "Float can't be cast": lambda m, x, k: k.clone().clamp_(1.5) * m(x),
    "batch dimensions do not match": lambda m, x, k: F.bilinear(m(x).expand(3, 1), m(x), m(x)[None]).sum(),
    "same number of dimensions": lambda m, x, k: F.triplet_margin_loss(m(x), x[0], x[0]),
    "only supported for mode='sum'": lambda m, x, k: F.embedding_bag(k[None], m(x), per_sample_weights=m(x)),
    "offsets has to be None": lambda m, x, k: F.embedding_bag(k[None], m(x), k),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_of_torch_are_raised_in_a_map_too(message) -> None:
    example = example_of(WRONG[message])
    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=message):
        example.by_engine(GradientEngine(example.model, AutomaticClipping()))


def written(m: nn.Module, x: Tensor, k: Tensor) -> Tensor:
    return (m(x) * x).clamp_(min=0.1).pow_(3).sum() + m(x).square_().sum()


LOSSES: dict[str, tuple[Loss, str | None]] = {  # and why they are not mapped
    "divergences": (divergences, None),
    "margins": (margins, None),
    "operations in place": (written, None),
    "weights of classes": (weighted, None),
    "no reduction": (lambda m, x, k: F.cross_entropy(m(x) * torch.ones(2, 4), k[[0, 0]], reduce=False).sum(), None),
    "a gradient of functorch": (lambda m, x, k: m(torch.func.vjp(torch.exp, x)[1](x)[0]).sum(), None),
    "a variance": (lambda m, x, k: F.gaussian_nll_loss(m(x), x[:, :1], m(-x).exp()), None),
    "a distribution": (lambda m, x, k: -torch.distributions.Normal(m(x), m(-x).exp()).log_prob(x).sum(), None),
    "a distance": (triplet, None),
    "writes into new tensors": (own_zeros, None),
    "a map of tokens": (lambda m, x, k: torch.vmap(lambda row: m(x * row))(x.T).square().sum(), None),
    "a map of parameters": (lambda m, x, k: torch.vmap(lambda row: (x * row).sum())(m.weight).square().sum(), SCRIPT),
    "a gradient": (lambda m, x, k: torch.func.grad(lambda x: m(x).tanh().sum())(x).square().sum(), SCRIPT),
    "a Jacobian": (lambda m, x, k: torch.func.jacrev(lambda x: m(x).tanh())(x).square().sum(), SCRIPT),
    "a gradient penalty": (penalty, GRADIENT),
    "a hook": (lambda m, x, k: (h := m(x)).register_hook(lambda g: 3 * g) and h.square().sum(), OWN),
    "memory": (lambda m, x, k: m(torch.from_numpy(x.numpy())).sum() * (1 + np.asarray(k)[0]), "memory"),
    "its text": (lambda m, x, k: m(x).sum() * (1 + ("1" in repr(k))), "memory"),
    "tensors as sizes": (lambda m, x, k: m(x).sum() * torch.arange(k[0] + 2).sum() + x.new_ones(k[0]).sum(), None),
    "packed": (lambda m, x, k: m(x).sum() * pack_padded_sequence(x, k % 3 + 1, True).data.sum(), "_pack"),
    "a kind without code": (lambda m, x, k: m(x * torch.ones(()).as_subclass(Kind)).sum(), None),
    "windows": (lambda m, x, k: strided(m, x), None),
    "windows without a look at strides": (lambda m, x, k: strided(m, x, told=False), "as_strided"),
    "windows, and a write into what they view": (lambda m, x, k: strided(m, x, written=True), "a write"),
    "changes its record": (lambda m, x, k: m(x.mul_(2)).sum() * k.add_(1), None),
}


@looping
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_exact_and_leaves_its_batch_alone_whatever_it_does(name) -> None:
    loss, slow = LOSSES[name]
    example = example_of(lambda m, x, k: loss(m, x.clone(), k.clone()))
    before = [tensor.clone() for tensor in example.batch]
    engine = assert_exact(example, slow=slow)
    engine.clipped_sums(lambda batch: loss(example.model, *batch), example.batch)
    assert all(map(torch.equal, before, example.batch))  # whatever it wrote into its record


# -- what is kept ------------------------------------------------------------------------------------------------------


@looping
@pytest.mark.parametrize("loop", [False, True])
def test_what_a_model_keeps_as_an_attribute_or_in_a_cache_is_put_back(loop) -> None:
    """So a memory of the record before is no memory."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        m.passes += 1
        h = m.layer(x) * m.passes + m.last + m.cache.sum()
        m.last, m.cache = h.abs().sum(), x.detach()
        m.new = h
        return h

    cache = nn.Buffer(torch.zeros(1), persistent=False)
    model = Built(forward, layer=nn.Linear(3, 1), last=0.0, passes=torch.zeros(()), cache=cache)
    example = example_of(lambda m, x, k: m(x).sum(), model)
    attributes = set(vars(model))
    found = (example.looped() if loop else example).by_engine(GradientEngine(model, AutomaticClipping()))
    assert set(vars(model)) == attributes and model.last == model.passes == 0 and not model.cache.any()
    x = example.batch[0]
    gradients = torch.cat([x, torch.ones(6, 1)], 1).double()
    torch.testing.assert_close(found[1], AutomaticClipping().factors(found[0]) @ gradients)
