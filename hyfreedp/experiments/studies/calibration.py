"""Probabilities after private training: accuracy, log loss and calibration error of ways to clip, and of a temperature.

Settings are chosen on validation data; those that remain are trained on all of the training part and tested, with
seeds that chose nothing. The labels of three of the problems are partly noise, so that no one can be sure of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from hyfreedp import PrivacyEngine
from hyfreedp.clipping import AbadiClipping, AutomaticClipping, Clipping
from hyfreedp.experiments.data import datasets
from hyfreedp.experiments.data.datasets import Arrays, Dataset
from hyfreedp.experiments.data.records import Records, as_is
from hyfreedp.experiments.runs.train import one_thread
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.provenance import with_versions
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.experiments.tasks.scores import Evaluation, calibration_error
from hyfreedp.experiments.tasks.vision import Task

EPSILONS = (1.0, 3.0, 8.0)
CHOOSING, TESTING = range(3), range(10, 15)  # seeds
RATE = 0.01  # of preset fixed


# -- problems ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Data and protocol of a task, and the model of a seed."""

    title: str
    task: Task
    model: Callable[[int], nn.Module]


def _small_network(features: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 2))


def _synthetic(labels: Callable[[Tensor, torch.Generator], Tensor]) -> Arrays:
    """3,000 records of 20 normal features, and 4,000 to test with; ``labels`` draws theirs."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(7000, 20, generator=generator)
    drawn = labels(features, generator).long()
    return Arrays((features[:3000], drawn[:3000]), (features[3000:], drawn[3000:]), 2400, "drawn")


@cache
def coin() -> Arrays:
    """Two classes, 70 to 30: the label is drawn with log-odds 0.85 + x_0 / 2."""

    def labels(x: Tensor, generator: torch.Generator) -> Tensor:
        return torch.rand(len(x), generator=generator) < torch.sigmoid(0.85 + 0.5 * x[:, 0])

    return _synthetic(labels)


@cache
def minority() -> Arrays:
    """Two classes, one record in ten of the second: where x_0 + x_1 and as much noise again exceed 2.2."""

    def labels(x: Tensor, generator: torch.Generator) -> Tensor:
        return x[:, 0] + x[:, 1] + torch.randn(len(x), generator=generator) > 2.2

    return _synthetic(labels)


@cache
def flipped_digits() -> Arrays:
    """scikit-learn's digits; one label in five, in training and in test data, is another class, drawn at random."""
    known = datasets.digits()
    generator = torch.Generator().manual_seed(0)

    def flip(labels: Tensor) -> Tensor:
        wrong = torch.rand(len(labels), generator=generator) < 0.2
        return torch.where(wrong, (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10, labels)

    train, test = ((features, flip(labels)) for features, labels in (known.train, known.test))
    return Arrays(train, test, known.validation_start, known.source)


def _drawn(title: str, load: Callable[[], Arrays]) -> Problem:
    task = Task(title, Dataset(3000, 2400, 20, 2, load), (), batch_size=200, steps=150, delta=1e-4)
    return Problem(title, task, partial(_small_network, 20))


_DIGITS = TASKS["digits"]
assert isinstance(_DIGITS, Task)
_FLIPPED = Task("digits", Dataset(1500, 1200, 64, 10, flipped_digits), ("mlp",), batch_size=500, steps=100, delta=1e-4)
PROBLEMS = {
    "coin": _drawn("labels 70 to 30", coin),
    "minority": _drawn("minority of 10 %", minority),
    "flipped": Problem("digits, 20 % of labels flipped", _FLIPPED, _FLIPPED.model),
    "digits": Problem("digits", _DIGITS, _DIGITS.model),
    "classification": Problem("make_classification", TASKS["classification"], TASKS["classification"].model),
}


# -- settings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A change to preset robust.

    Attributes:
        clipping: as of ``make_private_with_epsilon``; the preset's own if None.
        smoothing: of the labels, in the loss.
        weight_decay: of AdamW.
    """

    clipping: Clipping | None = None
    smoothing: float = 0.0
    weight_decay: float = 0.01


SETTINGS = {
    "default": Setting(),
    "stability 0.1": Setting(AutomaticClipping(0.1)),
    "stability 1": Setting(AutomaticClipping(1.0)),
    "stability 10": Setting(AutomaticClipping(10.0)),
    "flat 0.1": Setting(AbadiClipping(0.1)),
    "flat 1": Setting(AbadiClipping(1.0)),
    "flat 10": Setting(AbadiClipping(10.0)),
    "smoothing 0.1": Setting(smoothing=0.1),
    "decay 1": Setting(weight_decay=1.0),
}


# -- a temperature, by votes or by slopes ------------------------------------------------------------------------------

LADDER = tuple(2.0 ** (k / 2) for k in range(-4, 13))  # temperatures: 1/4 to 64
QUESTIONS = 5  # that find one of 17 by halving
SLOPE_BOUND = 4.0  # in units of the logits


def tempered(logits: Tensor, labels: Tensor, *, by: str, rate: float, sigma: float, seed: int) -> float:
    """A temperature of the ladder, from noisy answers of Poisson batches: each is asked whether the logits are too sure.

    The answer of a record is a number of sensitivity 1. By "votes": whether its loss is lower one temperature up or
    down the ladder. By "slopes": the derivative of its loss by the inverse temperature, clipped at
    :data:`SLOPE_BOUND` and divided by it; of a convex loss, so that the sum rises with the inverse temperature and
    halving finds where it is zero.

    Args:
        logits, labels: of the training data, shapes (N, C) and (N,).
        rate: at which batches are sampled.
        sigma: noise of each sum of answers, in units of the sensitivity.
    """
    generator = torch.Generator().manual_seed(seed)
    low, high = 0, len(LADDER) - 1  # the answer is between these, both included
    while low < high:
        middle = (low + high) // 2
        chosen = torch.rand(len(labels), generator=generator) < rate
        z, y = logits[chosen], labels[chosen]
        if by == "votes":
            here, above = (F.cross_entropy(z / LADDER[k], y, reduction="none") for k in (middle, middle + 1))
            too_sure = (here - above).sign()
        else:  # between the two temperatures
            inverse = (LADDER[middle] * LADDER[middle + 1]) ** -0.5
            expected = ((inverse * z).softmax(1) * z).sum(1)
            too_sure = (expected - z.gather(1, y[:, None])[:, 0]).clamp(-SLOPE_BOUND, SLOPE_BOUND) / SLOPE_BOUND
        if too_sure.sum() + sigma * torch.randn((), generator=generator) > 0:
            low = middle + 1
        else:
            high = middle
    return LADDER[low]


# -- runs --------------------------------------------------------------------------------------------------------------

KEY = ["problem", "preset", "epsilon", "setting", "seed", "evaluation"]


def scores_of(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, mean confidence, log loss (nats) and calibration error of logits (N, C) for labels (N,)."""
    probabilities = logits.double().softmax(1)
    confidence, predicted = probabilities.max(1)
    return {
        "accuracy": (predicted == labels).double().mean().item(),
        "confidence": confidence.mean().item(),
        "log_loss": F.cross_entropy(logits.double(), labels).item(),
        "calibration_error": calibration_error(probabilities, labels),
    }


def base_rate(labels: Tensor, classes: int) -> float:
    """Log loss (nats) of a constant prediction: the shares of the classes in these very labels."""
    shares = torch.bincount(labels, minlength=classes).double() / len(labels)
    return -torch.special.xlogy(shares, shares).sum().item()


def train(problem: Problem, setting: Setting, preset: str, epsilon: float, seed: int, evaluation: Evaluation):
    """One run; the logits of training and evaluation data with their labels, and the optimizer."""
    data, held_out = problem.task.datasets(evaluation)
    model = problem.model(seed)
    model, optimizer, loader = PrivacyEngine(seed=seed).make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=setting.weight_decay),
        data_loader=DataLoader(data, batch_size=problem.task.batch_size, collate_fn=as_is),
        target_epsilon=epsilon,
        target_delta=problem.task.delta,
        steps=problem.task.steps,
        preset=preset,
        clipping=setting.clipping,
    )

    def losses(batch: tuple[Tensor, Tensor]) -> Tensor:
        features, labels = batch
        return F.cross_entropy(model(features), labels, reduction="none", label_smoothing=setting.smoothing)

    while optimizer.steps_left:
        for batch in loader:
            optimizer.step(losses, batch)
            if not optimizer.steps_left:
                break
    model.eval()
    with torch.no_grad():
        found = [(model(features), labels) for features, labels in (data.tensors, held_out.tensors)]
    return found[0], found[1], optimizer
