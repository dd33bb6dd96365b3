"""Tasks, models and tunings: the stated protocol, what each tuning trains, and runs that use them."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import together
from torch import nn

from hyfreedp.experiments.data.datasets import Arrays
from hyfreedp.experiments.models import vision
from hyfreedp.experiments.models.language import LANGUAGE_MODELS
from hyfreedp.experiments.models.vision import MODELS, Pixels, choose_trainable, head, make_model
from hyfreedp.experiments.runs import cells
from hyfreedp.experiments.runs.cells import Spec, run_cell
from hyfreedp.experiments.runs.train import make_run
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.experiments.tasks.scores import evaluate, losses_of
from hyfreedp.experiments.tasks.vision import Task

# Sizes of the official training parts; steps and delta by hand: 5 epochs of ceil(N / 1000), and N^-1.1.
PROTOCOL = {
    "digits": (1500, 500, 100, 1e-4),
    "classification": (8000, 500, 100, 1e-4),
    "cifar10": (50_000, 1000, 250, 6.779e-6),
    "cifar100": (50_000, 1000, 250, 6.779e-6),
    "svhn": (73_257, 1000, 370, 4.453e-6),
    "gtsrb": (39_209, 1000, 200, 8.857e-6),
    "food101": (75_750, 1000, 380, 4.292e-6),
    "glyphs": (20_000, 500, 100, 1e-4),
    "cifar10_some": (10_000, 500, 100, 1e-4),
    "gtsrb_some": (10_000, 500, 100, 1e-4),
    "cifar10_20k": (20_000, 400, 250, 1.857e-5),
    "gtsrb_20k": (20_000, 400, 250, 1.857e-5),
    "restaurants": (6000, 64, 40, 6.983e-5),
    "restaurants_few": (6000, 64, 40, 6.983e-5),
    "e2e_short": (42_061, 64, 40, 8.199e-6),
    "e2e": (42_061, 1024, 420, 8.199e-6),  # 10 epochs
    "reports": (6000, 64, 40, 6.983e-5),
}


@together("name", TASKS)
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


def test_enlarged_images_are_interpolated_linearly():
    ramp = torch.arange(0, 240, 60, dtype=torch.uint8).expand(1, 3, 4, 4)  # columns 0, 60, 120, 180
    row = (Pixels(8)(ramp)[0, 0, 0] + 1) / 2 * 255
    torch.testing.assert_close(row, torch.tensor([0.0, 15, 45, 75, 105, 135, 165, 180]))


@together("name", ["vit8_d64_p4", "vit32_d128"])
def test_a_new_head_knows_nothing(name):
    model = make_model(name, "full", features=64, classes=7, seed=0)
    images = torch.rand(5, 64) if name == "vit8_d64_p4" else torch.randint(256, (5, 3, 20, 20), dtype=torch.uint8)
    assert F.cross_entropy(model(images), torch.arange(5)).item() == pytest.approx(math.log(7))


def _trainable(module):
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_each_tuning_trains_its_parameters_and_the_head():
    full, bitfit, lora = (
        make_model("vit8_d64_p4", tuning, features=64, classes=10, seed=0) for tuning in ("full", "bitfit", "lora")
    )
    everything = {name for name, _ in full.named_parameters()}
    the_head = {"vit.head.weight", "vit.head.bias"}
    assert _trainable(full) == everything
    assert _trainable(bitfit) == {name for name in everything if name.endswith(".bias")} | the_head
    adapters = {
        f"vit.blocks.{block}.attn.{layer}.lora_{side}.default.weight"
        for block in range(3)
        for layer in ("qkv", "proj")
        for side in "AB"
    }
    assert _trainable(lora) == adapters | the_head
    mlp = make_model("mlp", "bitfit", features=64, classes=10, seed=0)
    assert _trainable(mlp) == {"0.bias", "2.bias", "4.bias", "4.weight"}


def test_low_rank_updates_start_at_zero_beside_the_same_weights():
    full, lora = (make_model("vit8_d64_p4", tuning, features=64, classes=10, seed=4) for tuning in ("full", "lora"))
    for model in (full, lora):
        nn.init.constant_(head(model).weight, 0.1)
    x = torch.rand(3, 64)
    torch.testing.assert_close(full(x), lora(x))
    wide = dict(lora.named_parameters())["vit.blocks.0.attn.qkv.lora_A.default.weight"]
    assert wide.shape == (vision.LORA_RANK, 64) and wide.std() > 0


@together("tuning", ["full", "bitfit", "lora"])
def test_a_private_step_moves_what_the_tuning_trains_and_nothing_else(tuning):
    optimizer, loader = make_run(
        Spec(model="vit8_d64_p4", tuning=tuning, steps=5, method="constant", learning_rate=0.01)
    )
    before = {name: p.detach().clone() for name, p in optimizer.module.named_parameters()}
    optimizer.step(losses_of(optimizer.module), next(iter(loader)))
    moved = {name for name, p in optimizer.module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == _trainable(optimizer.module)


def test_public_weights_are_asked_for_by_their_full_name(monkeypatch):
    asked = {}

    def create(name, **options):
        asked.update(name=name, **options)
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 224 * 224, options["num_classes"]))

    monkeypatch.setattr("timm.create_model", create)
    model = make_model("vit_base_patch16_224", "full", features=0, classes=43, seed=0)
    assert asked["name"] == "vit_base_patch16_224.augreg_in21k" and asked["pretrained"] is True
    assert model(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 43)


@pytest.mark.parametrize(("name", "size"), [("vit_small_patch16_224", 21.7e6), ("vit_base_patch16_224", 85.8e6)])
def test_public_architectures_have_their_known_size(name, size, monkeypatch):
    import timm

    create = timm.create_model
    monkeypatch.setattr("timm.create_model", lambda *args, **options: create(*args, **options | {"pretrained": False}))
    with torch.device("meta"):
        model = make_model(name, "full", features=0, classes=10, seed=0)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.005)
    assert [type(layer) for layer in model.modules() if "Norm" in type(layer).__name__] == [nn.LayerNorm] * 25


def test_public_weights_that_cannot_be_had_are_explained(monkeypatch):
    def offline(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr("timm.create_model", offline)
    with pytest.raises(
        RuntimeError, match=r"weights of vit_small_patch16_224 could not be loaded \(OSError: no network"
    ):
        make_model("vit_small_patch16_224", "full", features=0, classes=10, seed=0)


def test_a_seed_gives_the_weights_and_leaves_the_global_state():
    state = torch.get_rng_state()
    first, again, other = (
        make_model("vit8_d64_p4", "lora", features=64, classes=10, seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["vit.patch_embed.proj.weight"], other["vit.patch_embed.proj.weight"])


def test_the_head_stays_trainable_whatever_was_frozen():
    model = MODELS["vit8_d64_p4"].build(64, 3)
    choose_trainable(model, "lora")
    assert head(model).out_features == 3 and head(model).weight.requires_grad


@together(
    ("fields", "message"),
    [
        ({"model": "vit32_d192"}, "model must be one of 'mlp', 'vit8_d64_p4', 'vit8_glyphs', got 'vit32_d192'"),
        ({"task": "svhn", "model": "mlp"}, "model must be one of 'vit32_d192', 'vit32_d128', .* got 'mlp'"),
        ({"tuning": "lora"}, "tuning must be one of 'full', 'bitfit', got 'lora'"),
        ({"model": "vit8_d64_p4", "tuning": "bitft"}, r"tuning must be .*, got 'bitft' \(did you mean 'bitfit'\?\)"),
    ],
)
def test_models_and_tunings_must_fit(fields, message):
    with pytest.raises(ValueError, match=message):
        Spec(**fields)


def test_models_and_tunings_have_cells_of_their_own():
    specs = [Spec(), Spec(model="vit8_d64_p4"), Spec(tuning="bitfit"), Spec(model="vit8_d64_p4", tuning="bitfit")]
    assert len({spec.key for spec in specs}) == 4


@pytest.fixture
def tiny_images(monkeypatch):
    """A task of 60 small colour images, brighter ones of class 1, in the form of the real ones."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(80) % 2
    pixels = torch.randint(100, (80, 3, 8, 8), generator=generator) + 100 * labels[:, None, None, None]
    arrays = Arrays(
        train=(pixels[:60].to(torch.uint8), labels[:60]),
        test=(pixels[60:].to(torch.uint8), labels[60:]),
        validation_start=48,
        source="made here",
    )
    real = TASKS["cifar10"]
    dataset = replace(real.dataset, train_size=60, classes=2, load=lambda: arrays)
    task = Task("tiny", dataset, ("vit32_d128",), batch_size=20, steps=6, delta=1e-3)
    monkeypatch.setitem(TASKS, "cifar10", task)
    return task


def test_a_run_on_images_in_pieces_is_recorded(tiny_images, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "vit32_d128", replace(MODELS["vit32_d128"], physical_batch_size=7))
    spec = Spec(task="cifar10", tuning="bitfit", method="linear", epsilon=math.inf, learning_rate=0.02)
    record = run_cell(spec, tmp_path)
    assert record["data"] == "made here" and record["spec"]["tuning"] == "bitfit"
    assert record["accuracy"] == 1.0  # brightness tells the classes apart
    validation = run_cell(replace(spec, evaluation="validation"), tmp_path)
    assert validation["noise_split"]["sample_rate"] == pytest.approx(20 / 48)


def test_scores_do_not_depend_on_how_many_images_are_evaluated_together(tiny_images):
    _, test = tiny_images.datasets("test")
    model = tiny_images.model(0)
    nn.init.normal_(head(model).weight, generator=torch.Generator().manual_seed(1))
    whole, pieces = evaluate(model, test), evaluate(model, test, 7)
    assert whole.accuracy == pieces.accuracy and whole.loss == pytest.approx(pieces.loss, rel=1e-5)


def test_worker_processes_find_the_data_decoded(tiny_images, tmp_path, monkeypatch):
    """Data are fetched in this process before any worker starts."""
    seen = []

    arrays = tiny_images.arrays()

    def refuse(method):
        raise RuntimeError(f"asked for {method}")

    monkeypatch.setitem(
        TASKS,
        "cifar10",
        replace(tiny_images, dataset=replace(tiny_images.dataset, load=lambda: seen.append("read") or arrays)),
    )
    monkeypatch.setattr(cells, "get_context", refuse)
    with pytest.raises(RuntimeError, match="asked for spawn"):
        cells.run_cells([Spec(task="cifar10"), Spec(task="cifar10", seed=1)], tmp_path, jobs=2)
    assert seen == ["read"]
