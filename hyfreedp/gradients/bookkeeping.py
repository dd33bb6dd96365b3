"""The gradient engine: per-sample gradients, clipped and summed (Alg. 1, line 4), in three ways.

1. *Operations of layers* whose input and output have a sample's rows together: input and output gradient give each
   sample's share of the norm, and the clipped sum is one product of both ("book-keeping", Bu et al. 2023; ghost norms,
   Li et al. 2022). One backward pass computes all, and weight gradients only where they are the smaller.
2. *Values made of parameters alone* (class tokens, positions, scales): where one meets an operand that needs a
   gradient, which depends on samples, it has a copy for each sample, whose gradients are carried back to parameters.
3. *Everything else* is computed one sample at a time, see :mod:`hyfreedp.gradients.one_by_one`: a batch in which a use
   could not be verified; and the rest of the run, once a parameter is found in the graph of the losses that was not
   followed, rows are not those of samples, or gradients disagree with autograd's.

What is taken for samples is compared with autograd and with batches of another size before anything rests on it, see
:mod:`hyfreedp.gradients.verify`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.data.batches import PerSampleLoss, batch_length
from hyfreedp.gradients import rules  # noqa: F401, which are found by their names
from hyfreedp.gradients.clipping import Clipping, bounded_factors
from hyfreedp.gradients.one_by_one import OneByOne
from hyfreedp.gradients.per_sample import PerSampleGradients, norms_of, settle, widened
from hyfreedp.gradients.recorder import Recorder, Seen
from hyfreedp.gradients.validate import check_modes
from hyfreedp.gradients.verify import verified_uses
from hyfreedp.noise import NoiseGenerator
from hyfreedp.running.random_states import beginning

_TRIALS = 3


class GradientEngine:
    """Turns the per-sample losses of a model into sum_i c_i g_i.

    The model is not wrapped or hooked: only while :meth:`add` computes losses its parameters are followed.

    Args:
        module: the model, in train mode, with its final choice of trainable parameters.
        clipping: turns per-sample norms into factors c_i.
        views: rows in dimension 0 that each sample has, one after the other, and whose gradients it adds up.

    Attributes:
        norms: of all samples since :meth:`clear`. *Not* private.
        sensitivity: the clipping's, as it was at :meth:`clear`: pieces of a batch and its noise have the same.
        signs: chooses samples, signs and perturbed weights of comparisons. Where it is known, records can be chosen
            whose errors cancel: the optimizer puts a secret one here at each step, of the run's own, so that a step
            made again draws the same.
        recorder: follows the parameters.
        together: whether the last batch was computed together, rather than one sample at a time.
        verified: uses of parameters that agreed with autograd.
    """

    def __init__(self, module: nn.Module, clipping: Clipping, views: int = 1) -> None:
        self.module, self.clipping, self.views = module, clipping, views
        self.norms: list[Tensor] = []
        self.signs = NoiseGenerator(0)
        self.recorder = Recorder(module, views)
        self.verified: set[Seen] = set()
        self._one_by_one = OneByOne(self)
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._told, self._unseen = False, 0
        self.sensitivity = clipping.sensitivity
        self.together = True

    @property
    def slow(self) -> str | None:
        """Why the rest of the run computes one sample at a time; None while it need not. Set where a run goes on."""
        return self.recorder.lost

    @slow.setter
    def slow(self, reason: str | None) -> None:
        self.recorder.lost, self._told = reason, reason is not None

    def add(
        self,
        loss: PerSampleLoss,
        batch: Any,
        weights: Tensor | None = None,
        *,
        alone: bool = False,
        key: bytes | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add sum_i w_i c_i g_i of a physical batch to the clipped sums.

        A parameter that the losses do not depend on gets zeros. A sample whose gradient is not finite contributes
        exactly zero.

        Args:
            loss: maps a batch, or samples of it, to losses of shape (B,), each of its own sample.
            batch: samples are dimension 0 of every tensor. May be empty.
            weights: w_i in [0, 1], shape (B,), on the losses' device; all 1 if None. They scale what is clipped
                already, so that the sensitivity stays that of the clipping.
            alone: one sample at a time, and nothing else.
            key: sets the random numbers of the pass, see :mod:`hyfreedp.running.random_states`; None leaves the
                caller's.

        Returns:
            The losses and the norms ||g_i|| over all trainable parameters together, both of shape (B,), the latter
            inf where not finite. They are *not* private.

        Raises:
            ValueError: losses depend on other samples or on no parameter, or a layer has come to mix samples.

        Warns:
            UserWarning: once, if this and later batches are computed one sample at a time.
        """
        check_modes(self.module)
        device = next(self.module.parameters()).device
        if batch_length(batch) == 0:
            none = torch.zeros(0, dtype=torch.float64, device=device)
            return none, none
        found, begin = None, beginning(key, device)
        begin()
        if not alone and self.slow is None:
            if not self.verified:
                self.verify(loss, batch, self.signs.child("first"))
            found = self._together(loss, batch, weights)
            if found is None:  # uses that no comparison has seen, as of a layer that is skipped at random
                self.verify(loss, batch, self.signs.child("again"))
                begin()
                found = self._together(loss, batch, weights)
                self._count_unseen()
        self.together = found is not None
        if found is None:
            if not alone:
                self._tell()
            begin()
            found = self._one_by_one.add(loss, batch, weights, chunks=not alone)
        self.norms.append(found[1])
        return found

    def losses(self, loss: PerSampleLoss, batch: Any, *, together: bool | None = None, alone: bool = False) -> Tensor:
        """Losses (B,) without gradients, computed as by :meth:`add`: together (as last, if None) or one at a time."""
        if together is None:
            together = self.together and self.slow is None and not alone
        with torch.no_grad():
            return loss(batch) if together else self._one_by_one.losses(loss, batch, chunks=not alone)

    def verify(self, loss: PerSampleLoss, batch: Any, generator: NoiseGenerator) -> bool:
        """Compare a few samples of a batch with autograd, see :mod:`hyfreedp.gradients.verify`.

        Returns:
            Whether something was compared, or need not be, since samples are computed one at a time.

        Raises:
            ValueError: losses depend on other samples, or on no parameter.
        """
        check_modes(self.module)
        if self.slow is not None:
            return True
        seen = verified_uses(self.recorder, self.clipping, loss, batch, generator)
        self.verified |= seen
        if seen:
            self.recorder.samples = {use.parameter for use in self.verified if use.how.startswith("input")}
        return bool(seen) or self.slow is not None

    def add_clipped(
        self, gradients: dict[nn.Parameter, PerSampleGradients], losses: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Add sum_i w_i c_i g_i to the sums: in float64, since over many pieces roundings would add up to clips.

        Takes the gradients out of their dictionary, so that each is freed once it is used; returns the norms.
        """
        with torch.autocast(losses.device.type, enabled=False):  # the caller's would round sums, not norms alone
            settle(gradients)
            norms = norms_of(gradients.values(), losses)
            factors, finite = bounded_factors(self.clipping, norms, self.sensitivity), norms.isfinite()
            factors = factors if weights is None else factors * weights.to(factors.dtype)
            whole = bool(finite.all())
            for p in list(gradients) if whole or bool(finite.any()) else ():
                g = gradients.pop(p)  # 0 * NaN is NaN: such samples are left out rather than multiplied by 0
                added = (g if whole else g.select(finite)).weighted_sum(factors if whole else factors[finite])
                self._sums[p] = self._sums[p].double().add_(added) if p in self._sums else widened(added).contiguous()
        return norms

    def clipped_sums(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """What :meth:`add` has added up for each parameter since :meth:`clear`, float32 or wider; zeros for none."""
        wide = {p: torch.promote_types(p.dtype, torch.float32) for p in parameters}
        return [self._sums[p].to(t) if p in self._sums else torch.zeros_like(p, dtype=t) for p, t in wide.items()]

    def clear(self) -> None:
        """Forget sums and norms, which are raw, and begin new ones."""
        self._sums.clear()
        self.norms.clear()
        self.sensitivity = self.clipping.sensitivity

    def _count_unseen(self) -> None:
        """Give up after a few batches in which a use of a parameter had no gradient by which to verify it."""
        unseen = sorted({use.parameter for use in self.recorder.dead & self.recorder.seen} if self.slow is None else ())
        self._unseen += bool(unseen)
        if self._unseen > _TRIALS:
            self.recorder.lose(f"no gradient of the first batches tells whose are the rows that meet {unseen[0]!r}")

    def _tell(self) -> None:
        if self.slow is not None and not self._told:
            self._told = True
            warnings.warn(
                f"gradients are computed one sample at a time from now on, which is exact and slow, since {self.slow}. "
                "A step takes as many small forward and backward passes as the batch has samples, or fewer where "
                "torch.func.vmap computes the model. If layers before it are frozen, let their output require a "
                "gradient (transformers: model.enable_input_require_grads()); if a siamese model is given its inputs "
                "one after the other in one batch, call it once for each of them. See docs/models.md",
                stacklevel=6,
            )

    def _together(self, loss: PerSampleLoss, batch: Any, weights: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Losses and norms of a batch whose clipped gradients were added; None if its pass cannot be relied on."""
        if self.slow is not None:
            return None
        recorder = self.recorder
        with recorder.following(batch_length(batch)):
            losses = loss(batch)
            gradients = recorder.per_sample_gradients(losses, verified=self.verified)
        if gradients is None:
            return None
        return losses.detach(), self.add_clipped(gradients, losses, weights)
