"""Counts what a run has really released and keeps it within its plan."""

from __future__ import annotations

from typing import Any

from hyfreedp.accounting.accountants import Accountant
from hyfreedp.accounting.composition import epsilon_so_far
from hyfreedp.accounting.split import NoiseSplit


class BudgetExhausted(RuntimeError):
    """The next step is not in the plan that the noise was calibrated for, so it would break the privacy guarantee."""


class PrivacyLedger:
    """Counts the steps of a run and refuses those that its noise does not pay for.

    The plan fixes in advance which steps probe, so two counters say all that was released. A step on an empty Poisson
    batch counts like any other: that it was empty is part of what the noise hides.

    Args:
        split: the noise of the run and its plan.
    """

    def __init__(self, split: NoiseSplit) -> None:
        self.split = split
        self._steps = 0
        self._probe_steps = 0

    @property
    def steps(self) -> int:
        """Steps made so far; also the index t = 0, 1, ... of the next one."""
        return self._steps

    @property
    def probe_steps(self) -> int:
        """Steps with a probe made so far."""
        return self._probe_steps

    def check(self, probe: bool) -> None:
        """Refuse the next step if it is not in the plan; count nothing.

        Args:
            probe: whether the next step releases a probe.

        Raises:
            BudgetExhausted: all planned steps were made, or the plan wants a probe exactly if ``probe`` is false.
        """
        if self._steps >= self.split.steps:
            raise BudgetExhausted(
                f"all {self.split.steps} steps that the noise was calibrated for have been made; another one would "
                f"exceed epsilon={self.split.target_epsilon:g}. Calibrate the noise for more steps"
            )
        planned = self.split.is_probe_step(self._steps)
        if bool(probe) != planned:
            raise BudgetExhausted(
                f"step {self._steps} {'must' if planned else 'must not'} probe by the plan that the noise was "
                f"calibrated for (probe={self.split.probe!r}, warmup_steps={self.split.warmup_steps}, "
                f"interval={self.split.interval}), but it {'does' if probe else 'does not'}"
            )

    def record(self, probe: bool) -> None:
        """Count the next step. To be called just before anything of it is released, also when its batch is empty.

        Args:
            probe: whether the step releases a probe.

        Raises:
            BudgetExhausted: the step is not in the plan; nothing was counted.
        """
        self.check(probe)
        self._steps += 1
        self._probe_steps += bool(probe)

    def epsilon(self, target_delta: float | None = None, accountant: Accountant | None = None) -> float:
        """Epsilon of the steps made so far; 0 before the first, infinite without noise.

        Args:
            target_delta: in (0, 1); the split's own if None.
            accountant: "pld", "rdp" or "gdp"; the split's own if None.

        Warns:
            UnsoundAccountingWarning: once per process and reason, when the answer is no proven bound.

        Raises:
            ValueError: an argument is out of range.
        """
        return epsilon_so_far(
            self.split, self._steps, self._probe_steps, target_delta=target_delta, accountant=accountant
        )

    def state_dict(self) -> dict[str, Any]:
        """Counters and plan as plain numbers and strings."""
        return {"steps": self._steps, "probe_steps": self._probe_steps, "split": self.split.to_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state_dict` of a ledger with the same split.

        Raises:
            ValueError: the state belongs to another split, or its counters cannot have come from this plan.
        """
        mine, theirs = self.split.to_dict(), state["split"]
        different = [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]
        if different:
            changes = ", ".join(f"{name}: {theirs.get(name)!r} != {mine.get(name)!r}" for name in sorted(different))
            raise ValueError(f"the saved state belongs to another noise split ({changes})")
        steps, probe_steps = state["steps"], state["probe_steps"]
        if not 0 <= steps <= self.split.steps or probe_steps != self.split.probe_steps_before(steps):
            raise ValueError(
                f"the saved state counts {steps} steps and {probe_steps} probes, which the plan of {self.split.steps} "
                "steps does not allow"
            )
        self._steps, self._probe_steps = steps, probe_steps

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._steps} of {self.split.steps} steps, "
            f"{self._probe_steps} of {self.split.probe_steps} probes)"
        )
