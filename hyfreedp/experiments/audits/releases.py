"""Empirical lower bounds on epsilon from the library's own releases: gradients and probes of whole runs.

An audit repeats a game: an observer of all releases guesses whether one worst-case record was in the data. The rates of
true and false positives bound epsilon from below, at a stated confidence. Such a bound can refute a claimed epsilon,
but never confirm one. All releases come from :mod:`hyfreedp.privatize` and
:class:`~hyfreedp.data.sampling.PoissonSampler`, with the noise of a real :class:`~hyfreedp.NoiseSplit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from tqdm import tqdm

from hyfreedp.accounting import NoiseSplit
from hyfreedp.data.sampling import PoissonSampler
from hyfreedp.experiments.audits.attack import Score, clopper_pearson
from hyfreedp.experiments.store.provenance import one_thread
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_gradient, privatize_loss

CHUNK = 50_000  # runs simulated at once, in one tensor
# Number of candidate thresholds in each tail: quantiles of the scores, evenly spaced on a logarithmic scale.
TAIL_POINTS = 60


def epsilon_bound(score: Score, delta: float, confidence: float = 0.95) -> float:
    """A lower bound on the epsilon of a release, from the score of a threshold that was fixed beforehand.

    Let h and a be the true and false positive rates of a test. By (epsilon, delta)-DP, h <= e^eps a + delta and
    1 - a <= e^eps (1 - h) + delta (Kairouz, Oh and Viswanath, ICML 2015). Here h is the lower and a the upper
    Clopper-Pearson bound, each with half of the error.
    """
    hits = clopper_pearson(score.hits, score.trials, 1 - confidence)[0]
    alarms = clopper_pearson(score.alarms, score.trials, 1 - confidence)[1]
    ratios = [(hits - delta, alarms), (1 - alarms - delta, 1 - hits)]
    return max([0.0, *(math.log(top / bottom) for top, bottom in ratios if top > 0)])


def best_score(without: ArrayLike, planted: ArrayLike, delta: float, confidence: float = 0.95) -> Score:
    """The score, on the second half of the runs, of the threshold with the largest bound on the first half.

    It maximises :func:`epsilon_bound`, not the advantage as ``attack.judge``: the tails show a large epsilon best.
    """
    negative, positive = np.asarray(without), np.asarray(planted)
    half = negative.size // 2
    first = np.sort(negative[:half]), np.sort(positive[:half])
    tails = np.geomspace(1 / half, 0.5, TAIL_POINTS)
    cuts = np.unique(np.quantile(np.concatenate(first), np.concatenate([tails, 1 - tails])))
    alarms, hits = (half - np.searchsorted(values, cuts, side="right") for values in first)
    scores = [Score(int(h), int(a), half) for h, a in zip(hits, alarms, strict=True)]
    chosen = cuts[int(np.argmax([epsilon_bound(score, delta, confidence) for score in scores]))]
    rest = negative.size - half
    return Score(int((positive[half:] > chosen).sum()), int((negative[half:] > chosen).sum()), rest)


def bounds(runs: pd.DataFrame, deltas: Sequence[float], confidence: float = 0.95) -> pd.DataFrame:
    """A row for each delta, with the lower bound on epsilon; all hold jointly at ``confidence`` (Bonferroni).

    Args:
        runs: columns ``without`` and ``planted`` (the record), each with one test statistic per run.
        deltas: chosen before the runs.
    """
    each = 1 - (1 - confidence) / len(deltas)
    rows = []
    for delta in deltas:
        score = best_score(runs.without, runs.planted, delta, each)
        rows.append((delta, score.hits, score.alarms, score.trials, epsilon_bound(score, delta, each)))
    return pd.DataFrame(rows, columns=["delta", "hits", "alarms", "trials", "lower_bound"])


def joint_bounds(
    *, split: dict[str, Any], deltas: list[float], runs: int, seed: int, confidence: float
) -> pd.DataFrame:
    """:func:`bounds` from gradients and probes of simulated whole runs whose only record is the worst case.

    In each step a Poisson sampler decides in which runs the record is in the batch. There it moves the gradient by its
    clip in one direction, and each of three losses by R_l; gradient and probe are of the same batch, as in Algorithm 1.
    The test statistic is the log likelihood ratio of all releases, sum_t log(1 - q + q p_t / p'_t), where p_t and p'_t
    are the densities of step t's releases with and without the record in the batch.

    Args:
        split: a :class:`~hyfreedp.NoiseSplit` as a dictionary, with probe "losses".
        runs: number of runs with the record, and of runs without.
    """
    plan = NoiseSplit.from_dict(split)
    generator = NoiseGenerator(seed)
    sizes = [min(CHUNK, runs - start) for start in range(0, runs, CHUNK)]
    tables = []
    for index, size in enumerate(tqdm(sizes, desc="runs with and without the record", unit="chunk")):
        sampler = PoissonSampler(
            num_records=size, sample_rate=plan.sample_rate, steps_per_epoch=plan.steps, seed=seed * len(sizes) + index
        )
        with one_thread():
            without = _whole_runs(plan, size, lambda _: [], generator).numpy()
            planted = _whole_runs(plan, size, sampler.batch, generator).numpy()
        tables.append(pd.DataFrame({"without": without, "planted": planted}))
    return bounds(pd.concat(tables), deltas, confidence)


def _whole_runs(plan: NoiseSplit, runs: int, inside: Callable[[int], list[int]], generator: NoiseGenerator) -> Tensor:
    """Log likelihood ratios (runs,) of simulated runs; ``inside(t)`` lists those with the record in batch t."""
    q, size = plan.sample_rate, 1 / plan.sample_rate  # any expected batch size would do: it scales all releases
    known: dict[str, Any] = {"expected_batch_size": size, "generator": generator}
    total = torch.zeros(runs, dtype=torch.float64)
    for t in range(plan.steps):
        members = torch.tensor(inside(t), dtype=torch.int64)
        gradient = torch.zeros(runs).index_fill_(0, members, 1.0)  # the sum of clipped gradients of each run
        sigma = plan.gradient_noise_multiplier(t)
        privatize_gradient([gradient], sigma, sensitivity=1.0, **known)
        ratio = (size * gradient.double() - 0.5) / sigma**2
        if plan.is_probe_step(t):  # three private mean losses per run: of an empty batch, or of the record alone
            means = privatize_loss(torch.empty(runs, 3, 0), 1.0, plan.sigma_loss, **known)
            losses = torch.ones(len(members), 3, 1)  # of the worst-case record, at the clip R_l = 1
            means[members] = privatize_loss(losses, 1.0, plan.sigma_loss, **known)
            ratio += ((size * means - 0.5) / plan.sigma_loss**2).sum(1)
        total += torch.log1p(q * torch.expm1(ratio))
    return total
