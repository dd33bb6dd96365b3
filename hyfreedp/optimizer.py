"""Algorithm 1 around any torch optimizer: private gradient, private probe or look, learning rate, update.

One step works on one Poisson batch. Its gradient and its probe, or look, are two adaptive releases on that same batch,
which is how the accountant counts them. All that decides about the learning rate is computed from what was released.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hyfreedp.accounting import NoiseSplit, PrivacyLedger
from hyfreedp.data.batches import Loss, PhysicalBatchSize, batch_length, check_physical_batch_size
from hyfreedp.data.sampling import PoissonSampler
from hyfreedp.gradients import GradientEngine
from hyfreedp.gradients.plain import check_plain_loss
from hyfreedp.gradients.step_batch import StepBatch, Weights
from hyfreedp.gradients.validate import check_modes
from hyfreedp.learner import BatchView, FixedRate, RateLearner
from hyfreedp.noise import NoiseGenerator
from hyfreedp.plan import RunPlan
from hyfreedp.processes.group import Processes
from hyfreedp.pytorch.base_optimizer import BaseOptimizer
from hyfreedp.pytorch.layers import layers_of
from hyfreedp.pytorch.records import ProbeResult, StepRecord, raw_values
from hyfreedp.pytorch.wrapper import OptimizerWrapper, Unprepared, run_step_hooks
from hyfreedp.release import Releases
from hyfreedp.run_state import RunState

_TRAINED: WeakSet[nn.Module] = WeakSet()  # models that private steps have trained in this process, and their layers


class HyFreeDPOptimizer(Unprepared, OptimizerWrapper):
    """Wraps a torch optimizer, and is one: :meth:`step` takes a loss and a batch and does the rest.

    The base optimizer turns the private gradient into an update direction G; its own learning rate only sets the ratio
    between parameter groups. It must be linear in its learning rate, as SGD, AdamW, Adam and RMSprop are (decoupled
    weight decay included). Its own step is refused. Learning-rate schedulers of torch take this optimizer, and are
    followed where the rate is not learned (preset "fixed"). Made by :class:`hyfreedp.PrivacyEngine`.

    Args:
        optimizer: the base optimizer over exactly the trainable parameters of ``module``.
        module: the model, in train mode.
        plan: what each step releases, with how much noise.
        gradient_engine: clips and sums per-sample gradients of ``module``.
        rate_learner: learns the rate as the plan has it; None keeps the base optimizer's own rates.
        sampler: the Poisson sampler of the loader, whose batches :meth:`step` takes.
        generator: of the noise of gradients and probes, each step with a key of its own.
        expected_batch_size: sample rate times number of records.
        max_physical_batch_size: how many samples are computed together at most, or a function of one record that says
            how many of its shape are (see :func:`hyfreedp.token_budget`).
        diagnostics: also record raw values, which are not private.
        without_guarantee: take any batches, which are then no Poisson samples.
        processes: those that train this model together, with the same arguments; None if this one is alone.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        module: nn.Module,
        plan: RunPlan,
        gradient_engine: GradientEngine,
        rate_learner: RateLearner | None,
        sampler: PoissonSampler,
        generator: NoiseGenerator,
        expected_batch_size: float,
        max_physical_batch_size: PhysicalBatchSize = None,
        diagnostics: bool = False,
        without_guarantee: bool = False,
        processes: Processes | None = None,
    ) -> None:
        check_physical_batch_size(max_physical_batch_size)
        super().__init__(optimizer)
        self.module, self.plan = module, plan
        self._sampler, self._sampled = sampler, not without_guarantee
        self.gradient_engine = gradient_engine
        self.rate_learner = rate_learner or FixedRate(self._own_rate)
        self.ledger = PrivacyLedger(plan.split)
        self.expected_batch_size = expected_batch_size
        self.max_physical_batch_size = max_physical_batch_size
        self.diagnostics = diagnostics
        self.processes = processes or Processes()
        self._base = BaseOptimizer(optimizer, module, plan.learns_rate, plan.decays)
        self._generator = generator
        self._releases = Releases(self.ledger, gradient_engine, generator, expected_batch_size, self.processes)
        self._run = RunState(
            module,
            self._base,
            self.rate_learner,
            self.ledger,
            sampler,
            generator,
            history=[],
            settings=self._describe(),
            processes=self.processes,
        )
        self._wired_by = os.getpid()
        self._compared = False  # whether the loss of a batch was, with those of its records
        self._told = self._warn_if_trained(stacklevel=5)

    # -- Algorithm 1 ---------------------------------------------------------------------------------------------------

    @run_step_hooks
    def step(self, loss: Loss, batch: Any, *, weights: Weights = None) -> StepRecord:  # type: ignore[override]
        """One step of Algorithm 1 on one Poisson batch: gradient, look or probe, update. Threat model: WR.

        Args:
            loss: maps one record, as ``collate_fn([record])`` gives it (a batch of that record alone), to one number.
                It is mapped over the records of the batch, none of which sees another, so that losses with a mean over
                the batch work as they are: ``criterion(model(x), y)``, ``model(**record).loss``. Called again for
                looks and probes, without gradients. Random numbers of torch, NumPy and Python are those of the run's
                key, see :mod:`hyfreedp.noise.random_states`; the caller's states are put back.
            batch: what the loader gave; without guarantee any structure of tensors whose first dimension is the
                samples. May be empty.
            weights: maps one record to how much it counts, one number in [0, 1] (an owner counts as the mean of its
                records). They multiply what is clipped already: gradient, votes, and losses of a line search. Weights
                within ``loss`` change little where gradients are normalised.

        Raises:
            BudgetExhausted: the planned steps are done, or a step would be released again with other data.
            ValueError, TypeError: the model is in eval mode, one of its layers has come to mix samples or to keep raw
                statistics, or losses or weights have the wrong form; or, at the first step, a batch's loss is not made
                of its records' (see :mod:`hyfreedp.gradients.plain`).
            RuntimeError: one of several processes raised such an error or has died; or this one is a fork of the one
                that wired the run.

        An error within a probe leaves the step along which it looks made and counted, at the old rate. One after a look
        leaves the step to be made, from the weights and the rate that it found, and the look counted.
        """
        t, learner, look, probe, probed = self.ledger.steps, self.rate_learner, None, None, None
        self._begin(t)
        try:
            with self.processes.all_or_none():
                samples = self._samples(t, loss, batch, weights)
            if self.plan.votes_before(t):
                look = learner.vote_before_step(self._releases.before_step(t, samples))
            with self.processes.all_or_none():
                losses, norms = samples.add_gradients()  # lines 2 and 3
            self._set_gradient(self._releases.gradient(self._base.parameters))  # line 4
            eta = self._rate(t)
            if self.plan.probes_after(t):
                move = self._base.step_along(eta)  # line 5
                probe, probed, eta = self._probe(self._releases.after_step(t, samples), losses, move, eta)  # 7 to 12
            else:
                self._base.step(eta)  # line 13
            learner.on_step_end()
        except BaseException:
            learner.undo()  # of a look, unless the step's gradient was released
            raise
        finally:
            self._clear()  # sums, norms and gradients of a step that failed may be raw
        diagnostics = self._raw_values(losses, norms, probed) if self.diagnostics else None
        record = StepRecord(t, eta, probe, look, diagnostics)
        self._run.history.append(record.to_dict())
        return record

    def _begin(self, t: int) -> None:
        """Refuse a step that may not be made; nothing of the batch is used yet."""
        if os.getpid() != self._wired_by:
            raise RuntimeError(
                "this run was wired before the process was forked, so parent and child would release with the same "
                "noise: call make_private_with_epsilon in the process that trains"
            )
        self.processes.check_joined()
        self.ledger.check()
        self._told = self._told or (t == 0 and self._warn_if_trained(stacklevel=5))  # by a run that was wired since
        self._base.sync_scheduler()
        self.rate_learner.on_step_start(t)
        self._clear()

    def _samples(self, t: int, loss: Loss, batch: Any, weights: Weights) -> StepBatch:
        """The batch and its loss, checked before anything of it is released."""
        if not self.module.training:
            raise ValueError("the model must be in train mode: call model.train() before optimizer.step")
        check_modes(self.module)  # also of steps that look before they take gradients
        self._base.check()
        if self._sampled and self.split.gradient_noise_multiplier(t) > 0:
            if self.sampler.position != t:
                raise RuntimeError(
                    f"the run has made {t} steps and its sampler stands at {self.sampler.position}: load a "
                    "state of the run, or begin it again"
                )
            self.sampler.check_drawn(batch_length(batch))
        samples = StepBatch(
            loss,
            batch,
            self.gradient_engine,
            max_physical_batch_size=self.max_physical_batch_size,
            generator=self._generator.child("torch", t, self.processes.rank),
            coins=self._generator.child("coins", t).key,
            weights=weights,
        )
        if not self._compared:
            self._compared = check_plain_loss(samples, self.module, self._generator.child("plain", t).key)
        return samples

    def _set_gradient(self, private: list[Tensor]) -> None:
        """The private gradient into ``.grad``, once it is counted."""
        self.zero_grad()  # a loss may have made raw ones, also of what is frozen
        for parameter, gradient in zip(self._base.parameters, private, strict=True):
            parameter.grad = gradient.to(parameter.dtype)  # rounding to half precision comes after the noise
        if self.module not in _TRAINED:
            trained = [m for m in layers_of(self.module) if any(p.requires_grad for p in m.parameters(False))]
            _TRAINED.update((self.module, *trained))
        if self._sampled:
            self.sampler.position = self.ledger.steps
        self.rate_learner.on_gradient()

    def _rate(self, t: int) -> float:
        """eta of step t; 0 after no gradient but zeros, which move nothing and set no unit."""
        eta = self.rate_learner.eta * self.plan.rate_factor(t)
        return 0.0 if math.isnan(eta) else eta

    def _probe(
        self, view: BatchView, here: Tensor, move: Callable[[float], None], eta: float
    ) -> tuple[ProbeResult, Tensor, float]:
        """Look along the step, then move to where the new rate leads; result, raw losses, and that rate."""
        before = self.rate_learner.state_dict()
        try:
            result, probed = self.rate_learner.probe_after_step(view, here, move)
        except BaseException:
            self.rate_learner.load_state_dict(before)
            move(eta)
            raise
        if result.eta_next != result.eta_probed:
            eta *= result.eta_next / result.eta_probed
        move(eta)
        return result, probed, eta

    def _raw_values(self, losses: Tensor, norms: Tensor, probed: Tensor | None) -> dict[str, float]:
        join = self.processes.join_samples
        return raw_values(join(losses), join(norms), None if probed is None else join(probed))

    def _clear(self) -> None:
        self.zero_grad()
        self.gradient_engine.clear()

    def _warn_if_trained(self, stacklevel: int) -> bool:
        """Tell, and return, whether a private run has trained layers of the model in this process."""
        if before := any(layer in _TRAINED for layer in layers_of(self.module)):
            warnings.warn(
                "this model was trained privately before: epsilon of the new run does not include that run's. Make "
                "model and optimizer anew, or add the two",
                stacklevel=stacklevel,
            )
        return before

    # -- what a run tells ----------------------------------------------------------------------------------------------

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row for each step, see :meth:`StepRecord.to_dict`: copies of what was released. Threat model: WR."""
        return [dict(row) for row in self._run.history]

    @property
    def split(self) -> NoiseSplit:
        """The noise of the run and its steps with a probe, which cannot be changed."""
        return self.plan.split

    @property
    def sampler(self) -> PoissonSampler:
        """The sampler of the loader. It cannot be replaced: see ``without_guarantee`` of the engine."""
        return self._sampler

    @property
    def eta(self) -> float:
        """The learning rate in force, without decay. Threat model: WR."""
        return self.rate_learner.eta

    def _own_rate(self) -> float:
        return self._base.eta if self.plan.decays else float(self.param_groups[0]["lr"])

    @property
    def guarantee(self) -> bool:
        """Whether the run is proven to stay within its target: its split is, and it takes the sampler's batches."""
        there = self.sampler.position, self.sampler.sample_rate
        return self.split.guarantee and self._sampled and there == (self.ledger.steps, self.split.sample_rate)

    @property
    def steps_left(self) -> int:
        """How many steps the privacy plan still allows."""
        return self.split.steps - self.ledger.steps

    def epsilon_spent(self, target_delta: float | None = None) -> float:
        """Epsilon of all that is known to be released, at the plan's delta or another. Threat model: WR."""
        return self.ledger.epsilon(target_delta)

    def averaged(self) -> AbstractContextManager[None]:
        """Around an evaluation before the run has ended: the weights are those at which it would end now.

        With preset "robust" these are an average, at which the last step leaves the model; else they stay as they are.
        """
        return self.rate_learner.averaged()

    # -- what torch expects of an optimizer ----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. :meth:`step` does so itself; for loops written for other optimizers."""
        self.base.zero_grad(set_to_none=set_to_none)  # no sums: a loss may call it between two pieces of a batch

    def state_dict(self) -> dict[str, Any]:
        """All that :meth:`load_state_dict` needs to go on bit for bit: tensors and plain values. Threat model: CK.

        It holds the key of all noise: keep it as secret as the data, and publish the model alone. As with torch's own,
        its tensors are those of the live model and optimizer: save or copy it before stepping on. All processes have
        the same state, which may be loaded by any number of them.
        """
        return self._run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; the run must be the same.

        A step made again on the same data is the same release; on other data the ledger refuses it where it knows of
        the first. It does not know what another process has released since: publish nothing that was made after the
        last saved state. Nor does it know the records: resume on the same ones, since releases that come out equal
        after one was erased tell that it was in none of their batches.

        Raises:
            ValueError: the state is of another run, and what differs; or this one has made steps already, which a
                state of another run would make forget; or processes load states of different runs.
            BudgetExhausted: this one and the state have released a step with different data.
        """
        self._run.load_state_dict(state)

    def _describe(self) -> dict[str, str]:
        """What a saved state must agree with, beside the plan. Sizes of pieces, engine and processes may change."""
        return {
            "number of records": str(self.sampler.num_records),
            "batches": "the sampler's" if self._sampled else "any, without guarantee",
            "expected batch size": repr(self.expected_batch_size),
            "clipping": repr(self.gradient_engine.clipping),
            "rate learner": repr(self.rate_learner),
            "learning rate": "learned" if self.plan.learns_rate else repr(self._base.eta),
            "decay": f"{self.plan.preset.decay} from {self.plan.preset.decay_start!r}",
            **self._base.settings(),
            "noise": "secure" if self._generator.secure else "standard",
        }

    def __repr__(self) -> str:
        """Plan, progress and rate. Threat model: WR."""
        learned = f"learned from {self.split.probe}" if self.plan.learns_rate else "fixed"
        return (
            f"{type(self).__name__}({type(self.base).__name__}, step {self.ledger.steps} of {self.split.steps}, "
            f"eta {self.eta:.3g} ({learned}), clipping {self.gradient_engine.clipping},\n"
            f"  {self.split})"
        )
