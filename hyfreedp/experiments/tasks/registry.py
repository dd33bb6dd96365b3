"""All tasks by name: data, the models for them, and the training protocol (batch size, steps, delta) of all methods.

Those of language are in :mod:`hyfreedp.experiments.tasks.language_tasks`; a run treats both kinds alike.

Protocol of the images, at every profile: batches of 1,000 for 5 epochs, without augmentation. The paper does not print
its own; these are the defaults of the authors' public fine-tuning script for the same data sets and models
(awslabs/fast-differential-privacy, examples/image_classification/CV_TIMM.py), and fixed for every method. Where 20,000
of the images are taken, the batch is 400, for the sample rate that 1,000 are of CIFAR-10. The two small tasks have
batches of 500 for 100 steps, which two CPU cores train in seconds.
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
PART, PART_BATCH = 20_000, 400


@dataclass(frozen=True)
class Task:
    """One problem of classification. Nothing is read before :meth:`datasets` is called.

    Attributes:
        load: gives the data as they are stored.
        train_size: N, with which ``evaluation="test"`` trains.
        validation_start: how many of these records train where settings are chosen.
        features: entries of one record as a flat vector; 0 where images have no fixed size.
        models: names in :data:`~hyfreedp.experiments.models.image_models.MODELS` that fit the data, its own first.
        batch_size, steps, delta: the protocol; the sample rate is ``batch_size / train_size``.
        evaluations: of a run of more than a hundred steps, the last one included.
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
        """Where the data come from, which are read for it."""
        return self.load().source

    def architecture(self, model: str | None) -> Model:
        """The model of that name, the task's own if None."""
        return MODELS[model or self.models[0]]

    def datasets(self, evaluation: Evaluation, model: str | None = None) -> tuple[TensorDataset, TensorDataset]:
        """Training and evaluation data; "validation" evaluates on a fifth of the training part, held out."""
        arrays = self.load()
        if evaluation == "test":
            return TensorDataset(*arrays.train), TensorDataset(*arrays.test)
        features, labels = arrays.train
        cut = arrays.validation_start
        return TensorDataset(features[:cut], labels[:cut]), TensorDataset(features[cut:], labels[cut:])

    def model(self, seed: int, name: str | None = None, tuning: Tuning = "full") -> nn.Module:
        """A model, the task's own if None, with fresh weights; see ``models.image_models.make_model``."""
        return make_model(name or self.models[0], tuning, features=self.features, classes=self.classes, seed=seed)

    def physical_batches(self, model: str | None) -> int | None:
        """Samples in memory at a time."""
        return self.architecture(model).physical_batch_size

    def evaluate(self, model: nn.Module, data: TensorDataset, name: str | None = None) -> Scores:
        """See :func:`hyfreedp.experiments.tasks.scores.evaluate`; without gradients more samples fit in memory."""
        pieces = self.physical_batches(name)
        return evaluate(model, data, 4096 if pieces is None else 4 * pieces)

    def outputs(self, model: nn.Module, name: str | None = None) -> None:
        """None: a classifier writes no texts."""


def _small(title: str, load: Callable[[], Arrays], size: int, features: int, models: tuple[str, ...]) -> Task:
    return Task(title, load, size, size * 4 // 5, features, 10, models, batch_size=500, steps=100, delta=1e-4)


def _images(name: str, classes: int, part: int | None = None) -> Task:
    """All images of a set; or so many of its training images and all for the test: a table in hours of two cores."""
    known = datasets.IMAGES[name]
    size, batch, evaluations = (known.sizes[0], IMAGE_BATCH, 20) if part is None else (part, PART_BATCH, 5)
    load = partial(datasets.images, name) if part is None else partial(datasets.some_images, name, part)
    start = known.validation_start if part is None else part * 4 // 5
    data = (f"{known.title} ({size:,} images)", load, size, start, 0, classes)
    return Task(*data, IMAGE_MODELS, batch, IMAGE_EPOCHS * math.ceil(size / batch), size**-1.1, evaluations)


TASKS: dict[str, Task | LanguageTask] = {
    "digits": _small("digits (1,500 images)", datasets.digits, 1500, 64, ("mlp", "vit8_d64_p4", "vit8_glyphs")),
    "classification": _small("make_classification (8,000)", datasets.classification, 8000, 40, ("mlp",)),
    "cifar10_20k": _images("cifar10", 10, PART),
    "gtsrb_20k": _images("gtsrb", 43, PART),
    "fashion_20k": _images("fashion_mnist", 10, PART),
    "cifar10": _images("cifar10", 10),
    "cifar100": _images("cifar100", 100),
    "svhn": _images("svhn", 10),
    "gtsrb": _images("gtsrb", 43),
    "food101": _images("food101", 101),
    **LANGUAGE_TASKS,
}
