"""The state of a run: everything that going on bit for bit needs, and what a saved state must agree with."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyfreedp.accounting import NoiseSplit, PrivacyLedger
from hyfreedp.base import BaseOptimizer
from hyfreedp.checks import check_same_model, check_same_run
from hyfreedp.clipping import GradientEngine
from hyfreedp.distributed import Processes
from hyfreedp.mixing import steps_to_check
from hyfreedp.noise import NoiseGenerator
from hyfreedp.rate_learner import ProbeBatch, RateLearner
from hyfreedp.sampling import PoissonSampler, RandomState
from hyfreedp.step_rules import Decay

_STATE = "optimizer_state_dict"  # as in Opacus's files


class Resumable:
    """Saving and loading, for :class:`hyfreedp.HyFreeDPOptimizer`, whose attributes these are."""

    base: torch.optim.Optimizer
    module: nn.Module
    split: NoiseSplit
    ledger: PrivacyLedger
    expected_batch_size: float
    rate_learner: RateLearner | None
    probe_batch: ProbeBatch
    decay: Decay
    decay_start: float
    sampler: PoissonSampler | None
    processes: Processes
    _rows: list[dict[str, Any]]
    gradient_engine: GradientEngine
    _base: BaseOptimizer
    _generator: NoiseGenerator
    _checks_due: list[int]
    _settings: dict[str, str]
    _runs: dict[str, list[Any]]  # releases of the runs that this object has been, by key

    def state_dict(self) -> dict[str, Any]:
        """Everything that :meth:`load_state_dict` needs to go on bit for bit, model included: tensors and plain values.

        It holds the key of all noise: whoever has it can take the noise off again. Keep it as secret as the data, and
        publish the model alone.

        As with torch's own, its tensors are those of the live model and optimizer: save or copy it before stepping on.
        States of several processes differ only in dropout's random state; to go on bit for bit, each process saves and
        loads its own. Any of them may be loaded by any number of processes.
        """
        return {"base_optimizer": self.base.state_dict(), **self._own_state()}

    def _own_state(self) -> dict[str, Any]:
        """All but the base optimizer's, whose hooks are a user's."""
        return {
            "model": self.module.state_dict(),
            "last_step": None if self._base.last is None else list(self._base.last),
            "probe": None if self.rate_learner is None else self.rate_learner.state_dict(),
            "ledger": self.ledger.state_dict(),
            "sampler": None if self.sampler is None else self.sampler.state_dict(),
            "generator": self._generator.state_dict(),
            "settings": dict(self._settings),
            "random_state": RandomState.capture(self._base.parameters[0].device).states,
            "history": [dict(row) for row in self._rows],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, torch's global generator included; the run must be the same.

        A step made again on the same data is the same release. On other data (augmentation or dropout may draw other
        numbers) it gets other noise, and the ledger counts both where it knows of the first: if this object made it, or
        the state tells. What another process has released since the state was saved nobody knows here: publish nothing
        that was made after the last saved state, or count it. Nor does it know the records: resume on the same ones.
        Releases that come out equal after one was erased tell that it was in none of their batches, which no epsilon
        covers.

        Raises:
            ValueError: the state is of another run, and what differs; or processes load states of different runs.
        """
        if "generator" not in state:
            raise ValueError("state was saved by a version of hyfreedp whose noise is not safe: it cannot be resumed")
        key = hashlib.sha256(state["generator"]["key"].encode()).hexdigest()[:8]
        self.processes.agree(steps=state["ledger"]["steps"], generator=key)
        check_same_run(self._settings, state["settings"])
        check_same_model(self.module.state_dict(), state["model"])
        present = copy.deepcopy(self._own_state())
        moments = {parameter: copy.deepcopy(values) for parameter, values in self.base.state.items()}
        groups = [dict(group) for group in self.base.param_groups]
        self._runs[self._generator.key.hex()] = present["ledger"]["released"]
        try:
            self._restore(state)
            self.base.load_state_dict(copy.deepcopy(state["base_optimizer"]))  # torch would go on using its tensors
        except BaseException:
            self._restore(present)
            self.base.__setstate__({"state": defaultdict(dict, moments), "param_groups": groups})
            raise
        if self.rate_learner is not None or self.decay != "none":
            self._base.note_rates()

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Become what a checked state says, but for the base optimizer."""
        key = state["generator"]["key"]
        self.ledger.load_state_dict(state["ledger"], also=self._runs.get(key, ()))
        self.ledger.earlier_runs = sum(bool(released) for other, released in self._runs.items() if other != key)
        self.module.load_state_dict(state["model"])
        if (last := state["last_step"]) is not None:
            pairs = zip(last[1], self._base.parameters, strict=True)
            last = last[0], [weight.to(parameter.device, copy=True) for weight, parameter in pairs]
        self._base.last = last
        if self.rate_learner is not None:
            self.rate_learner.load_state_dict(state["probe"])
        if self.sampler is not None and state["sampler"] is not None:
            self.sampler.load_state_dict(state["sampler"])
        self._generator.load_state_dict(state["generator"])
        self._checks_due = steps_to_check(self.ledger.steps, self.split.steps, self._generator)
        RandomState(self._base.parameters[0].device, state["random_state"]).restore()
        self._rows = [dict(row) for row in state["history"]]

    def _describe(self) -> dict[str, str]:
        """What a saved state must agree with, beside the plan. Sizes of pieces, engine and processes may change."""
        return {
            "number of records": str(None if self.sampler is None else self.sampler.num_records),
            "expected batch size": repr(self.expected_batch_size),
            "clipping": repr(self.gradient_engine.clipping),
            "probe": repr(self.rate_learner),
            "probe's batch": self.probe_batch,
            "learning rate": repr(self._base.eta) if self.rate_learner is None else "learned",
            "decay": f"{self.decay} from {self.decay_start!r}",
            **self._base.settings(),
            "noise": "secure" if self._generator.secure else "standard",
            **({"views of a record": str(self.gradient_engine.views)} if self.gradient_engine.views > 1 else {}),
        }


def write_checkpoint(path: str | os.PathLike[str], state: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Save a run's state and ``more`` to a file, by a temporary name, so that an interruption leaves the old one.

    Raises:
        ValueError: ``more`` has an entry of the state's name, or something is no tensor and no plain value; the file
            that was there is still there.
    """
    if _STATE in more:
        raise ValueError(f"checkpoint_dict must not have the entry {_STATE!r}, which is the run's own: rename it")
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # for its owner only
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save({**more, _STATE: state}, file)
            file.flush()
            os.fsync(descriptor)
        try:
            torch.load(temporary, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                "a checkpoint must hold tensors and plain values only, so that loading it runs no code: look for NumPy "
                f"numbers and other objects in checkpoint_dict and in the optimizer's settings ({error})"
            ) from None
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and what else :func:`write_checkpoint` saved, on the CPU.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of any kind: the bytes may be anything
        raise ValueError(f"{path} must be a file of save_checkpoint, but torch cannot read it: {error}") from error
    state = saved.pop(_STATE, None) if isinstance(saved, dict) else None
    if not isinstance(state, dict) or "ledger" not in state:
        raise ValueError(f"{path} must be a file of save_checkpoint, but it holds no state of a run of hyfreedp")
    return state, saved
