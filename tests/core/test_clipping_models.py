"""Models of timm, transformers and peft, in small: exact against a loop over samples, and mapped."""

import itertools

import pytest
import torch
from catalog import cases
from models import (
    Example,
    assert_exact,
    bert,
    biases_only,
    classifier,
    gpt2,
    groupnorm_convnet,
    llama,
    llama_lora,
    tied_language_model,
    vit,
    vit_tiny,
)
from peft import FourierFTConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hyfreedp.gradients import AutomaticClipping, make_engine

CASES = {f"{case.library}/{case.name}": case for case in cases()}
NAMES = (
    "timm/swin_tiny_patch4_window7_224 timm/swinv2_tiny_window8_256 timm/beit_base_patch16_224 timm/convnext_atto "
    "timm/vit_small_patch16_dinov3 timm/convnextv2_atto timm/cait_xxs24_224 timm/tnt_s_patch16_224 "
    "transformers/XLNetForSequenceClassification"
).split()


def case_of(name: str, trained: str) -> Example:
    model, batch, loss = CASES[name].build()
    if trained == "biases":
        biases_only(model)

    def losses(model: nn.Module, *batch: Tensor) -> Tensor:
        found = loss(model, *batch)
        return found if isinstance(found, Tensor) else found[0]

    return Example(model, batch(4), losses)


@pytest.mark.parametrize(("trained", "name"), itertools.product(["full", "biases"], NAMES))
def test_models_of_others(name, trained) -> None:
    assert_exact(case_of(name, trained), rtol=1e-8)


def test_a_model_of_others_whose_shapes_depend_on_the_data() -> None:
    assert_exact(
        case_of("transformers/LongformerForSequenceClassification", "full"), rtol=1e-8, slow="nonzero|as_strided"
    )


@pytest.mark.parametrize(
    ("tuning", "build"), itertools.product(["full", "biases"], [vit, vit_tiny, gpt2, llama, bert, llama_lora])
)
def test_full_fine_tuning_lora_and_biases(build, tuning) -> None:
    example = build()
    if tuning == "biases":
        for layer in example.model.modules() if build in (llama, llama_lora) else ():  # which have none of their own
            if isinstance(layer, nn.Linear):
                layer.bias = nn.Parameter(torch.randn(layer.out_features, dtype=layer.weight.dtype))
        biases_only(example.model)
    assert_exact(example, rtol=1e-8)


def test_lora_on_embeddings_made_to_require_gradients() -> None:
    """As for gradient checkpointing: the lowest trainable layers then sit above a leaf that is no parameter."""
    example = llama_lora()
    example.model.enable_input_require_grads()
    assert_exact(example, rtol=1e-8)


def test_an_output_that_is_a_view_and_is_changed_in_place() -> None:
    """As that of transformers' Conv1D: its node leaves the graph, and took with it what was recorded there."""
    model = nn.Sequential(Conv1D(6, 4), nn.ReLU(inplace=True), nn.Linear(6, 3)).double().train()
    x = torch.randn(5, 7, 4).double()
    assert_exact(Example(model, (x,), lambda model, x: model(x).square().sum((1, 2))))


ADAPTERS = {
    "DoRA": LoraConfig(r=2, use_dora=True),
    "OFT": OFTConfig(oft_block_size=4, use_cayley_neumann=False),
    "LoKr": LoKrConfig(r=2),
    "FourierFT": FourierFTConfig(n_frequency=10, init_weights=False),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name) -> None:
    """Which make weights of constants as wide as the layer."""
    layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    ADAPTERS[name].target_modules = {"2"}
    assert_exact(classifier(get_peft_model(layers, ADAPTERS[name]).double(), torch.randn(4, 5).double(), 3), rtol=1e-8)


def test_half_precision_autocast_of_swin() -> None:
    """Its norms of many rows, and its biases of positions."""
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2)}
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, drop_path_rate=0.0, **sizes)
    example, engine = classifier(model, torch.randn(8, 3, 32, 32), 5), make_engine(model, AutomaticClipping())
    norms, total = example.clipped()
    with torch.autocast("cpu", torch.bfloat16):
        measured, found = example.by_engine(engine)
    torch.testing.assert_close(measured, norms, rtol=0.05, atol=0)
    assert engine.fallback_reason is None and (found - total).norm() < 0.05 * total.norm()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("build", [tied_language_model, groupnorm_convnet])
def test_a_compiled_model_is_mapped_as_it_was_written(build) -> None:
    example = build()
    loss, compiled = example.loss, torch.compile(example.model, backend="eager")
    example.loss = lambda _, *batch: loss(compiled, *batch)
    assert_exact(example)
    torch.compiler.reset()
