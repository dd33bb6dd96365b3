"""A privacy audit of a training script, from one run with many canaries (Steinke, Nasr and Jagielski, NeurIPS 2023).

Every canary is in the training data or not, by a fair coin of its own. An auditor who sees the trained model guesses
the coins it is sure of. Under (epsilon, delta)-DP it can hardly be right more often than randomized response would be,
so many right guesses refute a claimed epsilon, and one run is enough, since every canary is a small experiment.

scipy is imported where it is used, since ``import hyfreedp`` needs none of its statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, default_collate

from hyfreedp.checks import check_number, check_probability
from hyfreedp.noise import NoiseGenerator
from hyfreedp.pytorch.layers import eval_mode

SHARES = (0.1, 0.3, 1.0)  # of the canaries about which the auditor dares a guess; all are tried, and paid for
LARGEST_EPSILON = 50.0  # where the search for a bound ends; n right guesses cannot refute more than about log(n / 3)

Train = Callable[[Dataset[Any]], Iterator[tuple[Any, Callable[[Any], Tensor]]]]


@dataclass(frozen=True)
class Audit:
    """What :func:`audit` found; as text it says what that means.

    Attributes:
        claimed: epsilon at ``delta``, as the script has it.
        lower_bound: true epsilon is at least this, with the given ``confidence``; 0 if nothing was found.
        ceiling: what ``lower_bound`` would be had all guesses been right. No claim above it can be refuted.
        right, guesses, canaries: right guesses, of how many, about how many canaries.
        delta, confidence: of the bound.
    """

    claimed: float
    lower_bound: float
    ceiling: float
    right: int
    guesses: int
    canaries: int
    delta: float
    confidence: float

    @property
    def refuted(self) -> bool:
        """Whether the bound is above the claim: the script is broken, but for chance, at most 1 - ``confidence``."""
        return self.lower_bound > self.claimed

    def __str__(self) -> str:
        if self.refuted:
            meaning = "Refuted: the script does not have the privacy that it claims. Do not publish its models."
        elif math.isinf(self.claimed):
            meaning = "Nothing is claimed: this is what the canaries of a script without noise can show."
        elif self.ceiling <= self.claimed:
            meaning = f"Nothing is proven: so few canaries refute no claim above {self.ceiling:.2f}. Take more."
        else:
            meaning = "Not refuted, which proves nothing: stronger canaries might find more."
        return (
            f"epsilon at delta={self.delta:g}: claimed {self.claimed:.2f}, found at least {self.lower_bound:.2f} "
            f"(confidence {self.confidence:.0%}; at most {self.ceiling:.2f} could be found)\n"
            f"{self.right} of {self.guesses} guesses right, about {self.canaries} canaries\n{meaning}"
        )


def audit(
    train: Train,
    records: Any,
    canaries: Sequence[Any],
    *,
    delta: float,
    confidence: float = 0.95,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    seed: int | None = None,
) -> Audit:
    """Train once by your own script, and look how much of its data can be told from the model: a bound on epsilon.

    Each canary is put into the data or left out by a secret fair coin. A canary whose loss the run has lowered much is
    guessed to be in, one whose loss it has lowered little to be out, and about the others no guess is made. How many
    guesses to make is tried in three ways, whose error adds up to 1 - ``confidence``. Right guesses become a lower
    bound of epsilon by the theorem of Steinke et al., for neighbours by adding or removing one record. The size of
    the data that the script is given is public, and differs with the coins.

    What is found depends on the canaries: the stranger each is beside all other records, the more. The audit is a run
    on your records like any other. Keep model and result to yourself, or count its epsilon (threat model: W).

    Args:
        train: your script, as a function of a map-style data set with one line more, just before the loop:
            ``yield optimizer, loss``. The first is the private optimizer, or the epsilon that the script claims at
            ``delta``, a number; the second is the loss of one record, as ``step`` takes it, before the loop and after.
        records: a map-style data set of those that are always in.
        canaries: records that are none of ``records``, of the same form, such as mislabelled ones. Some hundred or
            more: m of them cannot refute a claim above about log(m / 4).
        delta: at which the bound, and the claim, holds.
        confidence: with which the bound holds.
        collate_fn: makes a batch of one canary for the loss, as that of your loader.
        seed: of the coins, for a run that can be repeated; from the operating system if None.

    Raises:
        TypeError: ``train`` does not yield.
        ValueError: fewer than two canaries, a number out of range, or a loss that is not one number.
    """
    check_probability("confidence", confidence)
    if not 0 <= check_number("delta", delta) < 1:
        raise ValueError(f"delta must be in [0, 1), got {delta}")
    if len(canaries) < 2:
        raise ValueError(f"canaries must be at least 2, some hundred rather, got {len(canaries)}")
    coins = NoiseGenerator(seed).child("canaries").uniform(len(canaries)).numpy() < 0.5
    included = [canary for canary, coin in zip(canaries, coins, strict=True) if coin]
    run: Any = train(ConcatDataset([records, included]))  # type: ignore[list-item]
    once = "train must yield once, just before its loop: yield optimizer, loss"
    if not isinstance(run, Generator):
        raise TypeError(f"{once}; it returned {type(run).__name__}")
    try:
        claim, loss = next(run)
    except StopIteration:
        raise TypeError(f"{once}; it never did") from None
    before = _losses(claim, loss, canaries, collate_fn)
    for _ in run:  # trains
        raise TypeError(f"{once}; it did so again")
    score = before - _losses(claim, loss, canaries, collate_fn)
    epsilon_spent = getattr(claim, "epsilon_spent", None)
    claimed = check_number("epsilon", claim) if epsilon_spent is None else epsilon_spent(delta)
    ceiling = perfect_bound(2 * (len(canaries) // 2), len(canaries), delta, confidence)
    found = lower_bound([score], [coins], delta, confidence)
    return Audit(claimed=claimed, ceiling=ceiling, delta=delta, confidence=confidence, **found._asdict())


class Bound(NamedTuple):
    """A lower bound of epsilon, and how many guesses about how many canaries it rests on."""

    lower_bound: float
    right: int
    guesses: int
    canaries: int


def lower_bound(
    scores: Sequence[ArrayLike], included: Sequence[ArrayLike], delta: float, confidence: float = 0.95
) -> Bound:
    """The lower bound on epsilon from independent runs with different canaries each.

    Each canary takes part in one run only, so independent runs are together one mechanism of the same (epsilon, delta),
    and their guesses add up. All of ``SHARES`` are tried, and each gets its part of the error.

    Args:
        scores: of each run one per canary, the higher the more it seems to have been in.
        included: of each run the coins.
    """
    each = 1 - (1 - confidence) / len(SHARES)
    sizes = [len(np.asarray(run)) for run in scores]
    found = []
    for share in SHARES:
        guesses = [2 * (int(share * size) // 2) for size in sizes]
        right = sum(map(guess, scores, included, guesses))
        bound = epsilon_bound(right, sum(guesses), sum(sizes), delta, each)
        found.append(Bound(bound, right, sum(guesses), sum(sizes)))
    return max(found)


def guess(scores: ArrayLike, included: ArrayLike, guesses: int) -> int:
    """Right guesses when the highest half of ``guesses`` scores are said to be in, and as many lowest to be out."""
    coins = np.asarray(included, dtype=bool)[np.argsort(np.asarray(scores), kind="stable")]
    side = guesses // 2
    return int(coins[len(coins) - side :].sum() + (~coins[:side]).sum())


def p_value(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, if the run is (epsilon, delta)-DP (Steinke et al.).

    With f(v) = P[Binomial(r, e^eps / (1 + e^eps)) >= v] it is f(v) + 2 m delta max_i (f(v - i) - f(v)) / i.

    Args:
        right, guesses, canaries: v, r and m; from some of the m coins the auditor abstained.
    """
    from scipy.stats import binom

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
    from scipy.optimize import brentq

    def excess(epsilon: float) -> float:
        return p_value(right, guesses, canaries, epsilon, delta) - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    return float(brentq(excess, 0.0, LARGEST_EPSILON, xtol=1e-9))


def perfect_bound(guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """What :func:`lower_bound` finds at one of its numbers of guesses if none of them is wrong."""
    return epsilon_bound(guesses, guesses, canaries, delta, 1 - (1 - confidence) / len(SHARES))


@torch.no_grad()
def _losses(
    claim: Any, loss: Callable[[Any], Tensor], canaries: Sequence[Any], collate_fn: Callable[..., Any]
) -> np.ndarray:
    """Of every canary, alone; without dropout where the claim is an optimizer, which knows the model."""
    module = getattr(claim, "module", None)
    with eval_mode([] if module is None else module.modules()):
        losses = [torch.as_tensor(loss(collate_fn([canary]))) for canary in canaries]
    for one in losses:
        if one.numel() != 1:
            raise ValueError(f"loss must return one number for a record, as its mean, got shape {tuple(one.shape)}")
    return np.array([one.item() for one in losses])
