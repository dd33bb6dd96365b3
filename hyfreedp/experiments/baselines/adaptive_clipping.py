"""Adaptive clipping (Andrew et al., 2021): the threshold R_g privately follows a quantile of gradient norms.

Each step also releases how many per-sample gradients were within R_g. Gradients and count are of one batch and together
are one Gaussian mechanism (Theorem 1 there), so a run costs what DP-SGD at the same sigma costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hyfreedp.gradients import AbadiClipping
from hyfreedp.noise import NoiseGenerator

# The authors' settings: the median, geometric updates, and sigma_b = B / 20.
QUANTILE = 0.5
RATE = 0.2
NOISE_PART = 1 / 20
INITIAL_THRESHOLD = 0.1


def update_noise(total: float, quantile_noise: float) -> float:
    """Noise multiplier z_Delta of the gradients under adaptive clipping (Andrew et al., 2021, Theorem 1).

    With z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2) gradients and count together cost what DP-SGD at z costs: the count,
    a sum of +-1/2, has sensitivity 1/2.

    Args:
        total: z.
        quantile_noise: sigma_b, the standard deviation of the noise on the count.

    Raises:
        ValueError: sigma_b is so small that the count alone costs more than z allows.
    """
    left = total**-2 - (2 * quantile_noise) ** -2
    if left <= 0:
        raise ValueError(f"quantile_noise must be greater than total / 2 = {total / 2:g}, got {quantile_noise!r}")
    return left**-0.5


@dataclass
class AdaptiveClipping:
    """A :class:`hyfreedp.gradients.Clipping` with a moving threshold.

    Call :meth:`start` once, and :meth:`update` after each step.

    Attributes:
        threshold: R_g.
        sigma: z, the noise multiplier of gradients and count together; set by :meth:`start`.
        expected_batch_size: B; set by :meth:`start`.
    """

    threshold: float
    sigma: float = 0.0
    expected_batch_size: float = 1.0
    _centred_count: float = field(default=0.0, repr=False)  # of this step: +1/2 for a norm within R_g, else -1/2
    _generator: NoiseGenerator = field(default_factory=NoiseGenerator, repr=False)
    _step: int = field(default=0, repr=False)

    def start(self, *, sigma: float, expected_batch_size: float, generator: NoiseGenerator) -> None:
        """Prepare a run, given z (0: no privacy), B, and the generator of the noise on counts.

        ValueError if B is so small that the count alone costs more than the budget.
        """
        self.sigma, self.expected_batch_size, self._generator = sigma, expected_batch_size, generator
        if sigma > 0:
            update_noise(sigma, self.count_noise)

    @property
    def count_noise(self) -> float:
        """sigma_b, the standard deviation of the noise on the count; 0 without privacy."""
        return NOISE_PART * self.expected_batch_size if self.sigma > 0 else 0.0

    @property
    def sensitivity(self) -> float:
        """R_g z_Delta / z, so that gradients, noised by ``sigma`` times this, get noise of z_Delta R_g."""
        share = update_noise(self.sigma, self.count_noise) / self.sigma if self.sigma > 0 else 1.0
        return self.threshold * share

    def factors(self, norms: Tensor) -> Tensor:
        """As :class:`hyfreedp.gradients.AbadiClipping`. Also counts the norms: a step must pass each of them once."""
        self._centred_count += ((norms <= self.threshold).double() - 0.5).sum().item()
        return AbadiClipping(self.threshold).factors(norms)

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptiveClipping:
        """The object itself: the engine copies the rule for each record, but the count must be over all records."""
        return self

    def update(self) -> float:
        """Release which share of B was within R_g, with noise; move R_g towards the quantile; return the share."""
        count = torch.tensor(self._centred_count, dtype=torch.float64)
        if self.count_noise > 0:
            self._generator.child("count", self._step).add_noise([count], self.count_noise)
        share = 0.5 + count.item() / self.expected_batch_size
        self.threshold *= math.exp(-RATE * (share - QUANTILE))
        self._centred_count = 0.0
        self._step += 1
        return share

    def state_dict(self) -> dict[str, Any]:
        """The state that changes from step to step."""
        return {"threshold": self.threshold, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.threshold, self._step = state["threshold"], state["step"]
