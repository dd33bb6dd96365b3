"""The accuracy tables: what is printed is what the records say, and the tests know their null hypothesis."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from hyfreedp.experiments.runs.cells import run_cells
from hyfreedp.experiments.tables import grid
from hyfreedp.experiments.tables import image_classification as tables
from hyfreedp.experiments.tables import plan as comparison
from hyfreedp.experiments.tables.plan import ROWS, Learner, Scale, entries, table

SCALE = Scale((Learner("cifar10", "vit32_tiny_imagenet", "full", 5),), epsilons=(1.0, 8.0, math.inf), seeds=2)
LEVELS = {row: level for level, row in enumerate(ROWS)}


def made(scale=SCALE, level=lambda row, epsilon, seed: 0.5 + LEVELS[row] / 100 + seed / 1000):
    """The table of a scale whose test accuracies are ``level``; validation accuracies are those of the row plus 0.1."""
    empty = table(scale, lambda _: None)
    empty["accuracy"] = [level(*values) for values in zip(empty.row, empty.epsilon, empty.seed, strict=True)]
    searched = empty.row.map(lambda row: 0.6 + LEVELS[row] / 100)
    return empty.assign(validation_accuracy=searched, source="cell", profile="gpu")


def test_the_papers_numbers_have_our_names():
    """Typed from the paper: Vit-Small on CIFAR10 at epsilon 1."""
    known = tables.paper_numbers().set_index([*tables.PAPER_PLACE, "row"]).value
    assert not known.index.duplicated().any()
    for tuning, row, value in (
        ("full", "prodigy", 27.54),
        ("full", "grid_linear", 88.02),
        ("bitfit", "grid_cosine", 97.40),
    ):
        assert known[tuning, 1.0, "Vit-Small", "CIFAR10", row] == value


def test_gaps_are_to_the_grid_of_the_same_place():
    gaps = tables.gaps(tables.summarise(made())).set_index(["source", "tuning", "epsilon", "row"])
    expected = LEVELS["reference"] - LEVELS["grid_extended"]
    assert gaps.loc[("gpu", "full", 8.0, "reference"), "gap"] == pytest.approx(expected)
    theirs = gaps.loc[("the paper", "full", 1.0, "prodigy")]
    assert theirs.places == 10  # five data sets, two models
    paper = tables.paper_numbers()
    chosen = paper[(paper.tuning == "full") & (paper.epsilon == 1.0)]
    wide = chosen.pivot(index=["model", "dataset"], columns="row", values="value")
    assert theirs.gap == pytest.approx((wide.prodigy - wide.grid).mean())
    assert theirs.low == pytest.approx((wide.prodigy - wide.grid).min())


@pytest.mark.parametrize(
    ("effects", "verdict"),
    [((6.0, 6.5, 7.0), "reproduced"), ((-3.0, 4.9, 12.0), "not shown"), ((1.0, 1.5, 2.0), "fails here")],
)
def test_a_claim_is_judged_by_the_whole_interval(effects, verdict):
    """That D-Adaptation is at least five points behind with full fine-tuning, which the paper's own tables say."""
    scale = Scale(SCALE.learners, epsilons=(1.0, 3.0, 8.0, math.inf), seeds=2)
    behind = dict(zip(scale.epsilons, (*effects, -50.0), strict=True))  # without privacy it does not count
    rows = made(scale, lambda row, epsilon, seed: 0.5 - (behind[epsilon] / 100 if row == "dadaptation" else 0))
    judged = tables.judged(rows).set_index("claim")
    line = judged.loc["D-Adaptation performs poorly with full fine-tuning"]
    assert line.verdict == verdict and line.places == 3 and line["mean"] == pytest.approx(np.mean(effects))
    half = stats.t.ppf(0.975, 2) * np.std(effects, ddof=1) / math.sqrt(3)
    assert (line.low, line.high) == (pytest.approx(np.mean(effects) - half), pytest.approx(np.mean(effects) + half))
    assert line.paper > 50
    # Of BitFit there is no place here.
    assert judged.loc[judged.index.str.startswith("With BitFit"), "verdict"].item() == "not shown"


def test_the_best_grid_is_chosen_by_validation_accuracy_whatever_the_test_says():
    rows = made(level=lambda row, epsilon, seed: 0.9 if row == "grid_extended" else 0.5)
    best = tables.best_grid(rows)
    assert set(best.row) == {"grid_cosine"} and len(best) == 3 * 2


def test_the_paired_difference_and_its_interval_are_over_places():
    scale = Scale(SCALE.learners, epsilons=(1.0, 2.0, 3.0, 8.0), seeds=2)
    effect = {1.0: 0.01, 2.0: 0.02, 3.0: 0.03, 8.0: 0.06}
    rows = made(scale, lambda row, epsilon, seed: 0.5 + (effect[epsilon] if row == "reference" else 0) + seed / 100)
    found = tables.paired(rows, "reference")
    values = 100 * np.array(list(effect.values()))
    assert found["mean"] == pytest.approx(3.0) and found["places"] == 4 and found["pairs"] == found["wins"] == 8
    half = stats.t.ppf(0.975, 3) * values.std(ddof=1) / 2
    assert (found["low"], found["high"]) == (pytest.approx(3.0 - half), pytest.approx(3.0 + half))
    assert found["p"] == pytest.approx(2 / 2**4)  # of all sign patterns, this one and its opposite
    one = tables.paired(rows[rows.epsilon == 1.0], "reference")
    assert one["mean"] == pytest.approx(1.0) and math.isnan(one["p"]) and math.isnan(one["low"])


def test_cells_come_before_committed_records_and_what_is_neither_is_missing(workspace):
    rows = ("reference", "prodigy", "hyfreedp_robust")
    scale = Scale((Learner("digits", "mlp", "full", 5),), epsilons=(8.0,), seeds=1, rows=rows)
    prodigy, reference, robust = (
        next(entry.final(lambda _: None) for entry in entries(scale) if entry.row == row)
        for row in ("prodigy", "reference", "hyfreedp_robust")
    )
    (record,) = run_cells([prodigy], workspace.cells)
    path = workspace.results / "smoke" / "image_classification.csv"
    path.parent.mkdir(parents=True)
    committed = table(scale, lambda spec: None if spec == robust else record | {"accuracy": 0.123})
    committed.assign(version_torch="2").to_csv(path, index=False)
    rows = tables.numbers(scale, "smoke", workspace.cells, train=False).set_index("row")
    assert rows.source.to_dict() == {"reference": "committed", "prodigy": "cell", "hyfreedp_robust": "missing"}
    assert rows.accuracy["reference"] == 0.123 and rows.accuracy["prodigy"] == record["accuracy"]
    assert rows.key["reference"] == reference.key and math.isnan(rows.accuracy["hyfreedp_robust"])


@pytest.mark.whole
def test_rates_are_those_of_the_final_runs_or_as_committed(workspace, monkeypatch):
    scale = Scale((Learner("digits", "mlp", "full", 60),), epsilons=(8.0,), seeds=1, rows=("reference", "prodigy"))
    monkeypatch.setitem(comparison.SCALES, "tiny", scale)
    assert grid.run("tiny", workspace.cells, workspace.results) == 0
    rows = tables.numbers(scale, "tiny", workspace.cells, train=False)
    steps = tables.rates(rows, workspace.cells)
    assert set(steps.row) == {"prodigy"} and steps.step.tolist() == list(range(60))
    committed = tables.rates(rows, workspace.root / "no cells")
    assert len(committed) == grid.RECORDED_STEPS and {0, 59} <= set(committed.step)
    both = committed.merge(steps, on=[*tables.CELL, "seed", "step"])
    assert len(both) == len(committed) and both.eta_x.tolist() == pytest.approx(both.eta_y.tolist())
    assert tables.rates(rows.assign(profile="smoke"), workspace.root / "no cells").empty


def test_a_verdict_compares_the_last_step_with_adam_at_the_rate_of_the_grid():
    """Adam without bias correction, run by torch's formulas on a steady gradient, against the closed form."""
    first, second = 0.0, 0.0
    for step in range(1, 31):
        first, second = 0.9 * first + 0.1, 0.999 * second + 0.001
        assert tables.without_bias_correction(step) == pytest.approx(first / math.sqrt(second))
    scale = Scale((Learner("digits", "mlp", "full", 30),), epsilons=(1.0, 2.0, 3.0, 8.0), seeds=2)
    rows = made(scale).assign(learning_rate=0.01)
    last = {1.0: 5e-6, 2.0: 2e-5, 3.0: 0.002, 8.0: 0.01}  # times 5.5 after 30 steps
    place = {"task": "digits", "model": "mlp", "tuning": "full", "profile": "gpu", "row": "prodigy"}
    steps = [
        place | {"step": step, "eta": 1e-6 if step == 0 else last[epsilon], "epsilon": epsilon, "seed": seed}
        for epsilon, seed, step in itertools.product(last, (0, 1), range(30))
    ]
    steps = pd.DataFrame(steps)
    found = tables.verdicts(rows, steps, ["prodigy"])
    assert found.verdict.tolist() == ["never left the start", "too low", "near", "too high"]
    assert found.accuracy.iloc[0] == pytest.approx(100 * rows[rows.row == "prodigy"].accuracy[:2].mean())
    assert found.grid_accuracy.iloc[0] == pytest.approx(100 * rows[rows.row == "grid_extended"].accuracy[:2].mean())
    some = steps[steps.step.isin([0, 15, 29])]  # as of a committed run
    pd.testing.assert_frame_equal(tables.verdicts(rows, some, ["prodigy"]), found)
