"""The paper's numbers: all of them, as printed, and where the paper disagrees with itself."""

import math

import pandas as pd
import pytest
from cases import together

from hyfreedp.experiments.tables import paper

KEYS = ["tuning", "epsilon", "method", "model", "dataset"]

# Counted by eye in the paper: rows times printed numbers per row.
COUNTS = {
    "cv_main": (5 + 5 + 4 + 4 + 4 + 4) * 10,
    "app_cv_main": (5 + 5 + 4) * 10,
    "cv_main_eps8": (5 + 3) * 10,
    "nondp_ls": 4 * 10,
    "gpt2": 4 * 10,
    "eff": 5 * 4 * 2,
    "hyperparam_comparison": 5 * 3,
}

# Read from the paper by eye: first and last numbers, and some from the middle.
SPOTS = [
    ("cv_main", ("full", 1, "NonDP-GS", "Vit-Small", "CIFAR10"), 96.49),
    ("cv_main", ("full", 1, "NonDP-GS", "Vit-Base", "CIFAR10"), 95.20),
    ("cv_main", ("full", 3, "DP-hyper", "Vit-Base", "CIFAR100"), 19.92),
    ("cv_main", ("full", math.inf, "D-Adaptation", "Vit-Small", "CIFAR10"), 54.29),
    ("cv_main", ("bitfit", 1, "NonDP-GS w/ LS", "Vit-Small", "GTSRB"), 48.64),
    ("cv_main", ("bitfit", 3, "Prodigy", "Vit-Base", "Food101"), 81.98),
    ("cv_main", ("bitfit", math.inf, "HyFreeDP", "Vit-Base", "Food101"), 89.06),
    ("app_cv_main", ("full", 1, "HyFreeDP", "Vit-Base", "GTSRB"), 79.00),
    ("app_cv_main", ("full", math.inf, "HyFreeDP", "Vit-Base", "Food101"), 88.73),
    ("cv_main_eps8", ("full", 8, "NonDP-GS", "Vit-Small", "CIFAR10"), 96.28),
    ("cv_main_eps8", ("full", 8, "Prodigy", "Vit-Base", "Food101"), 1.90),
    ("cv_main_eps8", ("bitfit", 8, "HyFreeDP", "Vit-Base", "Food101"), 87.14),
    ("nondp_ls", ("full", 1, "NonDP-GS w/ LS", "Vit-Small", "CIFAR10"), 88.02),
    ("nondp_ls", ("full", 8, "NonDP-GS w/ LS", "Vit-Small", "Food101"), 31.05),
    ("nondp_ls", ("full", math.inf, "NonDP-GS w/ LS", "Vit-Base", "Food101"), 89.10),
]


def _frame(table: str) -> pd.DataFrame:
    return paper.load(table).set_index(KEYS)


@together("table", paper.TABLES)
def test_every_printed_number_is_there_once(table):
    frame = paper.load(table)
    assert tuple(frame.columns) == paper.COLUMNS and set(frame.table) == {table}
    assert len(frame) == COUNTS[table]
    assert not frame.duplicated([*KEYS, "metric"]).any() and frame.value.notna().all()


@together(("table", "row", "value"), SPOTS)
def test_numbers_read_by_eye(table, row, value):
    assert _frame(table).value[row] == value


def test_scores_read_by_eye():
    scores = paper.load("gpt2").set_index(["epsilon", "method", "metric"]).value
    assert scores[3, "NonDP-GS", "BLEU"] == 0.583 and scores[8, "HyFreeDP", "ROUGE_L"] == 0.655
    assert scores[3, "HyFreeDP", "NIST"] == 5.736 and scores[8, "D-Adaptation", "BLEU"] == 0


def test_minutes_read_by_eye():
    rows = paper.load("eff").set_index(["model", "tuning", "dataset", "method", "metric"]).value
    assert rows["Llama2-7B", "lora", "PubMed (4k)", "K=1", "minutes"] == 409.75
    assert rows["Vit-base", "bitfit", "CIFAR100", "K=5", "ratio"] == 1.089
    assert rows["Vit-small", "full", "SVHN", "w/o HyFreeDP", "minutes"] == 81.25


def test_strategies_read_by_eye():
    rows = paper.load("hyperparam_comparison").set_index(["method", "metric"]).value
    assert rows["Vanilla", "searches_clipping_threshold"] == 1 and rows["DP-hyper", "searches_clipping_threshold"] == 0
    assert rows["Adaptive Clipping", "budget_percent_about"] == 20 and rows["HyFreeDP", "budget_percent_below"] == 1
    assert rows["HyFreeDP", "searches_eta"] == 0 and rows["Automatic Clipping", "budget_percent"] == 0


def test_standard_deviations_read_by_eye():
    std = _frame("app_cv_main")["std"]
    assert std.notna().all() and std.max() == 1.85
    assert std["full", 1, "D-Adaptation", "Vit-Base", "SVHN"] == 0.74
    assert std["full", math.inf, "D-Adaptation", "Vit-Base", "Food101"] == 1.17
    assert all(paper.load(table)["std"].isna().all() for table in paper.TABLES if table != "app_cv_main")


def test_accuracies_are_percentages_and_scores_are_positive():
    for table in ("cv_main", "app_cv_main", "cv_main_eps8", "nondp_ls"):
        assert paper.load(table).value.between(0.5, 99.5).all()
    assert (paper.load("gpt2").value >= 0).all()


def test_the_appendix_repeats_the_main_table():
    main, appendix = _frame("cv_main"), _frame("app_cv_main")
    assert (appendix.value == main.loc[appendix.index].value).all()


def test_the_printed_ratios_are_those_of_the_minutes():
    rows = paper.load("eff").pivot(index=["model", "tuning", "method"], columns="metric", values="value")
    baseline = rows.minutes.xs("w/o HyFreeDP", level="method")
    assert ((rows.minutes / baseline).round(3) - rows.ratio).abs().max() < 1e-9


def test_where_the_paper_disagrees_with_itself():
    """Known, so that nobody looks for a typing error here: more budget, less accuracy; equal runs, unequal spread."""
    both = pd.concat([_frame("cv_main"), _frame("cv_main_eps8")]).value.unstack("epsilon")
    falls = {
        row for row, values in both.iterrows() if row[1] == "HyFreeDP" and not values.dropna().is_monotonic_increasing
    }
    assert falls == {
        ("full", "HyFreeDP", "Vit-Small", "GTSRB"),
        ("bitfit", "HyFreeDP", "Vit-Small", "SVHN"),
        ("bitfit", "HyFreeDP", "Vit-Small", "Food101"),
        ("bitfit", "HyFreeDP", "Vit-Base", "SVHN"),
    }
    private = paper.load("app_cv_main").query("epsilon < inf")
    pairs = private.pivot(index=["epsilon", "model", "dataset"], columns="method", values=["value", "std"])
    equal = pairs["value"]["D-Adaptation"] == pairs["value"]["Prodigy"]
    unequal = pairs["std"]["D-Adaptation"] != pairs["std"]["Prodigy"]
    assert equal.sum() == 11
    assert set(pairs.index[equal & unequal]) == {(1.0, "Vit-Base", "CIFAR100"), (1.0, "Vit-Base", "SVHN")}


def test_an_unknown_table_raises():
    with pytest.raises(ValueError, match=r"table must be one of 'cv_main'.*did you mean 'gpt2'"):
        paper.load("gpt3")
