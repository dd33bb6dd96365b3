"""Names that have changed: the old ones go on working, and say once what to use."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_told: set[str] = set()


def tell_renamed(old: str, new: str) -> None:
    """Warn, once per process, whoever called the function that calls this one."""
    if old not in _told:
        _told.add(old)
        warnings.warn(f"{old} is now {new}; the old name will go", FutureWarning, stacklevel=3)


def renamed_argument(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take the keyword argument ``new`` by its ``old`` name too."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def renaming(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                tell_renamed(f"{function.__qualname__.removesuffix('.__init__')}'s argument {old!r}", repr(new))
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return renaming

    return decorate


def renamed_attribute(old: str, new: str) -> property:
    """A property that reads the attribute ``new``; ``old`` is what to call it in the warning."""

    def read(owner: Any) -> Any:
        tell_renamed(old, repr(new))
        return getattr(owner, new)

    return property(read, doc=f"The old name of ``{new}``.")
