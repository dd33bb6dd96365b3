"""Cells and grids survive what happens to long computations: kills, failures, repetitions, company."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from cases import together

from hyfreedp.experiments.runs import __main__ as cell
from hyfreedp.experiments.runs import cells as run
from hyfreedp.experiments.runs.cells import read_cell, reader, run_cell, run_cells
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.workers import in_workers
from hyfreedp.experiments.tables import grid
from hyfreedp.experiments.tables import plan as comparison
from hyfreedp.experiments.tables.plan import Learner, Scale

ROOT = Path(__file__).resolve().parents[2]
SPEC = Spec(method="robust", epsilon=8.0, steps=60)
SCALE = Scale((Learner("digits", "mlp", "full", 5),), epsilons=(3.0,), seeds=1, rows=("vanilla", "reference"))
SEARCHES = len(comparison.searches(comparison.entries(SCALE)))
ALL = SEARCHES + 2
# As the command, but for the time between checkpoints.
COMMAND = (
    "import sys; from hyfreedp.experiments.runs import __main__, train; "
    "train.CHECKPOINT_SECONDS = 0.0; sys.exit(__main__.main())"
)


@pytest.fixture
def small(monkeypatch):
    """Profile smoke with one search, the run that it makes known, and one that needs none."""
    monkeypatch.setitem(comparison.SCALES, "smoke", SCALE)


def start(spec, cells, folder):
    path = folder / "spec.json"
    path.write_text(spec.to_json())
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", COMMAND, str(path), "--cells", str(cells)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def without_seconds(record):
    return {name: value for name, value in record.items() if name != "seconds"}


# ---- one cell -------------------------------------------------------------------------------------------------------


def kill_at_random(spec, folder, cells, chance):
    """Start the command, and kill it after its next checkpoint; False if it ended by itself."""
    checkpoint = cells / f"{spec.key}.ckpt"
    before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
    with start(spec, cells, folder) as process:
        while process.poll() is None and not (checkpoint.exists() and checkpoint.stat().st_mtime_ns > before):
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.1))
        process.kill()
    return process.returncode == -signal.SIGKILL


def check_killed(kills, tmp_path):
    """After as many kills two processes at once: one trains the rest, and all files are those of an undisturbed run."""
    run_cell(SPEC, tmp_path / "whole")
    chance, cells = random.Random(3), tmp_path / "killed"
    killed = [kill_at_random(SPEC, tmp_path, cells, chance) for _ in range(kills)]
    assert killed[0], "the process ended before it was killed"
    processes = [start(SPEC, cells, tmp_path) for _ in range(2)]
    lines = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    # Both print the record of the one that trained, its seconds included.
    assert len({line.removeprefix("already there: ") for line in lines}) == 1
    assert without_seconds(read_cell(SPEC, cells)) == without_seconds(read_cell(SPEC, tmp_path / "whole"))
    assert (cells / f"{SPEC.key}.csv").read_bytes() == (tmp_path / "whole" / f"{SPEC.key}.csv").read_bytes()
    assert sorted(path.suffix for path in cells.iterdir() if path.suffix != ".lock") == [".csv", ".json"]


@pytest.mark.whole
def test_a_cell_killed_at_a_random_moment_ends_in_the_same_files(tmp_path):
    check_killed(1, tmp_path)


@pytest.mark.slow
def test_a_cell_killed_again_and_again_ends_in_the_same_files(tmp_path):
    check_killed(8, tmp_path)


def test_a_finished_cell_is_left_as_it_is(tmp_path, capsys):
    (tmp_path / "spec.json").write_text('{"task": "digits", "method": "linear", "learning_rate": 0.02, "steps": 5}')
    words = [str(tmp_path / "spec.json"), "--cells", str(tmp_path / "cells")]
    assert cell.main(words) == 0
    stamps = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    first = capsys.readouterr().out
    assert cell.main(words) == 0
    assert capsys.readouterr().out == f"already there: {first}"
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()} == stamps


@together(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "the spec is not JSON"),
        ("[]", "a spec must be a JSON object, got list"),
        ('{"task": "digits"}', "a spec must name its method"),
        ('{"task": "digits", "method": "robust", "epsilom": 1}', "no field 'epsilom'.*did you mean 'epsilon'"),
        ('{"task": "digit", "method": "robust"}', "task must be one of .* got 'digit'"),
        ('{"task": "cifar10", "method": "robust", "epsilon": -1}', "epsilon must be a positive number, got -1"),
        ('{"task": "digits", "method": "robust", "epsilon": NaN}', "epsilon must be a positive number, got nan"),
    ],
)
def test_a_bad_spec_is_one_sentence_and_status_2(text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cell, "run_cell", None)  # would fail if called: nothing is read or trained
    path = tmp_path / "spec.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        cell.main([str(path), "--cells", str(tmp_path)])
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(message, error), error


# ---- the grid -------------------------------------------------------------------------------------------------------


def test_the_written_table_is_that_of_the_records(small, tmp_path, capsys):
    assert grid.run("smoke", tmp_path / "cells", tmp_path / "results") == 0
    written = pd.read_csv(tmp_path / "results" / "smoke" / grid.TABLE)
    expected = comparison.table(SCALE, reader(tmp_path / "cells"))
    pd.testing.assert_frame_equal(written[list(expected.columns)], expected, check_dtype=False)
    record = read_cell(comparison.searches(comparison.entries(SCALE))[0], tmp_path / "cells")
    assert set(written.version_torch) == {record["environment"]["torch"]}
    assert capsys.readouterr().out.endswith("2 numbers\n")
    stamps = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert grid.run("smoke", tmp_path / "cells", tmp_path / "results") == 0
    assert f"0 runs trained, {ALL} were there, 0 failed" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()} == stamps


def test_committed_numbers_are_trained_again_and_compared(small, tmp_path, monkeypatch, capsys):
    assert grid.run("smoke", tmp_path / "cells", tmp_path / "results") == 0
    capsys.readouterr()
    assert grid.again("smoke", tmp_path / "again", tmp_path / "results", number=9) == 0
    equal = capsys.readouterr().out
    assert equal.count(": equal, ") == 2 and equal.endswith("2 of 2 records made again: equal\n")
    table = tmp_path / "results" / "smoke" / grid.TABLE
    rows = pd.read_csv(table, converters={"accuracy": float})
    rows.assign(accuracy=np.nextafter(rows.accuracy, 1)).to_csv(table, index=False)
    assert grid.again("smoke", tmp_path / "again", tmp_path / "results", number=1) == 0
    assert capsys.readouterr().out.endswith("1 of 2 records made again: 1 unknown\n"), "of one seed no spread is known"
    monkeypatch.setattr(grid, "spreads_over_seeds", lambda _: {(): 0.1})
    assert grid.again("smoke", tmp_path / "again", tmp_path / "results", number=1) == 0
    assert capsys.readouterr().out.endswith("1 of 2 records made again: 1 as another seed\n")
    rows.assign(accuracy=[0.1, 0.1]).to_csv(table, index=False)
    assert grid.again("smoke", tmp_path / "again", tmp_path / "results", number=1) == 1
    rows.assign(key="0" * 16).to_csv(table, index=False)
    assert grid.again("smoke", tmp_path / "again", tmp_path / "results", number=1) == 0
    assert capsys.readouterr().out.endswith("0 of 0 records made again: \n"), "of another version"


def test_an_interrupted_grid_runs_exactly_what_is_missing(small, tmp_path, monkeypatch, capsys):
    trained = []

    def interrupted(spec, *, folder):
        if len(trained) == 2:
            trained.append("interrupt")
            raise KeyboardInterrupt
        trained.append(spec)
        return run_cell(spec, folder)

    monkeypatch.setattr(run, "run_cell", interrupted)
    assert grid.run("smoke", tmp_path / "cells", tmp_path / "results") == 130
    assert not (tmp_path / "results").exists()
    assert grid.run("smoke", tmp_path / "cells", tmp_path / "results") == 0
    trained.remove("interrupt")
    assert len(trained) == len(set(trained)) == ALL


def test_a_failed_cell_stops_no_other_and_is_named(small, tmp_path, monkeypatch, capsys):
    bad = comparison.searches(comparison.entries(SCALE))[2]

    def fails(spec, *, folder):
        if spec == bad:
            raise ZeroDivisionError("on purpose")
        return run_cell(spec, folder)

    monkeypatch.setattr(run, "run_cell", fails)
    assert grid.run("smoke", tmp_path / "cells", tmp_path / "results") == 1
    out = capsys.readouterr().out
    assert f"failed: {bad.key} (digits, mlp, full, vanilla, validation, epsilon 3, rate " in out
    assert "ZeroDivisionError: on purpose" in out and f"{SEARCHES} runs trained, 0 were there, 1 failed" in out
    assert "2 numbers, 1 of them still missing" in out
    with pytest.raises(ZeroDivisionError):
        run_cells(comparison.searches(comparison.entries(SCALE)), tmp_path / "others")


def test_a_table_with_fewer_numbers_replaces_none_with_more(small, tmp_path):
    path = tmp_path / "smoke" / grid.TABLE
    path.parent.mkdir()
    pd.DataFrame({"accuracy": [0.5, 0.6]}).to_csv(path, index=False)
    run_cell(comparison.finals(comparison.entries(SCALE), lambda spec: None)[0], tmp_path / "cells")
    assert "is left as it was" in grid.write_table("smoke", tmp_path / "cells", tmp_path)
    assert pd.read_csv(path).accuracy.tolist() == [0.5, 0.6]


def test_the_listing_of_a_half_finished_grid(small, tmp_path):
    runs = comparison.searches(comparison.entries(SCALE))
    run_cells(runs[:3], tmp_path)
    lines = grid.listing("smoke", tmp_path).splitlines()
    listed = {line.split()[-2]: (line.split()[0], line.split()[-1]) for line in lines[1 : SEARCHES + 2]}
    assert [listed[spec.key] for spec in runs] == [("searches", "done")] * 3 + [("searches", "missing")] * (
        SEARCHES - 3
    )
    assert lines[-1].startswith(f"3 of {SEARCHES + 1} known runs done, and at most 1 not known yet")


def test_specs_for_workflow_managers_are_those_of_the_plan(small, tmp_path):
    grid.write_specs("smoke", tmp_path / "cells", tmp_path / "specs")
    keys = (tmp_path / "specs" / "searches").read_text().split()
    specs = [Spec.from_json((tmp_path / "specs" / f"{key}.json").read_text()) for key in keys]
    assert specs == comparison.searches(comparison.entries(SCALE))
    stamp = (tmp_path / "specs" / f"{keys[0]}.json").stat().st_mtime_ns
    grid.write_specs("smoke", tmp_path / "cells", tmp_path / "specs")
    assert (tmp_path / "specs" / f"{keys[0]}.json").stat().st_mtime_ns == stamp


def test_the_list_of_tested_runs_is_whole_or_absent(small, tmp_path):
    specs = tmp_path / "specs"
    specs.mkdir()
    (specs / "finals").write_text("of another time\n")
    grid.write_specs("smoke", tmp_path / "cells", specs)
    assert not (specs / "finals").exists()
    run_cells(comparison.searches(comparison.entries(SCALE)), tmp_path / "cells")
    grid.write_specs("smoke", tmp_path / "cells", specs)
    expected = comparison.finals(comparison.entries(SCALE), reader(tmp_path / "cells"))
    assert (specs / "finals").read_text().split() == [spec.key for spec in expected] and len(expected) == 2


# ---- worker processes -----------------------------------------------------------------------------------------------


def square(number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 3:
        raise ValueError("three")
    return number**2


@pytest.mark.whole
def test_a_killed_worker_costs_its_own_item_only():
    ended = dict(in_workers(get_context("spawn"), square, range(7), 2))
    assert {n: r for n, r in ended.items() if not isinstance(r, Exception)} == {n: n**2 for n in (0, 1, 4, 5, 6)}
    assert str(ended[2]) == "its process died with exit code -9"
    assert isinstance(ended[3], ValueError) and str(ended[3]) == "three"


SHOWS_PROGRESS = """
from multiprocessing import get_context
from tqdm import tqdm
from hyfreedp.experiments.runs.workers import in_workers

def count(number):
    return sum(1 for _ in tqdm(range(number)))

if __name__ == "__main__":
    assert sorted(in_workers(get_context("spawn"), count, [3, 4], 2)) == [(3, 3), (4, 4)]
"""


@pytest.mark.whole
def test_workers_that_show_progress_leak_nothing(tmp_path):
    """A semaphore that nobody unlinked would be named in a warning at the end."""
    script = tmp_path / "shows_progress.py"
    script.write_text(SHOWS_PROGRESS)
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "4/4" in done.stderr and "leaked" not in done.stderr


# ---- on a cluster ---------------------------------------------------------------------------------------------------

SUBMIT = """#!/bin/sh
echo "$1" >> submitted
sh "$1" > /dev/null 2>&1 < /dev/null &
echo $!
"""
# What every Python process of the workflow does first: profile smoke becomes SCALE.
SITE = f"""import sys
if any("hyfreedp" in word for word in sys.orig_argv):
    from hyfreedp.experiments.tables import plan as comparison
    from hyfreedp.experiments.tables.plan import Learner, Scale
    comparison.SCALES["smoke"] = {SCALE!r}
"""


@pytest.mark.slow
def test_a_killed_workflow_submits_exactly_what_is_missing(tmp_path):
    pytest.importorskip("snakemake_executor_plugin_cluster_generic", reason="needs the plugin cluster-generic")
    submit, submitted, cells = tmp_path / "submit.sh", tmp_path / "submitted", tmp_path / "data" / "cells"
    submit.write_text(SUBMIT)
    submit.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    words = ["-m", "snakemake", "-s", str(ROOT / "workflow" / "Snakefile"), "--jobs", "2", "--config", "profile=smoke"]
    words += ["--executor", "cluster-generic", "--cluster-generic-submit-cmd", str(submit)]
    variables = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HYFREEDP_ROOT": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }

    def workflow():
        return subprocess.Popen(
            [sys.executable, *words], cwd=tmp_path, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT
        )

    def jobs():
        return len(submitted.read_text().splitlines()) if submitted.exists() else 0

    with (tmp_path / "log").open("w") as log:
        with workflow() as process:
            while len(list(cells.glob("*.json"))) < 3 and process.poll() is None:
                time.sleep(0.1)
            process.kill()
        while len(list(cells.glob("*.json"))) < jobs():  # what was submitted still ends
            time.sleep(0.1)
        first = jobs()
        # With their seconds, which no second training would repeat. (Snakemake touches them when a job has ended.)
        records = {path: path.read_text() for path in cells.glob("*.json")}
        assert 3 <= first < ALL
        for _ in range(2):  # the second time nothing is missing
            assert workflow().wait() == 0, (tmp_path / "log").read_text()
            assert jobs() == ALL
    assert {path: path.read_text() for path in records} == records
    assert pd.read_csv(tmp_path / "data" / "results" / "smoke" / grid.TABLE).accuracy.notna().all()
