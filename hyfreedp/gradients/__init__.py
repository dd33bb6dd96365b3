"""Per-sample gradient clipping: the clipping rules, and the engine that clips and sums."""

from __future__ import annotations

from torch import nn

from hyfreedp.checks import check_count
from hyfreedp.gradients.batch_norm import replace_batch_norm
from hyfreedp.gradients.clipping import AbadiClipping, AutomaticClipping, Clipping, NoClipping
from hyfreedp.gradients.engine import GradientEngine
from hyfreedp.gradients.per_sample import MEMORY_BUDGET
from hyfreedp.gradients.validate import check_module

__all__ = [
    "MEMORY_BUDGET",
    "AbadiClipping",
    "AutomaticClipping",
    "Clipping",
    "GradientEngine",
    "NoClipping",
    "check_module",
    "make_engine",
    "replace_batch_norm",
]


def make_engine(
    module: nn.Module, clipping: Clipping, *, memory_budget: int = MEMORY_BUDGET, sharing: int = 64
) -> GradientEngine:
    """A gradient engine for ``module``, which is not changed, or refused by :func:`check_module` (ValueError).

    Activation (gradient) checkpointing works if it is non-reentrant: by ``torch.utils.checkpoint.checkpoint(layer, x,
    use_reentrant=False)`` in the model, or for transformers by ``model.gradient_checkpointing_enable(
    gradient_checkpointing_kwargs={"use_reentrant": False})``. It saves most if few weights are trained, as with LoRA:
    the input and output gradient of a trained layer are kept until all norms are known, unless its weight is smaller.

    Args:
        module: the model, in train mode, with its final choice of trainable parameters.
        clipping: ``AutomaticClipping()``, ``AbadiClipping(threshold)`` or ``NoClipping()``.
        memory_budget: bytes that per-sample gradients of samples mapped together may take; see ``MEMORY_BUDGET``.
        sharing: how many samples share them, about: the expected batch size. It must not depend on the data, since a
            sample's gradient rounds as its share of the memory allows.
    """
    check_module(module)
    memory_budget, sharing = check_count("memory_budget", memory_budget, 0), check_count("sharing", sharing, 1)
    return GradientEngine(module, clipping, memory_budget, sharing)
