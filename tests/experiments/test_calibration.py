"""Probabilities: what a change costs is paired by seed."""

import math

import numpy as np
import pandas as pd
import pytest

from hyfreedp.experiments.studies import calibration


def test_costs_are_paired_by_seed_and_the_worst_place_is_named_with_its_error():
    accuracies = {("a", 1.0): ((0.8, 0.7), (0.79, 0.71)), ("b", 1.0): ((0.9, 0.5), (0.89, 0.47))}
    rows = pd.DataFrame(
        [
            {"problem": problem, "epsilon": epsilon, "seed": seed, "setting": setting, "fit": "none", "accuracy": value}
            for (problem, epsilon), both in accuracies.items()
            for setting, values in zip(("default", "flat 1"), both, strict=True)
            for seed, value in enumerate(values)
        ]
    )
    cost = calibration.accuracy_costs(rows).loc["flat 1", "none"]
    assert cost["mean"] == pytest.approx((0 - 2) / 2) and cost.worst == pytest.approx(-2)
    assert cost.error == pytest.approx(np.std([-1, -3], ddof=1) / math.sqrt(2))
