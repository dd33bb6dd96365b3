"""Workloads: the models of Tab. "eff" and small ones of the same families, with random weights and inputs.

The time of a step depends on shapes only, so nothing is downloaded. All contenders train the same model, changed as
Opacus needs it: a ViT's class token and position embedding are frozen (else Opacus treats the model as one layer);
GPT-2's head is not tied to its embedding (ghost clipping refuses that), and each sample gets its own positions; layers
that Opacus does not know are replaced by torch's equivalents (transformers' Conv1D by Linear, LLaMA's norm by RMSNorm).
There is no dropout.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hyfreedp.checks import check_choice
from hyfreedp.experiments.models.image_models import add_low_rank_updates, mlp, vit
from hyfreedp.noise.random_states import random_states_kept

Family = Literal["vit", "gpt2", "llama", "mlp", "convnet"]
Tuning = Literal["full", "biases", "lora"]


@dataclass(frozen=True)
class Shape:
    """The sizes that determine the cost of a step.

    Attributes:
        tokens: T per sample; for a ViT patches and class token, so a square number plus one.
        outputs: number of classes, or size of the vocabulary.
        patch: side of a ViT's patches, in pixels.
        hidden: width of LLaMA's MLP.
        bfloat16: whether frozen weights are in half precision.
        tunings: allowed choices of trained parameters (LLaMA has no biases).
    """

    family: Family
    width: int
    depth: int
    heads: int
    tokens: int
    outputs: int
    batch_size: int
    patch: int = 16
    hidden: int = 0
    bfloat16: bool = False
    tunings: tuple[Tuning, ...] = ("full", "biases", "lora")


MODELS: dict[str, Shape] = {
    # those of Tab. "eff", in their true sizes, for a GPU
    "vit_small": Shape("vit", 384, 12, 6, tokens=197, outputs=10, batch_size=64),
    "vit_base": Shape("vit", 768, 12, 12, tokens=197, outputs=100, batch_size=64),
    "gpt2": Shape("gpt2", 768, 12, 12, tokens=128, outputs=50257, batch_size=16),
    "gpt2_t512": Shape("gpt2", 768, 12, 12, tokens=512, outputs=50257, batch_size=8),
    "llama2_7b": Shape(
        "llama", 4096, 32, 32, tokens=512, outputs=32000, batch_size=4, hidden=11008, bfloat16=True, tunings=("lora",)
    ),
    # the same families for two CPU cores
    "vit_d384": Shape("vit", 384, 2, 6, tokens=197, outputs=100, batch_size=8),
    "vit_d192": Shape("vit", 192, 4, 3, tokens=65, outputs=100, batch_size=16, patch=4),
    "gpt2_d256": Shape("gpt2", 256, 4, 4, tokens=128, outputs=1000, batch_size=8),
    "llama_d256": Shape(
        "llama", 256, 4, 4, tokens=128, outputs=1000, batch_size=8, hidden=688, tunings=("full", "lora")
    ),
    # small models, where matrix products do not dominate
    "mlp_b256": Shape("mlp", 256, 3, 1, tokens=1, outputs=10, batch_size=256, tunings=("full",)),
    "mlp_b1000": Shape("mlp", 256, 3, 1, tokens=1, outputs=10, batch_size=1000, tunings=("full",)),
    "convnet_b32": Shape("convnet", 32, 5, 1, tokens=1, outputs=10, batch_size=32, tunings=("full",)),
    "convnet_b128": Shape("convnet", 32, 5, 1, tokens=1, outputs=10, batch_size=128, tunings=("full",)),
}

_LORA_TARGETS: dict[Family, str] = {
    "vit": r".*attn\.(qkv|proj)",
    "gpt2": r".*attn\.(c_attn|c_proj)",
    "llama": r".*self_attn\.(q_proj|v_proj)",
}


@dataclass
class Workload:
    """A model in train mode, from ``inputs`` to logits (B, outputs) or (B, T, outputs), and one batch."""

    module: nn.Module
    inputs: Tensor
    labels: Tensor

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    @property
    def frozen(self) -> list[Tensor]:
        """Frozen parameters and the batch, which copies share."""
        return [p for p in self.module.parameters() if not p.requires_grad] + [self.inputs, self.labels]

    def copy(self) -> Workload:
        """A copy with its own trainable parameters; frozen ones and the batch are shared."""
        shared = {id(tensor): tensor for tensor in self.frozen}
        return Workload(copy.deepcopy(self.module, shared), self.inputs, self.labels)


def make_workload(shape: Shape, tuning: Tuning, device: str | torch.device = "cpu") -> Workload:
    """A model of this shape with random weights, made on ``device``, and a batch.

    ``tuning`` says which parameters are trained: all ("full"), "biases", or LoRA on the attention ("lora").
    """
    check_choice("tuning", tuning, shape.tunings)
    with random_states_kept(torch.device(device)), torch.device(device):
        torch.manual_seed(0)
        module, inputs, labels = _MAKERS[shape.family](shape)
        if tuning == "lora":  # random updates: from the usual zeros, half of the gradients would be zero
            add_low_rank_updates(module, _LORA_TARGETS[shape.family], init_lora_weights=False)
        else:
            for name, p in module.named_parameters():
                frozen = not name.endswith("bias") if tuning == "biases" else name in ("cls_token", "pos_embed")
                p.requires_grad_(not frozen)
    return Workload(module.train(), inputs, labels)


def _vit(shape: Shape) -> tuple[nn.Module, Tensor, Tensor]:
    patches = math.isqrt(shape.tokens - 1)
    side = patches * shape.patch
    module = vit(side, shape.patch, 3, shape.width, shape.depth, shape.heads, shape.outputs)
    return module, torch.randn(shape.batch_size, 3, side, side), torch.randint(shape.outputs, (shape.batch_size,))


def _gpt2(shape: Shape) -> tuple[nn.Module, Tensor, Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    no_dropout: Any = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends: Any = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    module = GPT2LMHeadModel(GPT2Config(**_sizes(shape), **no_dropout, **ends))
    for name, layer in list(module.named_modules()):
        if isinstance(layer, Conv1D):
            linear = nn.Linear(layer.nx, layer.nf)
            linear.weight = nn.Parameter(layer.weight.detach().T.contiguous())
            linear.bias = layer.bias
            module.set_submodule(name, linear)
    return _NextToken(module), *_token_batch(shape)


def _llama(shape: Shape) -> tuple[nn.Module, Tensor, Tensor]:
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    sizes = _sizes(shape) | {"torch_dtype": torch.bfloat16 if shape.bfloat16 else torch.float32}
    module = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, intermediate_size=shape.hidden))
    for name, layer in list(module.named_modules()):
        if isinstance(layer, LlamaRMSNorm):
            norm = nn.RMSNorm(len(layer.weight), eps=layer.variance_epsilon)
            norm.weight = layer.weight
            module.set_submodule(name, norm)
    return _NextToken(module), *_token_batch(shape)


def _mlp(shape: Shape) -> tuple[nn.Module, Tensor, Tensor]:
    """An MLP on 784 features, whose second hidden layer is half as wide as the first."""
    module = mlp((shape.width, shape.width // 2), 784, shape.outputs)
    return module, torch.randn(shape.batch_size, 784), torch.randint(shape.outputs, (shape.batch_size,))


def _convnet(shape: Shape) -> tuple[nn.Module, Tensor, Tensor]:
    """A network on images (3, 32, 32): four convolutions, two with stride 2, each with a group norm."""

    def block(inputs: int, outputs: int, stride: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.ReLU()

    w = shape.width
    blocks = (*block(3, w, 1), *block(w, 2 * w, 2), *block(2 * w, 2 * w, 1), *block(2 * w, 4 * w, 2))
    module = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, shape.outputs))
    return module, torch.randn(shape.batch_size, 3, 32, 32), torch.randint(shape.outputs, (shape.batch_size,))


def _sizes(shape: Shape) -> dict[str, Any]:
    """The sizes, by transformers' names."""
    layers = {"num_hidden_layers": shape.depth, "num_attention_heads": shape.heads}
    return {"vocab_size": shape.outputs, "hidden_size": shape.width, "max_position_embeddings": shape.tokens} | layers


_MAKERS: dict[Family, Callable[[Shape], tuple[nn.Module, Tensor, Tensor]]]
_MAKERS = {"vit": _vit, "gpt2": _gpt2, "llama": _llama, "mlp": _mlp, "convnet": _convnet}


class _NextToken(nn.Module):
    """From token ids (B, T) to logits (B, T, outputs), with positions given for each sample."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        return self.model(input_ids=ids, position_ids=positions, use_cache=False).logits


def _token_batch(shape: Shape) -> tuple[Tensor, Tensor]:
    text = torch.randint(shape.outputs, (shape.batch_size, shape.tokens + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
