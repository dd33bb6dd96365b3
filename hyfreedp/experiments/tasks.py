"""Tasks: data, model and the fixed training protocol (batch size, steps, delta) that every method shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits, make_classification
from torch import nn
from torch.utils.data import TensorDataset

Evaluation = Literal["test", "validation"]


@dataclass(frozen=True)
class Task:
    """One learning problem.

    Attributes:
        title: for figures.
        load: gives features (N, d) float32 and labels (N,) int64, training part first.
        train_size: how many of them train; the rest is the test part.
        layers: widths of the fully connected ReLU network, input to output.
        batch_size, steps, delta: the protocol; the sample rate is ``batch_size / train_size``.
    """

    title: str
    load: Callable[[], tuple[np.ndarray, np.ndarray]]
    train_size: int
    layers: tuple[int, ...]
    batch_size: int
    steps: int
    delta: float

    def datasets(self, evaluation: Evaluation) -> tuple[TensorDataset, TensorDataset]:
        """Training and evaluation data; "validation" evaluates on a fifth of the training part, held out."""
        features, labels = self.load()
        x, y = torch.as_tensor(features, dtype=torch.float32), torch.as_tensor(labels, dtype=torch.int64)
        if evaluation == "test":
            cut, end = self.train_size, len(x)
        else:
            cut, end = self.train_size * 4 // 5, self.train_size
        return TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:end], y[cut:end])

    def model(self, seed: int) -> nn.Module:
        """The network with freshly drawn weights; the global random state is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            modules: list[nn.Module] = []
            for width_in, width_out in zip(self.layers, self.layers[1:], strict=False):
                modules += [nn.Linear(width_in, width_out), nn.ReLU()]
            return nn.Sequential(*modules[:-1])


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, scaled to [0, 1], in one fixed random order."""
    features, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(features))
    return features[order] / 16, labels[order]


@cache
def _classification() -> tuple[np.ndarray, np.ndarray]:
    """Synthetic: Gaussian clusters on the corners of a hypercube, 10 classes, 20 informative of 40 features."""
    features, labels = make_classification(
        n_samples=10_000, n_features=40, n_informative=20, n_classes=10, class_sep=2.0, random_state=7
    )
    return features / 4, labels  # a fixed scale, chosen without looking at private data


TASKS = {
    "digits": Task("digits (1,500 images)", _digits, 1500, (64, 512, 512, 10), 500, 100, 1e-4),
    "classification": Task("make_classification (8,000)", _classification, 8000, (40, 512, 512, 10), 500, 100, 1e-4),
}


class Scores(NamedTuple):
    """On evaluation data: the share of correct predictions, and the mean cross-entropy in nats."""

    accuracy: float
    loss: float


def evaluate(model: nn.Module, data: TensorDataset) -> Scores:
    """Scores in eval mode; the model's mode is restored."""
    x, y = data.tensors
    training = model.training
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in x.split(4096)])
        correct = (outputs.argmax(dim=1) == y).double().mean().item()
        loss = F.cross_entropy(outputs, y).item()
    model.train(training)
    return Scores(correct, loss)
