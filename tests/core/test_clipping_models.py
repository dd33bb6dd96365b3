"""Models of timm, transformers and peft, in small: exact against a loop over samples, and fast."""

import itertools

import pytest
import torch
from cases import together
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

# torch's vmap over attention
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet:UserWarning")

CASES = {f"{case.library}/{case.name}": case for case in cases()}
FAST = (
    "timm/swin_tiny_patch4_window7_224 timm/swinv2_tiny_window8_256 timm/beit_base_patch16_224 timm/convnext_atto "
    "timm/vit_small_patch16_dinov3 timm/convnextv2_atto timm/cait_xxs24_224 timm/tnt_s_patch16_224"
).split()
SLOW = "transformers/XLNetForSequenceClassification transformers/LongformerForSequenceClassification".split()


def case_of(name: str, trained: str) -> Example:
    model, batch, loss = CASES[name].build()
    if trained == "biases":
        biases_only(model)

    def losses(model: nn.Module, *batch: Tensor) -> Tensor:
        found = loss(model, *batch)
        return found if isinstance(found, Tensor) else found[0]

    return Example(model, batch(4), losses)


@together(("trained", "name"), itertools.product(["full", "biases"], FAST))
def test_models_of_others_that_are_fast(name, trained) -> None:
    assert_exact(case_of(name, trained), rtol=1e-8)


@together("name", SLOW)
def test_models_of_others_that_are_slow(name) -> None:
    assert_exact(case_of(name, "full"), rtol=1e-8, slow="no rule|disagree|do not grow|may move")


@together(("tuning", "build"), itertools.product(["full", "biases"], [vit, vit_tiny, gpt2, llama, bert, llama_lora]))
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


@pytest.mark.filterwarnings("ignore:gradients are computed one sample at a time:UserWarning")
@together(("name", "samples"), itertools.product(ADAPTERS, [4, 8, 16]))
def test_adapters(name, samples) -> None:
    """Which make weights of constants as wide as the layer; there may be as many samples."""
    layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    ADAPTERS[name].target_modules = {"2"}
    example = classifier(get_peft_model(layers, ADAPTERS[name]).double(), torch.randn(samples, 5).double(), 3)
    found = example.by_engine(make_engine(example.model, AutomaticClipping()))
    torch.testing.assert_close(found, example.clipped(), rtol=1e-8, atol=1e-12)


def test_half_precision_autocast_of_swin_is_not_taken_for_an_error() -> None:
    """Autograd's own gradients of its norms are off by up to a half there: its kernel adds up rows in bfloat16."""
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2)}
    for seed in range(8):
        torch.manual_seed(seed)
        model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **sizes)
        example, engine = classifier(model, torch.randn(16, 3, 32, 32), 5), make_engine(model, AutomaticClipping())
        with torch.autocast("cpu", torch.bfloat16):
            example.by_engine(engine)
        assert engine.slow is None


# torch's own tracer asks each tensor for its gradient
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@together("build", [tied_language_model, groupnorm_convnet])
def test_a_compiled_model_gives_the_same_gradients(build) -> None:
    """With layer rules alone, and with weights that are followed through operations."""
    example = build()
    expected, loss, compiled = example.clipped(), example.loss, torch.compile(example.model, backend="eager")
    example.loss = lambda model, *batch: loss(compiled, *batch)
    torch.testing.assert_close(example.by_engine(make_engine(example.model, AutomaticClipping())), expected)
    torch.compiler.reset()
