"""PrivacyEngine: makes a model, its optimizer and its data loader private, with no learning rate to tune."""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader

from hyfreedp.accounting import NoiseSplit, PrivacyLedger, calibrate_noise
from hyfreedp.accounting.calibrate import recounted
from hyfreedp.accounting.split import MOST_STEPS
from hyfreedp.checks import check_count, check_delta, check_flag, check_model, check_number, check_optimizer, check_type
from hyfreedp.data.batches import PhysicalBatchSize
from hyfreedp.data.sampling import poisson_loader
from hyfreedp.gradients import MEMORY_BUDGET, AutomaticClipping, Clipping, GradientEngine, NoClipping
from hyfreedp.learner import RateLearner
from hyfreedp.line_search import LossSearch
from hyfreedp.look import LookedRate
from hyfreedp.noise import NoiseGenerator
from hyfreedp.noise.cipher import computes_noise
from hyfreedp.optimizer import HyFreeDPOptimizer
from hyfreedp.preset import Preset, RunPlan, refuses_unknown, resolve
from hyfreedp.processes.group import Processes
from hyfreedp.processes.same_records import check_same_records
from hyfreedp.pytorch.checkpoint import read_checkpoint, write_checkpoint
from hyfreedp.pytorch.devices import CPU, keep_freed_memory, kernels


class PrivacyEngine:
    """Makes training private, with the interface of Opacus's engine and nothing to tune.

    If ``torch.distributed`` is initialised, as after ``torchrun``, all processes train one model together. Each runs
    the code of a single process: the plain model, without DistributedDataParallel, and a loader over all records with
    the total batch size. It computes its own part of each batch. Epsilon does not depend on the number of processes.

    Args:
        seed: of sampling and noise, for reproducible runs. Whoever knows it can undo the noise, so do not publish it.
            Runs of one engine get independent keys; two engines with the same seed draw the same batches, so their
            epsilons must not be composed. If None, every run gets 256 bits from the operating system.
        secure_noise: protect against floating-point attacks: each normal number is made of four (module ``noise``).
        process_group: the processes that train together, if not all; a group of one trains alone.
    """

    @refuses_unknown
    def __init__(
        self, *, seed: int | None = None, secure_noise: bool = False, process_group: ProcessGroup | None = None
    ) -> None:
        NoiseGenerator(seed)  # checks the seed
        self._seed, self._secure_noise = seed, check_flag("secure_noise", secure_noise)
        self._process_group = process_group
        self._ledgers: list[PrivacyLedger] = []  # one per run

    def __deepcopy__(self, _: Any) -> Any:
        return self  # of two engines neither would count the other's runs

    def make_private(self, **_: Any) -> NoReturn:
        """TypeError: Opacus's method takes a noise multiplier, but here probes share the budget with gradients."""
        raise TypeError("here the noise follows from a budget: call make_private_with_epsilon(..., target_epsilon=)")

    @refuses_unknown
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
        memory_budget: int = MEMORY_BUDGET,
        owners: Sequence[int | str] | NDArray[Any] | torch.Tensor | None = None,
        records_per_owner: int | None = None,
        records_per_person: int = 1,
        diagnostics: bool = False,
        without_guarantee: bool = False,
        split: NoiseSplit | None = None,
        **changes: Any,
    ) -> tuple[nn.Module, HyFreeDPOptimizer, DataLoader]:
        """Make a run whose releases, those for the learning rate included, are (target_epsilon, target_delta)-DP.

        Args:
            module: the model. It is returned unchanged and unwrapped, so closures over it stay valid. For gradient
                checkpointing see :class:`hyfreedp.gradients.GradientEngine`.
            optimizer: a torch optimizer, linear in its rate, over exactly the trainable parameters; for preset "robust"
                SGD, RMSprop or a variant of Adam. Only the ratios of its rates matter, except to preset "fixed".
            data_loader: gives data set, collation and expected batch size B, so that the sample rate is B / N. Batches
                are drawn anew by Poisson sampling, so ``shuffle`` and ``drop_last`` have no effect.
            target_epsilon: budget of the whole run; ``inf`` trains without noise and without clipping.
            target_delta: in (0, 0.1], customarily below 1 / N.
            epochs, steps: length of the run, one of the two; an epoch is ceil(N / B) steps. The last pass over the
                loader ends with the run: ``while optimizer.steps_left: for batch in loader: ...``.
            preset: "robust" (default), "paper", "fixed", or a :class:`Preset`.
            clipping: of per-sample gradients; None: normalisation (no clipping if ``target_epsilon`` is inf).
            max_physical_batch_size: the most samples computed at once, to limit memory: a number, or a function from a
                record to the number for records of its shape, see :func:`hyfreedp.token_budget`.
            memory_budget: bytes that per-sample gradients may take, see :class:`hyfreedp.gradients.GradientEngine`.
            owners: for each record the id of its owner (a person), an integer or a string. Then owners are sampled, B
                of N on average, and a sample is all records of an owner; its loss is their mean. Every epsilon holds
                for a person with all their records. N is the number of owners, which is public.
            records_per_owner: the most records of an owner in a batch, drawn at random each time; None: all.
            records_per_person: k >= 1, if owners are unknown: every epsilon holds for a person with up to k records.
                Data in which torch's ``Subset`` and ``ConcatDataset`` repeat a record more often are refused.
            diagnostics: also record raw values, which are not private.
            without_guarantee: allow steps on your own batches, which are not Poisson samples, for benchmarks and
                audits. Epsilon is then no guarantee, and ``optimizer.guarantee`` is False.
            split: noise multipliers computed elsewhere, say by another accountant. The target is then only a claim;
                ``epsilon_spent`` still returns a proven epsilon.
            **changes: fields of :class:`Preset` to change, such as ``gamma=1.02``.

        Returns:
            The module, the :class:`~hyfreedp.optimizer.HyFreeDPOptimizer` and the Poisson loader.

        Warns:
            UserWarning: delta is 1 / N or more, N is 1, ``split`` is given, or preset robust has no privacy.

        Raises:
            ValueError, TypeError: a bad argument; no batch has been drawn by then.
            RuntimeError: another process had a bad argument or has died.
        """
        check_flag("diagnostics", diagnostics)
        check_flag("without_guarantee", without_guarantee)
        if isinstance(optimizer, HyFreeDPOptimizer):
            optimizer = optimizer.base
        check_optimizer(optimizer)
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), CPU)
        processes, generator = self._new_run(device)
        with processes.all_or_none():
            loader = poisson_loader(
                data_loader,
                seed=int.from_bytes(generator.child("sampling").key),
                rank=processes.rank,
                world_size=processes.size,
                device=device,
                records_per_person=check_count("records_per_person", records_per_person, 1),
                owners=owners,
                records_per_owner=records_per_owner,
            )
            sampler, fetched = loader.batch_sampler, loader.dataset
            total = sampler.horizon = _run_length(epochs, steps, sampler.steps_per_epoch)
            settings = resolve(preset, changes, total)
            check_model(module, optimizer)
            if not computes_noise(device):
                raise ValueError(
                    "module must be where float64 and 64-bit integers are computed as on the CPU, as losses and noise "
                    f"are, but {device.type!r} failed that test (MPS has no float64): call module.to('cpu') first"
                )
            if not module.training:
                raise ValueError("module must be in train mode: call module.train() first")
            private = math.isfinite(check_number("target_epsilon", target_epsilon))
            if private:
                check_delta(target_delta, sampler.num_records)
            elif settings.probe == "look":
                told = "without noise a tuned constant rate, by preset='fixed', is better than what looks find"
                warnings.warn(f"target_epsilon is inf: {told}", stacklevel=2)
            clipping = _check_clipping(clipping, private)
            terms = settings.releases(total) | {"target_epsilon": target_epsilon, "target_delta": target_delta}
            terms |= {"sample_rate": sampler.sample_rate, "records_per_person": records_per_person}
            plan = RunPlan(settings, calibrate_noise(**terms) if split is None else recounted(split, **terms))
            expected_batch_size = sampler.sample_rate * sampler.num_records
            sharing = math.ceil(expected_batch_size / processes.size)
            if max_physical_batch_size is not None and not callable(max_physical_batch_size):
                name = "max_physical_batch_size, unless it is None or a function of a record,"
                sharing = min(sharing, check_count(name, max_physical_batch_size, 1))
            gradient_engine = GradientEngine(module, clipping, memory_budget=memory_budget, sharing=sharing)
            noise_std = plan.split.sigma_gradient * clipping.sensitivity / expected_batch_size if private else 0.0
            rate_learner: RateLearner | None = None  # of a fixed rate
            if settings.probe == "look":
                rate_learner = LookedRate(plan, module, optimizer, noise_std)
            elif settings.probe == "losses":
                rate_learner = LossSearch(settings, private)
        tensors = [*module.named_parameters(), *module.named_buffers()]
        processes.agree(
            records=sampler.num_records,
            owners=fetched.owners and hash(tuple(map(tuple, fetched.owners))),  # of integers, so not salted
            records_per_owner=records_per_owner,
            **vars(settings),
            split=plan.split,  # with the budget, the sample rate and the length of the run
            clipping=clipping,
            optimizer=optimizer,
            diagnostics=diagnostics,
            without_guarantee=without_guarantee,
            torch=torch.__version__,
            hardware=kernels(device),
            module=[(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors],
        )
        check_same_records(processes, fetched.dataset, generator.child("same records"), device)
        private_optimizer = HyFreeDPOptimizer(
            optimizer,
            plan=plan,
            gradient_engine=gradient_engine,
            rate_learner=rate_learner,
            sampler=sampler,
            generator=generator.child("noise"),
            max_physical_batch_size=max_physical_batch_size,
            diagnostics=diagnostics,
            without_guarantee=without_guarantee,
            processes=processes,
        )
        processes.copy_from_first(tensor for _, tensor in tensors)
        if device == CPU:
            keep_freed_memory()
        self._ledgers.append(private_optimizer.ledger)
        return module, private_optimizer, loader

    def _new_run(self, device: torch.device) -> tuple[Processes, NoiseGenerator]:
        """The processes of the next run, which have the same engine, and its generator, the first process's."""
        processes, number = Processes(self._process_group, device), len(self._ledgers)
        processes.agree(seed=self._seed, run=number, secure_noise=self._secure_noise)
        generator = NoiseGenerator(self._seed, secure=self._secure_noise).child("run", number)
        generator.load_state_dict(processes.gather(generator.state_dict())[0])
        return processes, generator

    def get_epsilon(self, delta: float) -> float:
        """Epsilon at ``delta`` of this engine's run, as in Opacus; ValueError after several runs. Threat model: WR."""
        spent = [ledger.epsilon(delta) for ledger in self._ledgers if ledger.released]
        if len(spent) > 1:
            raise ValueError(
                f"this engine has trained {len(spent)} runs, which may share records: call hyfreedp.total_epsilon"
            )
        return math.fsum(spent)

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module,
        optimizer: HyFreeDPOptimizer,
        checkpoint_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a run to a file, see :meth:`HyFreeDPOptimizer.state_dict`; an interruption leaves an old file whole.

        It holds the key of all noise: keep it as secret as the data (threat model: CK). Each process saves its own.

        Args:
            path: of the file, which is replaced if it exists; only its owner may read it.
            module, optimizer: as :meth:`make_private_with_epsilon` returned them.
            checkpoint_dict: further tensors and plain values to save, such as a scheduler's state.
        """
        _check_own(path, module, optimizer)
        more = {} if checkpoint_dict is None else checkpoint_dict
        check_type("checkpoint_dict", more, Mapping, "a dictionary of tensors and plain values")
        write_checkpoint(path, optimizer.state_dict(), more)

    def load_checkpoint(
        self, *, path: str | os.PathLike[str], module: nn.Module, optimizer: HyFreeDPOptimizer
    ) -> dict[str, Any]:
        """Resume, bit for bit, from a file of :meth:`save_checkpoint`; loading it runs no code.

        Args:
            path: of the file; a file of another run raises ValueError.
            module, optimizer: as :meth:`make_private_with_epsilon` returned them, with the arguments of the saved run.

        Returns the ``checkpoint_dict``.
        """
        _check_own(path, module, optimizer)
        state, checkpoint_dict = read_checkpoint(path)
        optimizer.load_state_dict(state)
        return checkpoint_dict


def _run_length(epochs: int | None, steps: int | None, steps_per_epoch: int) -> int:
    if (epochs is None) == (steps is None):
        raise ValueError(f"give either epochs or steps, got epochs={epochs} and steps={steps}")
    if steps is None:
        most = MOST_STEPS // steps_per_epoch
        return check_count("epochs", epochs, 1, most, "the most accounted for") * steps_per_epoch
    return check_count("steps", steps, 1)


def _check_clipping(clipping: Clipping | None, private: bool) -> Clipping:
    if clipping is None:
        return AutomaticClipping() if private else NoClipping()
    if isinstance(clipping, type) or not (hasattr(clipping, "sensitivity") and hasattr(clipping, "factors")):
        raise TypeError(
            f"clipping must be a rule of hyfreedp.gradients, got {clipping!r}: leave it out for normalised gradients, "
            "or pass hyfreedp.AbadiClipping(max_grad_norm), which is Opacus's 'flat'"
        )
    if private and not 0 < float(clipping.sensitivity) < math.inf:
        raise ValueError(f"clipping must bound gradients if target_epsilon is finite, got {clipping}: leave it out")
    return clipping


def _check_own(path: str | os.PathLike[str], module: nn.Module, optimizer: HyFreeDPOptimizer) -> None:
    check_type("path", path, str | os.PathLike, "the path of a file")
    check_type("optimizer", optimizer, HyFreeDPOptimizer, "what make_private_with_epsilon returned")
    if optimizer.module is not module:
        raise ValueError("module must be the model that optimizer trains, as make_private_with_epsilon returned it")
