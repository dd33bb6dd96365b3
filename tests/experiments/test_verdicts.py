"""Verdicts: the rule by which a claim is judged, how they are written down, and the board."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hyfreedp.experiments.store import verdicts
from hyfreedp.experiments.store.verdicts import Verdict, scoreboard, verdict

pytestmark = pytest.mark.usefixtures("figure_style")


def test_they_are_written_down_and_collected(workspace, capsys):
    made = [
        Verdict("A", "reproduced", "one in two"),
        Verdict('"B", b', "fails here", "3.1 > 3"),
        Verdict("C", "not shown", "one", "ours"),
    ]
    verdict("01_second", made, parameters={"profile": "smoke"}, inputs=["cell 0"])
    described = json.loads((workspace.output("smoke") / "01_second_verdict.json").read_text())
    assert described["summary"] == ["A: reproduced (one in two)", '"B", b: fails here (3.1 > 3)', "C: not shown (one)"]
    assert "**reproduced**. One in two." in capsys.readouterr().out or described["table"] == "01_second_verdict"
    assert len(scoreboard(["../notebooks/01_second.ipynb"], "ours").splitlines()) == 2, (
        "a verdict that is not committed"
    )
    workspace.output("smoke").rename(workspace.figures)
    board = scoreboard(["../notebooks/00_first.ipynb", "../notebooks/01_second.ipynb"], "the paper's").splitlines()
    assert board[2:] == [
        "| [01](../notebooks/01_second.ipynb) | A | **reproduced** | one in two |",
        '|  | "B", b | **fails here** | 3.1 > 3 |',
    ]
    apart = scoreboard(["../notebooks/00_first.ipynb", "../notebooks/01_second.ipynb"], "ours").splitlines()
    assert apart[2:] == ["| [01](../notebooks/01_second.ipynb) | C | **not shown** | one |"]


@pytest.mark.parametrize(
    ("values", "mark", "outcome"),
    [
        ([0.1, 0.2, 0.3], 0.0, "not shown"),  # 0.2 +- 4.3 * 0.058: from -0.05
        ([0.1, 0.2, 0.3], -0.1, "reproduced"),
        ([0.1, 0.2, 0.3], 0.5, "fails here"),
        ([0.1], 0.0, "not shown"),
    ],
)
def test_a_claim_about_a_mean_is_judged_by_its_whole_interval(values, mark, outcome):
    found, words = verdicts.over_places(values, mark)
    assert found == outcome and words.startswith(f"mean of {len(values)} place")
    assert ("4 places would decide" in words) == (len(values) > 1 and outcome == "not shown")


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.floats(-5, 5))
def test_so_many_places_decide_as_are_said_to(values, mark):
    needed = verdicts.would_decide(values, mark)
    if needed is not None:
        spread = np.std(values, ddof=1)
        halves = [stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n) for n in (needed, max(2, needed - 1))]
        assert halves[0] < abs(np.mean(values) - mark) and (needed == 2 or abs(np.mean(values) - mark) <= halves[1])
