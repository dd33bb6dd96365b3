"""The audit of :mod:`hyfreedp.auditing` for our own MLP on digits, with stronger canaries and exact neighbours."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hyfreedp import PrivacyEngine
from hyfreedp.checks import check_count
from hyfreedp.data.sampling import PoissonSampler
from hyfreedp.experiments.data.datasets import digits
from hyfreedp.experiments.models.image_models import make_model
from hyfreedp.experiments.runs.methods import BASES, METHODS
from hyfreedp.experiments.store.provenance import one_thread
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.noise import NoiseGenerator

BRIGHTNESS = 8.0  # of a canary's pixel; pixels of digits are at most 1


def train_with_canaries(
    *, method: str, epsilon: float, learning_rate: float, canaries: int, steps: int, seed: int
) -> pd.DataFrame:
    """Train on digits whose last ``canaries`` records are replaced by canaries, each present with probability 1/2.

    A canary is a black image with one bright pixel that all other images lack, and a random label. Most of its gradient
    is orthogonal to all others, so that its loss shows whether it was present.

    Returns:
        One row per canary: ``included``, ``score``, by how much training lowered its loss, and, equal in all rows,
        test ``accuracy`` and ``epsilon``, which the run claims to have spent.
    """
    chosen, task, arrays = METHODS[method], TASKS["digits"], digits()
    check_count("canaries", canaries, 1, len(arrays.train[1]) - 1, "records - 1")
    random = NoiseGenerator(seed).child("canaries", canaries)
    images, labels = arrays.train
    honest, pixels = len(labels) - canaries, images.shape[1]
    images = F.pad(images, (0, canaries))  # one more pixel for each canary
    images[honest:] = 0
    images[honest:, pixels:] = BRIGHTNESS * torch.eye(canaries)
    wrong = (random.uniform(canaries) * (int(labels.max()) + 1)).long()
    labels = torch.cat([labels[:honest], wrong])
    included = random.uniform(canaries).numpy() < 0.5
    present = np.concatenate([np.ones(honest, dtype=bool), included])
    shape: dict[str, Any] = {"features": images.shape[1], "classes": int(labels.max()) + 1, "seed": seed}
    learned: dict[str, Any] = {"initial_learning_rate": learning_rate} if chosen.searches else {}
    with one_thread():
        data, model = TensorDataset(images, labels), make_model("mlp", "full", **shape)
        scorer = make_model("mlp", "full", **shape).double()  # a run that hardly moves changes losses very little
        _, optimizer, loader = PrivacyEngine(seed=seed).make_private_with_epsilon(
            module=model,
            optimizer=BASES["adamw"](model.parameters(), lr=learning_rate),
            data_loader=DataLoader(data, batch_size=task.batch_size),
            target_epsilon=epsilon,
            target_delta=task.delta,
            steps=steps,
            preset=chosen.preset,
            without_guarantee=True,  # of the run; the audit says what holds
            **chosen.overrides,
            **learned,
        )
        before = _losses(scorer, images, labels)

        def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        # Absent canaries are removed from the batches that they are drawn into, so the rest is a Poisson sample. Sample
        # rate and expected batch size count absent canaries, too. So two data sets that differ in one canary are exact
        # neighbours, with nothing else changed.
        sampler = cast(PoissonSampler, loader.batch_sampler)
        for step in range(steps):
            drawn = [index for index in sampler.batch(step) if present[index]]
            optimizer.step(loss, (images[drawn], labels[drawn]))
        scorer.load_state_dict(model.state_dict())
        after = _losses(scorer, images, labels)
        test_images, test_labels = arrays.test
        padded = F.pad(test_images, (0, canaries)).double()
        with torch.no_grad():
            accuracy = (scorer(padded).argmax(dim=1) == test_labels).double().mean().item()
    told = {"included": included, "score": (before - after)[-canaries:], "accuracy": accuracy}
    return pd.DataFrame(told | {"epsilon": optimizer.epsilon_spent()})


def _losses(model: nn.Module, images: Tensor, labels: Tensor) -> np.ndarray:
    with torch.no_grad():
        return F.cross_entropy(model(images.double()), labels, reduction="none").numpy()
