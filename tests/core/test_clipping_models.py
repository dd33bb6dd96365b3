"""Gradient engines on small configurations of the model families that the paper trains."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import pairs, together
from models import Example, bert, biases_only, gpt2, groupnorm_convnet, llama, llama_lora, vit, vit_tiny
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hyfreedp.clipping import AutomaticClipping, BookKeepingEngine, GradientEngine, make_engine
from hyfreedp.clipping.hooks import HooksEngine

ENGINES = [BookKeepingEngine, HooksEngine]

# torch's vmap over attention, in the hooks engine
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet:UserWarning")


def assert_exact(engine: type[GradientEngine], example: Example) -> None:
    clipping = AutomaticClipping()
    norms, clipped = example.clipped(clipping)
    measured = engine(example.model, clipping).backward(example.losses())
    torch.testing.assert_close(measured, norms, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(example.collected(), clipped, rtol=1e-8, atol=1e-12)


@together(
    ("tuning", "build"),
    itertools.product(["full", "biases"], [vit_tiny, groupnorm_convnet, gpt2, llama, llama_lora, bert]),
)
def test_equals_vmap_of_grad(build, tuning) -> None:
    example = build()
    for module in example.model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # which vmap does not allow
    if tuning == "biases":
        biases_only(example.model)
        if not example.trainable:
            assert build in (llama, llama_lora)
            _give_biases(example.model)
    gradients = example.gradients_by_vmap()
    norms = gradients.norm(dim=1)
    clipping = AutomaticClipping()
    measured = BookKeepingEngine(example.model, clipping).backward(example.losses())
    torch.testing.assert_close(measured, norms, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(example.collected(), clipping.factors(norms) @ gradients, rtol=1e-8, atol=1e-12)


def _give_biases(model: nn.Module) -> None:
    """LLaMA has none of its own."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.bias = nn.Parameter(torch.randn(layer.out_features, dtype=layer.weight.dtype))


@together(("engine", "build"), itertools.product(ENGINES, [vit, gpt2, llama, bert]))
def test_full_fine_tuning(engine, build) -> None:
    assert_exact(engine, build())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("build", "head"), [(vit, "head"), (gpt2, "lm_head"), (bert, "classifier")])
def test_biases_and_head(engine, build, head) -> None:
    example = build()
    biases_only(example.model, head)
    assert_exact(engine, example)


@together("engine", ENGINES)
def test_an_output_that_is_a_view_and_is_changed_in_place(engine) -> None:
    """As that of transformers' Conv1D: its node leaves the graph, and took with it what was recorded there."""
    model = nn.Sequential(Conv1D(6, 4), nn.ReLU(inplace=True), nn.Linear(6, 3)).double().train()
    x = torch.randn(5, 7, 4).double()
    assert_exact(engine, Example(model, (x,), lambda model, x: model(x).square().sum((1, 2))))


@together("engine", ENGINES)
def test_lora(engine) -> None:
    assert_exact(engine, llama_lora())


@together("engine", ENGINES)
def test_lora_on_embeddings_made_to_require_gradients(engine) -> None:
    """As for gradient checkpointing: the lowest trainable layers then sit above a leaf that is no parameter."""
    example = llama_lora()
    example.model.enable_input_require_grads()
    assert_exact(engine, example)


@together("build", [vit, gpt2, llama, bert, llama_lora])
def test_auto_picks_book_keeping(build) -> None:
    assert isinstance(make_engine(build().model, AutomaticClipping()), BookKeepingEngine)


@together("build", [vit, gpt2, llama, bert])
def test_physical_batches_and_values_stay(build) -> None:
    example = build()
    plain = example.losses()
    _, clipped = example.clipped(AutomaticClipping())
    attached = make_engine(example.model, AutomaticClipping())
    torch.testing.assert_close(example.losses(), plain, rtol=1e-12, atol=1e-12)
    for rows in (slice(0, 1), slice(1, 4)):
        attached.backward(example.losses(rows))
    torch.testing.assert_close(example.collected(), clipped, rtol=1e-8, atol=1e-12)
    assert not any("cls_token" in vars(m) for m in example.model.modules())


@together("build", [vit, bert])
def test_half_precision_autocast_is_close(build) -> None:
    example = build()
    example.model.float()
    example.batch = tuple(t.float() if t.is_floating_point() else t for t in example.batch)
    norms, clipped = example.clipped(AutomaticClipping())
    attached = make_engine(example.model, AutomaticClipping())
    with torch.autocast("cpu", torch.bfloat16):
        measured = attached.backward(example.losses())
    assert measured.dtype == torch.float32
    torch.testing.assert_close(measured, norms, rtol=0.05, atol=0)
    assert (example.collected() - clipped).norm() < 0.05 * clipped.norm()


@together("seed", range(20))
def test_half_precision_autocast_of_swin_is_not_refused(seed) -> None:
    """Autograd's own gradients of its norms are off by up to a half there: its kernel adds up rows in bfloat16."""
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2)}
    torch.manual_seed(seed)
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **sizes).train()
    engine = make_engine(model, AutomaticClipping())
    with torch.autocast("cpu", torch.bfloat16):
        losses = F.cross_entropy(model(torch.randn(16, 3, 32, 32)), torch.randint(5, (16,)), reduction="none")
    engine.backward(losses)


class Rows(nn.Module):
    """A layer with many rows per sample; ``shift`` makes a sample's loss that of the rows of another."""

    def __init__(self, layer: nn.Module, shift: int) -> None:
        super().__init__()
        self.layer, self.shift = layer, shift

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x).roll(self.shift, 0) - y).square().mean((1, 2))


@together(*pairs(engine=ENGINES, dtype=[torch.bfloat16, torch.float16], kind=[nn.LayerNorm, nn.Embedding]).args)
def test_long_sums_in_half_precision(kind, dtype, engine) -> None:
    """Where autograd's own are off by a third and more, what is right passes, and what is wrong does not."""
    torch.manual_seed(0)
    y = torch.tensor([-1.0, 1.0, 2.0, -2.0], dtype=torch.float64)[:, None, None]
    if kind is nn.LayerNorm:
        layer, x = nn.LayerNorm(8), torch.randn(4, 2048, 8).double()
    else:
        layer, x = nn.Embedding(5, 8), (torch.rand(4, 4096) < 0.2) + torch.arange(4)[:, None]
    norms, _ = Example(Rows(layer.double(), 0), (x, y), lambda model, x, y: model(x, y)).clipped(AutomaticClipping())
    batch = [t.to(dtype) if t.is_floating_point() else t for t in (x, y)]
    attached = engine(Rows(layer.to(dtype), 0).train(), AutomaticClipping())
    measured = attached.backward(attached.module(*batch).float())
    torch.testing.assert_close(measured.double(), norms, rtol=0.05, atol=0)
    attached.detach()
    attached = engine(Rows(layer, 1).train(), AutomaticClipping())
    with pytest.raises(ValueError, match="disagree with autograd"):
        attached.backward(attached.module(*batch).float())
