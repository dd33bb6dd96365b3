"""A classifier's training loss, and its scores on evaluation data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hyfreedp.pytorch.layers import eval_mode

Evaluation = Literal["test", "validation"]


class Scores(NamedTuple):
    """On evaluation data: the share of correctly predicted labels (or target tokens); mean cross-entropy in nats."""

    accuracy: float
    loss: float


def losses_of(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """A function from a batch (features, labels) to per-sample cross-entropy, shape (B,), on the model's device."""
    device = next(model.parameters()).device

    def per_sample_loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        features, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        return F.cross_entropy(model(features), labels, reduction="none")

    return per_sample_loss


def evaluate(model: nn.Module, data: TensorDataset, batch_size: int = 4096) -> Scores:
    """Scores of a classifier in eval mode (its mode is restored), on the model's device."""
    device = next(model.parameters()).device
    correct, loss = 0.0, 0.0
    with torch.no_grad(), eval_mode(model.modules()):
        for features, labels in zip(*(tensor.split(batch_size) for tensor in data.tensors), strict=True):
            outputs, truth = model(features.to(device)), labels.to(device)
            correct += (outputs.argmax(dim=1) == truth).sum().item()
            loss += F.cross_entropy(outputs, truth, reduction="sum").item()
    return Scores(correct / len(data), loss / len(data))
