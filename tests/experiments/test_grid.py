"""Cells and grids survive what happens to long computations: kills and repetitions."""

import pandas as pd
import pytest

from hyfreedp.experiments.runs import cells as run
from hyfreedp.experiments.runs.cells import reader, run_cell
from hyfreedp.experiments.tables import grid
from hyfreedp.experiments.tables import plan as comparison
from hyfreedp.experiments.tables.plan import Learner, Scale

SCALE = Scale((Learner("digits", "mlp", "full", 5),), epsilons=(1.0,), seeds=1, rows=("vanilla", "hyfreedp_robust"))
SEARCHES = len(comparison.searches(comparison.entries(SCALE)))
ALL = SEARCHES + 2


@pytest.fixture
def small(monkeypatch):
    """Profile smoke with one search, the run that it makes known, and one that needs none."""
    monkeypatch.setitem(comparison.SCALES, "smoke", SCALE)


def test_the_written_table_is_that_of_the_records(small, tmp_path, capsys):
    assert grid.run("smoke", tmp_path / "cells", tmp_path / "results") == 0
    written = pd.read_csv(tmp_path / "results" / "smoke" / comparison.TABLE)
    expected = comparison.table(SCALE, reader(tmp_path / "cells"))
    pd.testing.assert_frame_equal(written[list(expected.columns)], expected, check_dtype=False)
    record = reader(tmp_path / "cells")(comparison.searches(comparison.entries(SCALE))[0])
    assert set(written.version_torch) == {record["environment"]["torch"]}
    assert capsys.readouterr().out.endswith("2 numbers\n")
    stamps = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert grid.run("smoke", tmp_path / "cells", tmp_path / "results") == 0
    assert f"0 runs trained, {ALL} were there, 0 failed" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()} == stamps
    files = [tmp_path / "results" / "smoke" / name for name in (comparison.TABLE, comparison.RATES)]
    before = [path.read_bytes() for path in files]
    (tmp_path / "cells" / f"{expected.key[1]}.json").unlink()
    grid.write_table("smoke", tmp_path / "cells", tmp_path / "results")
    assert [path.read_bytes() for path in files] == before, "a number whose run is not at hand stays"


def test_an_interrupted_grid_runs_exactly_what_is_missing(small, tmp_path, monkeypatch, capsys):
    trained = []

    def interrupted(spec, folder):
        if len(trained) == 2:
            trained.append("interrupt")
            raise KeyboardInterrupt
        trained.append(spec)
        return run_cell(spec, folder)

    monkeypatch.setattr(run, "run_cell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grid.run("smoke", tmp_path / "cells", tmp_path / "results")
    assert not (tmp_path / "results").exists()
    assert grid.run("smoke", tmp_path / "cells", tmp_path / "results") == 0
    trained.remove("interrupt")
    assert len(trained) == len(set(trained)) == ALL
