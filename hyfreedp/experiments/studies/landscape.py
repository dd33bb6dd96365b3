"""The loss along the update direction of a real run, raw and as private probes see it (notebook 04).

Everything computed from raw losses here is NOT private. It shows what a run never sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from hyfreedp import NoiseSplit, QuadraticFit, StepRecord, fit_quadratic
from hyfreedp.experiments.baselines.contrasts import fit_contrasts, privatize_contrasts
from hyfreedp.experiments.baselines.line_search import ContrastResult
from hyfreedp.experiments.models.vision import Model
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run, one_thread
from hyfreedp.experiments.store.cache import cached
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.experiments.tasks.scores import losses_of
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import loss_noise_std, privatize_loss
from hyfreedp.sensitivity import SQUARED_L2_SENSITIVITY

# In units of the probe distance h: where a run probes, and two points more.
PROBED = (1.0, 0.0, -1.0)
FIVE_POINTS = (-1.0, -0.5, 0.0, 0.5, 1.0)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Visit:
    """A probe step of a run, with the losses along its update direction.

    Attributes:
        record: what the run itself released and decided there.
        split: of the run.
        expected_batch_size: by which the run's sums are divided.
        losses: maps points x, in units of the probe distance h, to the raw losses at w - x h G of the step's own
            Poisson batch, shape ``(len(x), B)``.
        rest: the same for the training records that are not in the batch.
    """

    record: StepRecord
    split: NoiseSplit
    expected_batch_size: float
    losses: Callable[[Sequence[float]], Tensor]
    rest: Callable[[Sequence[float]], Tensor]


def visits(spec: Spec, stages: Sequence[float]) -> Iterator[Visit]:
    """Train the run of ``spec`` and stop at some of its probe steps. The run itself is not disturbed.

    Args:
        spec: of the run; its method learns the rate.
        stages: shares of the run in [0, 1]; for each, the nearest step with a probe is taken.

    Raises:
        ValueError: a stage outside [0, 1], or a run without probes.
    """
    if bad := [share for share in stages if not 0 <= share <= 1]:
        raise ValueError(f"stages must be shares of the run in [0, 1], got {bad}")
    optimizer, loader = make_run(spec)
    probes = [t for t in range(optimizer.split.steps) if optimizer.split.is_probe_step(t)]
    if not probes:
        raise ValueError(f"method must probe, got {spec.method!r}, which does not")
    steps = {min(probes, key=lambda t: abs(t - share * optimizer.split.steps)) for share in stages}
    model, architecture = optimizer.module, spec.architecture
    assert isinstance(architecture, Model), "language has no landscape here"
    features, labels = TASKS[spec.task].datasets(spec.evaluation)[0].tensors

    per_sample_loss = losses_of(model)
    batches = chain.from_iterable(repeat(loader))
    for t in tqdm(range(max(steps) + 1), desc=f"{spec.method}, seed {spec.seed}", unit="step"):
        batch = next(batches)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        record = optimizer.step(per_sample_loss, batch)
        if t not in steps:
            continue
        assert record.probe is not None and optimizer.sampler is not None
        end = [parameter.detach().clone() for parameter in model.parameters()]
        outside = np.setdiff1d(np.arange(len(labels)), optimizer.sampler.batch(t))
        # The step went from w to w - eta G, so w - x h G divides that line at x h / eta.
        share = record.probe.distance / record.eta
        along = partial(_losses_along, model, start, end, share, architecture.evaluation_batch_size)
        rest = (features[outside], labels[outside])
        yield Visit(record, optimizer.split, optimizer.expected_batch_size, partial(along, batch), partial(along, rest))


@torch.no_grad()
def _losses_along(
    model: nn.Module,
    start: Sequence[Tensor],
    end: Sequence[Tensor],
    share: float,
    together: int,
    records: tuple[Tensor, Tensor],
    points: Sequence[float],
) -> Tensor:
    """Losses where the line from ``start`` to ``end`` is divided at ``share`` times each point; ends with ``end``."""
    per_sample_loss = losses_of(model)
    parts = list(zip(*(tensor.split(together) for tensor in records), strict=True))
    rows = []
    try:
        for x in points:
            for parameter, first, last in zip(model.parameters(), start, end, strict=True):
                parameter.copy_(torch.lerp(first, last, x * share))
            rows.append(torch.cat([per_sample_loss(part).double().cpu() for part in parts]))
    finally:
        for parameter, last in zip(model.parameters(), end, strict=True):
            parameter.copy_(last)
    return torch.stack(rows)


# -- what is drawn -----------------------------------------------------------------------------------------------------


def loss_curves(
    *, spec: dict[str, Any], stages: list[float], grid: list[float], repeats: int, seed: int
) -> pd.DataFrame:
    """Loss curves of one run at some stages, and the parabolas that private probes fit there.

    Thresholds, noise and probe distance are the run's own at that step.

    Args:
        spec: fields of the run's :class:`~hyfreedp.experiments.runs.cells.Spec`.
        stages: shares of the run, as in :func:`visits`.
        grid: fine points x in units of h, for the raw curve.
        repeats: private fits drawn at each stage, each with new noise.
        seed: of that noise.

    Returns:
        Long form, one row per value: ``step``, ``kind``, ``draw`` (0-based, of noisy kinds), ``x``, ``value``. Kinds:
        "raw" (mean loss on the grid), "points", "clipped", "noised" (means at ``FIVE_POINTS``, or, of a run that probes
        contrasts, "points" alone, at ``PROBED``), "exact fit", "clipped fit", "noised fit" (``x`` is "slope",
        "curvature" or "intercept" of the parabola in x = distance / h through the same points), "run" (``x``:
        "distance" is h, "before" and "after" the run's learning rate around the step, without decay, "threshold" R_l
        or R_d, "noise" the standard deviation of one released mean that it clips).
    """
    rows: list[tuple[Any, ...]] = []
    with one_thread():
        for visit in visits(Spec(**spec), stages):
            probe, generator = visit.record.probe, NoiseGenerator(seed)
            assert probe is not None
            step = visit.record.step

            def add(kind: str, xs: Sequence[Any], values: Sequence[float], draw: int = -1, step: int = step) -> None:
                rows.extend((step, kind, draw, x, value) for x, value in zip(xs, values, strict=True))

            add("raw", grid, visit.losses(grid).mean(dim=1).tolist())
            points = PROBED if probe.loss_threshold is None else FIVE_POINTS
            losses = visit.losses(points)
            add("points", points, losses.mean(dim=1).tolist())
            add("run", *_of_run(visit))
            add("exact fit", *_coefficients(fit_quadratic(points, losses.mean(dim=1).tolist())))
            for draw in range(-1, repeats):
                sigma = 0.0 if draw < 0 else visit.split.sigma_loss
                kind = "clipped" if draw < 0 else "noised"
                fit, means = private_view(losses, points, visit, sigma, generator)
                add(f"{kind} fit", *_coefficients(fit), draw=draw)
                if means is not None:
                    add(kind, points, means, draw=draw)
    return pd.DataFrame(rows, columns=["step", "kind", "draw", "x", "value"])


def private_view(
    losses: Tensor, points: Sequence[float], visit: Visit, sigma: float, generator: NoiseGenerator | None
) -> tuple[QuadraticFit, list[float] | None]:
    """The parabola, in x = distance / h, that a probe sees with the run's own thresholds.

    Args:
        losses: shape ``(len(points), B)``.
        points: x of each row; contrasts are taken from 1, 0 and -1 among them.
        visit: the step.
        sigma: noise of each of three numbers in units of its clip; more losses get as much more as keeps the price
            (:func:`noise_for_points`). 0 shows clipping alone.
        generator: of the noise.

    Returns:
        The fit, and the private means where the run probes losses.
    """
    probe = visit.record.probe
    assert probe is not None
    noise: dict[str, Any] = {"expected_batch_size": visit.expected_batch_size, "generator": generator}
    if probe.loss_threshold is not None:
        sigma = noise_for_points(sigma, len(points))
        means = privatize_loss(losses, probe.loss_threshold, sigma, **noise).tolist()
        std = loss_noise_std(probe.loss_threshold, sigma, visit.expected_batch_size)
        return fit_quadratic(points, means, std), means
    assert isinstance(probe, ContrastResult) and probe.difference_threshold and probe.bend_threshold
    three = losses[[list(points).index(x) for x in PROBED]]
    thresholds = (probe.difference_threshold, probe.bend_threshold)
    return fit_contrasts(privatize_contrasts(three, thresholds, sigma, **noise), 1.0), None


def _of_run(visit: Visit) -> tuple[list[str], list[float]]:
    """Rows of kind "run", see :func:`loss_curves`."""
    probe = visit.record.probe
    assert probe is not None
    threshold = probe.difference_threshold if isinstance(probe, ContrastResult) else probe.loss_threshold
    assert threshold is not None
    noise = visit.split.sigma_loss * threshold / visit.expected_batch_size
    values = {"distance": probe.distance, "before": probe.eta_probed, "after": probe.eta_next}
    values |= {"threshold": threshold, "noise": noise}
    return list(values), list(values.values())


def with_losses(visit: Visit, losses: Tensor) -> Visit:
    """The same step as a probe of three losses would see it at the same price, R_l where its rule aims, at their sum.

    Args:
        visit: of whatever probe.
        losses: raw, at ``PROBED``, shape ``(3, B)``.
    """
    assert visit.record.probe is not None
    probe = replace(visit.record.probe, loss_threshold=losses.mean(dim=1).sum().item())
    price = SQUARED_L2_SENSITIVITY["losses"] / SQUARED_L2_SENSITIVITY[visit.split.probe]
    split = replace(visit.split, sigma_loss=visit.split.sigma_loss * math.sqrt(price))
    return replace(visit, record=replace(visit.record, probe=probe), split=split)


def rate_bands(*, spec: dict[str, Any], stages: list[float], repeats: int, seed: int) -> pd.DataFrame:
    """Where the noise of a probe puts b/a, and what the raw losses say, at each stage of a run.

    Args:
        spec: of the run.
        stages: shares of the run, as in :func:`visits`.
        repeats: private fits per stage.
        seed: of their noise.

    Returns:
        One row per stage, all rates in units of the run's rate there: ``step``; ``eta``, that rate; ``q5`` to ``q95``,
        quantiles of b/a of the run's own kind of probe over new noise; ``exact``, b/a of the raw losses at the same
        three points; ``slope_batch`` and ``curvature_batch``, their b and a (nats, for x = distance / h);
        ``slope_rest`` and ``curvature_rest``, the same on the training records outside the batch; ``right_signs``, the
        share of fits whose b and a have the signs of the raw ones; ``right_signs_losses``, the same of three losses on
        this very batch (:func:`with_losses`); ``slope_std``, the noise of b.
    """
    rows = []
    with one_thread():
        for visit in visits(Spec(**spec), stages):
            probe, generator = visit.record.probe, NoiseGenerator(seed)
            assert probe is not None
            losses, rest = visit.losses(PROBED), visit.rest(PROBED)
            fits, of_losses = (
                [private_view(losses, PROBED, seen, seen.split.sigma_loss, generator)[0] for _ in range(repeats)]
                for seen in (visit, with_losses(visit, losses))
            )
            unit = probe.distance / probe.eta_probed
            rates = unit * np.array([fit.minimizer for fit in fits])
            batch_fit = fit_quadratic(PROBED, losses.mean(dim=1).tolist())
            rest_fit = fit_quadratic(PROBED, rest.mean(dim=1).tolist())
            rows.append(
                {
                    "step": visit.record.step,
                    "eta": probe.eta_probed,
                    **{f"q{round(100 * q)}": np.quantile(rates, q) for q in QUANTILES},
                    "exact": unit * batch_fit.minimizer,
                    "right_signs": np.mean([same_signs(fit, batch_fit) for fit in fits]),
                    "right_signs_losses": np.mean([same_signs(fit, batch_fit) for fit in of_losses]),
                    "slope_batch": batch_fit.slope,
                    "slope_rest": rest_fit.slope,
                    "curvature_batch": batch_fit.curvature,
                    "curvature_rest": rest_fit.curvature,
                    "slope_std": fits[0].slope_std,
                }
            )
    return pd.DataFrame(rows)


def all_bands(
    folder: Path,
    run: dict[str, Any],
    methods: dict[str, str],
    *,
    stages: list[float],
    repeats: int,
    seeds: int,
) -> pd.DataFrame:
    """:func:`rate_bands` of each method and seed, kept in ``folder``, with columns ``probe`` and ``run`` (the seed).

    Args:
        folder: of the tables.
        run: fields of the runs' specs, but for method and seed.
        methods: probe -> method.
        stages, repeats: of :func:`rate_bands`.
        seeds: how many.
    """
    tables = []
    for probe, method in methods.items():
        for seed in range(seeds):
            spec = run | {"method": method, "seed": seed}
            table = cached(folder, rate_bands, spec=spec, stages=stages, repeats=repeats, seed=seed)
            tables.append(table.assign(probe=probe, run=seed))
    return pd.concat(tables)


def same_signs(fit: QuadraticFit, exact: QuadraticFit) -> bool:
    """Whether slope and curvature both point the way they do without clipping and noise; one in four by chance."""
    return fit.slope * exact.slope > 0 and fit.curvature * exact.curvature > 0


def _coefficients(fit: QuadraticFit) -> tuple[list[str], list[float]]:
    return ["slope", "curvature", "intercept"], [fit.slope, fit.curvature, fit.intercept]


# -- what more points would cost ---------------------------------------------------------------------------------------


def noise_for_points(sigma_loss: float, points: int) -> float:
    """sigma_l for a probe of ``points`` losses that costs what one of three costs at ``sigma_loss``.

    Each loss is clipped to [0, R_l], so n losses of one record have squared L2 sensitivity n, in units of R_l. A step's
    effective multiplier (sigma_g^-2 + n sigma_l^-2)^(-1/2) stays the same if sigma_l grows with the square root of n.
    """
    return sigma_loss * math.sqrt(points / SQUARED_L2_SENSITIVITY["losses"])


def price_of_points(sigma_loss: float, counts: Sequence[int]) -> pd.DataFrame:
    """Probes of n losses, evenly spaced from -h to h, at equal privacy.

    Args:
        sigma_loss: sigma_l of three losses.
        counts: values of n, odd and at least 3.

    Returns:
        One row per n: ``points``, ``forwards`` (beside the training's own), ``sigma_loss``, and the noise of slope and
        curvature relative to three points.
    """
    rows = []
    for points in counts:
        sigma = noise_for_points(sigma_loss, points)
        fit = fit_quadratic(np.linspace(-1, 1, points), np.zeros(points), sigma)
        rows.append((points, points - 1, sigma, fit.slope_std, fit.curvature_std))
    table = pd.DataFrame(rows, columns=["points", "forwards", "sigma_loss", "slope_noise", "curvature_noise"])
    three = fit_quadratic([-1.0, 0.0, 1.0], np.zeros(3), sigma_loss)
    table.slope_noise /= three.slope_std
    table.curvature_noise /= three.curvature_std
    return table
