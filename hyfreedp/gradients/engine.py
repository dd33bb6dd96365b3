"""The gradient engine: per-sample gradients, clipped and summed (Alg. 1, line 4).

The loss is mapped over the samples of a batch, so that none sees another (see :mod:`hyfreedp.gradients.mapped`). The
batch is computed in pieces: samples of the same shapes, as many as memory and user allow. A piece is split where its
samples differ in a decision of Python. What functorch cannot map is computed one sample at a time, by plain autograd.
"""

import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.checks import check_count
from hyfreedp.data.batches import Loss
from hyfreedp.errors import REMEMBERS, Refused
from hyfreedp.gradients import compositions, convolution, functions, questions, recurrent, rules  # noqa: F401
from hyfreedp.gradients.clipping import Clipping, bounded_factors
from hyfreedp.gradients.guard import unchanged
from hyfreedp.gradients.isolation import Gradients, SingleSample, masks_traced
from hyfreedp.gradients.mapped import Pass
from hyfreedp.gradients.per_sample import MEMORY_BUDGET, Instantiated, PerSampleGradients, sum_in_blocks, widened
from hyfreedp.gradients.pieces import MOST_TOGETHER, SLOW, Decisions, Partition, Piece, Regroup
from hyfreedp.gradients.validate import check_module
from hyfreedp.noise.random_states import random_states_kept
from hyfreedp.pytorch.devices import without_autocast

_NO_GRADIENT = "loss must have a gradient by the model: is it under no_grad, detached, reentrant, or by another model?"
_CALLED = "The loss gets one record, a batch of one row, and calls no backward(): see docs/usage.md, 'The loss'"
# Parts of what torch says if a loss writes a sample's value into a new tensor, made by ``torch.zeros`` and the like.
_INTO_FRESH = ("doesn't match the broadcast shape", "more elements than `self`", "inplace randomness on an unbatched")
_SMALL = 2**10  # gradients of parameters of at most so many entries are joined in one tensor


class GradientEngine:
    """Computes sum_i c_i g_i from a loss and a batch.

    The model is neither wrapped nor hooked nor changed; :func:`check_module` may refuse it (ValueError).

    Gradient checkpointing works if it is non-reentrant. It saves most if few weights are trained, as with LoRA, since
    input and output gradient of a trained layer (or its weight's gradients) are kept until all norms are known.

    Args:
        module: the model, in train mode, with its final choice of trainable parameters.
        clipping: ``AutomaticClipping()``, ``AbadiClipping(threshold)`` or ``NoClipping()``.
        memory_budget: bytes that per-sample gradients (or copies of parameters) of samples mapped together may take.
        sharing: about how many samples share this memory: the expected batch size. It must be public, since a sample's
            share of the memory decides how its gradient is computed, and so how it rounds.

    Attributes:
        sensitivity: the clipping's as of the last :meth:`clipped_sums`, for all pieces of a batch and for the noise.
        fallback_reason: why samples were last computed one at a time; None if they never were.
    """

    def __init__(
        self, module: nn.Module, clipping: Clipping, *, memory_budget: int = MEMORY_BUDGET, sharing: int = 64
    ) -> None:
        check_module(module)
        self.module, self.clipping, self.sensitivity = module, clipping, clipping.sensitivity
        self.memory_budget = check_count("memory_budget", memory_budget, 0)
        self._sharing = min(check_count("sharing", sharing, 1), MOST_TOGETHER)
        self.fallback_reason: str | None = None
        self._own_factories = False

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def clipped_sums(
        self, loss: Loss, batch: Any, weights: Tensor | None = None
    ) -> tuple[dict[nn.Parameter, Tensor], Tensor, Tensor]:
        """sum_i w_i c_i g_i, to which a sample whose gradient is not finite adds exactly zero.

        Args:
            loss: maps one record, as a batch of that record alone, to one number.
            batch: a batch, or a :class:`Partition`, which afterwards has the pieces that were computed.
            weights: w_i in [0, 1], shape (B,); all 1 if None.

        Returns:
            The sum by each trainable parameter, float32 or wider; the losses, and the norms ||g_i|| over all trainable
            parameters together, both of shape (B,). A norm is inf where it is not finite. They are *not* private.

        Raises :class:`~hyfreedp.errors.Refused`; warns the first time that samples are computed one at a time.
        """
        self.sensitivity = self.clipping.sensitivity
        partition, device = Partition.of(batch), self.device
        losses, norms, trained = [], [], [p for p in self.module.parameters() if p.requires_grad]
        sums: dict[nn.Parameter, Tensor] = {}
        # Closed, so that the contexts that guard the model end even after an error here.
        with closing(_Computation(self, loss, partition, trained).results()) as computed:
            for rows, values, gradients in computed:
                chosen = None if weights is None else weights[rows.to(weights.device, non_blocking=True)]
                losses.append(values)
                if not gradients:
                    raise Refused(_NO_GRADIENT)
                with without_autocast(device):  # it would round the sums
                    norms.append(self._add_clipped(sums, gradients, chosen))
        for p in trained:
            wide = torch.promote_types(p.dtype, torch.float32)
            sums[p] = sums[p].to(wide) if p in sums else torch.zeros_like(p, dtype=wide)
        return sums, partition.in_order(losses, device), partition.in_order(norms, device)

    @torch.no_grad()
    def losses(self, loss: Loss, batch: Any) -> Tensor:
        """Losses (B,) at the current weights, without gradients; arguments as for :meth:`clipped_sums`."""
        partition = Partition.of(batch)
        values = [values for _, values, _ in _Computation(self, loss, partition).results()]
        return partition.in_order(values, self.device)

    def _add_clipped(self, sums: dict[nn.Parameter, Tensor], gradients: Gradients, weights: Tensor | None) -> Tensor:
        """Add sum_i w_i c_i g_i to ``sums``; returns the norms (n,), inf where not finite. Empties ``gradients``.

        Small gradients are joined to one row per sample, since every call of torch takes time. From the second piece on
        sums are float64, since rounding errors of many pieces could add up to more than a clip.
        """
        parts: list[tuple[list[nn.Parameter], PerSampleGradients]] = []  # with their parameters, to be freed in turn
        small = [p for p, g in gradients.items() if isinstance(g, Instantiated) and 0 < p.numel() <= _SMALL]
        if small:
            of_small: Any = map(gradients.pop, small)
            parts.append((small, Instantiated(torch.cat([widened(g.rows) for g in of_small], 1))))
        parts += [([p], gradients.pop(p)) for p in list(gradients)]
        norms = torch.stack([g.squared_norms for _, g in parts]).sum(0).sqrt_()
        norms.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        kept = norms < torch.inf  # others are left out, not multiplied by 0, since 0 * NaN is NaN
        all_kept = bool(kept.all())  # waits for the device
        factors = bounded_factors(self.clipping, norms if all_kept else norms[kept], self.sensitivity)
        if weights is not None:
            factors = factors * (weights if all_kept else weights[kept]).to(factors)
        while parts and len(factors):
            parameters, g = parts.pop()
            joined = sum_in_blocks(g if all_kept else g.select(kept), factors).flatten()
            for p, total in zip(parameters, joined.split_with_sizes([p.numel() for p in parameters]), strict=True):
                total = total.view_as(p)
                sums[p] = sums[p].double().add_(total) if p in sums else widened(total)
        return norms


@dataclass
class _Computation:
    """The losses of one batch, and their gradients by the ``trained`` parameters, piece by piece."""

    engine: GradientEngine
    loss: Loss
    partition: Partition  # afterwards it has the pieces that were computed
    trained: Sequence[nn.Parameter] = ()

    def results(self) -> Generator[tuple[Tensor, Tensor, Gradients], None, None]:
        """Yields for each piece the positions of its samples in the batch, their losses (n,) and gradients."""
        engine, todo, done = self.engine, self.partition.pieces[::-1], list[Piece]()
        repeated: Any = None  # the piece to compute twice (the smallest one), its losses and sum of gradients
        smallest = MOST_TOGETHER + 1  # its size; that of a sample alone counts as 0
        reason = None  # why some samples are computed one at a time
        with random_states_kept(engine.device), ExitStack() as guard:
            while todo:
                piece = todo.pop()
                decisions = Decisions(piece.path, piece.wanted)
                try:
                    losses, gradients = self._computed(piece, decisions)
                except Regroup as regroup:
                    todo += regroup.pieces(piece)
                    continue
                except Exception as error:
                    if piece.attempt:  # a wrong loss raises its error again
                        error.add_note(_CALLED)
                    if piece.attempt or isinstance(error, (Refused, torch.OutOfMemoryError, MemoryError)):
                        raise
                    if not engine._own_factories and any(text in str(error) for text in _INTO_FRESH):
                        engine._own_factories = True
                        todo.append(piece)
                        continue
                    if reason is None:
                        guard.enter_context(unchanged(engine.module, by_value=True))
                    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                    todo += piece.one_by_one(decisions.path)
                    continue
                size = 0 if piece.attempt else len(losses)
                if size < smallest and self._is_suspect(piece, several=bool(todo or done or decisions.path)):
                    repeated, smallest = (piece, losses, _summed(losses, gradients)), size
                done.append(piece)
                yield piece.rows, losses, gradients
            self.partition.pieces = done
            if repeated is not None:
                self._check_memoryless(*repeated)
        if reason is not None and engine.fallback_reason is None:
            warnings.warn(SLOW.format(f"the loss does what cannot be mapped over them ({reason})"), stacklevel=6)
        engine.fallback_reason = reason or engine.fallback_reason

    def _is_suspect(self, piece: Piece, *, several: bool) -> bool:
        """Whether to check a piece, whose loss could keep values: a sample alone, one of ``several`` pieces, a text."""
        if piece.attempt:
            return self.partition.checked is not None
        return bool(self.partition.checked) and (several or piece.group.has_values)

    def _check_memoryless(self, piece: Piece, losses: Tensor, sums: Tensor) -> None:
        """Compute a piece again, and refuse a loss whose values (n,), or sum of gradients, are not those of before."""
        with suppress(Regroup):  # if samples decide otherwise than before
            now, gradients = self._computed(piece, Decisions(piece.path, piece.wanted))
            sums_now = _summed(now, gradients)
            far = sums_now.shape != sums.shape or bool((sums_now - sums).norm() > 0.001 * sums.norm() + 1e-5)
            if not far and torch.allclose(now.to(losses), losses, 1e-4, equal_nan=True):
                return
        raise Refused(REMEMBERS)

    def _computed(self, piece: Piece, decisions: Decisions) -> tuple[Tensor, Gradients]:
        """Losses (n,) and gradients of a piece by one map, or of a sample without one."""
        self.partition.begin(piece)
        engine, group = self.engine, piece.group
        if piece.attempt:
            mode: SingleSample | Pass = SingleSample(self.trained, decisions, engine.module.parameters())
        else:
            budget, sharing, own = engine.memory_budget, engine._sharing, engine._own_factories
            mode = Pass(self.trained, len(group), decisions, memory_budget=budget, sharing=sharing, own_factories=own)
        with unchanged(engine.module), masks_traced():
            found = mode.computed(lambda some: one_number(self.loss(group.record(some, mode.met))), group.tensors)
        if piece.wanted is None:
            return found
        (losses, gradients), chosen = found, piece.wanted.to(found[0].device)
        return losses[chosen], {p: g.select(chosen) for p, g in gradients.items()}


def _summed(losses: Tensor, gradients: Gradients) -> Tensor:
    """The sum of the samples' gradients, as one vector; its first entry is 0."""
    ones = torch.ones_like(losses)
    return torch.cat([0 * ones[:1], *(g.weighted_sum(ones).flatten() for g in gradients.values())])


def one_number(value: Any) -> Tensor:
    """The loss, or weight, of one record as a scalar; Refused if it is not a tensor with one real number."""
    if not isinstance(value, Tensor):
        raise Refused(f"loss (or weights) must return a tensor of one number for a record, got {type(value).__name__}")
    if value.numel() != 1:
        raise Refused(f"loss must return one number for a record, got shape {tuple(value.shape)}: return its mean")
    if value.dtype.is_complex:
        raise Refused("loss must return a real number, got a complex one: return its absolute value")
    return value.reshape(())  # an operation that the pass intercepts, so that it refuses a tensor of another pass
