"""The audits of notebook 10: their sizes at each profile, and tables of lower bounds beside claimed epsilons."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hyfreedp import NoiseSplit
from hyfreedp.auditing import lower_bound
from hyfreedp.experiments.accounting_of_the_paper import Accountant, Composition, Counting, calibrate
from hyfreedp.experiments.audits import one_run, releases
from hyfreedp.experiments.store.files import cached
from hyfreedp.experiments.studies.noise_split import COARSENESS
from hyfreedp.experiments.tasks.registry import TASKS

DELTA = TASKS["digits"].delta
COUNTS: tuple[Composition, ...] = ("independent", "same_batch")
_LAPTOP: dict[str, Any] = {
    "independent": 4_000_000,  # runs with the record, and as many without
    "same_batch": 1_000_000,
    "accountant": "pld",
    "epsilons": [1.0, 3.0, 8.0, math.inf],
    "canaries": 1000,
    "training_steps": 50,
}
_LARGE = _LAPTOP | {"independent": 20_000_000, "same_batch": 20_000_000, "training_steps": 100}
SIZES = {
    "smoke": _LAPTOP
    | {"independent": 4000, "same_batch": 4000, "accountant": "rdp"}
    | {"epsilons": [1.0, math.inf], "canaries": 100, "training_steps": 10},
    "laptop": _LAPTOP,
    "gpu": _LARGE,
    "paper": _LARGE,
}
TITLES = {
    "robust": "preset robust (ours)",
    "paper": "HyFreeDP (preset paper)",
    "constant": "0.02, constant",
    "linear": "0.02, linear decay",
}
RATES = {"robust": 1e-4, "paper": 1e-4, "constant": 2e-2, "linear": 2e-2}  # first rates, if learned; else the rates


def _with_verdicts(table: pd.DataFrame) -> pd.DataFrame:
    told = np.where(table.lower_bound > table.claimed, "refuted", "not refuted")
    return table.assign(verdict=np.where(np.isinf(table.claimed), "nothing claimed", told))


def deltas_of(records: int) -> list[float]:
    """The deltas of audits for N records: the target's, N^-1.1, and three larger ones."""
    return [records**-1.1, 1e-4, 1e-3, 1e-2]


def joint_splits(
    *, epsilon: float, records: int, batch_size: int, steps: int, interval: int, accountant: Accountant
) -> dict[Composition, NoiseSplit]:
    """The paper's noise split by each of ``COUNTS``, at the first of :func:`deltas_of`."""
    plan: dict[str, Any] = {"target_delta": deltas_of(records)[0], "sample_rate": batch_size / records, "steps": steps}
    plan |= {"interval": interval, "target_epsilon": epsilon}
    return {count: calibrate(**plan, counting=Counting(accountant, count)) for count in COUNTS}


def joint_audits(
    folder: Path,
    sizes: dict[str, Any],
    splits: dict[Composition, NoiseSplit],
    deltas: list[float],
    *,
    confidence: float,
) -> pd.DataFrame:
    """Audits of the gradients and probes of whole runs.

    One row per composition that chose the ``noise``, composition by which it is ``counted``, and delta: the columns of
    ``releases.bounds``, the ``claimed`` epsilon (by PLD) and the ``verdict``.
    """
    tables = []
    for noise, split in splits.items():
        choices: dict[str, Any] = {"deltas": deltas, "runs": sizes[noise], "seed": 0, "confidence": confidence}
        found = cached(folder, releases.joint_bounds, split=split.to_dict(), **choices)
        for count in COUNTS:
            counting = Counting("pld", count)
            claimed = [counting.epsilon(split, delta=delta, coarseness=COARSENESS) for delta in deltas]
            tables.append(found.assign(noise=noise, counted=count, claimed=claimed))
    return _with_verdicts(pd.concat(tables, ignore_index=True))


def canary_audits(folder: Path, sizes: dict[str, Any], *, seeds: int, confidence: float) -> pd.DataFrame:
    """Audits of training runs with canaries: claim, bound and verdict for each method of ``RATES`` and epsilon."""
    size, rows = {"canaries": sizes["canaries"], "steps": sizes["training_steps"]}, []
    for target in sizes["epsilons"]:
        for method, rate in RATES.items():
            run: dict[str, Any] = {"method": method, "epsilon": target, "learning_rate": rate} | size
            results = [cached(folder, one_run.train_with_canaries, **run, seed=seed) for seed in range(seeds)]
            row = {"method": method, "target": target, "claimed": results[0].epsilon.iloc[0]}
            row["accuracy_percent"] = 100 * np.mean([result.accuracy.iloc[0] for result in results])
            scores, included = ([result[column] for result in results] for column in ("score", "included"))
            rows.append(row | lower_bound(scores, included, DELTA, confidence)._asdict())
    return _with_verdicts(pd.DataFrame(rows))
