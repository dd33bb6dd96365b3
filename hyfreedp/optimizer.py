"""Algorithm 1 around any torch optimizer: private gradient, private probe, next learning rate, update.

One step works on one Poisson batch. Its gradient and its probe are two adaptive releases on that same batch, which is
how the accountant counts them. Everything that decides about the learning rate is computed from what was released.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hyfreedp.accounting import NoiseSplit, PrivacyLedger
from hyfreedp.checks import check_parameters
from hyfreedp.clipping import GradientEngine
from hyfreedp.distributed import Processes
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

    Usually made by :class:`hyfreedp.PrivacyEngine`.

    Args:
        optimizer: the base optimizer over exactly the trainable parameters of ``module``.
        module: the model, in train mode.
        gradient_engine: clips and sums per-sample gradients of ``module``.
        split: noise multipliers and plan of the run.
        expected_batch_size: sample rate times number of records.
        probe: how the learning rate is learned; None keeps the base optimizer's own rates (times the decay).
        decay: shape of the fall to zero at the horizon, beginning at the share ``decay_start`` of the run.
        max_physical_batch_size: larger Poisson batches are processed in pieces of this size, or in the pieces that a
            function of the batch returns as lists of positions (see :func:`hyfreedp.token_budget`).
        sampler: the Poisson sampler, told how far the run is so that loader and checkpoints agree.
        seed: of the noise; two streams are derived from it, for gradients and for probes.
        diagnostics: also record raw values, which are not private.
        processes: those that train this model together, each with a copy of it and a part of every batch; all other
            arguments are the same on all of them. None if this process is alone.

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
        expected_batch_size: float,
        probe: Probe | None,
        decay: Decay = "none",
        decay_start: float = 0.0,
        max_physical_batch_size: PhysicalBatchSize = None,
        sampler: PoissonSampler | None = None,
        seed: int = 0,
        diagnostics: bool = False,
        processes: Processes | None = None,
    ) -> None:
        check_parameters(optimizer, module)
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
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if not all(rate > 0 for rate in rates):
            raise ValueError(f"optimizer must have positive learning rates (their ratios are kept), got {rates}")
        self._rate_ratios = [rate / rates[0] for rate in rates]
        self._fixed_eta = rates[0]
        device = self._parameters[0].device
        gradient_seed, probe_seed = (int(s) for s in np.random.SeedSequence(seed).generate_state(2, np.uint64))
        self._gradient_noise = torch.Generator(device).manual_seed(gradient_seed)
        self._probe_noise = torch.Generator(device).manual_seed(probe_seed)

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, per_sample_loss: PerSampleLoss, batch: Any) -> StepRecord:
        """One step of Algorithm 1 on one Poisson batch: forward, backward, clip, noise, probe, update.

        Args:
            per_sample_loss: maps a batch, or a piece of it, to losses of shape ``(B,)`` without reduction, each
                depending on its own sample only. Called again for the probes, without gradients.
            batch: what the loader gave; samples are the first dimension of every tensor. May be empty.

        Raises:
            BudgetExhausted: the planned steps are done. Nothing of the batch was looked at.
            ValueError, TypeError: the model is in eval mode or the losses have the wrong form. Nothing was released.
            RuntimeError: one of several processes raised such an error or has died.
        """
        t = self.ledger.steps
        probing = self.split.is_probe_step(t)
        self.ledger.check(probing)
        eta = self.eta * decay_factor(t, self.split.steps, self.decay, self.decay_start)
        with self.processes.all_or_none():
            if not self.module.training:
                raise ValueError("the model must be in train mode: call model.train() before optimizer.step")
            passes = Passes(
                per_sample_loss,
                batch,
                max_physical_batch_size=self.max_physical_batch_size,
                device=self._parameters[0].device,
                signed=self.probe is None or self.probe.kind != "losses",
            )
            self.base.zero_grad(set_to_none=True)
            losses, norms = passes.backward(self._engine)
        self.ledger.record(probing)
        if self.sampler is not None:
            self.sampler.position = self.ledger.steps
        self._privatize_gradient(self.split.gradient_noise_multiplier(t))
        if probing and self.probe is not None:
            eta, result, probed = self._probe_and_update(self.probe, passes, losses, eta)
        else:
            result, probed = None, None
            self._base_step(eta)
        self.base.zero_grad(set_to_none=True)

        diagnostics = None
        if self.diagnostics:
            join = self.processes.join_samples
            diagnostics = raw_values(join(losses), join(norms), None if probed is None else join(probed))
        record = StepRecord(t, eta, result, diagnostics)
        self.history.append(record.to_dict())
        return record

    def _privatize_gradient(self, noise_multiplier: float) -> None:
        """The private mean gradient of all processes, in place of this one's clipped sum."""
        gradients = [parameter.grad for parameter in self._parameters]
        self.processes.add_up(gradients)
        privatize_gradient(
            gradients,
            noise_multiplier,
            sensitivity=self._engine.clipping.sensitivity,
            expected_batch_size=self.expected_batch_size,
            generator=self._gradient_noise,
        )

    @torch.no_grad()
    def _probe_and_update(
        self, probe: Probe, passes: Passes, losses: Tensor, eta: float
    ) -> tuple[float, ProbeResult, Tensor]:
        """Take the plain step, look along it in both directions, then move to where the new learning rate leads.

        The base optimizer steps once, with the old rate, from w to w - eta G. Points along G are interpolations between
        these two, which are both kept (the second in the gradients' memory, no longer needed), so a rejected probe
        ends in exactly the plain step.
        """
        start = [parameter.detach().clone() for parameter in self._parameters]
        self._base_step(eta)
        plain = [parameter.grad for parameter in self._parameters]
        torch._foreach_copy_(plain, self._parameters)

        def move(distance: float) -> None:
            torch._foreach_copy_(self._parameters, start)
            torch._foreach_lerp_(self._parameters, plain, distance / eta)

        distance = probe.distance
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
                self._probe_noise,
                held=not self.split.is_probe_step(self.ledger.steps),
                add_up=self.processes.add_up,
            )
        except BaseException:
            torch._foreach_copy_(self._parameters, plain)
            raise
        if result.eta_next == result.eta_probed:
            torch._foreach_copy_(self._parameters, plain)
            return eta, result, probed
        new_eta = eta * (result.eta_next / result.eta_probed)
        move(new_eta)
        self._set_rates(new_eta)
        return new_eta, result, probed

    def _base_step(self, eta: float) -> None:
        self._set_rates(eta)
        self.base.step()

    def _set_rates(self, eta: float) -> None:
        for group, ratio in zip(self.base.param_groups, self._rate_ratios, strict=True):
            group["lr"] = eta * ratio

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def eta(self) -> float:
        """The learning rate in force, without decay."""
        return self._fixed_eta if self.probe is None else self.probe.eta

    @property
    def steps_left(self) -> int:
        """How many steps the privacy plan still allows."""
        return self.split.steps - self.ledger.steps

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's groups; their "lr" is what the last step used."""
        return self.base.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. :meth:`step` does so itself; kept for loops written for other optimizers."""
        self.base.zero_grad(set_to_none=set_to_none)

    def epsilon_spent(self, target_delta: float | None = None) -> float:
        """Epsilon of all that was released so far, at the plan's delta unless another is given."""
        return self.ledger.epsilon(target_delta)

    def state_dict(self) -> dict[str, Any]:
        """Everything that :meth:`load_state_dict` needs to go on bit for bit, model included: tensors and plain values.

        As with torch's own, its tensors are those of the live model and optimizer: save or copy it before stepping on.
        The states of several processes differ only in the random state that dropout draws from; to go on bit for bit,
        each process saves and loads its own. Any of them may be loaded by any number of processes.
        """
        return {
            "model": self.module.state_dict(),
            "base_optimizer": self.base.state_dict(),
            "probe": None if self.probe is None else self.probe.state_dict(),
            "ledger": self.ledger.state_dict(),
            "sampler": None if self.sampler is None else self.sampler.state_dict(),
            "gradient_noise": self._gradient_noise.get_state(),
            "probe_noise": self._probe_noise.get_state(),
            "random_state": RandomState.capture(self._parameters[0].device).states,
            "history": [dict(row) for row in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, torch's global generator included; the settings must be the same.

        Raises:
            ValueError: the state is of another plan (noise, steps, sample rate) or another kind of run, or several
                processes load states of different runs or steps.
        """
        noise = hashlib.sha256(state["gradient_noise"].cpu().numpy().tobytes()).hexdigest()[:8]
        self.processes.agree(steps=state["ledger"]["steps"], generator=noise)
        if (state["probe"] is None) != (self.probe is None):
            raise ValueError("state is of a run that learned its rate and this one does not, or the other way round")
        self.ledger.load_state_dict(state["ledger"])
        self.module.load_state_dict(state["model"])
        self.base.load_state_dict(copy.deepcopy(state["base_optimizer"]))  # torch would go on using its tensors
        if self.probe is not None:
            self.probe.load_state_dict(state["probe"])
        if self.sampler is not None and state["sampler"] is not None:
            self.sampler.load_state_dict(state["sampler"])
        self._gradient_noise.set_state(state["gradient_noise"].cpu())
        self._probe_noise.set_state(state["probe_noise"].cpu())
        RandomState(self._parameters[0].device, state["random_state"]).restore()
        self.history = [dict(row) for row in state["history"]]

    def __repr__(self) -> str:
        learned = "fixed" if self.probe is None else f"learned from {self.probe.kind}"
        return (
            f"{type(self).__name__}({type(self.base).__name__}, step {self.ledger.steps} of {self.split.steps}, "
            f"eta {self.eta:.3g} ({learned}), clipping {self._engine.clipping}, engine {self._engine.name!r},\n"
            f"  {self.split})"
        )
