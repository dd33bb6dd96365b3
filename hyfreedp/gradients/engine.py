"""The gradient engine: per-sample gradients, clipped and summed (Alg. 1, line 4).

The loss is mapped over the samples of a batch, so that none sees another (see :mod:`hyfreedp.gradients.mapped`):
pieces of one form, as large as memory allows, and smaller ones where samples differ in a decision of Python. What
functorch cannot map is computed one sample at a time, by plain autograd.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.data.batches import Group, Loss, PhysicalBatchSize, groups_of, pieces
from hyfreedp.errors import Refused
from hyfreedp.gradients import rules  # noqa: F401, which are found where functions of torch are met
from hyfreedp.gradients.clipping import Clipping, bounded_factors
from hyfreedp.gradients.guard import ModelGuard
from hyfreedp.gradients.mapped import (
    NO_GRADIENT,
    DecisionsChanged,
    DecisionsDiffer,
    Gradients,
    Pass,
    Path,
    SingleSample,
    TooLarge,
    bits,
    explained,
)
from hyfreedp.gradients.per_sample import MEMORY_BUDGET, Instantiated, norms_of, settle, widened
from hyfreedp.gradients.validate import check_modes
from hyfreedp.noise.random_states import random_states, set_random_states
from hyfreedp.pytorch.layers import parameters_of


@dataclass(frozen=True, eq=False)
class Piece:
    """Samples that are mapped together.

    Attributes:
        group: the samples.
        path: answers to Python's first decisions that they have in common.
        origin: the piece in which they were found to differ from others, and their places in it.
        wanted: the places of those that count, in a piece that is computed again with the same random numbers.
        name: of these numbers; None for the piece's own.
    """

    group: Group
    path: Path = ()
    origin: Any = None  # tuple[Piece, Tensor] | None
    wanted: Tensor | None = None
    name: tuple[int, int] | None = None

    @property
    def rows(self) -> Tensor:
        """Of the samples that count, the positions in the batch."""
        return self.group.rows if self.wanted is None else self.group.rows[self.wanted]

    @property
    def stream(self) -> tuple[int, int]:
        """The name of its random numbers: its first sample, and how many decisions were made before."""
        return self.name or (int(self.group.rows[0]), len(self.path))

    def split(self, apart: DecisionsDiffer) -> list[Piece]:
        """Its samples by their answers, each part with its own at the end of its path."""
        answers, inverse = bits(apart.answers).unique(dim=0, return_inverse=True)
        parts = [(inverse == k).nonzero()[:, 0].cpu() for k in range(len(answers))]
        found = []
        for places in reversed(parts):
            path = (*apart.path, apart.answers[places[0]])
            if self.wanted is None:
                found.append(Piece(self.group.take(places), path, origin=(self, places)))
            else:
                found.append(replace(self, path=path, wanted=self.wanted[places]))
        return found

    def again(self) -> Piece:
        """With the random numbers by which its samples answered as they did, beside those from which they parted.

        With others they contradict themselves. So a sample's numbers are those that its answers came from, whoever is
        in the batch.
        """
        if self.origin is None:
            raise Refused(
                "a decision of Python depends on random numbers, among samples that are too many for the memory: set "
                "max_physical_batch_size"
            )
        before, places = self.origin
        return Piece(before.group, self.path, wanted=places, name=before.stream)


@dataclass
class Plan:
    """How the samples of a batch go through the model.

    Attributes:
        pieces: together all samples, each once. Finer once a pass has found where they differ.
    """

    pieces: list[Piece]

    @classmethod
    def of(cls, batch: Any, size: PhysicalBatchSize = None) -> Plan:
        """Of a batch, in pieces of at most ``size`` samples."""
        return cls([Piece(group) for group in pieces(groups_of(batch), size)])

    def in_order(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """Values of the pieces' samples, in their order, as those of the batch, shape ``(B,)``."""
        if not parts:
            return torch.zeros(0, dtype=torch.float64, device=device)
        rows = torch.cat([piece.rows for piece in self.pieces])
        return torch.cat(list(parts))[rows.argsort().to(device, non_blocking=True)]


# Sets the random numbers of a piece, with 0, or of a sample that is computed alone, for its attempts 1, 2, ...
Begin = Callable[[Piece, int], None]
_ATTEMPTS = 50


class GradientEngine:
    """Turns the losses of samples into sum_i c_i g_i.

    The model is not wrapped or hooked.

    Args:
        module: the model, in train mode, with its final choice of trainable parameters.
        clipping: turns a norm into a factor c_i.

    Attributes:
        sensitivity: the clipping's, as it was at :meth:`clear`: pieces of a batch and its noise have the same.
        memory_budget: bytes that gradients, or copies of parameters, of samples mapped together may take.
        fallback_reason: why samples were last computed one at a time; None if they never were.
        looped: samples of the last batch that were.
        told: whether Python was told something of its samples, by a decision.
        guard: refuses losses that write into the model.
    """

    def __init__(self, module: nn.Module, clipping: Clipping, memory_budget: int = MEMORY_BUDGET) -> None:
        self.module, self.clipping = module, clipping
        self.sensitivity = clipping.sensitivity
        self.memory_budget = memory_budget
        self.fallback_reason: str | None = None
        self.looped: list[Piece] = []
        self.told = False
        self.guard = ModelGuard(module)
        self._own_factories = False
        self._path: Path = ()  # of the last map, as far as it came
        self._sums: dict[nn.Parameter, Tensor] = {}

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def add(
        self, loss: Loss, batch: Any, weights: Tensor | None = None, *, begin: Begin | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add sum_i w_i c_i g_i to the clipped sums.

        A parameter that the losses do not depend on gets zeros. A sample whose gradient is not finite contributes
        exactly zero.

        Args:
            loss: maps one record, as a batch of it alone, to one number.
            batch: or a plan of it, whose pieces are then those that were computed.
            weights: w_i in [0, 1], shape (B,); all 1 if None. They scale what is clipped already, so that the
                sensitivity stays that of the clipping.
            begin: sets the random numbers of each piece; called again where it is computed anew. None begins each
                where they are now.

        Returns:
            The losses and the norms ||g_i|| over all trainable parameters together, both of shape (B,), the latter
            inf where not finite. They are *not* private.

        Raises:
            ValueError: what a loss gives or does is refused; or a layer has come to mix samples.

        Warns:
            UserWarning: once, if samples are computed one at a time.
        """
        check_modes(self.module)
        plan = batch if isinstance(batch, Plan) else Plan.of(batch)
        losses, norms = [], []
        for rows, values, gradients in self._each(loss, plan, begin, self._trained()):
            its = None if weights is None else weights[rows.to(weights.device, non_blocking=True)]
            losses.append(values.detach())
            norms.append(self._add_clipped(gradients, values, its))
        return plan.in_order(losses, self.device), plan.in_order(norms, self.device)

    @torch.no_grad()
    def losses(self, loss: Loss, batch: Any, *, begin: Begin | None = None) -> Tensor:
        """Losses (B,) at the present weights, without gradients; arguments as of :meth:`add`."""
        plan = batch if isinstance(batch, Plan) else Plan.of(batch)
        return plan.in_order([values for _, values, _ in self._each(loss, plan, begin)], self.device)

    def forgets(self, loss: Loss, plan: Plan, losses: Tensor, begin: Begin) -> bool:
        """Whether samples have the losses (B,) of :meth:`add` again, after others: whether nothing of these was kept.

        What Python was told of a sample, by a decision or where samples are computed alone, it could keep for the next.
        No construction prevents that; this notices it, in one sample that was computed alone, or in one piece.
        """
        piece = min(self.looped or plan.pieces, key=lambda piece: len(piece.rows))
        if self.looped:
            again, _ = self._alone(loss, piece, begin)
        else:  # by parameters that are trained, for the same roundings
            begin(piece, 0)
            again, _ = self._mapped(loss, piece, self._trained(), backward=False)
        return torch.allclose(again.to(losses), losses[piece.rows.to(losses.device)], rtol=1e-4, equal_nan=True)

    def clipped_sums(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """What :meth:`add` has added up for each parameter since :meth:`clear`, float32 or wider; zeros for none."""
        wide = {p: torch.promote_types(p.dtype, torch.float32) for p in parameters}
        return [self._sums[p].to(t) if p in self._sums else torch.zeros_like(p, dtype=t) for p, t in wide.items()]

    def clear(self) -> None:
        """Forget the sums, which are raw, and begin new ones; and the samples that were computed alone."""
        self._sums.clear()
        self.looped, self.told = [], False
        self.sensitivity = self.clipping.sensitivity

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _each(
        self, loss: Loss, plan: Plan, begin: Begin | None, trained: Sequence[nn.Parameter] = ()
    ) -> Iterator[tuple[Tensor, Tensor, Gradients]]:
        """Of each piece the samples' places in the batch, losses (n,) and gradients, of which there may be none.

        Pieces are made smaller where they must be; these become the plan's.
        """
        todo, settled = plan.pieces[::-1], list[Piece]()
        if begin is None:
            now = random_states(self.device)
            begin = lambda piece, alone: set_random_states(self.device, now)  # noqa: E731
        self.looped, self.told = [], False
        while todo:
            piece, found = todo.pop(), None
            begin(piece, 0)
            try:
                found = self._mapped(loss, piece, trained)
            except DecisionsDiffer as apart:
                todo += piece.split(apart)
                continue
            except DecisionsChanged:
                todo.append(piece.again())
                continue
            except TooLarge as large:
                rows = (torch.arange(len(piece.group)) if piece.wanted is None else piece.wanted).split(large.size)
                todo += [Piece(piece.group.take(some), piece.path) for some in reversed(rows)]
                continue
            except (Refused, torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                if not self._own_factories and _writes_into_fresh(error):
                    self._own_factories = True
                    todo.append(piece)
                    continue
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            settled.append(piece)
            if found is not None:
                yield piece.rows, *found
                continue
            with self.guard.unchanged(by_value=True):
                for i in range(len(piece.group)) if piece.wanted is None else piece.wanted.tolist():
                    one = Piece(piece.group.take(slice(i, i + 1)), self._path)
                    yield one.rows, *self._alone(loss, one, begin, trained)  # raises the same, if the loss is wrong
                    self.looped.append(one)
            self._tell(reason)
        plan.pieces = settled

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in parameters_of(self.module) if p.requires_grad]

    def _mapped(
        self, loss: Loss, piece: Piece, trained: Sequence[nn.Parameter], *, backward: bool = True
    ) -> tuple[Tensor, Gradients]:
        """Losses (n,) and gradients of a piece by one map."""
        group, wanted = piece.group, piece.wanted
        how: Any = {
            "path": piece.path,
            "wanted": wanted,
            "memory_budget": self.memory_budget,
            "own_factories": self._own_factories,
        }
        one_pass = Pass(trained, len(group), **how)
        try:
            with self.guard.unchanged():
                losses = one_pass.losses(lambda tensors: one_number(loss(group.record(tensors))), group.tensors)
                gradients = one_pass.gradients(losses) if trained and backward else {}
        finally:
            self._path = one_pass.path
            self.told = self.told or bool(one_pass.path)
        if wanted is None:
            return losses, gradients
        chosen = torch.zeros(len(group), dtype=torch.bool).index_fill(0, wanted, True).to(losses.device)
        return losses[chosen], {p: g.select(chosen) for p, g in gradients.items()}

    def _alone(
        self, loss: Loss, piece: Piece, begin: Begin, trained: Sequence[nn.Parameter] = ()
    ) -> tuple[Tensor, Gradients]:
        """The loss (1,) and gradients of a piece of one sample, by plain autograd."""
        for attempt in range(1, _ATTEMPTS + 1):  # until its decisions are those by which it was put into a group
            begin(piece, attempt)  # the coins of NumPy and Python are the same for all, whatever their place
            try:
                with self.guard.unchanged(), SingleSample(piece.path if attempt < _ATTEMPTS else ()) as mode:
                    tensors = [mode.mark(t[0].clone()) for t in piece.group.tensors]  # which a loss may write to
                    value = one_number(loss(piece.group.record(tensors)))[None]
                break
            except DecisionsChanged:
                pass
        if not trained:
            return value.detach(), {}
        with self.guard.unchanged(), explained():
            found = torch.autograd.grad(value, trained, allow_unused=True) if value.requires_grad else ()
        if all(g is None for g in found):
            raise Refused(NO_GRADIENT)
        return value, {p: Instantiated(g[None]) for p, g in zip(trained, found, strict=True) if g is not None}

    def _add_clipped(self, gradients: Gradients, losses: Tensor, weights: Tensor | None) -> Tensor:
        """Add sum_i w_i c_i g_i to the sums: in float64, since over many pieces roundings would add up to clips.

        Takes the gradients out of their dictionary, so that each is freed once it is used; returns the norms.
        """
        with torch.autocast(losses.device.type, enabled=False):  # the caller's would round sums, not norms alone
            settle(gradients)
            norms = norms_of(gradients.values(), losses)
            factors, finite = bounded_factors(self.clipping, norms, self.sensitivity), norms.isfinite()
            factors = factors if weights is None else factors * weights.to(factors)
            whole = bool(finite.all())
            for p in list(gradients) if whole or bool(finite.any()) else ():
                g = gradients.pop(p)  # 0 * NaN is NaN: such samples are left out rather than multiplied by 0
                its, kept = (g, factors) if whole else (g.select(finite), factors[finite])
                added = its.weighted_sum(kept).view_as(p)
                self._sums[p] = self._sums[p].double().add_(added) if p in self._sums else widened(added).contiguous()
        return norms

    def _tell(self, reason: str) -> None:
        if self.fallback_reason is None:
            warnings.warn(
                f"samples are computed one at a time, which is exact and slow, since the loss does what cannot be "
                f"mapped over them: {reason}. See docs/models.md",
                stacklevel=7,
            )
        self.fallback_reason = reason


def one_number(value: Any) -> Tensor:
    """The loss, or weight, of one record as a scalar.

    Raises:
        Refused: it is no tensor, or not one real number.
    """
    if not isinstance(value, Tensor):
        raise Refused(f"loss (or weights) must return a tensor of one number for a record, got {type(value).__name__}")
    if value.numel() != 1:
        raise Refused(
            f"loss must return one number for a record, got shape {tuple(value.shape)}: return its mean, as a "
            "criterion with its default reduction does"
        )
    if value.is_complex():
        raise Refused("loss must return a real number, got a complex one: return its absolute value")
    return value.reshape(())


def _writes_into_fresh(error: Exception) -> bool:
    """Whether a sample's value was written into a tensor that the loss had made of nothing."""
    text = str(error)
    if "doesn't match the broadcast shape" in text or "more elements than `self`" in text:
        return True
    return "inplace randomness on an unbatched" in str(error)
