"""Line searches beside the paper's, for :class:`hyfreedp.Preset`: from contrasts or losses, by rules that remember.

``LINE_SEARCH`` is the former default of the package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyfreedp import Preset
from hyfreedp.checks import check_learning_rate
from hyfreedp.curvefit import QuadraticFit
from hyfreedp.experiments.baselines.contrasts import contrast_threshold, fit_contrasts, privatize_contrasts
from hyfreedp.experiments.baselines.posterior import Rule, RuleName, RuleState
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import AddUp
from hyfreedp.rate_learner import LineSearch, LossSearch
from hyfreedp.records import ProbeResult
from hyfreedp.sensitivity import LossMechanism
from hyfreedp.step_rules import StepDecision


@dataclass(frozen=True)
class ContrastResult(ProbeResult):
    """As :class:`hyfreedp.records.ProbeResult`, with the R_d and R_c that clipped the contrasts."""

    difference_threshold: float | None = None
    bend_threshold: float | None = None


class ContrastProbe:
    """A line search from two private contrasts, see :func:`privatize_contrasts`.

    Args:
        rule: moves the learning rate.
        eta: initial learning rate, positive.
        mechanism: noise of the released contrasts.
        contrast_thresholds: initial (R_d, R_c); rather too small, since they grow up to fifteenfold per probe and
            shrink at most to a third. Infinite in non-private runs.

    Raises:
        ValueError: ``eta`` out of range.
    """

    kind = "contrasts"

    def __init__(
        self,
        rule: Rule,
        *,
        eta: float,
        mechanism: LossMechanism = "gaussian",
        contrast_thresholds: tuple[float, float] = (0.01, 2e-4),
    ) -> None:
        check_learning_rate(eta)
        self.rule = rule
        self.eta = eta
        self.mechanism: LossMechanism = mechanism
        self.contrast_thresholds = contrast_thresholds

    @property
    def distance(self) -> float:
        """h: the probes are at w - hG, w and w + hG."""
        return self.rule.reach * self.eta

    def update(
        self,
        losses: Tensor,
        noise_multiplier: float,
        expected_batch_size: float,
        generator: NoiseGenerator | None,
        *,
        held: bool,
        add_up: AddUp | None = None,
    ) -> ContrastResult:
        """Release, fit, decide; moves ``eta``, the thresholds and the rule's state. See :class:`LineSearch`."""
        eta, distance, thresholds = self.eta, self.distance, self.contrast_thresholds
        contrasts = privatize_contrasts(
            losses,
            thresholds,
            noise_multiplier,
            expected_batch_size=expected_batch_size,
            mechanism=self.mechanism,
            generator=generator,
            add_up=add_up,
        )
        fit = fit_contrasts(contrasts, distance)
        decision = self.rule(fit, eta, held=held)
        self.eta = decision.eta
        if math.isfinite(thresholds[0]):
            # The contrasts are of first and second order in the distance, so the thresholds follow it.
            growth = decision.eta / eta
            self.contrast_thresholds = (
                contrast_threshold(thresholds[0], contrasts.fractions[0], scale=abs(growth)),
                contrast_threshold(thresholds[1], contrasts.fractions[1], scale=growth**2),
            )
        return ContrastResult.of(
            eta, distance, fit, decision, difference_threshold=thresholds[0], bend_threshold=thresholds[1]
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that :meth:`load_state_dict` restores exactly."""
        return {
            "eta": self.eta,
            "contrast_thresholds": list(self.contrast_thresholds),
            "rule_state": list(self.rule.state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.eta = state["eta"]
        self.contrast_thresholds = tuple(state["contrast_thresholds"])
        self.rule.state = RuleState(*state["rule_state"])

    def __repr__(self) -> str:
        """All that does not change during a run."""
        return f"{type(self).__name__}({self.kind} with {self.rule}, {self.mechanism} noise)"


class LossProbe(LossSearch):
    """The paper's three losses under a rule that remembers, and that says how far to look.

    Args:
        rule: moves the learning rate.
        **settings: of :class:`hyfreedp.rate_learner.LossSearch`.
    """

    def __init__(self, rule: Rule, **settings: Any) -> None:
        super().__init__(rule="gen", **settings)  # which :meth:`decide` never asks
        self._rule_text = repr(rule)
        self.rule = rule

    @property
    def distance(self) -> float:
        """h: the probes are at w - hG, w and w + hG."""
        return self.rule.reach * self.eta

    def decide(self, fit: QuadraticFit, *, held: bool) -> StepDecision:
        """What the rule makes of a fit, and of those before."""
        return self.rule(fit, self.eta, held=held)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that :meth:`load_state_dict` restores exactly."""
        return super().state_dict() | {"rule_state": list(self.rule.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.rule.state = RuleState(*state["rule_state"])


@dataclass(frozen=True)
class StudiedRule:
    """For ``step_rule`` of a preset: a rule on whatever its ``probe`` releases, "contrasts" or "losses".

    Attributes:
        name: of the rule.
        damping: whether rules that remember allow for the base optimizer's momentum, see :class:`Rule`.
    """

    name: RuleName = "posterior"
    damping: bool = True

    def __call__(self, preset: Preset, optimizer: torch.optim.Optimizer, private: bool) -> LineSearch:
        """The line search of one run."""
        group = optimizer.param_groups[0]
        momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
        rule = Rule(self.name, momentum if self.damping else 0.0)
        settings: dict[str, Any] = {"eta": preset.initial_learning_rate, "mechanism": preset.loss_mechanism}
        if preset.probe == "losses":
            settings |= {"loss_threshold_rule": preset.loss_threshold_rule}
            if not private:
                settings |= {"loss_threshold": math.inf}
            return LossProbe(rule, **settings)
        if not private:
            settings |= {"contrast_thresholds": (math.inf, math.inf)}
        return ContrastProbe(rule, **settings)


LINE_SEARCH = Preset(
    probe="contrasts",
    step_rule=StudiedRule(),
    interval=5,
    warmup=0.1,
    gamma=1.02,
    allocation="per_step",
    decay="linear",
    decay_start=0.5,
)
