"""PrivacyEngine: makes a model, its torch optimizer and its data loader private, with no learning rate to choose."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal, Never, NoReturn, Unpack, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader

from hyfreedp.accounting import PrivacyLedger
from hyfreedp.batches import PhysicalBatchSize
from hyfreedp.checkpoint import read_checkpoint, write_checkpoint
from hyfreedp.checks import check_count, check_delta, check_number, check_optimizer, check_parameters, check_values
from hyfreedp.cipher import computes_noise
from hyfreedp.clipping import AutomaticClipping, Clipping, NoClipping, make_engine
from hyfreedp.clipping.engine_hook import take_over
from hyfreedp.distributed import Processes, check_unwrapped, replica
from hyfreedp.noise import NoiseGenerator
from hyfreedp.optimizer import HyFreeDPOptimizer
from hyfreedp.preset import PRESETS, Preset, PresetFields, refuse_unknown, resolve, takes_preset_fields
from hyfreedp.rate_learner import LineSearch, LossSearch
from hyfreedp.sampling import PoissonSampler, poisson_loader
from hyfreedp.votes import VotedRate

__all__ = ["PRESETS", "Preset", "PrivacyEngine"]


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
            known seed voids the privacy of its runs: publish neither. A seed is for one run: another with the same one
            draws the same batches, so that their epsilons do not compose as those of independent runs. If None, every
            run draws 256 bits from the operating system, by the first of several processes.
        secure_noise: against attacks on floating-point noise, each normal number is the sum of four (module ``noise``).
        process_group: the processes that train together if they are not all; a group of one trains alone.

    Raises:
        ValueError, TypeError: a bad seed or an unknown argument.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        secure_noise: bool = False,
        process_group: ProcessGroup | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown, ("seed", "secure_noise", "process_group"))
        if seed is not None:
            NoiseGenerator(seed)  # refuses a bad one here already
        self._seed = seed
        self._secure_noise = secure_noise
        self._process_group = process_group
        self._runs = 0
        self._ledgers: list[PrivacyLedger] = []

    def make_private(self, **_: Any) -> NoReturn:
        """Opacus's way with a noise multiplier of one's own; not offered, since rate and noise share one budget.

        Raises:
            TypeError: always, naming :meth:`make_private_with_epsilon`.
        """
        raise TypeError(
            "make_private is Opacus's: here the noise follows from a budget, so call make_private_with_epsilon("
            "module=, optimizer=, data_loader=, target_epsilon=, target_delta=, epochs=)"
        )

    @takes_preset_fields
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
        views: int = 1,
        gradient_engine: Literal["auto", "bookkeeping", "hooks"] = "auto",
        diagnostics: bool = False,
        **changes: Unpack[PresetFields],
    ) -> tuple[nn.Module, HyFreeDPOptimizer, DataLoader]:
        """Wire a run that spends at most (target_epsilon, target_delta), learning rate included.

        Args:
            module: the model; hooked in place and returned, so closures made before stay valid. Non-reentrant gradient
                checkpointing saves memory as usual, see :func:`hyfreedp.clipping.make_engine` for how to turn it on.
            optimizer: any torch optimizer linear in its learning rate, over exactly the trainable parameters. Its
                rate is ignored but for the ratio between groups (preset "fixed" uses it as it is). Of one that is
                private already the base optimizer is taken.
            data_loader: its batch size B gives the sample rate B / N and the expected batch size. Several processes
                all pass the same loader, over all N records and with the B of all together, as in Opacus.
            target_epsilon: budget of the whole run; ``inf`` trains without noise and without clipping.
            target_delta: in (0, 0.1], customarily below 1 / N.
            epochs, steps: length of the run, one of the two; an epoch is ``len(data_loader)`` steps. The last pass over
                the loader ends with the run: ``while optimizer.steps_left: for batch in loader: ...``.
            preset: "robust" (default), "paper", "fixed", or a :class:`Preset`.
            clipping: of per-sample gradients; automatic normalisation if None (none when ``target_epsilon`` is inf).
            max_physical_batch_size: memory limit; larger Poisson batches are processed in pieces of so many samples, or
                in those that a function of the batch chooses, such as :func:`hyfreedp.token_budget` makes.
            views: of every record, such as augmented copies, whose gradients are averaged before they are clipped (De
                et al. 2022), so that a record moves the sum as far as with one. They are made after sampling, in
                ``per_sample_loss``: it gives the model the K views of a record one after the other (as
                ``repeat_interleave(K, 0)`` makes them) and returns losses of shape ``(B, K)``. Random numbers of
                torch's are the same in the gradient and its probes.
            gradient_engine: see :func:`hyfreedp.clipping.make_engine`.
            diagnostics: record raw, not private values too.
            **changes: fields of :class:`Preset` to change, such as ``gamma=1.02``. Those of a line search, such as
                ``interval``, are refused without one, as in preset "robust".

        Returns:
            The module, the :class:`~hyfreedp.optimizer.HyFreeDPOptimizer` and the Poisson loader.

        Warns:
            UserWarning: ``target_delta`` is 1 / N or more, there is one record only, or the model was trained privately
                before.

        Raises:
            ValueError, TypeError: bad input, with what is allowed; no private record has been used by then.
            RuntimeError: one of several processes had bad input or has died.
        """
        if isinstance(optimizer, HyFreeDPOptimizer):
            optimizer = optimizer.base
        check_optimizer(optimizer)
        processes = Processes.present(self._process_group, optimizer.param_groups[0]["params"][0].device)
        processes.agree(seed=self._seed, run=self._runs, secure_noise=self._secure_noise)
        generator = NoiseGenerator(self._seed, secure=self._secure_noise).child("run", self._runs)
        generator.load_state_dict(processes.gather(generator.state_dict())[0])
        with processes.all_or_none():
            loader = poisson_loader(
                data_loader,
                seed=int.from_bytes(generator.child("sampling").key),
                rank=processes.rank,
                world_size=processes.size,
            )
            sampler = cast(PoissonSampler, loader.batch_sampler)
            total = sampler.horizon = _run_length(epochs, steps, sampler.steps_per_epoch)
            settings = resolve(preset, changes, total)
            check_unwrapped(module)
            check_values(module)
            check_parameters(optimizer, module)
            _check_device(module)
            if not module.training:
                raise ValueError("module must be in train mode: call module.train() first")
            if private := math.isfinite(check_number("target_epsilon", target_epsilon)):
                check_delta(target_delta, sampler.num_records, stacklevel=4)
            split = settings.split(target_epsilon, target_delta, sampler.sample_rate, total)
            rate_learner = _make_rate_learner(settings, optimizer, private, total)
            clipping = _check_clipping(clipping, private)
            check_count("views", views, 1)
        processes.agree(
            records=sampler.num_records,
            batch_size=data_loader.batch_size,
            steps=total,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            **vars(settings),
            clipping=clipping,
            optimizer=optimizer,
            views=views,
            diagnostics=diagnostics,
            **replica(module),
            noise=split,
        )
        hooks = make_engine(module, clipping, gradient_engine, views=views)
        try:
            private_optimizer = HyFreeDPOptimizer(
                optimizer,
                module=module,
                gradient_engine=hooks,
                split=split,
                generator=generator.child("noise"),
                expected_batch_size=sampler.sample_rate * sampler.num_records,
                rate_learner=rate_learner,
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
        if take_over(hooks):
            warnings.warn(
                "this model was trained privately before: epsilon of the new run does not include what that run spent. "
                "Make model and optimizer anew, or add the two",
                stacklevel=3,
            )
        processes.copy_from_first([*module.parameters(), *module.buffers()])
        self._runs += 1
        self._ledgers.append(private_optimizer.ledger)
        return module, private_optimizer, loader

    def get_epsilon(self, delta: float) -> float:
        """Epsilon at ``delta`` of all that the run of this engine is known to have released, as in Opacus.

        Raises:
            ValueError: several runs have released something, also if the state of another was loaded after one; each
                optimizer's ``epsilon_spent`` tells its own.
        """
        spent = [epsilon for ledger in self._ledgers if (epsilon := ledger.epsilon(delta)) > 0]
        earlier = sum(ledger.earlier_runs for ledger in self._ledgers)
        if earlier or len(spent) > 1:
            raise ValueError(
                f"this engine has trained {len(spent) + earlier} runs, and what they spent together depends on whether "
                f"they share records: ask each optimizer's get_epsilon({delta!r})"
            )
        return sum(spent)

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module,
        optimizer: HyFreeDPOptimizer,
        checkpoint_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a run to a file, whole or not at all; see :meth:`HyFreeDPOptimizer.state_dict`.

        The file holds the key of all noise: keep it as secret as the data. Only its owner may read it. Several
        processes save a file each.

        Args:
            path: of the file, which is replaced if it is there.
            module: the model that ``optimizer`` trains.
            optimizer: what :meth:`make_private_with_epsilon` returned; its state includes model, ledger and sampler.
            checkpoint_dict: more to save beside it, tensors and plain values, such as a scheduler's state.

        Raises:
            ValueError: ``module`` is another model, or a name in ``checkpoint_dict`` is taken.
        """
        _check_own(module, optimizer)
        write_checkpoint(path, optimizer.state_dict(), checkpoint_dict or {})

    def load_checkpoint(
        self, *, path: str | os.PathLike[str], module: nn.Module, optimizer: HyFreeDPOptimizer
    ) -> dict[str, Any]:
        """Go on, bit for bit, where :meth:`save_checkpoint` was called; no code in the file is run.

        Args:
            path: of the file.
            module, optimizer: as :meth:`make_private_with_epsilon` returned them, called as for the saved run.

        Returns:
            What was passed as ``checkpoint_dict``.

        Raises:
            ValueError: the file is no such checkpoint, or of another run, or ``module`` is another model.
        """
        _check_own(module, optimizer)
        state, more = read_checkpoint(path)
        optimizer.load_state_dict(state)
        return more


def _run_length(epochs: int | None, steps: int | None, steps_per_epoch: int) -> int:
    if (epochs is None) == (steps is None):
        raise ValueError(f"give either epochs or steps, got epochs={epochs} and steps={steps}")
    name, value = ("epochs", epochs) if steps is None else ("steps", steps)
    length = check_count(name, value, 1)
    return length * steps_per_epoch if steps is None else length


def _check_device(module: nn.Module) -> None:
    """Refuse an accelerator on which losses and noise would not be what they are on the CPU.

    Raises:
        ValueError: naming it.
    """
    for device in {parameter.device for parameter in module.parameters()}:
        if not computes_noise(device):
            raise ValueError(
                "module must be where float64 and 64-bit integers are computed as on the CPU, since losses and noise "
                f"are: {device.type!r} failed that test (MPS, for one, has no float64). Call module.to('cpu') before "
                "making the optimizer"
            )


def _check_clipping(clipping: Clipping | None, private: bool) -> Clipping:
    if clipping is None:
        return AutomaticClipping() if private else NoClipping()
    if not (hasattr(clipping, "sensitivity") and hasattr(clipping, "factors")):
        more = "; its other ways are not offered" if isinstance(clipping, str) and clipping != "flat" else ""
        raise TypeError(
            f"clipping must be a rule of hyfreedp.clipping, got {clipping!r}: leave it out for normalised gradients, "
            f"or pass AbadiClipping(max_grad_norm), which is Opacus's 'flat'{more}"
        )
    if private and math.isinf(clipping.sensitivity):
        raise ValueError(f"clipping must bound the gradient when target_epsilon is finite, got {clipping}")
    return clipping


def _check_own(module: nn.Module, optimizer: HyFreeDPOptimizer) -> None:
    if not isinstance(optimizer, HyFreeDPOptimizer):
        raise TypeError(f"optimizer must be what make_private_with_epsilon returned, got {type(optimizer).__name__}")
    if optimizer.module is not module:
        raise ValueError("module must be the model that optimizer trains, as make_private_with_epsilon returned it")


def _make_rate_learner(
    settings: Preset, optimizer: torch.optim.Optimizer, private: bool, steps: int
) -> LineSearch | VotedRate | None:
    if settings.probe == "none":
        return None
    if settings.probe == "votes":
        return VotedRate(optimizer, steps)
    if callable(settings.step_rule):
        return settings.step_rule(settings, optimizer, private)
    unclipped: dict[str, Any] = {} if private else {"loss_threshold": math.inf}
    return LossSearch(
        rule=settings.step_rule,
        eta=settings.initial_learning_rate,
        smoothing=settings.smoothing,
        mechanism=settings.loss_mechanism,
        loss_threshold_rule=settings.loss_threshold_rule,
        **unclipped,
    )
