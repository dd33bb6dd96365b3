"""Checks of notebook parameters: a mistyped name raises, while papermill only warns."""

import ast
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hyfreedp.checks import check_choice, check_number, nearest
from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.paths import workspace

# Parameters with one range in every notebook, or whose entries have; for others see `_fitting`.
_WITHIN = dict.fromkeys("seeds rounds jobs steps records epochs interval batch_size batch_sizes".split(), "[1, inf)")
_WITHIN |= dict.fromkeys("sigma reach first_rate loss_mean loss_std brightness".split(), "(0, inf)")
_WITHIN |= {"gamma": "(1, inf)", "rate": "(0, 1]", "epsilon": "(0, inf]", "documents_epsilon": "(0, inf]"}
_WITHIN |= {"seed": "[0, inf)", "sigma_loss": "[0, inf)", "step": "[0, 99]", "stages": "[0, 1]", "confidence": "(0, 1)"}
_CHECKED = "_parameters_are_checked"  # in the namespace from the first check on
_PLAIN = (str, int, float, bool, list, tuple, dict, type(None))


def begin(namespace: dict[str, Any], name: str) -> None:
    """Call it right after a notebook's parameters: checks them, and sets the style of figures.

    Args:
        namespace: the notebook's ``globals()``, in which nothing else has been assigned yet.
        name: of its source, whose defaults give the types. If there is no such source, nothing is checked.
    """
    source = next(workspace().notebooks.rglob(f"{name}.py"), None)
    if source is not None:
        choices = {"profile": notebooks.PROFILES, "task": ("digits", "classification")}
        check_parameters(namespace, {p: choices.get(p, type(v)) for p, v in notebooks.defaults(source).items()})
    plots.use_style()


def check_parameters(namespace: dict[str, Any], allowed: Mapping[str, type | tuple[Any, ...]]) -> None:
    """TypeError or ValueError if a parameter, from the notebook's cell or papermill's, is unknown or has a wrong value.

    Args:
        namespace: the notebook's ``globals()``, in which nothing else has been assigned yet.
        allowed: by parameter its type (an int is allowed for a float), or a tuple of allowed values.
    """
    for name, value in namespace.items() if _CHECKED not in namespace else ():
        if not (name in allowed or name.startswith("_") or name in ("In", "Out")) and isinstance(value, _PLAIN):
            del namespace[name]  # so that a corrected cell can run again
            known = ", ".join(allowed) + nearest(name, allowed)
            raise TypeError(f"unknown parameter {name!r}: this notebook takes {known}")
    namespace[_CHECKED] = True
    given = {name: value for name, value in namespace.items() if name in allowed}
    for name, value in given.items():
        _check_type(name, value, allowed[name])
        if value == [] and name in _WITHIN:
            raise ValueError(f"parameter {name} must have at least one number, each in {_WITHIN[name]}, got []")
        for number in value if isinstance(value, list) else [value]:
            if name in _WITHIN:
                check_number(f"parameter {name}", number, _WITHIN[name])
    for name, within in _fitting(given).items():
        check_number(f"parameter {name}, with the others as they are,", given[name], within)


def _fitting(p: Mapping[str, Any]) -> dict[str, str]:
    """Ranges that follow from other parameters, or from what one notebook draws."""
    steps = p["epochs"] * p["records"] / p["batch_size"] if "epochs" in p else p.get("steps", 100)
    within = {"batch_size": f"[1, {p['records']}]"} if "batch_size" in p else {}
    within |= {"interval": f"[1, {max(1, round(steps))}]"} if "interval" in p else {}
    if "records" in p and "rate" in p:  # notebook 02: no batch is empty or mere noise, every fifth step has a probe
        noise = f"(0, {p['records'] * p['rate'] / 10:g}]"
        within |= {"records": f"[{10 / p['rate']:g}, inf)", "steps": "[5, inf)", "sigma": noise}
    elif "sigma" in p:  # notebook 00: within its curves
        within["sigma"] = f"[{0.03 * p['steps'] ** 0.5:.3g}, {4 * p['steps'] ** 0.5:.3g}]"
    return within


def parse_value(name: str, text: str, default: Any) -> Any:
    """The value of ``--set name=text`` on the command line, for a parameter with this default; TypeError if wrong.

    If the default is a string, that is the text; otherwise the text is read as a Python literal, and never evaluated.
    """
    value: Any = text
    with suppress(ValueError, SyntaxError):  # 1 and inf are floats, too
        value = type(default)(text) if isinstance(default, str | float) else ast.literal_eval(text)
    if isinstance(default, list) and isinstance(value, tuple):  # 1,3,8 without brackets
        value = list(value)
    _check_type(name, value, type(default))
    return value


def _check_type(name: str, value: Any, expected: type | tuple[Any, ...]) -> None:
    if isinstance(expected, tuple):
        check_choice(f"parameter {name}", value, expected)
        return
    fits = isinstance(value, expected) or (expected is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and expected is not bool):
        raise TypeError(f"parameter {name} must be {expected.__name__}, got {value!r}")
