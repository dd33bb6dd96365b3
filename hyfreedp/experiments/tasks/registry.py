"""All tasks by name: data, models for them, and the training protocol of all methods (batch size, steps, delta).

Language tasks are in :mod:`hyfreedp.experiments.tasks.language_tasks`, with the same interface.

Protocol for images, at every profile: batches of 1,000 for 5 epochs, without augmentation. The paper does not print its
own. These are the defaults of the authors' public fine-tuning script for the same data sets and models
(awslabs/fast-differential-privacy, examples/image_classification/CV_TIMM.py). With 20,000 or 8,000 images a batch has a
50th of them, as with CIFAR-10. The two small tasks take 100 steps of 500, seconds on two CPU cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.utils.data import TensorDataset, default_collate

from hyfreedp.experiments.data import datasets
from hyfreedp.experiments.data.datasets import Arrays
from hyfreedp.experiments.models.image_models import MODELS, Model, Tuning, make_model
from hyfreedp.experiments.tasks.language_tasks import LANGUAGE_TASKS, LanguageTask
from hyfreedp.experiments.tasks.scores import Evaluation, Scores, evaluate, losses_of

IMAGE_MODELS = (
    *("vit32_d192", "vit32_d128", "vit32_tiny_imagenet", "vit32_tiny_imagenet_d128"),
    *("vit_small_patch16_224", "vit_base_patch16_224"),
)
IMAGE_BATCH = 1000
IMAGE_EPOCHS = 5
PART = 20_000


@dataclass(frozen=True)
class Task:
    """One classification problem. Data are read only when needed.

    Attributes:
        load: reads the data.
        train_size: N, the number of training records for ``evaluation="test"``.
        validation_start: how many of them are not held out when settings are chosen.
        features: length of one record as a flat vector; 0 if models take images of any size.
        models: names in :data:`~hyfreedp.experiments.models.image_models.MODELS` that fit the data, the default first.
        batch_size, steps, delta: the protocol; the sample rate is ``batch_size`` over the training records.
        evaluations: about how often a run of more than a hundred steps is evaluated, the last step included.
    """

    title: str
    load: Callable[[], Arrays]
    train_size: int
    validation_start: int
    features: int
    classes: int
    models: tuple[str, ...]
    batch_size: int
    steps: int
    delta: float
    evaluations: int = 20
    collate = staticmethod(default_collate)
    losses_of = staticmethod(losses_of)

    @property
    def source(self) -> str:
        """Where the data come from; reads them."""
        return self.load().source

    def architecture(self, model: str | None) -> Model:
        """The architecture of that name; None: the default."""
        return MODELS[model or self.models[0]]

    def datasets(self, evaluation: Evaluation, model: str | None = None) -> tuple[TensorDataset, TensorDataset]:
        """Training and evaluation data; "validation" evaluates on the held-out fifth of the training part."""
        arrays = self.load()
        if evaluation == "test":
            return TensorDataset(*arrays.train), TensorDataset(*arrays.test)
        features, labels = arrays.train
        cut = arrays.validation_start
        return TensorDataset(features[:cut], labels[:cut]), TensorDataset(features[cut:], labels[cut:])

    def model(self, seed: int, name: str | None = None, tuning: Tuning = "full") -> nn.Module:
        """A new model (None: the default), see ``models.image_models.make_model``."""
        return make_model(name or self.models[0], tuning, features=self.features, classes=self.classes, seed=seed)

    def physical_batches(self, model: str | None) -> int | None:
        """How many samples are computed at once; None: the whole batch."""
        return self.architecture(model).physical_batch_size

    def evaluate(self, model: nn.Module, data: TensorDataset, name: str | None = None) -> Scores:
        """See :func:`hyfreedp.experiments.tasks.scores.evaluate`; four times larger pieces than in training."""
        pieces = self.physical_batches(name)
        return evaluate(model, data, 4096 if pieces is None else 4 * pieces)

    def outputs(self, model: nn.Module, name: str | None = None) -> None:
        """None: a classifier writes no texts."""


def _small(title: str, load: Callable[[], Arrays], size: int, features: int, models: tuple[str, ...]) -> Task:
    return Task(title, load, size, size * 4 // 5, features, 10, models, batch_size=500, steps=100, delta=1e-4)


def _images(name: str, classes: int, part: int | None = None) -> Task:
    """A task with all images of a set, or with ``part`` of its training images, so that two cores take hours."""
    known = datasets.IMAGES[name]
    if part is None:
        size, batch, evaluations, start = known.sizes[0], IMAGE_BATCH, 20, known.validation_start
        load = partial(datasets.images, name)
    else:
        size, batch, evaluations, start = part, part // 50, 5, part * 4 // 5
        load = partial(datasets.some_images, name, part)
    data = (f"{known.title} ({size:,} images)", load, size, start, 0, classes)
    return Task(*data, IMAGE_MODELS, batch, IMAGE_EPOCHS * math.ceil(size / batch), size**-1.1, evaluations)


TASKS: dict[str, Task | LanguageTask] = {
    "digits": _small("digits (1,500 images)", datasets.digits, 1500, 64, ("mlp", "vit8_d64_p4", "vit8_glyphs")),
    "classification": _small("make_classification (8,000)", datasets.classification, 8000, 40, ("mlp",)),
    "cifar10_20k": _images("cifar10", 10, PART),
    "gtsrb_20k": _images("gtsrb", 43, PART),
    "fashion_20k": _images("fashion_mnist", 10, PART),
    "cifar100_20k": _images("cifar100", 100, PART),
    "mnist_20k": _images("mnist", 10, PART),
    "kmnist_8k": _images("kmnist", 10, 8_000),
    "notmnist_8k": _images("notmnist", 10, 8_000),
    "cifar10": _images("cifar10", 10),
    "cifar100": _images("cifar100", 100),
    "svhn": _images("svhn", 10),
    "gtsrb": _images("gtsrb", 43),
    "food101": _images("food101", 101),
    **LANGUAGE_TASKS,
}
