"""Exercises of the notebooks: cells that check an answer, and the copies with and without solutions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import nbformat
from IPython.display import Markdown, display

SOLUTION = "solution"  # tag of the cells that only the copy with solutions has
HEADING = "## Exercises"


def check(answer: float | str | None, truth: float | str | Callable[[], float], *, relative: float = 0.02) -> None:
    """Display whether an answer is right, and if it is not, which way it is wrong; never the answer.

    Args:
        answer: a number, or a word (in upper or lower case); None as long as there is none.
        truth: the answer, or a function that computes it, called only when there is an answer to compare.
        relative: how far a number may be from the true one, as a share of that.

    Raises:
        TypeError: a word for a number, or a number for a word.
    """
    display(Markdown(_said(answer, truth, relative)))


def _said(answer: float | str | None, truth: float | str | Callable[[], float], relative: float) -> str:
    if answer is None:
        return "*No answer yet: put yours in place of None, and run this cell again.*"
    right = truth() if callable(truth) else truth
    if isinstance(answer, str) != isinstance(right, str):
        raise TypeError(f"the answer must be a {'word' if isinstance(right, str) else 'number'}, got {answer!r}")
    if isinstance(answer, str) or isinstance(right, str):
        same = str(answer).strip().casefold() == str(right).casefold()
        return "**Right.**" if same else "**Not yet.** It is another one."
    if math.isclose(answer, right, rel_tol=relative):
        return "**Right.**"
    return f"**Not yet.** It is too {'high' if answer > right else 'low'}."


def without_solutions(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The student's copy: all but the cells tagged :data:`SOLUTION`."""
    student = copy.deepcopy(notebook)
    student.cells = [cell for cell in student.cells if SOLUTION not in cell.metadata.get("tags", [])]
    return student


def with_solutions(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The teacher's copy, for a folder one level below: outputs from the exercises on alone, links that hold there.

    All code is there, so that it runs from top to bottom like the student's copy, which shows what the rest gives.
    """
    solved = copy.deepcopy(notebook)
    begun = False
    for cell in solved.cells:
        begun = begun or (cell.cell_type == "markdown" and HEADING in cell.source)
        if cell.cell_type == "code" and not begun:
            cell.outputs = []
        elif cell.cell_type == "markdown":
            cell.source = cell.source.replace("](../", "](../../").replace("](solutions/", "](")
    return solved
