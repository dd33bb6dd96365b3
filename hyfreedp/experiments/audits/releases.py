"""Empirical lower bounds on epsilon from the library's own releases, the gradients and probes of whole runs.

An audit plays a game many times: with or without one worst-case record, can an observer of what was released tell
which? How often the observer is right and wrong bounds epsilon from below, at a stated confidence. Such a bound can
refute a claimed epsilon; it can never confirm one. Everything released here comes from :mod:`hyfreedp.privatize` and
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

CHUNK = 50_000  # runs that are simulated side by side
# Thresholds that are tried: quantiles of the scores, evenly spaced on a logarithmic scale towards both tails.
TAIL_POINTS = 60


def epsilon_bound(score: Score, delta: float, confidence: float = 0.95) -> float:
    """The epsilon that a release must have at least, given how a threshold fixed beforehand did on it.

    (epsilon, delta)-DP means h <= e^eps a + delta for the true and false positive rates h and a of any test, and the
    same for 1 - a and 1 - h (Kairouz, Oh and Viswanath, ICML 2015). h is replaced by its lower and a by its upper
    Clopper-Pearson bound, each with half of the error.
    """
    hits = clopper_pearson(score.hits, score.trials, 1 - confidence)[0]
    alarms = clopper_pearson(score.alarms, score.trials, 1 - confidence)[1]
    ratios = [(hits - delta, alarms), (1 - alarms - delta, 1 - hits)]
    return max([0.0, *(math.log(top / bottom) for top, bottom in ratios if top > 0)])


def best_score(without: ArrayLike, planted: ArrayLike, delta: float, confidence: float = 0.95) -> Score:
    """The threshold with the largest :func:`epsilon_bound` on the first half of the runs, judged on the second.

    Unlike ``attack.judge``, which looks for the largest advantage: evidence for a large epsilon is in the tails.
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
    """Per delta stated beforehand, the lower bound on epsilon, all jointly at ``confidence`` (Bonferroni).

    Args:
        runs: columns ``without`` and ``planted``, one statistic per run and world.
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
    """:func:`bounds` by what gradients and probes of whole runs release about a worst-case record, and only about it.

    At every step a Poisson sampler says in which runs the record is in the batch. There it moves the gradient by its
    clip along one direction, and each of the three losses by theirs; gradient and probe see the same batch, as in
    Algorithm 1. The observer weighs the released numbers of a step by their noise, which is the best linear statistic
    of them, and adds over the steps the log likelihood ratio that it gives: log(1 - q + q p/p').

    Args:
        split: a :class:`~hyfreedp.NoiseSplit` as a dictionary, with probe "losses".
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
    """Log likelihood ratios of ``runs`` runs side by side; ``inside(t)`` names those with the record in batch t."""
    q, size = plan.sample_rate, 1 / plan.sample_rate  # the expected batch size does not matter: it scales all releases
    known: dict[str, Any] = {"expected_batch_size": size, "generator": generator}
    total = torch.zeros(runs, dtype=torch.float64)
    for t in range(plan.steps):
        members = torch.tensor(inside(t), dtype=torch.int64)
        gradient = torch.zeros(runs).index_fill_(0, members, 1.0)  # sums of clipped gradients, one number per run
        sigma = plan.gradient_noise_multiplier(t)
        privatize_gradient([gradient], sigma, sensitivity=1.0, **known)
        ratio = (size * gradient.double() - 0.5) / sigma**2
        if plan.is_probe_step(t):  # three private mean losses per run: of the record alone, or of an empty batch
            means = privatize_loss(torch.empty(runs, 3, 0), 1.0, plan.sigma_loss, **known)
            losses = torch.ones(len(members), 3, 1)  # of the worst-case record, at the clip R_l = 1
            means[members] = privatize_loss(losses, 1.0, plan.sigma_loss, **known)
            ratio += ((size * means - 0.5) / plan.sigma_loss**2).sum(1)
        total += torch.log1p(q * torch.expm1(ratio))
    return total
