"""Algorithm 1 around any torch optimizer: private gradient, private probe or vote, learning rate, update.

One step works on one Poisson batch. Its gradient and its probe, or vote, are two adaptive releases on that same batch,
which is how the accountant counts them. All that decides about the learning rate is computed from what was released.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.accounting import NoiseSplit, PrivacyLedger
from hyfreedp.base import BaseOptimizer
from hyfreedp.batches import PhysicalBatchSize, batch_length, check_physical_batch_size
from hyfreedp.buffers import BufferGuard
from hyfreedp.checkpoint import Resumable
from hyfreedp.checks import check_not_negative
from hyfreedp.clipping import GradientEngine, Misread
from hyfreedp.distributed import Processes
from hyfreedp.mixing import steps_to_check
from hyfreedp.noise import NoiseGenerator
from hyfreedp.passes import Passes, PerSampleLoss, Weights
from hyfreedp.privatize import loss_noise_std, privatize_gradient, privatize_votes
from hyfreedp.rate_learner import LineSearch, ProbeBatch, check_paid_for
from hyfreedp.records import ProbeResult, StepRecord, VoteResult, raw_values
from hyfreedp.renamed import renamed_argument, renamed_attribute
from hyfreedp.sampling import PoissonSampler, RandomState
from hyfreedp.sensitivity import VOTE_CLIP
from hyfreedp.step_rules import Decay, decay_factor
from hyfreedp.votes import VotedRate
from hyfreedp.wrapper import OptimizerWrapper, Unprepared, hooked_step


class HyFreeDPOptimizer(Unprepared, Resumable, OptimizerWrapper):
    """Wraps a torch optimizer, and is one: :meth:`step` takes a per-sample loss and a batch and does the rest.

    The base optimizer turns the private gradient into an update direction G; its own learning rate only sets the ratio
    between parameter groups. It advances its state once per step, whether or not the step probes. It must be linear in
    its learning rate, as SGD, AdamW, Adam and RMSprop are (decoupled weight decay included).

    Made by :class:`hyfreedp.PrivacyEngine`. Then the base optimizer steps by :meth:`step` only: its own is refused.
    Learning-rate schedulers of torch take it, and are followed where the rate is not learned (preset "fixed").

    Args:
        optimizer: the base optimizer over exactly the trainable parameters of ``module``.
        module: the model, in train mode.
        gradient_engine: clips and sums per-sample gradients of ``module``.
        split: noise multipliers and plan of the run.
        generator: of the noise of gradients and probes, each step with a key of its own.
        expected_batch_size: sample rate times number of records.
        rate_learner: learns the rate as the split has it, by a line search or by votes; None keeps the base optimizer's
            own rates.
        probe_batch: of a line search, which batch looks along a direction: the "same" that it comes from; or the
            "next": a probe step, before its gradient, looks along the step made last, and makes that anew at the rate
            learned (the first step has none to look along; records keep the rate that was first taken). Either way
            one batch bears a probe and a gradient, and is accounted for as such: independent releases would be probes
            whose batch serves nothing else.
        decay: shape of the fall to zero at the horizon, beginning at the share ``decay_start`` of the run.
        max_physical_batch_size: size of the pieces in which larger Poisson batches are processed, or a function of the
            batch that returns them as lists of positions (see :func:`hyfreedp.token_budget`).
        sampler: the Poisson sampler, told how far the run is so that loader and checkpoints agree.
        diagnostics: also record raw values, which are not private.
        processes: those that train this model together, with the same arguments; None if this one is alone.

    Raises:
        ValueError: the optimizer's parameters are not the model's trainable ones, or an argument is out of range.
    """

    @renamed_argument("probe", "rate_learner")
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        module: nn.Module,
        gradient_engine: GradientEngine,
        split: NoiseSplit,
        generator: NoiseGenerator,
        expected_batch_size: float,
        rate_learner: LineSearch | VotedRate | None,
        probe_batch: ProbeBatch = "same",
        decay: Decay = "none",
        decay_start: float = 0.0,
        max_physical_batch_size: PhysicalBatchSize = None,
        sampler: PoissonSampler | None = None,
        diagnostics: bool = False,
        processes: Processes | None = None,
    ) -> None:
        check_physical_batch_size(max_physical_batch_size)
        check_paid_for(rate_learner, split)
        OptimizerWrapper.__init__(self, optimizer)
        self.module = module
        self.split = split
        self.ledger = PrivacyLedger(split)
        self.expected_batch_size = expected_batch_size
        self.rate_learner: LineSearch | VotedRate | None = rate_learner
        self.probe_batch: ProbeBatch = probe_batch
        self.decay: Decay = decay
        self.decay_start = decay_start
        self.max_physical_batch_size = max_physical_batch_size
        self.sampler = sampler
        self.diagnostics = diagnostics
        self.processes = processes or Processes()
        self._rows: list[dict[str, Any]] = []
        self.gradient_engine = gradient_engine
        self._base = BaseOptimizer(optimizer, module)
        self._generator = generator
        self._buffers = BufferGuard(module)
        self._checks_due = steps_to_check(0, split.steps, generator)
        self._settings = self._describe()
        self._runs: dict[str, list[Any]] = {}  # releases of the runs that this object has been, by key

    @hooked_step
    def step(  # type: ignore[override]
        self, per_sample_loss: PerSampleLoss, batch: Any, *, weights: Weights = None
    ) -> StepRecord:
        """One step of Algorithm 1 on one Poisson batch: forward, backward, clip, noise, probe, update.

        Args:
            per_sample_loss: maps a batch, or a piece of it, to losses of shape ``(B,)`` without reduction, each
                depending on its own sample only; of shape ``(B, K)`` where the run was made with ``views=K``. Called
                again for the probes, without gradients and with the same random numbers of torch's.
            batch: what the loader gave; samples are the first dimension of every tensor. May be empty.
            weights: how much each record counts, in [0, 1]: a function of the batch, or a tensor of shape ``(B,)``;
                each of its own record alone. They multiply the clipped gradient, the vote, and the losses of a line
                search, so that noise and epsilon stay as they are. Weights within ``per_sample_loss`` change nothing
                where gradients are normalised afterwards.

        Raises:
            BudgetExhausted: the planned steps are done, and nothing of the batch was looked at; or releases made again
                with other data have used the budget up, and no further one was made.
            ValueError, TypeError: the model is in eval mode, one of its layers has come to mix samples or to keep raw
                statistics, the losses have the wrong form or depend on other samples, or a weight is out of range or
                does. Nothing was released.
            RuntimeError: one of several processes raised such an error or has died.

        An error within a probe leaves the step along which it looks made and counted, at the old rate; one after a
        probe by the next batch leaves that step corrected. One after a vote leaves the step to be made, from the
        weights, rate and random numbers that it found, and the vote counted.
        """
        t = self.ledger.steps
        probing = self.ledger.probes(t)
        self.ledger.check()
        voted = self.rate_learner if isinstance(self.rate_learner, VotedRate) else None
        search = None if isinstance(self.rate_learner, VotedRate) else self.rate_learner
        self._base.heed_scheduler(learned=self.rate_learner is not None, decays=self.decay != "none")
        late = self.probe_batch == "next"
        vote, result, probed = None, None, None
        dropout = RandomState.capture(self._base.parameters[0].device)
        if voted:
            voted.arrive(t)
        self.zero_grad()
        try:
            with self.processes.all_or_none():
                passes, losses, norms = self._checked_gradient(t, per_sample_loss, batch, weights, dropout)
            if voted and probing:
                vote = self._vote(voted, t, passes, losses)
            elif search and late and probing and self._base.last:
                _, result, probed = self._probe_and_update(search, t, passes, None, *self._base.retrace())
                self._base.last = None  # it is looked along once
            with voted.retreat(vote) if voted and vote and vote.lost else nullcontext(False) as retreated:
                if retreated or (result and result.eta_next != result.eta_probed):
                    self.zero_grad()
                    with self.processes.all_or_none():
                        losses, norms = self._clipped_sums(passes)
                tag = self._privatize_gradient(t)
                self.processes.check_same(tag)
                self.ledger.record(tag)
        except BaseException:
            self.zero_grad()  # it may be raw
            dropout.restore()  # so that the same step, made again, releases the same
            raise
        if self.sampler is not None:
            self.sampler.position = self.ledger.steps
        if voted:
            voted.measure()
        eta = self.eta * decay_factor(t, self.split.steps, self.decay, self.decay_start)
        if math.isnan(eta):
            eta = 0.0  # no gradient so far but zeros, which move nothing at any rate and set no unit
        if search and not late and probing:
            eta, result, probed = self._probe_and_update(search, t, passes, losses, *self._base.step_along(eta))
        else:
            self._base.step(eta, keep=search is not None and late and self.ledger.probes(t + 1))
        if voted:
            voted.advance()
        self.zero_grad()

        join, diagnostics = self.processes.join_samples, None
        if self.diagnostics:
            diagnostics = raw_values(join(losses), join(norms), None if probed is None else join(probed))
        record = StepRecord(t, eta, result, vote, diagnostics)
        self._rows.append(record.to_dict())
        return record

    def _checked_gradient(
        self, t: int, per_sample_loss: PerSampleLoss, batch: Any, weights: Weights, dropout: RandomState
    ) -> tuple[Passes, Tensor, Tensor]:
        """As :meth:`_raw_gradient`, made again where a shape misled the engine and passes of other sizes tell it so."""
        refusal, sizes, tried = None, list[int](), Counter[Any]()
        while True:
            try:
                return self._raw_gradient(t, per_sample_loss, batch, weights, sizes)
            except Misread as error:
                refusal = refusal or error
                clear_frames(error.__traceback__)  # which hold the graph
                places = [(size, frozenset(error.parameters)) for size in error.sizes]
                places = [place for place in places if tried[place] < 2]  # a layer may drop out of the first pass
                if not places:
                    raise refusal from refusal.__cause__
                tried.update(places)
                sizes += [size for size, _ in places]
            except Exception as error:
                if refusal is None:
                    raise
                if isinstance(error, ValueError):  # about the losses, or samples that mix
                    raise error from refusal
                raise refusal from error
            self.zero_grad()
            dropout.restore()

    def _raw_gradient(
        self, t: int, per_sample_loss: PerSampleLoss, batch: Any, weights: Weights, sizes: Sequence[int]
    ) -> tuple[Passes, Tensor, Tensor]:
        """Clipped sums into the engine; losses and norms. All checks are made here, before anything is released.

        Before, the engine is shown forward passes of the first samples, as many as each of ``sizes`` says.
        """
        if not self.module.training:
            raise ValueError("the model must be in train mode: call model.train() before optimizer.step")
        self._base.check()
        if self.sampler is not None and self.split.gradient_noise_multiplier(t) > 0:
            self.sampler.check_drawn(batch_length(batch))
        self.gradient_engine.check_modes()
        due = any(step <= t for step in self._checks_due)
        self.gradient_engine.signs = self._generator.child("signs", t)
        passes = Passes(
            per_sample_loss,
            batch,
            max_physical_batch_size=self.max_physical_batch_size,
            device=self._base.parameters[0].device,
            buffers=self._buffers,
            check=due,
            views=self.gradient_engine.views,
            weights=weights,
        )
        passes.show(self.gradient_engine, sizes)
        losses, norms = self._clipped_sums(passes)
        if t == 0 and self.rate_learner is not None and self.rate_learner.kind == "losses":
            check_not_negative(losses)
        if due and passes.check_samples(self.gradient_engine, self._generator.child("check", t)):
            self._checks_due = [step for step in self._checks_due if step > t]
        return passes, losses, norms

    def _clipped_sums(self, passes: Passes) -> tuple[Tensor, Tensor]:
        """Into the engine; losses and norms. Sample by sample where a comparison with autograd tells nothing.

        That is so if a sample is not finite, whether or not one is due: a step made again after a resume, where it is,
        must release the same.
        """
        self.gradient_engine.unchecked = False
        found = passes.backward(self.gradient_engine)
        while self.gradient_engine.was_misled():
            self.zero_grad()
            passes.rewind()
            found = passes.backward(self.gradient_engine)
        if self.gradient_engine.unchecked:
            self.zero_grad()
            passes.split()
            found = passes.backward(self.gradient_engine)
        return found

    def _vote(self, voted: VotedRate, t: int, passes: Passes, losses: Tensor) -> VoteResult:
        """Let the records vote between the weights and their average; the result, which moves nothing yet."""
        generator, sigma = self._generator.child("vote", t), self.split.sigma_loss
        mechanism, expected, add_up = self.split.loss_mechanism, self.expected_batch_size, self.processes.add_up
        with self.processes.all_or_none(), voted.at_average():
            rival = passes.forward()
        margin = privatize_votes(
            losses,
            rival,
            sigma,
            expected_batch_size=expected,
            weights=passes.weights,
            mechanism=mechanism,
            generator=generator,
            add_up=add_up,
        )
        self.processes.check_same(generator.tag)
        self.ledger.record_vote(generator.tag)
        return voted.count(margin, float(loss_noise_std(VOTE_CLIP, sigma, expected, mechanism)))

    def _privatize_gradient(self, t: int) -> int:
        """The private mean gradient of all processes into ``.grad``; the tag of its noise, 0 if there is none."""
        sums = self.gradient_engine.clipped_sums(self._base.parameters)
        self.processes.add_up(sums)
        generator = self._generator.child("gradient", t)
        privatize_gradient(
            sums,
            self.split.gradient_noise_multiplier(t),
            sensitivity=self.gradient_engine.clipping.sensitivity,
            expected_batch_size=self.expected_batch_size,
            generator=generator,
        )
        for parameter, private in zip(self._base.parameters, sums, strict=True):
            parameter.grad = private.to(parameter.dtype)  # rounding to half precision comes after the noise
        return generator.tag

    @torch.no_grad()
    def _probe_and_update(
        self,
        search: LineSearch,
        t: int,
        passes: Passes,
        here: Tensor | None,
        eta: float,
        move: Callable[[float], None],
    ) -> tuple[float, ProbeResult, Tensor]:
        """Look along a step in both directions, then move to where the new learning rate leads.

        Args:
            search, t, passes: the line search; the step, and its batch.
            here: the losses where the step began, shape ``(B,)``; None before the batch's gradient.
            eta, move: of the step, see :meth:`BaseOptimizer.retrace`.
        """
        distance, generator = search.distance, self._generator.child("probe", t)
        record = self.ledger.record_vote if here is None else self.ledger.record_probe
        before = search.state_dict()
        try:
            with self.processes.all_or_none():
                move(distance)
                ahead = passes.forward()
                move(-distance)
                behind = passes.forward()
                if here is None:
                    move(0.0)
                    here = passes.forward()
                probed = torch.stack([ahead, here, behind])
            result = search.update(
                passes.weighted(probed),
                self.split.sigma_loss,
                self.expected_batch_size,
                generator,
                held=not self.ledger.probes(t + 1),
                add_up=self.processes.add_up,
            )
            self.processes.check_same(generator.tag)
            record(generator.tag)
        except BaseException:
            search.load_state_dict(before)
            move(eta)
            raise
        if result.eta_next != result.eta_probed:
            eta *= result.eta_next / result.eta_probed
        move(eta)
        return eta, result, probed

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row for each step, see :meth:`StepRecord.to_dict`: copies, so that what was released stays as it was."""
        return [dict(row) for row in self._rows]

    @property
    def eta(self) -> float:
        """The learning rate in force, without decay."""
        fixed = self._base.eta if self.decay != "none" else float(self.param_groups[0]["lr"])
        return fixed if self.rate_learner is None else self.rate_learner.eta

    probe = renamed_attribute("HyFreeDPOptimizer.probe", "rate_learner")

    @property
    def steps_left(self) -> int:
        """How many steps the privacy plan still allows."""
        return self.split.steps - self.ledger.steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. :meth:`step` does so itself; for loops written for other optimizers."""
        self.base.zero_grad(set_to_none=set_to_none)
        self.gradient_engine.clear()

    def epsilon_spent(self, target_delta: float | None = None) -> float:
        """Epsilon of all that is known to have been released, at the plan's delta unless another is given."""
        return self.ledger.epsilon(target_delta)

    def get_epsilon(self, delta: float) -> float:
        """:meth:`epsilon_spent` by its name in Opacus."""
        return self.epsilon_spent(delta)

    def __repr__(self) -> str:
        engine = self.gradient_engine
        learned = "fixed" if self.rate_learner is None else f"learned from {self.rate_learner.kind}"
        return (
            f"{type(self).__name__}({type(self.base).__name__}, step {self.ledger.steps} of {self.split.steps}, "
            f"eta {self.eta:.3g} ({learned}), clipping {engine.clipping}, engine {engine.name!r},\n"
            f"  {self.split})"
        )
