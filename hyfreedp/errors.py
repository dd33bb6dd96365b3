"""The package's own exceptions, and a text that several messages share."""

from __future__ import annotations

LOOP_THAT_ENDS = (
    "let the loop end with the plan (while optimizer.steps_left: for batch in loader: ...), or plan a longer run by "
    "epochs= or steps= of make_private_with_epsilon"
)


class Refused(ValueError):
    """The loss returns, or does, something that a private step cannot allow."""


class BudgetExhausted(RuntimeError):
    """The next release is not in the plan for which the noise was calibrated, so it would break the guarantee."""
