"""Tasks, models and tunings: the stated protocol, and what each tuning trains."""

import itertools

import pytest
import torch

from hyfreedp.experiments.models.image_models import MODELS, Pixels, make_model
from hyfreedp.experiments.models.language_models import LANGUAGE_MODELS
from hyfreedp.experiments.tasks.registry import TASKS

# Sizes of the official training parts; steps and delta by hand: 5 epochs of ceil(N / 1000), and N^-1.1.
PROTOCOL = {
    "digits": (1500, 500, 100, 1e-4),
    "classification": (8000, 500, 100, 1e-4),
    **dict.fromkeys(("cifar10", "cifar100"), (50_000, 1000, 250, 6.779e-6)),
    "svhn": (73_257, 1000, 370, 4.453e-6),
    "gtsrb": (39_209, 1000, 200, 8.857e-6),
    "food101": (75_750, 1000, 380, 4.292e-6),
    **dict.fromkeys(("fashion_20k", "cifar100_20k", "mnist_20k"), (20_000, 400, 250, 1.857e-5)),
    **dict.fromkeys(("kmnist_8k", "notmnist_8k"), (8000, 160, 250, 5.090e-5)),
    **dict.fromkeys(("restaurants", "reports"), (6000, 64, 40, 6.983e-5)),
    "e2e": (42_061, 1024, 420, 8.199e-6),  # 10 epochs
}


@pytest.mark.parametrize("name", PROTOCOL)
def test_the_protocol_is_known_before_anything_is_read(name, monkeypatch):
    monkeypatch.setattr("hyfreedp.experiments.data.datasets.images", None)  # would fail if called
    task = TASKS[name]
    assert (task.train_size, task.batch_size, task.steps) == PROTOCOL[name][:3]
    assert task.delta == pytest.approx(PROTOCOL[name][3], rel=1e-3)
    assert set(task.models) <= {*MODELS, *LANGUAGE_MODELS} and f"{task.train_size:,}" in task.title


def test_stored_pixels_become_normalised_ones_of_the_models_size():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8)[:, None, None, None].expand(3, 3, 8, 8)
    torch.testing.assert_close(Pixels(8)(images)[:, 0, 0, 0], torch.tensor([-1.0, -0.6, 1.0]))
    for side in (4, 20):  # a constant image stays constant
        torch.testing.assert_close(
            Pixels(side)(images), torch.tensor([-1.0, -0.6, 1.0])[:, None, None, None].expand(3, 3, side, side)
        )
    assert Pixels(224)(images[:0]).shape == (0, 3, 224, 224)
    flat = torch.rand(2, 64)
    torch.testing.assert_close(Pixels(8)(flat)[1, 0, 3, 5], 2 * flat[1, 8 * 3 + 5] - 1)


def _trainable(module):
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_each_tuning_trains_its_parameters_and_the_head():
    full, bitfit, lora = (
        make_model("vit8_d64_p4", tuning, features=64, classes=10, seed=0) for tuning in ("full", "bitfit", "lora")
    )
    everything, the_head = {name for name, _ in full.named_parameters()}, {"vit.head.weight", "vit.head.bias"}
    assert _trainable(full) == everything
    assert _trainable(bitfit) == {name for name in everything if name.endswith(".bias")} | the_head
    places = itertools.product(range(3), ("qkv", "proj"), "AB")
    adapters = {f"vit.blocks.{block}.attn.{layer}.lora_{side}.default.weight" for block, layer, side in places}
    assert _trainable(lora) == adapters | the_head
    mlp = make_model("mlp", "bitfit", features=64, classes=10, seed=0)
    assert _trainable(mlp) == {"0.bias", "2.bias", "4.bias", "4.weight"}
