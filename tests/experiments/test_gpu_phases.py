"""The commands that fill data/results/gpu are real, and those of docs/gpu.md."""

import re

import pytest
from cases import together

from hyfreedp.experiments.__main__ import main as experiments
from hyfreedp.experiments.benchmark import __main__ as benchmark
from hyfreedp.experiments.runs.pretrain import RECIPES
from hyfreedp.experiments.store.paths import ROOT

PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\| `(hyfreedp[^`]+)` \|", PAGE, flags=re.MULTILINE)


class Reached(Exception):
    """The command was understood, and would now run."""


def test_make_runs_the_commands_of_the_page():
    target = re.search(r"^gpu:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [line.split(" -m ")[1] for line in target.group(1).splitlines()] == COMMANDS


@together("command", COMMANDS)
def test_a_command_is_one(command, monkeypatch):
    def reached(*todo, device="accelerator", **settings):
        raise Reached(device)

    monkeypatch.setattr(benchmark, "measure", reached)
    monkeypatch.setattr("hyfreedp.experiments.tables.grid.run", reached)
    module, *arguments = command.split()
    if module == "hyfreedp.experiments.runs.pretrain":
        assert set(arguments) <= set(RECIPES)
    else:
        main = {"hyfreedp.experiments.benchmark": benchmark.main, "hyfreedp.experiments": experiments}[module]
        with pytest.raises(Reached, match="accelerator"):
            main(arguments)
