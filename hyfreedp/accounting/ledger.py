"""The ledger: counts what a run has really released, and refuses what its plan does not allow."""

from collections.abc import Sequence
from typing import Any

from hyfreedp.accounting.composition import spent
from hyfreedp.accounting.split import NoiseSplit
from hyfreedp.errors import LOOP_THAT_ENDS, BudgetExhausted

Tags = Sequence[int | None]  # a step, and the tags of its gradient and its probe; None: not released


class PrivacyLedger:
    """Counts the releases of a run and refuses those that the noise was not calibrated for.

    Which steps probe is fixed in advance. An empty batch is a step, too: noise must hide that it was empty.

    Each step may be released once. Its noise is a function of the un-noised sums (module ``noise``) and has a tag. If
    a step is repeated with the same tag, after an error or on resuming, it is the same release and costs nothing. With
    another tag it is a second release of the same batch, which is refused if this ledger knows of the first.

    Attributes:
        steps: number of steps made; also the index t = 0, 1, ... of the next one.
        released: the tags of each released step. After an older state was loaded, some steps are still to be repeated.
    """

    def __init__(self, split: NoiseSplit) -> None:
        self._split, self.steps = split, 0
        self.released: list[list[int | None]] = []

    @property
    def split(self) -> NoiseSplit:
        """The plan of the run, with its noise multipliers."""
        return self._split

    def check(self) -> None:
        """BudgetExhausted if all planned steps were made."""
        if self.steps >= self.split.steps:
            raise BudgetExhausted(
                f"all {self.split.steps} steps that the noise was calibrated for have been made; another one would "
                f"exceed epsilon={self.split.target_epsilon:g}: {LOOP_THAT_ENDS}"
            )

    def record(self, tag: int = 0) -> None:
        """Count the next step, just before its gradient is released; ``tag`` identifies the gradient's noise.

        BudgetExhausted, and nothing is counted, if it is not in the plan or was released with other data.
        """
        self.check()
        self._count(self.steps, 0, tag)
        self.steps += 1

    def record_probe(self, step: int, tag: int) -> None:
        """Count the look of the next step, or the probe of the step just recorded, before its values are used."""
        self._count(step, 1, tag)

    def _count(self, step: int, kind: int, tag: int) -> None:
        if kind and not self.split.is_probe_step(step):
            raise BudgetExhausted(f"step {step} must not probe by the plan that the noise was calibrated for")
        if step == len(self.released):
            self.released.append([None, None])
        if self.released[step][kind] not in (None, tag):
            raise BudgetExhausted(
                f"step {step} was released before, with other data, and is not paid for twice: load the newest saved "
                "state, or begin a run of its own, whose epsilon adds to this one's"
            )
        self.released[step][kind] = tag

    def epsilon(self, target_delta: float | None = None) -> float:
        """Epsilon of all recorded releases, at ``target_delta`` (None: the split's)."""
        return spent(self.split, len(self.released), target_delta=target_delta)

    def state_dict(self) -> dict[str, Any]:
        """Position, plan and tags as plain numbers and strings."""
        released = [[step, *tags] for step, tags in enumerate(self.released)]
        return {"steps": self.steps, "released": released, "split": self.split.to_dict()}

    def load_state_dict(self, state: dict[str, Any], *, known: Sequence[Tags] = ()) -> None:
        """Resume from :meth:`state_dict`; ``known`` are the run's releases so far, which stay counted.

        ValueError for impossible counts; BudgetExhausted if it has a step of ``known`` with other data.
        """
        steps, released = state["steps"], state["released"]
        contiguous = [step for step, *_ in released] == list(range(len(released)))
        if not contiguous or not steps <= len(released) <= self.split.steps:
            raise ValueError(
                f"the plan of {self.split.steps} steps does not allow the saved {steps}, and {len(released)} released"
            )
        loaded = PrivacyLedger(self.split)
        for step, *tags in [*released, *known]:
            for kind, tag in enumerate(tags):
                if tag is not None:
                    loaded._count(step, kind, tag)
        self.steps, self.released = steps, loaded.released
