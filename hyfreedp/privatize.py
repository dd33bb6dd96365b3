"""Private means of per-sample gradients and losses, and what the clipping of losses costs.

Implements Eq. (priv grad), Eq. (loss priv), Theorem 1 and Corollary 1 of the paper. Every sum runs over a Poisson batch
and is divided by the *expected* batch size, so that one record more or less changes it by at most
``clip / expected_batch_size``. An empty batch is released like any other: as pure noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import optimize, special
from torch import Tensor

from hyfreedp.checks import check_choice, check_positive
from hyfreedp.noise import NoiseGenerator, as_generator
from hyfreedp.sensitivity import VOTE_CLIP, LossMechanism

# Turns the sums of one process, in place, into those of all processes that train together; None on a single one.
AddUp = Callable[[Sequence[Tensor]], None]

# Stands for a loss that is not finite: beyond any threshold, yet its square is still finite in float64.
UNBOUNDED_LOSS = 1e100
FINGERPRINT_BOUND = 1e6  # of losses that bind noise: an infinite one must not hide what the others are


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
        sensitivity: largest norm of one sample's clipped gradient over all parameters together.
        expected_batch_size: sample rate times the number of records.
        generator: source of the noise; a new one from the operating system if None.

    Raises:
        TypeError: another kind of generator.
        ValueError: sums in half precision.
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
    mechanism: LossMechanism = "gaussian",
    generator: NoiseGenerator | None = None,
    add_up: AddUp | None = None,
) -> Tensor:
    """Release mean losses: clip each to ``[0, R_l]``, sum, add noise, divide (Eq. "loss priv").

    Args:
        losses: per-sample losses, shape ``(..., B)``, not negative. The last dimension is averaged, so three probes
            of one batch are released by one call with shape ``(3, B)``. B may be 0. NaN and infinities count as
            ``threshold``.
        threshold: R_l > 0, in units of the loss. Infinite only without noise (non-private runs).
        noise_multiplier: sigma_l >= 0. The noise of each sum has standard deviation ``sigma_l R_l`` (Gaussian), or
            scale ``sigma_l R_l`` and so standard deviation ``sqrt(2) sigma_l R_l`` (Laplace).
        expected_batch_size: sample rate times the number of records, never the size of the batch at hand.
        mechanism: "gaussian" or "laplace".
        generator: source of the noise; a new one from the operating system if None.
        add_up: adds up the sums of several processes before the noise; each then passes the losses of its own samples.

    Returns:
        Private means, shape ``(...)``, float64, on the CPU.

    Raises:
        ValueError: an argument is out of range, or a loss is negative (clipping would silently make it zero).
    """
    check_positive("threshold", threshold)
    if bool((losses < 0).any()):
        raise ValueError("losses must not be negative: they are clipped to [0, threshold]. Shift the loss")
    return clipped_mean(losses, threshold, noise_multiplier, expected_batch_size, mechanism, generator, add_up)


def clipped_mean(
    losses: Tensor,
    threshold: float,
    noise_multiplier: float,
    expected_batch_size: float,
    mechanism: LossMechanism,
    generator: NoiseGenerator | None,
    add_up: AddUp | None,
) -> Tensor:
    """:func:`privatize_loss` of losses that are known not to be negative: to ask would wait for their device."""
    finite = losses.double().nan_to_num(nan=UNBOUNDED_LOSS, posinf=UNBOUNDED_LOSS)
    return noisy_mean(
        finite.clamp(max=threshold), threshold, noise_multiplier, expected_batch_size, mechanism, generator, add_up
    )


def privatize_votes(
    losses: Tensor,
    rival: Tensor,
    noise_multiplier: float,
    *,
    expected_batch_size: float,
    weights: Tensor | None = None,
    mechanism: LossMechanism = "gaussian",
    generator: NoiseGenerator | None = None,
    add_up: AddUp | None = None,
) -> float:
    """Release by how much of the batch the present weights beat others: each record has one vote.

    The sum of w_i sign(l_i(rival) - l_i(present)), plus noise, over the expected batch size. A record adds -w_i, 0 or
    w_i whatever its losses are, so the sum has sensitivity 1: no threshold, and no scale. NaN and infinity are the
    worst of losses, minus infinity is the best; ties, also of two such, add 0.

    Args:
        losses: per-sample losses of the present weights, shape ``(B,)``. B may be 0.
        rival: those of the other weights, same shape.
        noise_multiplier: sigma_l >= 0, of the noise of the sum: standard deviation (Gaussian) or scale (Laplace).
        expected_batch_size: sample rate times the number of records, never the size of the batch at hand.
        weights: of the samples, in [0, 1], shape ``(B,)``; all 1 if None.
        mechanism: "gaussian" or "laplace".
        generator: source of the noise; a new one from the operating system if None.
        add_up: adds up the sums of several processes before the noise; each then passes the losses of its own samples.

    Returns:
        The private margin: 1 if all prefer the present weights, -1 if all prefer the others, but for noise and for the
        random size of the batch.

    Raises:
        ValueError: the shapes differ, or an argument is out of range.
    """
    if losses.shape != rival.shape or losses.ndim != 1:
        raise ValueError(f"losses and rival must have the same shape (B,), got {losses.shape} and {rival.shape}")
    here, there = (values.double().masked_fill(values.isnan(), math.inf) for values in (losses, rival))
    votes = (there > here).double() - (there < here).double()
    if weights is not None:
        votes = votes * weights
    # The sum of the votes is a small integer, which other data may have, too. Two more sums get noise beside it and are
    # thrown away: so the noise is bound to the losses themselves, see module noise.
    fingerprints = torch.stack([here, there]).clamp(-FINGERPRINT_BOUND, FINGERPRINT_BOUND)
    sums = torch.cat([votes[None], fingerprints])
    return noisy_mean(sums, VOTE_CLIP, noise_multiplier, expected_batch_size, mechanism, generator, add_up)[0].item()


def clipping_bias(losses: ArrayLike | Tensor, threshold: ArrayLike) -> float | np.ndarray:
    """How far clipping lowers the mean of a batch: the mean of ReLU(L_i - R_l) (Theorem 1).

    Args:
        losses: per-sample losses, shape ``(B,)``, B >= 1.
        threshold: one R_l or an array of them; the result has its shape.

    Raises:
        ValueError: ``losses`` is not one-dimensional or is empty.
    """
    values = np.asarray(losses, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"losses must have shape (B,) with B >= 1, got shape {values.shape}")
    excess = values - np.asarray(threshold, dtype=np.float64)[..., None]
    bias = np.maximum(excess, 0.0).mean(axis=-1)
    return float(bias) if bias.ndim == 0 else bias


def normal_clipping_bias(threshold: ArrayLike, mean: float, std: float) -> float | np.ndarray:
    """Clipping bias of losses ~ N(mean, std^2) as B grows: std * (phi(alpha) - alpha (1 - Phi(alpha))) (Corollary 1).

    Args:
        threshold: one R_l or an array of them; the result has its shape. alpha = (R_l - mean) / std.
        mean, std: of the per-sample loss, std > 0.

    Raises:
        ValueError: ``std`` is not positive.
    """
    check_positive("std", std)
    alpha = (np.asarray(threshold, dtype=np.float64) - mean) / std
    density = np.exp(-(alpha**2) / 2) / math.sqrt(2 * math.pi)  # scipy.stats would take a second to import
    bias = std * (density - alpha * special.ndtr(-alpha))
    return float(bias) if bias.ndim == 0 else bias


def loss_noise_std(
    threshold: ArrayLike, noise_multiplier: float, expected_batch_size: float, mechanism: LossMechanism = "gaussian"
) -> float | np.ndarray:
    """Standard deviation of the noise in one private mean: sigma_l R_l / B, times sqrt(2) for Laplace (Theorem 1).

    Raises:
        ValueError: an argument is out of range.
    """
    _check_noise(noise_multiplier, expected_batch_size, mechanism)
    unit = 1.0 if mechanism == "gaussian" else math.sqrt(2)
    std = np.asarray(threshold, dtype=np.float64)
    if noise_multiplier == 0:
        std = np.zeros_like(std)  # also for the infinite threshold of a non-private run
    else:
        std = std * (unit * noise_multiplier / expected_batch_size)
    return float(std) if std.ndim == 0 else std


def normal_mse(
    threshold: ArrayLike,
    mean: float,
    std: float,
    *,
    noise_multiplier: float,
    expected_batch_size: float,
    mechanism: LossMechanism = "gaussian",
) -> float | np.ndarray:
    """Squared clipping bias plus noise variance of the private mean of N(mean, std^2) losses (Theorem 1, Corollary 1).

    The error is that against the mean of the batch as B grows: the randomness of the batch itself is not counted.
    """
    bias = normal_clipping_bias(threshold, mean, std)
    noise = loss_noise_std(threshold, noise_multiplier, expected_batch_size, mechanism)
    return bias**2 + noise**2


def optimal_threshold(
    mean: float,
    std: float,
    *,
    noise_multiplier: float,
    expected_batch_size: float,
    mechanism: LossMechanism = "gaussian",
) -> float:
    """The R_l > 0 that minimises :func:`normal_mse`.

    The derivative of the MSE vanishes where ``bias(R) P(L > R) = (noise std per unit of R)^2 R``; the left side falls
    with R, the right side grows, so the root is unique.

    Raises:
        ValueError: an argument is out of range; the noise must be positive, since without it no finite optimum exists.
    """
    check_positive("std", std)
    unit_variance = loss_noise_std(1.0, noise_multiplier, expected_batch_size, mechanism) ** 2
    check_positive("noise_multiplier", noise_multiplier)

    def slope(threshold: float) -> float:
        tail = special.ndtr((mean - threshold) / std)
        return normal_clipping_bias(threshold, mean, std) * tail - unit_variance * threshold

    upper = max(mean, 0.0) + std
    while slope(upper) > 0:
        upper *= 2
    return float(optimize.brentq(slope, 0.0, upper, xtol=1e-15 * upper, rtol=1e-14))


def noisy_mean(
    clipped: Tensor,
    clip: float,
    noise_multiplier: float,
    expected_batch_size: float,
    mechanism: LossMechanism,
    generator: NoiseGenerator | None,
    add_up: AddUp | None,
) -> Tensor:
    """Sum over the last dimension, plus noise of scale ``noise_multiplier * clip``, over the expected batch size.

    Args:
        clipped: per-sample values, shape ``(..., B)``, of which one record changes each sum by at most ``clip``.
        clip: infinite only without noise.
        noise_multiplier, expected_batch_size, mechanism, generator, add_up: as in :func:`privatize_loss`.

    Returns:
        Shape ``(...)``, on the CPU.

    Raises:
        ValueError: an argument is out of range.
    """
    _check_noise(noise_multiplier, expected_batch_size, mechanism)
    total = clipped.sum(dim=-1)
    if add_up is not None:
        add_up([total])
    total = total.cpu()  # a few numbers, which are needed there: noised here, they wait for the device only once
    if noise_multiplier > 0:
        if math.isinf(clip):
            raise ValueError("threshold must be finite when noise_multiplier > 0, got inf: the sum has no sensitivity")
        as_generator(generator).add_noise([total], noise_multiplier * clip, mechanism)
    return total / expected_batch_size


def _check_noise(noise_multiplier: float, expected_batch_size: float, mechanism: str) -> None:
    if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
        raise ValueError(f"noise_multiplier must be finite and at least 0, got {noise_multiplier}")
    if not (expected_batch_size > 0 and math.isfinite(expected_batch_size)):
        raise ValueError(f"expected_batch_size must be finite and positive, got {expected_batch_size}")
    check_choice("mechanism", mechanism, LossMechanism)
