"""Exercises of the notebooks: checking an answer, and the copies with and without solutions."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from numbers import Real

import nbformat
from IPython.display import Markdown, display

SOLUTION = "solution"  # tag of the cells that only the copy with solutions has
HEADING = "## Exercises"


def check(answer: float | None, truth: Callable[[], float], *, relative: float = 0.02) -> None:
    """Display whether an answer is right, or too high or low, but not the right answer.

    Args:
        answer: a number, or None before there is one.
        truth: computes the right answer, when it is needed.
        relative: the largest relative error of a right answer.
    """
    if answer is None:
        said = "*No answer yet: put yours in place of None, and run this cell again.*"
    elif not isinstance(answer, Real):
        raise TypeError(f"the answer must be a number, got {answer!r}")
    elif math.isclose(answer, right := truth(), rel_tol=relative):
        said = "**Right.**"
    else:
        said = f"**Not yet.** It is too {'high' if answer > right else 'low'}."
    display(Markdown(said))


def without_solutions(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The student's copy: without cells tagged :data:`SOLUTION`."""
    student = copy.deepcopy(notebook)
    student.cells = [cell for cell in student.cells if SOLUTION not in cell.metadata.get("tags", [])]
    return student


def with_solutions(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The teacher's copy, with links for a folder one level below, and outputs only from the exercises on.

    It has all code, so that it runs from top to bottom; the student's copy shows the other outputs.
    """
    solved = copy.deepcopy(notebook)
    begun = False
    for cell in solved.cells:
        begun = begun or (cell.cell_type == "markdown" and HEADING in cell.source)
        if cell.cell_type == "code" and not begun:
            cell.outputs = []
        elif cell.cell_type == "markdown":
            cell.source = cell.source.replace("](../", "](../../").replace("](reports/", "](../reports/")
            cell.source = cell.source.replace("](solutions/", "](")
            cell.source = re.sub(r"\A# ", "# Solutions: ", cell.source)
    return solved
