"""Private training by the Trainer of Lightning: ``pip install -e '.[lightning]'``."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import LightningModule, callbacks
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hyfreedp import HyFreeDPOptimizer, PrivacyEngine
from hyfreedp.integrations.closure import ClosureOptimizer, epsilon_is_due, warn_of_log
from hyfreedp.pytorch.wrapper import stepping


class _EarlyEnd(callbacks.Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if left := pl_module.private.steps_left:
            warnings.warn(
                f"fit ended {left} steps before the plan, so the module has its current weights, not preset robust's "
                "average: evaluate and save it `with module.private.averaged():`",
                stacklevel=2,
            )


class PrivateModule(LightningModule):
    """A LightningModule that trains privately: its ``training_step`` gets one record at a time and returns its loss.

    It logs epsilon and the learning rate (threat model: LOG). What ``training_step`` logs is ignored.

    Before ``Trainer.fit``, :meth:`make_private` returns the private loader to fit with, as in docs/trainers.md. With
    several processes, started by torchrun, call ``torch.distributed.init_process_group`` before that, and give the
    Trainer ``use_distributed_sampler=False``. ``fit`` ends with the plan. To resume from a checkpoint bit for bit, call
    ``fit(..., ckpt_path=...)`` on a module made private with the same arguments. Checkpoints may be published. The key
    of all noise is in a file of its own, ``_hyfreedp-....key`` in ``default_root_dir``: keep it secret, for resuming.

    Attributes:
        private: the private optimizer; None before :meth:`make_private`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.private: HyFreeDPOptimizer | None = None
        self._ignored = SimpleNamespace(names={})  # the guard of a step would restore a plain dictionary

    def make_private(
        self,
        optimizer: Optimizer,
        data_loader: DataLoader,
        *,
        weights: Callable[[Any], Tensor] | None = None,
        engine: PrivacyEngine | None = None,
        **privacy: Any,
    ) -> DataLoader:
        """Make the module private; returns the loader to fit with. TypeError if it has an optimizer of its own.

        Args:
            optimizer, data_loader: the plain ones.
            weights: maps a record to its weight in [0, 1], see :meth:`hyfreedp.HyFreeDPOptimizer.step`.
            engine: makes the run; a new one if None.
            **privacy: the other arguments of :meth:`hyfreedp.PrivacyEngine.make_private_with_epsilon`.
        """
        kind = type(self)
        if kind.configure_optimizers is not PrivateModule.configure_optimizers:
            raise TypeError(f"{kind.__name__} must leave configure_optimizers out: give make_private the optimizer")
        if kind.training_step is LightningModule.training_step:
            raise TypeError(f"{kind.__name__} must have a training_step(self, batch, batch_idx) that returns the loss")
        _, self.private, private_loader = (engine or PrivacyEngine()).make_private_with_epsilon(
            module=self, optimizer=optimizer, data_loader=data_loader, **privacy
        )
        own = kind.training_step.__get__(self)
        self.training_step = wraps(own)(partial(self._private_step, own, weights))  # type: ignore[method-assign]
        return private_loader

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, such as a callback's that averages weights: it has no run, which must not be made twice."""
        return super().__getstate__() | {"private": None}

    def configure_callbacks(self) -> list[callbacks.Callback]:
        """One that warns of an early end. It is called first: ValueError for what only Lightning's optimizer does."""
        trainer: Any = self.trainer
        if trainer.gradient_clip_val or trainer.accumulate_grad_batches != 1:
            raise ValueError(
                "the Trainer must have no gradient_clip_val, since each record's gradient is clipped, and no "
                "accumulate_grad_batches: max_physical_batch_size= of make_private limits memory"
            )
        if self._compiler_ctx is not None:
            raise ValueError("fit must get the module itself, made anew, not torch.compile's, which has other methods")
        return [_EarlyEnd()]

    def configure_optimizers(self) -> Optimizer:
        """The private optimizer, for Lightning. RuntimeError before :meth:`make_private`; ValueError for callbacks."""
        if self.private is None:
            raise RuntimeError("the module must be made private first: call make_private, and fit with what it returns")
        trainer: Any = self.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, callbacks.DeviceStatsMonitor | callbacks.ThroughputMonitor | callbacks.Timer):
                raise ValueError(
                    f"callbacks must not have a {type(callback).__name__} (max_time makes a Timer): the time and the "
                    "memory that batches take are not private, and go into logs and checkpoints"
                )
            if isinstance(callback, callbacks.StochasticWeightAveraging):
                raise ValueError(
                    "callbacks must not have a StochasticWeightAveraging, which changes rates, and weights at the end, "
                    "unseen by validation: leave it out (preset 'robust' averages), or take a WeightAveraging"
                )
        return ClosureOptimizer(self.private, trainer.default_root_dir)

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """As Lightning's method; does nothing in a private step, since what ``training_step`` logs is not private."""
        if stepping():
            self._ignored.names[name] = None
        else:
            super().log(name, *args, **kwargs)

    def _private_step(self, own: Callable[..., Any], weights: Any, batch: Any, *batch_idx: int) -> Any:
        """One private step; logs the learning rate and, now and then, epsilon."""
        private: Any = self.private
        trainer: Any = self.trainer
        if not trainer.training:  # a validation_step may call training_step
            return own(batch, *batch_idx)

        def loss(record: Any) -> Tensor:
            output = own(record, *batch_idx)
            return output["loss"] if isinstance(output, Mapping) else output

        step = partial(private.step, loss, batch, weights=weights)
        self.optimizers().step(closure=step)  # type: ignore[union-attr]
        warn_of_log(tuple(self._ignored.names))
        trainer.should_stop |= not private.steps_left  # whatever max_epochs is
        values, every = {"learning_rate": private.param_groups[0]["lr"]}, trainer.log_every_n_steps
        if epsilon_is_due(private) or (every and private.ledger.steps % every == 0):
            values["epsilon"] = private.epsilon_spent()
        self.log_dict(values, prog_bar=True, batch_size=1)
