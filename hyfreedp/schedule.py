"""How the learning rate falls during a run, whoever sets it."""

from __future__ import annotations

import math
from typing import Literal

Decay = Literal["none", "linear", "cosine"]


def decay_factor(step: int, steps: int, decay: Decay, start: float = 0.0) -> float:
    """What multiplies eta at 0-based ``step``: 1 up to the share ``start`` of the run, then down to zero at its end."""
    if decay == "none":
        return 1.0
    progress = max(0.0, (step / steps - start) / (1 - start))
    return 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
