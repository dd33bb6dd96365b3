"""Tab. "diff priv" in numbers: why gradients may be normalised and losses may not (notebook 01)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import special
from tqdm import tqdm

from hyfreedp import NoiseSplit, clipping_bias
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
    chosen: list[tuple[str, int, int, NoiseSplit]] = [("digits network", weights, task.batch_size, split)]
    if transformers:
        noise = noise_of(folder, data.budget(epsilon))
        for name, shape in TRANSFORMERS.items():
            chosen.append((f"{name}, {data.title}", transformer_size(**shape, classes=10), data.batch_size, noise))
    return [
        {
            "model": name,
            "dimension": dimension,
            "expected_batch_size": batch_size,
            "sigma_loss": noise.sigma_loss,
            "sigma_gradient": noise.sigma_gradient_probe,
        }
        for name, dimension, batch_size, noise in chosen
    ]


def aspects(magnitudes: pd.DataFrame, losses: np.ndarray, step: int) -> pd.DataFrame:
    """Tab. "diff priv" as printed: loss against gradient, for the first model of :func:`noise_magnitudes`.

    Args:
        magnitudes: of :func:`noise_magnitudes`.
        losses: of one batch at ``step``, shape ``(B,)``.
    """
    loss, gradient = magnitudes.iloc[0], magnitudes.iloc[1]
    bias = clipping_bias(losses, losses.mean()) / losses.mean()
    rows = [
        ("dimension", "1", f"{gradient.dimension:,}"),
        ("clipping norm", "absolute value", "L2"),
        ("noise, in units of the clip", f"{loss.exact:.3g}", f"{gradient.exact:.3g}"),
        (
            "key to convergence",
            f"clipping bias: {bias:.0%} of the loss at R_l = L (step {step}, first seed)",
            f"noise: {gradient.exact:.2g} times the longest signal possible",
        ),
        ("per-sample operation", "clipping", "normalisation"),
    ]
    return pd.DataFrame(rows, columns=["aspect", "loss", "gradient"])


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


def magnitude_findings(magnitudes: pd.DataFrame) -> list[str]:
    """Under the table of ``noise_magnitudes``; the last one is about all its models."""
    by_quantity = magnitudes.groupby("quantity").exact
    ratios = by_quantity.get_group("gradient").to_numpy() / by_quantity.get_group("loss").to_numpy()
    return [
        f"{row.model}, {row.quantity}: noise {row.exact:.3g} times its clip (d = {row.dimension:,}, "
        f"simulated {row.simulated:.3g})"
        for row in magnitudes.itertuples()
    ] + [f"Gradient noise is {min(ratios):,.0f} to {max(ratios):,.0f} times the loss noise, each in units of its clip."]


def magnitude_text(magnitudes: pd.DataFrame) -> str:
    """What the table shows, and how well simulation and formula agree."""
    relative = (magnitudes.simulated / magnitudes.exact - 1).abs().max()
    return (
        f"**What to see.** {magnitude_findings(magnitudes)[-1]} Simulation and formula agree to {relative:.2%}. The "
        "gradient survives because its noise spreads over all directions and averages out over steps; the loss has one "
        "direction, and bias in it stays."
    )
