"""Every notebook runs to its end in profile smoke, on the machine's accelerator."""

import pytest

from hyfreedp.experiments.__main__ import main
from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.store.paths import ROOT

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("source", notebooks.sources(), ids=lambda source: source.stem)
def test_a_notebook_runs(source, workspace, monkeypatch, capsys):
    for name in ("notebooks", "data"):
        (workspace.root / name).symlink_to(ROOT / name)
    monkeypatch.setenv("HYFREEDP_CELLS", str(workspace.root / "cells"))
    monkeypatch.chdir(workspace.root)
    status = main(["reproduce", "--profile", "smoke", "--only", source.stem])
    assert status == 0, capsys.readouterr().out
