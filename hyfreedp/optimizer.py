"""Algorithm 1 around any torch optimizer: private gradient, private probe or look, learning rate, update.

Each step uses one Poisson batch. It releases the gradient of that batch and, in some steps, a probe or look of the same
batch, and is accounted for as one release of both. The learning rate is computed from released values only.
"""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hyfreedp.accounting import NoiseSplit, PrivacyLedger
from hyfreedp.checks import check_arguments
from hyfreedp.data.batches import Loss, PhysicalBatchSize
from hyfreedp.data.sampling import PoissonSampler
from hyfreedp.gradients import GradientEngine
from hyfreedp.gradients.plain import check_plain_loss
from hyfreedp.gradients.validate import check_module
from hyfreedp.learner import RateLearner
from hyfreedp.noise import NoiseGenerator
from hyfreedp.preset import RunPlan
from hyfreedp.processes.group import Processes
from hyfreedp.pytorch.base_optimizer import BaseOptimizer
from hyfreedp.pytorch.records import StepRecord, raw_values
from hyfreedp.pytorch.wrapper import OptimizerWrapper, Unprepared, run_step_hooks
from hyfreedp.run_state import RunState
from hyfreedp.statement import Statement
from hyfreedp.step_batch import StepBatch, StepContext, Weights

_TRAINED: WeakSet[nn.Module] = WeakSet()  # models and layers that private steps of this process have trained


class HyFreeDPOptimizer(Unprepared, OptimizerWrapper):
    """A private optimizer around a torch optimizer: :meth:`step` takes a loss and a batch.

    The base optimizer turns the private gradient into an update direction G. Its update must be linear in the learning
    rate, as those of SGD, AdamW, Adam and RMSprop are (decoupled weight decay included); its own ``step`` raises an
    error. Torch's learning-rate schedulers work if the rate is not learned (preset "fixed").
    :class:`hyfreedp.PrivacyEngine` makes it, and documents other arguments. WR and CK are rows of docs/threat-model.md.

    Args:
        optimizer: the base optimizer, over exactly the trainable parameters of the model.
        plan: what each step releases, and with how much noise.
        gradient_engine: clips and sums the per-sample gradients of its model.
        rate_learner: learns the rate; None: the base optimizer's own rates are used.
        sampler: the Poisson sampler of the loader whose batches :meth:`step` takes.
        generator: source of all noise; each step and purpose gets a key of its own.
        processes: the processes that train this model together.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        plan: RunPlan,
        gradient_engine: GradientEngine,
        rate_learner: RateLearner | None,
        sampler: PoissonSampler,
        generator: NoiseGenerator,
        max_physical_batch_size: PhysicalBatchSize = None,
        diagnostics: bool = False,
        without_guarantee: bool = False,
        processes: Processes,
    ) -> None:
        super().__init__(optimizer)
        self.module = module = gradient_engine.module
        self.plan, self.ledger = plan, PrivacyLedger(plan.split)
        self._sampler, self._sampled = sampler, not without_guarantee
        learned, decays = self.split.probe != "none", plan.preset.decay != "none"
        self._base = BaseOptimizer(optimizer, module, learned=learned, decays=decays)
        self.gradient_engine, self.processes, self.diagnostics = gradient_engine, processes, diagnostics
        self.rate_learner = rate_learner or RateLearner(self._base)
        self.expected_batch_size = sampler.sample_rate * sampler.num_records
        self.max_physical_batch_size = max_physical_batch_size  # of the next step
        self._generator = generator
        parts = {"model": module, "rate": self.rate_learner, "sampler": sampler, "generator": generator}
        self._run = RunState(self._base, self.ledger, parts, self._describe(), processes)
        self._process_id = os.getpid()
        self._loss_compared = False  # whether check_plain_loss is done

    @run_step_hooks
    def step(self, loss: Loss, batch: Any, *, weights: Weights = None) -> StepRecord:  # type: ignore[override]
        """One step of Algorithm 1 on one Poisson batch: gradient, look or probe, update. Threat model: WR.

        Args:
            loss: maps one record, as ``collate_fn([record])`` returns it (a batch of one), to one number. It is mapped
                over the records of the batch, none of which sees another. So the usual losses with a mean over the
                batch work as they are: ``criterion(model(x), y)``, ``model(**record).loss``. Looks and probes call it
                again, without gradients. Random numbers of torch, NumPy and Python come from the run's key during
                these calls, see :mod:`hyfreedp.noise.random_states`.
            batch: what the loader yielded, possibly empty; without guarantee, any structure of tensors (B, ...).
            weights: maps one record to its weight in [0, 1] (with ``owners``: the mean over the owner's records). It
                multiplies the clipped gradient, the vote, and the loss of a line search. A weight inside ``loss`` has
                little effect, since gradients are normalised.

        Raises:
            BudgetExhausted: all planned steps are done, or the step was already released with other data.
            ValueError, TypeError: the model is in eval mode, one of its layers now mixes samples or keeps raw
                statistics, or losses or weights have the wrong form; or, at the first step, the loss of a batch differs
                from the losses of its records (see :mod:`hyfreedp.gradients.plain`).
            RuntimeError: the batch is not the loader's last, another run has the optimizer, a process failed or forked.

        NaN and +infinity count as the largest loss, gradients that are not finite as zero. If all records have such,
        the first step is refused, and others are made of noise alone, of which only ``diagnostics=True`` warns.

        If a probe raises an error, the step is made at the old rate, and counted. If an error occurs between a look and
        the gradient, weights and rate are restored, but the look is counted. The first step warns if another private
        run of this process has trained a layer of the model.
        """
        t, learner, place = self.ledger.steps, self.rate_learner, len(self._run.history)
        look = record = probed = None
        self._begin(t)
        kind = self.split.probe if self.split.is_probe_step(t) else "none"  # of the release beside the gradient's
        try:
            with self.processes.all_or_none():
                self._check(t, loss, batch)
                B, size = self.expected_batch_size, self.max_physical_batch_size
                run = StepContext(self.ledger, self._generator, self.processes, B, size)
                samples = StepBatch(run, self.gradient_engine, loss, batch, weights)
                if not self._loss_compared:
                    self._loss_compared = samples.owners or check_plain_loss(
                        self.gradient_engine, loss, samples.partition, self._generator.child("plain", t).key
                    )
            if kind == "look":
                look = learner.vote_before_step(samples)
            gradient, losses, norms = samples.release_gradient(self._base.parameters)  # lines 2 to 4
            self._note_release(gradient)
            eta = learner.eta * self.plan.rate_factor(t)
            eta = 0.0 if math.isnan(eta) else eta  # no rate is known yet if all gradients so far were zero
            record = StepRecord(t, eta, None, look)
            self._run.history[place:] = [record.to_dict()]  # now, so that no interrupt loses it
            if kind == "losses":
                move = self._base.step_along(gradient, eta)  # line 5
                try:
                    probe, probed = learner.probe_after_step(samples, losses.double(), move)  # lines 7 to 12
                    record = replace(record, eta=eta * (probe.eta_next / probe.eta_probed), probe=probe)
                finally:
                    move(record.eta)  # line 13; at the old rate after an error
            else:
                self._base.step(gradient, eta)  # line 13
            learner.on_step_end()
            if self.diagnostics:
                join = self.processes.join_samples
                raw = raw_values(join(losses.double()), join(norms), None if probed is None else join(probed))
                record = replace(record, diagnostics=raw)
        except BaseException:
            learner.undo()  # reverts a look, unless the step's gradient was released
            raise
        finally:
            self._make_ready()
            if record is not None:
                self._run.history[place:] = [record.to_dict()]
        return record

    def _begin(self, t: int) -> None:
        """Prepare step t, or refuse it, before the batch is looked at."""
        if os.getpid() != self._process_id:
            raise RuntimeError(
                "this run was wired before the process was forked, so parent and child would release with the same "
                "noise: call make_private_with_epsilon in the process that trains"
            )
        self.processes.check_joined()
        self.ledger.check()
        if t == 0 and any(layer in _TRAINED for layer in self.module.modules()):
            warnings.warn(
                "this model was trained privately before: epsilon of the new run does not include that run's. Make "
                "model and optimizer anew, or compose both by hyfreedp.total_epsilon",
                stacklevel=4,
            )
        self.rate_learner.on_step_start(t)
        self._make_ready()

    def _check(self, t: int, loss: Loss, batch: Any) -> None:
        """Refuse model, loss or batch that are not what step t takes."""
        if not self.module.training:
            raise ValueError("the model must be in train mode: call model.train() before optimizer.step")
        check_module(self.module)
        self._base.check()
        if not self._loss_compared:
            check_arguments(loss, "the record")
        if self._sampled and self.split.gradient_noise_multiplier(t) > 0:
            self.sampler.check_drawn(t, batch)

    def _note_release(self, gradient: Sequence[Tensor]) -> None:
        """Tell model and learner that the step's gradient is released, so that it can no longer be undone."""
        if self.module not in _TRAINED:
            trained = [m for m in self.module.modules() if any(p.requires_grad for p in m.parameters(False))]
            _TRAINED.update((self.module, *trained))
        self.rate_learner.on_gradient(gradient)

    def _make_ready(self) -> None:
        """Let the loader go on with the next step's batch, also after a step that failed, and leave no gradients."""
        if self._sampled:
            self.sampler.position = self.ledger.steps
        self._base.clear_gradients()

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was released, a copy of one row per step, see :meth:`StepRecord.to_dict`. Threat model: WR."""
        return [dict(row) for row in self._run.history]

    @property
    def split(self) -> NoiseSplit:
        """The noise multipliers of the run, and which of its steps have a probe or look."""
        return self.plan.split

    @property
    def sampler(self) -> PoissonSampler:
        """The Poisson sampler of the loader."""
        return self._sampler

    @property
    def eta(self) -> float:
        """The current learning rate, without decay. Threat model: WR."""
        return self.rate_learner.eta

    @property
    def guarantee(self) -> bool:
        """Whether the run provably stays within its target: the noise suffices, and all batches are Poisson samples."""
        return self.split.guarantee and self._batches_are_samples

    @property
    def _batches_are_samples(self) -> bool:
        return self._sampled and self.sampler.sample_rate == self.split.sample_rate

    @property
    def steps_left(self) -> int:
        """How many steps the plan still allows."""
        return self.split.steps - self.ledger.steps

    def epsilon_spent(self, target_delta: float | None = None) -> float:
        """Epsilon of all releases so far, at ``target_delta``, or at the plan's delta if None. Threat model: WR."""
        return self.ledger.epsilon(target_delta)

    def statement(self) -> Statement:
        """What the run guarantees so far, in words to publish and as JSON. Threat model: WR.

        ``print(optimizer.statement().fill(tuned="..."))``, see :class:`hyfreedp.Statement`. Checkpoints hold it, too.
        """
        return Statement(
            split=self.split,
            steps=len(self.ledger.released),
            unit=self.sampler.unit,
            number=self.sampler.num_records,
            sampled=self._batches_are_samples,
            clipping=repr(self.gradient_engine.clipping),
            noise="secure" if self._generator.secure else "standard",
        )

    def averaged(self) -> AbstractContextManager[None]:
        """A context for evaluation: the model has the weights with which the run would end if it ended now.

        With preset "robust" these are the average so far; with others the current weights.
        """
        return self.rate_learner.averaged()

    # -- what torch expects of an optimizer ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that :meth:`load_state_dict` needs to resume bit for bit: tensors and plain values. Threat model: CK.

        It holds the key of all noise: keep it as secret as the data, and publish the model alone. As in torch, its
        tensors are those of the live model and optimizer: save or copy it before the next step. All processes have the
        same state, and any number of processes may resume from it.
        """
        return {**self._run.state_dict(), "statement": self.statement().to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` of a run with the same arguments returned.

        A step that is repeated on the same data is the same release and costs nothing. On other data it is a second
        release, refused if the ledger knows of the first. It cannot know what was released after the state was saved:
        publish nothing of that. Resume on the same records: if one was erased, equal releases reveal that it was in
        none of their batches.

        Raises:
            ValueError: the state is of another run (the message says what differs), or not the same on all processes.
            RuntimeError: it is of another model, as torch says.
            BudgetExhausted: this run has already released a step that the state has with other data.
        """
        self._run.load_state_dict(state)
        self._make_ready()

    def _describe(self) -> dict[str, str]:
        """Settings that must be equal in a loaded state, beside the noise split."""
        return {
            f"number of {self.sampler.unit}s": str(self.sampler.num_records),
            "batches": "the sampler's" if self._sampled else "any, without guarantee",
            "expected batch size": repr(self.expected_batch_size),
            "clipping": repr(self.gradient_engine.clipping),
            "rate learner": repr(self.rate_learner),
            "learning rate": repr(self._base.eta) if self.split.probe == "none" else "learned",
            "decay": f"{self.plan.preset.decay} from {self.plan.preset.decay_start!r}",
            **self._base.settings(),
            "noise": "secure" if self._generator.secure else "standard",
        }

    def __repr__(self) -> str:
        """Optimizer, progress, rate, clipping and noise. Threat model: WR."""
        learned = "fixed" if self.split.probe == "none" else f"learned from {self.split.probe}"
        return (
            f"{type(self).__name__}({type(self.base).__name__}, step {self.ledger.steps} of {self.split.steps}, "
            f"eta {self.eta:.3g} ({learned}), clipping {self.gradient_engine.clipping},\n"
            f"  {self.split})"
        )
