"""Whatever cannot be privatised, or hides its samples, is refused by name and never dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import together
from catalog import cases
from models import TiedLanguageModel, mlp
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight
from twins import cross_entropy, make_data, make_model, make_private, sgd

from hyfreedp.clipping import (
    AbadiClipping,
    AutomaticClipping,
    BookKeepingEngine,
    check_module,
    make_engine,
)
from hyfreedp.clipping.hooks import HooksEngine

ENGINES = [BookKeepingEngine, HooksEngine]


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@together(
    ("layer", "message"),
    [
        (nn.BatchNorm2d(3), r"'norm' \(BatchNorm2d\) .* GroupNorm"),
        (frozen(nn.BatchNorm1d(3)), "keep it in eval mode"),
        (frozen(nn.BatchNorm1d(3, track_running_stats=False)).eval(), "GroupNorm"),
        (nn.SyncBatchNorm(3), r"'norm' \(SyncBatchNorm\)"),
        (nn.InstanceNorm2d(3, track_running_stats=True), "track_running_stats=False"),
        (nn.Embedding(3, 3, max_norm=1.0), "max_norm=None"),
        (nn.Embedding(3, 3, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
        (nn.Embedding(3, 3, sparse=True), "sparse=False"),
    ],
)
def test_layers_that_mix_samples(layer, message) -> None:
    module = nn.ModuleDict({"linear": nn.Linear(3, 3), "norm": layer})
    with pytest.raises(ValueError, match=message):
        check_module(module)
    with pytest.raises(ValueError, match=message):
        make_engine(module, AutomaticClipping())


@contextmanager
def rounded(how: str) -> Iterator[None]:
    """float32 products with factors in TF32 or bfloat16, where a device can."""
    matmul = torch.backends.cuda.matmul
    if how == "of the backend" and not hasattr(matmul, "fp32_precision"):
        pytest.skip("as of PyTorch 2.9")
    if how == "of the backend":
        matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision(how)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@together("how", ["high", "medium", "of the backend"])
def test_rounded_products_are_refused_before_the_batch_is_seen(how) -> None:
    """A clipped gradient could be larger than its norm says."""
    model = make_model()
    with rounded(how), pytest.raises(ValueError, match="set_float32_matmul_precision"):
        make_engine(model, AutomaticClipping())
    _, optimizer, _ = make_private(model, sgd(model))
    with rounded(how), pytest.raises(ValueError, match="set_float32_matmul_precision"):
        optimizer.step(lambda batch: pytest.fail("the batch was seen"), list(make_data(8).tensors))
    optimizer.step(cross_entropy(model), list(make_data(8).tensors))


def test_convolutions_of_clipped_sums_are_exact_where_others_are_rounded(monkeypatch) -> None:
    """CUDA rounds convolutions to TF32 by default, and norms are no convolutions."""
    settings = torch.backends.cudnn.conv if hasattr(torch.backends.cudnn, "conv") else torch.backends.cudnn
    name, exact = ("fp32_precision", "ieee") if hasattr(settings, "fp32_precision") else ("allow_tf32", False)
    before, seen = getattr(settings, name), []

    def recorded(*args: Any) -> Tensor:
        seen.append(getattr(settings, name))
        return conv2d_weight(*args)

    monkeypatch.setattr("hyfreedp.clipping.convolution.conv2d_weight", recorded)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    make_engine(model, AutomaticClipping()).backward(model(torch.randn(5, 3, 8, 8)).square().sum(1))
    assert seen and set(seen) == {exact} and getattr(settings, name) == before != exact


def test_running_statistics_of_foreign_layers() -> None:
    class Normalize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(3))

    with pytest.raises(ValueError, match=r"'1' \(Normalize\) keeps running statistics"):
        check_module(nn.Sequential(nn.Linear(3, 3), Normalize()))


def test_what_may_pass() -> None:
    check_module(nn.Sequential(nn.Linear(3, 3), frozen(nn.BatchNorm1d(3)).eval(), nn.InstanceNorm1d(3)))


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="no parameter is trainable"):
        make_engine(frozen(nn.Linear(3, 3)), AutomaticClipping())


@together("threshold", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_clipping_arguments(threshold) -> None:
    with pytest.raises(ValueError, match=f"threshold={threshold}"):
        AbadiClipping(threshold)
    with pytest.raises(ValueError, match=f"stability={threshold}"):
        AutomaticClipping(stability=threshold)


def test_unknown_engine() -> None:
    with pytest.raises(ValueError, match="engine='ghost' is not allowed"):
        make_engine(nn.Linear(3, 3), AutomaticClipping(), "ghost")


def test_attention_of_several_inputs() -> None:
    module = nn.TransformerEncoderLayer(8, 2, 8)
    with pytest.raises(ValueError, match=r"'self_attn' \(MultiheadAttention\) .*DPMultiheadAttention"):
        HooksEngine(module, AutomaticClipping())
    frozen(module.self_attn)
    HooksEngine(module, AutomaticClipping())


@together(
    ("layer", "message"),
    [
        (nn.LSTM(2, 2), r"'layer' \(LSTM\) hides its time steps: use engine 'bookkeeping', .*DPLSTM"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), "padding_mode 'circular'"),
        (nn.EmbeddingBag(3, 2), "EmbeddingBag"),
    ],
)
def test_hooks_name_what_opacus_gets_wrong(layer, message) -> None:
    with pytest.raises(ValueError, match=message):
        HooksEngine(nn.ModuleDict({"layer": layer}), AutomaticClipping())


def test_hooks_refuse_to_recompute_dropout_or_buffers() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    block.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"\(Sequential\) .* dropout"):
        HooksEngine(block, AutomaticClipping())
    block[1].p = 0.0
    block.register_buffer("offset", torch.zeros(4))
    with pytest.raises(ValueError, match=r"\(Sequential\) has buffers"):
        HooksEngine(block, AutomaticClipping())


@together("make", [lambda: nn.BatchNorm1d(5), lambda: nn.GRU(2, 2)])
def test_a_refusal_names_three_layers_and_counts_the_rest(make) -> None:
    module = nn.ModuleList([make() for _ in range(40)])
    with pytest.raises(ValueError, match=r"and \d+ more like these") as refused:
        make_engine(module, AutomaticClipping(), "hooks")
    message = str(refused.value)
    assert len(re.findall(r"layer '\d+'", message)) == 3
    assert len(message) < 10 * 120


class Functional(nn.Module):
    """Uses a layer's weight without calling the layer, as a tied head often does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.inner(x)), self.inner.weight)


class Mixing(nn.Module):
    """Centres its batch: every sample's loss depends on all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x - 10 * x.mean(0)


@together(
    ("engine", "model", "message"),
    [
        (HooksEngine, Functional, "'inner.weight'.* disagree|disagree.* 'inner.weight'"),
        (BookKeepingEngine, Mixing, "disagree with autograd: 'inner.weight'.*mixes samples"),
        (HooksEngine, Mixing, "disagree with autograd: 'inner.weight'.*mixes samples"),
    ],
)
def test_models_that_mislead_the_engine(engine, model, message) -> None:
    torch.manual_seed(0)
    module = model()
    attached = engine(module, AutomaticClipping())
    with pytest.raises(ValueError, match=message):
        attached.backward(module(torch.randn(6, 4)).square().sum(1))
    assert all(p.grad is None for p in module.parameters())


@together("engine", ENGINES)
def test_samples_must_be_dimension_zero(engine) -> None:
    module = nn.Linear(4, 4)
    attached = engine(module, AutomaticClipping())
    with pytest.raises(ValueError, match=r"\(Linear\) saw 3 samples, but there are 6 losses"):
        attached.backward(module(torch.randn(3, 6, 4)).sum((0, 2)))


def test_hooks_refuse_positions_without_a_batch_dimension() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table(torch.arange(x.shape[1]))

    module = Positions()
    attached = HooksEngine(module, AutomaticClipping())
    with pytest.raises(ValueError, match=r"'table' \(Embedding\) saw 7 samples, but there are 6 losses"):
        attached.backward(module(torch.randn(6, 7, 4)).square().sum((1, 2)))
    with pytest.raises(ValueError, match=r"disagree with autograd: 'table.weight'"):
        attached.backward(module(torch.randn(7, 7, 4)).square().sum((1, 2)))


@together("engine", ENGINES)
def test_losses_must_be_per_sample(engine) -> None:
    example = mlp()
    attached = engine(example.model, AutomaticClipping())
    with pytest.raises(ValueError, match=r"shape \(\): it must be \(B,\)"):
        attached.backward(example.losses().mean())
    with torch.no_grad():
        losses = example.losses()
    with pytest.raises(ValueError, match="under no_grad"):
        attached.backward(losses)


@together("engine", ENGINES)
def test_a_layer_unfrozen_later_is_not_dropped(engine) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.PReLU().requires_grad_(False))
    attached = engine(module, AutomaticClipping())
    module[1].requires_grad_(True)
    with pytest.raises(ValueError, match=r"'1\.weight' is used outside"):
        attached.backward(module(torch.randn(5, 4)).sum(1))


def test_input_changed_in_place_after_use() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    attached = BookKeepingEngine(module, AutomaticClipping())
    x = torch.randn(5, 4)
    losses = module(x).sum(1)
    x += 1
    with pytest.raises((ValueError, RuntimeError), match="modified"):
        attached.backward(losses)


def test_frozen_embedding_keeps_shared_positions() -> None:
    """Positions are repeated for every sample only where their table is trained."""
    model = TiedLanguageModel()
    model.positions.requires_grad_(False)
    shapes = []
    model.positions.register_forward_hook(lambda layer, args, output: shapes.append(tuple(output.shape)))
    HooksEngine(model, AutomaticClipping())
    model(torch.ones(5, 7, dtype=torch.long))
    model.positions.requires_grad_(True)
    model(torch.ones(5, 7, dtype=torch.long))
    assert shapes == [(1, 7, 8), (5, 7, 8)]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p: Tensor) -> Tensor:
        return 2 * p

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return 2 * g


class OwnFunction(nn.Module):
    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.inner, self.p, self.rows = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4)), rows

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(self.inner(x) @ self.p) if self.rows else self.inner(x) @ Scaled.apply(self.p)


def test_a_parameter_in_an_autograd_function_of_somebodys_own_is_refused_with_its_name() -> None:
    """PEFT's LoHa has one; one of samples is no matter."""
    model = OwnFunction(rows=False).train()
    engine = make_engine(model, AutomaticClipping())
    with pytest.raises(ValueError, match=r"'p' goes into Scaled, an autograd function .* such as LoKr or LoRA"):
        engine.backward(model(torch.randn(3, 4)).sum(1))
    model = OwnFunction(rows=True).train()
    make_engine(model, AutomaticClipping()).backward(model(torch.randn(3, 4)).sum(1))


@together(
    ("name", "message"),
    [
        ("transformers/LongformerForSequenceClassification", r"saw 8 samples.* tokens first, as Longformer .* freeze"),
        ("transformers/XLNetForSequenceClassification", r"cannot be told apart.* tokens first, as XLNet .* freeze"),
        ("peft/LoHa, LLaMA", r"goes into HadaWeight, an autograd function"),
    ],
)
def test_models_that_are_refused_say_why_and_what_to_do(name, message) -> None:
    pytest.importorskip("transformers")
    (case,) = [case for case in cases() if f"{case.library}/{case.name}" == name]
    model, batch, loss = case.build()
    engine = make_engine(model, AutomaticClipping())
    with pytest.raises(ValueError, match=message):
        engine.backward(loss(model, *batch(3)))
