"""A membership attack on the learning rate: was one planted outlier in the batch? (notebook 11)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy.stats import beta
from tqdm import tqdm

from hyfreedp import fit_quadratic
from hyfreedp.accounting.accountants import composed_epsilon
from hyfreedp.accounting.composition import probe_noise
from hyfreedp.accounting.split import Probe
from hyfreedp.experiments.store.files import cached, key_of
from hyfreedp.experiments.studies.landscape import distance_of, losses_of
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_loss


def game(
    *,
    others: list[list[float]],
    outlier: list[float],
    distance: float,
    sample_rate: float,
    expected_batch_size: float,
    sigmas: dict[Probe, float],
    weakenings: list[float],
    runs: int,
    seed: int,
) -> pd.DataFrame:
    """Learning rates b/a with and without the outlier in the batch, from raw and from private probes: a row per run.

    The observer knows weights w, direction G and threshold, all released before: R_l is the sum of the mean losses of
    the others (the rule that the paper uses in practice).

    Args:
        others: losses of all other records at (w - hG, w, w + hG), shape ``(3, N)``; ``outlier`` has three.
        sample_rate: with which others enter the batch, afresh in each run; 1 for an observer who knows the whole batch.
        sigmas: sigma_l of each probe.
        weakenings: factors on sigma_l, to see the attack where the noise is too small.
        runs: repetitions with and without the outlier, each.
    """
    known = torch.tensor(others, dtype=torch.float64)
    planted_losses = torch.tensor(outlier, dtype=torch.float64)[:, None]
    means = known.mean(dim=1).tolist()
    threshold = max(sum(means), 0.0)
    generator = NoiseGenerator(seed)
    release: dict[str, Any] = {"expected_batch_size": expected_batch_size, "generator": generator}
    rows: list[tuple[str, float, bool, int, float]] = []
    for run in tqdm(range(runs), desc="attacks", unit="run"):
        for planted in (False, True):
            batch = known[:, generator.uniform(known.shape[1]) < sample_rate]
            if planted:
                batch = torch.cat([batch, planted_losses], dim=1)
            raw = fit_quadratic([distance, 0.0, -distance], batch.mean(dim=1).tolist())
            rows.append(("raw", 0.0, planted, run, raw.minimizer))
            for probe, sigma in sigmas.items():
                for factor in weakenings:
                    losses = privatize_loss(batch, threshold, factor * sigma, **release).tolist()
                    fit = fit_quadratic([distance, 0.0, -distance], losses)
                    rows.append((probe, factor, planted, run, fit.minimizer))
    return pd.DataFrame(rows, columns=["probe", "weakening", "planted", "run", "eta"])


def games(
    folder: Path,
    probed: Sequence[pd.DataFrame],
    step: int,
    *,
    sigmas: dict[Probe, float],
    weakenings: list[float],
    runs: int,
) -> tuple[pd.DataFrame, list[str]]:
    """:func:`game` on each seed's losses at ``step``, of an observer who draws the others and of one who knows them."""
    task, tables, cells = TASKS["digits"], [], []
    common: dict[str, Any] = {"expected_batch_size": task.batch_size, "sigmas": sigmas, "weakenings": weakenings}
    for seed, table in enumerate(probed):
        for observer, part, rate in (
            ("sees a random batch", "train", task.batch_size / task.train_size),
            ("knows the others", "batch", 1.0),
        ):
            arguments = common | {
                "others": losses_of(table, step, part).tolist(),
                "outlier": losses_of(table, step, "outlier").ravel().tolist(),
                "distance": distance_of(table, step),
                "sample_rate": rate,
                "runs": runs,
                "seed": seed,
            }
            cells.append(f"cell game-{key_of(arguments)}")
            tables.append(cached(folder, game, **arguments).assign(observer=observer, seed=seed))
    return pd.concat(tables), cells


@dataclass(frozen=True)
class Score:
    """How a threshold on eta did on runs that it was not chosen on: true and false positives among ``trials`` each."""

    hits: int
    alarms: int
    trials: int

    def __add__(self, other: Score) -> Score:
        return Score(self.hits + other.hits, self.alarms + other.alarms, self.trials + other.trials)

    @property
    def advantage(self) -> float:
        """True less false positive rate."""
        return (self.hits - self.alarms) / self.trials

    def interval(self) -> tuple[float, float]:
        """95 % of the advantage: both rates get Clopper-Pearson intervals at half the error, so they hold jointly.

        Where scores were added these intervals are only wider than needed.
        """
        hits_low, hits_high = clopper_pearson(self.hits, self.trials, 0.025)
        alarms_low, alarms_high = clopper_pearson(self.alarms, self.trials, 0.025)
        return hits_low - alarms_high, hits_high - alarms_low


def judge(without: ArrayLike, planted: ArrayLike) -> Score:
    """The best threshold on eta, and its direction, chosen on the first half of the runs and judged on the second."""
    negative, positive = np.asarray(without), np.asarray(planted)
    half = negative.size // 2
    values = np.unique(np.concatenate([negative[:half], positive[:half]]))
    candidates = (values[:-1] + values[1:]) / 2 if values.size > 1 else values
    below = [np.searchsorted(np.sort(side[:half]), candidates, side="right") / half for side in (negative, positive)]
    gains = (1 - below[1]) - (1 - below[0])  # by how many more of the planted are above
    best = int(np.argmax(np.abs(gains)))
    hits, alarms = (((side[half:] > candidates[best]) == (gains[best] >= 0)).sum() for side in (positive, negative))
    return Score(int(hits), int(alarms), negative.size - half)


def clopper_pearson(successes: int, trials: int, error: float) -> tuple[float, float]:
    """Interval of a probability that misses it with probability at most ``error`` (Clopper and Pearson, 1934)."""
    low = beta.ppf(error / 2, successes, trials - successes + 1) if successes > 0 else 0.0
    high = beta.ppf(1 - error / 2, successes + 1, trials - successes) if successes < trials else 1.0
    return float(low), float(high)


def release_epsilon(probe: Probe, sigma_loss: float, delta: float) -> float:
    """Epsilon of one probe with Gaussian noise on a batch that holds the record for sure: nothing is amplified."""
    return composed_epsilon([(probe_noise(sigma_loss, probe), 1)], sample_rate=1.0, delta=delta, accountant="pld")


def advantage_bound(epsilon: ArrayLike, delta: float) -> np.ndarray:
    """What no attack on an (epsilon, delta)-DP release can exceed: (e^eps - 1 + 2 delta) / (e^eps + 1).

    The trade-off of the two error rates gives it (Kairouz, Oh and Viswanath, ICML 2015; Humphries et al., CSF 2023).
    """
    half = np.asarray(epsilon, dtype=float) / 2
    return np.tanh(half) + delta * np.exp(-half) / np.cosh(half)


def advantages(rows: pd.DataFrame, sigmas: dict[Probe, float], delta: float) -> pd.DataFrame:
    """One row per observer, probe and weakening: the ``advantage``, ``epsilon`` of the release, and its ``bound``.

    The threshold is chosen anew for each seed, and the scores of all seeds are added.
    """
    table = []
    for (observer, probe, weakening), runs in rows.groupby(["observer", "probe", "weakening"], sort=False):
        score = sum((judge(r.eta[~r.planted], r.eta[r.planted]) for _, r in runs.groupby("seed")), Score(0, 0, 0))
        epsilon = math.inf if probe == "raw" else release_epsilon(probe, weakening * sigmas[probe], delta)
        bound = float(advantage_bound(epsilon, delta))
        table.append((observer, probe, weakening, score.advantage, *score.interval(), epsilon, bound))
    names = ["observer", "probe", "weakening", "advantage", "low", "high", "epsilon", "bound"]
    return pd.DataFrame(table, columns=names)
