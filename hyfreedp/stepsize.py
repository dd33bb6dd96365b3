"""From a noisy parabola to the next learning rate: the named step rules, as pure functions.

Every rule has the form ``rule(fit, state, eta, **constants) -> StepDecision``: it sees only what was released privately
(the fit and its known noise), its own past and the current learning rate, so its result is post-processing. The rules
for the clipping thresholds are here too, for the same reason.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from scipy import special

from hyfreedp.curvefit import QuadraticFit

Decay = Literal["none", "linear", "cosine"]


class RuleState(NamedTuple):
    """Discounted, precision-weighted sums of slopes and curvatures, and the eta last probed; zero before the first."""

    slope_sum: float = 0.0
    slope_weight: float = 0.0
    curvature_sum: float = 0.0
    curvature_weight: float = 0.0
    eta: float = 0.0


class StepDecision(NamedTuple):
    """What a rule decided: the next ``eta``, whether the probe changed it, why, and the rule's next state."""

    eta: float
    accepted: bool
    reason: str
    state: RuleState


def literal(fit: QuadraticFit, state: RuleState, eta: float) -> StepDecision:
    """Algorithm 1 as printed (line 11): eta = b/a, whatever the signs; zero, from where no probe sees, is refused."""
    if fit.minimizer == 0 or not math.isfinite(fit.minimizer):
        return StepDecision(eta, False, "rejected: b/a is zero or not finite", state)
    return StepDecision(fit.minimizer, True, "b/a", state)


def gen(
    fit: QuadraticFit, state: RuleState, eta: float, *, shrink: float = 0.5, grow: float = 2.0, smoothing: float = 0.9
) -> StepDecision:
    """GeN's guards around b/a: accept only a, b > 0, clamp to [shrink eta, grow eta], smooth.

    The constants are the hidden ones of public implementations (Bu et al. 2024), named here.

    Args:
        smoothing: weight of the clamped b/a in the next eta; the rest stays with the old one.
    """
    if not (fit.slope > 0 and fit.curvature > 0):
        return StepDecision(eta, False, "rejected: b and a are not both positive", state)
    clamped, reason = _clamp(fit.minimizer, shrink * eta, grow * eta, "b/a")
    return StepDecision(smoothing * clamped + (1 - smoothing) * eta, True, reason, state)


def posterior(
    fit: QuadraticFit,
    state: RuleState,
    eta: float,
    *,
    damping: float,
    forgetting: float = 0.85,
    shrink: float = 0.5,
    grow: float = 4.0,
    anchor: float | None = None,
    anchor_weight: float = 0.75,
) -> StepDecision:
    """The damped ratio of what slope and curvature are expected to be, given the noise and that both are positive.

    Past fits are averaged with the precision that their known noise gives them. Each probe discounts them by
    ``forgetting``, and by the ratio of its eta to the one before, since a parabola fitted at another scale says less
    about this one. With x the average and s its standard error, E[x | x > 0] = x + s phi(x/s) / Phi(x/s) is positive
    for every x, so one formula covers all signs.

    Args:
        damping: in (0, 1], the share of b/a to aim for; see :func:`momentum_damping`.
        forgetting: in [0, 1), weight that a past fit keeps from probe to probe at unchanged eta.
        shrink, grow: the next eta lies in [shrink eta, grow eta].
        anchor: a rate to pull the target to (rule "anchored"): a prior on the optimizer, so off by default.
        anchor_weight: p in target^(1 - p) anchor^p.
    """
    kept = forgetting * min(eta, state.eta) / max(eta, state.eta)
    state = RuleState(
        *_discounted(state.slope_sum, state.slope_weight, fit.slope, fit.slope_std, kept),
        *_discounted(state.curvature_sum, state.curvature_weight, fit.curvature, fit.curvature_std, kept),
        eta,
    )
    slope = positive_mean(state.slope_sum / state.slope_weight, _std(state.slope_weight, fit.slope_std))
    curvature = positive_mean(
        state.curvature_sum / state.curvature_weight, _std(state.curvature_weight, fit.curvature_std)
    )
    if slope == 0:  # without noise an ascent direction has no positive slope
        target = 0.0
    else:
        target = damping * slope / curvature if curvature > 0 else math.inf
    if anchor is not None and 0 < target < math.inf:
        target = target ** (1 - anchor_weight) * anchor**anchor_weight
    clamped, reason = _clamp(target, shrink * eta, grow * eta, "posterior b/a" if anchor is None else "anchored b/a")
    return StepDecision(clamped, True, reason, state)


def positive_mean(mean: float, std: float) -> float:
    """E[X | X > 0] for X ~ N(mean, std^2), which is mean + std phi(z) / Phi(z) with z = mean / std."""
    if std == 0:  # the limit
        return max(mean, 0.0)
    z = mean / std
    if z < -1e3:  # z + phi/Phi would cancel; its expansion is -1/z + 2/z^3 - ...
        return -std / z
    return std * (z + math.sqrt(2 / math.pi) / float(special.erfcx(-z / math.sqrt(2))))


def momentum_damping(momentum: float) -> float:
    """m = sqrt((1 - beta) / (1 + beta)) for momentum beta: 0.23 for 0.9, 1 without momentum.

    The standard deviation of an exponential average of independent gradients, relative to that of one of them. A step
    along such an average is repeated, in part, by the following ones, of which b/a at one point knows nothing: aiming
    for b/a overshoots. How the posterior rules use m is set in :mod:`hyfreedp.probe`.

    Raises:
        ValueError: ``momentum`` outside [0, 1).
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    return math.sqrt((1 - momentum) / (1 + momentum))


def loss_threshold_previous(losses: tuple[float, ...], *, floor: float, cap: float) -> float:
    """R_l for the next probe: the last *released* loss at w (Alg. 1, line 8), within [floor, cap].

    Args:
        losses: private losses at (w - eta G, w, w + eta G).
    """
    return min(max(losses[1], floor), cap)


def loss_threshold_sum(losses: tuple[float, ...], *, floor: float, cap: float) -> float:
    """R_l for the next probe: the sum of the last released losses (paper, §4.1 "in practice"), within [floor, cap]."""
    return min(max(sum(losses), floor), cap)


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


def _clamp(target: float, low: float, high: float, name: str) -> tuple[float, str]:
    if target < low:
        return low, f"{name} below the range, clamped"
    if target > high:
        return high, f"{name} above the range, clamped"
    return target, name


def _discounted(total: float, weight: float, value: float, std: float, forgetting: float) -> tuple[float, float]:
    precision = 1.0 if std == 0 else std**-2  # without noise all fits weigh the same
    return forgetting * total + precision * value, forgetting * weight + precision


def _std(weight: float, noise_std: float) -> float:
    return 0.0 if noise_std == 0 else 1 / math.sqrt(weight)
