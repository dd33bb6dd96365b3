"""One Poisson batch and its losses, piece by piece: clipped gradients, then losses at other weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hyfreedp.data.batches import PerSampleLoss, PhysicalBatchSize, batch_length, on_device, split_rows, take
from hyfreedp.gradients import GradientEngine
from hyfreedp.noise import NoiseGenerator
from hyfreedp.running.buffers import BufferGuard
from hyfreedp.running.checks import check_losses, check_weights
from hyfreedp.running.random_states import random_states_kept, random_states_of, seed_random_states

Weights = Tensor | Callable[[Any], Tensor] | None


class Passes:
    """One batch and its loss function. An empty batch takes no pass, and its results have length 0.

    Results are in the order of the batch, whatever the order of its pieces.

    Args:
        per_sample_loss: maps a batch, or a piece of it, to losses of shape ``(B,)``, or ``(B, views)``.
        batch: samples are the first dimension of every tensor.
        engine: of the model.
        max_physical_batch_size: size of the pieces, or the function that chooses them; None for one piece. 1 is the
            mode that trusts least: each sample is computed alone.
        buffers: of the model, which no pass may change.
        generator: sets torch's, NumPy's and Python's random numbers in each pass over a piece, the same in all.
        by_value: whether parameters are compared by value, too.
        weights: of the samples, in [0, 1], shape ``(B,)``, or a function of the batch that returns them.

    Attributes:
        weights: float64, shape ``(B,)``, on the model's device; None if all are 1.

    Raises:
        ValueError: the pieces are no partition of the batch, or weights are of another shape or range.
    """

    def __init__(
        self,
        per_sample_loss: PerSampleLoss,
        batch: Any,
        engine: GradientEngine,
        *,
        max_physical_batch_size: PhysicalBatchSize,
        buffers: BufferGuard,
        generator: NoiseGenerator,
        by_value: bool = False,
        weights: Weights = None,
    ) -> None:
        self._loss, self._batch, self._engine = per_sample_loss, batch, engine
        self._alone = max_physical_batch_size == 1
        self._rows = split_rows(batch, None if self._alone else max_physical_batch_size)
        self._pieces = [take(batch, rows) for rows in self._rows]
        self._generator = generator
        self._together: list[bool | None] = []  # whether the samples of each piece were
        self._buffers, self._by_value = buffers, by_value
        self._device = next(engine.module.parameters()).device
        self._weigh = weights
        self.weights = None if weights is None or not self._pieces else self._weights_of(batch)
        self._none = torch.zeros(0, dtype=torch.float64, device=self._device)

    def add_gradients(self) -> tuple[Tensor, Tensor]:
        """Clipped per-sample gradients into the engine's sums; the losses and the gradients' norms, shape ``(B,)``."""
        losses, norms, self._together = [], [], []
        with random_states_kept(self._device), self._model_unchanged():
            for rows, piece, key in zip(self._rows, self._pieces, self._keys("piece"), strict=True):
                weights = None if self.weights is None else take(self.weights, rows)
                values, sizes = self._engine.add(self._values, piece, weights, alone=self._alone, key=key)
                self._together.append(self._engine.together)
                losses.append(values.double())
                norms.append(sizes)
        return self._in_order(losses), self._in_order(norms)

    def losses(self) -> Tensor:
        """Losses at the present weights, shape ``(B,)``; dropout is that of the gradients, once there are some."""
        losses, together = [], self._together or [None] * len(self._pieces)  # as the last batch, before its gradients
        with random_states_kept(self._device), self._model_unchanged():
            keys = self._keys("piece" if self._together else "look")
            for piece, key, joint in zip(self._pieces, keys, together, strict=True):
                seed_random_states(key, self._device)
                losses.append(self._engine.losses(self._values, piece, together=joint, alone=self._alone).double())
        return self._in_order(losses)

    def weighted(self, losses: Tensor) -> Tensor:
        """Losses, shape ``(..., B)``, times the weights; a sample of weight 0 has loss 0, whatever it was."""
        return losses if self.weights is None else (losses * self.weights).masked_fill(self.weights == 0, 0.0)

    def check(self, generator: NoiseGenerator) -> bool:
        """Refuse samples and weights that depend on others; compare gradients with autograd, see ``verify``.

        Returns:
            Whether there were samples to compare.
        """
        self._check_weights_apart(generator.child("weights"))
        if self._alone or self._engine.slow is not None:  # each sample is computed alone
            self._check_no_memory(generator.child("memory"))
            return True
        pieces = [piece for piece in self._pieces if batch_length(piece) > 1]
        if not pieces:
            return False
        piece = pieces[int(generator.permutation(len(pieces))[0])]
        with random_states_of(generator.key, self._device), self._model_unchanged():
            return self._engine.verify(self._values, piece, generator)

    @torch.no_grad()
    def _weights_of(self, samples: Any) -> Tensor:
        with self._buffers.unchanged(by_value=self._by_value):
            weights = self._weigh(take(samples, slice(None))) if callable(self._weigh) else self._weigh
        checked = check_weights(weights, batch_length(samples)).detach()
        return checked.to(self._device, torch.float64, copy=True)  # whatever is written to them later

    def _check_weights_apart(self, generator: NoiseGenerator) -> None:
        """Refuse a function by which one sample's weight depends on others: these would move more than their own.

        The batch in halves has the weights of the whole. The largest record of all, say, is in one of them.
        """
        if not callable(self._weigh) or self.weights is None:
            return
        order = generator.permutation(batch_length(self._batch))
        for half in order.tensor_split(2):
            apart = self._weights_of(take(self._batch, half))
            if not torch.allclose(take(self.weights, half), apart, rtol=1e-4, atol=1e-6):
                raise ValueError(
                    "weights must give each sample a weight of its own record alone, but they changed with the other "
                    "samples: take no sum, mean, maximum or count over the batch, and draw no random numbers"
                )

    @torch.no_grad()
    def _check_no_memory(self, generator: NoiseGenerator) -> None:
        """Refuse a loss that remembers samples: of one alone it must be the same after others, in another order."""
        rows = generator.permutation(batch_length(self._batch))[:4]
        found: dict[int, Tensor] = {}
        for row in (*rows.tolist(), *rows.flip(0).tolist()):
            with random_states_of(generator.key, self._device):
                loss = self._values(take(self._batch, slice(row, row + 1)))
            if not torch.allclose(found.setdefault(row, loss), loss, rtol=1e-4, equal_nan=True):
                raise ValueError(
                    "the loss of a sample depends on those that were computed before it, alone though it is: let loss "
                    "and model keep nothing of a batch, and draw from the global generators of torch, NumPy or Python"
                )

    def _keys(self, what: str) -> list[bytes]:
        """Of the random numbers of each piece: others for a look, which knows not if gradients will be together."""
        return [self._generator.child(what, number).key for number in range(len(self._pieces))]

    def _model_unchanged(self) -> AbstractContextManager[None]:
        """Around several passes, backward ones too: the values of parameters are compared, if they are to be."""
        return self._buffers.unchanged(by_value=self._by_value)

    def _values(self, piece: Any) -> Tensor:
        seed = torch.initial_seed()
        with self._buffers.unchanged():
            losses = self._loss(take(piece, slice(None)))  # what it leaves in a dict is not there the next time
        if torch.initial_seed() != seed:
            raise ValueError(
                "torch's random numbers were seeded while a loss was computed, by it or by another thread: whoever "
                "knows the seed knows dropout's masks. Seed nothing in the loss; numbers come from the run's key"
            )
        check_losses(losses, batch_length(piece), self._engine.views, differentiable=torch.is_grad_enabled())
        return losses if self._engine.views == 1 else losses.mean(1)

    def _in_order(self, parts: list[Tensor]) -> Tensor:
        """Values of the pieces, shape ``(n,)`` each, as those of the batch, shape ``(B,)``."""
        if not parts:
            return self._none
        values = torch.cat(parts)
        for rows, part in zip(self._rows, parts, strict=True):
            values[on_device(rows, values.device)] = part
        return values
