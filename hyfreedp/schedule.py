"""Which steps have a look, and how the learning rate decays; both depend only on the length of the run."""

import math
from typing import Literal

Decay = Literal["none", "linear", "cosine"]

# Chosen on validation data of small tasks, see docs/step_rule.md.
FIRST_LOOK_STEP = 1  # steps made before the first look
LOOK_SHARES = (1 / 8, 1 / 2, 3 / 4)  # shares of the run made before the later looks


def decay_factor(step: int, steps: int, decay: Decay, start: float = 0.0) -> float:
    """Factor on eta at 0-based ``step``: 1 for the share ``start`` of the run, then falling to 0 at its end."""
    if decay == "none":
        return 1.0
    progress = max(0.0, (step / steps - start) / (1 - start))
    return 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def look_steps(steps: int, probe: str = "look") -> tuple[int, ...]:
    """The 0-based steps that begin with a look, in a run of ``steps`` steps with this ``probe``."""
    if probe != "look":
        return ()
    candidates = {FIRST_LOOK_STEP, *(math.ceil(share * steps) for share in LOOK_SHARES)}
    return tuple(sorted(step for step in candidates if step < steps))
