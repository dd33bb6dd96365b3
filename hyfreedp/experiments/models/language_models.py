"""Causal language models, where their weights come from, and which of their parameters are trained.

Public weights (GPT-2, LLaMA-2) are read from ``$HYFREEDP_WEIGHTS/<name>``, a folder as ``save_pretrained`` writes it,
if the variable is set, and else by transformers, which downloads and caches them. Small models start from our own
weights, trained on public sentences (``tools/weights/pretrain.py``).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hyfreedp.experiments.data.encoding import own_tokenizer
from hyfreedp.experiments.models import public_weights as weights
from hyfreedp.experiments.models.image_models import Tuning, add_low_rank_updates
from hyfreedp.experiments.store.device import default_device
from hyfreedp.noise.random_states import random_states_kept

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GPT2, LLAMA2 = "openai-community/gpt2", "meta-llama/Llama-2-7b-hf"
REVISIONS = {GPT2: "607a30d783dfa663caf39e06633721c8d4cfcd7e", LLAMA2: "01c7f73d771dfac7d292323805ebc428287df4f9"}
# Queries and values, as in Hu et al. (2022); GPT-2 has one layer for these and keys.
LORA_TARGETS = r".*\.(c_attn|q_proj|v_proj)"


@dataclass(frozen=True)
class LanguageModel:
    """One architecture with its tokenizer.

    Attributes:
        build: makes the model, with our weights, public ones, or random ones (torch's global generator).
        tokenizer: loads the tokenizer.
        context_length: the most tokens of a sequence.
        token_budget: tokens computed at once, padding included; None: the whole batch.
        tunings: which choices of trained parameters it allows.
        weights: our checkpoint that it starts from, see :mod:`hyfreedp.experiments.models.public_weights`, or None.
        public: the name, on the Hugging Face hub, of the public weights that it starts from, or None.
    """

    title: str
    build: Callable[[], PreTrainedModel]
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    context_length: int
    token_budget: int | None = None
    tunings: tuple[Tuning, ...] = ("full", "lora")
    weights: str | None = None
    public: str | None = None

    def checksum(self) -> str | None:
        """The checksum or revision of the weights that training starts from, for keys of cells; None if random."""
        if self.public is not None:
            folder = weights_folder(self.public)
            return REVISIONS[self.public] if folder is None else _folder_checksum(folder)
        return None if self.weights is None else weights.checksum(self.weights)


def weights_folder(public: str) -> Path | None:
    """The folder below ``$HYFREEDP_WEIGHTS`` that holds these public weights; None if the variable is not set.

    Raises:
        FileNotFoundError: it is set, but has no such model.
    """
    variable = os.environ.get("HYFREEDP_WEIGHTS")
    if not variable:
        return None
    folder = Path(variable) / public.split("/")[-1]
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"HYFREEDP_WEIGHTS={variable} has no weights of {public}: {folder} must be a folder as transformers' "
            "save_pretrained writes it, with config.json, weights and tokenizer"
        )
    return folder


@cache
def _folder_checksum(folder: Path) -> str:
    """SHA-256 of the names and contents of a model's weights and configuration."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), folder / "config.json"]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _loaded(kind: str, public: str, **options: Any) -> Any:
    """A model or tokenizer of transformers, from ``$HYFREEDP_WEIGHTS`` or transformers' cache or hub."""
    import transformers

    folder = weights_folder(public)
    try:
        # A revision is a hash of the contents, so no other file can be downloaded.
        source = {"revision": REVISIONS[public]} if folder is None else {}
        return getattr(transformers, kind).from_pretrained(folder or public, **source, **options)
    except Exception as error:  # any error of the hub, the network or the file system
        if folder is not None:
            raise ValueError(f"the weights in {folder} cannot be read ({type(error).__name__}: {error})") from error
        raise FileNotFoundError(
            f"the public weights of {public} could not be loaded ({type(error).__name__}): set HYFREEDP_WEIGHTS to a "
            f"folder with a subfolder {public.split('/')[-1]!r}, connect to the internet once, or choose a model that "
            "starts from our own weights"
        ) from error


def _public(public: str, *, checkpointing: bool = False, **options: Any) -> PreTrainedModel:
    model = _loaded("AutoModelForCausalLM", public, **options)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0  # the noise regularises enough (Li et al., 2022)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _gpt2(**sizes: Any) -> PreTrainedModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = _special_tokens() | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | sizes
    return GPT2LMHeadModel(GPT2Config(**settings))


def _llama(**sizes: Any) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_special_tokens(), **sizes))


def _special_tokens() -> dict[str, Any]:
    ours = own_tokenizer()
    # Not pad_token_id, of which transformers would warn: padding is on the right and never a target.
    ids = {f"{name}_token_id": getattr(ours, f"{name}_token_id") for name in ("bos", "eos")}
    return {"vocab_size": len(ours), **ids}


def _pretrained(title: str, recipe: str, base: str, context_length: int, token_budget: int) -> LanguageModel:
    def build() -> PreTrainedModel:
        model = LANGUAGE_MODELS[base].build()
        weights.load(recipe, model)
        return model

    return LanguageModel(title, build, own_tokenizer, context_length, token_budget, weights=recipe)


_TINY = {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
# GPT-2's activation as one operation, which rounds differently.
_FUSED = {"activation_function": "gelu_pytorch_tanh"}
_SMALL = {"n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
_TINY_LLAMA = {"max_position_embeddings": 2048, "hidden_size": 64, "intermediate_size": 176}
_TINY_LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4}
_ON_SENTENCES = "tiny GPT-2, pre-trained on public sentences"
# Budgets that keep a step of the large models within about 20 GB beside their weights.
LANGUAGE_MODELS = {
    "gpt2_tiny": LanguageModel("GPT-2, width 64, depth 2", partial(_gpt2, **_TINY), own_tokenizer, 256, 16_384),
    "gpt2_sentences": _pretrained(_ON_SENTENCES, "gpt2_sentences", "gpt2_tiny", 256, 16_384),
    # For whole runs on one core: a quarter faster by the fused activation, and pieces small enough for the cache.
    "gpt2_tiny_fused": LanguageModel(
        "GPT-2, width 64, depth 2", partial(_gpt2, **_TINY, **_FUSED), own_tokenizer, 256, 4_096
    ),
    "gpt2_sentences_fused": _pretrained(_ON_SENTENCES, "gpt2_sentences", "gpt2_tiny_fused", 256, 4_096),
    "llama_tiny": LanguageModel(
        "LLaMA, width 64, depth 2", partial(_llama, **_TINY_LLAMA), own_tokenizer, 2048, 16_384
    ),
    "llama_sentences": _pretrained(
        "tiny LLaMA, pre-trained on public reports", "llama_sentences", "llama_tiny", 2048, 16_384
    ),
    "gpt2_small": LanguageModel("GPT-2's architecture", partial(_gpt2, **_SMALL), own_tokenizer, 1024, 8_192),
    "gpt2_small_sentences": _pretrained(
        "GPT-2's architecture, pre-trained on public sentences", "gpt2_small_sentences", "gpt2_small", 1024, 8_192
    ),
    "gpt2": LanguageModel(
        "GPT-2", partial(_public, GPT2), partial(_loaded, "AutoTokenizer", GPT2), 1024, 8_192, public=GPT2
    ),
    "llama2_7b": LanguageModel(
        "LLaMA-2-7B",
        partial(_public, LLAMA2, checkpointing=True, dtype=torch.bfloat16),
        partial(_loaded, "AutoTokenizer", LLAMA2),
        4096,
        8_192,
        tunings=("lora",),  # the gradients and the optimizer of all parameters would not fit one GPU
        public=LLAMA2,
    ),
}


def choose_trainable(model: PreTrainedModel, tuning: Tuning) -> None:
    """In place, leave all parameters trainable ("full"), or freeze them and add LoRA, zero at the start ("lora").

    The updates are in single precision: in half precision small steps would be rounded away.
    """
    if tuning == "full":
        return
    transposed = model.config.model_type == "gpt2"  # its Conv1D has weights of shape (inputs, outputs)
    add_low_rank_updates(model, LORA_TARGETS, fan_in_fan_out=transposed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def make_language_model(name: str, tuning: Tuning, *, seed: int) -> PreTrainedModel:
    """A model of ``LANGUAGE_MODELS`` in train mode, with the parameters of ``tuning`` trainable.

    The global random state is restored. FileNotFoundError if weights are missing, ValueError if they are damaged.
    """
    with random_states_kept(default_device()):
        torch.manual_seed(seed)
        model = LANGUAGE_MODELS[name].build()
        choose_trainable(model, tuning)
    return model.train()
