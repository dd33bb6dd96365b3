"""Real losses along the update direction of a training run, and the parabolas that probes see there (notebook 11)."""

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

from hyfreedp import HyFreeDPOptimizer, QuadraticFit, fit_quadratic
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run, one_thread
from hyfreedp.experiments.store.cache import cached, key_of
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.experiments.tasks.scores import losses_of as per_sample_loss_of
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_loss
from hyfreedp.pytorch.records import StepRecord

POINTS = ["ahead", "here", "behind"]  # losses at w - hG, w and w + hG, in the order that probes take them
RUN = {"method": "paper", "learning_rate": 0.01, "interval": 1}  # from the paper's own first rate nothing is learned


def outlier(task: str, brightness: float) -> tuple[Tensor, Tensor]:
    """A record that does not belong: the first training image, ``brightness`` times as bright, under a wrong label."""
    features, labels = TASKS[task].datasets("test")[0].tensors
    classes = int(labels.max()) + 1
    return brightness * features[:1], (labels[:1] + 1) % classes


def probed_losses(*, spec: dict[str, Any], stages: list[int], brightness: float, reach: float = 1.0) -> pd.DataFrame:
    """Raw per-sample losses along the update direction of a training run. NOT private: they only teach.

    Args:
        spec: fields of the :class:`~hyfreedp.experiments.runs.cells.Spec` of the run.
        stages: 0-based steps to look at.
        brightness: of the :func:`outlier`, which takes no part in the training.
        reach: h in units of the rate; Algorithm 1 looks at the rate itself.

    Returns:
        One row per record and stage: ``step``, ``distance`` h, ``part`` ("batch": the Poisson batch of that step;
        "train": all training records; "outlier") and the losses ``ahead``, ``here`` and ``behind`` at w - hG, w and
        w + hG.

    Raises:
        ValueError: a stage lies behind the end of the run.
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


def private_fit(
    losses: Tensor, threshold: float, noise_multiplier: float, *, distance: float, **release: Any
) -> QuadraticFit:
    """The parabola that one probe sees: ``losses`` of shape ``(3, B)``, clipped at R_l and noised with sigma_l.

    ``release`` are the keyword arguments of :func:`hyfreedp.privatize.privatize_loss`.
    """
    released = privatize_loss(losses, threshold, noise_multiplier, **release)
    return fit_quadratic([distance, 0.0, -distance], released.tolist())


def exact_fit(losses: np.ndarray, distance: float) -> QuadraticFit:
    """The parabola through the raw mean losses."""
    return fit_quadratic([distance, 0.0, -distance], losses.mean(axis=1))


def clouds(
    *,
    losses: list[list[float]],
    distance: float,
    noise_multiplier: float,
    expected_batch_size: float,
    multiples: list[float],
    runs: int,
    seed: int,
) -> pd.DataFrame:
    """What probes see of one batch when its release is repeated, for several thresholds.

    Args:
        losses: at (w - hG, w, w + hG), shape ``(3, B)``.
        distance: h.
        noise_multiplier: sigma_l.
        expected_batch_size: by which sums are divided.
        multiples: thresholds in units of the mean loss at w.
        runs: releases per threshold.
        seed: of the noise.

    Returns:
        One row per multiple and run: ``slope`` b, ``curvature`` a and ``eta`` = b/a.
    """
    batch = torch.tensor(losses, dtype=torch.float64)
    known = {"distance": distance, "expected_batch_size": expected_batch_size}
    generator, mean = NoiseGenerator(seed), batch[1].mean().item()
    rows = []
    for multiple in tqdm(multiples, desc="parabolas", unit="threshold"):
        for _ in range(runs):
            fit = private_fit(batch, multiple * mean, noise_multiplier, generator=generator, **known)
            rows.append((multiple, fit.slope, fit.curvature, fit.minimizer))
    return pd.DataFrame(rows, columns=["multiple", "slope", "curvature", "eta"])


def spread_table(fits: pd.DataFrame, exact: float) -> pd.DataFrame:
    """How far b/a strays, one row per multiple of :func:`clouds`.

    Args:
        fits: of :func:`clouds`.
        exact: b/a of the raw losses.

    Returns:
        Quantiles ``q5`` to ``q95`` of eta, ``near``: the share within a factor of two of the exact one, and ``uphill``:
        the share of fits whose slope is negative, and ``concave``: the share whose curvature is.
    """
    ratio = fits.eta / exact
    by = fits.assign(near=ratio.between(0.5, 2), uphill=fits.slope < 0, concave=fits.curvature < 0).groupby("multiple")
    table = by.eta.quantile([0.05, 0.25, 0.5, 0.75, 0.95]).unstack()
    table.columns = ["q5", "q25", "q50", "q75", "q95"]
    return table.join(by[["near", "uphill", "concave"]].mean()).reset_index()
