"""Notebooks: source and executed twin in step, no errors, runnable in the smoke profile, typos refused."""

import json

import jupytext
import nbformat
import papermill
import pytest

from hyfreedp.experiments import notebooks
from hyfreedp.experiments.paths import FIGURES, ROOT

SOURCES = notebooks.sources()
ids = [source.stem for source in SOURCES]


def test_there_are_notebooks_and_every_one_has_its_twin():
    assert SOURCES
    assert {path.stem for path in SOURCES} == {path.stem for path in notebooks.NOTEBOOKS.glob("*.ipynb")}


@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_the_executed_notebook_is_that_of_the_source(source):
    twin = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    cells = [(cell.cell_type, cell.source) for cell in twin.cells if "injected-parameters" not in cell.metadata.tags]
    assert cells == [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells]
    code = [cell for cell in twin.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code), "not executed to the end"
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]
    assert str(ROOT) not in json.dumps(twin), "names a path of the machine it ran on"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Figures and cells of the test go to a temporary folder; the kernel inherits the environment."""
    monkeypatch.setenv("HYFREEDP_FIGURES", str(tmp_path / "figures"))
    monkeypatch.setenv("HYFREEDP_CELLS", str(tmp_path / "cells"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_smoke_profile_makes_every_figure(source, elsewhere):
    notebooks.execute(source, elsewhere / "out.ipynb", {"profile": "smoke", "seeds": 1})
    made = {path.name for path in (elsewhere / "figures").iterdir()}
    assert made == {path.name for path in FIGURES.glob(f"{source.stem}*")}


def test_a_mistyped_parameter_raises_under_plain_papermill(elsewhere):
    with pytest.raises(papermill.PapermillExecutionError, match="unknown parameter 'epsilonn'"):
        papermill.execute_notebook(
            str(SOURCES[0].with_suffix(".ipynb")), "out.ipynb", parameters={"epsilonn": 1.0}, progress_bar=False
        )
