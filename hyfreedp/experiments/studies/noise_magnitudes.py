"""Tab. "diff priv" in numbers: why gradients may be normalised and losses may not (notebook 01)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from scipy import special
from tqdm import tqdm

from hyfreedp import NoiseSplit
from hyfreedp.experiments.studies.bias_variance import noise_of
from hyfreedp.experiments.studies.noise_split import DATA_SETS
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_gradient, privatize_loss

# Published vision transformers on 224 x 224 images in patches of 16 x 16.
TRANSFORMERS = {"ViT-Small": {"width": 384, "depth": 12}, "ViT-Base": {"width": 768, "depth": 12}}


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


def paper_models(folder: Path, split: NoiseSplit, epsilon: float, *, transformers: bool) -> list[dict[str, Any]]:
    """Models for :func:`noise_magnitudes`: the digits network at ``split`` and, if asked for, two vision transformers.

    The transformers are on CIFAR-10 at ``epsilon``, with noise from ``folder``, see :func:`noise_of`.
    """
    task, data = TASKS["digits"], DATA_SETS[0]
    weights = sum(parameter.numel() for parameter in task.model(seed=0).parameters())
    chosen = [("digits network", weights, task.batch_size, split)]
    if transformers:
        noise = noise_of(folder, data.budget(epsilon))
        for name, shape in TRANSFORMERS.items():
            chosen.append((f"{name}, {data.title}", transformer_size(**shape, classes=10), data.batch_size, noise))
    return [
        {"model": name, "dimension": dimension, "expected_batch_size": batch_size}
        | {"sigma_loss": noise.sigma_loss, "sigma_gradient": noise.sigma_gradient_probe}
        for name, dimension, batch_size, noise in chosen
    ]


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
