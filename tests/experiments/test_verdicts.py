"""Verdicts follow from numbers, are written down with them, and are collected for the front page."""

import json

import pandas as pd

from hyfreedp.experiments.store.verdicts import Verdict, scoreboard, verdict
from hyfreedp.experiments.tables import first_look


def outcomes(found):
    return [one.outcome for one in found]


def test_they_are_written_down_and_collected(workspace, capsys):
    made = [Verdict("A", "reproduced", "one in two"), Verdict('"B", b', "contradicted", "3.1 > 3")]
    verdict("01_second", made, parameters={"profile": "smoke"}, inputs=["cell 0"])
    described = json.loads((workspace.output("smoke") / "01_second_verdict.json").read_text())
    assert described["summary"] == ["A: reproduced (one in two)", '"B", b: contradicted (3.1 > 3)']
    assert "**reproduced**. One in two." in capsys.readouterr().out or described["table"] == "01_second_verdict"
    assert len(scoreboard(["01_second"]).splitlines()) == 2, "a verdict that is not committed"
    workspace.output("smoke").rename(workspace.figures)
    board = scoreboard(["00_first", "01_second"]).splitlines()
    assert board[2:] == [
        "| [01](notebooks/01_second.ipynb) | A | **reproduced** | one in two |",
        '|  | "B", b | **contradicted** | 3.1 > 3 |',
    ]


def test_two_points_decide_about_a_learned_rate():
    rows = [
        {"method": method, "gap": gap} for method, gaps in (("paper", (-3, 0)), ("robust", (-3, -2))) for gap in gaps
    ]
    found = first_look.verdicts(pd.DataFrame(rows))
    assert outcomes(found) == ["reproduced", "not at this scale"]
    assert found[1].number == "-2.5 points to the best of 16 runs, mean of 2 places (-3.0 at worst)"
