"""Contrasts of losses in place of the losses: their private release, the parabola from them, and their thresholds.

Pure functions. Sums and expected batch sizes are as in :mod:`hyfreedp.privatize`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy import special
from torch import Tensor

from hyfreedp.checks import check_positive
from hyfreedp.curvefit import QuadraticFit
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import UNBOUNDED_LOSS, AddUp, loss_noise_std, noisy_mean
from hyfreedp.sensitivity import LossMechanism


@dataclass(frozen=True)
class PrivateContrasts:
    """What one probe releases in place of three losses (units of the loss unless said otherwise).

    Attributes:
        difference: private mean of d_i = L_i(w + hG) - L_i(w - hG).
        bend: private mean of c_i = L_i(w + hG) + L_i(w - hG) - 2 L_i(w).
        difference_std, bend_std: standard deviations of the noise in the two.
        fractions: noisy shares of the expected batch with |d_i| <= R_d and with |c_i| <= R_c; nominally in [0, 1].
    """

    difference: float
    bend: float
    difference_std: float
    bend_std: float
    fractions: tuple[float, float]


def privatize_contrasts(
    losses: Tensor,
    thresholds: tuple[float, float],
    noise_multiplier: float,
    *,
    expected_batch_size: float,
    mechanism: LossMechanism = "gaussian",
    generator: NoiseGenerator | None = None,
    add_up: AddUp | None = None,
) -> PrivateContrasts:
    """Release the two signed contrasts that hold slope and curvature, and how many samples lie within their thresholds.

    Each sample contributes four coordinates. Gaussian: (d/R_d, c/R_c) clipped jointly to L2 norm 1, and +-1/2 for
    whether |d| <= R_d and whether |c| <= R_c: squared L2 norm at most 1.5. Laplace: d/2R_d and c/2R_c each clipped to
    +-1/2 and the same two indicators: at most 1/2 per coordinate. The accountant assumes these sensitivities.

    Args:
        losses: per-sample losses at (w - hG, w, w + hG), shape ``(3, B)``, of any sign. B may be 0. Losses that are not
            finite count as very large ones.
        thresholds: (R_d, R_c), positive, in units of the loss. Both infinite only without noise (non-private runs).
        noise_multiplier: sigma_l >= 0, noise (standard deviation or Laplace scale) of each of the four sums.
        expected_batch_size: sample rate times the number of records.
        mechanism: "gaussian" or "laplace".
        generator: source of the noise; a new one from the operating system if None.
        add_up: as in :func:`hyfreedp.privatize_loss`.

    Raises:
        ValueError: an argument is out of range.
    """
    for index, threshold in enumerate(thresholds):
        check_positive(f"thresholds[{index}]", threshold)
    finite = losses.double().nan_to_num(nan=UNBOUNDED_LOSS).clamp(-UNBOUNDED_LOSS, UNBOUNDED_LOSS)
    ahead, here, behind = finite  # "ahead" is w - hG, where the optimizer is going
    contrasts = torch.stack([behind - ahead, behind + ahead - 2 * here])
    if all(math.isinf(threshold) for threshold in thresholds):
        exact = noisy_mean(contrasts, math.inf, noise_multiplier, expected_batch_size, mechanism, generator, add_up)
        return PrivateContrasts(exact[0].item(), exact[1].item(), 0.0, 0.0, (1.0, 1.0))

    bounds = torch.tensor(thresholds, dtype=torch.float64).to(contrasts.device, non_blocking=True)[:, None]
    inside = torch.where(contrasts.abs() <= bounds, 0.5, -0.5).to(contrasts)
    if mechanism == "gaussian":
        unit = 1.0
        scaled = contrasts / bounds
        scaled = scaled / torch.linalg.vector_norm(scaled, dim=0).clamp(min=1.0)
    else:
        unit = 2.0
        scaled = (contrasts / (unit * bounds)).clamp(-0.5, 0.5)
    released = noisy_mean(
        torch.cat([scaled, inside]), 1.0, noise_multiplier, expected_batch_size, mechanism, generator, add_up
    ).tolist()
    std = float(loss_noise_std(unit, noise_multiplier, expected_batch_size, mechanism))
    return PrivateContrasts(
        difference=released[0] * unit * thresholds[0],
        bend=released[1] * unit * thresholds[1],
        difference_std=std * thresholds[0],
        bend_std=std * thresholds[1],
        fractions=(released[2] + 0.5, released[3] + 0.5),
    )


def fit_contrasts(contrasts: PrivateContrasts, distance: float) -> QuadraticFit:
    """The parabola of :func:`hyfreedp.fit_quadratic` from contrasts over +-hG: b = D / 2h and a = C / h^2.

    Args:
        contrasts: the private means D (``difference``) and C (``bend``) with their noise.
        distance: h, how far along G the losses were probed, in units of the learning rate; negative where rule
            "literal" has made the rate so.

    Raises:
        ValueError: ``distance`` is zero or not finite.
    """
    if distance == 0 or not math.isfinite(distance):
        raise ValueError(f"distance must be finite and not zero, got {distance}")
    return QuadraticFit(
        slope=contrasts.difference / (2 * distance),
        curvature=contrasts.bend / distance**2,
        intercept=math.nan,
        slope_std=contrasts.difference_std / abs(2 * distance),
        curvature_std=contrasts.bend_std / distance**2,
    )


def contrast_threshold(
    threshold: float,
    fraction: float,
    *,
    scale: float = 1.0,
    quantile: float = 0.8,
    gain: float = 1.0,
    floor: float = 1e-6,
    cap: float = 20.0,
) -> float:
    """Move R_d or R_c towards the given quantile of the per-sample contrasts, from the noisy fraction within it.

    ``R exp(gain (z(quantile) - z(fraction)))`` with z the normal quantile function: the geometric update of Andrew et
    al. (2021), taken on the probit scale so that a fraction near 0 moves R quickly.

    Args:
        fraction: noisy share of the batch within the threshold; clipped to [0.03, 0.97].
        scale: growth of the contrasts that is known beforehand, because the next probe looks at another distance.
        floor, cap: range of the result, in units of the loss.
    """
    fraction = min(max(fraction, 0.03), 0.97)
    factor = math.exp(gain * float(special.ndtri(quantile) - special.ndtri(fraction)))
    return min(max(threshold * factor * scale, floor), cap)
