"""A privacy audit from one training run with many canaries (Steinke, Nasr and Jagielski, NeurIPS 2023).

Every canary is in the training data or not, by a fair coin of its own. An auditor who sees the trained model guesses
the coins it is sure of. Under (epsilon, delta)-DP it can hardly be right more often than randomized response would be,
so many right guesses refute a claimed epsilon, and one run is enough, since every canary is a small experiment.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.stats import binom
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hyfreedp import PrivacyEngine
from hyfreedp.data.sampling import PoissonSampler
from hyfreedp.experiments.data.datasets import digits
from hyfreedp.experiments.data.in_memory import Records, as_is
from hyfreedp.experiments.models.image_models import make_model
from hyfreedp.experiments.runs.methods import BASES, METHODS
from hyfreedp.experiments.runs.train import one_thread
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.noise import NoiseGenerator

SHARES = (0.1, 0.3, 1.0)  # of the canaries about which the auditor dares a guess
BRIGHTNESS = 8.0  # of a canary's pixel; those of digits are at most 1
LARGEST_EPSILON = 50.0  # where the search for a bound ends; n right guesses cannot refute more than about log(20 n)


def p_value(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, if the run is (epsilon, delta)-DP (Steinke et al.).

    With f(v) = P[Binomial(r, e^eps / (1 + e^eps)) >= v] it is f(v) + 2 m delta max_i (f(v - i) - f(v)) / i.

    Args:
        right, guesses, canaries: v, r and m; from some of the m coins the auditor abstained.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"0 <= right <= guesses <= canaries must hold, got {right}, {guesses}, {canaries}")
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise ValueError(f"epsilon must be at least 0 and delta in [0, 1], got {epsilon} and {delta}")
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, chance))
    fewer = np.arange(1, right + 1)  # i
    gained = np.cumsum(binom.pmf(right - fewer, guesses, chance))  # f(v - i) - f(v)
    slope = float(np.max(gained / fewer, initial=0.0))
    return min(1.0, tail + 2 * canaries * delta * slope)


def epsilon_bound(right: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that :func:`p_value` refutes, with the given confidence; 0 if it refutes none."""

    def excess(epsilon: float) -> float:
        return p_value(right, guesses, canaries, epsilon, delta) - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    return float(brentq(excess, 0.0, LARGEST_EPSILON, xtol=1e-9))


def perfect_bound(guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """What :func:`pooled_bound` finds at one of its numbers of guesses if none of them is wrong."""
    return epsilon_bound(guesses, guesses, canaries, delta, 1 - (1 - confidence) / len(SHARES))


def guess(scores: ArrayLike, included: ArrayLike, guesses: int) -> int:
    """Right guesses when the highest half of ``guesses`` scores are said to be in, and as many lowest to be out."""
    coins = np.asarray(included, dtype=bool)[np.argsort(np.asarray(scores), kind="stable")]
    side = guesses // 2
    return int(coins[len(coins) - side :].sum() + (~coins[:side]).sum())


def pooled_bound(runs: Sequence[pd.DataFrame], delta: float, confidence: float = 0.95) -> dict[str, float]:
    """The lower bound on epsilon from results of :func:`train_with_canaries`, with different canaries each.

    Each canary takes part in one run only, so independent runs are together one mechanism of the same (epsilon, delta),
    and their guesses add up. All of ``SHARES`` are tried, and each gets its part of the error.
    """
    each = 1 - (1 - confidence) / len(SHARES)
    canaries = sum(len(run) for run in runs)
    found = []
    for share in SHARES:
        sides = [2 * (int(share * len(run)) // 2) for run in runs]
        right = sum(guess(run.score, run.included, side) for run, side in zip(runs, sides, strict=True))
        found.append((epsilon_bound(right, sum(sides), canaries, delta, each), right, sum(sides), canaries))
    return dict(zip(("lower_bound", "right", "guesses", "canaries"), max(found), strict=True))


def train_with_canaries(
    *, method: str, epsilon: float, learning_rate: float, canaries: int, steps: int, seed: int
) -> pd.DataFrame:
    """Train on digits of which the last ``canaries`` are replaced by canaries, each present by a fair coin of its own.

    A canary is a black image with one bright pixel that no other image has, under a random label: most of its gradient
    is orthogonal to all others, so that its loss tells of its own presence.

    Args:
        method: in ``METHODS``, trained with AdamW.
        learning_rate: of the methods that do not learn it; otherwise the first one.

    Returns:
        One row per canary: ``included``, its coin, and ``score``, by how much training lowered its loss; and the same
        in all rows ``accuracy`` on the test digits and ``epsilon``, what the run claims to have spent.
    """
    chosen, task, arrays = METHODS[method], TASKS["digits"], digits()
    random = NoiseGenerator(seed).child("canaries", canaries)
    images, labels = _with_canaries(*arrays.train, canaries, random)
    included = random.uniform(canaries).numpy() < 0.5
    present = np.concatenate([np.ones(len(labels) - canaries, dtype=bool), included])
    shape: dict[str, Any] = {"features": images.shape[1], "classes": int(labels.max()) + 1, "seed": seed}
    learned: dict[str, Any] = {"initial_learning_rate": learning_rate} if chosen.searches else {}
    with one_thread():
        data, model = Records(images, labels), make_model("mlp", "full", **shape)
        scorer = make_model("mlp", "full", **shape).double()  # loss differences of a run that hardly moves are tiny
        _, optimizer, loader = PrivacyEngine(seed=seed).make_private_with_epsilon(
            module=model,
            optimizer=BASES["adamw"](model.parameters(), lr=learning_rate),
            data_loader=DataLoader(data, batch_size=task.batch_size, collate_fn=as_is),
            target_epsilon=epsilon,
            target_delta=task.delta,
            steps=steps,
            preset=chosen.preset,
            **chosen.overrides,
            **learned,
        )
        before = _losses(scorer, images, labels)

        def per_sample_loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

        # Absent canaries leave the batch that they are drawn into; the others stay a Poisson sample. Sample rate and
        # expected batch size, which refer to all slots, do not tell who is absent: so two data sets that differ by one
        # canary are neighbours by adding or removing one record, with nothing else changed.
        sampler = cast(PoissonSampler, loader.batch_sampler)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a batch of .* samples was passed to step")
            for step in range(steps):
                drawn = [index for index in sampler.batch(step) if present[index]]
                optimizer.step(per_sample_loss, data.__getitems__(drawn))
        scorer.load_state_dict(model.state_dict())
        after = _losses(scorer, images, labels)
        test_images, test_labels = arrays.test
        padded = F.pad(test_images, (0, canaries)).double()
        with torch.no_grad():
            accuracy = (scorer(padded).argmax(dim=1) == test_labels).double().mean().item()
    return pd.DataFrame(
        {
            "included": included,
            "score": (before - after)[-canaries:],
            "accuracy": accuracy,
            "epsilon": optimizer.epsilon_spent(),
        }
    )


def _with_canaries(images: Tensor, labels: Tensor, canaries: int, random: NoiseGenerator) -> tuple[Tensor, Tensor]:
    """A pixel more per canary; the last records are replaced by canaries."""
    if not 1 <= canaries < len(labels):
        raise ValueError(f"canaries must be at least 1 and fewer than the {len(labels)} records, got {canaries}")
    honest = len(labels) - canaries
    marked = F.pad(images, (0, canaries))
    marked[honest:] = 0
    marked[honest:, images.shape[1] :] = BRIGHTNESS * torch.eye(canaries)
    wrong = (random.uniform(canaries) * (int(labels.max()) + 1)).long()
    return marked, torch.cat([labels[:honest], wrong])


def _losses(model: nn.Module, images: Tensor, labels: Tensor) -> np.ndarray:
    with torch.no_grad():
        return F.cross_entropy(model(images.double()), labels, reduction="none").numpy()
