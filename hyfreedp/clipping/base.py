"""What every gradient engine does: one backward pass of per-sample losses, one clipped sum (Alg. 1, line 4)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from hyfreedp.clipping.factors import Clipping
from hyfreedp.clipping.persample import PerSampleGradients
from hyfreedp.clipping.positions import PositionExpander


class GradientEngine(ABC):
    """Attaches to a module and turns per-sample losses into sum_i c_i g_i.

    The module is hooked in place: it is not wrapped, its parameters and the keys of its state_dict stay the same. The
    samples are dimension 0 of every tensor, and each loss depends on its own sample only. Hooks keep activations only
    while gradients are enabled and the layer is in training mode, so forward passes under ``torch.no_grad`` or in eval
    mode store nothing. What they keep, non-reentrant activation checkpointing (``torch.utils.checkpoint``) drops and
    recomputes.

    The first batch of two samples or more is checked against autograd: for weights w that differ from sample to sample,
    the engine's sum_i w_i g_i must be the gradient of sum_i w_i L_i. A model that mixes samples, or uses a parameter in
    a way the engine misreads, cannot pass.

    Args:
        module: the model.
        clipping: turns per-sample norms into factors c_i.

    Raises:
        ValueError: something in ``module`` is trainable and this engine cannot handle it; all of it is named.
    """

    name: ClassVar[str]
    _expander: PositionExpander

    def __init__(self, module: nn.Module, clipping: Clipping) -> None:
        problems = self.unsupported(module)
        if problems:
            raise ValueError(f"engine {self.name!r} cannot train this module: " + "; ".join(problems))
        self.module = module
        self.clipping = clipping
        self._checked_samples = 0

    @classmethod
    @abstractmethod
    def unsupported(cls, module: nn.Module) -> list[str]:
        """One sentence per trainable thing in ``module`` that this engine cannot handle; empty if it covers all."""

    @abstractmethod
    def detach(self) -> None:
        """Remove all hooks and whatever they stored."""

    @abstractmethod
    def _per_sample_gradients(
        self, losses: Tensor, trainable: dict[nn.Parameter, str]
    ) -> dict[nn.Parameter, PerSampleGradients]:
        """One backward pass of ``losses`` (B,); every parameter in ``trainable`` (with its name) that was used."""

    def backward(self, losses: Tensor) -> Tensor:
        """Add sum_i c_i g_i of one physical batch to ``p.grad`` of every trainable parameter.

        Call it once per physical batch; the sums of several batches add up as with ``loss.backward()``. A parameter
        that this forward pass did not use gets zeros. A sample whose gradient is not finite contributes exactly zero.

        Args:
            losses: per-sample losses, shape (B,), with their autograd graph, which is freed. B may be 0.

        Returns:
            The norms ||g_i|| over all trainable parameters together, shape (B,), float32 or wider, inf where not
            finite. They are *not* private.

        Raises:
            ValueError: ``losses`` is not one-dimensional or has no graph, the model uses reentrant checkpointing, or it
                turned out to use a parameter in a way that hides the samples from the engine (the parameter is named).
                ``p.grad`` is then untouched.
        """
        if losses.dim() != 1:
            raise ValueError(
                f"losses has shape {tuple(losses.shape)}: it must be (B,), one loss per sample. "
                'Use reduction="none" and average over everything but the samples'
            )
        trainable = {p: name for name, p in self.module.named_parameters() if p.requires_grad}
        if len(losses) == 0:
            for p in trainable:
                _add_to_grad(p, None)
            return losses.new_empty(0, dtype=torch.promote_types(losses.dtype, torch.float32))
        if not losses.requires_grad:
            raise ValueError("losses depend on no trainable parameter: was the forward pass run under no_grad?")
        # Inside an autocast region the engine's own products would be rounded to half precision.
        autocast = torch.autocast(losses.device.type, enabled=False)
        with torch.no_grad(), autocast, self._expander.batch_of(len(losses)):
            return self._backward(losses, trainable)

    def _backward(self, losses: Tensor, trainable: dict[nn.Parameter, str]) -> Tensor:
        # A batch of one cannot show that samples mix, so the first larger one is checked as well.
        samples = min(len(losses), 2)
        reference = _reference(losses, trainable) if self._checked_samples < samples else None
        gradients = self._per_sample_gradients(losses, trainable)
        if not gradients:
            raise ValueError("losses depend on no trainable parameter of this engine's module")
        zeros = torch.zeros_like(losses, dtype=torch.promote_types(losses.dtype, torch.float32))
        squared = sum((g.squared_norms for g in gradients.values()), start=zeros)
        # Rounding may leave a tiny negative square; an overflow or NaN makes the norm inf and the factor 0.
        norms = squared.clamp(min=0).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)
        finite = norms.isfinite()
        if not finite.any():
            gradients = {}
        elif not finite.all():  # 0 * NaN is NaN, so such samples are left out rather than multiplied by 0
            gradients = {p: g.select(finite) for p, g in gradients.items()}
        elif reference is not None:
            _check(gradients, reference, trainable)
            self._checked_samples = samples
        factors = self.clipping.factors(norms)[finite]
        for p in trainable:
            # Popped, so that each is freed once it is used.
            _add_to_grad(p, gradients.pop(p).weighted_sum(factors) if p in gradients else None)
        return norms


def _weights(losses: Tensor) -> Tensor:
    """Fixed positive weights (B,) that differ from sample to sample; torch's global generator is left alone."""
    generator = torch.Generator().manual_seed(0)
    return (0.5 + torch.rand(len(losses), generator=generator)).to(losses)


def _norm(g: Tensor) -> Tensor:
    return torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))


def _reference(losses: Tensor, trainable: dict[nn.Parameter, str]) -> dict[nn.Parameter, Tensor | None]:
    """Autograd's gradient of sum_i w_i L_i."""
    try:
        gradients = torch.autograd.grad(losses, list(trainable), _weights(losses), retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower() or ".grad()" not in str(error):
            raise
        raise ValueError(
            "the model uses reentrant checkpointing, in whose backward pass no per-sample gradients can be taken: pass "
            "use_reentrant=False to torch.utils.checkpoint, or to transformers' gradient_checkpointing_enable "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        ) from error
    return dict(zip(trainable, gradients, strict=True))


def _check(
    gradients: dict[nn.Parameter, PerSampleGradients],
    reference: dict[nn.Parameter, Tensor | None],
    trainable: dict[nn.Parameter, str],
) -> None:
    total = sum(float(_norm(g)) ** 2 for g in reference.values() if g is not None) ** 0.5
    wrong = []
    for p, name in trainable.items():
        expected, g = reference[p], gradients.get(p)
        found = torch.zeros_like(p) if g is None else g.weighted_sum(_weights(g.squared_norms))
        expected = torch.zeros_like(p) if expected is None else expected
        # A misread gradient is wrong by order one; TF32 and half precision round by 1e-3 and 1e-2. The total is there
        # for gradients that vanish but for rounding, such as those of a key projection's bias in attention.
        if found.shape != p.shape or _norm(found - expected) > 0.03 * _norm(expected) + 1e-3 * total:
            wrong.append(name)
    if wrong:
        raise ValueError(
            "per-sample gradients of these parameters disagree with autograd: "
            + ", ".join(map(repr, wrong))
            + ". Either the model mixes samples (dimension 0 of every tensor must be the samples, and each loss must "
            "depend on its own sample only) or it uses these parameters outside their layer's forward pass"
        )


def hidden_use(parameter: str) -> ValueError:
    """The refusal of a parameter whose use left no trace that an engine could follow."""
    return ValueError(
        f"parameter {parameter!r} is used outside the forward pass of its layer, while that is in eval mode, or was "
        "frozen when the engine was made: call the layer as a module, in train mode, or freeze the parameter"
    )


def wrong_samples(name: str, layer: nn.Module, seen: int, losses: int) -> ValueError:
    """The refusal of a layer whose input does not have the samples in dimension 0."""
    return ValueError(
        f"layer {name!r} ({type(layer).__name__}) saw {seen} samples, but there are {losses} losses: dimension 0 of "
        "its input must be the samples"
    )


def _add_to_grad(p: nn.Parameter, addend: Tensor | None) -> None:
    """Add to ``p.grad``, creating it if None; an addend of None stands for zeros."""
    if p.grad is None:
        p.grad = torch.zeros_like(p) if addend is None else addend.to(p.dtype).contiguous()
    elif addend is not None:
        p.grad.add_(addend)
