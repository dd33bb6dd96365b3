"""A membership attack by the learning rate: was an outlier in the batch? (notebook 11)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
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
    """Rates b/a from raw and from private probes, of batches with and without the outlier: a row for each.

    The observer knows what was released before: weights w, direction G, and the threshold R_l, here the sum of the
    others' mean losses (the rule that the paper uses in practice).

    Args:
        others, outlier: losses at (w - hG, w, w + hG) of all other records, shape (3, N), and of the outlier, (3,).
        distance: h.
        sample_rate: with which others enter a batch; 1 for an observer who knows all others in it.
        sigmas: sigma_l of each probe.
        weakenings: factors on sigma_l, to show the attack with too little noise.
        runs: number of batches with the outlier, and of batches without.

    Returns:
        ``probe`` ("raw" or a key of ``sigmas``), ``weakening``, ``planted``, ``run`` and ``eta``, the rate.
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
    """:func:`game` for two observers, with the losses of each seed (``probed``) at ``step``; and the cells' names."""
    task, tables, cells = TASKS["digits"], [], []
    common: dict[str, Any] = {"expected_batch_size": task.batch_size, "sigmas": sigmas, "weakenings": weakenings}
    rates = {"train": task.batch_size / task.train_size, "batch": 1.0}
    observers = {"train": "sees a random batch", "batch": "knows the others"}
    for (seed, table), part in product(enumerate(probed), rates):
        arguments = common | {"sample_rate": rates[part], "runs": runs, "seed": seed}
        arguments |= {"others": losses_of(table, step, part).tolist(), "distance": distance_of(table, step)}
        arguments["outlier"] = losses_of(table, step, "outlier").ravel().tolist()
        cells.append(f"cell game-{key_of(arguments)}")
        tables.append(cached(folder, game, **arguments).assign(observer=observers[part], seed=seed))
    return pd.concat(tables), cells


@dataclass(frozen=True)
class Score:
    """The result of a threshold test: ``hits`` of ``trials`` with the record, ``alarms`` of ``trials`` without."""

    hits: int
    alarms: int
    trials: int

    def __add__(self, other: Score) -> Score:
        return Score(self.hits + other.hits, self.alarms + other.alarms, self.trials + other.trials)

    @property
    def advantage(self) -> float:
        """True minus false positive rate."""
        return (self.hits - self.alarms) / self.trials

    def interval(self) -> tuple[float, float]:
        """A 95 % interval of the advantage, from Clopper-Pearson intervals of both rates, each at half of the error.

        For a sum of scores it is conservative.
        """
        hits_low, hits_high = clopper_pearson(self.hits, self.trials, 0.025)
        alarms_low, alarms_high = clopper_pearson(self.alarms, self.trials, 0.025)
        return hits_low - alarms_high, hits_high - alarms_low


def judge(without: ArrayLike, planted: ArrayLike) -> Score:
    """The score, on the second half of the runs, of the threshold and direction that are best on the first half."""
    negative, positive = np.asarray(without), np.asarray(planted)
    half = negative.size // 2
    values = np.unique(np.concatenate([negative[:half], positive[:half]]))
    candidates = (values[:-1] + values[1:]) / 2 if values.size > 1 else values
    below = [np.searchsorted(np.sort(side[:half]), candidates, side="right") / half for side in (negative, positive)]
    gains = (1 - below[1]) - (1 - below[0])  # the share of planted runs above each candidate, minus that of others
    best = int(np.argmax(np.abs(gains)))
    hits, alarms = (((side[half:] > candidates[best]) == (gains[best] >= 0)).sum() for side in (positive, negative))
    return Score(int(hits), int(alarms), negative.size - half)


def clopper_pearson(successes: int, trials: int, error: float) -> tuple[float, float]:
    """An interval that contains a probability with confidence at least 1 - ``error`` (Clopper and Pearson, 1934)."""
    low = beta.ppf(error / 2, successes, trials - successes + 1) if successes > 0 else 0.0
    high = beta.ppf(1 - error / 2, successes + 1, trials - successes) if successes < trials else 1.0
    return float(low), float(high)


def release_epsilon(probe: Probe, sigma_loss: float, delta: float) -> float:
    """Epsilon of one probe on a batch that surely has the record, so without amplification by sampling."""
    return composed_epsilon([(probe_noise(sigma_loss, probe), 1)], sample_rate=1.0, delta=delta, accountant="pld")


def advantage_bound(epsilon: ArrayLike, delta: float) -> np.ndarray:
    """The largest advantage of any attack on an (epsilon, delta)-DP release: (e^eps - 1 + 2 delta) / (e^eps + 1).

    It follows from the trade-off of error rates (Kairouz, Oh and Viswanath, ICML 2015; Humphries et al., CSF 2023).
    """
    half = np.asarray(epsilon, dtype=float) / 2
    return np.tanh(half) + delta * np.exp(-half) / np.cosh(half)


def advantages(rows: pd.DataFrame, sigmas: dict[Probe, float], delta: float) -> pd.DataFrame:
    """One row per observer, probe and weakening, from rows of :func:`games`.

    ``advantage`` with its interval (``low``, ``high``), the ``epsilon`` of the release, and the ``bound`` that follows.
    The threshold is chosen for each seed, and scores are summed over seeds.
    """
    table = []
    for (observer, probe, weakening), runs in rows.groupby(["observer", "probe", "weakening"], sort=False):
        score = sum((judge(r.eta[~r.planted], r.eta[r.planted]) for _, r in runs.groupby("seed")), Score(0, 0, 0))
        epsilon = math.inf if probe == "raw" else release_epsilon(probe, weakening * sigmas[probe], delta)
        bound = float(advantage_bound(epsilon, delta))
        table.append((observer, probe, weakening, score.advantage, *score.interval(), epsilon, bound))
    names = ["observer", "probe", "weakening", "advantage", "low", "high", "epsilon", "bound"]
    return pd.DataFrame(table, columns=names)
