"""PrivacyEngine: makes a model, its torch optimizer and its data loader private, with no learning rate to choose."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader

from hyfreedp.accounting import NoiseSplit, calibrate_noise
from hyfreedp.batches import PhysicalBatchSize
from hyfreedp.checks import check_choice, check_count, check_learning_rate, check_parameters
from hyfreedp.clipping import AutomaticClipping, Clipping, NoClipping, make_engine
from hyfreedp.distributed import Processes, check_unwrapped, replica
from hyfreedp.noise import NoiseGenerator
from hyfreedp.optimizer import HyFreeDPOptimizer
from hyfreedp.probe import LineSearch, LossThresholdRule, Probe, ProbeBatch, StepRule
from hyfreedp.sampling import PoissonSampler, poisson_loader
from hyfreedp.sensitivity import LossMechanism
from hyfreedp.sensitivity import Probe as ProbeKind
from hyfreedp.step_rules import Decay
from hyfreedp.votes import VotedRate, vote_steps


@dataclass(frozen=True)
class Preset:
    """All that defines the method beyond data, model and privacy target; one setting for every task.

    Attributes:
        probe: what is released beside gradients, as the accountant calls it: "votes" on whether the rate is too high
            (:mod:`hyfreedp.votes`); three "losses" for the paper's line search; or "none" for plain DP training at the
            base optimizer's own learning rate (the baselines). "contrasts" are released by a line search of your own.
        step_rule: of a line search, how a noisy fit moves the learning rate, by name (:mod:`hyfreedp.step_rules`); or
            what makes another line search, from the preset, the base optimizer and whether the run is private. Several
            processes compare its ``repr``: let it be a frozen dataclass.
        smoothing: of step rule "gen", weight in (0, 1] of the clamped b/a in the next rate; the old one has the rest.
        probe_batch: of a line search, the batch that looks along a direction: the "same" that it comes from, as Alg. 1
            has it, or the "next" one, before its gradient, as the authors' package has it; see
            :class:`hyfreedp.HyFreeDPOptimizer`.
        loss_threshold_rule: how R_l follows the released losses (probe "losses").
        initial_learning_rate: eta_0 of a line search. Votes have none: their start is public.
        interval: K, steps from probe to probe of a line search; votes come when :mod:`hyfreedp.votes` says.
        warmup: share of the run, from its start, in which every step of a line search probes.
        gamma: growth of the gradient noise (root mean square over steps) that pays for the probes.
        allocation, composition, accountant, loss_mechanism: see :func:`hyfreedp.calibrate_noise`.
        decay, decay_start: shape of the fall of the rate to zero at the horizon, and the share of the run before it.
    """

    probe: ProbeKind = "votes"
    step_rule: StepRule | Callable[[Preset, torch.optim.Optimizer, bool], LineSearch] = "gen"
    smoothing: float = 0.1
    probe_batch: ProbeBatch = "same"
    loss_threshold_rule: LossThresholdRule = "sum"
    initial_learning_rate: float = 1e-4
    interval: int = 5
    warmup: float = 0.0
    gamma: float = 1.01
    allocation: Literal["per_step", "constant"] = "per_step"
    composition: Literal["same_batch", "independent", "epsilon_sum"] = "same_batch"
    accountant: Literal["pld", "rdp", "gdp"] = "pld"
    loss_mechanism: LossMechanism = "gaussian"
    decay: Decay = "linear"
    decay_start: float = 0.0

    def plan(self, steps: int) -> dict[str, Any]:
        """Arguments of :func:`hyfreedp.calibrate_noise` that say what a run of T = ``steps`` releases, and who pays."""
        return {
            "probe": self.probe,
            "interval": self.interval,
            "warmup_steps": int(self.warmup * steps),
            "vote_steps": vote_steps(steps) if self.probe == "votes" else (),
            "gamma": self.gamma,
            "allocation": self.allocation,
        }


# "paper" probes on the gradient's batch, as Alg. 1 is printed: that spares a pass, since the loss at w is known then.
# What Alg. 1 does not print, the guards and the smoothing of rule "gen", is that of its authors' own package, gen-optim
# 0.1.1. Without privacy it equals that package step by step, whichever batch probes (tests/test_gen_optim.py).
PRESETS: dict[str, Preset] = {
    "robust": Preset(),
    "paper": Preset(probe="losses", allocation="constant", decay="none"),
    "fixed": Preset(probe="none", decay="none"),
}


class PrivacyEngine:
    """Makes training private, in Opacus's conventions, with nothing left to tune.

    Where ``torch.distributed`` is initialised, as in a script started by ``torchrun``, all processes train one model
    together, and every process runs the same code as a single one would: the plain model, without
    DistributedDataParallel, and a loader over the whole data set whose batch size is that of all processes together.
    Each then takes its own part of every batch. Epsilon and the raw sums do not depend on the number of processes (but
    for dropout and rounding, which makes the noise of a given seed another one).

    One engine can wire any number of runs; each gets keys of its own for sampling and noise.

    Args:
        seed: of the sampling and of all noise, for reproducible runs: the first call of
            :meth:`make_private_with_epsilon` takes its first child stream, the second call the second, and so on. A
            known seed voids the privacy of its runs: publish neither. If None, every run draws 256 bits from the
            operating system, by the first of several processes.
        secure_noise: against attacks on floating-point noise, each normal number is the sum of four (module ``noise``).
        process_group: the processes that train together if they are not all; a group of one trains alone.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        secure_noise: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if seed is not None:
            NoiseGenerator(seed)  # refuses a bad one here already
        self._seed = seed
        self._secure_noise = secure_noise
        self._process_group = process_group
        self._runs = 0

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int | None = None,
        steps: int | None = None,
        preset: str | Preset = "robust",
        clipping: Clipping | None = None,
        max_physical_batch_size: PhysicalBatchSize = None,
        gradient_engine: Literal["auto", "bookkeeping", "hooks"] = "auto",
        diagnostics: bool = False,
        **overrides: Any,
    ) -> tuple[nn.Module, HyFreeDPOptimizer, DataLoader]:
        """Wire a run that spends at most (target_epsilon, target_delta), learning rate included.

        Args:
            module: the model; hooked in place and returned, so closures made before stay valid. Non-reentrant gradient
                checkpointing saves memory as usual, see :func:`hyfreedp.clipping.make_engine` for how to turn it on.
            optimizer: any torch optimizer linear in its learning rate, over exactly the trainable parameters. Its
                rate is ignored but for the ratio between groups (preset "fixed" uses it as it is).
            data_loader: its batch size B gives the sample rate B / N and the expected batch size. Several processes
                all pass the same loader, over all N records and with the B of all together, as in Opacus.
            target_epsilon: budget of the whole run; ``inf`` trains without noise and without clipping.
            target_delta: in (0, 1), customarily below 1 / N.
            epochs, steps: length of the run, one of the two; an epoch is ``len(data_loader)`` steps.
            preset: "robust" (default), "paper", "fixed", or a :class:`Preset`.
            clipping: of per-sample gradients; automatic normalisation if None (none when ``target_epsilon`` is inf).
            max_physical_batch_size: memory limit; larger Poisson batches are processed in pieces of so many samples, or
                in those that a function of the batch chooses, such as :func:`hyfreedp.token_budget` makes.
            gradient_engine: see :func:`hyfreedp.clipping.make_engine`.
            diagnostics: record raw, not private values too.
            **overrides: fields of :class:`Preset` to change, such as ``interval=10``.

        Returns:
            The module, the :class:`~hyfreedp.optimizer.HyFreeDPOptimizer` and the Poisson loader.

        Raises:
            ValueError, TypeError: bad input, with what is allowed; no private record has been used by then.
            RuntimeError: one of several processes had bad input or has died.
        """
        processes = Processes.present(self._process_group, optimizer.param_groups[0]["params"][0].device)
        processes.agree(seed=self._seed, run=self._runs, secure_noise=self._secure_noise)
        generator = NoiseGenerator(self._seed, secure=self._secure_noise).child("run", self._runs)
        generator.load_state_dict(processes.gather(generator.state_dict())[0])
        with processes.all_or_none():
            settings = _resolve(preset, overrides)
            loader = poisson_loader(
                data_loader,
                seed=int.from_bytes(generator.child("sampling").key),
                rank=processes.rank,
                world_size=processes.size,
            )
            sampler = cast(PoissonSampler, loader.batch_sampler)
            total = sampler.horizon = _run_length(epochs, steps, sampler.steps_per_epoch)
            check_unwrapped(module)
            check_parameters(optimizer, module)
            if not module.training:
                raise ValueError("module must be in train mode: call module.train() first")
            split = self._calibrate(settings, target_epsilon, target_delta, sampler.sample_rate, total)
            private = math.isfinite(target_epsilon)
            probe = _make_probe(settings, optimizer, private, total)
            if clipping is None:
                clipping = AutomaticClipping() if private else NoClipping()
            elif private and math.isinf(clipping.sensitivity):
                raise ValueError(f"clipping must bound the gradient when target_epsilon is finite, got {clipping}")
        processes.agree(
            records=sampler.num_records,
            batch_size=data_loader.batch_size,
            steps=total,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            **vars(settings),
            clipping=clipping,
            optimizer=optimizer,
            diagnostics=diagnostics,
            **replica(module),
            noise=split,
        )
        hooks = make_engine(module, clipping, gradient_engine)
        try:
            private_optimizer = HyFreeDPOptimizer(
                optimizer,
                module=module,
                gradient_engine=hooks,
                split=split,
                generator=generator.child("noise"),
                expected_batch_size=sampler.sample_rate * sampler.num_records,
                probe=probe,
                probe_batch=settings.probe_batch,
                decay=settings.decay,
                decay_start=settings.decay_start,
                max_physical_batch_size=max_physical_batch_size,
                sampler=sampler,
                diagnostics=diagnostics,
                processes=processes,
            )
        except ValueError:
            hooks.detach()  # a refused model is left as it was
            raise
        processes.copy_from_first([*module.parameters(), *module.buffers()])
        self._runs += 1
        return module, private_optimizer, loader

    @staticmethod
    def _calibrate(settings: Preset, epsilon: float, delta: float, sample_rate: float, steps: int) -> NoiseSplit:
        return calibrate_noise(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=sample_rate,
            steps=steps,
            accountant=settings.accountant,
            composition=settings.composition,
            loss_mechanism=settings.loss_mechanism,
            **settings.plan(steps),
        )


def _resolve(preset: str | Preset, overrides: dict[str, Any]) -> Preset:
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(map(repr, PRESETS))} or a Preset, got {preset!r}")
        preset = PRESETS[preset]
    names = [field.name for field in fields(Preset)]
    for name in overrides:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"unknown argument {name!r}: fields of Preset are {', '.join(names)}{hint}")
    settings = replace(preset, **overrides)
    check_learning_rate(settings.initial_learning_rate)
    check_count("interval", settings.interval, 1)
    if not callable(settings.step_rule):
        check_choice("step_rule", settings.step_rule, StepRule)
    if not 0 <= settings.warmup <= 1:
        raise ValueError(f"warmup must be a share of the run in [0, 1], got {settings.warmup}")
    if not 0 < settings.smoothing <= 1:
        raise ValueError(f"smoothing must be the weight of the new rate, in (0, 1], got {settings.smoothing}")
    check_choice("probe_batch", settings.probe_batch, ProbeBatch)
    check_choice("decay", settings.decay, Decay)
    if not 0 <= settings.decay_start < 1:
        raise ValueError(f"decay_start must be in [0, 1), got {settings.decay_start}")
    return settings


def _run_length(epochs: int | None, steps: int | None, steps_per_epoch: int) -> int:
    if (epochs is None) == (steps is None):
        raise ValueError(f"give either epochs or steps, got epochs={epochs} and steps={steps}")
    name, value = ("epochs", epochs) if steps is None else ("steps", steps)
    length = check_count(name, value, 1)
    return length * steps_per_epoch if steps is None else length


def _make_probe(
    settings: Preset, optimizer: torch.optim.Optimizer, private: bool, steps: int
) -> LineSearch | VotedRate | None:
    if settings.probe == "none":
        return None
    if settings.probe == "votes":
        return VotedRate(optimizer, steps)
    if callable(settings.step_rule):
        return settings.step_rule(settings, optimizer, private)
    unclipped: dict[str, Any] = {} if private else {"loss_threshold": math.inf}
    return Probe(
        rule=settings.step_rule,
        eta=settings.initial_learning_rate,
        smoothing=settings.smoothing,
        mechanism=settings.loss_mechanism,
        loss_threshold_rule=settings.loss_threshold_rule,
        **unclipped,
    )
