"""Accuracy by clipping threshold and learning rate, a map on which notebook 09 shows preset robust's rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hyfreedp.experiments.runs.cells import Spec, read_steps, run_cells, tabulate, with_seeds
from hyfreedp.experiments.tables import tuning_budget
from hyfreedp.experiments.tasks.registry import TASKS

TITLES = {"sgd": "SGD with momentum 0.9", "adamw": "AdamW"}
# For each profile the steps of a run and, by optimizer, thresholds R_g and rates eta.
MAPS: dict[str, dict[str, Any]] = {
    "smoke": {"steps": 10, "sgd": ((0.1, 1.0), (0.3, 3.0)), "adamw": ((0.1, 1.0), (1e-2,))},
    "laptop": {
        "steps": 50,
        "sgd": ((0.1, 0.3, 1.0, 3.0, 10.0, 30.0), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
        "adamw": ((0.3, 3.0, 30.0), (1e-3, 5e-3, 2e-2, 5e-2)),
    },
    "paper": {
        "steps": None,
        "sgd": ((0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0), (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)),
        "adamw": ((0.3, 1.0, 3.0, 10.0, 30.0), (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)),
    },
}
MAPS["gpu"] = MAPS["paper"]


def specs(profile: str, epsilon: float, seeds: int) -> list[Spec]:
    """The runs of the map, for both optimizers: each threshold and rate; each rate, normalised; and preset robust."""
    common: dict[str, Any] = {"task": "digits", "epsilon": epsilon, "steps": MAPS[profile]["steps"]}
    chosen = []
    for base in TITLES:
        thresholds, rates = MAPS[profile][base]
        chosen += [
            Spec(method="vanilla", base=base, clipping_threshold=threshold, learning_rate=rate, **common)
            for threshold in thresholds
            for rate in rates
        ]
        chosen += [Spec(method="constant", base=base, learning_rate=rate, **common) for rate in rates]
        chosen += [Spec(method="robust", base=base, **common)]
    return [one for spec in chosen for one in with_seeds(spec, seeds)]


def train(runs: Sequence[Spec], folder: Path, jobs: int) -> pd.DataFrame:
    """One row per run, see ``runs.cells.tabulate``, with ``percent`` and preset robust's median rate, ``eta``."""
    results = tabulate(run_cells(runs, folder, jobs=jobs, description="training runs"))
    results["percent"] = 100 * results.accuracy
    learned = [read_steps(spec, folder).eta.median() for spec in runs if spec.method == "robust"]
    results.loc[results.method == "robust", "eta"] = learned
    return results


def counted(profile: str, epsilon: float, runs: int) -> float:
    """Epsilon by RDP of ``runs`` runs of the map together, each calibrated to ``epsilon``."""
    task = TASKS["digits"]
    steps = MAPS[profile]["steps"] or task.steps
    protocol: dict[str, Any] = {"target_delta": task.delta, "sample_rate": task.batch_size / task.train_size}
    sigma = tuning_budget.dp_sgd_noise(target_epsilon=epsilon, steps=steps, **protocol)
    return tuning_budget.dp_sgd_epsilon(sigma, steps=runs * steps, **protocol)
