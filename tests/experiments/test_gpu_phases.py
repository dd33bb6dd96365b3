"""The commands that fill data/results/gpu are real, and those of docs/gpu.md."""

import re

import pytest
from pretrain import RECIPES

from hyfreedp.experiments.__main__ import main as experiments
from hyfreedp.experiments.benchmark import __main__ as benchmark
from hyfreedp.experiments.runs.methods import PAPER_GRID
from hyfreedp.experiments.store.paths import ROOT
from hyfreedp.experiments.tables.plan import SCALES, entries, searches

PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\| `((?:hyfreedp|tools/)[^`]+)` \|", PAGE, flags=re.MULTILINE)


class Reached(Exception):
    """The command was understood, and would now run."""


def test_one_claim_is_seventeen_runs():
    """As docs/gpu.md counts them: five that search, and three seeds of four rows."""
    wanted = list(entries(SCALES["claim"]))
    assert len(searches(wanted)) == 5 and len(wanted) == 12
    assert {spec.learning_rate for spec in searches(wanted)} == set(PAPER_GRID)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one(command, monkeypatch):
    def reached(*todo, device="accelerator", **settings):
        raise Reached(device)

    monkeypatch.setattr(benchmark, "measure", reached)
    monkeypatch.setattr("hyfreedp.experiments.tables.grid.run", reached)
    module, *arguments = command.split()
    if module == "tools/weights/pretrain.py":
        assert set(arguments) <= set(RECIPES)
    else:
        main = {"hyfreedp.experiments.benchmark": benchmark.main, "hyfreedp.experiments": experiments}[module]
        with pytest.raises(Reached, match="accelerator"):
            main(arguments)
