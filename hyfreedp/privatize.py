"""Private means of per-sample gradients, losses and votes, and the bias and noise of a private loss.

Implements Eq. (priv grad), Eq. (loss priv), Theorem 1 and Corollary 1 of the paper. Every sum runs over a Poisson batch
and is divided by the *expected* batch size, so that adding or removing one record changes the result by at most
``clip / expected_batch_size``. An empty batch is released like any other, as pure noise.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import special
from torch import Tensor

from hyfreedp.accounting.split import VOTE_CLIP
from hyfreedp.checks import check_array, check_number, check_type
from hyfreedp.noise import NoiseGenerator, as_generator

# Replaces tensors, in place, by their sums over all processes that train together.
AddUp = Callable[[Sequence[Tensor]], None]

LARGEST_LOSS = 1e100  # losses are clamped to it, so that sums of unclipped ones, of runs without privacy, are finite
LARGEST_SCALE = 1e100  # largest standard deviation of noise; far more would overflow
VOTE_GRID = 2.0**20  # votes are rounded to multiples of its inverse
FINGERPRINT_BOUND = 1e6  # clamps the losses that the noise depends on: with one infinite loss all sums would be equal


def privatize_gradient(
    clipped_sums: list[Tensor],
    noise_multiplier: float,
    *,
    sensitivity: float,
    expected_batch_size: float,
    generator: NoiseGenerator | None,
) -> None:
    """Turn sums of clipped per-sample gradients into their private mean, in place (Eq. "priv grad").

    Args:
        clipped_sums: one tensor per parameter, float32 or float64.
        noise_multiplier: sigma_g >= 0. The noise of each number has standard deviation ``sigma_g * sensitivity``.
        sensitivity: largest L2 norm of one sample's clipped gradient, over all parameters together.
        expected_batch_size, generator: as in :func:`privatize_loss`.
    """
    if noise_multiplier > 0:
        as_generator(generator).add_noise(clipped_sums, noise_multiplier * sensitivity)
    torch._foreach_div_(clipped_sums, expected_batch_size)


def privatize_loss(
    losses: Tensor,
    threshold: float,
    noise_multiplier: float,
    *,
    expected_batch_size: float,
    generator: NoiseGenerator | None = None,
    add_up: AddUp | None = None,
) -> Tensor:
    """Release mean losses: clip each to ``[0, R_l]``, sum, add noise, divide (Eq. "loss priv"). Threat model: WR.

    Args:
        losses: per-sample losses, shape ``(..., B)``, B >= 0. The last dimension is averaged: one call with shape
            ``(3, B)`` releases three probes of a batch. NaN and infinity count as ``threshold``, negative losses as 0,
            without a warning, since that would not be private. Shift a loss that is often negative.
        threshold: R_l > 0, in units of the loss. Infinite only without noise (non-private runs).
        noise_multiplier: sigma_l >= 0. The noise of each sum has standard deviation ``sigma_l R_l``.
        expected_batch_size: sample rate times the number of records, never the size of the actual batch.
        generator: source of the noise; None: a new one, seeded by the operating system.
        add_up: sums tensors over processes, each of which passes the losses of its own samples; None: one process.

    Returns private means, shape ``(...)``, float64, on the CPU. ValueError if an argument is out of range.
    """
    check_type("losses", losses, Tensor, "a tensor, the last dimension of which is the samples")
    check_type("add_up", add_up, Callable | None, "a function of a list of tensors")
    if losses.is_complex():
        raise TypeError(f"losses must be real numbers, got {losses.dtype}")
    threshold = check_number("threshold", threshold, "(0, inf]")
    clipped = finite(losses).clamp(0, threshold)
    return noisy_mean(clipped, threshold, noise_multiplier, expected_batch_size, generator, add_up)


def privatize_votes(
    losses: Tensor,
    noise_multiplier: float,
    *,
    expected_batch_size: float,
    floors: Tensor | None = None,
    steepness: float = 1.0,
    weights: Tensor | None = None,
    generator: NoiseGenerator | None = None,
    add_up: AddUp | None = None,
) -> list[float]:
    """Release mean votes between m + 1 candidate weights of the model: each record votes on each successive pair.

    A record with losses a at one candidate, b at the next, and floor f votes ``(b - a) / (|a| + |b| + f)``, times the
    steepness, clipped to [-1, 1]: where both losses are far below f, little. The private margin of a pair is the sum of
    the votes times their weights, plus noise, over the expected batch size. Votes are bounded without a threshold, and
    all m sums together have L2 sensitivity sqrt(m).

    NaN and infinity count as the largest loss, minus infinity as the smallest; equal losses, also of these, vote 0.
    Why the vote is not the sign of b - a: docs/step_rule.md, "Why not signs".

    Args:
        losses: per-sample losses at each candidate, in order, shape ``(m + 1, B)``, B >= 0 (else ValueError).
        noise_multiplier: sigma_l >= 0, standard deviation of the noise of each sum.
        expected_batch_size, generator, add_up: as in :func:`privatize_loss`.
        floors: f >= 0 of each sample, shape ``(B,)``, from its record and public weights alone; all 0 if None.
        steepness: >= 1, public. The larger, the more votes are near -1 or 1, and stand out from the noise.
        weights: of the samples, in [0, 1], shape ``(B,)``; all 1 if None.

    Returns the m private margins, positive where the batch prefers the former of two candidates.
    """
    if losses.ndim != 2:
        raise ValueError(f"losses must have shape (m + 1, B), got {tuple(losses.shape)}")
    values = finite(losses)
    sizes = values[1:].abs() + values[:-1].abs()
    if floors is not None:
        sizes += finite(floors)
    votes = ((values[1:] - values[:-1]) / sizes).nan_to_num(0.0)  # 0 / 0 is a tie
    votes = (votes * steepness).clamp(-VOTE_CLIP, VOTE_CLIP)
    if weights is not None:
        votes = votes * weights
    votes = (votes * VOTE_GRID).round() / VOTE_GRID  # so that sums are exact, in any order
    # The noise is a function of the un-noised sums (module noise). Since other data may have the same sums of votes,
    # sums of losses are noised with them, and then thrown away.
    rows = torch.cat([votes, values.clamp(-FINGERPRINT_BOUND, FINGERPRINT_BOUND)])
    private = noisy_mean(rows, VOTE_CLIP, noise_multiplier, expected_batch_size, generator, add_up)
    return private[: len(votes)].tolist()


def finite(losses: Tensor) -> Tensor:
    """Losses in float64, clamped to +-1e100 so that sums do not overflow; NaN counts as 1e100."""
    return losses.double().nan_to_num(nan=math.inf).clamp(-LARGEST_LOSS, LARGEST_LOSS)


def noisy_mean(
    clipped: Tensor,
    clip: float,
    noise_multiplier: float,
    expected_batch_size: float,
    generator: NoiseGenerator | None,
    add_up: AddUp | None,
) -> Tensor:
    """Sums of values (..., B) plus noise of standard deviation ``noise_multiplier * clip``, over the expected size.

    Values must be at most ``clip`` in magnitude, which is infinite only without noise. Returns (...), on the CPU.
    """
    _check_noise(noise_multiplier, expected_batch_size)
    total = clipped.sum(dim=-1)
    if add_up is not None:
        add_up([total])
    total = total.cpu()  # few numbers; moved before the noise is drawn, so that the CPU waits for the device only once
    if noise_multiplier > 0:
        if not noise_multiplier * clip <= LARGEST_SCALE:
            raise ValueError(
                f"threshold must be finite when noise_multiplier > 0, and their product at most {LARGEST_SCALE:g}, got "
                f"{clip} and {noise_multiplier}: the sum has no sensitivity"
            )
        as_generator(generator).add_noise([total], noise_multiplier * clip)
    return total / expected_batch_size


def clipping_bias(losses: ArrayLike | Tensor, threshold: ArrayLike) -> float | np.ndarray:
    """By how much clipping lowers the mean of a batch: the mean of ReLU(L_i - R_l) (Theorem 1). Threat model: RAW.

    Args:
        losses: per-sample losses, shape ``(B,)``, B >= 1.
        threshold: one R_l or an array of them; the result has its shape.
    """
    values = check_array("losses", losses)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"losses must have shape (B,) with B >= 1, got shape {values.shape}")
    excess = values - check_array("threshold", threshold)[..., None]
    bias = np.maximum(excess, 0.0).mean(axis=-1)
    return float(bias) if bias.ndim == 0 else bias


def normal_clipping_bias(threshold: ArrayLike, mean: float, std: float) -> float | np.ndarray:
    """Expected clipping bias of losses ~ N(mean, std^2): std * (phi(alpha) - alpha (1 - Phi(alpha))) (Corollary 1).

    Args:
        threshold: one R_l or an array of them; the result has its shape. alpha = (R_l - mean) / std.
        mean, std: of the per-sample loss, std > 0.
    """
    mean, std = check_number("mean", mean), check_number("std", std, "(0, inf]")
    alpha = (check_array("threshold", threshold) - mean) / std
    density = np.exp(-(alpha**2) / 2) / math.sqrt(2 * math.pi)  # phi; scipy.stats takes a second to import
    bias = std * (density - alpha * special.ndtr(-alpha))
    return float(bias) if bias.ndim == 0 else bias


def loss_noise_std(threshold: ArrayLike, noise_multiplier: float, expected_batch_size: float) -> float | np.ndarray:
    """Standard deviation of the noise in a private mean loss, sigma_l R_l / B (Theorem 1); in the threshold's shape."""
    _check_noise(noise_multiplier, expected_batch_size)
    R = check_array("threshold", threshold)
    if noise_multiplier == 0:
        R = np.zeros_like(R)  # it may be infinite, and 0 * inf is NaN
    std = R * (noise_multiplier / expected_batch_size)
    return float(std) if std.ndim == 0 else std


def _check_noise(noise_multiplier: float, expected_batch_size: float) -> None:
    check_number("noise_multiplier", noise_multiplier, "[0, inf)")
    check_number("expected_batch_size", expected_batch_size, "(0, inf)")
