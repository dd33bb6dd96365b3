"""Private training with the Trainer of transformers: ``pip install -e '.[transformers]'``."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, fields
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import ProgressCallback, Trainer, TrainingArguments
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_utils import TrainOutput

from hyfreedp import PRESETS, HyFreeDPOptimizer, PrivacyEngine
from hyfreedp.checks import check_arguments, check_type
from hyfreedp.data.batches import Records
from hyfreedp.integrations.closure import ClosureOptimizer, epsilon_is_due, warn_of_log
from hyfreedp.pytorch.wrapper import stepping

_PIECES = "give the whole batch as per_device_train_batch_size; privacy={'max_physical_batch_size': ...} bounds memory"
_BY_LENGTH = "batches are Poisson samples, and records of one length are computed together"
_TOKENS = "the tokens of the batches that were drawn are not private"
_WHOLE = "the model must be whole on every process; start the same script by torchrun"
_UPLOADS = "it uploads output_dir, which holds the key of all noise"
_WORKERS = "num_workers pin_memory persistent_workers prefetch_factor multiprocessing_context".split()
# TrainingArguments that a private run cannot follow, and what to do instead. docs/trainers.md lists all arguments.
REFUSED = {
    **dict.fromkeys(("gradient_accumulation_steps", "auto_find_batch_size", "torch_empty_cache_steps"), _PIECES),
    "max_grad_norm": "gradients are normalised; to clip instead: privacy={'clipping': hyfreedp.AbadiClipping(norm)}",
    "dataloader_drop_last": "batches are Poisson samples, none of which is left over at the end",
    "dataloader_in_order": "a checkpoint counts batches in their order",
    **dict.fromkeys(("group_by_length", "train_sampling_strategy"), _BY_LENGTH),
    "data_seed": "batches are drawn by the engine; for a run that can be repeated give engine=PrivacyEngine(seed=...)",
    "fp16": "it scales losses; use bf16=True",
    "past_index": "what a model computes of one record must not reach another",
    "torch_compile": "gradients of single records are taken from the model as it is",
    "use_liger_kernel": "gradients of single records cannot be taken from fused kernels",
    **dict.fromkeys(("include_num_input_tokens_seen", "include_tokens_per_second"), _TOKENS),
    "skip_memory_metrics": "how much memory a batch takes tells of its records",
    "debug": "it prints what single records make of the layers",
    **dict.fromkeys(("deepspeed", "fsdp", "parallelism_config"), _WHOLE),
}
OF_A_FIXED_RATE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio")
# Environment variables that would make the Trainer's loggers publish values that are not private.
OF_THE_ENVIRONMENT = {
    "WANDB_WATCH": "it logs raw gradients",
    **dict.fromkeys(("COMET_LOG_ASSETS", "HF_DAGSHUB_LOG_ARTIFACTS", "HF_DVCLIVE_LOG_MODEL"), _UPLOADS),
}


class PrivateTrainer(Trainer):
    """A Trainer whose :meth:`train` is one private run. Threat model: LOG.

    The batch size per device, times the number of processes, is the expected size of a Poisson batch. Training logs
    epsilon and the learning rate, and nothing that is not private. A new trainer resumes from a checkpoint bit for bit.
    Checkpoints may be published. The key of all noise is in a separate file, ``_hyfreedp-....key`` in ``output_dir``:
    keep it secret; resuming needs it. Arguments that a private run cannot follow raise ValueError unless at defaults.

    Args:
        loss: maps the model and one record, which the data collator has made alone, to one number; None: the Trainer's
            ``compute_loss``, such as ``model(**record).loss``.
        privacy: arguments of :meth:`hyfreedp.PrivacyEngine.make_private_with_epsilon`, at least ``target_epsilon`` and
            ``target_delta``, without those that the Trainer sets: model, optimizer, data, length.
        weights: maps a record to its weight in [0, 1], see :meth:`hyfreedp.HyFreeDPOptimizer.step`.
        engine: makes the run; a new one if None.
        **kwargs: arguments of the Trainer.

    Attributes:
        private: the private optimizer; None before training.
    """

    model: Any
    optimizer: Any
    train_dataset: Any
    lr_scheduler: Any

    def __init__(
        self,
        *,
        privacy: dict[str, Any],
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        weights: Callable[[Any], Tensor] | None = None,
        engine: PrivacyEngine | None = None,
        **kwargs: Any,
    ) -> None:
        check_type("privacy", privacy, Mapping, "a dictionary of arguments of make_private_with_epsilon")
        refused = dict(REFUSED)
        if loss is not None:
            check_arguments(loss, "model", "record")
            refused["label_smoothing_factor"] = "smooth in your loss, by F.cross_entropy(..., label_smoothing=...)"
        for name in {"module", "optimizer", "data_loader", "epochs", "steps"} & privacy.keys():
            raise ValueError(f"privacy must not have {name!r}: the Trainer has it (num_train_epochs, max_steps)")
        preset = privacy.get("preset", "robust")
        preset = PRESETS.get(preset, preset)  # others are refused in train()
        learned = privacy.get("probe", getattr(preset, "probe", "none")) != "none"
        if learned:
            refused |= dict.fromkeys(OF_A_FIXED_RATE, _FIXED)
        if (args := kwargs.get("args")) is not None:
            _check_arguments(args, refused)
        if learned and kwargs.get("optimizers", (None, None))[1] is not None:
            raise ValueError(f"optimizers must have None for the scheduler: {_FIXED}")
        super().__init__(**kwargs)
        _check_arguments(self.args, refused)  # again: transformers sets some from others
        self.args.ignore_data_skip = True  # the sampler resumes at its own position
        self.loss, self.privacy, self.weights, self.engine = loss, privacy, weights, engine or PrivacyEngine()
        self.private: HyFreeDPOptimizer = None  # type: ignore[assignment]  # before training
        self._ignored: dict[str, None] = {}
        self._loader: DataLoader
        if not self.args.disable_tqdm:
            self.remove_callback(DEFAULT_PROGRESS_CALLBACK)
            self.add_callback(_Progress(self))

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As the Trainer's; the only metric is epsilon, and ``training_loss`` is None, since it is not private."""
        output: Any = super().train(*args, **kwargs)
        return output._replace(training_loss=None, metrics={"epsilon": self.private.epsilon_spent()})

    def get_train_dataloader(self) -> DataLoader:
        """Make the run private; returns the loader of Poisson batches."""
        if self.private is not None and self.private.ledger.steps == 0:  # called before train(), for its length
            return self._loader
        if self.private is not None:
            raise RuntimeError("this trainer has trained its private run: make another, with a budget of its own")
        args, data = self.args, self.train_dataset
        workers: dict[str, Any] = {name: getattr(args, f"dataloader_{name}", None) for name in _WORKERS}
        loader: DataLoader = DataLoader(
            data,
            batch_size=args.train_batch_size * args.world_size,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            **workers,
        )
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * len(loader))
        self.model.train()
        _, self.private, self._loader = self.engine.make_private_with_epsilon(
            module=self.model, optimizer=self.create_optimizer(), data_loader=loader, steps=steps, **self.privacy
        )
        self.optimizer = ClosureOptimizer(self.private, str(args.output_dir))
        return self._loader

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The scheduler of the arguments; if the rate is learned, one that does nothing."""
        if self.private is None or self.private.split.probe == "none":
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = _Learned(self.optimizer)
        return self.lr_scheduler

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any = None) -> Any:
        """The next batch, without its number of tokens, by which the Trainer would divide each record's loss."""
        return [*islice(epoch_iterator, num_batches)], None

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device; the Trainer's method cannot move ``Records``."""
        return inputs.to(self.args.device) if isinstance(inputs, Records) else super()._prepare_inputs(inputs)

    def floating_point_ops(self, inputs: Any) -> int:
        """0, since the true number would reveal the sizes of batches."""
        return 0

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One private step; returns zero instead of the mean loss, which is not private.

        RuntimeError if the run was resumed without the private optimizer's state, which counts its releases.
        """
        if self.private.ledger.steps != self.state.global_step:
            raise RuntimeError(
                f"the trainer is at step {self.state.global_step} and the private optimizer at step "
                f"{self.private.ledger.steps}: resume from a checkpoint with an optimizer.pt (save_only_model=False)"
            )
        self.model.train()
        loss: Callable[[Any, Any], Any] = self.loss or self.compute_loss
        with self.compute_loss_context_manager():
            batch = self._prepare_inputs(inputs)
            self.private.step(lambda record: loss(self.model, record), batch, weights=self.weights)
        warn_of_log(tuple(self._ignored))
        return torch.zeros((), device=self.args.device)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, with the :meth:`_averaged` weights."""
        with self._averaged():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, with the weights that are evaluated; a resumed run takes its own from the optimizer."""
        with self._averaged():
            super().save_model(*args, **kwargs)

    def _averaged(self) -> AbstractContextManager[None]:
        """A context with the weights with which the run would end now, or those of the best checkpoint once loaded."""
        loaded = self.args.load_best_model_at_end and not self.is_in_train
        return nullcontext() if self.private is None or loaded else self.private.averaged()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; the card ends with the privacy statement of the run so far."""
        super().create_model_card(*args, **kwargs)
        if self.private is not None and self.is_world_process_zero():
            statement = self.private.statement().markdown().replace("# ", "## ")
            with open(os.path.join(str(self.args.output_dir), "README.md"), "a", encoding="utf-8") as card:
                card.write(f"\n{statement}")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """In training log epsilon and the learning rate only, in evaluation everything, within a loss nothing."""
        if stepping():
            self._ignored.update(dict.fromkeys(logs))
            return
        if self.private is not None and ("loss" in logs or "train_loss" in logs):
            logs = {name: value for name, value in logs.items() if name == "learning_rate"}
            logs["epsilon"] = self.private.epsilon_spent()
        super().log(logs, start_time)


_FIXED = "the learning rate is learned; leave it out, or give privacy={'preset': 'fixed', ...}, which follows it"


def _check_arguments(args: TrainingArguments, refused: dict[str, str]) -> None:
    """ValueError for arguments that a private run cannot follow, unless they are unset or have their default."""
    for field in fields(args):
        value, default = getattr(args, field.name), field.default
        unset = value in (None, "", "no") or value == [] or value == {} or value == default
        if field.name in refused and not unset:
            left = "unset" if default in (None, MISSING, "") else f"at {getattr(default, 'value', default)!r}"
            given = getattr(value, "value", value)
            raise ValueError(f"{field.name} must be left {left}, got {given!r}: {refused[field.name]}")
    if "codecarbon" in (args.report_to or ()):
        raise ValueError("report_to must not have 'codecarbon': the energy of a run tells how large its batches were")
    for name, why in OF_THE_ENVIRONMENT.items():
        if os.environ.get(name, "").lower() not in ("", "0", "false"):
            raise ValueError(f"the environment's {name} must be unset, got {os.environ[name]!r}: {why}")


class _Progress(ProgressCallback):
    """The progress bar, with epsilon and the learning rate."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        super().__init__()
        self.trainer, self.epsilon = trainer, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and (private := self.trainer.private) is not None:
            if epsilon_is_due(private):
                self.epsilon = private.epsilon_spent()
            bar: Any = self.training_bar
            bar.set_postfix(epsilon=self.epsilon, rate=float(private.param_groups[0]["lr"]), refresh=False)
        super().on_step_end(args, state, control, **kwargs)


class _Learned(LRScheduler):
    """A scheduler that sets no rates, and returns the learned ones."""

    def step(self, epoch: int | None = None) -> None:
        pass

    def get_last_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]
