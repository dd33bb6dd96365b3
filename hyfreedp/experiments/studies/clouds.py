"""Real losses along the update direction of a training run, and the parabolas that probes see there (notebook 02)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, product, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from tqdm import tqdm

from hyfreedp import QuadraticFit, fit_quadratic
from hyfreedp.experiments.baselines.contrasts import fit_contrasts, privatize_contrasts
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run, one_thread
from hyfreedp.experiments.store.cache import cached, key_of
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.experiments.tasks.scores import losses_of as per_sample_loss_of
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_loss
from hyfreedp.sensitivity import Probe

POINTS = ["ahead", "here", "behind"]  # losses at w - hG, w and w + hG, in the order that probes take them
QUANTILE = 0.8  # of the per-sample contrasts, where their thresholds settle (``contrast_threshold``)


def outlier(task: str, brightness: float) -> tuple[Tensor, Tensor]:
    """A record that does not belong: the first training image, ``brightness`` times as bright, under a wrong label."""
    features, labels = TASKS[task].datasets("test")[0].tensors
    classes = int(labels.max()) + 1
    return brightness * features[:1], (labels[:1] + 1) % classes


def probed_losses(*, spec: dict[str, Any], stages: list[int], brightness: float) -> pd.DataFrame:
    """Raw per-sample losses along the update direction of a training run. NOT private: they only teach.

    Args:
        spec: fields of the :class:`~hyfreedp.experiments.runs.cells.Spec` of the run.
        stages: 0-based steps to look at; each must probe.
        brightness: of the :func:`outlier`, which takes no part in the training.

    Returns:
        One row per record and stage: ``step``, ``distance`` h, ``part`` ("batch": the Poisson batch of that step;
        "train": all training records; "outlier") and the losses ``ahead``, ``here`` and ``behind`` at w - hG, w and
        w + hG.

    Raises:
        ValueError: a stage has no probe or lies behind the end of the run.
    """
    with one_thread():
        chosen = Spec(**spec)
        optimizer, loader = make_run(chosen)
        bad = [t for t in stages if not (0 <= t < optimizer.split.steps and optimizer.split.is_probe_step(t))]
        if bad:
            probes = [t for t in range(optimizer.split.steps) if optimizer.split.is_probe_step(t)]
            raise ValueError(f"stages must be steps with a probe, got {bad}; there are probes at {probes}")
        model = optimizer.module

        per_sample_loss = per_sample_loss_of(model)
        parts = {
            "train": TASKS[chosen.task].datasets(chosen.evaluation)[0].tensors,
            "outlier": outlier(chosen.task, brightness),
        }
        tables = []
        batches = chain.from_iterable(repeat(loader))
        for _ in tqdm(range(max(stages) + 1), desc=f"run with seed {chosen.seed}", unit="step"):
            batch = next(batches)
            start = [parameter.detach().clone() for parameter in model.parameters()]
            record = optimizer.step(per_sample_loss, batch)
            if record.step not in stages:
                continue
            assert record.probe is not None  # checked above
            end = [parameter.detach().clone() for parameter in model.parameters()]
            distance = record.probe.distance
            for part, records in ({"batch": batch} | parts).items():
                losses = {}
                with torch.no_grad():
                    for name, x in zip(POINTS, (distance, 0.0, -distance), strict=True):
                        _move(model.parameters(), start, end, x / record.eta)
                        losses[name] = per_sample_loss(records).double().cpu().numpy()
                tables.append(pd.DataFrame({"step": record.step, "distance": distance, "part": part} | losses))
            _move(model.parameters(), start, end, 1.0)
    return pd.concat(tables, ignore_index=True)


def probed_runs(
    folder: Path, *, epsilon: float, seeds: int, stages: list[int], brightness: float = 16.0
) -> tuple[list[pd.DataFrame], list[str]]:
    """:func:`probed_losses` of method "line_search" with each seed, kept in ``folder``; and the names of the cells."""
    runs: list[dict[str, Any]] = [
        {
            "spec": {"method": "line_search", "epsilon": epsilon, "seed": seed},
            "stages": stages,
            "brightness": brightness,
        }
        for seed in range(seeds)
    ]
    tables = [cached(folder, probed_losses, **arguments) for arguments in runs]
    return tables, [f"cell probed_losses-{key_of(arguments)}" for arguments in runs]


def _move(parameters: Iterable[Tensor], start: Sequence[Tensor], end: Sequence[Tensor], share: float) -> None:
    """Put the weights on the line through ``start`` (share 0) and ``end`` (share 1), which are met exactly."""
    with torch.no_grad():
        for parameter, first, last in zip(parameters, start, end, strict=True):
            parameter.copy_(torch.lerp(first, last, share))


def losses_of(table: pd.DataFrame, step: int, part: str) -> np.ndarray:
    """Losses at (w - hG, w, w + hG), shape ``(3, B)``, of a part of :func:`probed_losses`."""
    return table[(table.step == step) & (table.part == part)][POINTS].to_numpy().T


def distance_of(table: pd.DataFrame, step: int) -> float:
    """h at a step of :func:`probed_losses`."""
    return float(table.distance[table.step == step].iloc[0])


def usual_thresholds(losses: ArrayLike) -> tuple[float, float, float]:
    """(R_l, R_d, R_c) where their rules aim: the mean loss at w (Alg. 1, line 8) and the contrasts' quantile.

    Args:
        losses: shape ``(3, B)``. Raw, so the result is NOT private; a run has them from what it released before.
    """
    ahead, here, behind = np.asarray(losses)
    contrasts = np.abs([behind - ahead, behind + ahead - 2 * here])
    difference, bend = np.quantile(contrasts, QUANTILE, axis=1)
    return float(here.mean()), float(difference), float(bend)


def private_fit(
    losses: Tensor,
    probe: Probe,
    thresholds: tuple[float, float, float],
    noise_multiplier: float,
    *,
    distance: float,
    expected_batch_size: float,
    generator: NoiseGenerator,
) -> QuadraticFit:
    """The parabola that one probe sees.

    Args:
        losses: shape ``(3, B)``.
        probe: "losses" or "contrasts".
        thresholds: (R_l, R_d, R_c).
        noise_multiplier: sigma_l.
        distance: h.
        expected_batch_size: by which sums are divided.
        generator: of the noise.
    """
    arguments: dict[str, Any] = {"expected_batch_size": expected_batch_size, "generator": generator}
    if probe == "contrasts":
        return fit_contrasts(privatize_contrasts(losses, thresholds[1:], noise_multiplier, **arguments), distance)
    released = privatize_loss(losses, thresholds[0], noise_multiplier, **arguments)
    return fit_quadratic([distance, 0.0, -distance], released.tolist())


def clipped_rates(losses: ArrayLike, distance: float) -> dict[str, float]:
    """What clipping alone, without noise, makes of b/a, in units of h.

    Args:
        losses: at (w - hG, w, w + hG), shape ``(3, B)``.
        distance: h.

    Returns:
        ``exact``; ``mean_loss`` and ``sum_of_losses`` from three losses with R_l = L and their sum; ``contrasts`` at
        :func:`usual_thresholds`.
    """
    batch = torch.as_tensor(np.asarray(losses, dtype=np.float64))
    usual = usual_thresholds(losses)
    total = float(batch.mean(dim=1).sum())

    def rate(probe: Probe, loss_threshold: float) -> float:
        fit = private_fit(
            batch,
            probe,
            (loss_threshold, *usual[1:]),
            0.0,
            distance=distance,
            expected_batch_size=batch.shape[1],
            generator=NoiseGenerator(),
        )
        return fit.minimizer / distance

    exact = fit_quadratic([distance, 0.0, -distance], batch.mean(dim=1).tolist()).minimizer / distance
    return {
        "exact": exact,
        "mean_loss": rate("losses", usual[0]),
        "sum_of_losses": rate("losses", total),
        "contrasts": rate("contrasts", usual[0]),
    }


def clouds(
    *,
    losses: list[list[float]],
    distance: float,
    sigmas: dict[Probe, float],
    expected_batch_size: float,
    multiples: list[float],
    runs: int,
    seed: int,
) -> pd.DataFrame:
    """What probes see of one batch when its release is repeated, for several thresholds.

    Args:
        losses: at (w - hG, w, w + hG), shape ``(3, B)``.
        distance: h.
        sigmas: sigma_l of each probe, "losses" or "contrasts".
        expected_batch_size: by which sums are divided.
        multiples: thresholds in units of :func:`usual_thresholds`.
        runs: releases per threshold.
        seed: of the noise.

    Returns:
        One row per probe, multiple and run: ``slope`` b, ``curvature`` a and ``eta`` = b/a.
    """
    batch = torch.tensor(losses, dtype=torch.float64)
    usual = usual_thresholds(losses)
    rows = []
    for probe, sigma in sigmas.items():
        generator = NoiseGenerator(seed)
        for multiple in tqdm(multiples, desc=f"parabolas from {probe}", unit="threshold"):
            scaled = (multiple * usual[0], multiple * usual[1], multiple * usual[2])
            for _ in range(runs):
                fit = private_fit(
                    batch,
                    probe,
                    scaled,
                    sigma,
                    distance=distance,
                    expected_batch_size=expected_batch_size,
                    generator=generator,
                )
                rows.append((probe, multiple, fit.slope, fit.curvature, fit.minimizer))
    return pd.DataFrame(rows, columns=["probe", "multiple", "slope", "curvature", "eta"])


def clipped_fits(
    losses: ArrayLike, distance: float, multiples: Sequence[float], *, expected_batch_size: float
) -> pd.DataFrame:
    """What clipping leaves of slope and curvature, without noise: around it the :func:`clouds` scatter.

    Returns:
        One row per probe and multiple: ``slope`` and ``curvature``.
    """
    batch = torch.as_tensor(np.asarray(losses, dtype=np.float64))
    usual = usual_thresholds(losses)
    probes: tuple[Probe, ...] = ("losses", "contrasts")
    rows = []
    for probe, multiple in product(probes, multiples):
        scaled = (multiple * usual[0], multiple * usual[1], multiple * usual[2])
        known: dict[str, Any] = {"distance": distance, "expected_batch_size": expected_batch_size}
        fit = private_fit(batch, probe, scaled, 0.0, generator=NoiseGenerator(), **known)
        rows.append((probe, multiple, fit.slope, fit.curvature))
    return pd.DataFrame(rows, columns=["probe", "multiple", "slope", "curvature"])


def eta_spread(fits: pd.DataFrame, exact: float) -> pd.DataFrame:
    """How far b/a strays, one row per probe and multiple of :func:`clouds`.

    Args:
        fits: of :func:`clouds`.
        exact: b/a of the raw losses.

    Returns:
        Quantiles ``q5`` to ``q95`` of eta, ``near``: the share within a factor of two of ``exact``, and ``uphill``: the
        share of fits whose slope is negative, and ``concave``: the share whose curvature is.
    """
    grouped = fits.groupby(["probe", "multiple"], sort=False)
    table = grouped.eta.quantile([0.05, 0.25, 0.5, 0.75, 0.95]).unstack()
    table.columns = ["q5", "q25", "q50", "q75", "q95"]
    ratio = fits.eta / exact
    keys = [fits.probe, fits.multiple]
    table["near"] = ratio.between(0.5, 2).groupby(keys).mean()
    table["uphill"] = (fits.slope < 0).groupby(keys).mean()
    table["concave"] = (fits.curvature < 0).groupby(keys).mean()
    return table.reset_index()


def rate_table(probed: Sequence[pd.DataFrame], stages: Sequence[int]) -> pd.DataFrame:
    """:func:`clipped_rates` of the batch of each run at each step."""
    return pd.DataFrame(
        [
            {"step": stage, "seed": seed} | clipped_rates(losses_of(table, stage, "batch"), distance_of(table, stage))
            for stage in stages
            for seed, table in enumerate(probed)
        ]
    )
