"""The learned state of a run: learning rate, clipping thresholds and rule memory, moved on by each private probe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from hyfreedp import stepsize
from hyfreedp.accounting.arguments import check_choice
from hyfreedp.curvefit import QuadraticFit, fit_contrasts, fit_quadratic
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import AddUp, LossMechanism, loss_noise_std, privatize_contrasts, privatize_loss

ProbeKind = Literal["contrasts", "losses"]
StepRule = Literal["posterior", "anchored", "gen", "literal"]
LossThresholdRule = Literal["sum", "previous"]

# What rule "anchored" pulls to: a rate that suits AdamW on normalised gradients. A prior, not something learned.
ANCHOR = 0.02

# By how much a posterior rule lets eta grow when the next step probes again, and when it is held for several steps.
GROWTH = 4.0
HELD_GROWTH = 2.0


@dataclass(frozen=True)
class ProbeResult:
    """What a probe released and what was decided from it.

    Attributes:
        eta_probed, eta_next: the learning rate before and after, without decay.
        distance: h, how far along the update direction the losses were probed.
        accepted, reason: whether the rule used the fit, and why.
        slope, curvature: b and a of the noisy parabola, with ``slope_std`` and ``curvature_std`` from the known noise.
        private_loss: released mean loss at w; None when contrasts were released instead.
        loss_threshold, difference_threshold, bend_threshold: R_l, R_d and R_c that clipped this probe.
    """

    eta_probed: float
    eta_next: float
    distance: float
    accepted: bool
    reason: str
    slope: float
    curvature: float
    slope_std: float
    curvature_std: float
    private_loss: float | None = None
    loss_threshold: float | None = None
    difference_threshold: float | None = None
    bend_threshold: float | None = None


class Probe:
    """Turns the raw losses of a probe into a private fit, the next learning rate and the next thresholds.

    Args:
        kind: release "contrasts" or three "losses".
        rule: name of the step rule in :mod:`hyfreedp.stepsize`.
        eta: initial learning rate, positive.
        momentum: beta of the base optimizer. With m = sqrt((1 - beta) / (1 + beta)), the posterior rules aim for
            sqrt(m) b/a, between the greedy rate and the one that ignores all repetition, and probe at eta / m, so that
            the step still lies inside the probed interval when eta grows fourfold. Other rules aim for b/a and probe at
            eta (Alg. 1, line 7).
        mechanism: noise of the released losses or contrasts.
        loss_threshold: initial R_l; infinite in non-private runs, as are the two below.
        loss_threshold_rule: how R_l follows the released losses.
        loss_threshold_range: floor and cap of R_l; both published rules can run away without them.
        contrast_thresholds: initial (R_d, R_c); rather too small, since they grow up to fifteenfold per probe and
            shrink at most to a third.

    Raises:
        ValueError: an unknown name, or ``eta`` or ``momentum`` out of range.
    """

    def __init__(
        self,
        *,
        kind: ProbeKind,
        rule: StepRule,
        eta: float,
        momentum: float = 0.0,
        mechanism: LossMechanism = "gaussian",
        loss_threshold: float = 1.0,
        loss_threshold_rule: LossThresholdRule = "sum",
        loss_threshold_range: tuple[float, float] = (0.1, 20.0),
        contrast_thresholds: tuple[float, float] = (0.01, 2e-4),
    ) -> None:
        if not (eta > 0 and math.isfinite(eta)):
            raise ValueError(f"initial_learning_rate must be finite and positive, got {eta}")
        check_choice("probe", kind, ProbeKind)
        check_choice("step_rule", rule, StepRule)
        check_choice("loss_threshold_rule", loss_threshold_rule, LossThresholdRule)
        m = stepsize.momentum_damping(momentum)
        rules: dict[str, Callable[..., stepsize.StepDecision]] = {
            "literal": stepsize.literal,
            "gen": stepsize.gen,
            "posterior": partial(stepsize.posterior, damping=math.sqrt(m)),
            "anchored": partial(stepsize.posterior, damping=math.sqrt(m), anchor=ANCHOR),
        }
        threshold_rules = {"sum": stepsize.loss_threshold_sum, "previous": stepsize.loss_threshold_previous}
        self._description = (
            f"{kind} with rule {rule}, momentum {momentum!r}, {mechanism} noise, thresholds {loss_threshold_rule} in "
            f"{loss_threshold_range}"
        )
        self.kind = kind
        self.eta = eta
        self.mechanism: LossMechanism = mechanism
        self.loss_threshold = loss_threshold
        self.contrast_thresholds = contrast_thresholds
        self.state = stepsize.RuleState()
        self._rule = rules[rule]
        self._posterior = rule in ("posterior", "anchored")
        self._reach = 1 / m if self._posterior else 1.0
        floor, cap = loss_threshold_range
        self._next_loss_threshold = partial(threshold_rules[loss_threshold_rule], floor=floor, cap=cap)

    @property
    def distance(self) -> float:
        """h: the probes are at w - hG, w and w + hG."""
        return self._reach * self.eta

    def update(
        self,
        losses: Tensor,
        noise_multiplier: float,
        expected_batch_size: float,
        generator: NoiseGenerator | None,
        *,
        held: bool,
        add_up: AddUp | None = None,
    ) -> ProbeResult:
        """Release, fit, decide; moves ``eta``, the thresholds and the rule's state.

        Args:
            losses: raw per-sample losses at (w - hG, w, w + hG), shape ``(3, B)``. Kind "losses" clips them to
                [0, R_l], negative ones too: whether there is one must not show.
            noise_multiplier: sigma_l.
            expected_batch_size: sample rate times number of records.
            generator: source of the noise.
            held: whether the next step goes without a probe, so that an overshoot would be repeated unseen.
            add_up: adds up what several processes release together; each then passes the losses of its own samples.
        """
        noise: dict[str, Any] = {
            "expected_batch_size": expected_batch_size,
            "mechanism": self.mechanism,
            "generator": generator,
            "add_up": add_up,
        }
        eta, distance = self.eta, self.distance
        if self.kind == "losses":
            threshold = self.loss_threshold
            private = privatize_loss(losses.clamp(min=0), threshold, noise_multiplier, **noise).tolist()
            std = loss_noise_std(threshold, noise_multiplier, expected_batch_size, self.mechanism)
            fit = fit_quadratic([distance, 0.0, -distance], private, std)
            decision = self._decide(fit, held)
            released: dict[str, float] = {"private_loss": private[1], "loss_threshold": threshold}
            if math.isfinite(threshold):
                self.loss_threshold = self._next_loss_threshold(tuple(private))
        else:
            thresholds = self.contrast_thresholds
            contrasts = privatize_contrasts(losses, thresholds, noise_multiplier, **noise)
            fit = fit_contrasts(contrasts, distance)
            decision = self._decide(fit, held)
            released = {"difference_threshold": thresholds[0], "bend_threshold": thresholds[1]}
            if math.isfinite(thresholds[0]):
                # The contrasts are of first and second order in the distance, so the thresholds follow it.
                growth = decision.eta / eta
                self.contrast_thresholds = (
                    stepsize.contrast_threshold(thresholds[0], contrasts.fractions[0], scale=abs(growth)),
                    stepsize.contrast_threshold(thresholds[1], contrasts.fractions[1], scale=growth**2),
                )
        return ProbeResult(
            eta_probed=eta,
            eta_next=self.eta,
            distance=distance,
            accepted=decision.accepted,
            reason=decision.reason,
            slope=fit.slope,
            curvature=fit.curvature,
            slope_std=fit.slope_std,
            curvature_std=fit.curvature_std,
            **released,
        )

    def _decide(self, fit: QuadraticFit, held: bool) -> stepsize.StepDecision:
        limit = {"grow": HELD_GROWTH if held else GROWTH} if self._posterior else {}
        decision = self._rule(fit, self.state, self.eta, **limit)
        self.eta, self.state = decision.eta, decision.state
        return decision

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that :meth:`load_state_dict` restores exactly."""
        return {
            "eta": self.eta,
            "loss_threshold": self.loss_threshold,
            "contrast_thresholds": list(self.contrast_thresholds),
            "rule_state": list(self.state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.eta = state["eta"]
        self.loss_threshold = state["loss_threshold"]
        self.contrast_thresholds = tuple(state["contrast_thresholds"])
        self.state = stepsize.RuleState(*state["rule_state"])

    def __repr__(self) -> str:
        """All that does not change during a run."""
        return f"{type(self).__name__}({self._description})"
