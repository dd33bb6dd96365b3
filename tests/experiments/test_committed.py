"""Committed figures and outputs are renewed on a clean tree only."""

import json
import shutil
import subprocess

import jupytext
import nbformat
import pytest

from hyfreedp.experiments.__main__ import main
from hyfreedp.experiments.book.committed import uncommitted
from hyfreedp.experiments.store.paths import ROOT

pytest_plugins = ["batch"]


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
