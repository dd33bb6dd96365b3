"""The phases that fill data/results/gpu: their commands are real, they are resumed, and what is missing is said."""

import math
import signal
import sys
import time

import pandas as pd
import pytest
import torch
from cases import together

from hyfreedp.experiments.benchmark import __main__ as benchmark
from hyfreedp.experiments.book import gpu
from hyfreedp.experiments.book.gpu import PHASES, Phase
from hyfreedp.experiments.runs.pretrain import RECIPES
from hyfreedp.experiments.store.paths import ROOT
from hyfreedp.experiments.tables.plan import SCALES


class Reached(Exception):
    """The command was understood, and would now measure."""


@together("name", PHASES)
def test_the_command_of_a_phase_is_one(name, workspace, monkeypatch):
    flag, module, *arguments = PHASES[name].command
    assert flag == "-m"
    if module == "hyfreedp.experiments.benchmark":
        reached = []

        def measured(*todo, device, **settings):
            reached.append(device)
            raise Reached

        for function in ("measure", "measure_noise", "measure_learning"):
            monkeypatch.setattr(benchmark, function, measured)
        with pytest.raises(Reached):
            benchmark.main(arguments)
        assert reached == ["accelerator"]
    elif module == "hyfreedp.experiments.runs.pretrain":
        assert arguments == ["tiny_imagenet"] and "tiny_imagenet" in RECIPES
        assert {f"data/checkpoints/tiny_imagenet{end}" for end in (".json", ".safetensors")} == set(PHASES[name].writes)
    elif name == "grid":
        assert arguments == ["grid", "--profile", "gpu"]
        tasks = {learner.task for learner in SCALES["gpu"].learners}
        assert tasks == set(PHASES[name].data)
    else:
        assert name == "tests" and (ROOT / "tests" / "gpu").is_dir()


def test_a_dry_run_lists_everything_and_starts_nothing(workspace, monkeypatch, capsys):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.delenv("HYFREEDP_DATA", raising=False)
    monkeypatch.setattr(gpu, "_limited", None)
    assert gpu.main(["--dry-run"]) == 0
    out = capsys.readouterr().out
    for name, phase in PHASES.items():
        assert f"{name}: {phase.what}" in out and " ".join(phase.command) in out and ", ".join(phase.writes) in out
    assert out.count("needs an accelerator") == len(PHASES)
    assert "needs an accelerator, HYFREEDP_DATA with cifar10 and gtsrb, phase pretrain" in out
    assert gpu.main(["noise"]) == 1 and "noise: needs an accelerator" in capsys.readouterr().out


def test_packages_are_wanted_in_the_versions_of_the_project(monkeypatch):
    known = {"timm": "1.0.9", "matplotlib": "3.7.0", "torch": "2.11.0a0+git", "transformers": None}
    version = gpu.importlib.metadata.version

    def found(name):
        if known.get(name, "") is None:
            raise gpu.importlib.metadata.PackageNotFoundError(name)
        return known.get(name) or version(name)

    monkeypatch.setattr(gpu.importlib.metadata, "version", found)
    assert gpu._lacking(("timm", "matplotlib")) == ["package matplotlib>=3.8 (3.7.0 is here)"]
    assert gpu._lacking(("timm", "transformers")) == ["package transformers"]
    known["dp-accounting"] = None
    assert gpu._lacking(()) == ["package dp-accounting"]

    def not_installed(name):
        raise gpu.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gpu.importlib.metadata, "requires", not_installed)
    (lack,) = gpu._lacking(("timm",))
    assert "hyfreedp itself" in lack and "--no-deps" in lack


def test_bad_arguments_are_refused(capsys):
    for arguments, message in ((["nothing"], "PHASE must be among tests, .* got nothing"), (["--minutes", "0"], "0.0")):
        with pytest.raises(SystemExit, match="2"):
            gpu.main(arguments)
        assert pd.Series([capsys.readouterr().err]).str.contains(message).all()


SLICED = """
import pathlib, time
path = pathlib.Path("count")
count = int(path.read_text()) if path.exists() else 0
path.write_text(str(count + 1))
if count < 2:
    time.sleep(60)
"""


@pytest.mark.whole
def test_phases_are_done_once_and_long_ones_in_slices(workspace, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "missing", lambda phase: [])
    quick = Phase("quick", ("-c", "open('made', 'a').write('x')"), ("made",))
    sliced = Phase("long", ("-c", SLICED), ("count",), sliced=True)
    phases = {"quick": quick, "long": sliced}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert gpu.run(phases, 1.5 / 60) == 75
    assert "the same command goes on from here" in capsys.readouterr().out
    assert gpu.run(phases, 1.5 / 60) == 75
    assert gpu.run(phases, 1.0) == gpu.run(phases, 1.0) == 0
    assert (workspace.root / "made").read_text() == "x" and (workspace.root / "count").read_text() == "3"


def test_what_fails_or_takes_too_long_is_said_and_the_rest_goes_on(workspace, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "missing", lambda phase: [])
    phases = {
        "bad": Phase("bad", ("-c", "raise SystemExit(3)"), ()),
        "slow": Phase("slow", ("-c", "import time; time.sleep(60)"), ()),
        "good": Phase("good", ("-c", ""), ()),
    }
    assert gpu.run(phases, 1.5 / 60) == 1
    out = capsys.readouterr().out
    assert "bad: failed: ended with status 3" in out and "slow: failed: did not end within" in out
    assert [path.name for path in (workspace.build / "gpu").iterdir()] == ["good.done"]


def test_a_command_is_interrupted_also_where_a_script_started_it_in_its_background(tmp_path):
    """There SIGINT is ignored, and whether it is passes on to what is started."""
    before, started = signal.signal(signal.SIGINT, signal.SIG_IGN), time.monotonic()
    try:
        assert gpu._limited((sys.executable, "-c", "import time; time.sleep(60)"), tmp_path, 0.5) is None
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < gpu._ENDING


def test_rows_go_into_a_record_in_place_of_those_of_the_same_case():
    record = pd.DataFrame(
        {
            "model": ["a", "a", "b"],
            "contender": ["plain", "ours", "plain"],
            "varied": [math.nan] * 3,  # an empty column, as it is read back
            "seconds": [1.0, 2.0, 3.0],
        }
    )
    rows = pd.DataFrame({"model": ["a", "c"], "contender": ["ours", "ours"], "varied": ["", ""], "seconds": [5.0, 6.0]})
    found = benchmark.replaced(record, rows)
    assert list(zip(found.model, found.contender, found.seconds, strict=True)) == [
        ("a", "plain", 1.0),
        ("b", "plain", 3.0),
        ("a", "ours", 5.0),
        ("c", "ours", 6.0),
    ]


def test_the_page_lists_every_phase():
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    for name, phase in PHASES.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        assert all(path in row for path in phase.writes) and all(data in row for data in phase.data)
