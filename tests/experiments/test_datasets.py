"""Image data sets from tiny stand-ins in the same formats: right pixels, no damage, near duplicates together."""

import csv
import gzip
import hashlib
import io
import lzma
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hyfreedp.experiments.data import datasets
from hyfreedp.experiments.data.datasets import held_out_from, images, shuffled_by_group

RNG = np.random.default_rng(0)
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder of data and an empty cache; nothing is downloaded."""

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setenv("HYFREEDP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("torchvision.datasets.utils.download_url", offline)
    monkeypatch.setattr("torchvision.datasets.utils.urllib.request.urlopen", offline)
    monkeypatch.setenv("HYFREEDP_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path


def expect(monkeypatch, name, sizes, files=None, start=None):
    """Let a data set have other sizes and, of its packed copy, these files."""
    known = datasets.IMAGES[name]
    changed = {"sizes": sizes, "validation_start": start or sizes[0] * 4 // 5}
    if files:
        sums = {str(path): hashlib.sha256(content).hexdigest() for path, content in files.items()}
        changed["copy"] = replace(known.copy, checksums=sums)
    monkeypatch.setitem(datasets.IMAGES, name, replace(known, **changed))


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def encoded(pixels, form):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def packed(members):
    """A compressed archive of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def cifar(places, monkeypatch):
    """A copy of three training images and a test image of each class, and the training files, in their order."""
    made = {
        f"{split}/{name}/{number:04d}.jpg": encoded(RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8), "JPEG")
        for split, count in (("train", 3), ("test", 1))
        for name in CLASSES
        for number in range(count)
    }
    for name in ("cifar10", "cifar100"):
        write(places / "data", files := {f"{name}/{name}.tar.gz": packed(made)})
        expect(monkeypatch, name, (30, 10), files)
    return [(CLASSES.index(name.split("/")[1]), data) for name, data in made.items() if name.startswith("train")]


def gtsrb_copy(names, labels, pixels):
    """The two files of one part, filtered as the real ones: (N, 32, 32, 3) to differences."""
    coded = pixels.transpose(0, 3, 1, 2).copy()
    coded[:, 0] -= coded[:, 1]
    coded[:, 2] -= coded[:, 1]
    for axis in (2, 3):
        zeros = np.zeros_like(coded.take([0], axis))
        coded = np.diff(coded, axis=axis, prepend=zeros)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerows([("file", "label", "orig_width"), *zip(names, labels, [30] * len(names), strict=True)])
    return lzma.compress(coded.tobytes()), gzip.compress(text.getvalue().encode())


def test_the_jpeg_copy_is_decoded_once_in_a_fixed_random_order(cifar, monkeypatch):
    arrays, order = images("cifar10"), shuffled_by_group(np.arange(30))
    assert order.tolist() != list(range(30))
    x, y = arrays.train
    assert x.dtype == torch.uint8 and x.shape == (30, 3, 32, 32) and y.dtype == torch.int64
    for row, index in enumerate(order):
        label, data = cifar[index]
        pixels = np.asarray(Image.open(io.BytesIO(data)))
        assert y[row] == label and np.array_equal(x[row].permute(1, 2, 0).numpy(), pixels)
    assert arrays.test[1].tolist() == list(range(10)) and arrays.validation_start == 24
    hundred = images("cifar100")
    assert (arrays.source, hundred.source) == ("JPEG copy of quality 75", "PNG copy")
    assert torch.equal(hundred.train[0], x) and torch.equal(hundred.test[1], arrays.test[1])
    monkeypatch.setattr(datasets, "_decode", None)  # would fail if called
    again = images("cifar10")
    again.train[0][0] = 0  # stays in this process
    assert torch.equal(x, images("cifar10").train[0]) and torch.equal(arrays.test[1], again.test[1])


def test_traffic_signs_are_unpacked_bit_for_bit_and_tracks_are_not_divided(places, monkeypatch):
    frames, tracks = 6, 11
    names = [f"{track % 3:05d}/{track:05d}_{frame:05d}.ppm" for track in range(tracks) for frame in range(frames)]
    labels = [track % 3 for track in range(tracks) for _ in range(frames)]
    pixels = RNG.integers(0, 256, (len(names), 32, 32, 3), dtype=np.uint8)
    pixels[:, 0, 0, 0] = np.arange(len(names))  # the number of the image
    halves = {"even": slice(0, None, 2), "odd": slice(1, None, 2)}
    parts = {f"train_{half}": (names[rows], labels[rows], pixels[rows]) for half, rows in halves.items()}
    parts["test"] = (names[:4], labels[:4], pixels[:4])
    files = {}
    for part, content in parts.items():
        files[f"gtsrb32/{part}.rgb.xz"], files[f"gtsrb32/{part}.csv.gz"] = gtsrb_copy(*content)
    write(places / "data", files)
    expect(monkeypatch, "gtsrb", (len(names), 4), files, start=54)
    arrays = images("gtsrb")
    x, y = arrays.train
    which = x[:, 0, 0, 0].numpy()
    assert sorted(which) == list(range(len(names)))
    assert np.array_equal(x.permute(0, 2, 3, 1).numpy(), pixels[which])
    assert y.tolist() == np.array(labels)[which].tolist()
    track = np.array([name.split("_")[0] for name in names])[which]
    cut = arrays.validation_start
    assert len(names) * 4 / 5 <= cut < len(names) * 4 / 5 + frames and not set(track[:cut]) & set(track[cut:])
    assert torch.equal(arrays.test[0].permute(0, 2, 3, 1), torch.from_numpy(pixels[:4]))


def test_official_grey_images_are_framed(places, monkeypatch):
    """In the IDX form of the archives, as torchvision reads it."""
    pixels = RNG.integers(0, 256, (14, 28, 28), dtype=np.uint8)
    for name, rows in (("train", slice(10)), ("t10k", slice(10, 14))):
        size = len(pixels[rows]).to_bytes(4, "big")
        numbers = bytes([0, 0, 8, 3]) + size + 2 * (28).to_bytes(4, "big") + pixels[rows].tobytes()
        labels = bytes([0, 0, 8, 1]) + size + bytes(range(len(pixels[rows])))
        files = {f"{name}-images-idx3-ubyte": numbers, f"{name}-labels-idx1-ubyte": labels}
        write(places / "data" / "FashionMNIST" / "raw", files)
    expect(monkeypatch, "fashion_mnist", (10, 4))
    arrays = images("fashion_mnist")
    x, y = arrays.test
    assert x.shape == (4, 3, 32, 32) and y.tolist() == [0, 1, 2, 3] and arrays.source == "official"
    assert all(np.array_equal(channel[:, 2:-2, 2:-2], pixels[10:]) for channel in x.unbind(1))
    assert x.sum() == 3 * pixels[10:].sum(dtype=int)  # the frame is black


def test_official_small_images_have_their_classes(places, monkeypatch):
    """Those of Tiny ImageNet, halved, by the layout of its archive."""
    grey = {"n1": 40, "n2": 90}  # a class has one shade
    files = {"wnids.txt": b"n2\nn1\n", "val/val_annotations.txt": b"val_0.JPEG\tn1\t0\nval_1.JPEG\tn2\t0\n"}
    for name, shade in grey.items():
        picture = encoded(np.full((64, 64, 3), shade, dtype=np.uint8), "JPEG")
        files |= {f"train/{name}/images/{name}_{number}.JPEG": picture for number in range(5)}
        files[f"val/images/val_{int(name[1]) - 1}.JPEG"] = picture
    write(places / "data" / "tiny-imagenet-200", files)
    expect(monkeypatch, "tiny_imagenet", (10, 2))
    arrays = images("tiny_imagenet")
    assert arrays.test[1].tolist() == [1, 0] and sorted(arrays.train[1].tolist()) == [0] * 5 + [1] * 5
    for x, y in (arrays.train, arrays.test):
        assert x.shape[1:] == (3, 32, 32) and [int(one[0, 3, 3]) for one in x] == [[90, 40][label] for label in y]


def test_damaged_and_missing_images_are_refused(cifar, places, monkeypatch):
    expect(monkeypatch, "cifar10", (30, 11))
    with pytest.raises(ValueError, match="CIFAR-10 must have 11 test images, found 10"):
        images("cifar10")
    for name in datasets.IMAGES["cifar10"].copy.checksums:
        (places / "data" / name).write_bytes((places / "data" / name).read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"cifar10.tar.gz is damaged or another file: its SHA-256 is [0-9a-f]{64}, "):
        images("cifar10")
    assert not (places / "cache").exists()


@given(st.lists(st.integers(0, 8), min_size=2, max_size=60))
def test_groups_stay_together_on_one_side_of_the_cut(numbers):
    groups = np.array(numbers)
    order = shuffled_by_group(groups)
    assert sorted(order) == list(range(len(groups)))
    ordered = groups[order]
    assert (np.diff(ordered) != 0).sum() == len(set(numbers)) - 1
    cut = held_out_from(ordered)
    assert cut >= len(groups) * 4 // 5 and not set(ordered[:cut]) & set(ordered[cut:])
