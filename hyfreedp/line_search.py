"""The paper's line search: three private losses along the update, a parabola, and the next rate (Alg. 1, lines 7-11).

Decisions depend only on released values and the current learning rate, so they cost no privacy (post-processing).
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyfreedp.curvefit import QuadraticFit, fit_quadratic
from hyfreedp.learner import RateLearner
from hyfreedp.preset import PAPER_RATE, Preset
from hyfreedp.privatize import privatize_loss
from hyfreedp.pytorch.records import ProbeResult
from hyfreedp.step_batch import StepBatch


class StepDecision(NamedTuple):
    """What a step rule decides: the next ``eta``, whether it used the fit, and why."""

    eta: float
    accepted: bool
    reason: str


def literal(fit: QuadraticFit, eta: float) -> StepDecision:
    """Algorithm 1 as printed (line 11): eta = b/a, whatever the signs. Zero is rejected: no probe could follow."""
    if fit.minimizer == 0 or not math.isfinite(fit.minimizer):
        return StepDecision(eta, False, "rejected: b/a is zero or not finite")
    return StepDecision(fit.minimizer, True, "b/a")


def gen(fit: QuadraticFit, eta: float, *, smoothing: float = 0.1) -> StepDecision:
    """b/a with the guards of GeN: only if a, b > 0, clamped to [eta / 2, 2 eta], and smoothed.

    The constants are those of the authors' package gen-optim 0.1.1 (Bu et al. 2024). It also asks for R^2 > 0.99, which
    a parabola through three points always has. ``smoothing`` is the weight of the clamped b/a in the next eta.
    """
    if not (fit.slope > 0 and fit.curvature > 0):
        return StepDecision(eta, False, "rejected: b and a are not both positive")
    target, reason = fit.minimizer, "b/a"
    if target < eta / 2:
        target, reason = eta / 2, "b/a below the range, clamped"
    elif target > 2 * eta:
        target, reason = 2 * eta, "b/a above the range, clamped"
    return StepDecision(smoothing * target + (1 - smoothing) * eta, True, reason)


# R_l of the next probe, before it is clamped: the sum of the private losses at (w - eta G, w, w + eta G) (paper, §4.1
# "in practice"), or the one at w (Alg. 1, line 8).
THRESHOLD_RULES: dict[str, Callable[[list[float]], float]] = {"sum": sum, "previous": lambda losses: losses[1]}
LOSS_THRESHOLD_RANGE = 0.1, 20.0  # to which R_l is clamped, since both published rules can diverge


class LossSearch(RateLearner):
    """Releases three losses, fits the parabola through them, and applies the step rule of the ``settings``.

    Losses are clipped to R_l, which is 1 at first, if the run is ``private``.
    """

    def __init__(self, settings: Preset, private: bool) -> None:
        self._settings = settings
        rules: dict[str, Callable[..., StepDecision]]
        rules = {"gen": partial(gen, smoothing=settings.smoothing), "literal": literal}
        self._rule = rules[settings.step_rule]
        self._eta = settings.initial_learning_rate or PAPER_RATE
        self.loss_threshold = 1.0 if private else math.inf

    @property
    def eta(self) -> float:
        return self._eta

    def probe_after_step(
        self, batch: StepBatch, here: Tensor, move: Callable[[float], None]
    ) -> tuple[ProbeResult, Tensor]:
        """Release three losses of the batch, fit and decide; updates ``eta`` and R_l. See :class:`RateLearner`.

        Losses are clipped to [0, R_l]. So shift a loss that is often negative, such as a negative log-density.
        """
        eta, threshold = self.eta, self.loss_threshold
        ahead, behind = (batch.losses(partial(move, distance)) for distance in (eta, -eta))
        probed = torch.stack([ahead, here, behind])  # line 7
        private = privatize_loss(batch.weighted(probed), threshold, **batch.terms).tolist()
        batch.released()
        fit = fit_quadratic([eta, 0.0, -eta], private, batch.noise_std(threshold))  # lines 9 and 10
        decision = self._rule(fit, eta)  # line 11
        self._eta = decision.eta  # nothing can fail from here on
        if math.isfinite(threshold):
            threshold_of, (floor, cap) = THRESHOLD_RULES[self._settings.loss_threshold_rule], LOSS_THRESHOLD_RANGE
            self.loss_threshold = min(max(threshold_of(private), floor), cap)
        result = ProbeResult(
            eta_probed=eta,
            eta_next=decision.eta,
            accepted=decision.accepted,
            reason=decision.reason,
            slope=fit.slope,
            curvature=fit.curvature,
            slope_std=fit.slope_std,
            curvature_std=fit.curvature_std,
            private_loss=private[1],
            loss_threshold=threshold,
        )
        return result, probed

    def state_dict(self) -> dict[str, Any]:
        return {"eta": self.eta, "loss_threshold": self.loss_threshold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._eta, self.loss_threshold = state["eta"], state["loss_threshold"]

    def __repr__(self) -> str:
        settings = self._settings
        rule = settings.step_rule + (f" of smoothing {settings.smoothing!r}" if settings.step_rule == "gen" else "")
        thresholds = f"thresholds {settings.loss_threshold_rule} in {LOSS_THRESHOLD_RANGE}"
        return f"{type(self).__name__}(losses with rule {rule}, {thresholds})"
