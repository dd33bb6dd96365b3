"""Findings and verdicts: what is said is what the tables say, written down and collected for the front page."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest

from hyfreedp import calibrate_noise
from hyfreedp import epsilon as epsilon_of
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.verdicts import Verdict, scoreboard, verdict
from hyfreedp.experiments.tables import first_look

pytestmark = pytest.mark.usefixtures("figure_style")


@pytest.fixture
def study():
    """The best rate is 0.02 with decay at epsilon 3, another one at epsilon 1; every method gains 2 points by seed."""
    accuracies = {("linear", 0.02): 0.8, ("constant", 0.01): 0.7, ("linear", 1e-4): 0.2}
    learned = {("robust", 1e-4): 0.82, ("paper", 1e-4): 0.1}
    rows = [
        {"task": task, "epsilon": epsilon, "method": method, "learning_rate": rate, "accuracy": accuracy + 0.02 * seed}
        for task in ("digits", "classification")
        for epsilon in (1.0, 3.0)
        for (method, rate), accuracy in (accuracies | learned).items()
        for seed in (0, 1)
    ]
    table = pd.DataFrame(rows)
    at_one = (table.epsilon == 1.0) & (table.method == "constant")
    table.loc[at_one, "accuracy"] += 0.2
    return table


def test_best_and_worst_are_those_of_the_nearest_budget(study):
    found = first_look.choices(study, epsilon=2.5, interval=5, steps=10)
    assert (found["best"].spec.method, found["best"].spec.learning_rate) == ("linear", 0.02)
    assert found["worst"].title == "grid's worst: 0.0001, linear"
    assert first_look.choices(study, epsilon=1.0, interval=5, steps=None)["best"].spec.method == "constant"
    assert found["paper"].spec == Spec(method="paper", epsilon=2.5, interval=5, steps=10)


def test_a_grid_costs_the_composition_of_its_runs():
    plan = {"target_epsilon": 1.0, "target_delta": 1e-4, "sample_rate": 0.1, "probe": "none", "accountant": "rdp"}
    one = calibrate_noise(steps=10, **plan)
    all_steps = replace(one, steps=40)
    assert first_look.grid_epsilon(one, 4) == epsilon_of(all_steps, target_delta=1e-4) > one.epsilon


def test_costs_are_those_of_the_run_but_for_the_grid(study):
    found = first_look.choices(study, epsilon=3.0, interval=5, steps=10)
    measured = {"epsilon_spent": 3.0, "guarantee": True, "final_eta": 0.1, "seconds": 1.0}
    records = [{"spec": {"seed": seed}, "accuracy": 0.5 + 0.1 * seed} | measured for _ in found for seed in (0, 1)]
    table = first_look.cost_table(records, found, 2, 11.0)
    assert table.accuracy.tolist() == pytest.approx([55] * 4) and table.sd.iloc[0] == pytest.approx(10 / math.sqrt(2))
    assert table.epsilon_with_tuning.tolist() == [3, 3, 11, 11]
    told = first_look.cost_findings(table)
    assert told[0] == ("HyFreeDP, preset robust: accuracy 55.0 ± 7.1 %, epsilon 3.00 for the run, 3.00 with tuning")
    alone = first_look.cost_table(records[::2], found, 1, 11.0)
    assert "accuracy 50.0 %" in first_look.cost_findings(alone)[0]


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
    assert [one.outcome for one in found] == ["reproduced", "not at this scale"]
    assert found[1].number == "-2.5 points to the best of 16 runs, mean of 2 places (-3.0 at worst)"
