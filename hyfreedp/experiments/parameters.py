"""Notebook parameters that raise when mistyped; papermill itself only warns."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

# IPython's own names of plain values; everything else that is a plain value came from a parameters cell.
_NOTEBOOK_NAMES = {"In", "Out"}
_PLAIN = (str, int, float, bool, list, tuple, dict, type(None))


def check_parameters(namespace: Mapping[str, Any], allowed: Mapping[str, type | tuple[Any, ...]]) -> None:
    """Check what the parameters cell and papermill's injected one have set; call it right after them.

    Args:
        namespace: the notebook's ``globals()``, in which nothing else has been assigned yet.
        allowed: parameter name -> its type (an int passes for a float), or the tuple of values it may have.

    Raises:
        TypeError: an unknown name (with the nearest known one) or a value of another type.
        ValueError: none of the values allowed.
    """
    for name, value in namespace.items():
        if name.startswith("_") or name in _NOTEBOOK_NAMES or not isinstance(value, _PLAIN):
            continue
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"unknown parameter {name!r}: this notebook takes {', '.join(allowed)}{hint}")
        expected = allowed[name]
        if isinstance(expected, tuple):
            if value not in expected:
                raise ValueError(f"parameter {name} must be one of {', '.join(map(repr, expected))}, got {value!r}")
            continue
        fits = isinstance(value, expected) or (expected is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and expected is not bool):
            raise TypeError(f"parameter {name} must be {expected.__name__}, got {value!r}")
