"""Checks of notebook parameters: a mistyped name raises, while papermill only warns."""

import ast
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hyfreedp.checks import check_choice, check_number, nearest
from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.paths import workspace

# IPython's own variables of plain types; all others come from a cell of parameters.
_NOTEBOOK_NAMES = {"In", "Out"}
# Parameters with one range in every notebook; other numbers are checked where they are used.
_WITHIN = dict.fromkeys(("seeds", "rounds", "jobs", "steps", "records"), "[1, inf)") | {"rate": "(0, 1]"}
_WITHIN |= {"gamma": "(1, inf)", "epsilon": "(0, inf]", **dict.fromkeys(("sigma", "reach"), "(0, inf)")}
_PLAIN = (str, int, float, bool, list, tuple, dict, type(None))


def begin(namespace: Mapping[str, Any], name: str) -> None:
    """Call it right after a notebook's parameters: checks them, and sets the style of figures.

    Args:
        namespace: the notebook's ``globals()``, in which nothing else has been assigned yet.
        name: of its source, whose defaults give the types. If there is no such source, nothing is checked.
    """
    source = next(workspace().notebooks.rglob(f"{name}.py"), None)
    if source is not None:
        allowed = {parameter: type(value) for parameter, value in notebooks.defaults(source).items()}
        check_parameters(namespace, allowed | {"profile": notebooks.PROFILES})
    plots.use_style()


def check_parameters(namespace: Mapping[str, Any], allowed: Mapping[str, type | tuple[Any, ...]]) -> None:
    """TypeError or ValueError if a parameter, from the notebook's cell or papermill's, is unknown or has a wrong value.

    Args:
        namespace: the notebook's ``globals()``, in which nothing else has been assigned yet.
        allowed: by parameter its type (an int is allowed for a float), or a tuple of allowed values.
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
        if name in _WITHIN:
            check_number(f"parameter {name}", value, _WITHIN[name])


def parse_value(name: str, text: str, default: Any) -> Any:
    """The value of ``--set name=text`` on the command line, for a parameter with this default; TypeError if wrong.

    If the default is a string, that is the text; otherwise the text is read as a Python literal, and never evaluated.
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
