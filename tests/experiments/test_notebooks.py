"""Notebooks: source and twin in step, no errors, every figure and a report in the smoke profile, typos refused."""

import json
import re

import jupytext
import matplotlib.image
import nbformat
import pytest

from hyfreedp.experiments.__main__ import main
from hyfreedp.experiments.book import exercises, notebooks
from hyfreedp.experiments.store.paths import FIGURES, ROOT, workspace

SOURCES = notebooks.sources()
ids = [source.stem for source in SOURCES]


def test_there_are_notebooks_and_every_one_has_its_twin():
    assert SOURCES
    found = workspace().notebooks.rglob("[0-9][0-9]_*.ipynb")
    twins = {path for path in found if "." not in path.stem}  # nbconvert's are somebody's own
    assert {path for one in SOURCES for path in (one.with_suffix(".ipynb"), notebooks.solutions(one))} == twins


@pytest.mark.parametrize("source", SOURCES)
def test_the_executed_notebook_is_that_of_the_source(source):
    student = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    solved = nbformat.read(notebooks.solutions(source), as_version=4)
    of_source = jupytext.read(source)
    assert cells_of(student) == cells_of(exercises.without_solutions(of_source))
    assert cells_of(solved) == cells_of(exercises.with_solutions(of_source)) != cells_of(student)
    for copy in (student, solved):
        code = [cell for cell in copy.cells if cell.cell_type == "code"]
        assert all(cell.execution_count for cell in code), "not executed to the end"
        assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]
        assert str(ROOT) not in json.dumps(copy), "names a path of the machine it ran on"


def cells_of(notebook):
    added = {"injected-parameters", notebooks.LINKS}
    return [(cell.cell_type, cell.source) for cell in notebook.cells if not added & set(cell.metadata.get("tags", []))]


@pytest.mark.parametrize("source", SOURCES)
def test_students_have_answers_to_give_and_teachers_the_right_ones(source):
    said = {}
    for name, path in (("student", source.with_suffix(".ipynb")), ("teacher", notebooks.solutions(source))):
        cells = nbformat.read(path, as_version=4).cells
        code = [cell for cell in cells if cell.cell_type == "code"]
        asked = [cell for cell in code if re.search(r"^check\(", cell.source, re.MULTILINE)]
        said[name] = [re.sub(r"\W*(\w+ \w+|Right).*", r"\1", cell.outputs[-1].data["text/markdown"]) for cell in asked]
    assert said["student"] and set(said["student"]) == {"No answer"}
    assert sorted(said["teacher"]) == sorted([*said["student"], *["Right"] * len(said["student"])])


@pytest.mark.parametrize("source", SOURCES)
def test_parameters_are_plain_checked_and_know_every_profile(source):
    defaults = notebooks.defaults(source)
    assert defaults["profile"] == "laptop"
    # papermill passes these unchanged; a tuple would arrive as a string
    assert {type(value) for value in defaults.values()} <= {str, int, float, bool, list}
    parameters, check = [cell.source for cell in jupytext.read(source).cells if cell.cell_type == "code"][:2]
    namespace = {}  # of a kernel in which cells run again
    for profile in notebooks.PROFILES:
        exec(f"{parameters}\nprofile = {profile!r}\n{check}\nlater = 7", namespace)
    numbers = dict.fromkeys((name for name, value in defaults.items() if type(value) in (int, float)), -1)
    for name, wrong in {"profile": "lapto", **numbers}.items():
        with pytest.raises(ValueError, match=f"parameter {name}.* got {wrong!r}"):
            exec(f"{parameters}\n{name} = {wrong!r}\n{check}", {})


@pytest.fixture
def elsewhere(workspace, monkeypatch):
    """All that a batch writes goes to a temporary folder, which is the working directory too; it reads our data."""
    for name in ("notebooks", "data"):
        (workspace.root / name).symlink_to(ROOT / name)
    monkeypatch.setenv("HYFREEDP_CELLS", str(workspace.root / "cells"))
    monkeypatch.chdir(workspace.root)
    return workspace


@pytest.mark.whole
@pytest.mark.gpu
@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_smoke_profile_makes_every_figure_and_reports_it(source, elsewhere, capsys):
    few = [f"{name}=1" for name in notebooks.defaults(source) if name in ("seeds", "rounds")]
    status = main(["reproduce", "--profile", "smoke", "--only", source.stem, *(["--set", *few] if few else [])])
    assert status == 0, capsys.readouterr().out
    assert not elsewhere.figures.exists(), "a notebook writes among the committed figures"
    figures = elsewhere.output("smoke")
    committed = {path.name for path in FIGURES.glob(f"{source.stem}*")}
    # What is drawn from records of long runs alone: profile smoke reads some of them, and has no part in any.
    of_records = {name for name in committed if re.search("_desktop|dynamics_real|_(e2e|control|peers)[.]", name)}
    assert {path.name for path in figures.iterdir()} - of_records == committed - of_records
    for path in figures.glob("*.png"):
        pixels = matplotlib.image.imread(path)
        assert min(pixels.shape[:2]) > 200 and pixels[..., :3].std() > 0.03, f"{path.name} is nearly empty"
    page = (elsewhere.build / "smoke" / "report.html").read_text(encoding="utf-8")
    for path in (path for path in figures.glob("*.json") if path.name not in of_records):
        made = json.loads(path.read_text(encoding="utf-8"))
        assert made["shows"] and made["parameters"], path.name
        assert made["parameters"]["profile"] == "smoke"
        for line in (made["shows"], made["claim"], *made["summary"]):
            assert not re.search(r"\b(nan|None)\b", line), f"{path.name}: {line}"
        assert f'<h3 id="{path.stem}">' in page
