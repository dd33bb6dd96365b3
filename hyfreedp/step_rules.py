"""From a noisy parabola to the next learning rate: the named step rules, as pure functions.

Every rule has the form ``rule(fit, eta, **constants) -> StepDecision``: it sees only what was released privately and
the current learning rate, so its result is post-processing. The rules for the clipping threshold are here too, for the
same reason.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from hyfreedp.curvefit import QuadraticFit

Decay = Literal["none", "linear", "cosine"]


class StepDecision(NamedTuple):
    """What a rule decided: the next ``eta``, whether the probe changed it, and why."""

    eta: float
    accepted: bool
    reason: str


def literal(fit: QuadraticFit, eta: float) -> StepDecision:
    """Algorithm 1 as printed (line 11): eta = b/a, whatever the signs; zero, from where no probe sees, is refused."""
    if fit.minimizer == 0 or not math.isfinite(fit.minimizer):
        return StepDecision(eta, False, "rejected: b/a is zero or not finite")
    return StepDecision(fit.minimizer, True, "b/a")


def gen(
    fit: QuadraticFit, eta: float, *, shrink: float = 0.5, grow: float = 2.0, smoothing: float = 0.1
) -> StepDecision:
    """GeN's guards around b/a: accept only a, b > 0, clamp to [shrink eta, grow eta], smooth.

    The constants are those of the authors' own package, gen-optim 0.1.1 (Bu et al. 2024), hidden there and named here.
    Its further condition, R^2 > 0.99, holds for every parabola through three points.

    Args:
        smoothing: weight of the clamped b/a in the next eta; the rest stays with the old one.
    """
    if not (fit.slope > 0 and fit.curvature > 0):
        return StepDecision(eta, False, "rejected: b and a are not both positive")
    next_eta, reason = clamped(fit.minimizer, shrink * eta, grow * eta, "b/a")
    return StepDecision(smoothing * next_eta + (1 - smoothing) * eta, True, reason)


def loss_threshold_previous(losses: tuple[float, ...], *, floor: float, cap: float) -> float:
    """R_l for the next probe: the last *released* loss at w (Alg. 1, line 8), within [floor, cap].

    Args:
        losses: private losses at (w - eta G, w, w + eta G).
    """
    return min(max(losses[1], floor), cap)


def loss_threshold_sum(losses: tuple[float, ...], *, floor: float, cap: float) -> float:
    """R_l for the next probe: the sum of the last released losses (paper, §4.1 "in practice"), within [floor, cap]."""
    return min(max(sum(losses), floor), cap)


def decay_factor(step: int, steps: int, decay: Decay, start: float = 0.0) -> float:
    """What multiplies eta at 0-based ``step`` of ``steps``: 1 up to the share ``start`` of the run, then down to zero.

    Args:
        decay: "linear", "cosine" or "none".
        start: in [0, 1), where the decay begins.
    """
    if decay == "none":
        return 1.0
    progress = max(0.0, (step / steps - start) / (1 - start))
    return 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def clamped(target: float, low: float, high: float, name: str) -> tuple[float, str]:
    """``target`` within [low, high], and the reason to give for it."""
    if target < low:
        return low, f"{name} below the range, clamped"
    if target > high:
        return high, f"{name} above the range, clamped"
    return target, name
