"""Verdicts follow from numbers, are written down with them, and are collected for the front page."""

import json

import numpy as np
import pandas as pd
import pytest
from cases import together

from hyfreedp.experiments.audits import campaign_figures, one_run
from hyfreedp.experiments.store.verdicts import Verdict, scoreboard, verdict
from hyfreedp.experiments.studies import band_figures, bias_variance_figures, true_cost_figures
from hyfreedp.experiments.tables import first_look, tuning_budget_figures


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


def test_another_outcome_is_refused():
    with pytest.raises(ValueError, match=r"outcome must be one of .*reproduced.*, got 'perhaps'"):
        Verdict("A", "perhaps", "1")


def test_two_points_decide_about_a_learned_rate():
    rows = [
        {"method": method, "gap": gap} for method, gaps in (("paper", (-3, 0)), ("robust", (-3, -2))) for gap in gaps
    ]
    found = first_look.verdicts(pd.DataFrame(rows))
    assert outcomes(found) == ["reproduced", "not at this scale"]
    assert found[1].number == "-2.5 points to the best of 16 runs, mean of 2 places (-3.0 at worst)"


@together(("shift", "outcome"), [(0.0, "reproduced"), (0.05, "contradicted")])
def test_a_formula_is_contradicted_by_four_standard_errors(shift, outcome):
    alphas = np.array([0.0, 1.0])
    dots = pd.DataFrame({"alpha": alphas, "bias": bias_variance_figures._normal_bias(alphas) + shift, "error": 0.01})
    losses = np.array([1.0, 3.0])
    releases = pd.DataFrame(
        {"threshold": [2.0], "bias": [0.5], "bias_error": [0.1], "noise": [4.0 * 2 / 2], "noise_error": [0.1]}
    )
    moments = pd.DataFrame({"bias_at_L": [0.012, 0.31]}, index=[3, 10])
    found = bias_variance_figures.verdicts(dots, releases, losses, 4.0, moments)
    assert outcomes(found) == [outcome, "contradicted"]
    assert found[1].number == "of the mean loss it is 1% at step 3, 31% at step 10"
    (_, zero) = bias_variance_figures.verdicts(dots, releases, losses, 4.0, moments[:1])
    assert zero.outcome == "reproduced"


@together(("cost", "outcome"), [(2.9, "reproduced"), (3.1, "contradicted")])
def test_algorithm_2_is_judged_by_what_its_pairs_cost(cost, outcome):
    pair = {"probe": "losses", "accountant": "rdp", "composition": "independent"}
    rows = pd.DataFrame([pair | {"target_epsilon": 3.0, "true_epsilon": cost}])
    noises = {"loss_mechanism": "gaussian", "even": False, "sigma": 1.0, "sigma_gradient": 1.01}
    found = true_cost_figures.verdicts(
        rows, pd.DataFrame([noises, noises | {"even": True, "sigma_gradient": 2}]), [3.0]
    )
    assert outcomes(found) == ["reproduced", outcome]
    assert found[0].number == "1.0 % more at every interval K" and f"{cost:.2f} for 3" in found[1].number


def test_the_other_verdicts():
    bands = pd.DataFrame({"probe": ["losses", "losses", "contrasts"], "right_signs": [0.4, 0.5, 1.0]})
    (found,) = band_figures.verdicts(bands, 500)
    assert found.outcome == "not at this scale" and "in 45 % of the draws" in found.number
    methods = tuning_budget_figures.methods(5.0)
    index = pd.MultiIndex.from_tuples(
        [(one.method, one.setting, 3.0) for one in methods], names=["method", "setting", "target_epsilon"]
    )
    shares = pd.DataFrame({"share_percent": [2.4, 0.01, 15.0, 34.0, 43.0, 34.0, 54.0, 84.0]}, index=index).sort_index()
    assert outcomes(tuning_budget_figures.verdicts(shares, methods, 3.0)) == ["contradicted"] * 3
    shares.loc[("hyfreedp", 1.01, 3.0), "share_percent"] = 0.9
    assert outcomes(tuning_budget_figures.verdicts(shares, methods, 3.0))[0] == "reproduced"


def test_an_audit_judges_both_ways_of_counting():
    joint = pd.DataFrame(
        [
            {
                "noise": "independent",
                "counted": "independent",
                "claimed": 3.0,
                "lower_bound": 3.2,
                "verdict": "refuted",
            },
            {"noise": "independent", "counted": "same_batch", "claimed": 4.7, "lower_bound": 3.2, "verdict": "no"},
        ]
    )
    canaries = pd.DataFrame({"claimed": [1.0, np.inf], "verdict": ["not refuted", "nothing claimed"]})
    found = campaign_figures.verdicts(joint, canaries, 0.95)
    assert outcomes(found) == ["contradicted", "reproduced"]
    assert found[1].number.startswith("0 of 2 claims are refuted")
    canaries.loc[0, "verdict"] = "refuted"
    assert outcomes(campaign_figures.verdicts(joint, canaries, 0.95))[1] == "contradicted"


def test_no_bound_exceeds_that_of_an_auditor_who_is_always_right():
    size, included = 400, np.arange(400) % 2 == 0
    perfect = pd.DataFrame({"score": included.astype(float), "included": included})
    assert one_run.pooled_bound([perfect], 1e-4)["lower_bound"] == one_run.perfect_bound(size, size, 1e-4)
    assert one_run.perfect_bound(600, 2000, 1e-4) == pytest.approx(3.546, abs=1e-3)  # drawn in notebook 09
