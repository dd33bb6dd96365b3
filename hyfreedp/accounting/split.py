"""The plan of a run, which steps probe, and how its noise is split between gradients and probes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hyfreedp.accounting.accountants import Accountant
from hyfreedp.sensitivity import LossMechanism, Probe

Allocation = Literal["per_step", "constant"]
Composition = Literal["same_batch", "independent", "epsilon_sum"]


@dataclass(frozen=True)
class Plan:
    """What is known of a run before its noise is calibrated: the budget, and what will be released.

    Attributes:
        probe_steps: number of steps with a probe among ``steps``.

    The other attributes are the arguments of :func:`calibrate_noise`, checked and with ``gamma`` filled in.
    """

    target_epsilon: float
    target_delta: float
    sample_rate: float
    steps: int
    probe_steps: int
    interval: int
    warmup_steps: int
    vote_steps: tuple[int, ...]
    probe: Probe
    gamma: float
    accountant: Accountant
    allocation: Allocation
    composition: Composition
    loss_mechanism: LossMechanism

    def is_probe_step(self, t: int) -> bool:
        """Whether step t = 0, 1, ... probes: in the warm-up always, then at every ``interval``-th step; or in votes."""
        if self.probe == "votes":
            return t in self.vote_steps
        return self.probe != "none" and (t < self.warmup_steps or (t - self.warmup_steps) % self.interval == 0)

    def probe_steps_before(self, t: int) -> int:
        """How many of the steps 0, ..., t - 1 probe."""
        return count_probe_steps(t, self.interval, self.warmup_steps, self.probe, self.vote_steps)


@dataclass(frozen=True)
class NoisyPlan(Plan):
    """A plan and the noise of all that it releases.

    Attributes:
        sigma: noise multiplier of DP-SGD without probes at the same budget.
        sigma_gradient: noise multiplier of the gradient on steps without probe.
        sigma_gradient_probe: the same on steps with one.
        sigma_loss: sigma_l, noise of each number of a probe in units of its clip (standard deviation or Laplace scale).
    """

    sigma: float
    sigma_gradient: float
    sigma_gradient_probe: float
    sigma_loss: float

    def gradient_noise_multiplier(self, t: int) -> float:
        """Noise multiplier of the gradient at step t = 0, 1, ..."""
        return self.sigma_gradient_probe if self.is_probe_step(t) else self.sigma_gradient


@dataclass(frozen=True)
class NoiseSplit(NoisyPlan):
    """How one privacy budget is split between gradients and probes (Alg. 2). Made by :func:`calibrate_noise`.

    Attributes, beside those of its plan and its noise:
        epsilon: cost of the run at ``target_delta`` by ``accountant`` and ``composition``, at most ``target_epsilon``.
        guarantee: whether ``epsilon`` is a proven bound for Algorithm 1, whose gradient and probes share a batch.
        reason: why it is none; empty when it is.
    """

    epsilon: float
    guarantee: bool
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain numbers, strings and a list, as JSON gives them back."""
        return dataclasses.asdict(self) | {"vote_steps": list(self.vote_steps)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> NoiseSplit:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: a field is missing or unknown.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if names != set(values):
            raise ValueError(
                f"a NoiseSplit needs exactly its own fields: missing {sorted(names - set(values))}, "
                f"unknown {sorted(set(values) - names)}"
            )
        return cls(**values | {"vote_steps": tuple(values["vote_steps"])})

    def __str__(self) -> str:
        if math.isinf(self.target_epsilon):
            return f"no noise (non-private), {self.probe_steps} of {self.steps} steps probe"
        bound = "" if self.guarantee else " (no guarantee)"
        privacy = f"epsilon {self.epsilon:.5g}{bound} at delta {self.target_delta:g}"
        if self.probe == "none":
            return f"sigma {self.sigma:.6g} on all {self.steps} steps: {privacy}"
        return (
            f"sigma_g {self.sigma_gradient:.6g} on {self.steps - self.probe_steps} steps, "
            f"{self.sigma_gradient_probe:.6g} on {self.probe_steps} steps with probe, "
            f"sigma_l {self.sigma_loss:.6g}, vanilla sigma {self.sigma:.6g}: {privacy}"
        )


def count_probe_steps(
    steps: int, interval: int, warmup_steps: int, probe: Probe, vote_steps: Sequence[int] = ()
) -> int:
    """Number of probes among the first ``steps`` steps: the votes; or the warm-up, then every ``interval``-th step."""
    if probe == "none":
        return 0
    if probe == "votes":
        return sum(step < steps for step in vote_steps)
    return min(steps, warmup_steps) + math.ceil(max(steps - warmup_steps, 0) / interval)
