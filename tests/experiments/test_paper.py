"""The paper's numbers: all of them, as printed."""

import math

import pytest

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
    ("cv_main", ("full", math.inf, "D-Adaptation", "Vit-Small", "CIFAR10"), 54.29),
    ("app_cv_main", ("full", math.inf, "HyFreeDP", "Vit-Base", "Food101"), 88.73),
    ("cv_main_eps8", ("bitfit", 8, "HyFreeDP", "Vit-Base", "Food101"), 87.14),
    ("nondp_ls", ("full", math.inf, "NonDP-GS w/ LS", "Vit-Base", "Food101"), 89.10),
]


@pytest.mark.parametrize("table", COUNTS)
def test_every_printed_number_is_there_once(table):
    frame = paper.load(table)
    assert tuple(frame.columns) == paper.COLUMNS and set(frame.table) == {table}
    assert len(frame) == COUNTS[table]
    assert not frame.duplicated([*KEYS, "metric"]).any() and frame.value.notna().all()


@pytest.mark.parametrize(("table", "row", "value"), SPOTS)
def test_some_numbers_are_as_read_by_eye(table, row, value):
    assert paper.load(table).set_index(KEYS).value[row] == value


def test_the_printed_ratios_are_those_of_the_minutes():
    rows = paper.load("eff").pivot(index=["model", "tuning", "method"], columns="metric", values="value")
    baseline = rows.minutes.xs("w/o HyFreeDP", level="method")
    assert ((rows.minutes / baseline).round(3) - rows.ratio).abs().max() < 1e-9
