"""Checks of arguments: each names the argument, its value and what is allowed."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any, get_args


def check_choice(name: str, value: Any, choices: Any) -> None:
    """``value`` must be one of ``choices``: the strings of a Literal type, or of any iterable."""
    allowed = get_args(choices) or tuple(choices)
    if value not in allowed:
        close = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


def check_number(name: str, value: Any) -> float:
    """``value`` as a float; NaN is refused."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def check_probability(name: str, value: Any, *, one_allowed: bool = False) -> float:
    """``value`` as a float in (0, 1), or in (0, 1] if ``one_allowed``."""
    number = check_number(name, value)
    if not (0 < number < 1 or (one_allowed and number == 1)):
        raise ValueError(f"{name} must be in (0, 1{']' if one_allowed else ')'}, got {value!r}")
    return number


def check_count(name: str, value: Any, smallest: int, largest: float = math.inf, limit: str = "") -> int:
    """``value`` as an int from ``smallest`` to ``largest``, which the message calls ``limit``."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not smallest <= int(value) <= largest:
        upper = f" and at most {limit}={largest}" if limit else ""
        raise ValueError(f"{name} must be an integer of at least {smallest}{upper}, got {value!r}")
    return int(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: "; did you mean ...?", or nothing if no known one is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else ""
