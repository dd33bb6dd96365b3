"""Committed figures and outputs: compared, and renewed on a clean tree only."""

import json
import shutil
import subprocess

import jupytext
import nbformat
import papermill
import pytest

from hyfreedp.experiments.__main__ import main
from hyfreedp.experiments.book.committed import compare, uncommitted
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.paths import ROOT

pytest_plugins = ["batch"]


def test_files_are_compared_byte_for_byte(tmp_path):
    for folder, names in (("theirs", ("same", "other")), ("ours", ("same", "other", "new"))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(folder if name == "other" else "0")
    found = compare(tmp_path / "theirs", tmp_path / "ours", ["same", "other", "new"])
    assert found == "1 of 2 files are the committed ones, byte for byte; different: other"


JUDGE = """
from hyfreedp.experiments.store.verdicts import Verdict, verdict
verdict("01_first", [Verdict("A", "reproduced", f"{epsilon:g}")], parameters={"profile": profile}, inputs=[])
"""


def git(folder, *arguments):
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def repository(project, workspace, monkeypatch):
    """A committed project of one notebook with a verdict, whose committed figures are old."""
    project.write("01_first", JUDGE)
    jupytext.write(jupytext.read(project.notebooks / "01_first.py"), project.notebooks / "01_first.ipynb")
    shutil.copy(ROOT / ".gitignore", workspace.root)
    workspace.figures.mkdir()
    for name in ("01_first.png", "01_first_verdict.csv"):
        (workspace.figures / name).write_bytes(b"old")
    git(workspace.root, "init")
    git(workspace.root, "add", ".")
    git(workspace.root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "all")
    monkeypatch.setenv("HYFREEDP_CELLS", str(workspace.cells))
    return workspace


@pytest.mark.whole
def test_a_notebook_run_by_itself_changes_nothing_that_is_committed(repository, tmp_path_factory, monkeypatch):
    notebook = repository.notebooks / "01_first.ipynb"
    monkeypatch.chdir(tmp_path_factory.mktemp("anywhere"))
    parameters = {"profile": "smoke", "epsilon": 1.0}
    papermill.execute_notebook(str(notebook), "out.ipynb", parameters=parameters, progress_bar=False)
    monkeypatch.chdir(repository.notebooks)
    papermill.execute_notebook("01_first.ipynb", "out.ipynb", progress_bar=False)
    assert not git(repository.root, "status", "--porcelain", "--untracked-files=all")
    for profile, epsilon in (("smoke", 1), ("laptop", 3)):  # neither is overwritten by the other
        told = (repository.output(profile) / "01_first_verdict.csv").read_text()
        assert told.endswith(f"reproduced,{epsilon},the paper's,\n")


@pytest.mark.whole
def test_outputs_are_renewed_from_committed_sources_only(repository, capsys):
    assert main(["update", "--only", "01"]) == 0
    twin = nbformat.read(repository.notebooks / "01_first.ipynb", as_version=4)
    sources = [cell.source for cell in jupytext.read(repository.notebooks / "01_first.py").cells]
    assert [cell.source for cell in twin.cells] == sources
    for name in ("01_first.png", "01_first.json", "01_first_verdict.csv"):
        assert (repository.figures / name).read_bytes() == (repository.output("laptop") / name).read_bytes()
    assert json.loads((repository.figures / "made_with.json").read_text()).keys() == {"01_first"}
    assert not uncommitted(), "outputs are no reason to refuse"
    (repository.notebooks / "02_new.py").write_text("")
    with (repository.notebooks / "01_first.py").open("a") as source:
        source.write("\n# more\n")
    with pytest.raises(SystemExit):
        main(["update"])
    assert "commit or stash these first" in capsys.readouterr().err
    assert sorted(uncommitted()) == ["notebooks/01_first.py", "notebooks/02_new.py"]


def test_without_a_repository_outputs_are_not_renewed(project, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", "/")
    with pytest.raises(RuntimeError, match="in a git repository only"):
        uncommitted()
    assert not plots.workspace().figures.exists()
