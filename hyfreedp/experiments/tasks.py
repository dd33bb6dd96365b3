"""Tasks: a data set, the models for it, and the training protocol (batch size, steps, delta) that all methods share.

Protocol of the images, at every profile: batches of 1,000 for 5 epochs, without augmentation. The paper does not print
its own; these are the defaults of the authors' public fine-tuning script for the same data sets and models
(awslabs/fast-differential-privacy, examples/image_classification/CV_TIMM.py), and fixed for every method. The two small
tasks have batches of 500 for 100 steps, which two CPU cores train in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from hyfreedp.experiments import datasets
from hyfreedp.experiments.datasets import Arrays, Dataset, Records
from hyfreedp.experiments.models import Tuning, make_model

Evaluation = Literal["test", "validation"]

IMAGE_MODELS = ("vit32_d192", "vit32_d128", "vit32_tiny_imagenet", "vit_small_patch16_224", "vit_base_patch16_224")
IMAGE_BATCH = 1000
IMAGE_EPOCHS = 5


@dataclass(frozen=True)
class Task:
    """One learning problem. Nothing is read before :meth:`datasets` is called.

    Attributes:
        title: for figures.
        dataset: what is learned.
        models: names in :data:`hyfreedp.experiments.models.MODELS` that fit the data, the task's own first.
        batch_size, steps, delta: the protocol; the sample rate is ``batch_size / train_size``.
    """

    title: str
    dataset: Dataset
    models: tuple[str, ...]
    batch_size: int
    steps: int
    delta: float

    @property
    def train_size(self) -> int:
        """N, with which ``evaluation="test"`` trains."""
        return self.dataset.train_size

    def arrays(self) -> Arrays:
        """The data as they are stored."""
        return self.dataset.load()

    def datasets(self, evaluation: Evaluation) -> tuple[Records, Records]:
        """Training and evaluation data; "validation" evaluates on a fifth of the training part, held out."""
        arrays = self.arrays()
        if evaluation == "test":
            return Records(*arrays.train), Records(*arrays.test)
        features, labels = arrays.train
        cut = arrays.validation_start
        return Records(features[:cut], labels[:cut]), Records(features[cut:], labels[cut:])

    def model(self, seed: int, name: str | None = None, tuning: Tuning = "full") -> nn.Module:
        """A model, the task's own if None, with fresh weights; see :func:`hyfreedp.experiments.models.make_model`."""
        known = self.dataset
        return make_model(name or self.models[0], tuning, features=known.features, classes=known.classes, seed=seed)


def _small(title: str, dataset: Dataset, models: tuple[str, ...]) -> Task:
    return Task(title, dataset, models, batch_size=500, steps=100, delta=1e-4)


def _images(name: str, classes: int) -> Task:
    known = datasets.IMAGES[name]
    size = known.sizes[0]
    dataset = Dataset(size, known.validation_start, 0, classes, lambda: datasets.images(name))
    steps = IMAGE_EPOCHS * math.ceil(size / IMAGE_BATCH)
    title = f"{known.title} ({size:,} images)"
    return Task(title, dataset, IMAGE_MODELS, IMAGE_BATCH, steps, delta=size**-1.1)


TASKS = {
    "digits": _small(
        "digits (1,500 images)", Dataset(1500, 1200, 64, 10, datasets.digits), ("mlp", "vit8_d64_p4", "vit8_glyphs")
    ),
    "classification": _small(
        "make_classification (8,000)", Dataset(8000, 6400, 40, 10, datasets.classification), ("mlp",)
    ),
    "cifar10": _images("cifar10", 10),
    "cifar100": _images("cifar100", 100),
    "svhn": _images("svhn", 10),
    "gtsrb": _images("gtsrb", 43),
    "food101": _images("food101", 101),
}


class Scores(NamedTuple):
    """On evaluation data: the share of correct predictions, and the mean cross-entropy in nats."""

    accuracy: float
    loss: float


def evaluate(model: nn.Module, data: TensorDataset, batch_size: int = 4096) -> Scores:
    """Scores in eval mode, on the model's device; the model's mode is restored."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    correct, loss = 0.0, 0.0
    with torch.no_grad():
        for features, labels in zip(*(tensor.split(batch_size) for tensor in data.tensors), strict=True):
            outputs, truth = model(features.to(device)), labels.to(device)
            correct += (outputs.argmax(dim=1) == truth).sum().item()
            loss += F.cross_entropy(outputs, truth, reduction="sum").item()
    model.train(training)
    return Scores(correct / len(data), loss / len(data))
