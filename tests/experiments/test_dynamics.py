"""Notebook 05: its runs differ in what they say and decide how they say, and its tables are what the steps say."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from hyfreedp.experiments.runs.cells import Spec, read_cell, read_steps, reader, run_cells
from hyfreedp.experiments.store.paths import RESULTS
from hyfreedp.experiments.studies import dynamics
from hyfreedp.experiments.tables.plan import Learner

STEPS = 20
BASE = Spec(epsilon=1.0, steps=STEPS)


def test_the_lines_of_the_figure_are_those_of_their_runs(tmp_path):
    lines = dynamics.series(BASE, replace(BASE, method="constant", learning_rate=0.02), (10,))
    assert {name for _, name in lines} == {"K = 10", "robust", "tuned"} and len(lines) == 2 * 3
    slow = ("digits, from 0.0001", "K = 10")
    run_cells([lines[slow]], tmp_path)
    rows = dynamics.steps_of({slow: lines[slow]}, 1, tmp_path)
    probes = rows[rows.slope.notna()]
    assert rows.step.tolist() == list(range(STEPS)) and probes.step.tolist() == [0, 10]
    np.testing.assert_allclose(rows.eta, rows.eta_next.ffill(), rtol=1e-9)
    assert probes.eta_probed.iloc[0] == 1e-4 and (rows.start == slow[0]).all()


# -- tables ------------------------------------------------------------------------------------------------------------


def test_the_tuned_rate_is_the_grids_best_at_the_nearest_epsilon(tmp_path):
    rows = pd.DataFrame(
        [
            ("digits", 1.0, "linear", 0.05, 0.9),
            ("digits", 3.0, "linear", 0.01, 0.7),
            ("digits", 3.0, "constant", 0.02, 0.8),
            ("digits", 3.0, "robust", 1e-4, 0.99),
            ("classification", 3.0, "linear", 0.001, 0.95),
        ],
        columns=["task", "epsilon", "method", "learning_rate", "accuracy"],
    )
    tuned = dynamics.tuned_by_hand(replace(BASE, epsilon=4.0), rows, tmp_path)
    assert tuned == replace(BASE, epsilon=4.0, method="constant", learning_rate=0.02)


# -- records -----------------------------------------------------------------------------------------------------------


def test_less_privacy_is_never_worse_beyond_noise():
    """Every method at eps = 8 against eps = 1, at a false-alarm rate of 0.1 % over all of them together."""
    rows = pd.read_csv(RESULTS / "laptop" / "accuracy.csv")
    groups = list(rows.groupby(["task", "method", "learning_rate"]))
    for key, runs in groups:
        loose, tight = (runs.accuracy[runs.epsilon == value] for value in (8.0, 1.0))
        assert len(loose) == len(tight) == 5
        if np.ptp([*loose, *tight]) > 0:
            worse = stats.ttest_ind(loose, tight, equal_var=False, alternative="less").pvalue
            assert worse > 1e-3 / len(groups), key


@pytest.mark.whole
def test_the_record_of_fine_tuning_holds_the_steps_of_its_runs(tmp_path):
    """On a stand-in: digits instead of CIFAR-10, the same series."""
    learner = Learner("digits", "mlp", "full", 12)
    scale = replace(dynamics.SCALE, learners=(learner,), epsilons=(0.2,), seeds=1)  # soon calibrated
    table = tmp_path / "dynamics.csv"
    rows = dynamics.record(tmp_path / "cells", table, scale=scale)
    names = [f"HyFreeDP, paper, K = {interval}" for interval in dynamics.INTERVALS]
    assert list(dict.fromkeys(rows.series)) == [*names, *dynamics.NAMES.values()]
    for series, specs in dynamics.runs(scale, reader(tmp_path / "cells")).items():
        steps = read_steps(specs[0], tmp_path / "cells")
        found = rows[rows.series == series]
        assert found.step.tolist() == [0, 1, 5, 6, 10, 11]  # every fifth, and where it is evaluated
        assert found.eta.tolist() == steps[steps.step.isin(found.step)].eta.tolist()
        assert found.test_accuracy.dropna().iloc[-1] == read_cell(specs[0], tmp_path / "cells")["accuracy"]
    pd.testing.assert_frame_equal(pd.read_csv(table), rows, check_dtype=False)
    waiting = dynamics.runs(scale, lambda spec: None)
    assert "tuned by hand" not in waiting and len(waiting) == 4


def test_what_arithmetic_forbids_is_no_case_of_the_figures_claims():
    """100 steps from 1e-4: only K = 1 can reach 0.01, so that nothing is said of the other K."""

    def run(start, series, accuracy, eta):
        steps = pd.DataFrame({"step": range(100), "eta": eta, "test_accuracy": accuracy, "seed": 0})
        shape = [5, 9, *np.linspace(8, 1, 98)] if series.startswith("K") else np.nan
        return steps.assign(start=start, series=series, loss_threshold=shape)

    scores = {"K = 1": 0.90, "K = 5": 0.92, "K = 10": 0.95, "tuned": 0.91}
    far, near = (
        pd.concat([run(start, name, score, rate) for name, score in scores.items()], ignore_index=True)
        for start, rate in (("digits, from 0.0001", 0.01), ("CIFAR-10, from 0.01", 0.01))
    )
    decided = {one.claim: one for one in dynamics.judged(far)}
    assert decided[dynamics.CLOSE].number.startswith("digits -1.0 points") and len(decided) == 1
    decided = {one.claim: one for one in dynamics.judged(far, near)}
    assert "CIFAR-10 -5.0 points" in decided['Fig. "train curve": K = 1 converges best'].number
    assert decided['Fig. "train curve": thresholds peak early and decrease'].outcome == "reproduced"
