"""Exercises of the notebooks: cells that check an answer, and the copies with and without solutions."""

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
    """Display whether an answer is right, and if it is not, which way it is wrong; never the answer.

    Args:
        answer: a number; None as long as there is none.
        truth: a function, so that the cell neither shows nor computes it before it is needed.
        relative: how far the answer may be from the true one, as a share of that.
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
            cell.source = cell.source.replace("](../", "](../../").replace("](reports/", "](../reports/")
            cell.source = cell.source.replace("](solutions/", "](")
            cell.source = re.sub(r"\A# ", "# Solutions: ", cell.source)
    return solved
