"""Committed records of runs: packed to the same bytes, checked, and some of them made again."""

import json
import tarfile
from dataclasses import replace

import numpy as np
import pytest

from hyfreedp.experiments.__main__ import main
from hyfreedp.experiments.runs import again
from hyfreedp.experiments.runs.cells import run_cells
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store import archive
from hyfreedp.experiments.store.paths import ROOT

pytest_plugins = ["batch"]

SHORT = Spec(method="constant", learning_rate=0.02, steps=3)


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The archive of three short runs that differ in their seed."""
    folder = tmp_path_factory.mktemp("records")
    run_cells([replace(SHORT, seed=seed) for seed in range(3)], folder / "cells")
    archive.pack(folder / "cells", folder / archive.NAME)
    return folder / archive.NAME


def test_the_same_runs_give_the_same_bytes_and_come_out_as_they_went_in(committed, tmp_path):
    files = archive.read(committed)
    assert len(files) == 6
    archive.unpack(files, tmp_path / "cells")
    (tmp_path / "cells" / "function-0123456789abcdef.csv").write_text("no run")
    assert archive.pack(tmp_path / "cells", tmp_path / "again.tar.xz") == 3
    assert (tmp_path / "again.tar.xz").read_bytes() == committed.read_bytes()


def test_no_damage_to_an_archive_goes_unnoticed(committed, tmp_path):
    content = committed.read_bytes()
    for place in range(0, len(content), 97):
        (tmp_path / "bad.tar.xz").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match="is damaged"):
            archive.read(tmp_path / "bad.tar.xz")
    (tmp_path / "bad.tar.xz").write_bytes(content[:-200])
    with pytest.raises(ValueError, match="is damaged"):
        archive.read(tmp_path / "bad.tar.xz")


@pytest.mark.parametrize("name", ["../0123456789abcdef.json", "0123456789abcdef.py", "link"])
def test_an_archive_with_anything_else_is_refused(tmp_path, name):
    with tarfile.open(tmp_path / "bad.tar.xz", "w:xz") as bad:
        member = tarfile.TarInfo(name if name != "link" else "0123456789abcdef.json")
        member.type = tarfile.SYMTYPE if name == "link" else tarfile.REGTYPE
        bad.addfile(member)
    with pytest.raises(ValueError, match="must hold runs only"):
        archive.read(tmp_path / "bad.tar.xz")


@pytest.mark.parametrize("change", ["day", "step", "accuracy", "far"])
def test_a_single_bit_is_not_called_equal_but_another_day_is(committed, tmp_path, change):
    files = archive.read(committed)
    for name, content in files.items():
        if change == "step" and name.endswith(".csv"):
            files[name] = content.replace(b"0.02", b"0.020000000000000004", 1)
        elif change != "step" and name.endswith(".json"):
            record = json.loads(content) | ({"date": "2026-01-01"} if change == "day" else {})
            if change != "day":
                record["accuracy"] = np.nextafter(record["accuracy"], 1) if change == "accuracy" else 40.0
            files[name] = json.dumps(record).encode()
    found = again.again(files, tmp_path / change)
    # Three accuracies have a spread of their own; of equal ones (far) it is zero.
    outcome = {"day": "equal", "far": "beyond"}.get(change, "as another seed")
    assert {one.outcome for one in found} == {outcome}
    assert change != "far" or ("beyond," in str(found[0]) and "4000.0 is recorded" in str(found[0]))


def test_the_committed_records_are_of_this_version():
    """Else ``make reproduce`` would train them all: make them again by ``reproduce --fresh`` and ``records``."""
    for path in sorted((ROOT / "data" / "results").glob(f"*/{archive.NAME}")):
        files = archive.read(path)
        records = {name[:16]: json.loads(text) for name, text in files.items() if name.endswith(".json")}
        specs = {key: Spec.from_fields(record["spec"]) for key, record in records.items()}
        stale = [key for key, spec in specs.items() if spec.key != key and path.parent.name == "laptop"]
        assert not stale and len(files) == 2 * len(records), f"{len(stale)} of {len(records)} are not"
        assert len(records) > {"laptop": 900}.get(path.parent.name, 0)


def test_a_batch_reads_committed_records_and_makes_some_again(committed, project, in_process, workspace, capsys):
    project.write("01_first", "len(list(cells.glob('*.json'))) == 3 or exit(1)")
    project.write("02_second")
    place = workspace.results / "smoke" / archive.NAME
    place.parent.mkdir(parents=True)
    place.write_bytes(committed.read_bytes())
    assert main(["reproduce", "--profile", "smoke"]) == 0
    out = capsys.readouterr().out
    line = "3 runs are committed records, 0 were trained here"
    assert line in out and line in (project.build / "smoke" / "report.html").read_text()
    assert out.count(": equal, ") == 3
    assert main(["reproduce", "--profile", "smoke", "--only", "01"]) == 0
    assert ": equal, " not in capsys.readouterr().out
    assert main(["reproduce", "--profile", "smoke", "--only", "02", "--fresh"]) == 0
    assert "0 runs are committed records" in capsys.readouterr().out
