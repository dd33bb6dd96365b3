"""The audits of notebook 10: which are run at each profile, beside what is claimed, as tables."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hyfreedp import NoiseSplit, calibrate_noise
from hyfreedp.accounting import UnsoundAccountingWarning
from hyfreedp.accounting.composition import spent
from hyfreedp.accounting.mechanisms import SQUARED_L2_SENSITIVITY, Probe
from hyfreedp.accounting.split import Composition
from hyfreedp.experiments.audits import attack, one_run, releases
from hyfreedp.experiments.store.cache import cached
from hyfreedp.experiments.studies.noise_split import COARSENESS, PAPER_SPLIT
from hyfreedp.experiments.tasks.registry import TASKS

DELTA = TASKS["digits"].delta
COUNTS: tuple[Composition, ...] = ("independent", "same_batch")
PROBES: tuple[Probe, ...] = ("losses", "votes")
RATE = 2e-2  # of the runs at a constant or a decaying rate
_LAPTOP: dict[str, Any] = {
    "losses": 1_000_000,  # probes in each world
    "votes": 40_000,  # these are released one by one
    "factors": [1.0, 0.7, 0.5, 0.35],
    "independent": 4_000_000,  # runs in each world
    "same_batch": 1_000_000,
    "accountant": "pld",
    "epsilons": [1.0, 3.0, 8.0, math.inf],
    "canaries": 1000,
    "training_steps": 50,
    "rates": [1e-3, 5e-3, RATE, 5e-2],
}
_LARGE = _LAPTOP | {"votes": 400_000, "independent": 20_000_000, "same_batch": 20_000_000, "training_steps": 100}
SIZES = {
    "smoke": _LAPTOP
    | {"losses": 20_000, "votes": 300, "factors": [1.0, 0.5], "independent": 4000, "same_batch": 4000}
    | {"accountant": "rdp", "epsilons": [1.0, math.inf], "canaries": 100, "training_steps": 10, "rates": [RATE]},
    "laptop": _LAPTOP,
    "gpu": _LARGE,
    "paper": _LARGE,
}
LABELS = {
    "robust": "HyFreeDP, preset robust",
    "paper": "HyFreeDP, preset paper",
    "constant": "constant rate 0.02",
    "linear": "0.02, linear decay",
    "tuned": "constant rate, tuned without privacy",
}


def _with_verdicts(table: pd.DataFrame) -> pd.DataFrame:
    pairs = zip(table.claimed, table.lower_bound, strict=True)
    return table.assign(verdict=[releases.verdict(*pair) for pair in pairs])


def single_sigma(epsilon: float) -> float:
    """The noise multiplier at which one release of sensitivity 1, not amplified, spends the whole of epsilon."""
    plan: dict[str, Any] = {"target_delta": DELTA, "sample_rate": 1.0, "steps": 1, "probe": "none"}
    return calibrate_noise(target_epsilon=epsilon, accountant="pld", **plan).sigma


def probe_audits(folder: Path, sizes: dict[str, Any], *, epsilon: float, confidence: float) -> pd.DataFrame:
    """One probe of losses, one vote: as claimed at ``epsilon``, and with less noise than was asked for.

    Returns:
        One row per ``probe`` and ``factor`` on the noise: ``claimed``, ``true_epsilon`` of the noise that is there, and
        the audit's ``lower_bound``.
    """
    single, rows = single_sigma(epsilon), []
    for probe in PROBES:
        sigma = single * math.sqrt(SQUARED_L2_SENSITIVITY[probe])
        claimed = attack.release_epsilon(probe, sigma, DELTA)
        choices: dict[str, Any] = {"probe": probe, "deltas": [DELTA], "runs": sizes[probe], "seed": 0}
        for factor in sizes["factors"]:
            audit = {"sigma_loss": factor * sigma, "confidence": confidence}
            found = cached(folder, releases.probe_bounds, **choices, **audit)
            true = attack.release_epsilon(probe, factor * sigma, DELTA)
            rows.append((probe, factor, claimed, true, found.lower_bound.iloc[0]))
    return pd.DataFrame(rows, columns=["probe", "factor", "claimed", "true_epsilon", "lower_bound"])


def deltas_of(records: int) -> list[float]:
    """At which runs on so many records are audited: the target's, N^-1.1, and three larger ones."""
    return [records**-1.1, 1e-4, 1e-3, 1e-2]


def joint_splits(
    *, epsilon: float, records: int, batch_size: int, steps: int, interval: int, accountant: str
) -> dict[Composition, NoiseSplit]:
    """The paper's split of epsilon, its noise chosen by either way of counting.

    Args:
        epsilon: of the whole run, at the first of :func:`deltas_of`.
        records, batch_size, steps: N, B and T.
        interval: K.
        accountant: by which noise is chosen.
    """
    plan: dict[str, Any] = {"target_delta": deltas_of(records)[0], "sample_rate": batch_size / records, "steps": steps}
    plan |= PAPER_SPLIT | {"interval": interval, "accountant": accountant}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsoundAccountingWarning)  # that is what the audit is about
        return {count: calibrate_noise(target_epsilon=epsilon, **plan, composition=count) for count in COUNTS}


def joint_audits(
    folder: Path,
    sizes: dict[str, Any],
    splits: dict[Composition, NoiseSplit],
    deltas: list[float],
    *,
    confidence: float,
) -> pd.DataFrame:
    """Gradient and probes of whole runs, as claimed by both ways of counting.

    Returns:
        One row per way that chose the ``noise``, way in which it is ``counted``, and delta: what ``releases.bounds``
        finds, the epsilon ``claimed`` (by PLD) and the ``verdict``.
    """
    tables = []
    for noise, split in splits.items():
        choices: dict[str, Any] = {"deltas": deltas, "runs": sizes[noise], "seed": 0, "confidence": confidence}
        found = cached(folder, releases.joint_bounds, split=split.to_dict(), **choices)
        for count in COUNTS:
            counted: dict[str, Any] = {"accountant": "pld", "composition": count, "coarseness": COARSENESS}
            claimed = [spent(split, split.steps, split.probe_steps, target_delta=delta, **counted) for delta in deltas]
            tables.append(found.assign(noise=noise, counted=count, claimed=claimed))
    return _with_verdicts(pd.concat(tables, ignore_index=True))


def canary_audits(folder: Path, sizes: dict[str, Any], *, seeds: int, confidence: float) -> pd.DataFrame:
    """Training runs with canaries, with each method of ``LABELS`` at each epsilon of ``sizes``.

    Returns:
        One row per ``method`` and ``target``: the epsilon ``claimed``, the mean accuracy on test digits
        (``accuracy_percent``), what ``one_run.pooled_bound`` finds and the ``verdict``.
    """
    rows = []
    for target in sizes["epsilons"]:

        def trained(method: str, rate: float, seed: int, target: float = target) -> pd.DataFrame:
            run: dict[str, Any] = {"method": method, "epsilon": target, "learning_rate": rate, "seed": seed}
            size = {"canaries": sizes["canaries"], "steps": sizes["training_steps"]}
            return cached(folder, one_run.train_with_canaries, **run, **size)

        searches = [[trained("constant", rate, seed) for rate in sizes["rates"]] for seed in range(seeds)]
        runs = {
            "robust": [trained("robust", 1e-4, seed) for seed in range(seeds)],
            "paper": [trained("paper", 1e-4, seed) for seed in range(seeds)],
            "constant": [search[sizes["rates"].index(RATE)] for search in searches],
            "linear": [trained("linear", RATE, seed) for seed in range(seeds)],
            "tuned": [one_run.tuned(search) for search in searches],
        }
        for method, results in runs.items():
            row = {"method": method, "target": target, "claimed": results[0].epsilon.iloc[0]}
            row["accuracy_percent"] = 100 * np.mean([result.accuracy.iloc[0] for result in results])
            rows.append(row | one_run.pooled_bound(results, DELTA, confidence))
    return _with_verdicts(pd.DataFrame(rows))


def all_audits(probes: pd.DataFrame, joint: pd.DataFrame, canaries: pd.DataFrame, confidence: float) -> pd.DataFrame:
    """Every audit in one table: ``mechanism``, ``delta``, ``claimed``, ``lower_bound``, ``confidence``, ``verdict``."""
    faults = ["" if factor == 1 else f", fault: noise x {factor:g}" for factor in probes.factor]
    parts = [
        probes.assign(mechanism="one probe, " + probes.probe + faults, delta=DELTA),
        joint.assign(mechanism="gradient and probes, noise " + joint.noise + ", counted " + joint.counted),
        canaries.assign(mechanism="training on digits, " + canaries.method.map(LABELS), delta=DELTA),
    ]
    columns = ["mechanism", "delta", "claimed", "lower_bound"]
    table = pd.concat([part[columns] for part in parts], ignore_index=True)
    return _with_verdicts(table.assign(confidence=confidence))


def largest_bounds(counts: Sequence[int]) -> pd.DataFrame:
    """The bound of an auditor who is right about all of so many canaries, at delta = 0."""
    largest = [one_run.epsilon_bound(count, count, count, 0.0) for count in counts]
    return pd.DataFrame({"canaries": counts, "largest_bound": largest})
