"""Methods: what makes the learning rate. All share data, sampling, noise and gradient engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """A preset of the privacy engine with changes, and what a spec's ``learning_rate`` means for it.

    Attributes:
        title: for figures.
        preset: of :class:`hyfreedp.PrivacyEngine`.
        overrides: changed fields of that preset.
        learns: True if the rate is learned, and ``learning_rate`` only its first value.
    """

    title: str
    preset: str
    overrides: dict[str, Any] = field(default_factory=dict)
    learns: bool = True


METHODS = {
    "robust": Method("HyFreeDP, preset robust", "robust"),
    "paper": Method("HyFreeDP, preset paper", "paper"),
    "constant": Method("constant rate", "fixed", learns=False),
    "linear": Method("rate with linear decay", "fixed", {"decay": "linear"}, learns=False),
    "vanilla": Method("DP-SGD with clipping threshold", "fixed", learns=False),
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

# The grid of the paper's experiments, and the larger rates that small tasks with normalised gradients need.
PAPER_GRID = (5e-5, 1e-4, 5e-4, 1e-3, 5e-3)
EXTENDED_GRID = (*PAPER_GRID, 1e-2, 2e-2, 5e-2)
