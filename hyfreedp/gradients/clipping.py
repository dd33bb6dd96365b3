"""Per-sample clipping factors c_i, and the sensitivity of the clipped sum (Eq. "priv grad").

Adding or removing one record changes sum_i c_i g_i by at most ``sensitivity`` in L2 norm; the noise is scaled to it.
"""

import copy
import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from hyfreedp.checks import check_number

_SMALLEST_NORM = 1e-9  # with a smaller threshold, the float32 error of a tiny gradient's norm could exceed a clip


class Clipping(Protocol):
    """A rule that turns per-sample gradient norms into the factors that scale each sample's gradient."""

    @property
    def sensitivity(self) -> float:
        """The largest possible ||c_i g_i||."""
        ...

    def factors(self, norms: Tensor) -> Tensor:
        """Factors c_i from norms ||g_i||, both of shape (n,); a rule of your own is called with n = 1."""
        ...


@dataclass(frozen=True)
class AutomaticClipping:
    """Normalisation c_i = 1 / (||g_i|| + stability), without a threshold R_g (Bu et al. 2022).

    Attributes:
        stability: positive; keeps tiny gradients from being scaled up to norm one.
    """

    stability: float = 0.01
    sensitivity: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_number("stability", self.stability, f"[{_SMALLEST_NORM}, inf)")

    def factors(self, norms: Tensor) -> Tensor:
        return 1 / (norms + self.stability)


@dataclass(frozen=True)
class AbadiClipping:
    """Clipping c_i = min(1, threshold / ||g_i||) (Abadi et al. 2016).

    Attributes:
        threshold: R_g, the norm beyond which a gradient is scaled down; positive.
    """

    threshold: float

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, f"[{_SMALLEST_NORM}, inf)")

    @property
    def sensitivity(self) -> float:
        return float(self.threshold)

    def factors(self, norms: Tensor) -> Tensor:
        # threshold / 0 is inf, which is clamped to 1.
        return (self.threshold / norms).clamp(max=1)


@dataclass(frozen=True)
class NoClipping:
    """c_i = 1, for runs without privacy: the sensitivity is not bounded."""

    sensitivity: ClassVar[float] = math.inf

    def factors(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms)


def bounded_factors(clipping: Clipping, norms: Tensor, sensitivity: float) -> Tensor:
    """The rule's factors, clamped to +- sensitivity / norm; 0 where the norm is not finite or the factor is NaN.

    A user's own rule gets one norm at a time, each time in a fresh copy of the rule, so that a factor cannot depend on
    other samples. ValueError if it does not return one factor per norm.
    """
    if type(clipping) in (AutomaticClipping, AbadiClipping, NoClipping):
        factors = clipping.factors(norms)
    else:
        parts = [copy.deepcopy(clipping).factors(norm.clone()) for norm in norms.split(1)]
        for part in parts:
            if part.shape != (1,):
                raise ValueError(f"clipping must give one factor for each norm, shape (1,), got {tuple(part.shape)}")
        factors = torch.cat(parts)
    largest = sensitivity / norms.clamp(min=_SMALLEST_NORM)  # for an infinite norm 0, or NaN if sensitivity is inf
    return factors.clamp(-largest, largest).nan_to_num(0.0)
