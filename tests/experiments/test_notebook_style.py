"""Notebooks tell a story and call the library: short cells, no helpers, no drawing, no training loop."""

import ast

import jupytext
import pytest

from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.store.paths import ROOT

SOURCES = notebooks.sources()
LONGEST = 15  # lines of code in a cell, without blank lines and comments


def code_cells(source, *, all_cells=False):
    """The code of each cell; that of the parameters, which holds literals alone, only if asked for."""
    cells = [cell for cell in jupytext.read(source).cells if cell.cell_type == "code"]
    return [cell.source for cell in cells if all_cells or "parameters" not in cell.metadata.get("tags", [])]


def lines_of(code):
    return [line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")]


def offences(code):
    """What a cell must not hold, as text."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield f"{type(node).__name__}, line {node.lineno}"
        elif isinstance(node, (ast.For, ast.While)):
            calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
            if any(isinstance(call, ast.Attribute) and call.attr == "step" for call in calls):
                yield f"training loop, line {node.lineno}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
            if any(name.split(".")[0] in ("matplotlib", "seaborn") for name in names):
                yield f"drawing, line {node.lineno}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_cells_are_short_and_hold_no_helpers(source):
    for code in code_cells(source):
        assert len(lines_of(code)) <= LONGEST, code
    for code in code_cells(source, all_cells=True):
        assert not list(offences(code)), code


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f():\n    pass", "FunctionDef"),
        ("table.map(lambda x: x)", "Lambda"),
        ("class A:\n    pass", "ClassDef"),
        ("for batch in loader:\n    optimizer.step(loss, batch)", "training loop"),
        ("import matplotlib.pyplot as plt", "drawing"),
        ("from seaborn import heatmap", "drawing"),
    ],
)
def test_what_is_looked_for_is_found(code, found):
    (offence,) = offences(code)
    assert offence.startswith(found)
    assert not list(offences("rows = [f(x) for x in xs]\nfor name in names:\n    display(name)"))
    assert lines_of("# note\n\nx = 1  # one\n") == ["x = 1  # one"]


def test_there_is_one_way_to_say_what_is_to_be_seen():
    defined = [
        path
        for folder in ("hyfreedp", "notebooks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "what_to_see"
    ]
    assert [path.name for path in defined] == ["plots.py"]
