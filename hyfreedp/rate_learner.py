"""What learns the rate, and the paper's way: a line search by three private losses along the update.

The optimizer uses whatever keeps to :class:`LineSearch`, and the votes of :mod:`hyfreedp.votes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor

from hyfreedp import step_rules
from hyfreedp.accounting import NoiseSplit
from hyfreedp.checks import check_choice, check_learning_rate
from hyfreedp.curvefit import QuadraticFit, fit_quadratic
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import AddUp, clipped_mean, loss_noise_std
from hyfreedp.records import ProbeResult
from hyfreedp.sensitivity import LossMechanism

StepRule = Literal["gen", "literal"]
ProbeBatch = Literal["same", "next"]
LossThresholdRule = Literal["sum", "previous"]


class RateLearner(Protocol):
    """What the optimizer needs of anything that learns the rate.

    Its ``repr`` says all that does not change during a run, since a state is resumed only where it is the same.
    """

    @property
    def kind(self) -> str:
        """What it releases, as the accountant calls it: "losses", "contrasts" or "votes"."""

    @property
    def eta(self) -> float:
        """The learning rate in force, without decay."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and live tensors, that :meth:`load_state_dict` restores exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""


class LineSearch(RateLearner, Protocol):
    """A :class:`RateLearner` that learns eta from losses along the update direction."""

    @property
    def distance(self) -> float:
        """h: the probes are at w - hG, w and w + hG."""

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
        """Release with noise, and move ``eta`` by what was released.

        Args:
            losses: raw per-sample losses at (w - hG, w, w + hG), shape ``(3, B)``.
            noise_multiplier: sigma_l.
            expected_batch_size: sample rate times number of records.
            generator: source of the noise.
            held: whether the next step goes without a probe, so that an overshoot would be repeated unseen.
            add_up: adds up what several processes release together; each then passes the losses of its own samples.
        """


def check_paid_for(rate_learner: RateLearner | None, split: NoiseSplit) -> None:
    """Refuse what releases something else, or at other steps, than the noise was calibrated for.

    Raises:
        ValueError: saying what it releases and what was planned.
    """
    released = getattr(rate_learner, "kind", "none"), getattr(rate_learner, "vote_steps", ())
    if released != (split.probe, split.vote_steps):
        plan = f"{split.probe!r}, with votes at {split.vote_steps}"
        raise ValueError(f"probe must be what {rate_learner} releases, got {plan}: change it, or the step rule")


class LossSearch:
    """Three private losses, the parabola through them, and a rule that makes of it the next rate (Alg. 1, lines 7-11).

    Args:
        rule: name of the step rule in :mod:`hyfreedp.step_rules`.
        smoothing: of rule "gen", see there.
        eta: initial learning rate, positive.
        mechanism: noise of the released losses.
        loss_threshold: initial R_l; infinite in non-private runs.
        loss_threshold_rule: how R_l follows the released losses.
        loss_threshold_range: floor and cap of R_l; both published rules can run away without them.

    Raises:
        ValueError: an unknown name, or ``eta`` out of range.
    """

    kind = "losses"

    def __init__(
        self,
        *,
        rule: StepRule,
        eta: float,
        smoothing: float = 0.1,
        mechanism: LossMechanism = "gaussian",
        loss_threshold: float = 1.0,
        loss_threshold_rule: LossThresholdRule = "sum",
        loss_threshold_range: tuple[float, float] = (0.1, 20.0),
    ) -> None:
        check_learning_rate(eta)
        check_choice("step_rule", rule, StepRule)
        check_choice("loss_threshold_rule", loss_threshold_rule, LossThresholdRule)
        rules: dict[str, Callable[[QuadraticFit, float], step_rules.StepDecision]] = {
            "gen": partial(step_rules.gen, smoothing=smoothing),
            "literal": step_rules.literal,
        }
        threshold_rules = {"sum": step_rules.loss_threshold_sum, "previous": step_rules.loss_threshold_previous}
        self._rule_text = f"rule {rule}" + (f" of smoothing {smoothing!r}" if rule == "gen" else "")
        self._thresholds = f"{loss_threshold_rule} in {loss_threshold_range}"
        self.eta = eta
        self.mechanism: LossMechanism = mechanism
        self.loss_threshold = loss_threshold
        self._rule = rules[rule]
        floor, cap = loss_threshold_range
        self._next_loss_threshold = partial(threshold_rules[loss_threshold_rule], floor=floor, cap=cap)

    @property
    def distance(self) -> float:
        """The learning rate itself (Alg. 1, line 7)."""
        return self.eta

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
        """Release, fit, decide; moves ``eta`` and R_l. See :meth:`LineSearch.update`.

        Losses are clipped to [0, R_l], negative ones too: whether there is one must not show.
        """
        eta, distance, threshold = self.eta, self.distance, self.loss_threshold
        private = clipped_mean(
            losses.clamp(min=0), threshold, noise_multiplier, expected_batch_size, self.mechanism, generator, add_up
        ).tolist()
        std = loss_noise_std(threshold, noise_multiplier, expected_batch_size, self.mechanism)
        fit = fit_quadratic([distance, 0.0, -distance], private, std)
        decision = self.decide(fit, held=held)
        self.eta = decision.eta
        if math.isfinite(threshold):
            self.loss_threshold = self._next_loss_threshold(tuple(private))
        return ProbeResult.of(eta, distance, fit, decision, private_loss=private[1], loss_threshold=threshold)

    def decide(self, fit: QuadraticFit, *, held: bool) -> step_rules.StepDecision:
        """What the rule makes of a fit; the published rules do not ask whether the rate will be held."""
        return self._rule(fit, self.eta)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that :meth:`load_state_dict` restores exactly."""
        return {"eta": self.eta, "loss_threshold": self.loss_threshold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.eta = state["eta"]
        self.loss_threshold = state["loss_threshold"]

    def __repr__(self) -> str:
        """All that does not change during a run."""
        name = "Probe" if type(self) is LossSearch else type(self).__name__  # as saved states know it
        return f"{name}({self.kind} with {self._rule_text}, {self.mechanism} noise, thresholds {self._thresholds})"
