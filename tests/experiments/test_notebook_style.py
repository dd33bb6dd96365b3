"""Notebooks tell a story and call the library: short cells, no helpers, drawing or training loop, nothing hidden."""

import ast

import jupytext
import nbformat
import papermill
from cases import together

from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.store.paths import ROOT

SOURCES = notebooks.sources()
LONGEST = 15  # lines of code in a cell, without blank lines and comments


def code_cells(source, *, but=()):
    """The code of each cell that has none of these tags."""
    cells = [cell for cell in jupytext.read(source).cells if cell.cell_type == "code"]
    return [cell.source for cell in cells if not set(but) & set(cell.metadata.get("tags", []))]


def lines_of(code):
    return [line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")]


def name_of(call):
    """The last part of the name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def calls_in(node):
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def offences(code):
    """What a cell must not hold, as text; the truth of an exercise is a function, see ``exercises.check``."""
    tree = ast.parse(code)
    truths = [call.args[1] for call in calls_in(tree) if name_of(call) == "check"]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            if node not in truths:
                yield f"{type(node).__name__}, line {node.lineno}"
        elif isinstance(node, ast.Call) and name_of(node).startswith("draw") and node.lineno != node.end_lineno:
            yield f"drawing of several lines, line {node.lineno}"
        elif isinstance(node, (ast.For, ast.While)):
            if any(isinstance(call.func, ast.Attribute) and call.func.attr == "step" for call in calls_in(node)):
                yield f"training loop, line {node.lineno}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
            if any(name.split(".")[0] in ("matplotlib", "seaborn") for name in names):
                yield f"drawing, line {node.lineno}"


@together("source", SOURCES)
def test_cells_are_short_and_hold_no_helpers(source):
    for code in code_cells(source, but=["parameters"]):  # which holds literals alone
        assert len(lines_of(code)) <= LONGEST, code
    for code in code_cells(source, but=["solution"]):  # which may derive what the exercise asks for
        assert not list(offences(code)), code


@together(
    ("code", "found"),
    [
        ("def f():\n    pass", "FunctionDef"),
        ("table.map(lambda x: x)", "Lambda"),
        ("class A:\n    pass", "ClassDef"),
        ("for batch in loader:\n    optimizer.step(loss, batch)", "training loop"),
        ("import matplotlib.pyplot as plt", "drawing"),
        ("from seaborn import heatmap", "drawing"),
        ("figure = figures.draw_runs(\n    rows,\n)", "drawing of several lines"),
        ("check(None, lambda: f(1))\nrows.map(lambda row: row)", "Lambda, line 2"),
    ],
)
def test_what_is_looked_for_is_found(code, found):
    (offence,) = offences(code)
    assert offence.startswith(found)
    assert not list(offences("rows = [f(x) for x in xs]\nfor name in names:\n    display(name)"))
    assert lines_of("# note\n\nx = 1  # one\n") == ["x = 1  # one"]


def overridden(code, parameters):
    """Parameters that a cell sets, or takes another value for, without printing "name = value".

    Not those that it only fills in where they were left open, ``name = name or ...``.
    """
    tree = ast.parse(code)
    inner = [node.target for node in ast.walk(tree) if isinstance(node, ast.comprehension)]
    filled = [
        node.targets[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.BoolOp)
        and isinstance(node.value.op, ast.Or)
        and ast.unparse(node.value.values[0]) == ast.unparse(node.targets[0])
    ]
    own = {name for node in inner + filled for name in ast.walk(node)}
    names = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in own
    }
    chosen = [branch for node in ast.walk(tree) if isinstance(node, ast.IfExp) for branch in (node.body, node.orelse)]
    names |= {branch.id for branch in chosen if isinstance(branch, ast.Name)}
    said = " ".join(ast.unparse(call) for call in calls_in(tree) if name_of(call) == "print")
    return {name for name in names & set(parameters) if f"{name} = " not in said}


@together("source", SOURCES)
def test_no_parameter_is_overridden_silently(source):
    parameters = notebooks.defaults(source)
    assert not {name for code in code_cells(source, but=["parameters"]) for name in overridden(code, parameters)}


@together(
    ("code", "found"),
    [
        ("epsilon, rows = 0.5, []", {"epsilon"}),
        ("if smoke:\n    jobs = 1\n    print(f'profile smoke sets {jobs = }')", set()),
        ("if smoke:\n    jobs = 1\n    print('profile smoke sets epsilon = 1')", {"jobs"}),
        ("settings = {'jobs': 1 if smoke else jobs}", {"jobs"}),
        ("for epsilon in (1, 3):\n    show(epsilon)", {"epsilon"}),
        ("rows = [f(epsilon) for epsilon in (1, 3)]\njobs = jobs or 2\nsteps = 10 if smoke else None", set()),
    ],
)
def test_an_override_is_found(code, found):
    assert overridden(code, ("epsilon", "jobs")) == found


@together("source", SOURCES)
def test_papermill_tells_what_each_parameter_is(source, tmp_path):
    path = tmp_path / "notebook.ipynb"
    nbformat.write(jupytext.read(source), path)
    told = papermill.inspect_notebook(str(path))
    assert told.keys() == notebooks.defaults(source).keys()
    assert not [name for name, parameter in told.items() if not parameter["help"]]


def asked(code):
    """Name of the answer and code of its truth, of each call of ``check`` in a cell."""
    calls = [call for call in calls_in(ast.parse(code)) if name_of(call) == "check"]
    return [(ast.unparse(call.args[0]), ast.unparse(call.args[1].body)) for call in calls]


@together("source", SOURCES)
def test_an_exercise_asks_for_a_number_that_the_library_computes(source):
    cells = [cell for cell in jupytext.read(source).cells if cell.cell_type == "code"]
    solved = [cell for cell in cells if "solution" in cell.metadata.get("tags", [])]
    questions = [(cell.source, *pair) for cell in cells if cell not in solved for pair in asked(cell.source)]
    assert questions
    for code, name, truth in questions:
        assert code.startswith(f"{name} = None\n")
        assert any(isinstance(node, ast.Name) for node in ast.walk(ast.parse(truth))), f"shows its answer: {truth}"
    assert [pair for cell in solved for pair in asked(cell.source)] == [tuple(pair) for _, *pair in questions]


def test_there_is_one_way_to_say_what_is_to_be_seen():
    defined = [
        path
        for folder in ("hyfreedp", "notebooks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "what_to_see"
    ]
    assert [path.name for path in defined] == ["plots.py"]
