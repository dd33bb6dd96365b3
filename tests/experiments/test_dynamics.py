"""Notebook 05: its runs differ in what they say and decide how they say, and its tables are what the steps say."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from hyfreedp.experiments.runs.cells import Spec, read_cell, read_steps, reader, run_cells
from hyfreedp.experiments.store.paths import RESULTS
from hyfreedp.experiments.studies import dynamics, fine_tuning
from hyfreedp.experiments.tables.plan import Learner

STEPS = 20
BASE = Spec(epsilon=3.0, steps=STEPS)
GEN, LITERAL = replace(BASE, method="paper", interval=10), replace(BASE, method="paper_literal", interval=1)


# -- what the runs do --------------------------------------------------------------------------------------------------


def test_rates_are_those_last_decided_and_probes_come_when_the_plan_says(tmp_path):
    run_cells([GEN, LITERAL], tmp_path)
    short = dynamics.steps_of([GEN, LITERAL], tmp_path)
    for spec, steps in ((GEN, [0, 10]), (LITERAL, list(range(STEPS)))):
        run = dynamics.of_spec(short, spec)
        probes = run[run.slope.notna()]
        assert run.step.tolist() == list(range(STEPS)) and probes.step.tolist() == steps
        np.testing.assert_allclose(run.eta, run.eta_next.ffill(), rtol=1e-9)
        assert probes.eta_probed.iloc[0] == spec.learning_rate
        np.testing.assert_allclose(probes.eta_probed.iloc[1:], probes.eta_next.iloc[:-1], rtol=1e-12)
        assert run.step[run.test_accuracy.notna()].tolist() == [4, 9, 14, 19]
        assert (run.test_loss.notna() == run.test_accuracy.notna()).all()
    assert not [name for name in short if name.startswith("not_private")]


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
    scale = replace(fine_tuning.SCALE, learners=(learner,), epsilons=(0.2,), seeds=1)  # soon calibrated
    table = tmp_path / "fine_tuning.csv"
    rows = fine_tuning.record(tmp_path / "cells", table, scale=scale)
    names = [f"HyFreeDP, paper, K = {interval}" for interval in dynamics.INTERVALS]
    assert list(dict.fromkeys(rows.series)) == [*names, *fine_tuning.NAMES.values()]
    for series, specs in fine_tuning.runs(scale, reader(tmp_path / "cells")).items():
        steps = read_steps(specs[0], tmp_path / "cells")
        found = rows[rows.series == series]
        assert found.step.tolist() == [0, 1, 5, 6, 10, 11]  # every fifth, and where it is evaluated
        assert found.eta.tolist() == steps[steps.step.isin(found.step)].eta.tolist()
        assert found.test_accuracy.dropna().iloc[-1] == read_cell(specs[0], tmp_path / "cells")["accuracy"]
    pd.testing.assert_frame_equal(pd.read_csv(table), rows, check_dtype=False)
    waiting = fine_tuning.runs(scale, lambda spec: None)
    assert "tuned by hand" not in waiting and len(waiting) == 4
