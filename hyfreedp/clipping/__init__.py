"""Per-sample gradient clipping: the rules, the engines, and the choice between them."""

from __future__ import annotations

from typing import Literal

from torch import nn

from hyfreedp.checks import import_extra
from hyfreedp.clipping.base import GradientEngine, Misread
from hyfreedp.clipping.batch_norm import replace_batch_norm
from hyfreedp.clipping.bookkeeping import BookKeepingEngine
from hyfreedp.clipping.functions import AbadiClipping, AutomaticClipping, Clipping, NoClipping
from hyfreedp.clipping.validate import check_module

__all__ = [
    "AbadiClipping",
    "AutomaticClipping",
    "BookKeepingEngine",
    "Clipping",
    "GradientEngine",
    "Misread",
    "NoClipping",
    "check_module",
    "make_engine",
    "replace_batch_norm",
]

_ENGINES = ("auto", "bookkeeping", "hooks")


def make_engine(
    module: nn.Module,
    clipping: Clipping,
    engine: Literal["auto", "bookkeeping", "hooks"] = "auto",
    *,
    views: int = 1,
) -> GradientEngine:
    """Attach a gradient engine to ``module``.

    Activation (gradient) checkpointing works with either engine if it is non-reentrant, turned on before or after this
    call: by ``torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)`` in the model, or for transformers by
    ``model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})``. It saves most where
    few weights are trained, as with LoRA. Of a trained weight that is larger than its input and output per sample,
    "bookkeeping" keeps these two until all norms are known.

    Args:
        module: the model, in train mode, with its final choice of trainable parameters.
        clipping: ``AutomaticClipping()``, ``AbadiClipping(threshold)`` or ``NoClipping()``.
        engine: "bookkeeping", which is fast and what "auto" means; or "hooks", which instantiates every gradient by
            Opacus's samplers.
        views: of each sample, which the model is given one after the other: K B rows for B losses.

    Raises:
        ValueError: the module cannot be privatised (see ``check_module``), or the engine does not cover it.
        ImportError: "hooks" without Opacus.
    """
    if engine not in _ENGINES:
        raise ValueError(f"engine={engine!r} is not allowed: use {', '.join(map(repr, _ENGINES))}")
    check_module(module)
    if engine != "hooks":
        return BookKeepingEngine(module, clipping, views)
    import_extra("opacus", "gradient_engine='hooks'")
    from hyfreedp.clipping.hooks import HooksEngine

    return HooksEngine(module, clipping, views)
