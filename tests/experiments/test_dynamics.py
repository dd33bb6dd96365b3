"""Notebook 05: its lines are those of their runs."""

from dataclasses import replace

import numpy as np
import pandas as pd

from hyfreedp.experiments.runs.cells import Spec, run_cells
from hyfreedp.experiments.studies import dynamics

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
