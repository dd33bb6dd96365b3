"""Raw losses along the update direction of real runs (notebooks 01 and 11).

They are NOT private: they show what a private run never sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run
from hyfreedp.experiments.store.files import cached, key_of
from hyfreedp.experiments.store.provenance import one_thread
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.experiments.tasks.scores import losses_of as per_sample_loss_of

POINTS = ["ahead", "here", "behind"]  # losses at w - hG, w and w + hG, in the order that probes take them
RUN = {"method": "paper", "learning_rate": 0.01, "interval": 1}  # the paper's own first rate is too low to learn


def outlier(task: str, brightness: float) -> tuple[Tensor, Tensor]:
    """An outlier, features (1, d) and label (1,): the first image, ``brightness`` times as bright, mislabelled."""
    features, labels = TASKS[task].datasets("test")[0].tensors
    classes = int(labels.max()) + 1
    return brightness * features[:1], (labels[:1] + 1) % classes


def probed_losses(*, spec: dict[str, Any], stages: list[int], brightness: float, reach: float = 1.0) -> pd.DataFrame:
    """Raw per-sample losses along the update direction of a run, at 0-based steps ``stages``. NOT private.

    Args:
        spec: fields of the run's spec.
        stages: steps, in [0, T).
        brightness: of the :func:`outlier`, which is not trained on.
        reach: h as a multiple of the rate; 1 in Algorithm 1.

    Returns:
        One row per record and stage: ``step``, ``distance`` h, ``part`` ("batch", "train": all training records,
        "outlier") and the losses ``ahead``, ``here`` and ``behind`` at w - hG, w and w + hG.
    """
    with one_thread():
        chosen = Spec(**spec)
        optimizer, loader = make_run(chosen)
        if not all(0 <= t < optimizer.split.steps for t in stages):
            raise ValueError(f"stages must be steps of the run, 0 to {optimizer.split.steps - 1}, got {stages}")
        parts = {
            "train": TASKS[chosen.task].datasets(chosen.evaluation)[0].tensors,
            "outlier": outlier(chosen.task, brightness),
        }
        per_sample_loss, weights = per_sample_loss_of(optimizer.module), list(optimizer.module.parameters())
        batches, tables = chain.from_iterable(repeat(loader)), []
        for t in tqdm(range(max(stages) + 1), desc=f"run with seed {chosen.seed}", unit="step"):
            batch, before = next(batches), [weight.detach().clone() for weight in weights]
            record = optimizer.step(per_sample_loss, batch)
            if t not in stages:
                continue
            after = [weight.detach().clone() for weight in weights]
            for part, records in ({"batch": batch} | parts).items():
                columns: dict[str, Any] = {"step": record.step, "distance": reach * record.eta, "part": part}
                with torch.no_grad():
                    for name, x in zip(POINTS, (reach, 0.0, -reach), strict=True):
                        _move(weights, before, after, x)
                        columns[name] = per_sample_loss(records).double().cpu().numpy()
                tables.append(pd.DataFrame(columns))
            _move(weights, before, after, 1.0)
    return pd.concat(tables, ignore_index=True)


@torch.no_grad()
def _move(weights: Sequence[Tensor], before: Sequence[Tensor], after: Sequence[Tensor], x: float) -> None:
    """Set ``weights`` to w + x (w' - w), with w from ``before`` and w' from ``after`` a step."""
    for weight, first, last in zip(weights, before, after, strict=True):
        weight.copy_(torch.lerp(first, last, x))


def probed_runs(
    folder: Path, *, epsilon: float, seeds: int, stages: list[int], brightness: float = 16.0, reach: float = 1.0
) -> tuple[list[pd.DataFrame], list[str]]:
    """:func:`probed_losses` of ``RUN``, one table per seed, cached in ``folder``; and the names of these cells."""
    runs: list[dict[str, Any]] = [
        {"spec": RUN | {"epsilon": epsilon, "seed": seed}, "stages": stages, "brightness": brightness, "reach": reach}
        for seed in range(seeds)
    ]
    tables = [cached(folder, probed_losses, **arguments) for arguments in runs]
    return tables, [f"cell probed_losses-{key_of(arguments)}" for arguments in runs]


def losses_of(table: pd.DataFrame, step: int, part: str) -> np.ndarray:
    """Losses at (w - hG, w, w + hG), shape (3, B), from a table of :func:`probed_losses`."""
    return table[(table.step == step) & (table.part == part)][POINTS].to_numpy().T


def distance_of(table: pd.DataFrame, step: int) -> float:
    """h at this step, from a table of :func:`probed_losses`."""
    return float(table.distance[table.step == step].iloc[0])
