"""Methods: what makes the learning rate. All share data, sampling, noise and gradient engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch


def _dadaptation(parameters: Any, lr: float = 1.0) -> torch.optim.Optimizer:
    from dadaptation import DAdaptAdam

    return DAdaptAdam(parameters, lr=lr)


def _prodigy(parameters: Any, lr: float = 1.0) -> torch.optim.Optimizer:
    from prodigyopt import Prodigy

    return Prodigy(parameters, lr=lr)


# Base optimizers, with the settings that torch or their authors recommend but for momentum.
BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "dadaptation": _dadaptation,
    "prodigy": _prodigy,
}


@dataclass(frozen=True)
class Method:
    """A preset of the privacy engine with changes, and what a spec's ``learning_rate`` means for it.

    Attributes:
        title: for figures.
        preset: of :class:`hyfreedp.PrivacyEngine`.
        overrides: changed fields of that preset.
        learns: True if the rate is learned by probes, and ``learning_rate`` only its first value.
        base: base optimizer, a name in ``BASES``.
    """

    title: str
    preset: str
    overrides: dict[str, Any] = field(default_factory=dict)
    learns: bool = True
    base: str = "adamw"


METHODS = {
    "robust": Method("HyFreeDP, preset robust", "robust"),
    "paper": Method("HyFreeDP, preset paper", "paper"),
    "constant": Method("constant rate", "fixed", learns=False),
    "linear": Method("rate with linear decay", "fixed", {"decay": "linear"}, learns=False),
    "cosine": Method("rate with cosine decay", "fixed", {"decay": "cosine"}, learns=False),
    "dadaptation": Method("D-Adaptation", "fixed", learns=False, base="dadaptation"),
    "prodigy": Method("Prodigy", "fixed", learns=False, base="prodigy"),
    "vanilla": Method("DP-SGD with clipping threshold", "fixed", learns=False),
    "adaptive": Method("adaptive clipping", "fixed", learns=False),
    # For the ablation of notebook 04: other step rules in each preset, preset robust less one part at a time, and the
    # other rule for R_l.
    "robust_literal": Method("contrasts, literal", "robust", {"step_rule": "literal"}),
    "robust_gen": Method("contrasts, gen", "robust", {"step_rule": "gen"}),
    "robust_anchored": Method("contrasts, anchored", "robust", {"step_rule": "anchored"}),
    "paper_literal": Method("losses, literal", "paper", {"step_rule": "literal"}),
    "paper_posterior": Method("losses, posterior", "paper", {"step_rule": "posterior"}),
    "paper_anchored": Method("losses, anchored", "paper", {"step_rule": "anchored"}),
    "robust_undamped": Method("robust without damping", "robust", {"damping": False}),
    "robust_cold": Method("robust without warm-up", "robust", {"warmup": 0.0}),
    "robust_losses": Method("robust with losses for contrasts", "robust", {"probe": "losses"}),
    "paper_previous": Method("losses, gen, previous loss as R_l", "paper", {"loss_threshold_rule": "previous"}),
    "paper_anchored_previous": Method(
        "losses, anchored, previous loss as R_l", "paper", {"step_rule": "anchored", "loss_threshold_rule": "previous"}
    ),
    "algorithm1": Method(
        "Algorithm 1 as printed", "paper", {"step_rule": "literal", "loss_threshold_rule": "previous"}
    ),
}

# Methods with a clipping threshold; all others normalise per-sample gradients.
CLIPPED = ("vanilla", "adaptive")

# The grid of the paper's experiments, and the larger rates that small tasks with normalised gradients need.
PAPER_GRID = (5e-5, 1e-4, 5e-4, 1e-3, 5e-3)
EXTENDED_GRID = (*PAPER_GRID, 1e-2, 2e-2, 5e-2)
