"""Algorithm 1 around any torch optimizer: private gradient, private probe or look, learning rate, update.

One step works on one Poisson batch. Its gradient and its probe, or look, are two adaptive releases on that same batch,
which is how the accountant counts them. All that decides about the learning rate is computed from what was released.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hyfreedp.accounting import NoiseSplit, PrivacyLedger
from hyfreedp.accounting.ledger import Tags
from hyfreedp.checks import check_same_model, check_same_run
from hyfreedp.data.batches import Loss, PhysicalBatchSize, batch_length, check_physical_batch_size
from hyfreedp.data.sampling import PoissonSampler
from hyfreedp.gradients import GradientEngine
from hyfreedp.gradients.passes import Passes, Weights
from hyfreedp.gradients.plain import check_plain_loss
from hyfreedp.gradients.validate import check_modes
from hyfreedp.learner import FixedRate, Look, RateLearner
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_gradient
from hyfreedp.processes.group import Processes
from hyfreedp.pytorch.base_optimizer import BaseOptimizer
from hyfreedp.pytorch.layers import layers_of
from hyfreedp.pytorch.records import ProbeResult, StepRecord, raw_values
from hyfreedp.pytorch.wrapper import OptimizerWrapper, Unprepared, hooked_step
from hyfreedp.schedule import Decay, decay_factor

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
        gradient_engine: clips and sums per-sample gradients of ``module``.
        split: noise multipliers and plan of the run.
        generator: of the noise of gradients and probes, each step with a key of its own.
        expected_batch_size: sample rate times number of records.
        rate_learner: learns the rate as the split has it, by a line search or by looks; None keeps the base optimizer's
            own rates.
        decay: shape of the fall to zero at the horizon, beginning at the share ``decay_start`` of the run.
        max_physical_batch_size: how many samples are computed together at most, or a function of one record that says
            how many of its shape are (see :func:`hyfreedp.token_budget`).
        sampler: the Poisson sampler of the loader, whose batches alone :meth:`step` takes. Set it to None to step with
            batches of your own, which leaves epsilon without a guarantee.
        diagnostics: also record raw values, which are not private.
        processes: those that train this model together, with the same arguments; None if this one is alone.

    Raises:
        ValueError: an argument is out of range.
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
        rate_learner: RateLearner | None,
        decay: Decay = "none",
        decay_start: float = 0.0,
        max_physical_batch_size: PhysicalBatchSize = None,
        sampler: PoissonSampler | None = None,
        diagnostics: bool = False,
        processes: Processes | None = None,
    ) -> None:
        check_physical_batch_size(max_physical_batch_size)
        self.rate_learner = rate_learner or FixedRate(self._own_rate)
        super().__init__(optimizer)
        self.module = module
        self.ledger = PrivacyLedger(split)
        self.expected_batch_size = expected_batch_size
        self.decay: Decay = decay
        self.decay_start = decay_start
        self.max_physical_batch_size = max_physical_batch_size
        self.sampler = sampler
        self.diagnostics = diagnostics
        self.processes = processes or Processes()
        self._rows: list[dict[str, Any]] = []
        self.gradient_engine = gradient_engine
        self._base = BaseOptimizer(optimizer, module, self.rate_learner.kind != "none", decay != "none")
        self._generator = generator
        self._wired_by = os.getpid()
        self._compared = False  # whether the loss of a batch was, with those of its records
        self._others = False  # whether steps took batches that were not the sampler's, which no state makes undone
        self._settings = self._describe()
        self._told = self._warn_if_trained(stacklevel=5)

    @hooked_step
    def step(self, loss: Loss, batch: Any, *, weights: Weights = None) -> StepRecord:  # type: ignore[override]
        """One step of Algorithm 1 on one Poisson batch: gradient, look or probe, update. Threat model: WR.

        Args:
            loss: maps one record, as ``collate_fn([record])`` gives it (a batch of that record alone), to one number.
                It is mapped over the records of the batch, none of which sees another, so that losses with a mean over
                the batch work as they are: ``criterion(model(x), y)``, ``model(**record).loss``. Called again for
                looks and probes, without gradients. Random numbers of torch, NumPy and Python are those of the run's
                key, see :mod:`hyfreedp.noise.random_states`; the caller's states are put back.
            batch: what the loader gave; or any structure of tensors whose first dimension is the samples. May be empty.
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
        self._check_not_forked()
        self.processes.check_joined()
        self.ledger.check()
        self._told = self._told or (t == 0 and self._warn_if_trained(stacklevel=4))  # by a run that was wired since
        self._base.sync_scheduler()
        learner.on_step_start(t)
        self._clear()
        self._others |= self.sampler is None
        try:
            with self.processes.all_or_none():
                passes = self._passes(t, loss, batch, weights)
            if t in learner.vote_steps:
                look = learner.before_gradient(self._look(t, "look", passes))
            with self.processes.all_or_none():
                losses, norms = passes.add_gradients()  # lines 2 to 4
            self._privatize_gradient(t)  # line 4
            if self.module not in _TRAINED:
                owners = [m for m in layers_of(self.module) if any(p.requires_grad for p in m.parameters(False))]
                _TRAINED.update((self.module, *owners))
            if self.sampler is not None:
                self.sampler.position = self.ledger.steps
            learner.on_gradient()
            eta = learner.eta * decay_factor(t, self.split.steps, self.decay, self.decay_start)
            eta = 0.0 if math.isnan(eta) else eta  # no gradient so far but zeros, which move nothing and set no unit
            if self.split.is_probe_step(t) and learner.probes_along_update:
                move = self._base.step_along(eta)  # line 5
                view = self._look(t, "probe", passes)
                probe, probed, eta = self._probe(learner, view, losses, move, eta)  # lines 7 to 12
            else:
                self._base.step(eta)
            learner.on_step_end()
        except BaseException:
            learner.undo()  # of a look, unless the step's gradient was released
            raise
        finally:
            self._clear()  # sums, norms and gradients of a step that failed may be raw

        join, diagnostics = self.processes.join_samples, None
        if self.diagnostics:
            diagnostics = raw_values(join(losses), join(norms), None if probed is None else join(probed))
        record = StepRecord(t, eta, probe, look, diagnostics)
        self._rows.append(record.to_dict())
        return record

    def _warn_if_trained(self, stacklevel: int) -> bool:
        """Tell, and return, whether a private run has trained layers of the model in this process."""
        if before := any(layer in _TRAINED for layer in layers_of(self.module)):
            warnings.warn(
                "this model was trained privately before: epsilon of the new run does not include that run's. Make "
                "model and optimizer anew, or add the two",
                stacklevel=stacklevel,
            )
        return before

    def _check_not_forked(self) -> None:
        """Refuse a copy of the run that ``os.fork`` made: both would release with the same noise."""
        if os.getpid() != self._wired_by:
            raise RuntimeError(
                "this run was wired before the process was forked, so parent and child would release with the same "
                "noise: call make_private_with_epsilon in the process that trains"
            )

    def _passes(self, t: int, loss: Loss, batch: Any, weights: Weights) -> Passes:
        """The batch, checked before anything of it is released."""
        if not self.module.training:
            raise ValueError("the model must be in train mode: call model.train() before optimizer.step")
        check_modes(self.module)  # also of steps that look before they take gradients
        self._base.check()
        if self.sampler is not None and self.split.gradient_noise_multiplier(t) > 0:
            if self.sampler.position != t:
                raise RuntimeError(
                    f"the run has made {t} steps and its sampler stands at {self.sampler.position}: steps were taken "
                    "with other batches, so epsilon has no guarantee any more. Leave optimizer.sampler = None to go on"
                )
            self.sampler.check_drawn(batch_length(batch))
        passes = Passes(
            loss,
            batch,
            self.gradient_engine,
            max_physical_batch_size=self.max_physical_batch_size,
            generator=self._generator.child("torch", t, self.processes.rank),
            coins=self._generator.child("coins", t).key,
            weights=weights,
        )
        if not self._compared:
            self._compared = check_plain_loss(passes, self.module, self._generator.child("plain", t).key)
        return passes

    def _privatize_gradient(self, t: int) -> None:
        """The private mean gradient of all processes into ``.grad``, counted before."""
        sums = self.gradient_engine.clipped_sums(self._base.parameters)
        self.processes.add_up(sums)
        generator = self._generator.child("gradient", t)
        privatize_gradient(
            sums,
            self.split.gradient_noise_multiplier(t),
            sensitivity=self.gradient_engine.sensitivity,
            expected_batch_size=self.expected_batch_size,
            generator=generator,
        )
        self.zero_grad()  # a loss may have made raw ones, also of what is frozen
        for parameter, private in zip(self._base.parameters, sums, strict=True):
            parameter.grad = private.to(parameter.dtype)  # rounding to half precision comes after the noise
        self.processes.check_same(generator.tag)
        self.ledger.record(generator.tag)

    def _look(self, t: int, what: str, passes: Passes) -> Look:
        """What a learner of the rate may do with the batch of step t."""
        return Look(
            noise_multiplier=self.split.sigma_loss,
            expected_batch_size=self.expected_batch_size,
            generator=self._generator.child(what, t),
            passes=passes,
            processes=self.processes,
            count=self.ledger.record_look if what == "look" else self.ledger.record_probe,
        )

    def _probe(
        self, learner: RateLearner, look: Look, here: Tensor, move: Callable[[float], None], eta: float
    ) -> tuple[ProbeResult, Tensor, float]:
        """Look along the step, then move to where the new rate leads; result, raw losses, and that rate."""
        before = learner.state_dict()
        try:
            result, probed = learner.along_update(look, here, move)
        except BaseException:
            learner.load_state_dict(before)
            move(eta)
            raise
        if result.eta_next != result.eta_probed:
            eta *= result.eta_next / result.eta_probed
        move(eta)
        return result, probed, eta

    def _own_rate(self) -> float:
        return self._base.eta if self.decay != "none" else float(self.param_groups[0]["lr"])

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row for each step, see :meth:`StepRecord.to_dict`: copies of what was released. Threat model: WR."""
        return [dict(row) for row in self._rows]

    @property
    def split(self) -> NoiseSplit:
        """The plan of the run and its noise, which cannot be changed."""
        return self.ledger.split

    @property
    def eta(self) -> float:
        """The learning rate in force, without decay. Threat model: WR."""
        return self.rate_learner.eta

    @property
    def guarantee(self) -> bool:
        """Whether the run is proven to stay within its target: its split is, and all batches were the sampler's."""
        there = self.sampler and (self.sampler.position, self.sampler.sample_rate)
        return self.split.guarantee and there == (self.ledger.steps, self.split.sample_rate) and not self._others

    def averaged(self) -> AbstractContextManager[None]:
        """Around an evaluation before the run has ended: the weights are those at which it would end now.

        With preset "robust" these are an average, at which the last step leaves the model; else they stay as they are.
        """
        return self.rate_learner.averaged()

    @property
    def steps_left(self) -> int:
        """How many steps the privacy plan still allows."""
        return self.split.steps - self.ledger.steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. :meth:`step` does so itself; for loops written for other optimizers."""
        self.base.zero_grad(set_to_none=set_to_none)  # no sums: a loss may call it between two pieces of a batch

    def _clear(self) -> None:
        self.zero_grad()
        self.gradient_engine.clear()

    def epsilon_spent(self, target_delta: float | None = None) -> float:
        """Epsilon of all that is known to be released, at the plan's delta or another. Threat model: WR."""
        return self.ledger.epsilon(target_delta)

    def get_epsilon(self, delta: float) -> float:
        """:meth:`epsilon_spent` by its name in Opacus. Threat model: WR."""
        return self.epsilon_spent(delta)

    def state_dict(self) -> dict[str, Any]:
        """All that :meth:`load_state_dict` needs to go on bit for bit: tensors and plain values. Threat model: CK.

        It holds the key of all noise: keep it as secret as the data, and publish the model alone. As with torch's own,
        its tensors are those of the live model and optimizer: save or copy it before stepping on. All processes have
        the same state, which may be loaded by any number of them.
        """
        return {"base_optimizer": self.base.state_dict(), **self._own_state()}

    def _own_state(self) -> dict[str, Any]:
        """All but the base optimizer's, whose hooks are a user's."""
        return {
            "model": self.module.state_dict(),
            "rate": self.rate_learner.state_dict(),
            "ledger": self.ledger.state_dict(),
            "sampler": None if self.sampler is None else self.sampler.state_dict(),
            "generator": self._generator.state_dict(),
            "settings": dict(self._settings),
            "history": [dict(row) for row in self._rows],
        }

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
        if "generator" not in state:
            raise ValueError("the state must be what state_dict() of a private optimizer gave")
        key = state["generator"]["key"]
        self.processes.agree(steps=state["ledger"]["steps"], generator=hashlib.sha256(key.encode()).hexdigest()[:8])
        check_same_run(self._settings, state["settings"])
        check_same_model(self.module.state_dict(), state["model"])
        known = self.ledger.released
        if known and key != self._generator.key.hex():
            raise ValueError(
                f"the state is of another run, and this one has made {self.ledger.steps} steps: call "
                "make_private_with_epsilon again, and load the state into what that returns"
            )
        present = copy.deepcopy(self._own_state())
        moments = {parameter: copy.deepcopy(values) for parameter, values in self.base.state.items()}
        groups = [dict(group) for group in self.base.param_groups]
        try:
            self._restore(state, known)
            self.base.load_state_dict(copy.deepcopy(state["base_optimizer"]))  # torch would go on using its tensors
        except BaseException:
            self._restore(present, ())
            self.base.__setstate__({"state": defaultdict(dict, moments), "param_groups": groups})
            raise
        if not self._base.follows:
            self._base.note_rates()

    def _restore(self, state: Mapping[str, Any], known: Iterable[Tags]) -> None:
        """Become what a checked state says, but for the base optimizer; ``known`` are releases of the same run."""
        self.ledger.load_state_dict(state["ledger"], known=known)
        self.module.load_state_dict(state["model"])
        self.rate_learner.load_state_dict(state["rate"])
        if self.sampler is not None and state["sampler"] is not None:
            self.sampler.load_state_dict(state["sampler"])
        self._generator.load_state_dict(state["generator"])
        self._rows = [dict(row) for row in state["history"]]

    def _describe(self) -> dict[str, str]:
        """What a saved state must agree with, beside the plan. Sizes of pieces, engine and processes may change."""
        return {
            "number of records": str(None if self.sampler is None else self.sampler.num_records),
            "expected batch size": repr(self.expected_batch_size),
            "clipping": repr(self.gradient_engine.clipping),
            "rate learner": repr(self.rate_learner),
            "learning rate": repr(self._base.eta) if self.rate_learner.kind == "none" else "learned",
            "decay": f"{self.decay} from {self.decay_start!r}",
            **self._base.settings(),
            "noise": "secure" if self._generator.secure else "standard",
        }

    def __repr__(self) -> str:
        """Plan, progress and rate. Threat model: WR."""
        engine = self.gradient_engine
        learned = "fixed" if self.rate_learner.kind == "none" else f"learned from {self.rate_learner.kind}"
        return (
            f"{type(self).__name__}({type(self.base).__name__}, step {self.ledger.steps} of {self.split.steps}, "
            f"eta {self.eta:.3g} ({learned}), clipping {engine.clipping},\n"
            f"  {self.split})"
        )
