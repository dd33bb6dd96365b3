"""The package's own exceptions, and a text that several messages share."""

LOOP_THAT_ENDS = (
    "let the loop end with the plan (while optimizer.steps_left: for batch in loader: ...), or plan a longer run by "
    "epochs= or steps= of make_private_with_epsilon; to evaluate, take a DataLoader of your own"
)


class Refused(ValueError):
    """The loss returns or does something that a private step must not allow."""


class BudgetExhausted(RuntimeError):
    """The noise was not calibrated for another release, which would therefore exceed the privacy budget."""
