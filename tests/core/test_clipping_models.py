"""Models of timm, transformers and peft, in small, with and without checkpointing: a loop over samples, and mapped."""

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from models import Example, assert_exact, classifier, groupnorm_convnet, of_catalog
from peft import FourierFTConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D
from twins import Built

from hyfreedp.gradients import AutomaticClipping, GradientEngine
from hyfreedp.gradients.pieces import Partition

VIT, GPT2, LORA = "timm/deit3_small_patch16_224", "transformers/GPT2LMHeadModel", "peft/LoRA, LLaMA"
TIMM = "swin_tiny_patch4_window7_224 beit_base_patch16_224 convnextv2_atto cait_xxs24_224 tnt_s_patch16_224".split()
TRANSFORMERS = "LlamaForCausalLM BloomForCausalLM BertForSequenceClassification XLNetForSequenceClassification".split()
NAMES = [VIT, GPT2, LORA, "peft/LoHa, LLaMA", *(f"timm/{name}" for name in TIMM)]
NAMES += [f"transformers/{name}" for name in [*TRANSFORMERS, "LongformerForSequenceClassification"]]


@pytest.mark.parametrize("name", NAMES)
def test_models_of_others_are_exact_and_mapped_in_one_piece(name) -> None:
    """In one piece, also records with and without padding, of which transformers would mask the first alone."""
    example = of_catalog(name)
    engine, partition = assert_exact(example, rtol=1e-8), Partition.of(example.batch)
    engine.losses(lambda batch: example.loss(example.model, *batch), partition)
    assert len(partition.pieces) == 1


def test_an_output_that_is_a_view_and_is_changed_in_place_is_exact() -> None:
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
def test_adapters_are_exact(name) -> None:
    """Which make weights of constants as wide as the layer."""
    layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    ADAPTERS[name].target_modules = {"2"}
    assert_exact(classifier(get_peft_model(layers, ADAPTERS[name]), torch.randn(4, 5).double(), 3), rtol=1e-8)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")  # torch, of itself
def test_a_compiled_model_is_mapped_as_it_was_written() -> None:
    example = groupnorm_convnet()
    loss, compiled = example.loss, torch.compile(example.model, backend="eager")
    example.loss = lambda _, *batch: loss(compiled, *batch)
    assert_exact(example)
    torch.compiler.reset()


WITHOUT_REENTRANCE = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}


def checkpointed(layer):
    """A layer whose activations are recomputed in the backward pass."""
    return Built(lambda m, x: checkpoint(m.layer, x, use_reentrant=False), layer=layer)


def nested():
    """Free parameters, in-place activations and a convolution, inside nested checkpoints."""

    def scaled(m, x):
        return checkpoint(lambda x: torch.tanh(m.linear(x) * m.scale.sin().exp()), x, use_reentrant=False)

    inner = Built(scaled, linear=nn.Linear(8, 8), scale=nn.Parameter(torch.rand(1, 1, 8) + 0.5))
    outer = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), checkpointed(inner), nn.ReLU(inplace=True), nn.LayerNorm(8))
    model = nn.Sequential(checkpointed(outer), nn.Linear(8, 8)).double().train()
    return Example(model, (torch.randn(5, 4, 8).double(),), lambda model, x: model(x).square().sum((1, 2)))


@pytest.mark.parametrize("name", [VIT, GPT2, LORA, "nested"])
def test_norms_and_clipped_sums_are_those_without_checkpointing(name):
    """By the switches of timm and transformers, which checkpoint the blocks one by one."""
    example = nested() if name == "nested" else of_catalog(name)
    if name == VIT:
        example.model.set_grad_checkpointing(True)
    elif name != "nested":
        example.model.gradient_checkpointing_enable(**WITHOUT_REENTRANCE)
    assert_exact(example, rtol=1e-8)


def memory(private, checkpointing):
    """Bytes at the peak of a batch after the first, beyond those before it, all of which are given back at its end."""
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 6, "max_position_embeddings": 32}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=40, num_attention_heads=2, num_key_value_heads=1, **sizes))
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    model, ids = get_peft_model(plain, lora).train(), torch.randint(3, 40, (4, 32))
    if checkpointing:
        model.gradient_checkpointing_enable(**WITHOUT_REENTRANCE)
    engine = GradientEngine(model, AutomaticClipping())

    def losses(ids):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.mT, ids[:, 1:], reduction="none").sum(1)

    def batch():
        engine.clipped_sums(losses, ids) if private else losses(ids).sum().backward()

    batch()
    gc.disable()  # nothing may wait for it
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        batch()
    gc.enable()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = list(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    assert live[-1] == 0 or not private
    return max(live)


def test_with_lora_the_memory_is_that_of_training_without_privacy():
    """After the forward pass only the blocks' inputs are left, in the backward pass one block is there at a time."""
    assert memory(True, True) <= 1.15 * memory(False, True) < 0.5 * memory(True, False)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_reentrant_checkpointing_is_refused():
    example = of_catalog(GPT2)
    example.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(RuntimeError, match="set use_reentrant=False"):
        example.by_engine(GradientEngine(example.model, AutomaticClipping()))
