"""Activation checkpointing: the gradients that a model without it has, in less memory."""

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from models import Example, assert_exact, gpt2, llama, llama_lora, vit
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from twins import Built, by_hand, cross_entropy, flat, make_batches, sgd

from hyfreedp.gradients import AutomaticClipping, make_engine


def checkpointed(layer):
    """A layer whose activations are recomputed in the backward pass."""
    return Built(lambda m, x: checkpoint(m.layer, x, use_reentrant=False), layer=layer)


def positions():
    """Embeds tokens, and positions once for all samples."""
    parts = {"tokens": nn.Embedding(13, 8), "positions": nn.Embedding(7, 8)}
    return Built(lambda m, ids: m.tokens(ids) + m.positions(torch.arange(ids.shape[1])[None]), **parts)


def scale():
    """A parameter without a layer of its own, repeated for every sample."""
    return Built(lambda m, x: x.tanh() * m.scale, scale=nn.Parameter(torch.rand(8) + 0.5))


def own_checkpoints():
    """Checkpoint their own forward, as transformers' blocks do."""

    def forward(m, x):
        return checkpoint(lambda x: torch.tanh(m.linear(x) * m.scale), x, use_reentrant=False)

    parts = ({"linear": nn.Linear(8, 8), "scale": nn.Parameter(torch.rand(1, 1, 8) + 0.5)} for _ in range(3))
    model = nn.Sequential(*(Built(forward, **each) for each in parts)).double().train()
    return Example(model, (torch.randn(5, 4, 8).double(),), lambda model, x: model(x).sum((1, 2)))


def transformers_model(build):
    def enabled():
        example = build()
        example.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return example

    return enabled


def checkpointed_vit():
    """timm's blocks, by its own switch, which checkpoints the blocks one by one."""
    example = vit()
    example.model.set_grad_checkpointing(True)
    return example


def blocks():
    """Positions, free parameters, in-place activations and a convolution, all inside nested checkpoints."""
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), scale())
    outer = nn.Sequential(nn.Conv1d(7, 7, 3, padding=1), checkpointed(inner), nn.Linear(8, 8))
    last = nn.Sequential(nn.GELU(), nn.Linear(8, 13))
    model = nn.Sequential(checkpointed(positions()), checkpointed(outer), scale(), checkpointed(last))

    def loss(model, ids):
        return F.cross_entropy(model(ids).mT[..., :-1], ids[:, 1:], reduction="none").sum(1)

    return Example(model.double().train(), (torch.randint(13, (5, 7)),), loss)


@pytest.mark.parametrize(
    "build", [*map(transformers_model, (gpt2, llama, llama_lora)), checkpointed_vit, blocks, own_checkpoints]
)
def test_norms_and_clipped_sums_are_those_without(build):
    assert_exact(build(), rtol=1e-8)


def test_dropout_masks_are_those_of_the_forward_pass():
    """Recomputation draws them again from the state of the forward pass; so a run is the same without it."""
    ends = []
    for wrap in (nn.Sequential, checkpointed):
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)]
        model = nn.Sequential(*map(wrap, parts), nn.Linear(5, 3)).double()
        settings = {"preset": "paper", "interval": 2, "max_physical_batch_size": 4}
        optimizer = by_hand(model, sgd(model), target_epsilon=3.0, accountant="rdp", **settings)
        torch.manual_seed(1)
        steps = [optimizer.step(cross_entropy(model), batch) for batch in make_batches([8, 5, 0, 9])]
        ends.append((flat(model), [step.eta for step in steps]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)


def deep_llama(lora=True):
    """Six blocks, of which LoRA trains little, and a batch of sequences long enough for activations to prevail."""
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 6, "max_position_embeddings": 32}
    return (llama_lora if lora else llama)(**sizes).model.float(), torch.randint(3, 40, (4, 32))


def memory(private, checkpointing, lora=True):
    """Bytes at the peak of a batch after the first, beyond those before it, all of which are given back at its end."""
    model, ids = deep_llama(lora)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = make_engine(model, AutomaticClipping())

    def losses(ids):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.mT, ids[:, 1:], reduction="none").sum(1)

    def batch():
        engine.add(losses, ids) if private else losses(ids).sum().backward()
        engine.clear()

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


def test_full_fine_tuning_needs_less_memory_too():
    """Book-keeping collects what the clipped sum needs."""
    assert memory(True, True, lora=False) < 0.75 * memory(True, False, lora=False)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_reentrant_checkpointing_is_refused():
    """Its backward pass has no per-sample gradients; the message says what to do instead."""
    example = gpt2()
    example.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match=r"reentrant.*gradient_checkpointing_kwargs=.'use_reentrant': False."):
        example.by_engine(make_engine(example.model, AutomaticClipping()))


def test_an_input_modified_in_place_is_refused():
    """Autograd itself overlooks it under checkpointing."""

    def spoils(m, x):
        hidden = x * 2
        output = m.spoiled(hidden)
        hidden += 1
        return m.last(output)

    model = Built(spoils, spoiled=nn.Linear(6, 6), last=nn.Linear(6, 6)).double()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        make_engine(model, AutomaticClipping()).add(lambda x: model(x).sum(1), torch.randn(3, 6).double())


def test_other_hooks_on_saved_tensors_work():
    """Such as moving them off the device, one sample at a time."""
    example, packed = gpt2(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), lambda t: t.clone()):
        assert_exact(example, rtol=1e-8, slow="hooks on saved tensors")
    assert packed
