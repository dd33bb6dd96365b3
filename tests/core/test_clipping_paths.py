"""Whatever a model does with its parameters and rows is exact: mapped, or one sample at a time where that is said."""

import pytest
import torch
import torch.nn.functional as F
from cases import together
from models import Example, assert_exact, classifier
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from twins import Built

from hyfreedp.gradients import AutomaticClipping, make_engine
from hyfreedp.gradients.engine import Piece

# Why a record is computed alone; parts of what functorch, or the map, says.
DYNAMIC, HOOK, SCRIPT, OWN = "dynamic shape", "register_hook", "compiled script", "setup_context"


def example_of(model: nn.Module) -> Example:
    return classifier(model.double(), torch.randn(4, 5, 4).double(), 3)


# -- uses of a parameter -----------------------------------------------------------------------------------------------


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


def added_in_place(h: Tensor, p: Tensor) -> Tensor:
    tokens = p.repeat(len(h), 1, 1)
    tokens += h
    return torch.cat([tokens, h], 1)


def changed_after_its_use(h: Tensor, p: Tensor) -> Tensor:
    value = p * 2
    h = h + value
    value.mul_(3)
    return h


def hooked(h: Tensor, p: Tensor) -> Tensor:
    value = p * 2
    if value.requires_grad:
        value.register_hook(lambda g: 3 * g)
    return value * h


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p: Tensor) -> Tensor:
        return 3 * p

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return 3 * g


USES = {  # the parameter's shape, what is done with it and h (1, 5, 6), and why that is not mapped
    "scale": ((6,), lambda h, p: h * p),
    "from the left": ((6,), lambda h, p: 1 / (1 + p * p) - h),
    "number": ((), lambda h, p: h * p.exp()),
    "in the middle": ((5,), lambda h, p: h * p[:, None]),
    "by index": ((1, 5, 6), lambda h, p: h + p[0]),
    "in place": ((1, 6), lambda h, p: (h + 1).mul_(p)),
    "where": ((6,), lambda h, p: torch.where(h > 0, p, h)),
    "expand": ((1, 1, 6), lambda h, p: torch.cat([p.expand(len(h), -1, -1), h], 1)),
    "expand twice": ((6,), lambda h, p: torch.cat([p.expand(len(h), 1, 6) + 1, h * p], 1)),
    "rows by number": ((9, 6), lambda h, p: h + p[torch.arange(5) + 2]),
    "rows looked up": ((9, 6), lambda h, p: h + F.embedding(torch.arange(5).flip(0), p)),
    "padding": ((9, 6), lambda h, p: h + F.embedding(8 * (h[..., 0] > 0).long(), p, padding_idx=-1)),
    "changed in place": ((9, 6), changed_in_place),
    "repeated, and changed in place": ((1, 2, 6), repeated_and_changed),
    "repeated, and added to in place": ((1, 5, 6), added_in_place),
    "looked up, and changed in place": ((9, 6), looked_up_and_changed),
    "changed after its use": ((6,), changed_after_its_use),
    "set": ((6,), set_first),
    "set where": ((6,), set_masked, DYNAMIC),
    "set of a new tensor": ((6,), set_of_a_new_tensor),
    "along tokens": ((2, 6), lambda h, p: (h + 1).index_add_(1, torch.tensor([0, 2]), p.expand(len(h), 2, 6))),
    "filled": ((), lambda h, p: h.masked_fill(h > 1, p)),
    "folded": ((1, 6), lambda h, p: (h.flatten(0, 1) + p).view_as(h)),
    "windows": ((2, 3), lambda h, p: (h.reshape(-1, 2, 3) * p).view_as(h)),
    "tokens first": ((6,), lambda h, p: (h.transpose(0, 1) * p).transpose(0, 1)),
    "sorted tokens": ((5, 6), lambda h, p: h[:, h[0, :, 0].argsort()] * p),
    "linear": ((6, 6), lambda h, p: F.linear(h, p * 2, p[0])),
    "two uses of a value": ((6,), lambda h, p: (lambda v: (h * v).tanh() + v)(p.exp())),
    "einsum": ((6, 6), lambda h, p: torch.einsum("btd,de->bte", h, p)),
    "product": ((6, 4), lambda h, p: h @ p @ p.T),
    "batched product": ((1, 2, 3, 3), lambda h, p: (h.view(len(h), 5, 2, 3).transpose(1, 2) @ p).reshape_as(h)),
    "addmm": ((6, 6), lambda h, p: torch.addmm(p[0], h[0], p)[None]),
    "convolution": ((5, 5, 3), lambda h, p: F.conv1d(h, p - p.mean(), padding=1)),
    "convolution of one image": ((5, 5, 3), lambda h, p: F.conv1d(h[0], p, padding="same")[None]),
    "transposed convolution": ((5, 5, 3), lambda h, p: F.conv_transpose1d(h, p, p[0, :, 0], padding=1)),
    "transposed, of stride 2": ((5, 1, 3), lambda h, p: F.conv_transpose1d(h, p, None, 2, 1, 1, 5)[..., ::2]),
    "bilinear": ((6, 6, 6), lambda h, p: F.bilinear(h, h, p)),
    "prelu": ((5,), F.prelu),
    "norm": ((6,), lambda h, p: F.layer_norm(h, (6,), p, p + 1)),
    "group norm": ((5,), lambda h, p: F.group_norm(h, 1, p)),
    "attention": ((1, 1, 5, 5), lambda h, p: F.scaled_dot_product_attention(*[h[:, None]] * 3, attn_mask=p)[:, 0]),
    "penalty": ((6,), lambda h, p: h + p.square().sum()),
    "numbers of samples": ((6,), lambda h, p: h.detach() * p),
    "mapped": ((3, 6), lambda h, p: torch.vmap(lambda row: h * row)(p).mean(0), SCRIPT),
    "a hook": ((6,), hooked, HOOK),
    "a function of one's own": ((6,), lambda h, p: h * Triple.apply(p), OWN),
}


@together("use", USES)
def test_every_use_of_a_parameter(use) -> None:
    shape, function, *slow = USES[use]
    parts = {"inner": nn.Linear(4, 6), "head": nn.Linear(6, 3), "p": nn.Parameter(torch.randn(shape))}
    model = Built(lambda m, x: m.head(torch.tanh(function(m.inner(x), m.p)).flatten(1, -2).mean(1)), **parts)
    assert_exact(example_of(model), slow=slow[0] if slow else None)


# -- layers ------------------------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def patched() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)
    return layer


LAYERS = [
    Doubled(6, 6),
    patched(),
    parametrizations.weight_norm(nn.Linear(6, 6)),
    parametrizations.orthogonal(nn.Linear(6, 6)),
    nn.InstanceNorm1d(5, affine=True),
    nn.Sequential(nn.Unflatten(1, (5, 1, 1)), nn.Conv3d(5, 5, (1, 1, 3), padding="same")),
    nn.ConvTranspose1d(5, 5, 3, padding=1),
    nn.PReLU(5),
]


@together("layer", LAYERS)
def test_layers(layer) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), layer, nn.Tanh(), nn.Flatten(), nn.Linear(30, 3))
    example = example_of(model)
    engine = assert_exact(example)
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
    assert_exact(example, engine)  # other parameters, and still exact


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_script_is_computed_one_sample_at_a_time() -> None:
    model = nn.Sequential(nn.Linear(4, 6), torch.jit.script(nn.Linear(6, 6)), nn.Flatten(), nn.Linear(30, 3))
    assert_exact(example_of(model), slow=SCRIPT)


TABLES = [
    nn.EmbeddingBag(9, 6, mode="mean", padding_idx=0),
    nn.EmbeddingBag(9, 6, mode="sum"),
    nn.Sequential(nn.Embedding(9, 6, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(30, 6)),
]


@together("table", TABLES)
def test_tables_of_words(table) -> None:
    model = nn.Sequential(table, nn.Linear(6, 3)).double().train()
    assert_exact(Example(model, (torch.randint(9, (4, 5)),), lambda model, ids: model(ids).square().sum(1)))


# -- models ------------------------------------------------------------------------------------------------------------


def empty_and_shared(m: nn.Module, x: Tensor) -> Tensor:
    """One weight is used inside and outside of its layer; one layer sees samples nowhere, one here and there."""
    numbers = torch.arange(5)
    x = F.linear(torch.tanh(m.square(x)), m.square.weight) + m.empty(x).sum()
    return m.inner(x) + m.middle(m.inner(m.table.weight))[numbers] + m.inner(m.table(numbers))


def functional(m: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(m.middle, {"weight": m.middle.weight.exp() + 1}, (m.inner(x),))


def several_rows(m: nn.Module, x: Tensor) -> Tensor:
    """Two views of a record, its tokens backwards, go through a layer together."""
    return m.middle(m.inner(torch.stack([x, x.flip(1)], 1).flatten(0, 1)).tanh()).unflatten(0, (-1, 2)).sum(1)


def recomputed(m: nn.Module, x: Tensor) -> Tensor:
    def twice(h: Tensor) -> Tensor:
        factor = m.middle.bias.sin().exp()
        return F.linear(h * factor, torch.outer(factor, factor))

    return checkpoint(twice, m.inner(x), use_reentrant=False)


def routed(m: nn.Module, x: Tensor) -> Tensor:
    """Only tokens of one kind see a layer."""
    h, chosen = m.inner(x).tanh(), x[..., 0] > 0
    out = torch.zeros_like(h)
    out[chosen] = m.middle(h[chosen]).tanh()
    return h + out


def gated(m: nn.Module, x: Tensor) -> Tensor:
    """A branch that few records open, in which the tokens come first."""
    h = m.inner(x).tanh()
    return m.middle(h.transpose(0, 1)).transpose(0, 1) if x[..., 0].max() > 1 else h


def by_pythons_numbers(m: nn.Module, x: Tensor) -> Tensor:
    h = m.inner(x)
    return m.middle(torch.stack([h[:, i] for i in (x[0, :2, 0] > 0).int().tolist()], 1)).tanh()


def siamese(m: nn.Module, x: Tensor) -> Tensor:
    """Parts of a record in one batch, one after the other."""
    one, other = m.middle(m.inner(torch.cat([x, x.flip(1)]))).chunk(2)
    return (one * other).cumsum(1)


def tokens_first(m: nn.Module, x: Tensor) -> Tensor:
    return m.body(m.inner(x).transpose(0, 1))[0].transpose(0, 1)


def normalised(m: nn.Module, x: Tensor) -> Tensor:
    h = m.inner(x)
    return m.middle(h / h.detach().norm())


def clipped_within(m: nn.Module, x: Tensor) -> Tensor:
    """Of a batch it would mix gradients."""
    h = m.inner(x).tanh()
    h.register_hook(lambda g: g * (1 / g.norm()).clamp(max=1))
    return m.middle(h)


def node_hook(m: nn.Module, x: Tensor) -> Tensor:
    h = m.inner(x).tanh()
    h.grad_fn.register_hook(lambda g, _: (g[0] / g[0].norm(),))
    return m.middle(h)


def slope(m: nn.Module, x: Tensor) -> Tensor:
    """A gradient within the loss, as in a physics-informed network, whose graph has backward passes in it."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        (g,) = torch.autograd.grad(m.middle(m.inner(x).tanh()).sum(), x, create_graph=True)
    return g @ torch.ones(4, 6).to(g)


MODELS = {
    empty_and_shared: None, functional: None, several_rows: None, recomputed: None, gated: None, siamese: None,
    by_pythons_numbers: None, tokens_first: None, normalised: None, routed: DYNAMIC, clipped_within: HOOK,
    node_hook: "NoneType", slope: "require",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@together("forward", MODELS)
def test_what_a_model_does_with_its_rows(forward) -> None:
    sizes = {"square": (4, 4), "inner": (4, 6), "middle": (6, 6), "empty": (4, 0), "head": (6, 3)}
    parts = {name: nn.Linear(*size) for name, size in sizes.items()}
    others = {"table": nn.Embedding(9, 4), "body": nn.LSTM(6, 6)}
    model = Built(lambda m, x: m.head(forward(m, x)).mean(1), **parts, **others)
    assert_exact(example_of(model), slow=MODELS[forward])


# -- random numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:samples are computed one at a time:UserWarning")
@together("loop", [False, True])
def test_dropout_is_of_each_sample_and_a_looks_is_the_gradients(loop) -> None:
    """A mask of eight numbers can be read from the loss, whose terms are powers of two."""
    powers = 2.0 ** torch.arange(8)
    model = Built(lambda m, x: F.dropout(x * m.w, 0.5).sum(1), w=nn.Parameter(torch.ones(8)))
    example = Example(model, (powers.repeat(16, 1),), lambda model, x: model(x))
    example = example.looped() if loop else example
    engine = make_engine(model, AutomaticClipping())

    def seeded(piece: Piece, alone: bool) -> None:
        torch.manual_seed(piece.stream[0] + 100 * alone)

    losses, norms = engine.add(lambda batch: example.loss(model, *batch), example.batch, begin=seeded)
    masks = losses[:, None].div(2 * powers).floor().remainder(2)  # those that are kept count twice
    torch.testing.assert_close(norms, (2 * masks * powers).norm(dim=1))
    assert len(masks.unique(dim=0)) > 12 and 0.3 < masks.mean() < 0.7 and bool(engine.slow) == loop
    assert torch.equal(engine.losses(lambda batch: example.loss(model, *batch), example.batch, begin=seeded), losses)
