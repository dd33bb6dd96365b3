"""When a run looks, and how its learning rate falls: fixed by its length, whoever sets the rate."""

from __future__ import annotations

import math
from typing import Literal

Decay = Literal["none", "linear", "cosine"]

# Measured on validation data of small tasks, see docs/step_rule.md.
FIRST_LOOK_STEP = 1  # steps before the first look
LOOK_SHARES = (1 / 32, 1 / 8, 1 / 2)  # of the run before the later ones


def decay_factor(step: int, steps: int, decay: Decay, start: float = 0.0) -> float:
    """What multiplies eta at 0-based ``step``: 1 up to the share ``start`` of the run, then down to zero at its end."""
    if decay == "none":
        return 1.0
    progress = max(0.0, (step / steps - start) / (1 - start))
    return 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def look_steps(steps: int) -> tuple[int, ...]:
    """The steps, of a run of ``steps``, that look before their gradient is taken."""
    wanted = {FIRST_LOOK_STEP, *(math.ceil(share * steps) for share in LOOK_SHARES)}
    return tuple(step for step in sorted(wanted) if FIRST_LOOK_STEP <= step < steps)
