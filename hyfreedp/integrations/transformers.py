"""Private training by the Trainer of transformers: ``pip install 'hyfreedp[transformers]'``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from hyfreedp import HyFreeDPOptimizer, PrivacyEngine
from hyfreedp.integrations.closure import ClosureOptimizer


class PrivateTrainer(Trainer):
    """A Trainer whose :meth:`train` is one private run.

    The batch size of its arguments, times the processes, is the expected size of a Poisson batch. No loss of a training
    batch is logged, since none is private; ``epsilon`` is. Learning rate and scheduler of the arguments count only with
    ``preset="fixed"``. A checkpoint is resumed bit for bit, by a new trainer.

    Args:
        per_sample_loss: maps the model and a batch, or a piece of it, to losses of shape ``(B,)``.
        privacy: arguments of :meth:`hyfreedp.PrivacyEngine.make_private_with_epsilon`: ``target_epsilon``,
            ``target_delta`` and what else is to be told, but for what the Trainer has: model, optimizer, data, length.
        engine: which wires the run; a new one if None.
        **kwargs: arguments of the Trainer.

    Attributes:
        private: the private optimizer, once training has begun.

    Raises:
        ValueError: arguments of the Trainer that a private run cannot follow.
    """

    model: Any
    train_dataset: Any
    lr_scheduler: Any

    def __init__(
        self,
        *,
        per_sample_loss: Callable[[nn.Module, Any], Tensor],
        privacy: dict[str, Any],
        engine: PrivacyEngine | None = None,
        **kwargs: Any,
    ) -> None:
        if (args := kwargs.get("args")) is not None:
            _check_arguments(args)
        super().__init__(**kwargs)
        self.args.ignore_data_skip = True  # the sampler goes on by itself: nothing used is given again
        self.per_sample_loss, self.privacy, self.engine = per_sample_loss, privacy, engine or PrivacyEngine()
        self.private: HyFreeDPOptimizer | None = None

    def get_train_dataloader(self) -> DataLoader:
        """Make the run private; the loader of its Poisson batches."""
        if self.private is not None:
            raise RuntimeError("this trainer has trained its private run: make another, with a budget of its own")
        args, data = self.args, self.train_dataset
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        loader: DataLoader = DataLoader(
            data,
            batch_size=args.train_batch_size * args.world_size,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
        )
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * len(loader))
        self.model.train()
        _, self.private, private_loader = self.engine.make_private_with_epsilon(
            module=self.model, optimizer=self.create_optimizer(), data_loader=loader, steps=steps, **self.privacy
        )
        self.optimizer = ClosureOptimizer(self.private)
        return private_loader

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The scheduler of the arguments where the rate is not learned."""
        if self.private is None or self.private.rate_learner is None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = _Learned(ClosureOptimizer(self.private))
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One private step; returns zero, for the mean loss is not private."""
        assert self.private is not None
        self.model.train()
        with self.compute_loss_context_manager():
            self.private.step(lambda piece: self.per_sample_loss(self.model, piece), self._prepare_inputs(inputs))
        return torch.zeros((), device=self.args.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Without the loss and the gradient's norm of training, with epsilon."""
        if self.private is not None and ("loss" in logs or "train_loss" in logs):
            logs = {name: value for name, value in logs.items() if name not in ("loss", "train_loss", "grad_norm")}
            logs["epsilon"] = self.private.epsilon_spent()
        super().log(logs, start_time)


def _check_arguments(args: TrainingArguments) -> None:
    if args.gradient_accumulation_steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps must be 1, got {args.gradient_accumulation_steps}: give the whole batch "
            "size, and the size of its pieces as privacy={'max_physical_batch_size': ...}"
        )
    if args.fp16:
        raise ValueError("fp16 must be False, since it scales losses: use bf16=True")
    if args.push_to_hub and "checkpoint" in str(getattr(args.hub_strategy, "value", args.hub_strategy)):
        raise ValueError("hub_strategy must be 'every_save' or 'end': checkpoints hold the key of all noise")


class _Learned(LRScheduler):
    """A scheduler that sets nothing, and tells the rates that were learned."""

    def step(self, epoch: int | None = None) -> None:
        pass

    def get_last_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]
