"""Public pre-training of our small models, without privacy: ``python tools/weights/pretrain.py RECIPE``.

The result is written to data/checkpoints. An interrupted run continues after its last complete epoch, and gives the
same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from glyphs import fonts, glyphs
from grammar import documents, pairs
from safetensors.torch import save as serialized
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

from hyfreedp.experiments.data.datasets import images
from hyfreedp.experiments.data.encoding import encode, own_tokenizer
from hyfreedp.experiments.models import public_weights as weights
from hyfreedp.experiments.models.image_models import head, make_model
from hyfreedp.experiments.models.language_models import make_language_model
from hyfreedp.experiments.store.device import default_device
from hyfreedp.experiments.store.files import key_of, load_checkpoint, replacing, save_checkpoint, write_text
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.experiments.store.provenance import environment, one_thread
from hyfreedp.experiments.tasks.language_tasks import LANGUAGE_TASKS, shortened, token_losses
from hyfreedp.experiments.tasks.scores import evaluate
from hyfreedp.pytorch.devices import CPU

GLYPHS, HELD_OUT_GLYPHS = 20_000, 2_000
PUBLIC_SEED = 10  # other texts than the tokenizer's
_MORE_PACKAGES = ("timm", "safetensors", "matplotlib", "pillow", "transformers", "tokenizers")


class Corpus(NamedTuple):
    """Public data: features and labels of a training and a held-out part, and where they come from."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    source: str


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """The settings of both kinds of recipes.

    Attributes:
        model: the name of an architecture with random weights.
        corpus: loads the public data.
        epochs: number of passes over the training part, each in random order.
        learning_rate: the highest one of a one-cycle schedule, with AdamW.
        one_thread: use one thread of a CPU, so that the weights do not depend on its number of cores.
    """

    model: str
    corpus: Callable[[], Corpus]
    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.05
    seed: int = 0
    one_thread: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """All settings but the data, as plain values."""
        return {name: value for name, value in vars(self).items() if name != "corpus"}


@dataclass(frozen=True, kw_only=True)
class Recipe(_Recipe):
    """Pre-training of a classifier in ``MODELS``.

    Attributes:
        classes: number of classes of the public data.
        label_smoothing: of the cross-entropy.
        pad: images are shifted at random by up to so many pixels, and mirrored or not; 0: neither.
    """

    classes: int
    label_smoothing: float = 0.0
    pad: int = 0

    def start(self, corpus: Corpus) -> nn.Module:
        """The model before the first step."""
        features = corpus.train[0][0].numel()
        model = make_model(self.model, "full", features=features, classes=self.classes, seed=self.seed)
        # The classifier must not be zero, or all other gradients would be zero in the first step.
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            head(model).weight.normal_(std=0.02, generator=generator)
        return model

    def loss(self, model: nn.Module, batch: Tensor, truth: Tensor, step: int) -> Tensor:
        """Mean loss of a batch, with random shifts that depend on ``step``."""
        if self.pad:
            batch = shifted(batch, self.pad, np.random.default_rng([self.seed, step, 1]))
        return F.cross_entropy(model(batch), truth, label_smoothing=self.label_smoothing)

    def score(self, model: nn.Module, held_out: tuple[Tensor, Tensor]) -> float:
        """The share of correct predictions."""
        return evaluate(model, TensorDataset(*held_out), 1024).accuracy


@dataclass(frozen=True, kw_only=True)
class LanguageRecipe(_Recipe):
    """Pre-training of a language model in ``LANGUAGE_MODELS``.

    ``task``, a name in ``LANGUAGE_TASKS``, is the task that it is evaluated as, on public texts.
    """

    task: str
    epochs: int = 6
    batch_size: int = 64
    weight_decay: float = 0.01

    def start(self, corpus: Corpus) -> nn.Module:
        """The model before the first step."""
        return make_language_model(self.model, "full", seed=self.seed)

    def loss(self, model: nn.Module, batch: Tensor, truth: Tensor, step: int) -> Tensor:
        """Mean cross-entropy over the batch's target tokens."""
        losses, targets = token_losses(model, *shortened(batch, truth))
        return losses.sum() / targets.sum()

    def score(self, model: nn.Module, held_out: tuple[Tensor, Tensor]) -> float:
        """The share of target tokens predicted correctly."""
        return LANGUAGE_TASKS[self.task].evaluate(model, TensorDataset(*held_out), self.model).accuracy


def _glyphs() -> Corpus:
    features, labels = (torch.from_numpy(array) for array in glyphs(GLYPHS + HELD_OUT_GLYPHS, seed=0))
    parts = (features[:GLYPHS], labels[:GLYPHS]), (features[GLYPHS:], labels[GLYPHS:])
    return Corpus(*parts, f"digits drawn from {len(fonts())} of the fonts that ship with matplotlib, seed 0")


def _tiny_imagenet() -> Corpus:
    arrays = images("tiny_imagenet")
    return Corpus(arrays.train, arrays.test, f"Tiny ImageNet, {arrays.source}")


def _texts(make: Callable[..., list[Any]], size: int, held_out: int, longest: int, name: str) -> Corpus:
    found = make("public", size + held_out, PUBLIC_SEED)
    tokens, labels = encode(own_tokenizer(), found, longest)
    parts = (tokens[:size], labels[:size]), (tokens[size:], labels[size:])
    return Corpus(*parts, f"{name} of the public domain of our own grammar, seed {PUBLIC_SEED}")


_GLYPHS: dict[str, Any] = {"corpus": _glyphs, "classes": 10, "epochs": 30, "batch_size": 128, "learning_rate": 2e-3}
_TINY_IMAGENET: dict[str, Any] = {"corpus": _tiny_imagenet, "classes": 200, "epochs": 60, "learning_rate": 1e-3}
_TINY_IMAGENET |= {"label_smoothing": 0.1, "pad": 4}
_SENTENCES: dict[str, Any] = {"corpus": partial(_texts, pairs, 12_000, 500, 256, "sentences"), "task": "restaurants"}
_REPORTS: dict[str, Any] = {"corpus": partial(_texts, documents, 6_000, 300, 2048, "reports"), "task": "reports"}
RECIPES: dict[str, Recipe | LanguageRecipe] = {
    "glyphs": Recipe(model="vit8_d64_p4", **_GLYPHS, one_thread=True),
    "tiny_imagenet": Recipe(model="vit32_d192", batch_size=512, **_TINY_IMAGENET),
    # About an hour of two cores.
    "tiny_imagenet_d128": Recipe(model="vit32_d128_p8", batch_size=256, **_TINY_IMAGENET),
    "gpt2_sentences": LanguageRecipe(model="gpt2_tiny", **_SENTENCES, learning_rate=5e-3, one_thread=True),
    "llama_sentences": LanguageRecipe(model="llama_tiny", **_REPORTS, learning_rate=5e-3, one_thread=True),
    "gpt2_small_sentences": LanguageRecipe(model="gpt2_small", **_SENTENCES, learning_rate=5e-4),
}


def pretrain(name: str, recipe: Recipe | LanguageRecipe, folder: Path, device: torch.device = CPU) -> float:
    """Train, write the checkpoint ``name`` to ``folder``, and return the held-out accuracy of the stored weights."""
    corpus = recipe.corpus()
    model = recipe.start(corpus)
    model.to(device)
    checkpoint = folder / f".{name}-{key_of(recipe.settings)}.ckpt"  # changed settings start anew
    with one_thread() if recipe.one_thread else nullcontext():
        seconds = _train(model, recipe, corpus, checkpoint)
        round_to_stored(model)
        accuracy = recipe.score(model, corpus.held_out)
    described = recipe.settings | {
        "corpus": corpus.source,
        "records": len(corpus.train[1]),
        "held_out_records": len(corpus.held_out[1]),
        "held_out_accuracy": accuracy,
        "seconds": seconds,
        "command": f"python tools/weights/pretrain.py {name}",
        "device": str(device),
        "environment": environment() | {package: version(package) for package in _MORE_PACKAGES},
    }
    save(name, model, described, folder)
    checkpoint.unlink(missing_ok=True)
    return accuracy


def _train(model: nn.Module, recipe: Recipe | LanguageRecipe, corpus: Corpus, path: Path) -> float:
    """Train in place, with a checkpoint at ``path`` after each epoch; returns the seconds that it took."""
    device = next(model.parameters()).device
    features, labels = corpus.train
    per_epoch = len(labels) // recipe.batch_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, recipe.epochs * per_epoch)
    parts, epochs, seconds = {"model": model, "optimizer": optimizer, "schedule": schedule}, 0, 0.0
    if (state := load_checkpoint(path)) is not None:
        for name, part in parts.items():
            part.load_state_dict(state[name])
        epochs, seconds = state["epochs"], state["seconds"]
    for epoch in tqdm(range(epochs, recipe.epochs), desc="pre-training", unit="epoch"):
        started = time.monotonic()
        order = torch.from_numpy(np.random.default_rng([recipe.seed, epoch]).permutation(len(labels)))
        for index, rows in enumerate(order.split(recipe.batch_size)[:per_epoch]):
            batch, truth = features[rows].to(device), labels[rows].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device != CPU):
                loss = recipe.loss(model, batch, truth, epoch * per_epoch + index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        seconds += time.monotonic() - started
        state = {name: part.state_dict() for name, part in parts.items()}
        save_checkpoint(path, state | {"epochs": epoch + 1, "seconds": seconds})
    return seconds


def shifted(images: Tensor, pad: int, random: np.random.Generator) -> Tensor:
    """Images (B, C, H, W), each shifted at random by up to ``pad`` pixels (zeros fill the gap), and mirrored or not."""
    count, _, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    top, left = (random.integers(0, 2 * pad + 1, count) for _ in range(2))
    crops = [image[:, y : y + height, x : x + width] for image, y, x in zip(padded, top, left, strict=True)]
    mirrored = torch.from_numpy(random.integers(0, 2, count)).bool().to(images.device)[:, None, None, None]
    moved = torch.stack(crops).contiguous(memory_format=torch.channels_last)
    return torch.where(mirrored, moved.flip(3), moved)


def save(name: str, model: nn.Module, recipe: dict[str, Any], folder: Path) -> None:
    """Write all weights but the classifier's to ``<name>.safetensors``, in half precision, and ``<name>.json``.

    Args:
        recipe: how the weights were made; checksum and number of parameters are added in the JSON.
        folder: made if it does not exist.
    """
    stored = {
        key: value.detach().to("cpu", torch.float16).contiguous()
        for key, value in model.state_dict().items()
        if not key.startswith(weights.HEAD)
    }
    content = serialized(stored, metadata={"recipe": name})
    with replacing(folder / f"{name}.safetensors") as temporary:
        temporary.write_bytes(content)
    size = sum(value.numel() for value in stored.values())
    described = recipe | {"parameters": size, "sha256": hashlib.sha256(content).hexdigest()}
    write_text(folder / f"{name}.json", json.dumps(described, indent=1) + "\n")


def round_to_stored(model: nn.Module) -> None:
    """Round, in place, all weights but the classifier's to half precision, as :func:`save` stores them."""
    for key, value in model.state_dict().items():
        if not key.startswith(weights.HEAD):
            value.copy_(value.half())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/weights/pretrain.py", description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=RECIPES)
    name, folder = parser.parse_args().recipe, workspace().checkpoints
    accuracy = pretrain(name, RECIPES[name], folder, default_device())
    print(f"{name}: {100 * accuracy:.1f} % on held-out data, written to {folder}")


if __name__ == "__main__":
    main()
