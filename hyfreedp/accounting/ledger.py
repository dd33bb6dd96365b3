"""Counts what a run has really released and keeps it within its plan."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

from hyfreedp.accounting.accountants import Accountant
from hyfreedp.accounting.composition import epsilon_so_far, spent
from hyfreedp.accounting.split import NoiseSplit

LOOP_THAT_ENDS = (
    "let the loop end with the plan (while optimizer.steps_left: for batch in loader: ...), or plan a longer run by "
    "epochs= or steps= of make_private_with_epsilon"
)


class BudgetExhausted(RuntimeError):
    """The next step is not in the plan that the noise was calibrated for, so it would break the privacy guarantee."""


class PrivacyLedger:
    """Counts the releases of a run and refuses those that its noise does not pay for.

    The plan fixes in advance which steps probe. A step on an empty Poisson batch counts like any other: that it was
    empty is part of what the noise hides.

    A run that goes back to an earlier state releases steps again. The noise is bound to what it hides (module
    ``noise``), so a release has a tag: the same one again is the same release and costs nothing; another one for the
    same step is a further release *about the same draw of the batch*, so no subsampling makes it cheaper. It counts,
    together with the first (see :func:`~hyfreedp.accounting.composition.repeated_release`), as far as this ledger or a
    state that it loads has seen that.

    Args:
        split: the noise of the run and its plan.
    """

    def __init__(self, split: NoiseSplit) -> None:
        self.split = split
        self._steps = 0
        # Tags of what was released at each step, gradients and probes.
        self._released: dict[int, tuple[list[int], list[int]]] = {}
        self._probes = 0  # of these steps, those that probe
        self._repeats: dict[int, tuple[bool, int, int]] = {}  # steps that released more than once, see ``spent``
        self._affordable = split.steps  # so many first steps, with these repeats
        self.earlier_runs = 0  # others that have released something, before the state of this one was loaded

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
        return len(self._released) + sum(max(g, p) - 1 for _, g, p in self._repeats.values()) - self._steps

    def probes(self, step: int) -> bool:
        """Whether step t = 0, 1, ... releases a probe, or a vote, by the plan."""
        return self.split.is_probe_step(step)

    def check(self) -> None:
        """Refuse the next step if it is not in the plan; count nothing.

        Raises:
            BudgetExhausted: all planned steps were made.
        """
        if self._steps >= self.split.steps:
            raise BudgetExhausted(
                f"all {self.split.steps} steps that the noise was calibrated for have been made; another one would "
                f"exceed epsilon={self.split.target_epsilon:g}: {LOOP_THAT_ENDS}"
            )

    def record(self, tag: int = 0) -> None:
        """Count the next step. To be called just before anything of it is released, also when its batch is empty.

        Args:
            tag: of its gradient's noise, see :class:`hyfreedp.noise.NoiseGenerator`.

        Raises:
            BudgetExhausted: the step is not in the plan, or steps released twice have used its budget up; nothing was
                counted.
        """
        self.check()
        self._count(self._steps, tag, 0)
        self._steps += 1

    def record_probe(self, tag: int = 0) -> None:
        """Count the probe of the step just recorded, before anything of it is released.

        Raises:
            BudgetExhausted: as in :meth:`record`, or the plan has no probe there.
        """
        self._count_probe(self._steps - 1, tag)

    def record_vote(self, tag: int = 0) -> None:
        """Count the vote of the next step, or its probe, if it is released before the step's gradient.

        Raises:
            BudgetExhausted: as in :meth:`record`, or the plan has no probe there.
        """
        self.check()
        self._count_probe(self._steps, tag)

    def _count_probe(self, step: int, tag: int) -> None:
        if not self.probes(step):
            plan = f"warmup_steps={self.split.warmup_steps}, interval={self.split.interval}"
            if self.split.probe == "votes":
                plan = f"vote_steps={self.split.vote_steps}"
            raise BudgetExhausted(
                f"step {step} must not probe by the plan that the noise was calibrated for "
                f"(probe={self.split.probe!r}, {plan}), but it does"
            )
        self._count(step, tag, 1)

    def _count(self, step: int, tag: int, kind: int) -> None:
        tags = self._released.get(step, ([], []))
        if tag in tags[kind]:
            return
        counts = [len(one) for one in tags]
        counts[kind] += 1
        repeats, affordable = self._repeats, self._affordable
        if max(counts) > 1:
            repeats = repeats | {step: self._repeat(step, *counts)}
            affordable = self._afford(repeats)
        if len(self._released) + (step not in self._released) > affordable:
            raise BudgetExhausted(
                f"step {step} was to be released once more with other data, or after steps that were. Such a release "
                f"is about the same batch as the first, and costs more than a step: with {self.repeated} known beyond "
                f"one per step, the run would exceed the epsilon={self.split.target_epsilon:g} that its noise was "
                "calibrated for. It ends here"
            )
        self._probes += step not in self._released and self.probes(step)
        self._released[step] = tags
        tags[kind].append(tag)
        self._repeats, self._affordable = repeats, affordable

    def _repeat(self, step: int, gradients: int, probes: int) -> tuple[bool, int, int]:
        """As :func:`spent` wants it. Gradient and probe of a step both count from the first release of either on."""
        probing = self.probes(step)
        return probing, max(gradients, 1), max(probes, int(probing))

    def _afford(self, repeats: dict[int, tuple[bool, int, int]]) -> int:
        """How many first steps the target pays for, with these repeats among them; too few for those if it does not."""
        split, target = self.split, self.split.target_epsilon

        def fits(steps: int) -> bool:
            return spent(split, steps, split.probe_steps_before(steps), repeats=list(repeats.values())) <= target

        return bisect.bisect_left(range(max(repeats) + 1, split.steps + 1), True, key=lambda n: not fits(n)) + max(
            repeats
        )

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
            len(self._released),
            self._probes,
            target_delta=target_delta,
            accountant=accountant,
            repeats=list(self._repeats.values()),
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
        self._probes = sum(map(self.probes, self._released))
        counts = {step: (len(gradients), len(probes)) for step, (gradients, probes) in self._released.items()}
        self._repeats = {step: self._repeat(step, *both) for step, both in counts.items() if max(both) > 1}
        self._affordable = self._afford(self._repeats) if self._repeats else self.split.steps

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._steps} of {self.split.steps} steps, "
            f"{self.probe_steps} of {self.split.probe_steps} probes)"
        )
