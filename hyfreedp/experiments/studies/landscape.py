"""The loss along the update direction of real runs, raw and as private probes see it (notebooks 01 and 11).

Everything computed from raw losses here is NOT private. It shows what a run never sees.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from hyfreedp import HyFreeDPOptimizer
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run, one_thread
from hyfreedp.experiments.store.cache import cached, key_of
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.experiments.tasks.scores import losses_of as per_sample_loss_of
from hyfreedp.pytorch.records import StepRecord

POINTS = ["ahead", "here", "behind"]  # losses at w - hG, w and w + hG, in the order that probes take them
RUN = {"method": "paper", "learning_rate": 0.01, "interval": 1}  # from the paper's own first rate nothing is learned


def outlier(task: str, brightness: float) -> tuple[Tensor, Tensor]:
    """A record that does not belong: the first training image, ``brightness`` times as bright, under a wrong label."""
    features, labels = TASKS[task].datasets("test")[0].tensors
    classes = int(labels.max()) + 1
    return brightness * features[:1], (labels[:1] + 1) % classes


def probed_losses(*, spec: dict[str, Any], stages: list[int], brightness: float, reach: float = 1.0) -> pd.DataFrame:
    """Raw per-sample losses along the update direction of a run, at 0-based steps ``stages``. NOT private.

    Args:
        brightness: of the :func:`outlier`, which takes no part in the training.
        reach: h in units of the rate; Algorithm 1 looks at the rate itself.

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
        tables = []
        for record, batch, along in visits(optimizer, loader, stages, f"run with seed {chosen.seed}"):
            for part, records in ({"batch": batch} | parts).items():
                losses = dict(zip(POINTS, along((reach, 0.0, -reach), records).numpy(), strict=True))
                named = {"step": record.step, "distance": reach * record.eta, "part": part}
                tables.append(pd.DataFrame(named | losses))
    return pd.concat(tables, ignore_index=True)


def probed_runs(
    folder: Path, *, epsilon: float, seeds: int, stages: list[int], brightness: float = 16.0, reach: float = 1.0
) -> tuple[list[pd.DataFrame], list[str]]:
    """:func:`probed_losses` of ``RUN`` with each seed, kept in ``folder``; and the names of the cells."""
    runs: list[dict[str, Any]] = [
        {"spec": RUN | {"epsilon": epsilon, "seed": seed}, "stages": stages, "brightness": brightness, "reach": reach}
        for seed in range(seeds)
    ]
    tables = [cached(folder, probed_losses, **arguments) for arguments in runs]
    return tables, [f"cell probed_losses-{key_of(arguments)}" for arguments in runs]


Along = Callable[[Sequence[float], Any], Tensor]


def visits(
    optimizer: HyFreeDPOptimizer, loader: Iterable[Any], steps: Collection[int], label: str
) -> Iterator[tuple[StepRecord, Any, Along]]:
    """Train to the last of these steps; at each of them the record, the batch and the raw losses along the update.

    The losses are a function of points x and of records: at w + x (w' - w), where w and w' are the weights before and
    after the step, shape ``(n, B)``, float64. The run itself is not disturbed.
    """
    per_sample_loss, parameters = per_sample_loss_of(optimizer.module), list(optimizer.module.parameters())
    batches = chain.from_iterable(repeat(loader))
    for t in tqdm(range(max(steps) + 1), desc=label, unit="step"):
        batch = next(batches)
        start = [parameter.detach().clone() for parameter in parameters]
        record = optimizer.step(per_sample_loss, batch)
        if t not in steps:
            continue
        end = [parameter.detach().clone() for parameter in parameters]

        @torch.no_grad()
        def move(share: float, start: list[Tensor] = start, end: list[Tensor] = end) -> None:
            for parameter, first, last in zip(parameters, start, end, strict=True):
                parameter.copy_(torch.lerp(first, last, share))

        @torch.no_grad()
        def along(points: Sequence[float], records: Any) -> Tensor:
            rows = []
            for x in points:
                move(x)
                rows.append(per_sample_loss(records).double().cpu())
            return torch.stack(rows)

        yield record, batch, along
        move(1.0)


def losses_of(table: pd.DataFrame, step: int, part: str) -> np.ndarray:
    """Losses at (w - hG, w, w + hG), shape ``(3, B)``, of a part of :func:`probed_losses`."""
    return table[(table.step == step) & (table.part == part)][POINTS].to_numpy().T


def distance_of(table: pd.DataFrame, step: int) -> float:
    """h at a step of :func:`probed_losses`."""
    return float(table.distance[table.step == step].iloc[0])
