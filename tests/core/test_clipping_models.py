"""Gradient engines on small configurations of the model families that the paper trains."""

from __future__ import annotations

import pytest
import torch
from models import Example, bert, biases_only, gpt2, groupnorm_convnet, llama, llama_lora, vit, vit_tiny
from torch import nn

from hyfreedp.clipping import AutomaticClipping, BookKeepingEngine, GradientEngine, HooksEngine, make_engine

ENGINES = [BookKeepingEngine, HooksEngine]

# torch's vmap over attention, in the hooks engine
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet:UserWarning")


def assert_exact(engine: type[GradientEngine], example: Example) -> None:
    clipping = AutomaticClipping()
    norms, clipped = example.clipped(clipping)
    measured = engine(example.model, clipping).backward(example.losses())
    torch.testing.assert_close(measured, norms, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(example.collected(), clipped, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("tuning", ["full", "biases"])
@pytest.mark.parametrize("build", [vit_tiny, groupnorm_convnet, gpt2, llama, llama_lora, bert])
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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("build", [vit, gpt2, llama, bert])
def test_full_fine_tuning(engine, build) -> None:
    assert_exact(engine, build())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("build", "head"), [(vit, "head"), (gpt2, "lm_head"), (bert, "classifier")])
def test_biases_and_head(engine, build, head) -> None:
    example = build()
    biases_only(example.model, head)
    assert_exact(engine, example)


@pytest.mark.parametrize("engine", ENGINES)
def test_lora(engine) -> None:
    assert_exact(engine, llama_lora())


@pytest.mark.parametrize("engine", ENGINES)
def test_lora_on_embeddings_made_to_require_gradients(engine) -> None:
    """As for gradient checkpointing: the lowest trainable layers then sit above a leaf that is no parameter."""
    example = llama_lora()
    example.model.enable_input_require_grads()
    assert_exact(engine, example)


@pytest.mark.parametrize("build", [vit, gpt2, llama, bert, llama_lora])
def test_auto_picks_book_keeping(build) -> None:
    assert isinstance(make_engine(build().model, AutomaticClipping()), BookKeepingEngine)


@pytest.mark.parametrize("build", [vit, gpt2, llama, bert])
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


@pytest.mark.parametrize("build", [vit, bert])
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
