"""Algorithm 1 around any torch optimizer: private gradient, private probe, next learning rate, update.

One step works on one Poisson batch. Its gradient and its probe are two adaptive releases on that same batch, which is
how the accountant counts them. Everything that decides about the learning rate is computed from what was released.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.accounting import NoiseSplit, PrivacyLedger
from hyfreedp.base import BaseOptimizer
from hyfreedp.buffers import BufferGuard
from hyfreedp.checks import check_not_negative, check_same_run
from hyfreedp.clipping import GradientEngine
from hyfreedp.distributed import Processes
from hyfreedp.mixing import steps_to_check
from hyfreedp.noise import NoiseGenerator
from hyfreedp.passes import Passes, PerSampleLoss
from hyfreedp.physical import PhysicalBatchSize, check_physical_batch_size
from hyfreedp.privatize import privatize_gradient
from hyfreedp.probe import Probe, ProbeResult
from hyfreedp.records import StepRecord, raw_values
from hyfreedp.sampling import PoissonSampler, RandomState
from hyfreedp.stepsize import Decay, decay_factor


class HyFreeDPOptimizer:
    """Wraps a torch optimizer: :meth:`step` takes a per-sample loss and a batch and does the rest.

    The base optimizer turns the private gradient into an update direction G; its own learning rate only sets the ratio
    between parameter groups. It advances its state once per step, whether or not the step probes. It must be linear in
    its learning rate, as SGD, AdamW, Adam and RMSprop are (decoupled weight decay included).

    Usually made by :class:`hyfreedp.PrivacyEngine`. From then on the base optimizer steps by :meth:`step` only: its own
    ``step`` would train on raw gradients, and is refused.

    Args:
        optimizer: the base optimizer over exactly the trainable parameters of ``module``.
        module: the model, in train mode.
        gradient_engine: clips and sums per-sample gradients of ``module``.
        split: noise multipliers and plan of the run.
        generator: of the noise of gradients and probes, each step with a key of its own.
        expected_batch_size: sample rate times number of records.
        probe: how the learning rate is learned; None keeps the base optimizer's own rates (times the decay).
        decay: shape of the fall to zero at the horizon, beginning at the share ``decay_start`` of the run.
        max_physical_batch_size: size of the pieces in which larger Poisson batches are processed, or a function of the
            batch that returns them as lists of positions (see :func:`hyfreedp.token_budget`).
        sampler: the Poisson sampler, told how far the run is so that loader and checkpoints agree.
        diagnostics: also record raw values, which are not private.
        processes: those that train this model together, with the same arguments; None if this one is alone.

    Raises:
        ValueError: the optimizer's parameters are not the model's trainable ones, or an argument is out of range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        module: nn.Module,
        gradient_engine: GradientEngine,
        split: NoiseSplit,
        generator: NoiseGenerator,
        expected_batch_size: float,
        probe: Probe | None,
        decay: Decay = "none",
        decay_start: float = 0.0,
        max_physical_batch_size: PhysicalBatchSize = None,
        sampler: PoissonSampler | None = None,
        diagnostics: bool = False,
        processes: Processes | None = None,
    ) -> None:
        check_physical_batch_size(max_physical_batch_size)
        if (probe is None) != (split.probe == "none"):
            raise ValueError(f"probe must be None exactly if the split has none, got {probe} and {split.probe!r}")
        self.base = optimizer
        self.module = module
        self.split = split
        self.ledger = PrivacyLedger(split)
        self.expected_batch_size = expected_batch_size
        self.probe = probe
        self.decay: Decay = decay
        self.decay_start = decay_start
        self.max_physical_batch_size = max_physical_batch_size
        self.sampler = sampler
        self.diagnostics = diagnostics
        self.processes = processes or Processes()
        self.history: list[dict[str, Any]] = []
        self._engine = gradient_engine
        self._base = BaseOptimizer(optimizer, module)
        self._generator = generator
        self._buffers = BufferGuard(module)
        self._checks_due = steps_to_check(0, split.steps, generator)
        self._settings = self._describe()
        self._runs: dict[str, list[Any]] = {}  # releases of the runs that this object has been, by key

    def step(self, per_sample_loss: PerSampleLoss, batch: Any) -> StepRecord:
        """One step of Algorithm 1 on one Poisson batch: forward, backward, clip, noise, probe, update.

        Args:
            per_sample_loss: maps a batch, or a piece of it, to losses of shape ``(B,)`` without reduction, each
                depending on its own sample only. Called again for the probes, without gradients.
            batch: what the loader gave; samples are the first dimension of every tensor. May be empty.

        Raises:
            BudgetExhausted: the planned steps are done, and nothing of the batch was looked at; or releases made again
                with other data have used the budget up, and no further one was made.
            ValueError, TypeError: the model is in eval mode, one of its layers has come to mix samples or to keep raw
                statistics, or the losses have the wrong form or depend on other samples. Nothing was released.
            RuntimeError: one of several processes raised such an error or has died.

        An error within a probe leaves the step made and counted, at the old rate.
        """
        t = self.ledger.steps
        probing = self.split.is_probe_step(t)
        self.ledger.check(probing)
        eta = self.eta * decay_factor(t, self.split.steps, self.decay, self.decay_start)
        self.zero_grad()
        try:
            with self.processes.all_or_none():
                passes, losses, norms = self._raw_gradient(t, per_sample_loss, batch)
            tag = self._privatize_gradient(t)
            self.processes.check_same(tag)
            self.ledger.record(probing, tag)
        except BaseException:
            self.zero_grad()  # it may be raw
            raise
        if self.sampler is not None:
            self.sampler.position = self.ledger.steps
        if probing and self.probe is not None:
            eta, result, probed = self._probe_and_update(self.probe, passes, losses, eta)
        else:
            result, probed = None, None
            self._base.step(eta)
        self.zero_grad()

        join, diagnostics = self.processes.join_samples, None
        if self.diagnostics:
            diagnostics = raw_values(join(losses), join(norms), None if probed is None else join(probed))
        record = StepRecord(t, eta, result, diagnostics)
        self.history.append(record.to_dict())
        return record

    def _raw_gradient(self, t: int, per_sample_loss: PerSampleLoss, batch: Any) -> tuple[Passes, Tensor, Tensor]:
        """Clipped sums into the engine; losses and norms. All checks are made here, before anything is released."""
        if not self.module.training:
            raise ValueError("the model must be in train mode: call model.train() before optimizer.step")
        self._engine.check_modes()
        due = any(step <= t for step in self._checks_due)
        passes = Passes(
            per_sample_loss,
            batch,
            max_physical_batch_size=self.max_physical_batch_size,
            device=self._base.parameters[0].device,
            buffers=self._buffers,
            check=due,
        )
        losses, norms = passes.backward(self._engine)
        if t == 0 and self.probe is not None and self.probe.kind == "losses":
            check_not_negative(losses)
        if due and passes.check_samples(self._engine, self._generator.child("check", t)):
            self._checks_due = [step for step in self._checks_due if step > t]
        return passes, losses, norms

    def _privatize_gradient(self, t: int) -> int:
        """The private mean gradient of all processes into ``.grad``; the tag of its noise, 0 if there is none."""
        sums = self._engine.clipped_sums(self._base.parameters)
        self.processes.add_up(sums)
        generator = self._generator.child("gradient", t)
        privatize_gradient(
            sums,
            self.split.gradient_noise_multiplier(t),
            sensitivity=self._engine.clipping.sensitivity,
            expected_batch_size=self.expected_batch_size,
            generator=generator,
        )
        for parameter, private in zip(self._base.parameters, sums, strict=True):
            parameter.grad = private.to(parameter.dtype)  # rounding to half precision comes after the noise
        return generator.tag

    @torch.no_grad()
    def _probe_and_update(
        self, probe: Probe, passes: Passes, losses: Tensor, eta: float
    ) -> tuple[float, ProbeResult, Tensor]:
        """Take the plain step, look along it in both directions, then move to where the new learning rate leads."""
        move = self._base.step_along(eta)
        distance, generator = probe.distance, self._generator.child("probe", self.ledger.steps - 1)
        before = probe.state_dict()
        try:
            with self.processes.all_or_none():
                move(distance)
                ahead = passes.forward()
                move(-distance)
                behind = passes.forward()
                probed = torch.stack([ahead, losses, behind])
            result = probe.update(
                probed,
                self.split.sigma_loss,
                self.expected_batch_size,
                generator,
                held=not self.split.is_probe_step(self.ledger.steps),
                add_up=self.processes.add_up,
            )
            self.ledger.record_probe(generator.tag)
        except BaseException:
            probe.load_state_dict(before)
            move(eta)
            raise
        if result.eta_next != result.eta_probed:
            eta *= result.eta_next / result.eta_probed
        move(eta)
        return eta, result, probed

    @property
    def eta(self) -> float:
        """The learning rate in force, without decay."""
        return self._base.eta if self.probe is None else self.probe.eta

    @property
    def steps_left(self) -> int:
        """How many steps the privacy plan still allows."""
        return self.split.steps - self.ledger.steps

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's groups; their "lr" is what the last step used."""
        return self.base.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. :meth:`step` does so itself; for loops written for other optimizers."""
        self.base.zero_grad(set_to_none=set_to_none)
        self._engine.clear()

    def epsilon_spent(self, target_delta: float | None = None) -> float:
        """Epsilon of all that is known to have been released, at the plan's delta unless another is given."""
        return self.ledger.epsilon(target_delta)

    def state_dict(self) -> dict[str, Any]:
        """Everything that :meth:`load_state_dict` needs to go on bit for bit, model included: tensors and plain values.

        It holds the key of all noise: whoever has it can take the noise off again. Keep it as secret as the data, and
        publish the model alone.

        As with torch's own, its tensors are those of the live model and optimizer: save or copy it before stepping on.
        States of several processes differ only in dropout's random state; to go on bit for bit, each process saves and
        loads its own. Any of them may be loaded by any number of processes.
        """
        return {
            "model": self.module.state_dict(),
            "base_optimizer": self.base.state_dict(),
            "probe": None if self.probe is None else self.probe.state_dict(),
            "ledger": self.ledger.state_dict(),
            "sampler": None if self.sampler is None else self.sampler.state_dict(),
            "generator": self._generator.state_dict(),
            "settings": dict(self._settings),
            "random_state": RandomState.capture(self._base.parameters[0].device).states,
            "history": [dict(row) for row in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, torch's global generator included; the run must be the same.

        A step made again on the same data is the same release. On other data (augmentation or dropout may draw other
        numbers) it gets other noise, and the ledger counts both where it knows of the first: if this object made it, or
        the state tells. What another process has released since the state was saved nobody knows here: publish nothing
        that was made after the last saved state, or count it.

        Raises:
            ValueError: the state is of another run, and what differs; or processes load states of different runs.
        """
        if "generator" not in state:
            raise ValueError("state was saved by a version of hyfreedp whose noise is not safe: it cannot be resumed")
        key = hashlib.sha256(state["generator"]["key"].encode()).hexdigest()[:8]
        self.processes.agree(steps=state["ledger"]["steps"], generator=key)
        check_same_run(self._settings, state["settings"])
        present = self.ledger.state_dict()
        self._runs[self._generator.key.hex()] = present["released"]
        self.ledger.load_state_dict(state["ledger"], also=self._runs.get(state["generator"]["key"], ()))
        try:
            self.module.load_state_dict(state["model"])
            self.base.load_state_dict(copy.deepcopy(state["base_optimizer"]))  # torch would go on using its tensors
        except BaseException:
            self.ledger.load_state_dict(present)
            raise
        if self.probe is not None:
            self.probe.load_state_dict(state["probe"])
        if self.sampler is not None and state["sampler"] is not None:
            self.sampler.load_state_dict(state["sampler"])
        self._generator.load_state_dict(state["generator"])
        self._checks_due = steps_to_check(self.ledger.steps, self.split.steps, self._generator)
        RandomState(self._base.parameters[0].device, state["random_state"]).restore()
        self.history = [dict(row) for row in state["history"]]

    def _describe(self) -> dict[str, str]:
        """What a saved state must agree with, beside the plan. Sizes of pieces, engine and processes may change."""
        return {
            "number of records": str(None if self.sampler is None else self.sampler.num_records),
            "expected batch size": repr(self.expected_batch_size),
            "clipping": repr(self._engine.clipping),
            "probe": repr(self.probe),
            "learning rate": repr(self._base.eta) if self.probe is None else "learned",
            "decay": f"{self.decay} from {self.decay_start!r}",
            **self._base.settings(),
            "noise": "secure" if self._generator.secure else "standard",
        }

    def __repr__(self) -> str:
        learned = "fixed" if self.probe is None else f"learned from {self.probe.kind}"
        return (
            f"{type(self).__name__}({type(self.base).__name__}, step {self.ledger.steps} of {self.split.steps}, "
            f"eta {self.eta:.3g} ({learned}), clipping {self._engine.clipping}, engine {self._engine.name!r},\n"
            f"  {self.split})"
        )
