"""Notebooks tell a story and call the library: short cells, no classes or training loops, nothing hidden."""

import ast

import jupytext
from cases import together

from hyfreedp.experiments.book import notebooks

SOURCES = notebooks.sources()
LONGEST = 25  # lines of code in a cell, without blank lines and comments


def code_cells(source, *, but=()):
    """The code of each cell that has none of these tags."""
    cells = [cell for cell in jupytext.read(source).cells if cell.cell_type == "code"]
    return [cell.source for cell in cells if not set(but) & set(cell.metadata.get("tags", []))]


def calls_in(node, name):
    """The calls of functions and methods of this name."""
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) == name]


@together("source", SOURCES)
def test_cells_are_short_and_hold_no_machinery(source):
    for code in code_cells(source, but=["parameters"]):  # which holds literals alone
        lines = [line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")]
        assert len(lines) <= LONGEST, code
    for code in code_cells(source, but=["solution"]):  # which may derive what the exercise asks for
        for node in ast.walk(ast.parse(code)):
            assert not isinstance(node, ast.ClassDef), code
            assert not isinstance(node, ast.FunctionDef) or len(node.body) <= 10, code
            if isinstance(node, (ast.For, ast.While)) and calls_in(node, "step"):
                assert len(node.body) == 1, f"training loop: {code}"  # two lines show a step; more is machinery


def asked(code):
    """Name of the answer and code of its truth, of each call of ``check`` in a cell."""
    calls = calls_in(ast.parse(code), "check")
    return [(ast.unparse(call.args[0]), ast.unparse(call.args[1].body)) for call in calls]


@together("source", SOURCES)
def test_an_exercise_asks_for_a_number_that_the_library_computes(source):
    cells = [cell for cell in jupytext.read(source).cells if cell.cell_type == "code"]
    solved = [cell for cell in cells if "solution" in cell.metadata.get("tags", [])]
    questions = [(cell.source, *pair) for cell in cells if cell not in solved for pair in asked(cell.source)]
    assert questions
    for code, name, truth in questions:
        assert f"{name} = None\n" in code
        assert any(isinstance(node, ast.Name) for node in ast.walk(ast.parse(truth))), f"shows its answer: {truth}"
    assert [pair for cell in solved for pair in asked(cell.source)] == [tuple(pair) for _, *pair in questions]
