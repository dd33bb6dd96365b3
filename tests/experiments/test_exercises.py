"""Cells that check an answer: what they say and never say, and the copies with and without solutions."""

import nbformat
import numpy as np
import pytest

from hyfreedp.experiments.book import exercises


@pytest.mark.parametrize(
    ("answer", "truth", "said"),
    [
        (3.05, 3.0, "**Right.**"),
        (3.07, 3.0, "**Not yet.** It is too high."),
        (-3.07, -3.0, "**Not yet.** It is too low."),
        (1e-9, 0.0, "**Not yet.** It is too high."),
        (0, 0.0, "**Right.**"),
        (np.float64(3.0), 3.0, "**Right.**"),
    ],
)
def test_what_is_said_of_an_answer(answer, truth, said, monkeypatch):
    shown = []
    monkeypatch.setattr(exercises, "display", shown.append)
    exercises.check(answer, lambda: truth)
    assert [markdown.data for markdown in shown] == [said]


def test_the_truth_is_not_computed_before_there_is_an_answer():
    exercises.check(None, lambda: 1 / 0)


def test_the_two_copies():
    new = nbformat.v4
    notebook = new.new_notebook()
    output = [new.new_output("stream", text="2")]
    notebook.cells = [
        new.new_markdown_cell("# Title\nsee [a](../figures/a.html)"),
        new.new_code_cell("1 + 1", outputs=output),
        new.new_markdown_cell("## Exercises\n[`solutions/`](solutions/a.ipynb)"),
        new.new_code_cell("check(None, 2)", outputs=output),
        new.new_code_cell("check(2, 2)", outputs=output, metadata={"tags": ["solution"]}),
    ]
    before = nbformat.writes(notebook)
    student, solved = exercises.without_solutions(notebook), exercises.with_solutions(notebook)
    assert nbformat.writes(notebook) == before
    assert student.cells == notebook.cells[:4]
    assert [cell.get("outputs") for cell in solved.cells] == [None, [], None, output, output]
    assert [cell.source for cell in solved.cells[::2]] == [
        "# Solutions: Title\nsee [a](../../figures/a.html)",
        "## Exercises\n[`solutions/`](a.ipynb)",
        "check(2, 2)",
    ]
