"""The passes through a model that one Poisson batch takes, piece by piece: forward and backward, then the probes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hyfreedp.batches import PhysicalBatchSize, batch_length, on_device, split_rows, take
from hyfreedp.buffers import BufferGuard
from hyfreedp.checks import check_losses, check_weights
from hyfreedp.clipping import GradientEngine, Misread
from hyfreedp.mixing import SAMPLES, check_samples_apart, shaken
from hyfreedp.noise import NoiseGenerator
from hyfreedp.sampling import RandomState

PerSampleLoss = Callable[[Any], Tensor]
Weights = Tensor | Callable[[Any], Tensor] | None

_TRIALS = 10  # of passes that are to tell of a layer, which may drop out of them


class Passes:
    """One batch and its loss function. An empty batch takes no pass, and its results have length 0.

    Results are in the order of the batch, whatever the order of its pieces.

    Args:
        per_sample_loss: maps a batch, or a piece of it, to losses of shape ``(B,)``, or ``(B, views)``.
        batch: samples are the first dimension of every tensor.
        max_physical_batch_size: size of the pieces, or the function that chooses them; None for one piece.
        device: of the model.
        buffers: of the model, which no pass may change.
        check: whether :meth:`check_samples` will be called, and parameters are compared by value meanwhile.
        views: of each sample, whose loss is the mean over them.
        weights: of the samples, in [0, 1], shape ``(B,)``, or a function of the batch that returns them.

    Attributes:
        weights: float64, shape ``(B,)``, on the model's device; None if all are 1.

    Raises:
        ValueError: the pieces are no partition of the batch, see :func:`hyfreedp.batches.split_rows`; or weights of
            another shape or range.
    """

    def __init__(
        self,
        per_sample_loss: PerSampleLoss,
        batch: Any,
        *,
        max_physical_batch_size: PhysicalBatchSize,
        device: torch.device,
        buffers: BufferGuard,
        check: bool = False,
        views: int = 1,
        weights: Weights = None,
    ) -> None:
        self._loss, self._views = per_sample_loss, views
        self._batch = batch
        self._cut(max_physical_batch_size)
        self._states: list[RandomState] = []
        self._largest = max(map(batch_length, self._pieces), default=0)
        self._finite: list[Tensor] = []  # of each piece, which samples' loss and gradient are
        self._buffers, self._check = buffers, check
        self._device = device
        self._weigh = weights
        self.weights = None if weights is None or not self._pieces else self._weights_of(batch)
        self._no_losses = torch.zeros(0, dtype=torch.float64, device=device)

    def show(self, engine: GradientEngine, sizes: Iterable[int]) -> None:
        """Let the engine see forward passes of so many samples, copies among them if there are fewer."""
        state, piece = RandomState.capture(self._device), max(self._pieces, key=batch_length, default=None)
        for size in sizes if piece is not None else ():
            self._tell(engine, piece, size)
        state.restore()

    def _tell(self, engine: GradientEngine, piece: Any, size: int) -> None:
        """A forward pass of so many samples, copies among them."""
        samples = take(piece, torch.arange(size) % batch_length(piece))
        engine.expect(samples)
        with engine.telling():
            self._values(samples, differentiable=True)

    def _confirm(self, engine: GradientEngine, piece: Any) -> None:
        """Let the engine see whether shapes have misled it: by a pass of the piece and copies of some of its samples.

        Where such passes do not tell, say because layers drop out of them, the engine is left ``unchecked``.
        """
        length = batch_length(piece)
        size = engine.telling_size(length)
        if length == 1 or size is None or engine.unchecked:  # of one sample nothing can go to a wrong one
            return
        state = RandomState.capture(self._device)
        for _ in range(_TRIALS):
            self._tell(engine, piece, size)
            if (size := engine.telling_size(size)) is None:
                break
        state.restore()
        engine.unchecked = size is not None

    def rewind(self) -> None:
        """To the random numbers that :meth:`backward` began with."""
        self._states[0].restore()

    def split(self) -> None:
        """Into pieces of one sample, in which nothing can go to a wrong one."""
        self._cut(1)

    def backward(self, engine: GradientEngine) -> tuple[Tensor, Tensor]:
        """Clipped sum of per-sample gradients into ``.grad``; the losses and the gradients' norms, shape ``(B,)``.

        Whoever asks the engine whether it :meth:`~GradientEngine.was_misled` afterwards knows whether to do it again.
        """
        engine.was_misled()  # before
        losses, norms = [], []
        self._states, self._finite = [], []
        for rows, piece in zip(self._rows, self._pieces, strict=True):
            self._states.append(RandomState.capture(self._device))
            engine.expect(piece)
            values = self._values(piece, differentiable=True)
            weights = None if self.weights is None else take(self.weights, rows)
            norms.append(engine.backward(values, weights))
            self._look_closer(engine, piece, self._states[-1])
            self._confirm(engine, piece)
            losses.append(values.detach().double())
            self._finite.append(losses[-1].isfinite() & norms[-1].isfinite())
        engine.expect(())  # other tensors may lie there later
        if not self._pieces:
            return self._no_losses, engine.backward(self._no_losses)  # a zero sum, for the noise
        return self._in_order(losses), self._in_order(norms)

    @torch.no_grad()
    def forward(self) -> Tensor:
        """Losses at the present weights, each piece with the random numbers (dropout) of its :meth:`backward`."""
        losses = []
        present = RandomState.capture(self._device)
        try:
            for piece, state in zip(self._pieces, self._states, strict=True):
                state.restore()
                losses.append(self._values(piece).double())
        finally:
            present.restore()
        return self._in_order(losses) if losses else self._no_losses

    def weighted(self, losses: Tensor) -> Tensor:
        """Losses, shape ``(..., B)``, times the weights; a sample of weight 0 has loss 0, whatever it was."""
        return losses if self.weights is None else (losses * self.weights).masked_fill(self.weights == 0, 0.0)

    def check_samples(self, engine: GradientEngine, generator: NoiseGenerator) -> bool:
        """Gradients of a few samples against autograd, then losses, see :func:`hyfreedp.mixing.check_samples_apart`.

        Both are compared at the weights as they are and at shaken weights.

        To be called after :meth:`backward`, which learns in which types the layers compute and whose losses are finite:
        no bad record hides the others.

        Returns:
            Whether there was a piece of two such samples or more to choose them from, and they could be compared.
        """
        chosen = [finite.cpu().nonzero()[:, 0] for finite in self._finite]
        pieces = [(piece, rows) for piece, rows in zip(self._pieces, chosen, strict=True) if len(rows) > 1]
        if not pieces and self._largest > 1 and self._finite:  # they were split
            finite = self._in_order(self._finite).cpu().nonzero()[:, 0]
            pieces = [(self._batch, finite)] if len(finite) > 1 else []
        if not pieces:
            return False
        piece, rows = pieces[int(generator.permutation(len(pieces))[0])]
        samples = take(piece, rows[generator.permutation(len(rows))[: min(SAMPLES, self._largest)]])
        present = RandomState.capture(self._device)
        engine.unchecked = False
        try:
            self._check_weights_apart(generator.child("weights"))
            self._compare(engine, samples)
            parameters = [p for p in engine.module.parameters() if p.requires_grad]
            with shaken(parameters, generator.child("gradients")):  # which opens gates that hide gradients
                self._compare(engine, samples)
            check_samples_apart(
                self._values,
                samples,
                module=engine.module,
                narrowest_type=engine.narrowest_type,
                generator=generator,
            )
        finally:
            present.restore()
            engine.expect(())
        self._check = False
        return not engine.unchecked

    @torch.no_grad()
    def _weights_of(self, samples: Any) -> Tensor:
        with self._buffers.unchanged(by_value=self._check):
            weights = self._weigh(take(samples, slice(None))) if callable(self._weigh) else self._weigh
        checked = check_weights(weights, batch_length(samples)).detach()
        return checked.to(self._device, torch.float64, copy=True)  # whatever is written to them later

    def _check_weights_apart(self, generator: NoiseGenerator) -> None:
        """Refuse a function by which one sample's weight depends on others: these would move more than their own.

        The batch in halves has the weights of the whole. The largest record of all, say, is in one of them.
        """
        if not callable(self._weigh):
            return
        assert self.weights is not None
        order = generator.permutation(batch_length(self._batch))
        for half in order.tensor_split(2):
            apart = self._weights_of(take(self._batch, half))
            if not torch.allclose(take(self.weights, half), apart, rtol=1e-4, atol=1e-6):
                raise ValueError(
                    "weights must give each sample a weight of its own record alone, but they changed with the other "
                    "samples of the batch: compute no sum, mean, maximum or count over the batch in them, and draw no "
                    "random numbers"
                )

    def _compare(self, engine: GradientEngine, samples: Any) -> None:
        """With autograd, without the samples whose gradient is not finite here."""
        for _ in range(2):
            state = RandomState.capture(self._device)
            engine.expect(samples)
            finite = engine.verify(self._values(samples, differentiable=True)).isfinite().cpu()
            if finite.all():
                self._look_closer(engine, samples, state)
                return
            samples = take(samples, finite.nonzero()[:, 0])
            if finite.sum() < 2:
                break
        engine.unchecked = True

    def _look_closer(self, engine: GradientEngine, samples: Any, state: RandomState) -> None:
        """Compare again, from the same random numbers, where one large gradient has hidden others from autograd.

        What disagrees then may be a gradient that is all rounding: nobody can tell, and nothing is refused.
        """
        if engine.hidden is not None:
            state.restore()
            try:
                engine.verify(self._values(samples, differentiable=True), engine.hidden)
            except Misread:
                engine.unchecked = True

    def _cut(self, size: PhysicalBatchSize) -> None:
        self._rows = split_rows(self._batch, size)
        self._pieces = [take(self._batch, rows) for rows in self._rows]

    def _values(self, piece: Any, *, differentiable: bool = False) -> Tensor:
        with self._buffers.unchanged(by_value=self._check):
            losses = self._loss(take(piece, slice(None)))  # what it leaves in a dict is not there the next time
        check_losses(losses, batch_length(piece), self._views, differentiable=differentiable)
        return losses if self._views == 1 else losses.mean(1)

    def _in_order(self, parts: list[Tensor]) -> Tensor:
        """Values of the pieces, shape ``(n,)`` each, as those of the batch, shape ``(B,)``."""
        values = torch.cat(parts)
        for rows, part in zip(self._rows, parts, strict=True):
            values[on_device(rows, values.device)] = part
        return values
