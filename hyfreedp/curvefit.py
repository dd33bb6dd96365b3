"""The parabola through the probed losses: slope b, curvature a and learning rate b/a (Eq. "curve fit" of the paper).

Along the update direction G the loss is L(w - eta G) = L(w) - b eta + a eta^2 / 2, with b = G.g and a = G.H.G.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hyfreedp.checks import check_array


@dataclass(frozen=True)
class QuadraticFit:
    """L(eta) = intercept - slope * eta + curvature * eta^2 / 2, with standard errors from the known noise.

    Attributes:
        slope: b, in loss per unit of learning rate; positive if G is a descent direction.
        curvature: a, in loss per squared learning rate.
        intercept: fitted loss at eta = 0.
        slope_std, curvature_std: standard errors of b and a; 0 without noise.
    """

    slope: float
    curvature: float
    intercept: float
    slope_std: float = 0.0
    curvature_std: float = 0.0

    @property
    def minimizer(self) -> float:
        """b/a, the stationary point: a minimum if a > 0, a maximum if a < 0; +-infinity, or NaN for b = 0, if a = 0."""
        if self.curvature == 0:
            return math.nan if self.slope == 0 else math.copysign(math.inf, self.slope)
        return self.slope / self.curvature


def fit_quadratic(etas: ArrayLike, losses: ArrayLike, noise_std: ArrayLike = 0.0) -> QuadraticFit:
    """Least-squares parabola through any number of losses, in closed form (Alg. 1, lines 9-10).

    The basis 1, x, x^2 is orthogonalised over the probes, which makes the normal equations diagonal and is as accurate
    as a QR factorisation. The parabola meets the three losses of Alg. 1, at (-eta, 0, eta), exactly.

    Args:
        etas: probed learning rates, shape ``(n,)``, at least three of them distinct.
        losses: the losses L(w - eta_i G), shape ``(n,)``.
        noise_std: standard deviation of the independent noise in each loss, one number or shape ``(n,)``.

    ValueError if shapes differ, a value is not finite, or fewer than three etas are distinct.
    """
    x, y = check_array("etas", etas), check_array("losses", losses)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"etas and losses must be vectors of one length, got shapes {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError(f"etas and losses must be finite, got {x.tolist()} and {y.tolist()}")
    if np.unique(x).size < 3:
        raise ValueError(f"etas must hold at least three distinct values to determine a parabola, got {x.tolist()}")
    std = check_array("noise_std", noise_std)
    if std.shape not in ((), x.shape):
        raise ValueError(f"noise_std must be one number, or one for each of {x.size} losses, got shape {std.shape}")
    std = np.broadcast_to(std, x.shape)

    scale = np.abs(x).max()
    u = x / scale
    mean = u.mean()
    linear = u - mean
    square = u**2
    tilt = (linear @ square) / (linear @ linear)
    quadratic = square - square.mean() - tilt * linear

    # Each coefficient is a dot product of the losses with known weights, so its standard error follows from noise_std.
    linear_weights = linear / (linear @ linear)
    quadratic_weights = quadratic / (quadratic @ quadratic)
    slope_weights = (tilt * quadratic_weights - linear_weights) / scale
    curvature_weights = 2 * quadratic_weights / scale**2
    intercept_weights = 1 / x.size - mean * linear_weights - (square.mean() - tilt * mean) * quadratic_weights
    return QuadraticFit(
        slope=float(slope_weights @ y),
        curvature=float(curvature_weights @ y),
        intercept=float(intercept_weights @ y),
        slope_std=float(np.linalg.norm(slope_weights * std)),
        curvature_std=float(np.linalg.norm(curvature_weights * std)),
    )
