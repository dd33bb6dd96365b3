"""The accuracy tables: what is printed is what the records say, and the tests know their null hypothesis."""

import math

import numpy as np
import pytest
from scipy import stats

from hyfreedp.experiments.runs.cells import run_cells
from hyfreedp.experiments.tables import image_classification as tables
from hyfreedp.experiments.tables import plan as comparison
from hyfreedp.experiments.tables.plan import ROWS, Learner, Scale, entries, table

SCALE = Scale((Learner("cifar10", "vit32_tiny_imagenet", "full", 5),), epsilons=(1.0, 8.0, math.inf), seeds=2)
LEVELS = {row: level for level, row in enumerate(ROWS)}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """The epsilon of a random search's runs takes seconds, and is for test_comparison.py."""
    monkeypatch.setattr(comparison, "random_search_epsilon", lambda *_: 1.0)


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
    of_full, place = {"prodigy": 27.54, "grid_linear": 88.02}, (1.0, "Vit-Small", "CIFAR10")
    assert all(known["full", *place, row] == value for row, value in of_full.items())
    assert known["bitfit", *place, "grid_cosine"] == 97.40


@pytest.mark.parametrize(
    ("effects", "verdict"),
    [((6.0, 6.5, 7.0), "reproduced"), ((-3.0, 4.9, 12.0), "not shown"), ((1.0, 1.5, 2.0), "fails here")],
)
def test_a_claim_is_judged_by_the_interval_over_data_sets(effects, verdict):
    """That D-Adaptation is at least five points behind with full fine-tuning, which the paper's own tables say."""
    tasks = ("cifar10_20k", "gtsrb_20k", "fashion_20k")
    learners = tuple(Learner(task, "vit32_tiny_imagenet_d128", "full") for task in tasks)
    scale = Scale(learners, epsilons=(1.0, 8.0, math.inf), seeds=2)
    rows = made(scale, lambda *_: 0.5).assign(profile="desktop", learning_rate=1e-3)
    budget = {1.0: 0.4, 8.0: -0.4, math.inf: -50}
    behind = rows.task.map(dict(zip(tasks, effects, strict=True))) + rows.epsilon.map(budget)
    rows.loc[rows.row == "dadaptation", "accuracy"] -= behind / 100  # without privacy it does not count
    judged = {one.claim: one for one in tables.judged(rows)}
    found = judged["D-Adaptation performs poorly with full fine-tuning"]
    half = stats.t.ppf(0.975, 2) * np.std(effects, ddof=1) / math.sqrt(3)
    assert found.outcome == verdict and "(paper: +71." in found.number
    assert f"{np.mean(effects) - half:+.1f} to {np.mean(effects) + half:+.1f}" in found.number
    assert not any(claim.startswith("With BitFit") for claim in judged), "of BitFit there is no place here"
    ours = judged[tables.OURS].number
    assert ours.startswith("Fashion-MNIST +0.0 points, one") and "chose its constants: CIFAR-10 +0.0, GTSRB" in ours


def test_the_best_grid_is_chosen_by_validation_accuracy_whatever_the_test_says():
    rows = made(level=lambda row, epsilon, seed: 0.9 if row == "grid_extended" else 0.5)
    best = tables.best_grid(rows)
    assert set(best.row) == {"grid_cosine"} and len(best) == 3 * 2


def test_the_paired_difference_and_its_interval_are_over_data_sets():
    learners = tuple(Learner(task, "vit32_tiny_imagenet", "full", 5) for task in ("cifar10", "gtsrb", "svhn"))
    effect, budget = {"cifar10": 0.01, "gtsrb": 0.02, "svhn": 0.06}, {1.0: -0.01, 3.0: 0.0, 8.0: 0.02, math.inf: -0.01}
    rows = made(Scale(learners, seeds=2), lambda row, epsilon, seed: 0.5 + seed / 100)
    rows.loc[rows.row == "reference", "accuracy"] += rows.task.map(effect) + rows.epsilon.map(budget)
    found, values = tables.paired(rows, "reference"), 100 * np.array(list(effect.values()))
    assert found["mean"] == pytest.approx(3.0) and len(found["by_place"]) == 12 and found["pairs"] == 24
    half = stats.t.ppf(0.975, 2) * values.std(ddof=1) / math.sqrt(3)
    assert (found["low"], found["high"]) == (pytest.approx(3.0 - half), pytest.approx(3.0 + half))
    one = tables.paired(rows[rows.task == "cifar10"], "reference")
    assert one["mean"] == pytest.approx(1.0) and math.isnan(one["low"])


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
