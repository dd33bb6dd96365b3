"""Counts what a run has really released and keeps it within its plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hyfreedp.accounting.accountants import Accountant
from hyfreedp.accounting.composition import epsilon_so_far
from hyfreedp.accounting.split import NoiseSplit


class BudgetExhausted(RuntimeError):
    """The next step is not in the plan that the noise was calibrated for, so it would break the privacy guarantee."""


class PrivacyLedger:
    """Counts the releases of a run and refuses those that its noise does not pay for.

    The plan fixes in advance which steps probe. A step on an empty Poisson batch counts like any other: that it was
    empty is part of what the noise hides.

    A run that goes back to an earlier state releases steps again. The noise is bound to what it hides (module
    ``noise``), so a release has a tag: the same one again is the same release and costs nothing; another one for the
    same step is a further release and counts, as far as this ledger or a state that it loads has seen the first.

    Args:
        split: the noise of the run and its plan.
    """

    def __init__(self, split: NoiseSplit) -> None:
        self.split = split
        self._steps = 0
        # Tags of what was released at each step, gradients and probes, and the larger number of the two, added up.
        self._released: dict[int, tuple[list[int], list[int]]] = {}
        self._released_steps = 0
        self._released_probes = 0

    @property
    def steps(self) -> int:
        """Steps that the run has made; also the index t = 0, 1, ... of the next one."""
        return self._steps

    @property
    def probe_steps(self) -> int:
        """Steps with a probe among them."""
        return self.split.probe_steps_before(self._steps)

    @property
    def repeated(self) -> int:
        """Releases known beyond one for each of ``steps``: made again with other data, or ahead of an earlier state."""
        return self._released_steps - self._steps

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
            plan = f"warmup_steps={self.split.warmup_steps}, interval={self.split.interval}"
            if self.split.probe == "votes":
                plan = f"vote_steps={self.split.vote_steps}"
            raise BudgetExhausted(
                f"step {self._steps} {'must' if planned else 'must not'} probe by the plan that the noise was "
                f"calibrated for (probe={self.split.probe!r}, {plan}), but it {'does' if probe else 'does not'}"
            )

    def record(self, probe: bool, tag: int = 0) -> None:
        """Count the next step. To be called just before anything of it is released, also when its batch is empty.

        Args:
            probe: whether the step releases a probe.
            tag: of its gradient's noise, see :class:`hyfreedp.noise.NoiseGenerator`.

        Raises:
            BudgetExhausted: the step is not in the plan, or steps released twice have used its budget up; nothing was
                counted.
        """
        self.check(probe)
        self._count(self._steps, tag, 0)
        self._steps += 1

    def record_probe(self, tag: int = 0) -> None:
        """Count the probe of the step just recorded, before anything of it is released.

        Raises:
            BudgetExhausted: as in :meth:`record`.
        """
        self._count(self._steps - 1, tag, 1)

    def record_vote(self, tag: int = 0) -> None:
        """Count the vote of the next step, or its probe, if it is released before the step's gradient.

        Raises:
            BudgetExhausted: as in :meth:`record`.
        """
        self.check(True)
        self._count(self._steps, tag, 1)

    def _count(self, step: int, tag: int, kind: int) -> None:
        tags = self._released.get(step, ([], []))
        if tag in tags[kind]:
            return
        more = len(tags[kind]) == max(map(len, tags))  # a probe beside its gradient is the same step
        steps = self._released_steps + more
        probe_steps = self._released_probes + (more and self.split.is_probe_step(step))
        # A plan's steps, of either kind, are paid for; others have to be counted.
        plain, paid = steps - probe_steps, self.split.steps - self.split.probe_steps
        if (plain > paid or probe_steps > self.split.probe_steps) and not (
            steps <= self.split.steps and epsilon_so_far(self.split, steps, probe_steps) <= self.split.target_epsilon
        ):
            raise BudgetExhausted(
                f"step {step} would be released once more with other data. With the {self.repeated} releases known "
                f"beyond one per step the run would exceed the {self.split.steps} steps ({self.split.probe_steps} of "
                f"them with probes) or the epsilon={self.split.target_epsilon:g} that its noise was calibrated for: it "
                "ends here"
            )
        self._released[step] = tags
        tags[kind].append(tag)
        self._released_steps, self._released_probes = steps, probe_steps

    def epsilon(self, target_delta: float | None = None, accountant: Accountant | None = None) -> float:
        """Epsilon of all releases that are known; 0 before the first, infinite without noise.

        Args:
            target_delta: in (0, 1); the split's own if None.
            accountant: "pld", "rdp" or "gdp"; the split's own if None.

        Warns:
            UnsoundAccountingWarning: once per process and reason, when the answer is no proven bound.

        Raises:
            ValueError: an argument is out of range.
        """
        return epsilon_so_far(
            self.split,
            self._released_steps,
            self._released_probes,
            target_delta=target_delta,
            accountant=accountant,
        )

    def state_dict(self) -> dict[str, Any]:
        """Position, plan and tags as plain numbers and strings."""
        return {
            "steps": self._steps,
            "released": [[step, *map(list, both)] for step, both in self._released.items()],
            "split": self.split.to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *, also: Iterable[Sequence[Any]] = ()) -> None:
        """Resume from :meth:`state_dict` of a ledger with the same split.

        Args:
            state: what was saved.
            also: further releases of the same run that are known, as in "released" of a state.

        Raises:
            ValueError: the state belongs to another split, or cannot have come from this plan.
        """
        mine, theirs = self.split.to_dict(), state["split"]
        different = [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]
        if different:
            changes = ", ".join(f"{name}: {theirs.get(name)!r} != {mine.get(name)!r}" for name in sorted(different))
            raise ValueError(f"the saved state belongs to another noise split ({changes})")
        position, released = state["steps"], {step: both for step, *both in state["released"]}
        if not 0 <= position <= self.split.steps or not set(range(position)) <= set(released) <= set(
            range(self.split.steps)
        ):
            raise ValueError(
                f"the saved state counts {position} steps and {len(released)} released ones, which the plan of "
                f"{self.split.steps} steps does not allow"
            )
        for step, *both in also:
            known = released.get(step, ([], []))
            released[step] = [list(dict.fromkeys([*old, *new])) for old, new in zip(known, both, strict=True)]
        self._steps = position
        self._released = {step: (list(both[0]), list(both[1])) for step, both in released.items()}
        counts = {step: max(map(len, both)) for step, both in self._released.items()}
        self._released_steps = sum(counts.values())
        self._released_probes = sum(count for step, count in counts.items() if self.split.is_probe_step(step))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._steps} of {self.split.steps} steps, "
            f"{self.probe_steps} of {self.split.probe_steps} probes)"
        )
