"""The package's own exceptions, and texts that several messages share."""

LOOP_THAT_ENDS = (
    "let the loop end with the plan (while optimizer.steps_left: for batch in loader: ...), or plan a longer run by "
    "epochs= or steps= of make_private_with_epsilon; to evaluate, take a DataLoader of your own"
)
REMEMBERS = (
    "the loss (or weight) of a record depends on those that were computed before it: let loss and model keep nothing "
    "of a record, and draw from the global generators of torch, NumPy or Python"
)


class Refused(ValueError):
    """The loss returns or does something that a private step must not allow."""


class BudgetExhausted(RuntimeError):
    """The noise was not calibrated for another release, which would therefore exceed the privacy budget."""
