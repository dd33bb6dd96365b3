"""Which runs fill the tables: test data choose nothing, the budget covers what it is said to cover."""

import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from hyfreedp import calibrate_noise
from hyfreedp.experiments.runs.methods import EXTENDED_GRID
from hyfreedp.experiments.tables import plan as comparison
from hyfreedp.experiments.tables import tuning_budget
from hyfreedp.experiments.tables.plan import MEAN_RUNS, ROWS, Entry, Learner, table
from hyfreedp.experiments.tasks.registry import TASKS

LEARNER = Learner("digits", "mlp", "full", 6)


def record(spec, test=0.5):
    """A run whose validation accuracy is highest near a rate of 0.01, whatever its test accuracy."""
    distance = abs(math.log(spec.learning_rate / 0.011))
    found = {"accuracy": 1 - distance / 100, "loss": distance, "epsilon_spent": spec.epsilon, "seconds": 1.0}
    return found | {"test_accuracy": test} if spec.evaluation == "validation" else found | {"accuracy": test}


def test_a_search_takes_the_rate_of_the_best_validation_accuracy_and_the_test_accuracy_chooses_nothing():
    for row, best in (("grid", 5e-3), ("grid_extended", 1e-2), ("grid_linear", 1e-2), ("adaptive", 1e-2)):
        entry = Entry(LEARNER, 3.0, row, 2)
        finalists = {
            entry.final(lambda spec, seed=seed: record(spec, test=math.sin(seed * int(spec.key[:6], 16))))
            for seed in range(5)
        }
        assert len(finalists) == 1
        (final,) = finalists
        assert final.learning_rate == best and final.evaluation == "test" and final.seed == 2
        assert {spec.learning_rate for spec in entry.searches()} == set(ROWS[row].rates)
        assert {spec.seed for spec in entry.searches()} == {0}


def test_the_simulated_dp_hyper_trains_with_85_percent_of_epsilon_at_the_rate_found_with_all_of_it():
    entry = Entry(LEARNER, 3.0, "dp_hyper", 1)
    assert entry.searches() == Entry(LEARNER, 3.0, "grid_extended", 0).searches()
    final = entry.final(record)
    assert final.epsilon == pytest.approx(0.85 * 3.0) and final.learning_rate == 1e-2


def test_a_random_search_stays_within_its_budget(target=1.0):
    """The noise of its runs, calibrated as any run is, put into the theorem."""
    task = TASKS["digits"]
    epsilon = comparison.random_search_epsilon("digits", 100, target)
    protocol = {"target_delta": task.delta, "sample_rate": 500 / 1200, "steps": 100}
    sigma = calibrate_noise(target_epsilon=epsilon, probe="none", **protocol).sigma
    whole = tuning_budget.search_epsilon(sigma, **protocol, mean=MEAN_RUNS, shape=1.0)
    assert 0.99 * target < whole <= target
    for run in Entry(Learner("digits", "mlp", "full", 100), target, "random_search", 0).searches():
        assert run.epsilon == epsilon and run.evaluation == "validation"


def test_the_number_of_random_runs_is_geometric_and_their_rates_uniform(monkeypatch):
    """Chi-square tests on 1,000 searches with fixed seeds, false alarms once in 10^4 each."""
    monkeypatch.setattr(comparison, "random_search_epsilon", lambda *_: 1.0)
    drawn = [Entry(LEARNER, 3.0, "random_search", seed).searches() for seed in range(1000)]
    lengths = Counter(min(len(runs), 8) for runs in drawn)
    probabilities = [(2 / 3) ** (k - 1) / 3 for k in range(1, 8)] + [(2 / 3) ** 7]
    assert stats.chisquare([lengths[k] for k in range(1, 9)], 1000 * np.array(probabilities)).pvalue > 1e-4
    rates = Counter(spec.learning_rate for runs in drawn for spec in runs)
    assert set(rates) == set(EXTENDED_GRID)
    assert stats.chisquare(list(rates.values())).pvalue > 1e-4
    assert len({spec.seed for runs in drawn for spec in runs}) == sum(map(len, drawn))


def test_a_random_search_shows_the_very_model_that_scored_best(monkeypatch):
    monkeypatch.setattr(comparison, "random_search_epsilon", lambda *_: 1.0)
    drawn = {seed: Entry(LEARNER, 3.0, "random_search", seed).searches() for seed in range(6)}
    seed, runs = max(drawn.items(), key=lambda item: len(item[1]))
    assert len(runs) > 2
    best = min(runs, key=lambda spec: abs(math.log(spec.learning_rate / 0.011)))
    assert Entry(LEARNER, 3.0, "random_search", seed).final(record).key == best.key
    scale = comparison.Scale((LEARNER,), epsilons=(3.0,), seeds=6, rows=("random_search",))
    lines = table(scale, lambda spec: record(spec, test=0.25 if spec == best else 0.75))
    assert lines.accuracy.tolist() == [0.25 if one == seed else 0.75 for one in range(6)]
    assert lines.runs.tolist() == [len(runs) for runs in drawn.values()]
