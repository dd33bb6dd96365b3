"""Notebook parameters that raise when mistyped; papermill itself only warns."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hyfreedp.checks import check_choice, check_count, nearest
from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.paths import workspace

# IPython's own names of plain values; everything else that is a plain value came from a parameters cell.
_NOTEBOOK_NAMES = {"In", "Out"}
# Of every notebook that has them; other numbers are checked where they are used.
_COUNTS = ("seeds", "rounds", "jobs")
_PLAIN = (str, int, float, bool, list, tuple, dict, type(None))


def begin(namespace: Mapping[str, Any], name: str) -> None:
    """The plumbing of a notebook, right after its parameters: they are checked, and its figures get our style.

    Args:
        namespace: the notebook's ``globals()``, in which nothing else has been assigned yet.
        name: of its source in the folder of notebooks, whose defaults say the types. Where that is not, nothing is
            checked.
    """
    source = next(workspace().notebooks.rglob(f"{name}.py"), None)
    if source is not None:
        allowed = {parameter: type(value) for parameter, value in notebooks.defaults(source).items()}
        check_parameters(namespace, allowed | {"profile": notebooks.PROFILES})
    plots.use_style()


def check_parameters(namespace: Mapping[str, Any], allowed: Mapping[str, type | tuple[Any, ...]]) -> None:
    """Check what the parameters cell and papermill's injected one have set; call it right after them.

    Args:
        namespace: the notebook's ``globals()``, in which nothing else has been assigned yet.
        allowed: parameter name -> its type (an int passes for a float), or the tuple of values it may have.
    """
    for name, value in namespace.items():
        if name.startswith("_") or name in _NOTEBOOK_NAMES or not isinstance(value, _PLAIN):
            continue
        if name not in allowed:
            raise TypeError(
                f"unknown parameter {name!r}: this notebook takes {', '.join(allowed)}{nearest(name, allowed)}"
            )
        if isinstance(expected := allowed[name], tuple):
            check_choice(f"parameter {name}", value, expected)
        else:
            _check_type(name, value, expected)
        if name in _COUNTS:
            check_count(f"parameter {name}", value, 1)


def parse_value(name: str, text: str, default: Any) -> Any:
    """What a command line's ``--set name=text`` means for a parameter with this default.

    Text is taken as it is for a string and read as a Python literal for any other type; nothing is ever evaluated.
    """
    value: Any = text
    if not isinstance(default, str):
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(text)
    if isinstance(default, list) and isinstance(value, tuple):  # 1,3,8 without brackets
        value = list(value)
    if isinstance(default, float) and not isinstance(value, bool):
        with suppress(ValueError):
            value = float(text)  # 1 and inf too
    _check_type(name, value, type(default))
    return value


def _check_type(name: str, value: Any, expected: type) -> None:
    fits = isinstance(value, expected) or (expected is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and expected is not bool):
        raise TypeError(f"parameter {name} must be {expected.__name__}, got {value!r}")
