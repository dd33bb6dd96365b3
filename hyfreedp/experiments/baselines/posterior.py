"""Rules "posterior", what slope and curvature are expected to be given their noise and past fits, and "anchored"."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from scipy import special

from hyfreedp import step_rules
from hyfreedp.checks import check_choice
from hyfreedp.curvefit import QuadraticFit
from hyfreedp.step_rules import StepDecision, clamped

RuleName = Literal["gen", "literal", "posterior", "anchored"]

# What rule "anchored" pulls to: a rate that suits AdamW on normalised gradients. A prior, not something learned.
ANCHOR = 0.02

# By how much eta may grow when the next step probes again, and when it is held for several steps.
GROWTH = 4.0
HELD_GROWTH = 2.0


class RuleState(NamedTuple):
    """Discounted, precision-weighted sums of slopes and curvatures, and the eta last probed; zero before the first."""

    slope_sum: float = 0.0
    slope_weight: float = 0.0
    curvature_sum: float = 0.0
    curvature_weight: float = 0.0
    eta: float = 0.0


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
) -> tuple[StepDecision, RuleState]:
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

    Returns:
        The decision, and the next state.
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
    next_eta, reason = clamped(target, shrink * eta, grow * eta, "posterior b/a" if anchor is None else "anchored b/a")
    return StepDecision(next_eta, True, reason), state


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
    for b/a overshoots. How m is used is said at :class:`Rule`.

    Raises:
        ValueError: ``momentum`` outside [0, 1).
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    return math.sqrt((1 - momentum) / (1 + momentum))


class Rule:
    """A step rule by name, with what it remembers and how far it looks.

    Args:
        name: a published rule, "gen" or "literal", "posterior" or "anchored".
        momentum: beta of the base optimizer. With m = sqrt((1 - beta) / (1 + beta)), "posterior" and "anchored" aim for
            sqrt(m) b/a, between the greedy rate and the one that ignores all repetition, and probe at eta / m, so that
            the step still lies inside the probed interval when eta grows fourfold. The others aim for b/a and probe at
            eta (Alg. 1, line 7).

    Attributes:
        reach: the distance of the probes, in units of eta.
        state: what is remembered.

    Raises:
        ValueError: an unknown name, or ``momentum`` out of range.
    """

    def __init__(self, name: RuleName, momentum: float = 0.0) -> None:
        check_choice("rule", name, RuleName)
        m = momentum_damping(momentum)
        self.name: RuleName = name
        self.momentum = momentum
        self.reach = 1.0 if name in ("gen", "literal") else 1 / m
        self.state = RuleState()
        self._damping = math.sqrt(m)
        self._anchor = ANCHOR if name == "anchored" else None

    def __call__(self, fit: QuadraticFit, eta: float, *, held: bool) -> StepDecision:
        """Decide, and remember the fit; ``held`` as in :meth:`hyfreedp.rate_learner.LineSearch.update`."""
        if self.name == "gen":
            return step_rules.gen(fit, eta)
        if self.name == "literal":
            return step_rules.literal(fit, eta)
        grow = HELD_GROWTH if held else GROWTH
        decision, self.state = posterior(fit, self.state, eta, damping=self._damping, grow=grow, anchor=self._anchor)
        return decision

    def __repr__(self) -> str:
        return f"rule {self.name}, momentum {self.momentum!r}"


def _discounted(total: float, weight: float, value: float, std: float, forgetting: float) -> tuple[float, float]:
    precision = 1.0 if std == 0 else std**-2  # without noise all fits weigh the same
    return forgetting * total + precision * value, forgetting * weight + precision


def _std(weight: float, noise_std: float) -> float:
    return 0.0 if noise_std == 0 else 1 / math.sqrt(weight)
