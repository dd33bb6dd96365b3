"""All tasks by name."""

from __future__ import annotations

from hyfreedp.experiments.data import datasets
from hyfreedp.experiments.tasks.image_tasks import Task, _images, _part_of_images, _small
from hyfreedp.experiments.tasks.language_tasks import LANGUAGE_TASKS, LanguageTask

TASKS: dict[str, Task | LanguageTask] = {
    "digits": _small("digits (1,500 images)", datasets.digits, 1500, 64, ("mlp", "vit8_d64_p4", "vit8_glyphs")),
    "classification": _small("make_classification (8,000)", datasets.classification, 8000, 40, ("mlp",)),
    "cifar10_20k": _part_of_images("cifar10", 10),
    "gtsrb_20k": _part_of_images("gtsrb", 43),
    "fashion_20k": _part_of_images("fashion_mnist", 10),
    "cifar10": _images("cifar10", 10),
    "cifar100": _images("cifar100", 100),
    "svhn": _images("svhn", 10),
    "gtsrb": _images("gtsrb", 43),
    "food101": _images("food101", 101),
    **LANGUAGE_TASKS,
}
