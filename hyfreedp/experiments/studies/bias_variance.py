"""What the threshold R_l costs: bias and noise of private losses in theory and simulation (notebook 01)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy import special
from tqdm import tqdm

from hyfreedp import NoiseSplit, calibrate_noise, clipping_bias, normal_clipping_bias
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import loss_noise_std, normal_mse, privatize_gradient, privatize_loss
from hyfreedp.sensitivity import LossMechanism

# Published vision transformers on 224 x 224 images in patches of 16 x 16.
TRANSFORMERS = {"ViT-Small": {"width": 384, "depth": 12}, "ViT-Base": {"width": 768, "depth": 12}}


def calibrated(**arguments: Any) -> pd.DataFrame:
    """One row: the fields of :func:`hyfreedp.calibrate_noise`'s split, and the arguments it was made with."""
    return pd.DataFrame([calibrate_noise(**arguments).to_dict()])


def split_of(table: pd.DataFrame) -> NoiseSplit:
    """The split in the one row of :func:`calibrated`, which may have been a CSV file in between."""
    (values,) = table.to_dict("records")
    if not isinstance(values["reason"], str):  # an empty text comes back as NaN
        values["reason"] = ""
    return NoiseSplit.from_dict({str(name): value for name, value in values.items()})


# -- Theorem 1 and Corollary 1 -----------------------------------------------------------------------------------------


def normal_bias_dots(
    *, mean: float, std: float, batch_size: int, alphas: list[float], batches: int, seed: int
) -> pd.DataFrame:
    """Corollary 1 by simulation: the mean of Theorem 1's clipping bias over batches of N(mean, std^2) losses.

    Args:
        mean, std: of the losses.
        batch_size: B of each batch.
        alphas: thresholds as alpha = (R_l - mean) / std.
        batches: how many batches.
        seed: of the losses.

    Returns:
        One row per alpha: ``bias`` in units of ``std``, its standard ``error``, and ``spread``, the standard deviation
        of the bias from batch to batch.
    """
    draws = NoiseGenerator(seed).normal(batches, batch_size).mul_(std).add_(mean).numpy()
    thresholds = mean + std * np.asarray(alphas)
    biases = np.array([clipping_bias(batch, thresholds) for batch in draws]) / std
    spread = biases.std(axis=0, ddof=1)
    return pd.DataFrame(
        {"alpha": alphas, "bias": biases.mean(axis=0), "error": spread / math.sqrt(batches), "spread": spread}
    )


def release_dots(
    losses: ArrayLike,
    thresholds: Iterable[float],
    *,
    noise_multiplier: float,
    expected_batch_size: float,
    runs: int,
    seed: int,
) -> pd.DataFrame:
    """Theorem 1 by simulation: one batch, released many times by :func:`hyfreedp.privatize_loss`.

    Args:
        losses: per-sample losses of the batch, shape ``(B,)``, or of one batch per run, shape ``(runs, B)``.
        thresholds: values of R_l.
        noise_multiplier: sigma_l.
        expected_batch_size: by which the sums are divided.
        runs: releases per threshold.
        seed: of the noise.

    Returns:
        One row per threshold: ``bias`` (mean loss less mean release), ``noise`` (standard deviation of the releases
        about the clipped means), ``rmse`` (root mean squared distance to the mean loss), each with its standard error
        ``*_error``.
    """
    batch = torch.as_tensor(np.asarray(losses, dtype=np.float64))
    batch = batch.expand(runs, batch.shape[-1])
    generator = NoiseGenerator(seed)
    rows = []
    for threshold in thresholds:
        arguments: dict[str, Any] = {"expected_batch_size": expected_batch_size, "generator": generator}
        released = privatize_loss(batch, threshold, noise_multiplier, **arguments)
        error = (released - batch.sum(dim=1) / expected_batch_size).numpy()
        noise = (released - privatize_loss(batch, threshold, 0.0, **arguments)).numpy()
        rmse = math.sqrt(np.mean(error**2))
        rows.append(
            {
                "threshold": threshold,
                "bias": -error.mean(),
                "bias_error": error.std(ddof=1) / math.sqrt(runs),
                "noise": noise.std(ddof=1),
                "noise_error": noise.std(ddof=1) / math.sqrt(2 * (runs - 1)),
                "rmse": rmse,
                "rmse_error": np.std(error**2, ddof=1) / math.sqrt(runs) / (2 * rmse),
            }
        )
    return pd.DataFrame(rows)


def normal_errors(
    thresholds: ArrayLike,
    *,
    mean: float,
    std: float,
    noise_multiplier: float,
    expected_batch_size: float,
    mechanism: LossMechanism = "gaussian",
) -> pd.DataFrame:
    """Bias, noise and their root mean square for N(mean, std^2) losses against R_l: the library's closed forms."""
    noise: dict[str, Any] = {
        "noise_multiplier": noise_multiplier,
        "expected_batch_size": expected_batch_size,
        "mechanism": mechanism,
    }
    return pd.DataFrame(
        {
            "threshold": thresholds,
            "bias": normal_clipping_bias(thresholds, mean, std),
            "noise": loss_noise_std(thresholds, **noise),
            "rmse": np.sqrt(normal_mse(thresholds, mean, std, **noise)),
        }
    )


def batch_errors(
    losses: ArrayLike, thresholds: ArrayLike, *, noise_multiplier: float, expected_batch_size: float
) -> pd.DataFrame:
    """The same for real losses, whatever their distribution (Theorem 1).

    Args:
        losses: of one batch, shape ``(B,)``, or of several probes of it, shape ``(n, B)``: the bias is then the root
            mean square of theirs.
        thresholds: values of R_l.
        noise_multiplier: sigma_l.
        expected_batch_size: by which sums are divided.
    """
    biases = np.array([clipping_bias(probe, thresholds) for probe in np.atleast_2d(np.asarray(losses))])
    bias = np.sqrt(np.mean(biases**2, axis=0))
    noise = np.asarray(loss_noise_std(thresholds, noise_multiplier, expected_batch_size))
    return pd.DataFrame({"threshold": thresholds, "bias": bias, "noise": noise, "rmse": np.hypot(bias, noise)})


# -- Tab. "diff priv" --------------------------------------------------------------------------------------------------


def noise_norm(dimension: int) -> float:
    """E||z|| for z ~ N(0, I_d): sqrt(2) Gamma((d+1)/2) / Gamma(d/2). It is sqrt(2/pi) for d = 1 and nears sqrt(d)."""
    return math.sqrt(2) * float(special.poch(dimension / 2, 0.5))


def transformer_size(*, width: int, depth: int, classes: int, patch: int = 16, image: int = 224) -> int:
    """Parameters of a vision transformer (Dosovitskiy et al., 2021) with biases and an MLP four times as wide."""
    patches = (image // patch) ** 2
    embedding = 3 * patch**2 * width + width + (patches + 1) * width + width  # patches, positions, class token
    attention = 4 * width**2 + 4 * width
    mlp = 8 * width**2 + 5 * width
    norms = 2 * 2 * width
    return embedding + depth * (attention + mlp + norms) + 2 * width + classes * (width + 1)


def noise_magnitudes(*, models: list[dict[str, Any]], seeds: int) -> pd.DataFrame:
    """Tab. "diff priv" in numbers: how large the noise of the private loss and gradient is, in units of their clip.

    Args:
        models: each with ``model`` (a name), ``dimension`` d, ``expected_batch_size`` B, ``sigma_loss`` and
            ``sigma_gradient``.
        seeds: repetitions of the simulation, which releases sums that are zero, so that only the noise is left.

    Returns:
        Two rows per model, ``quantity`` "loss" and "gradient": ``dimension``, ``noise_multiplier``,
        ``expected_batch_size``, ``formula`` (as printed: sqrt(2/pi) sigma_l / B and sqrt(d) sigma_g / B), ``exact``
        (E||z|| sigma / B), ``simulated`` with its standard ``error``.
    """
    rows = []
    for model in tqdm(models, desc="noise magnitudes", unit="model"):
        expected = model["expected_batch_size"]
        for quantity, dimension, sigma in (
            ("loss", 1, model["sigma_loss"]),
            ("gradient", model["dimension"], model["sigma_gradient"]),
        ):
            if quantity == "loss":
                empty = torch.zeros(10_000 * seeds, 0)  # a release of no losses, many times
                generator = NoiseGenerator(0)
                norms = privatize_loss(empty, 1.0, sigma, expected_batch_size=expected, generator=generator).abs()
            else:
                norms = torch.tensor([_gradient_noise(dimension, sigma, expected, seed) for seed in range(seeds)])
            rows.append(
                {
                    "model": model["model"],
                    "quantity": quantity,
                    "dimension": dimension,
                    "noise_multiplier": sigma,
                    "expected_batch_size": expected,
                    "formula": math.sqrt(2 / math.pi if quantity == "loss" else dimension) * sigma / expected,
                    "exact": noise_norm(dimension) * sigma / expected,
                    "simulated": norms.mean().item(),
                    "error": norms.std().item() / math.sqrt(len(norms)) if len(norms) > 1 else math.nan,
                }
            )
    return pd.DataFrame(rows)


def _gradient_noise(dimension: int, sigma: float, expected_batch_size: float, seed: int, piece: int = 2**22) -> float:
    """Norm of one noise vector, drawn in pieces to save memory."""
    generator = NoiseGenerator(seed)
    squared = 0.0
    for start in range(0, dimension, piece):
        part = torch.zeros(min(piece, dimension - start))
        privatize_gradient([part], sigma, sensitivity=1.0, expected_batch_size=expected_batch_size, generator=generator)
        squared += part.double().square().sum().item()
    return math.sqrt(squared)
