"""What every gradient engine does: one backward pass of per-sample losses, one clipped sum (Alg. 1, line 4)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from hyfreedp.checks import listed
from hyfreedp.clipping.functions import Clipping
from hyfreedp.clipping.per_sample import PerSampleGradients, widened
from hyfreedp.clipping.reference import weighted_gradients
from hyfreedp.clipping.validate import check_modes
from hyfreedp.noise import NoiseGenerator

# Relative difference from autograd's gradient that rounding explains, by the narrowest type in which layers compute.
# Measured on the ViT, GPT-2, LLaMA and BERT of the tests, both engines, at most: 8e-8 (LLaMA computes its norms in
# float32), 4e-7, 9e-4 and 6e-3. TF32, which float32 may mean on a GPU, rounds by 1e-3.
_ROUNDING = {torch.float64: 1e-5, torch.float32: 5e-3, torch.float16: 1e-2}  # else as bfloat16
_APART = 0.1  # over that: how far factors may be apart for an error in the smallest gradient to show beside the largest

_LARGE = torch.finfo(torch.float32).max  # an error beyond all, but finite


class Misread(ValueError):
    """An engine cannot tell the samples apart in a model, or has found that it did not.

    Attributes:
        parameters: at which.
        sizes: if the shape of a constant may have misled the engine, of how many samples a forward pass would show so.
    """

    def __init__(
        self, message: str, parameters: Iterable[nn.Parameter] = (), sizes: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(message)
        self.parameters, self.sizes = set(parameters), sizes

    def __reduce__(self) -> tuple[type[Misread], tuple[Any, ...]]:
        return type(self), self.args


class GradientEngine(ABC):
    """Attaches to a module and turns per-sample losses into sum_i c_i g_i.

    The module is hooked in place: it is not wrapped, its parameters and the keys of its state_dict stay the same. The
    samples are dimension 0 of every tensor, and each loss depends on its own sample only. Hooks keep activations only
    while gradients are enabled and the layer is in training mode, so forward passes under ``torch.no_grad`` or in eval
    mode store nothing. What they keep, non-reentrant activation checkpointing (``torch.utils.checkpoint``) drops and
    recomputes.

    The first batch of two samples or more, and whatever is given to :meth:`verify`, is checked against autograd: for
    random weights w of both signs, one per sample, the engine's sum_i w_i g_i must be the gradient of sum_i w_i L_i.
    Who reads a gradient from the wrong samples does not get there. Until every parameter's gradient has been large
    enough to tell, which it is not behind a gate that is zero, batches 2, 4, 8, ... are checked too. Samples that mix
    through values without gradient, or behind a weight that is zero, are not seen here but by :mod:`hyfreedp.mixing`.

    Args:
        module: the model.
        clipping: turns per-sample norms into factors c_i.
        views: rows in dimension 0 that each sample has, one after the other, and whose gradients it adds up.

    Attributes:
        unchecked: whether, since somebody set it to False, there was a pass of several samples that cannot be compared
            with autograd: one of their gradients, or a sum of them, was not finite.
        hidden: None, unless the last pass was compared with autograd, and one gradient was so much larger than another
            that an error in the latter would not have shown, or their sum overflowed: then factors at which it does
            show, for :meth:`verify`, shape (B,). Until that, the comparison does not count, and the next batch is
            compared as well.
        signs: generator of the random weights of the samples in a comparison with autograd. They are secret: where they
            are known, as those of the first generator are, records can be chosen whose errors cancel. The optimizer
            gives it a secret one at each step, of the run's own, so that a step made again draws the same.
        ended: whether another run has taken the model over, and this engine is detached.
        batches: how many of two samples or more it has taken gradients of.
        norms: as :meth:`backward` returned them, since all sums were None or :meth:`clear` was called. *Not* private.

    Raises:
        ValueError: something in ``module`` is trainable and this engine cannot handle it; all of it is named.
    """

    name: ClassVar[str]

    def __init__(self, module: nn.Module, clipping: Clipping, views: int = 1) -> None:
        problems = self.unsupported(module)
        if problems:
            raise ValueError(f"engine {self.name!r} cannot train this module: " + listed(problems))
        self.module = module
        self.clipping = clipping
        self.views = views
        self._checked_samples, self.batches = 0, 0
        self.unchecked = False
        self.hidden: Tensor | None = None
        self.norms: list[Tensor] = []
        self._unseen = {p for p in module.parameters() if p.requires_grad}  # whose gradients were too small for a check
        self.signs = NoiseGenerator(0)
        self.ended = False
        self._types: set[torch.dtype] = set()
        self._wide_sums: dict[nn.Parameter, Tensor] = {}

    def telling_size(self, above: int) -> int | None:
        """Of how many samples a pass would show whether shapes have misled those so far; None if they cannot have.

        Args:
            above: more than this: samples in doubt and copies of some meet the same branches and lengths again.
        """
        return None

    def expect(self, batch: Any) -> None:
        """Say that what comes next is a pass of this batch, whose own tensors hold samples for sure; () ends that."""
        return None

    def telling(self) -> AbstractContextManager[None]:
        """Around a forward pass of such a size."""
        return nullcontext()

    def was_misled(self) -> bool:
        """Whether a pass since the last call has shown that shapes misled one before it."""
        return False

    @property
    def narrowest_type(self) -> torch.dtype:
        """The shortest type of the last backward pass's gradients and of what the model holds."""
        held = {t.dtype for t in (*self.module.parameters(), *self.module.buffers()) if t.is_floating_point()}
        return min(self._types | held, key=lambda dtype: torch.finfo(dtype).bits)

    def check_modes(self) -> None:
        """Refuse layers that have come to mix samples or keep statistics, or rounded products; see ``check_module``.

        :meth:`backward` asks; who can ask before the forward pass keeps such a layer from seeing the batch.

        Raises:
            ValueError: naming the layers, or the setting.
            RuntimeError: another run has taken the model over.
        """
        if self.ended:
            raise RuntimeError(
                "the model was made private once more, for another run: go on with the optimizer that the last "
                "make_private_with_epsilon returned, or make a model for each run"
            )
        check_modes(self.module)

    def clipped_sums(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """What :meth:`backward` has added up for each parameter, float32 or wider: ``p.grad``, or its stand-in.

        Raises:
            ValueError: nothing was, because a parameter was frozen meanwhile.
        """
        if any(p.grad is None and p not in self._wide_sums for p in parameters):
            raise ValueError(
                "a parameter was frozen since training began: choose what to train before, and wire it anew"
            )
        return [self._wide_sums[p] if p in self._wide_sums else cast(Tensor, p.grad) for p in parameters]

    def clear(self) -> None:
        """Forget norms, and sums of parameters in half precision, as ``zero_grad`` does the gradients of others."""
        self._wide_sums.clear()
        self.norms.clear()

    @classmethod
    @abstractmethod
    def unsupported(cls, module: nn.Module) -> list[str]:
        """One sentence per trainable thing in ``module`` that this engine cannot handle; empty if it covers all."""

    @abstractmethod
    def detach(self) -> None:
        """Remove all hooks and whatever they stored."""

    @abstractmethod
    def _again(self, size: int) -> AbstractContextManager[None]:
        """Around a backward pass of ``size`` samples: checkpointing calls layers again in it, but not the module."""

    @abstractmethod
    def _per_sample_gradients(
        self, losses: Tensor, trainable: dict[nn.Parameter, str]
    ) -> dict[nn.Parameter, PerSampleGradients]:
        """One backward pass of ``losses`` (B,); every parameter in ``trainable`` (with its name) that was used."""

    def backward(self, losses: Tensor, sample_weights: Tensor | None = None) -> Tensor:
        """Add sum_i w_i c_i g_i of one physical batch to ``p.grad`` of every trainable parameter.

        Call it once per physical batch; the sums of several batches add up as with ``loss.backward()``. A parameter
        that this forward pass did not use gets zeros. A sample whose gradient is not finite contributes exactly zero.
        A parameter in half precision cannot hold such a sum: its ``grad`` stays as it is, and :meth:`clipped_sums`
        gives the sum in float32, until :meth:`clear`.

        Args:
            losses: per-sample losses, shape (B,), with their autograd graph, which is freed. B may be 0.
            sample_weights: w_i in [0, 1], shape (B,), on the losses' device; all 1 if None. They scale what is clipped
                already, so that the sensitivity stays that of the clipping.

        Returns:
            The norms ||g_i|| over all trainable parameters together, shape (B,), float32 or wider, inf where not
            finite. They are *not* private.

        Raises:
            ValueError: ``losses`` is not one-dimensional or has no graph, the model uses reentrant checkpointing, a
                normalisation layer has changed its mode, or the model turned out to use a parameter in a way that hides
                the samples from the engine (the parameter is named). ``p.grad`` is then untouched.
        """
        self.check_modes()
        self.hidden = None
        if all(self._sum_of(p) is None for p in self._trainable()):
            self.norms.clear()
        if losses.dim() != 1:
            raise ValueError(
                f"losses has shape {tuple(losses.shape)}: it must be (B,), one loss per sample. "
                'Use reduction="none" and average over everything but the samples'
            )
        if len(losses) == 0:
            for p in self._trainable():
                self._add(p, None)
            return losses.new_empty(0, dtype=torch.promote_types(losses.dtype, torch.float32))
        return self._run(losses, add=True, sample_weights=sample_weights)

    def verify(self, losses: Tensor, factors: Tensor | None = None) -> Tensor:
        """Check the gradients of some samples against autograd; nothing is added to any sum.

        Args:
            losses: as in :meth:`backward`, of at least one sample.
            factors: :attr:`hidden`, shape (B,), by which each gradient is multiplied before, as in what is released.

        Returns:
            The norms, as in :meth:`backward`. If one is inf, nothing was compared.

        Raises:
            ValueError: as in :meth:`backward`.
        """
        self.hidden = None
        return self._run(losses, add=False, factors=factors)

    def _trainable(self) -> dict[nn.Parameter, str]:
        return {p: name for name, p in self.module.named_parameters() if p.requires_grad}

    def _run(
        self, losses: Tensor, *, add: bool, factors: Tensor | None = None, sample_weights: Tensor | None = None
    ) -> Tensor:
        if not losses.requires_grad:
            raise ValueError("losses depend on no trainable parameter: was the forward pass run under no_grad?")
        # Inside an autocast region the engine's own products would be rounded to half precision.
        autocast = torch.autocast(losses.device.type, enabled=False)
        with torch.no_grad(), autocast, self._again(len(losses) * self.views):
            return self._backward(losses, self._trainable(), add, factors, sample_weights)

    def _backward(
        self,
        losses: Tensor,
        trainable: dict[nn.Parameter, str],
        add: bool,
        factors: Tensor | None,
        sample_weights: Tensor | None,
    ) -> Tensor:
        # A batch of one cannot show that samples mix, so the first larger one is checked as well.
        samples = min(len(losses), 2)
        weights, reference = None, None
        self.batches += add and samples > 1
        again = add and samples > 1 and bool(self._unseen) and self.batches.bit_count() == 1
        if not add or again or self._checked_samples < samples:
            weights = _weights(losses, self.signs)
            if factors is not None:  # to powers of two, with which rounding commutes: small gradients may be rounding
                weights = (weights.sign() * (weights * factors).abs().log2().floor().exp2()).to(losses.dtype)
            reference = weighted_gradients(losses, weights, trainable)
        self._types.clear()
        gradients = self._per_sample_gradients(losses, trainable)
        if not gradients:
            raise ValueError("losses depend on no trainable parameter of this engine's module")
        zeros = torch.zeros_like(losses, dtype=torch.promote_types(losses.dtype, torch.float32))
        squared = sum((g.squared_norms for g in gradients.values()), start=zeros)
        # Rounding may leave a tiny negative square; an overflow or NaN makes the norm inf and the factor 0.
        norms = squared.clamp(min=0).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)
        finite = norms.isfinite()
        whole = bool(finite.all())
        released = self.clipping.factors(norms)
        if not whole:  # 0 * NaN is NaN, so such samples are left out rather than multiplied by 0
            self.unchecked |= add and samples > 1
            gradients = {p: g.select(finite) for p, g in gradients.items()} if finite.any() else {}
        elif weights is not None and reference is not None:
            rounding = _ROUNDING.get(self.narrowest_type, 5e-2)
            seen = _check(gradients, weights, reference, trainable, rounding)
            apart = seen is None or bool(released.amax() > _APART / rounding * released.amin())
            if apart and factors is None and samples > 1:
                self.hidden = _as_released(released, norms)
            if seen is None:
                self.unchecked |= self.hidden is None and samples > 1
            elif self.hidden is None:
                if samples > 1:
                    self._unseen -= seen
                self._checked_samples = max(self._checked_samples, samples)
        if not add:
            return norms
        if sample_weights is not None:
            released = released * sample_weights.to(released.dtype)
        if not whole:
            released = released[finite]
        for p in trainable:
            # Popped, so that each is freed once it is used.
            self._add(p, gradients.pop(p).weighted_sum(released) if p in gradients else None)
        self.norms.append(norms)
        return norms

    def _sum_of(self, p: nn.Parameter) -> Tensor | None:
        return p.grad if p.dtype == torch.promote_types(p.dtype, torch.float32) else self._wide_sums.get(p)

    def _add(self, p: nn.Parameter, addend: Tensor | None) -> None:
        """Add to the sum of ``p``; an addend of None stands for zeros."""
        wide = torch.promote_types(p.dtype, torch.float32)
        held = self._sum_of(p)
        if held is not None:
            if addend is not None:
                held.add_(addend)
            return
        new = torch.zeros_like(p, dtype=wide) if addend is None else addend.to(wide).contiguous()
        if wide == p.dtype:
            p.grad = new
        else:
            self._wide_sums[p] = new


def _weights(losses: Tensor, generator: NoiseGenerator) -> Tensor:
    """Weights (B,) of random sign and of sizes from 1/2 to 3/2."""
    uniform = generator.uniform(2, len(losses)).to(losses.device, torch.promote_types(losses.dtype, torch.float32))
    return (uniform[0] + 0.5) * torch.where(uniform[1] < 0.5, -1.0, 1.0)


def _as_released(factors: Tensor, norms: Tensor) -> Tensor | None:
    """Factors (B,) so scaled that neither they nor gradients of these norms (B,) exceed one; None if all are zero."""
    largest = torch.maximum(factors, factors * norms).amax()
    return factors / largest if bool(largest > 0) else None


def _norm(g: Tensor) -> Tensor:
    return torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))


def _check(
    gradients: dict[nn.Parameter, PerSampleGradients],
    weights: Tensor,
    reference: dict[nn.Parameter, Tensor | None],
    trainable: dict[nn.Parameter, str],
    rounding: float,
) -> set[nn.Parameter] | None:
    """The parameters whose gradients would show if they were the neighbours' of each; None if a sum overflowed."""
    sizes, errors, others = [], [], []
    for p in trainable:
        expected, g = reference[p], gradients.get(p)
        expected = widened(torch.zeros_like(p) if expected is None else expected)
        found = torch.zeros_like(expected) if g is None else g.weighted_sum(weights)
        sizes.append(_norm(expected))
        if g is not None:  # where a sum cancels by chance, as of records that are all alike, its rounding does not
            sizes[-1] = sizes[-1].maximum(_norm(weights * g.squared_norms.clamp(min=0).sqrt()).to(expected.device))
        errors.append(_norm(found - expected) if found.shape == p.shape else torch.full_like(sizes[-1], _LARGE))
        others.append(torch.zeros_like(sizes[-1]) if g is None else _norm(g.weighted_sum(weights.roll(1)) - found))
    # Read at once: each reading waits for the device.
    numbers = [n.to(sizes[0].device, torch.float64) for n in (*sizes, *errors, *others)]
    rows = torch.stack(numbers).view(3, -1).tolist()
    total = math.hypot(*rows[0])
    if not math.isfinite(total + sum(rows[1]) + sum(rows[2])):
        return None
    wrong, seen = {}, set()
    for (p, name), size, error, other in zip(trainable.items(), *rows, strict=True):
        # A misread gradient is wrong by order one. The total is there for gradients that vanish but for rounding, such
        # as those of a key projection's bias in attention.
        allowed = rounding * (size + 0.1 * total)
        if error > allowed:
            wrong[p] = name
        if other > allowed:
            seen.add(p)
    if wrong:
        raise Misread(
            "per-sample gradients of these parameters disagree with autograd: "
            + listed([repr(name) for name in wrong.values()])
            + ". Either the model mixes samples (dimension 0 of every tensor must be the samples, and each loss must "
            "depend on its own sample only) or it uses these parameters outside their layer's forward pass",
            wrong,
        )
    return seen


def not_a_view(output: Tensor) -> Tensor:
    """A layer's output, to be followed through the graph even if it is changed in place afterwards.

    Some layers return a view, as transformers' Conv1D and, in PyTorch 2.6, Linear do. An operation in place on a view
    takes its node out of the graph, and what was recorded there with it.
    """
    return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output


def hidden_use(parameter: str, module: nn.Module) -> ValueError:
    """The refusal of a parameter of ``module`` whose use left no trace that an engine could follow."""
    if not module.get_submodule(parameter.rpartition(".")[0]).training:
        return ValueError(
            f"parameter {parameter!r} is used while its layer is in eval mode: call the layer's train(), or freeze "
            "the parameter"
        )
    return ValueError(
        f"parameter {parameter!r} is used outside the model's forward pass, or was frozen when the run was made "
        "private. If the loss has a penalty on weights, leave it out and give the optimizer weight_decay=, which reads "
        "no records. Else call the layer as a module, or freeze the parameter"
    )


def foreign_function(parameter: str, function: str) -> ValueError:
    """The refusal of a parameter that is an argument of somebody's ``torch.autograd.Function``."""
    return ValueError(
        f"parameter {parameter!r} goes into {function}, an autograd function of the model's own, whose gradient does "
        "not tell the samples apart: compute the same by torch's operations, freeze the parameter, or take another "
        "adapter instead of PEFT's LoHa, such as LoKr or LoRA"
    )


def wrong_samples(name: str, layer: nn.Module, seen: int, losses: int, views: int = 1) -> ValueError:
    """The refusal of a layer whose input does not have the samples in dimension 0."""
    rows = "the samples" if views == 1 else f"the {views} views of each sample, one after the other"
    return ValueError(
        f"layer {name!r} ({type(layer).__name__}) saw {seen} samples, but there are {losses} losses: dimension 0 of "
        f"its input must be {rows}, which it is not where a model computes with the tokens first, as Longformer does; "
        "change the order of dimensions there (batch_first=True), or freeze the layer"
    )
