"""The table behind notebooks 03 and 09: its rows."""

import dataclasses
import math

import pandas as pd
import pytest

from hyfreedp import calibrate_noise
from hyfreedp.experiments.studies import noise_split
from hyfreedp.experiments.studies.noise_split import DataSet

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The notebook's table for a small data set, as profile smoke has it, and more gammas and intervals."""
    data, grid = DataSet("small", 1000, 100, 2), noise_split.grid_of("smoke", 0.5, 4)
    rows = noise_split.rows_of(data, grid | {"intervals": [2, 4]}, epsilon=0.5, interval=4, gamma=1.02)
    folder = tmp_path_factory.mktemp("cells")
    first = noise_split.calibrations(rows, folder)
    pd.testing.assert_frame_equal(first, noise_split.calibrations(rows, folder))
    assert len(list(folder.iterdir())) < len(rows)  # a row of two sections is computed once
    return first


def test_loss_noise_falls_with_the_interval_and_with_gamma(table):
    keys = ["accountant", "composition", "loss_mechanism"]
    for _, rows in table[(table.section == "interval") & ~table.even].groupby(keys):
        rows = rows.set_index("interval")
        assert rows.sigma_loss[4] < rows.sigma_loss[2] and (rows.sigma_gradient / rows.sigma).max() < 1.0201
    for _, rows in table[table.section == "gamma"].sort_values("gamma").groupby("allocation"):
        assert rows.sigma_loss.is_monotonic_decreasing and rows.probe_share.is_monotonic_increasing
        assert rows.probe_share.between(0, 1).all()
    laplace = table[table.loss_mechanism == "laplace"]
    assert laplace.loss_std.to_numpy() == pytest.approx(math.sqrt(2) * laplace.sigma_loss.to_numpy())


def test_a_sound_row_costs_at_most_its_target_and_its_claim(table):
    rows = table[table.section == "true cost"].set_index(["accountant", "composition"])
    assert len(rows) == 9
    for accountant in ("rdp", "pld"):
        row = rows.loc[(accountant, "same_batch")]
        assert row.true_epsilon <= row.claimed_epsilon * (1 + 1e-9) <= 0.501 and row.vanilla_epsilon <= 0.501
    assert rows.true_epsilon["pld", "independent"] > 0.5  # what the paper's count misses


def test_a_row_of_the_table_is_the_split_again(table):
    row = table[(table.section == "gamma") & (table.allocation == "per_step")].iloc[0]
    budget = DataSet("small", 1000, 100, 2).budget(0.5)
    made = calibrate_noise(**budget, probe="losses", interval=4, gamma=row.gamma, accountant="rdp")
    assert noise_split.split_of(row) == dataclasses.replace(made, accountant="pld")
