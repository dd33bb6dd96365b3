"""Per-sample clipping factors c_i and the sensitivity of the clipped sum: the R_g-dependent part of Eq. (priv grad).

Adding or removing one record changes sum_i c_i g_i by at most ``sensitivity`` in L2; the noise is scaled to it.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_SMALLEST = 1e-9  # below, what float32 loses of a tiny gradient's norm would be more than a clip


class Clipping(Protocol):
    """A rule that turns per-sample gradient norms into the factors that scale each sample's gradient."""

    @property
    def sensitivity(self) -> float:
        """The largest possible value of ||c_i g_i||."""
        ...

    def factors(self, norms: Tensor) -> Tensor:
        """Norms ||g_i||, shape (n,), to factors c_i, shape (n,); n is 1 for a rule of one's own."""
        ...


@dataclass(frozen=True)
class AutomaticClipping:
    """Normalisation c_i = 1 / (||g_i|| + stability), with the threshold R_g scaled out (Bu et al. 2022).

    Attributes:
        stability: keeps tiny gradients from being blown up to norm one; positive.
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        _check_positive("stability", self.stability)

    @property
    def sensitivity(self) -> float:
        return 1.0

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
        _check_positive("threshold", self.threshold)

    @property
    def sensitivity(self) -> float:
        return float(self.threshold)

    def factors(self, norms: Tensor) -> Tensor:
        # threshold / 0 is inf, which the minimum turns into 1: a zero gradient stays as it is.
        return (self.threshold / norms).clamp(max=1)


@dataclass(frozen=True)
class NoClipping:
    """c_i = 1, for runs without privacy: nothing bounds the sensitivity."""

    @property
    def sensitivity(self) -> float:
        return math.inf

    def factors(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms)


def bounded_factors(clipping: Clipping, norms: Tensor, sensitivity: float) -> Tensor:
    """A rule's factors, kept within +- sensitivity / norm whatever the rule says; 0 where norm or factor is not finite.

    A rule of one's own sees one norm at a time, and forgets it, so that a factor cannot depend on other samples.

    Raises:
        ValueError: the rule gives other than one factor for a norm.
    """
    known = type(clipping) in (AutomaticClipping, AbadiClipping, NoClipping)
    each = [norms] if known else norms.split(1)
    factors = [(clipping if known else copy.deepcopy(clipping)).factors(some.clone()) for some in each]
    for some, its in zip(each, factors, strict=True):
        if its.shape != some.shape:
            raise ValueError(
                f"clipping must give one factor for each norm, shape {tuple(some.shape)}, got {tuple(its.shape)}"
            )
    found, most = torch.cat(factors), sensitivity / norms.clamp(min=_SMALLEST)
    return torch.where(norms.isfinite() & found.isfinite(), found.clamp(-most, most), 0.0)


def _check_positive(name: str, value: float) -> None:
    if not _SMALLEST <= value < math.inf:
        raise ValueError(f"{name}={value!r} is not allowed: it must be finite and at least {_SMALLEST}")
