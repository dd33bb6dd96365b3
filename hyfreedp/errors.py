"""Errors that this package raises by a class of its own, and what its messages share."""

from __future__ import annotations

LOOP_THAT_ENDS = (
    "let the loop end with the plan (while optimizer.steps_left: for batch in loader: ...), or plan a longer run by "
    "epochs= or steps= of make_private_with_epsilon"
)


class Refused(ValueError):
    """What a loss gives, or does, that no private step may take."""


class BudgetExhausted(RuntimeError):
    """The next release is not in the plan that the noise was calibrated for, so it would break the guarantee."""
