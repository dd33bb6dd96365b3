"""Methods, which differ in the learning rate or clipping; they share data, sampling, noise and gradient engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch

from hyfreedp import PRESETS, Preset, look


def _of(package: str, name: str) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer ``name`` of ``package``, which is imported when an optimizer is made."""
    return lambda *arguments, **settings: getattr(import_module(package), name)(*arguments, **settings)


# Base optimizers; settings are the defaults of torch or of their authors, but for SGD's momentum.
BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "dadaptation": _of("dadaptation", "DAdaptAdam"),
    "prodigy": _of("prodigyopt", "Prodigy"),
}


@dataclass(frozen=True)
class Method:
    """A preset of the privacy engine with changes, and what a spec's ``learning_rate`` means for it.

    Attributes:
        preset: name of a preset of :class:`hyfreedp.PrivacyEngine`.
        overrides: fields of the preset to change.
        learns: True if probes or looks learn the rate, and ``learning_rate`` is only its first value.
        base: base optimizer, a name in ``BASES``.
        noise: "sound" keeps the target; "claimed" is Algorithm 2 as printed, whose true epsilon is larger; "noiseless
            losses" is that with a millionth of the noise on losses: a control, not private.
    """

    title: str
    preset: str
    overrides: dict[str, Any] = field(default_factory=dict)
    learns: bool = True
    base: str = "adamw"
    noise: Literal["sound", "claimed", "noiseless losses"] = "sound"

    @property
    def settings(self) -> Preset:
        """The preset with its changes."""
        return replace(PRESETS[self.preset], **self.overrides)

    @property
    def searches(self) -> bool:
        """Whether the rate is learned by a line search, with a first rate and an interval K."""
        return self.settings.probe == "losses"

    @property
    def learning(self) -> list[Any] | None:
        """The part of a cell's key that describes how the rate is learned; None if it is not."""
        if not self.learns:
            return None
        looks_by = look.CONSTANTS if self.settings.probe == "look" else ()
        return [LEARNING, self.preset, self.overrides, *looks_by, *([] if self.noise == "sound" else [self.noise])]


# Increased when learned rates change, so that cells of earlier versions get other keys.
LEARNING = 1

METHODS = {
    "robust": Method("preset robust (ours)", "robust"),
    "paper": Method("HyFreeDP (preset paper)", "paper"),
    "constant": Method("constant rate", "fixed", learns=False),
    "linear": Method("rate with linear decay", "fixed", {"decay": "linear"}, learns=False),
    "cosine": Method("rate with cosine decay", "fixed", {"decay": "cosine"}, learns=False),
    "dadaptation": Method("D-Adaptation", "fixed", learns=False, base="dadaptation"),
    "prodigy": Method("Prodigy", "fixed", learns=False, base="prodigy"),
    "vanilla": Method("DP-SGD with clipping threshold", "fixed", learns=False),
    "adaptive": Method("adaptive clipping", "fixed", learns=False),
    "paper_claimed": Method("HyFreeDP, as the paper accounts it", "paper", noise="claimed"),
    "paper_noiseless_losses": Method("HyFreeDP, losses without noise", "paper", noise="noiseless losses"),
    # For notebook 05: the paper's search with its other rules.
    "paper_literal": Method("b/a taken literally", "paper", {"step_rule": "literal"}),
    "paper_previous": Method("previous loss as R_l", "paper", {"loss_threshold_rule": "previous"}),
    "algorithm1_claimed": Method(
        "Algorithm 1 as printed and accounted",
        "paper",
        {"step_rule": "literal", "loss_threshold_rule": "previous"},
        noise="claimed",
    ),
}

# Methods with a clipping threshold; all others normalise per-sample gradients.
CLIPPED = ("vanilla", "adaptive")

# The rates of the paper's grid search; and those with larger ones, which small tasks with normalised gradients need.
PAPER_GRID = (5e-5, 1e-4, 5e-4, 1e-3, 5e-3)
EXTENDED_GRID = (*PAPER_GRID, 1e-2, 2e-2, 5e-2)
