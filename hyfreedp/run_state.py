"""The state of a run, saved, checked and restored as a whole, so that the run resumes bit for bit."""

import copy
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyfreedp.accounting import PrivacyLedger
from hyfreedp.accounting.ledger import Tags
from hyfreedp.processes.group import Processes
from hyfreedp.pytorch.base_optimizer import BaseOptimizer


@dataclass(frozen=True)
class RunState:
    """All parts of a run that change, and its ``settings``, which must be equal in a state that is loaded.

    ``parts`` are "model", "rate", "sampler" and "generator", each with a ``state_dict`` and a ``load_state_dict``.
    """

    base: BaseOptimizer
    ledger: PrivacyLedger
    parts: dict[str, Any]
    settings: dict[str, str]
    processes: Processes
    history: list[dict[str, Any]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """All parts, as tensors and plain values."""
        return {"base_optimizer": self.base.optimizer.state_dict(), **self._without_base()}

    def _without_base(self) -> dict[str, Any]:
        """All but the base optimizer's state, whose ``state_dict`` would run the user's hooks."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"ledger": self.ledger.state_dict(), "settings": dict(self.settings)}
        return state | {"history": [dict(row) for row in self.history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, all or nothing; errors as of :meth:`HyFreeDPOptimizer.load_state_dict`."""
        if not isinstance(state, Mapping) or "generator" not in state:
            raise ValueError(f"state must be a private optimizer's state_dict(), got a {type(state).__name__}")
        key = state["generator"]["key"]
        self.processes.agree(steps=state["ledger"]["steps"], generator=hashlib.sha256(key.encode()).hexdigest()[:8])
        here = self.settings | self.ledger.split.to_dict()
        there = state["settings"] | state["ledger"]["split"]
        different = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if different:
            differences = ", ".join(f"{name} is {there.get(name)}, here {here.get(name)}" for name in different)
            raise ValueError(f"the state is of another run: {differences}. Make the run as the saved one was made")
        if self.ledger.released and key != self.parts["generator"].key.hex():
            raise ValueError(
                f"the state is of another run, and this one has made {self.ledger.steps} steps: call "
                "make_private_with_epsilon again, and load the state into what that returns"
            )
        optimizer, present = self.base.optimizer, copy.deepcopy(self._without_base())
        moments = {parameter: copy.deepcopy(values) for parameter, values in optimizer.state.items()}
        groups = [dict(group) for group in optimizer.param_groups]
        try:
            self._restore(state, present["ledger"]["released"])
            optimizer.load_state_dict(copy.deepcopy(state["base_optimizer"]))  # torch keeps the tensors it is given
        except BaseException:
            self._restore(present, ())
            optimizer.__setstate__({"state": defaultdict(dict, moments), "param_groups": groups})
            raise
        if not self.base.follows:
            self.base.note_rates()

    def _restore(self, state: Mapping[str, Any], known: Sequence[Tags]) -> None:
        """Restore all but the base optimizer; the ledger also keeps the releases ``known`` so far."""
        self.ledger.load_state_dict(state["ledger"], known=known)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.history[:] = [dict(row) for row in state["history"]]
