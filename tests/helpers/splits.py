"""Twins of the noise split, written out."""

import dataclasses

from hyfreedp import NoiseSplit


def vanilla(split: NoiseSplit) -> NoiseSplit:
    """DP-SGD without probes at the split's sigma."""
    noise = {"sigma_gradient": split.sigma, "sigma_gradient_probe": split.sigma}
    return dataclasses.replace(split, probe="none", vote_steps=(), **noise)


def effective(split: NoiseSplit) -> float:
    """sigma_eff of a probe step, written out."""
    squared_sensitivity = {"losses": 3, "look": 10}[split.probe]
    return (split.sigma_gradient_probe**-2 + squared_sensitivity * split.sigma_loss**-2) ** -0.5
