"""Tiny models and data on which the library is compared with ``hyfreedp.reference``, its slow and obvious twin."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hyfreedp
from hyfreedp import NoiseGenerator, Preset, PrivacyEngine, reference
from hyfreedp.data.batches import Group
from hyfreedp.gradients import AutomaticClipping
from hyfreedp.noise import stream as noise

PRESETS = {name: name for name in ("robust", "paper", "fixed")}
TUNINGS = ("full", "biases", "lora", "frozen")


def make_model(tuning: str = "full", *, seed: int = 0, dropout: float = 0.0) -> nn.Module:
    """A float64 network from 5 numbers to 3 classes, trainable in the parts that ``tuning`` names."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        noise = [nn.Dropout(dropout)] if dropout else []
        model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), *noise, nn.Linear(7, 3))
        if tuning == "biases":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.endswith("bias"))
        elif tuning == "frozen":
            model[0].requires_grad_(False)
        elif tuning == "lora":
            from peft import LoraConfig, get_peft_model

            last = str(len(model) - 1)
            config = LoraConfig(r=2, target_modules=["0", last], init_lora_weights=False)
            model = get_peft_model(model, config)
    return model.double().train()


class Built(nn.Module):
    """A model of named parts, and its forward pass, a function of the model and of what it is called with."""

    def __init__(self, run: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Tensor:
        return self.run(self, *inputs)


def function(forward: Callable[..., Any], backward: Callable[..., Any], **more: Callable[..., Any]) -> Any:
    """A ``torch.autograd.Function`` of these static methods."""
    methods = {"forward": forward, "backward": backward} | more
    return type("Own", (torch.autograd.Function,), {name: staticmethod(method) for name, method in methods.items()})


class Made(Dataset):
    """So many records, each made of its place by a function."""

    def __init__(self, size: int, make: Callable[[int], Any]) -> None:
        self.size, self.make = size, make

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> Any:
        return self.make(place)


def make_data(size: int = 40, *, seed: int = 1) -> TensorDataset:
    """Records of 5 numbers in three overlapping classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (size,), generator=generator)
    centres = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(centres[labels] + torch.randn(size, 5, generator=generator, dtype=torch.float64), labels)


def make_batches(sizes: Sequence[int], *, seed: int = 2) -> list[list[Tensor]]:
    """Disjoint batches of the given sizes, 0 allowed."""
    pieces = [tensor.split(list(sizes)) for tensor in make_data(sum(sizes), seed=seed).tensors]
    return [list(batch) for batch in zip(*pieces, strict=True)]


def unstacked(groups: Sequence[Group]) -> dict[int, Any]:
    """The records of a batch's groups, by their places in the batch."""
    places = [(group, i, row) for group in groups for i, row in enumerate(group.rows.tolist())]
    return {row: group.record([tensor[i] for tensor in group.tensors]) for group, i, row in places}


def cross_entropy(model: nn.Module) -> Callable[[list[Tensor]], Tensor]:
    """The loss of a record ``(inputs, labels)``; of several, that of each."""
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flat(model: nn.Module) -> Tensor:
    """A copy of all trainable weights as one vector."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in trainable(model)])


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model), lr=lr)


def sgd_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model), lr=0.5, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model), lr=0.5, weight_decay=0.1)


def three_groups(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with weight decay on some parameters only and rates in the ratio 2 : 1 : 6."""
    parameters = trainable(model)
    groups = [
        {"params": parameters[:1], "lr": 0.1},
        {"params": parameters[1:2], "lr": 0.05, "weight_decay": 0.0},
        {"params": parameters[2:], "lr": 0.3, "betas": (0.5, 0.9)},
    ]
    return torch.optim.AdamW(groups, weight_decay=0.1)


BASES = {"sgd": sgd_momentum, "adamw": adamw, "groups": three_groups}


def make_private(model=None, optimizer=None, data=None, *, batch_size: int = 8, **settings):
    """``PrivacyEngine`` with what most tests share: a small model, AdamW, no privacy, ten steps, a fixed seed."""
    model = make_model() if model is None else model
    optimizer = adamw(model) if optimizer is None else optimizer
    engine = settings.pop("engine", None) or PrivacyEngine(seed=settings.pop("seed", 0))
    loader = settings.pop("loader", None) or DataLoader(make_data() if data is None else data, batch_size=batch_size)
    settings = {"target_epsilon": math.inf, "target_delta": 1e-3} | settings
    if "epochs" not in settings:
        settings.setdefault("steps", 10)
    return engine.make_private_with_epsilon(module=model, optimizer=optimizer, data_loader=loader, **settings)


def by_hand(*args, **settings):
    """The optimizer of :func:`make_private` alone, for batches that a test makes, without a loader."""
    _, optimizer, _ = make_private(*args, **settings, without_guarantee=True)
    return optimizer


def steps(optimizer, sizes: Sequence[int]) -> list:
    """A step by cross-entropy on each of :func:`make_batches`; their records."""
    return [optimizer.step(cross_entropy(optimizer.module), batch) for batch in make_batches(sizes)]


def changed(preset: str | Preset, **fields) -> Preset:
    """A preset, by name or as it is, with fields that it need not use, which the engine refuses as arguments."""
    return replace(hyfreedp.PRESETS[preset] if isinstance(preset, str) else preset, **fields)


def moved(model: nn.Module, loss: Callable, batch: Sequence[Tensor], row: int = -1, **settings) -> float:
    """By how many clips one record moves the clipped sum of a step.

    Of the second step: at the first, losses are compared for the user's sake, and mixing ones refused. That one has no
    gradient and moves nothing.

    Args:
        loss: of a model the loss of a record, as :func:`cross_entropy`.
        settings: ``weights`` of the step; those of :func:`by_hand`.
    """
    settings = {"preset": "fixed", "clipping": AutomaticClipping()} | settings
    weights, sums = settings.pop("weights", None), []
    others = torch.arange(len(batch[0])) != row % len(batch[0])
    for records in (batch, [tensor[others] for tensor in batch]):
        own = copy.deepcopy(model)
        optimizer = by_hand(own, sgd(own), **settings)
        optimizer.step(lambda record, own=own: 0 * sum(p.sum() for p in trainable(own)), records)
        before = flat(own)
        optimizer.step(loss(own), [tensor.clone() for tensor in records], weights=weights)
        sums.append((before - flat(own)) * optimizer.expected_batch_size)
    return float((sums[0] - sums[1]).norm()) / optimizer.gradient_engine.sensitivity


def train(optimizer, loader, loss=None, *, until: int | None = None, after: Callable = lambda batch: None) -> None:
    """The loop of the README, to the end of the plan or until so many steps are made; by cross-entropy."""
    loss, until = loss or cross_entropy(optimizer.module), until or optimizer.split.steps
    while optimizer.ledger.steps < until:
        for batch in loader:
            optimizer.step(loss, batch)
            after(batch)
            if optimizer.ledger.steps == until:
                break


@contextmanager
def refused(optimizer, message: str, error: Any = ValueError) -> Iterator[None]:
    """What is done inside raises, by this message; nothing moves, and nothing is counted or told."""
    model, told = optimizer.module, (optimizer.ledger.state_dict(), repr(optimizer.history))
    before = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    with pytest.raises(error, match=message):
        yield
    assert all(map(torch.equal, before, (*model.parameters(), *model.buffers()))), "weights or buffers moved"
    assert (optimizer.ledger.state_dict(), repr(optimizer.history)) == told


def twin_of(model: nn.Module, base: torch.optim.Optimizer, optimizer, batches, *, train=reference.train, **settings):
    """The run of ``optimizer`` by brute force: same plan and noise, on a model and a base optimizer of its own."""
    loss = settings.pop("loss", lambda model, batch: cross_entropy(model)(batch))
    noise = NoiseGenerator()
    noise.load_state_dict(optimizer.state_dict()["generator"])
    plan = {"split": optimizer.split, "B": optimizer.expected_batch_size, "noise": noise}
    return train(model, base, loss, batches, **plan, **settings)


def unbind_noise() -> Callable[[], None]:
    """Let noise follow from seed, purpose and step alone; returns what undoes it.

    Noise is bound to the bits of what it hides, so that two computations of the same step that round differently have
    unrelated noise. Tests that compare such computations compare what is left: the data's part, with equal noise.
    """
    derive = noise.derive

    def unbound(key, *path):
        bound = {"release": 2, "tag": 3}  # how much of such a path does not depend on the data
        return derive(key, *path[: bound.get(path[0], len(path))])

    def undo():
        noise.derive = derive

    noise.derive = unbound
    return undo
