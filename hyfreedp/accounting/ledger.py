"""The ledger: counts what a run has really released, and refuses what its plan does not allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hyfreedp.accounting.composition import spent
from hyfreedp.accounting.split import NoiseSplit
from hyfreedp.errors import LOOP_THAT_ENDS, BudgetExhausted

# A step's number, the tag of its gradient, the tag of its probe; None for a tag: not released yet.
Tags = Sequence[int | None]


class PrivacyLedger:
    """Counts the releases of a run and refuses those that the noise was not calibrated for.

    Which steps probe is fixed in advance. An empty batch is a step, too: noise must hide that it was empty.

    Each step may be released once. Its noise is a function of the un-noised sums (module ``noise``) and has a tag. If
    a step is repeated with the same tag, after an error or on resuming, it is the same release and costs nothing. With
    another tag it is a second release of the same batch, which is refused if this ledger knows of the first.

    Args:
        split: the plan of the run, with its noise multipliers.
    """

    def __init__(self, split: NoiseSplit) -> None:
        self.split = split
        self._steps = 0
        self._released: dict[int, list[int | None]] = {}  # tags of gradient and probe, by step

    @property
    def steps(self) -> int:
        """Number of steps made; also the index t = 0, 1, ... of the next one."""
        return self._steps

    @property
    def released(self) -> list[list[int | None]]:
        """Each released step and its tags. After an older state was loaded, some of these are still to be repeated."""
        return [[step, *tags] for step, tags in self._released.items()]

    def check(self) -> None:
        """BudgetExhausted if all planned steps were made."""
        if self._steps >= self.split.steps:
            raise BudgetExhausted(
                f"all {self.split.steps} steps that the noise was calibrated for have been made; another one would "
                f"exceed epsilon={self.split.target_epsilon:g}: {LOOP_THAT_ENDS}"
            )

    def record(self, tag: int = 0) -> None:
        """Count the next step, just before its gradient is released; ``tag`` identifies the gradient's noise.

        BudgetExhausted, and nothing is counted, if it is not in the plan or was released with other data.
        """
        self.check()
        self._count(self._steps, 0, tag)
        self._steps += 1

    def record_probe(self, step: int, tag: int) -> None:
        """Count the look of the next step, or the probe of the step just recorded, before its values are used."""
        self._count(step, 1, tag)

    def _count(self, step: int, kind: int, tag: int) -> None:
        if kind and not self.split.is_probe_step(step):
            raise BudgetExhausted(f"step {step} must not probe by the plan that the noise was calibrated for")
        tags = self._released.get(step, [None, None])
        if tags[kind] not in (None, tag):
            raise BudgetExhausted(
                f"step {step} was released before, with other data, and is not paid for twice: load the newest saved "
                "state, or begin a run of its own, whose epsilon adds to this one's"
            )
        self._released[step] = tags
        tags[kind] = tag

    def epsilon(self, target_delta: float | None = None) -> float:
        """Epsilon of all recorded releases, at ``target_delta`` (None: the split's)."""
        return spent(self.split, len(self._released), target_delta=target_delta)

    def state_dict(self) -> dict[str, Any]:
        """Position, plan and tags as plain numbers and strings."""
        return {"steps": self._steps, "released": self.released, "split": self.split.to_dict()}

    def load_state_dict(self, state: dict[str, Any], *, known: Iterable[Tags] = ()) -> None:
        """Resume from :meth:`state_dict`; ``known`` are other releases of the same run, which are kept.

        ValueError for a state of another split; BudgetExhausted if it has a step of ``known`` with other data.
        """
        mine, theirs = self.split.to_dict(), state["split"]
        different = [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]
        if different:
            changes = ", ".join(f"{name}: {theirs.get(name)!r} != {mine.get(name)!r}" for name in sorted(different))
            raise ValueError(f"the saved state belongs to another noise split ({changes})")
        position, steps = state["steps"], {step for step, *_ in state["released"]}
        if steps != set(range(len(steps))) or not position <= len(steps) <= self.split.steps:
            raise ValueError(
                f"the saved state counts {position} steps and {len(steps)} released ones, which the plan of "
                f"{self.split.steps} steps does not allow"
            )
        loaded = PrivacyLedger(self.split)
        for step, *tags in [*state["released"], *known]:
            for kind, tag in enumerate(tags):
                if tag is not None:
                    loaded._count(step, kind, tag)
        self._steps, self._released = position, loaded._released

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._steps} of {self.split.steps} steps, "
            f"{self.split.probe_steps_before(self._steps)} of {self.split.probe_steps} probes)"
        )
