"""Which models are fast and which are computed one sample at a time; both are exact, whatever a model does."""

import pytest
import torch
import torch.nn.functional as F
from cases import each, together
from models import Example, assert_exact, classifier, mlp
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from twins import Built

from hyfreedp.gradients import AutomaticClipping, make_engine


def net(shape: tuple[int, ...], use) -> nn.Module:
    """A linear layer, then a function of its output (B, 5, 6) and of a parameter."""
    parts = {"inner": nn.Linear(4, 6), "head": nn.Linear(6, 3), "p": nn.Parameter(torch.randn(shape))}
    return Built(lambda m, x: m.head(torch.tanh(use(m.inner(x), m.p)).flatten(1, -2).mean(1)), **parts)


def example_of(model: nn.Module, samples: int = 7) -> Example:
    return classifier(model.double(), torch.randn(samples, 5, 4).double(), 3)


def set_first(h: Tensor, p: Tensor) -> Tensor:
    h = h.clone()
    h[:, 0] = p
    return h


def set_masked(h: Tensor, p: Tensor) -> Tensor:
    h = h.clone()
    h[h[..., 0] > 0] = p
    return h


def set_of_a_new_tensor(h: Tensor, p: Tensor) -> Tensor:
    factors = torch.ones(6).to(h)
    factors[1] = p[2]
    return h * factors


def changed_in_place(h: Tensor, p: Tensor) -> Tensor:
    value, rows = p[:6, 0] * 2, F.embedding(torch.arange(5), p, padding_idx=-9)
    value += p[3]
    value[0] = p[2, 1]
    return h * value + rows


def looked_up_and_changed(h: Tensor, p: Tensor) -> Tensor:
    rows = F.embedding(torch.arange(5), p)
    rows.mul_(3)
    return h + rows


def repeated_and_changed(h: Tensor, p: Tensor) -> Tensor:
    tokens = p.repeat(len(h), 1, 1)
    tokens[:, 0].mul_(3)
    return torch.cat([tokens, h], 1)


def samples_added_in_place(h: Tensor, p: Tensor) -> Tensor:
    tokens = p.repeat(len(h), 1, 1)
    tokens += h
    return torch.cat([tokens, h], 1)


def changed_after_its_use(h: Tensor, p: Tensor) -> Tensor:
    value = p * 2
    h = h + value
    value.mul_(3)
    return h


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p: Tensor) -> Tensor:
        return 3 * p

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return 3 * g


FAST = {
    "scale": ((6,), lambda h, p: h * p),
    "from the left": ((6,), lambda h, p: 1 / (1 + p * p) - h),
    "number": ((), lambda h, p: h * p.exp()),
    "in the middle": ((5,), lambda h, p: h * p[:, None]),
    "by index": ((1, 5, 6), lambda h, p: h + p[0]),
    "in place": ((1, 6), lambda h, p: (h + 1).mul_(p)),
    "where": ((6,), lambda h, p: torch.where(h > 0, p, h)),
    "expand": ((1, 1, 6), lambda h, p: torch.cat([p.expand(len(h), -1, -1), h], 1)),
    "repeat": ((1, 2, 6), lambda h, p: torch.cat([h, p.repeat(len(h), 1, 1)], 1)),
    "expand twice": ((6,), lambda h, p: torch.cat([p.expand(len(h), 1, 6) + 1, h * p], 1)),
    "rows by number": ((9, 6), lambda h, p: h + p[torch.arange(5) + 2]),
    "rows looked up": ((9, 6), lambda h, p: h + F.embedding(torch.arange(5).flip(0), p)),
    "padding": ((9, 6), lambda h, p: h + F.embedding(8 * (h[..., 0] > 0).long(), p, padding_idx=-1)),
    "changed in place": ((9, 6), changed_in_place),
    "repeated, and changed in place": ((1, 2, 6), repeated_and_changed),
    "folded": ((1, 6), lambda h, p: (h.flatten(0, 1) + p).view_as(h)),
    "windows": ((2, 3), lambda h, p: (h.reshape(-1, 2, 3) * p).view_as(h)),
    "linear": ((6, 6), lambda h, p: F.linear(h, p * 2, p[0])),
    "two uses of a value": ((6,), lambda h, p: (lambda v: (h * v).tanh() + v)(p.exp())),
    "product": ((6, 4), lambda h, p: h @ p @ p.T),
    "batched product": ((1, 2, 3, 3), lambda h, p: (h.view(len(h), 5, 2, 3).transpose(1, 2) @ p).reshape_as(h)),
    "convolution": ((5, 5, 3), lambda h, p: F.conv1d(h, p - p.mean(), padding=1)),
    "transposed convolution": ((5, 5, 3), lambda h, p: F.conv_transpose1d(h, p, p[0, :, 0], padding=1)),
    "transposed, of stride 2": ((5, 1, 3), lambda h, p: F.conv_transpose1d(h, p, None, 2, 1, 1, 5)[..., ::2]),
    "bilinear": ((6, 6, 6), lambda h, p: F.bilinear(h, h, p)),
    "norm": ((6,), lambda h, p: F.layer_norm(h, (6,), p, p + 1)),
    "group norm": ((5,), lambda h, p: F.group_norm(h, 1, p)),
    "attention": ((1, 1, 5, 5), lambda h, p: F.scaled_dot_product_attention(*[h[:, None]] * 3, attn_mask=p)[:, 0]),
    "a hook": ((6,), lambda h, p: _hooked(p) * h),
    "penalty": ((6,), lambda h, p: h + p.square().sum()),
    "dropped out alike": ((6,), lambda h, p: h * p.detach() + p * h.detach().new_ones(1, 1, 6)),
}
SLOW = {
    "set": ((6,), set_first),
    "set where": ((6,), set_masked),
    "set of a new tensor": ((6,), set_of_a_new_tensor),
    "looked up, and changed in place": ((9, 6), looked_up_and_changed),
    "repeated, and samples added in place": ((1, 5, 6), samples_added_in_place),
    "changed after its use": ((6,), changed_after_its_use),
    "in place, along tokens": (
        (2, 6),
        lambda h, p: (h + 1).index_add_(1, torch.tensor([0, 2]), p.expand(len(h), 2, 6)),
    ),
    "filled": ((), lambda h, p: h.masked_fill(h > 1, p)),
    "einsum": ((6, 6), lambda h, p: torch.einsum("btd,de->bte", h, p)),
    "prelu": ((5,), F.prelu),
    "a function of one's own": ((6,), lambda h, p: h * Triple.apply(p)),
    "tokens first": ((6,), lambda h, p: (h.transpose(0, 1) * p).transpose(0, 1)),
    "rows token by token": ((6,), lambda h, p: (h.transpose(0, 1).flatten(0, 1) * p).view(5, -1, 6).transpose(0, 1)),
    "numbers of samples": ((6,), lambda h, p: h.detach() * p),
    "joined along samples": ((6,), lambda h, p: sum((torch.cat([h, h + 1]) * p).chunk(2))),
    "sorted rows": ((6,), lambda h, p: ((h[h[:, 0, 0].argsort()]) * p)[h[:, 0, 0].argsort().argsort()]),
    "mapped": ((3, 6), lambda h, p: torch.vmap(lambda row: h * row)(p).mean(0)),
}


def _hooked(p: Tensor) -> Tensor:
    value = p * 2
    if value.requires_grad:
        value.register_hook(lambda g: 3 * g)
    return value


@together(*each(samples=[5, 7, 2], use=FAST).args)
def test_what_is_fast(use, samples) -> None:
    """Also where the batch has as many samples as there are tokens."""
    assert_exact(example_of(net(*FAST[use]), samples))


@together(*each(samples=[5, 7, 2], use=SLOW).args)
def test_what_is_slow(use, samples) -> None:
    """It is said once, by the name of a parameter or of what moves rows."""
    assert_exact(example_of(net(*SLOW[use]), samples), slow="the parameter '|may move rows")


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@together(
    ("layer", "slow"),
    [
        (Doubled(6, 6), None),
        (parametrizations.weight_norm(nn.Linear(6, 6)), None),
        (nn.InstanceNorm1d(5, affine=True), None),
        (nn.Sequential(nn.Unflatten(1, (5, 1, 1)), nn.Conv3d(5, 5, (1, 1, 3), padding="same")), None),
        (nn.PReLU(5), "PReLU"),
        (nn.ConvTranspose1d(5, 5, 3, padding=1), None),
        (parametrizations.orthogonal(nn.Linear(6, 6)), None),
    ],
)  # fmt: skip
def test_layers(layer, slow) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), layer, nn.Tanh(), nn.Flatten(), nn.Linear(30, 3))
    assert_exact(example_of(model), slow=slow)


@together("mode", ["mean", "sum"])
def test_bags_of_words(mode) -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 6, mode=mode, padding_idx=0), nn.Linear(6, 3)).double().train()
    example = Example(model, (torch.randint(9, (4, 5)),), lambda model, ids: model(ids).square().sum(1))
    assert_exact(example, slow="no rule covers")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_script_is_computed_one_sample_at_a_time() -> None:
    model = nn.Sequential(nn.Linear(4, 6), torch.jit.script(nn.Linear(6, 6)), nn.Flatten(), nn.Linear(30, 3))
    assert_exact(example_of(model), slow="no rule covers")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_weights_of_layers_that_are_not_called_and_layers_called_without_samples() -> None:
    """One parameter is read inside and outside of its layer; one layer sees samples nowhere, one here and there."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        numbers = torch.arange(5)
        x = F.linear(torch.tanh(m.inner(x)), m.inner.weight) + m.empty(x).sum()
        return m.head(x + m.project(m.norm(m.table.weight))[numbers] + m.norm(m.table(numbers))).mean(1)

    for samples in (4, 5, 2):
        parts = {name: nn.Linear(4, size) for name, size in {"inner": 4, "project": 4, "head": 3, "empty": 0}.items()}
        model = Built(forward, **parts, table=nn.Embedding(9, 4), norm=nn.LayerNorm(4))
        assert_exact(example_of(model, samples))


def called(use) -> nn.Module:
    """Calls a layer in the way that ``use`` knows."""
    scale = Built(lambda m, h: h * m.scale, scale=nn.Parameter(torch.randn(6)))
    parts = {"inner": nn.Linear(4, 6), "scale": scale, "head": nn.Linear(6, 3)}
    return Built(lambda m, x: m.head(use(m.inner, m.scale, x)).tanh().mean(1), **parts)


def functional(inner: nn.Module, scale: nn.Module, x: Tensor) -> Tensor:
    return scale(torch.func.functional_call(scale, {"scale": scale.scale.exp() + 1}, (inner(x),)))


def pairs(inner: nn.Module, scale: nn.Module, x: Tensor) -> Tensor:
    return scale(inner(torch.stack([x, x.flip(1)], 1).flatten(0, 1)).tanh()).unflatten(0, (-1, 2)).sum(1)


def recomputed(inner: nn.Module, scale: nn.Module, x: Tensor) -> Tensor:
    def twice(h: Tensor) -> Tensor:
        factor = scale.scale.sin().exp()
        return F.linear(h * factor, torch.outer(factor, factor))

    return checkpoint(twice, inner(x), use_reentrant=False)


def frozen_on_a_parameter(inner: nn.Module, scale: nn.Module, x: Tensor) -> Tensor:
    return inner(x) + F.linear(scale.scale, torch.eye(6).to(x))


@together("use", [functional, pairs, recomputed, frozen_on_a_parameter])
def test_calls_of_a_layer_with_other_values_more_rows_and_twice(use) -> None:
    assert_exact(example_of(called(use)))


def test_a_gradient_within_the_loss() -> None:
    """As in a physics-informed network, whose graph has backward passes in it."""

    def slope(inner: nn.Module, scale: nn.Module, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            (g,) = torch.autograd.grad(scale(inner(x).tanh()).sum(), x, create_graph=True)
        return g @ torch.ones(4, 6).to(g)

    assert_exact(example_of(called(slope)), slow="parameter")


def test_a_forward_that_was_put_on_a_layer_and_a_parameter_that_was_replaced() -> None:
    model = net((6,), lambda h, p: h * p)
    model.forward = lambda x: 2 * Built.forward(model, x)
    example = example_of(model)
    engine = assert_exact(example)
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
    assert_exact(example, engine)


def test_layers_that_appear_later_are_compared_then() -> None:
    """Layers are left out, as LayerDrop does; one comes late."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.inner(x).mean(1)
        for number, layer in enumerate(m.more):
            h = h if number in m.left_out else h + layer(h).tanh()
        return h

    more = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    example = example_of(Built(forward, inner=nn.Linear(4, 3), more=more, left_out={0, 1}))
    engine = assert_exact(example)
    for left_out in ({1}, set(), {2}):
        example.model.left_out = left_out
        seen = len(engine.verified)
        assert_exact(example, engine)
        assert (len(engine.verified) > seen) == (left_out != {2})


DRAWS = {
    "dropout": lambda h: F.dropout(F.dropout(h, 0.5, True), 0.5, True),
    "normal": lambda h: h + torch.randn_like(h),
    "none": lambda h: h,
    "loop": lambda h: h * (1 + (h.detach().sum().item() > 0)),  # on which functorch has nothing to map
}


@together(("draw", "mapped"), [("dropout", False), ("normal", False), ("none", True), ("loop", False)])
def test_the_loop_and_functorch_compute_the_same(draw, mapped) -> None:
    """What draws random numbers is left to the loop; a probe's pass draws those of the gradient's."""
    parts = {"inner": nn.Linear(4, 6), "weight": nn.Parameter(torch.randn(6, 3))}
    forward = lambda m, x: torch.einsum("btd,de->be", DRAWS[draw](m.inner(x).tanh()), m.weight)  # noqa: E731
    example = example_of(Built(forward, **parts))
    engine = make_engine(example.model, AutomaticClipping())
    engine.slow = "a test says so"

    def loss(batch):
        return example.loss(example.model, *batch)

    for _ in range(2):
        random = torch.get_rng_state()
        expected = example.clipped()  # of a loop that draws one sample after the other
        torch.set_rng_state(random)
        losses = torch.cat([example.losses(slice(i, i + 1)) for i in range(7)]).detach()
        torch.set_rng_state(random)
        torch.testing.assert_close(example.by_engine(engine), expected, rtol=1e-9, atol=1e-12)
        torch.set_rng_state(random)
        torch.testing.assert_close(engine.losses(loss, example.batch), losses, rtol=1e-9, atol=1e-12)
    assert engine._one_by_one._mapped is mapped


def test_dropout_is_the_one_of_the_forward_pass() -> None:
    """On the fast path all samples draw together."""
    example = mlp()
    example.model.insert(3, nn.Dropout(0.5))
    engine, random = make_engine(example.model, AutomaticClipping()), torch.get_rng_state()
    rows = [torch.autograd.grad(loss, example.trainable, retain_graph=True) for loss in example.losses()]
    gradients = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    norms = gradients.norm(dim=1)
    expected = norms, AutomaticClipping().factors(norms) @ gradients
    torch.set_rng_state(random)
    torch.testing.assert_close(example.by_engine(engine), expected, rtol=1e-9, atol=1e-12)
    assert engine.slow is None


def test_batches_of_any_structure_are_taken_apart() -> None:
    """Also of names, which functorch maps over no samples."""
    example = example_of(net(*SLOW["einsum"]))
    norms, _ = example.clipped()
    batch = {"x": example.batch[0], "rest": (example.batch[1], ["a name"] * 7)}
    engine = make_engine(example.model, AutomaticClipping())
    engine.slow = "a test says so"
    _, found = engine.add(lambda b: example.loss(example.model, b["x"], b["rest"][0]), batch)
    torch.testing.assert_close(found, norms)
