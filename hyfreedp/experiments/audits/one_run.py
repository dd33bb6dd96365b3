"""The audit of :mod:`hyfreedp.auditing` on our own models, with stronger canaries and exact neighbours."""

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

BRIGHTNESS = 8.0  # of a canary's pixel; those of digits are at most 1


def train_with_canaries(
    *, method: str, epsilon: float, learning_rate: float, canaries: int, steps: int, seed: int
) -> pd.DataFrame:
    """Train on digits of which the last ``canaries`` are replaced by canaries, each present by a fair coin of its own.

    A canary is a black image with one bright pixel that no other image has, under a random label: most of its gradient
    is orthogonal to all others, so that its loss tells of its own presence.

    Returns:
        One row per canary: ``included``, its coin, and ``score``, by how much training lowered its loss; and the same
        in all rows ``accuracy`` on the test digits and ``epsilon``, what the run claims to have spent.
    """
    chosen, task, arrays = METHODS[method], TASKS["digits"], digits()
    check_count("canaries", canaries, 1, len(arrays.train[1]) - 1, "records - 1")
    random = NoiseGenerator(seed).child("canaries", canaries)
    images, labels = arrays.train
    honest, pixels = len(labels) - canaries, images.shape[1]
    images = F.pad(images, (0, canaries))  # a pixel more for each canary
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
        scorer = make_model("mlp", "full", **shape).double()  # loss differences of a run that hardly moves are tiny
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

        # Absent canaries leave the batch that they are drawn into; the others stay a Poisson sample. Sample rate and
        # expected batch size, which refer to all slots, do not tell who is absent: so two data sets that differ by one
        # canary are neighbours by adding or removing one record, with nothing else changed.
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
