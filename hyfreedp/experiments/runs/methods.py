"""Methods: what makes the learning rate. All share data, sampling, noise and gradient engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from hyfreedp import PRESETS, Preset
from hyfreedp.experiments.baselines.line_search import LINE_SEARCH, StudiedRule


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
        preset: of :class:`hyfreedp.PrivacyEngine`, by name if it has one.
        overrides: changed fields of that preset.
        learns: True if the rate is learned by probes, and ``learning_rate`` only its first value.
        base: base optimizer, a name in ``BASES``.
    """

    title: str
    preset: str | Preset
    overrides: dict[str, Any] = field(default_factory=dict)
    learns: bool = True
    base: str = "adamw"

    @property
    def settings(self) -> Preset:
        """The preset with its changes."""
        return replace(PRESETS[self.preset] if isinstance(self.preset, str) else self.preset, **self.overrides)

    @property
    def searches(self) -> bool:
        """Whether the rate is learned by a line search, which has a first rate and an interval."""
        return self.settings.probe not in ("votes", "none")


METHODS = {
    "robust": Method("HyFreeDP, preset robust", "robust"),
    "paper": Method("HyFreeDP, preset paper", "paper"),
    "line_search": Method("line search with posterior (former default)", LINE_SEARCH),
    "constant": Method("constant rate", "fixed", learns=False),
    "linear": Method("rate with linear decay", "fixed", {"decay": "linear"}, learns=False),
    "cosine": Method("rate with cosine decay", "fixed", {"decay": "cosine"}, learns=False),
    "dadaptation": Method("D-Adaptation", "fixed", learns=False, base="dadaptation"),
    "prodigy": Method("Prodigy", "fixed", learns=False, base="prodigy"),
    "vanilla": Method("DP-SGD with clipping threshold", "fixed", learns=False),
    "adaptive": Method("adaptive clipping", "fixed", learns=False),
    # For the ablation of notebook 05: other step rules on both probes, the line search less one part at a time, and the
    # other smoothing, the other batch and the other rule for R_l of the paper's.
    "line_search_literal": Method("contrasts, literal", LINE_SEARCH, {"step_rule": StudiedRule("literal")}),
    "line_search_gen": Method("contrasts, gen", LINE_SEARCH, {"step_rule": StudiedRule("gen")}),
    "line_search_anchored": Method("contrasts, anchored", LINE_SEARCH, {"step_rule": StudiedRule("anchored")}),
    "paper_literal": Method("losses, literal", "paper", {"step_rule": "literal"}),
    "paper_posterior": Method("losses, posterior", "paper", {"step_rule": StudiedRule("posterior")}),
    "paper_anchored": Method("losses, anchored", "paper", {"step_rule": StudiedRule("anchored")}),
    "line_search_undamped": Method(
        "line search without damping", LINE_SEARCH, {"step_rule": StudiedRule(damping=False)}
    ),
    "line_search_cold": Method("line search without warm-up", LINE_SEARCH, {"warmup": 0.0}),
    "line_search_losses": Method("line search with losses for contrasts", LINE_SEARCH, {"probe": "losses"}),
    "paper_fast": Method("losses, gen, 0.9 of the new rate", "paper", {"smoothing": 0.9}),
    "paper_next": Method("losses, gen, next batch", "paper", {"probe_batch": "next"}),
    "paper_fast_next": Method(
        "losses, gen, 0.9 of the new rate, next batch", "paper", {"smoothing": 0.9, "probe_batch": "next"}
    ),
    "paper_previous": Method("losses, gen, previous loss as R_l", "paper", {"loss_threshold_rule": "previous"}),
    "paper_anchored_previous": Method(
        "losses, anchored, previous loss as R_l",
        "paper",
        {"step_rule": StudiedRule("anchored"), "loss_threshold_rule": "previous"},
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
