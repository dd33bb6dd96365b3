"""Slow, obvious counterparts of the library, and the tiny models and data that they are compared on.

The twin loops over samples with plain autograd, reaches every probe by letting a deep copy of the base optimizer step a
deep copy of the model with the learning rate of that probe, and fits with ``numpy.polyfit``. It shares no code with the
library but the step rules, which have tests of their own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hyfreedp
from hyfreedp import Preset, PrivacyEngine, QuadraticFit, noise
from hyfreedp.experiments.baselines.line_search import LINE_SEARCH, ContrastProbe, LossProbe, StudiedRule
from hyfreedp.experiments.baselines.posterior import Rule
from hyfreedp.rate_learner import LossSearch

PRESETS = {name: name for name in ("robust", "paper", "fixed")} | {"line_search": LINE_SEARCH}
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


def cross_entropy(model: nn.Module) -> Callable[[list[Tensor]], Tensor]:
    """Per-sample loss of a batch ``(inputs, labels)``."""
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


def make_private(model: nn.Module, optimizer: torch.optim.Optimizer, data=None, *, batch_size: int = 8, **settings):
    """``PrivacyEngine`` with the settings that most tests share: no privacy, ten steps, a fixed seed."""
    seed = settings.pop("seed", 0)
    loader = settings.pop("loader", None) or DataLoader(make_data() if data is None else data, batch_size=batch_size)
    defaults = {"target_epsilon": math.inf, "target_delta": 1e-3}
    if "epochs" not in settings:
        defaults["steps"] = 10
    return PrivacyEngine(seed=seed).make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, **(defaults | settings)
    )


def changed(preset: str | Preset, **fields) -> Preset:
    """A preset, by name or as it is, with fields that it need not use, which the engine refuses as arguments."""
    return replace(hyfreedp.PRESETS[preset] if isinstance(preset, str) else preset, **fields)


def searching(probe: str, rule: str) -> dict[str, Any]:
    """Fields of a preset for a rule on "losses" or "contrasts": the package's own, or else a study's."""
    own = probe == "losses" and rule in ("gen", "literal")
    return {"probe": probe, "step_rule": rule if own else StudiedRule(rule)}


def line_search(
    kind: str, rule: str, *, momentum: float = 0.0, loss_threshold=1.0, contrast_thresholds=(0.01, 2e-4), **settings
):
    """What such a preset makes, with the thresholds of either kind."""
    if kind == "contrasts":
        return ContrastProbe(Rule(rule, momentum), contrast_thresholds=contrast_thresholds, **settings)
    if rule in ("gen", "literal"):
        return LossSearch(rule=rule, loss_threshold=loss_threshold, **settings)
    return LossProbe(Rule(rule, momentum), loss_threshold=loss_threshold, **settings)


def thresholds_of(probe) -> tuple[float, ...]:
    """R_l, or R_d and R_c."""
    return probe.contrast_thresholds if probe.kind == "contrasts" else (probe.loss_threshold,)


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


class Twin:
    """Algorithm 1 without noise, by brute force.

    Args:
        model: a copy of the model, without anybody's hooks.
        optimizer: a torch optimizer over its trainable parameters; its rates are kept as ratios.
        factor: a sample's gradient norm to the factor that scales its gradient.
        expected_batch_size: what sums are divided by.
        decide: ``(fit, losses, eta) -> next eta``; the losses are lists at (w - hG, w, w + hG).
        eta: the first learning rate.
        reach: the probes lie at ``reach * eta`` along the update direction.
        average: a list of per-sample losses of one probe to the number that enters the fit; their sum over the expected
            batch size if None.
    """

    def __init__(self, model, optimizer, *, factor, expected_batch_size, decide, eta, reach=1.0, average=None) -> None:
        self.model, self.optimizer = model, optimizer
        self.factor, self.expected_batch_size, self.decide = factor, expected_batch_size, decide
        self.eta, self.reach = eta, reach
        self.average = average or (lambda losses: sum(losses) / expected_batch_size)
        self.ratios = [group["lr"] / optimizer.param_groups[0]["lr"] for group in optimizer.param_groups]
        self.fit: QuadraticFit | None = None

    def step(self, batch: list[Tensor], *, probing: bool, decay: float = 1.0, by: list[Tensor] | None = None) -> float:
        """Make one step; returns the rate that it took. ``by`` is the batch that probes, ``batch`` itself if None."""
        for parameter, gradient in zip(trainable(self.model), self.clipped_mean(batch), strict=True):
            parameter.grad = gradient
        if probing:
            h = self.reach * self.eta
            losses = [self.losses(self.moved(distance), by or batch) for distance in (h, 0.0, -h)]
            heights = [self.average(values) for values in losses]
            # L(w - x G) = c - b x + a x^2 / 2
            half_a, minus_b, c = np.polyfit([h, 0.0, -h], heights, 2)
            self.fit = QuadraticFit(slope=-minus_b, curvature=2 * half_a, intercept=c)
            self.eta = self.decide(self.fit, losses, self.eta)
        self.advance(self.optimizer, self.eta * decay)
        return self.eta * decay

    def clipped_mean(self, batch: list[Tensor]) -> list[Tensor]:
        parameters = trainable(self.model)
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for i in range(len(batch[0])):
            loss = cross_entropy(self.model)([tensor[i : i + 1] for tensor in batch])[0]
            gradients = torch.autograd.grad(loss, parameters)
            norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
            for sum_, gradient in zip(total, gradients, strict=True):
                sum_ += self.factor(norm) * gradient
        return [sum_ / self.expected_batch_size for sum_ in total]

    def moved(self, distance: float) -> nn.Module:
        """A copy of the model that took the update with the rate ``distance``."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        for copied, original in zip(trainable(model), trainable(self.model), strict=True):
            copied.grad = original.grad.clone()
        self.advance(optimizer, distance)
        return model

    def advance(self, optimizer: torch.optim.Optimizer, eta: float) -> None:
        for group, ratio in zip(optimizer.param_groups, self.ratios, strict=True):
            group["lr"] = eta * ratio
        optimizer.step()

    @staticmethod
    @torch.no_grad()
    def losses(model: nn.Module, batch: list[Tensor]) -> list[float]:
        loss = cross_entropy(model)
        return [loss([tensor[i : i + 1] for tensor in batch]).item() for i in range(len(batch[0]))]
