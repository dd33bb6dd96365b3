"""Parameters outside layers that have a rule: followed through the operations on them, exactly, or refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import each, together
from catalog import cases
from measure import measure
from models import Example
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from twins import make_private

from hyfreedp.clipping import AutomaticClipping, BookKeepingEngine, make_engine
from hyfreedp.clipping.hooks import HooksEngine
from hyfreedp.clipping.reference import weighted_gradients

CASES = {f"{case.library}/{case.name}": case for case in cases()}


@together(
    "name",
    [
        "timm/swin_tiny_patch4_window7_224",
        "timm/swinv2_tiny_window8_256",
        "timm/beit_base_patch16_224",
        "timm/vit_small_patch16_dinov3",
        "timm/convnext_atto",
        "timm/convnextv2_atto",
        "timm/cait_xxs24_224",
        "timm/davit_tiny",
        "timm/convit_tiny",
        "timm/tnt_s_patch16_224",
    ],
)
def test_models_of_others(name) -> None:
    """Full, and biases and head: norms and clipped sums of two batches against a loop over samples."""
    finding = measure(CASES[name], beside=False)
    assert (finding["full"], finding["biases"]) == ("exact", "exact")


class Net(nn.Module):
    """A linear layer, then a function of its output (B, 5, 6) and of a parameter."""

    def __init__(self, shape: tuple[int, ...], use) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.p, self.use = nn.Parameter(torch.randn(shape)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.use(self.inner(x), self.p)).flatten(1, -2).mean(1))


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
    rows.mul_(3)
    return h * value + rows


USES = {
    "scale": ((6,), lambda h, p: h * p),
    "from the left": ((6,), lambda h, p: 1 / (1 + p * p) - h),
    "number": ((), lambda h, p: h * p.exp()),
    "in the middle": ((5,), lambda h, p: h * p[:, None]),
    "by index": ((1, 5, 6), lambda h, p: h + p[0]),
    "in place": ((1, 6), lambda h, p: (h + 1).mul_(p)),
    "in place, mapped": ((6,), lambda h, p: (h + 1).addcmul_(p, torch.tensor(2.0).to(h)).clamp_(max=p)),
    "in place, along tokens": (
        (2, 6),
        lambda h, p: (h + 1).index_add_(1, torch.tensor([0, 2]), p.expand(len(h), 2, 6)),
    ),
    "filled": ((), lambda h, p: h.masked_fill(h > 1, p)),
    "set": ((6,), set_first),
    "changed in place": ((9, 6), changed_in_place),
    "padding from the end": ((9, 6), lambda h, p: h + F.embedding(8 * (h[..., 0] > 0).long(), p, padding_idx=-1)),
    "set where": ((6,), set_masked),
    "where": ((6,), lambda h, p: torch.where(h > 0, p, h)),
    "expand": ((1, 1, 6), lambda h, p: torch.cat([p.expand(len(h), -1, -1), h], 1)),
    "repeat": ((1, 2, 6), lambda h, p: torch.cat([h, p.repeat(len(h), 1, 1)], 1)),
    "expand twice": ((6,), lambda h, p: torch.cat([p.expand(len(h), 1, 6) + 1, h * p], 1)),
    "rows by number": ((9, 6), lambda h, p: h + p[torch.arange(5) + 2]),
    "rows looked up": ((9, 6), lambda h, p: h + F.embedding(torch.arange(5).flip(0), p)),
    "folded": ((1, 6), lambda h, p: (h.flatten(0, 1) + p).view_as(h)),
    "windows": ((2, 3), lambda h, p: (h.reshape(-1, 2, 3) * p).view_as(h)),
    "linear": ((6, 6), lambda h, p: F.linear(h, p * 2, p[0])),
    "two uses of a value": ((6,), lambda h, p: (lambda v: (h * v).tanh() + v)(p.exp())),
    "product": ((6, 4), lambda h, p: h @ p @ p.T),
    "batched product": ((1, 2, 3, 3), lambda h, p: (h.view(len(h), 5, 2, 3).transpose(1, 2) @ p).reshape_as(h)),
    "product with a vector": ((6,), lambda h, p: h * (h @ p)[..., None] + (h[:, 0] @ p)[:, None, None]),
    "linear to a number": ((6,), lambda h, p: h * F.linear(h, p)[..., None]),
    "einsum": ((6, 6), lambda h, p: torch.einsum("btd,de->bte", h, p)),
    "convolution": ((5, 5, 3), lambda h, p: F.conv1d(h, p - p.mean(), padding=1)),
    "convolution of rows": ((1, 1, 3), lambda h, p: F.conv1d(h.reshape(-1, 1, 6), p, padding=1).view_as(h)),
    "norm": ((6,), lambda h, p: F.layer_norm(h, (6,), p, p + 1)),
    "group norm": ((5,), lambda h, p: F.group_norm(h, 1, p)),
    "prelu": ((5,), F.prelu),
    "bilinear": ((6, 6, 6), lambda h, p: F.bilinear(h, h, p)),
    "attention": ((1, 1, 5, 5), lambda h, p: F.scaled_dot_product_attention(*[h[:, None]] * 3, attn_mask=p)[:, 0]),
}


def test_a_forward_that_was_put_on_a_layer_stays() -> None:
    """As wrappers for mixed precision do; the layer's parameter is replaced for the pass, its forward is not."""
    torch.manual_seed(0)
    model = Net((6,), lambda h, p: h * p)
    model.forward = lambda x: 2 * Net.forward(model, x)
    example = _example(model)
    norms, _ = example.clipped(AutomaticClipping())
    engine = BookKeepingEngine(model, AutomaticClipping())
    own = model.forward
    for _ in range(2):
        torch.testing.assert_close(engine.backward(example.losses()), norms)
        assert model.forward is own


@together(*each(rows=[slice(0, 4), slice(0, 1)], use=USES).args)
def test_operations(use, rows) -> None:
    """Also where the batch has as many samples as there are tokens, or one."""
    torch.manual_seed(0)
    example = _example(Net(*USES[use]), rows)
    norms, clipped = example.clipped(AutomaticClipping())
    engine = BookKeepingEngine(example.model, AutomaticClipping())
    for _ in range(2):
        example.model.zero_grad()
        torch.testing.assert_close(engine.backward(example.losses()), norms, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(example.collected(), clipped, rtol=1e-9, atol=1e-12)


def _example(model: nn.Module, rows: slice = slice(None)) -> Example:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    return Example(model.double().train(), (torch.randn(7, 5, 4).double()[rows], torch.randint(3, (7,))[rows]), loss)


def assert_exact(example: Example) -> None:
    norms, clipped = example.clipped(AutomaticClipping())
    measured = BookKeepingEngine(example.model, AutomaticClipping()).backward(example.losses())
    torch.testing.assert_close(measured, norms, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(example.collected(), clipped, rtol=1e-9, atol=1e-12)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@together(
    "layer",
    [
        Doubled(6, 6),
        nn.PReLU(5),
        nn.ConvTranspose1d(5, 5, 3, padding=1),
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        nn.InstanceNorm1d(5, affine=True),
        nn.Sequential(nn.Unflatten(1, (5, 1)), nn.Unflatten(3, (2, 3)), nn.Conv3d(5, 5, (1, 1, 3), padding="same")),
    ],
)
def test_layers(layer) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    model(torch.randn(2, 5, 4))
    assert_exact(_example(model))


@together("mode", ["mean", "sum"])
def test_bags_of_words(mode) -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 6, mode=mode, padding_idx=0), nn.Linear(6, 3)).double().train()
    ids = torch.randint(9, (4, 5))
    assert_exact(Example(model, (ids,), lambda model, ids: model(ids).square().sum(1)))


class OfAnother(nn.Module):
    """Uses a layer's weight without calling the layer, and a table that other layers turn into positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table, self.project = nn.Linear(4, 4), nn.Embedding(9, 4), nn.Linear(4, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)
        self.register_buffer("numbers", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(torch.tanh(self.inner(x)), self.inner.weight)
        x = x + self.project(self.norm(self.table.weight))[self.numbers] + self.norm(self.table(self.numbers))
        return self.head(x).mean(1)


def test_weights_of_layers_that_are_not_called_and_layers_called_without_samples() -> None:
    """One parameter is read inside and outside of its layer; one layer sees samples nowhere, one here and there."""
    for samples in (4, 5, 1):
        torch.manual_seed(0)
        assert_exact(_example(OfAnother(), slice(0, samples)))


class Dropping(nn.Module):
    """Draws random numbers itself, beside a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gamma, self.head = nn.Linear(4, 6), nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.gamma * self.inner(x).tanh(), 0.3, self.training)
        h = h * h.new_empty(len(h), 1, 1).bernoulli_(0.7)
        return self.head(h + 0.1 * torch.randn_like(h)).mean(1)


def test_random_numbers_are_those_of_the_forward_pass() -> None:
    example = _example(Dropping())
    engine = BookKeepingEngine(example.model, AutomaticClipping())
    losses = example.losses()
    rows = [torch.autograd.grad(loss, example.trainable, retain_graph=True) for loss in losses]
    true = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).norm(dim=1)
    torch.testing.assert_close(engine.backward(losses), true, rtol=1e-9, atol=1e-12)


def test_a_batch_as_large_as_a_table_is_read_like_the_others() -> None:
    """Five samples of five tokens: numbers of tokens are not taken for samples, since they were not before."""
    example = _example(OfAnother())
    engine = BookKeepingEngine(example.model, AutomaticClipping())
    engine.backward(example.losses())
    example.batch = tuple(t[:5] for t in example.batch)
    example.model.zero_grad()
    norms, clipped = example.clipped(AutomaticClipping())
    torch.testing.assert_close(engine.backward(example.losses()), norms, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(example.collected(), clipped, rtol=1e-9, atol=1e-12)


class Weighted(nn.Module):
    """Adds a parameter times seven fixed numbers, one per token, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.p, self.on = nn.Linear(4, 6), nn.Parameter(torch.randn(6)), True

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return (h + self.p * torch.linspace(0, 1, 7)[:, None] if self.on else h * self.p).tanh().square().sum((1, 2))


def test_a_shape_that_tells_nothing_is_not_believed_unchecked() -> None:
    """Seven samples of seven tokens: what seven numbers are is known from a batch before, or found out by a check."""
    example = Example(Weighted().double(), (torch.randn(7, 7, 4).double(),), lambda model, x: model(x))
    norms, _ = example.clipped(AutomaticClipping())
    engine = BookKeepingEngine(example.model, AutomaticClipping())
    for rows in (slice(0, 5), slice(0, 7)):
        torch.testing.assert_close(engine.backward(example.losses(rows)), norms[rows], rtol=1e-9, atol=1e-12)
    engine.detach()
    engine = BookKeepingEngine(example.model, AutomaticClipping())
    example.model.on = False
    for _ in range(2):  # at the third batch no other check is due than that of the new decision
        engine.backward(example.losses())
    example.model.on = True
    with pytest.raises(ValueError, match="disagree with autograd: 'p'"):
        engine.backward(example.losses())


class Turning(nn.Module):
    """Has its samples in dimension 0 until it is turned; the losses of one sample are the same then."""

    def __init__(self, turned) -> None:
        super().__init__()
        self.inner, self.p, self.on, self.turned = nn.Linear(4, 6), nn.Parameter(torch.randn(6)), False, turned

    def parts(self, x: Tensor) -> Tensor:
        return (self.inner(x).tanh() * self.p).square()

    def forward(self, x: Tensor) -> Tensor:
        return self.turned(self, x) if self.on else self.parts(x).transpose(1, 2).mean(2).sum(1)


TURNS = {
    "transposed and back": lambda self, x: self.parts(x.transpose(0, 1)).transpose(0, 1).mean(1).sum(1),
    "copied in another order": lambda self, x: self.parts(x.transpose(0, 1).contiguous()).mean(0).sum(1),
    "by index": lambda self, x: sum(self.parts(x.mT.mT.swapaxes(0, 1).clone())[t] for t in range(x.shape[1])).sum(1),
    "by a product": lambda self, x: torch.einsum("tbd,t->b", self.parts(x.transpose(0, 1)), x.new_ones(x.shape[1])),
    "in the middle": lambda self, x: (
        (self.inner(x).transpose(0, 1).tanh() * self.p).square().transpose(0, 1).sum((1, 2))
    ),
    "once more": lambda self, x: self.parts(x.transpose(0, 1)).transpose(1, 2).transpose(0, 2).sum((1, 2)),
}


@together("turn", TURNS)
def test_samples_that_move_to_another_dimension_later_are_noticed_where_no_shape_tells(turn) -> None:
    """In a batch of as many samples as there are tokens, after the first batches: no other check is due."""
    torch.manual_seed(0)
    example = Example(
        Turning(TURNS[turn]).double().train(), (torch.randn(5, 5, 4).double(),), lambda model, x: model(x)
    )
    engine = make_engine(example.model, AutomaticClipping())
    for rows in (slice(0, 5), slice(0, 4), slice(0, 5)):
        engine.backward(example.losses(rows))
    example.model.on = True
    with pytest.raises(ValueError, match="disagree with autograd"):
        engine.backward(example.losses())


class Pooled(nn.Module):
    """Adds up its tokens by a matrix product; of samples that were turned, from the other side."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.on = nn.Linear(4, 1), False

    def forward(self, x: Tensor) -> Tensor:
        ones = x.new_ones(1, len(x))
        parts = self.inner(x.transpose(0, 1) if self.on else x).tanh().squeeze(2)
        return (ones @ parts if self.on else parts @ ones.T).flatten()


def test_a_product_from_the_other_side_is_noticed() -> None:
    """Its operations are the same, without an argument that names a dimension."""
    torch.manual_seed(0)
    model, x = Pooled().train(), torch.randn(5, 5, 4)
    engine = make_engine(model, AutomaticClipping())
    for _ in range(3):  # no other check is due
        engine.backward(model(x))
    model.on = True
    with pytest.raises(ValueError, match="disagree with autograd"):
        engine.backward(model(x))


class Loop(nn.Module):
    """Goes through the tokens one by one, and leaves a layer out at times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.step, self.more = (
            nn.Linear(4, 6),
            nn.Linear(6, 6),
            nn.ModuleList(nn.Linear(6, 6) for _ in range(4)),
        )
        self.left_out = 0

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 6)
        for token in self.inner(x).unbind(1):
            h = torch.tanh(self.step(h) + token)
        for i, layer in enumerate(self.more):
            h = h if self.left_out >> i & 1 else h + layer(h).tanh()
        return h.square().sum(1)


def test_batches_of_other_sizes_lengths_and_layers_left_out_are_checked_a_few_times_only(monkeypatch) -> None:
    checks = []

    def counted(*args):
        checks.append(args)
        return weighted_gradients(*args)

    monkeypatch.setattr("hyfreedp.clipping.base.weighted_gradients", counted)
    model = Loop().train()
    engine = make_engine(model, AutomaticClipping())
    for samples in (7, 5, 2, 9, 1, 7):
        engine.backward(model(torch.randn(samples, 5, 4)))
    assert len(checks) == 1
    for tokens in range(6, 40):
        engine.backward(model(torch.randn(3, tokens, 4)))
    assert len(checks) <= 6
    for left_out in torch.randint(16, (200,)).tolist():
        model.left_out = left_out
        engine.backward(model(torch.randn(3, 12, 4)))
    assert len(checks) <= 20


def test_a_frozen_weight_beside_a_trained_bias_asks_for_no_more_checks(monkeypatch) -> None:
    """What comes out of a frozen layer has no graph. A check tells whether it holds samples, by the bias alone."""
    checks = []
    monkeypatch.setattr(
        "hyfreedp.clipping.base.weighted_gradients", lambda *args: checks.append(1) or weighted_gradients(*args)
    )
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    engine = BookKeepingEngine(model, AutomaticClipping())
    for _ in range(4):
        engine.backward(model(torch.randint(9, (5, 2))).square().sum((1, 2)))
    assert len(checks) == 1


class Experts(nn.Module):
    """Sends each row to one of two weights, gathered from all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 6, 6))

    def forward(self, rows: Tensor, choice: Tensor) -> Tensor:
        output = torch.zeros_like(rows)
        for expert in choice.unique():
            (where,) = torch.where(choice == expert)
            output = output.index_add(0, where, F.linear(rows[where], self.weight[expert]))
        return output


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.experts, self.head = nn.Linear(4, 6), Experts(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inner(x).flatten(0, 1)
        return self.head(self.experts(rows, (rows[:, 0] > 0).long()).unflatten(0, (len(x), -1)).tanh().mean(1))


def test_experts_of_a_mixture() -> None:
    assert_exact(_example(Mixture()))


class TokensFirst(nn.Module):
    """Moves the samples to dimension 1 before they meet the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.p = nn.Linear(4, 6), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x).transpose(0, 1) * self.p).tanh().sum((0, 2))


@together(("tokens", "message"), [(5, "cannot be told apart .* 'p'"), (14, "disagree .* 'p'")])
def test_samples_elsewhere_are_refused(tokens, message) -> None:
    model = TokensFirst().train()
    engine = make_engine(model, AutomaticClipping())
    with pytest.raises(ValueError, match=message):
        engine.backward(model(torch.randn(7, tokens, 4)))


def test_a_map_of_one_pixel_whose_channels_come_last() -> None:
    """Opacus's samplers misread its strides; ConvNeXt V2 has them on small images."""

    class Pixel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.conv = (
                nn.Conv2d(3, 8, 1),
                nn.LayerNorm(8),
                nn.Conv2d(8, 8, 3, padding=1, groups=8),
            )

        def forward(self, x: Tensor) -> Tensor:
            return (
                self.conv(self.norm(self.inner(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).square().flatten(1).sum(1)
            )

    for size in (1, 2):
        example = Example(
            Pixel().double().train(), (torch.randn(4, 3, size, size).double(),), lambda model, x: model(x)
        )
        norms, _ = example.clipped(AutomaticClipping())
        for engine in (BookKeepingEngine, HooksEngine):
            attached = engine(example.model, AutomaticClipping())
            torch.testing.assert_close(attached.backward(example.losses()), norms, rtol=1e-9, atol=1e-12)
            attached.detach()


class Scale(nn.Module):
    """What only a parameter of its own makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.scale


class Called(nn.Module):
    """Calls a layer in the way that ``use`` knows."""

    def __init__(self, use) -> None:
        super().__init__()
        self.inner, self.scale, self.head, self.use = nn.Linear(4, 6), Scale(), nn.Linear(6, 3), use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self.inner, self.scale, x)).tanh().mean(1)


def functional(inner: nn.Module, scale: nn.Module, x: Tensor) -> Tensor:
    return scale(torch.func.functional_call(scale, {"scale": scale.scale.exp() + 1}, (inner(x),)))


def pairs(inner: nn.Module, scale: nn.Module, x: Tensor) -> Tensor:
    return scale(inner(torch.stack([x, x.flip(1)], 1).flatten(0, 1)).tanh()).unflatten(0, (-1, 2)).sum(1)


def recomputed(inner: nn.Module, scale: nn.Module, x: Tensor) -> Tensor:
    def twice(h: Tensor) -> Tensor:
        factor = scale.scale.sin().exp()
        return F.linear(h * factor, torch.outer(factor, factor))

    return checkpoint(twice, inner(x), use_reentrant=False)


@together("use", [functional, pairs, recomputed])
def test_calls_of_a_layer_with_other_values_more_rows_and_twice(use) -> None:
    torch.manual_seed(0)
    example = _example(Called(use))
    plain, (norms, _) = example.losses(), example.clipped(AutomaticClipping())
    engine = make_engine(example.model, AutomaticClipping())
    for _ in range(2):
        torch.testing.assert_close(example.losses(), plain)
        torch.testing.assert_close(engine.backward(example.losses()), norms, rtol=1e-9, atol=1e-12)


def test_a_new_tensor_into_which_a_parameter_is_written_is_followed() -> None:
    assert_exact(_example(Net((6,), set_of_a_new_tensor)))


def test_a_single_sample_is_read_like_those_before() -> None:
    """Constants of any length could be rows of one sample, but have not been rows of samples."""
    model = nn.Sequential(nn.Linear(4, 6), nn.utils.parametrizations.orthogonal(nn.Linear(6, 3)), nn.Tanh())
    example = _example(nn.Sequential(model, nn.Flatten(), nn.Linear(15, 3)))
    engine = make_engine(example.model, AutomaticClipping())
    engine.backward(example.losses())
    norms, _ = example.clipped(AutomaticClipping())
    torch.testing.assert_close(engine.backward(example.losses(slice(0, 1))), norms[:1], rtol=1e-9, atol=1e-12)


class Gated(nn.Module):
    """Moves the samples to dimension 1, behind a gate that is closed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.behind, self.gate = nn.Linear(4, 6), nn.Linear(6, 6), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        moved = self.behind(h.transpose(0, 1).reshape(-1, 6)).view(-1, len(x), 6).transpose(0, 1)
        return (h + self.gate * moved).square().sum((1, 2))


def test_what_a_closed_gate_hid_is_seen_once_it_opens() -> None:
    model = Gated().train()
    engine = make_engine(model, AutomaticClipping())
    engine.backward(model(torch.randn(4, 5, 4)))
    nn.init.ones_(model.gate)
    with pytest.raises(ValueError, match=r"disagree .* 'behind.weight'"):
        engine.backward(model(torch.randn(4, 5, 4)))


def test_what_a_closed_gate_hides_is_seen_at_shaken_weights() -> None:
    data = TensorDataset(torch.randn(16, 5, 4))
    model = Gated().train()
    private, optimizer, loader = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    with pytest.raises(ValueError, match=r"disagree .* 'behind.weight'"):
        for batch in loader:
            optimizer.step(lambda batch: private(batch[0]), batch)


def test_a_parameter_that_was_replaced_is_refused() -> None:
    """It would not be what the model computes with."""
    example = _example(Called(lambda inner, scale, x: scale(inner(x))))
    engine = make_engine(example.model, AutomaticClipping())
    engine.backward(example.losses())
    state = {name: 2 * value for name, value in example.model.state_dict().items()}
    example.model.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match=r"parameter 'scale\.scale' is used outside"):
        engine.backward(example.losses())


def test_an_interrupted_forward_pass_leaves_the_next_one_as_it_was() -> None:
    example = _example(Called(lambda inner, scale, x: scale(inner(x))))
    engine = make_engine(example.model, AutomaticClipping())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = example.model.head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        example.losses()
    handle.remove()
    norms, _ = example.clipped(AutomaticClipping())
    torch.testing.assert_close(engine.backward(example.losses(slice(0, 3))), norms[:3], rtol=1e-9, atol=1e-12)


def test_values_changed_after_their_use_and_outputs_used_twice_are_refused() -> None:
    def changed(h: Tensor, p: Tensor) -> Tensor:
        value = p * 2
        h = h + value
        value.mul_(3)
        return h

    example = _example(Net((6,), changed))
    with pytest.raises(ValueError, match=r"modified in place after it met the samples"):
        make_engine(example.model, AutomaticClipping()).backward(example.losses())
    model = nn.Linear(4, 6).train()
    engine = make_engine(model, AutomaticClipping())
    kept = model(torch.randn(3, 4))
    engine.backward(kept.sum(1))
    with pytest.raises(ValueError, match=r"earlier backward pass"):
        engine.backward(kept.square().sum(1))
