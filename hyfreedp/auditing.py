"""A privacy audit of a training script, from one run with many canaries (Steinke, Nasr and Jagielski, NeurIPS 2023).

An auditor guesses which canaries were in the data. Under (epsilon, delta)-DP they can hardly be right more often than
under randomized response, so many right guesses refute a claim. One run suffices, since each canary is an experiment.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, default_collate

from hyfreedp.checks import check_number, check_type
from hyfreedp.noise import NoiseGenerator
from hyfreedp.pytorch.layers import eval_mode

SHARES = (0.1, 0.3, 1.0)  # shares of the canaries to guess about; all three are tried, with a union bound
LARGEST_EPSILON = 50.0  # where the search for a bound ends; n right guesses refute at most about log(n / 3)

Train = Callable[[Dataset[Any]], Iterator[tuple[Any, Callable[[Any], Tensor]]]]


@dataclass(frozen=True)
class Audit:
    """Result of :func:`audit`; ``str`` says what it means.

    Attributes:
        claimed: the epsilon at ``delta`` that the script claims.
        lower_bound: the true epsilon is at least this, with the given ``confidence``; 0 if nothing was found.
        ceiling: what ``lower_bound`` would be if all guesses were right. No claim above it can be refuted.
        right, guesses, canaries: the numbers of right guesses, of all guesses, and of canaries.
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
        """Whether the bound exceeds the claim; if the claim is true, with probability at most 1 - ``confidence``."""
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
    """Train once with your own script, and bound its epsilon from below by membership inference on canaries.

    Each canary is put into the data or left out by a secret fair coin. Canaries whose loss the run has lowered most are
    guessed to be in, those whose loss it has lowered least to be out; about the others there is no guess. Three numbers
    of guesses are tried, whose error probabilities add up to 1 - ``confidence``. The right guesses give a lower bound
    of epsilon by the theorem of Steinke et al., for neighbours that differ by adding or removing one record. The more
    canaries differ from all other records, the larger it is. The size of the data that the script gets depends on the
    coins. The audit is a run like any other: keep model and result secret, or count its epsilon (threat model: W).

    Args:
        train: your script as a function of a map-style data set, with one additional line just before its loop:
            ``yield optimizer, loss``. The first is the private optimizer, or the epsilon that the script claims at
            ``delta``, a number. The second is the loss function for ``step``; it is called before and after the loop.
        records: a map-style data set of the records that are always included.
        canaries: records that are not in ``records``, of the same form, such as mislabelled ones. Several hundred or
            more: m of them cannot refute a claim above about log(m / 4).
        delta, confidence: of the bound; the claim is at ``delta``, too.
        collate_fn: makes a batch of one canary for the loss, as your loader does.
        seed: of the coins, for reproducible runs; None: from the operating system.

    TypeError if ``train`` does not yield; ValueError for fewer than two canaries, or a loss that is not one number.
    """
    check_type("train", train, Callable, "a function of a data set")
    check_type("collate_fn", collate_fn, Callable, "a function of a list of records")
    try:
        _, number = len(records), len(canaries)
    except TypeError as error:
        raise TypeError(f"records and canaries must have a length, as map-style data sets: {error}") from None
    check_number("confidence", confidence, "(0, 1)")
    check_number("delta", delta, "[0, 1)")
    if number < 2:
        raise ValueError(f"canaries must be at least 2, some hundred rather, got {number}")
    coins = NoiseGenerator(seed).child("canaries").uniform(len(canaries)).numpy() < 0.5
    included = [canary for canary, coin in zip(canaries, coins, strict=True) if coin]
    run: Any = train(ConcatDataset([records, included]))  # type: ignore[list-item]
    once = "train must yield once, just before its loop: yield optimizer, loss"
    if not isinstance(run, Generator):
        raise TypeError(f"{once}; it returned {type(run).__name__}")
    pair = next(run, None)
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"{once}; it gave {type(pair).__name__}")
    claim, loss = pair
    before = _losses(claim, loss, canaries, collate_fn)
    for _ in run:  # trains
        raise TypeError(f"{once}; it did so again")
    score = before - _losses(claim, loss, canaries, collate_fn)
    epsilon_spent = getattr(claim, "epsilon_spent", None)
    claimed = check_number("epsilon", claim) if epsilon_spent is None else epsilon_spent(delta)
    ceiling = perfect_bound(2 * (len(canaries) // 2), len(canaries), delta, confidence)
    bound = lower_bound([score], [coins], delta, confidence)
    return Audit(claimed=claimed, ceiling=ceiling, delta=delta, confidence=confidence, **bound._asdict())


class Bound(NamedTuple):
    """A lower bound of epsilon, and the numbers of right guesses, guesses and canaries behind it."""

    lower_bound: float
    right: int
    guesses: int
    canaries: int


def lower_bound(
    scores: Sequence[ArrayLike], included: Sequence[ArrayLike], delta: float, confidence: float = 0.95
) -> Bound:
    """The lower bound on epsilon from independent runs, each with its own canaries.

    Each canary is in one run only, so the runs together are one mechanism with the same (epsilon, delta), and their
    guesses add up. All ``SHARES`` are tried, each with an equal part of the error probability.

    Args:
        scores: for each run the scores of its canaries, higher for those that seem to be included.
        included: for each run whether its canaries were included.
    """
    confidence_each = 1 - (1 - confidence) / len(SHARES)
    sizes, bounds = [len(np.asarray(run)) for run in scores], []
    for share in SHARES:
        guesses = [2 * (int(share * size) // 2) for size in sizes]
        right = sum(map(guess, scores, included, guesses))
        bound = epsilon_bound(right, sum(guesses), sum(sizes), delta, confidence_each)
        bounds.append(Bound(bound, right, sum(guesses), sum(sizes)))
    return max(bounds)


def guess(scores: ArrayLike, included: ArrayLike, guesses: int) -> int:
    """The number of right guesses: the ``guesses // 2`` highest scores are guessed in, as many lowest ones out."""
    coins = np.asarray(included, dtype=bool)[np.argsort(np.asarray(scores), kind="stable")]
    side = guesses // 2
    return int(coins[len(coins) - side :].sum() + (~coins[:side]).sum())


def p_value(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Upper bound of the probability of this many right guesses if the run is (epsilon, delta)-DP (Steinke et al.).

    With f(v) = P[Binomial(r, e^eps / (1 + e^eps)) >= v] it is f(v) + 2 m delta max_i (f(v - i) - f(v)) / i.

    Args:
        right, guesses, canaries: v, r and m, where v <= r <= m.
    """
    from scipy.stats import binom  # it takes a second, which `import hyfreedp` need not

    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"0 <= right <= guesses <= canaries must hold, got {right}, {guesses}, {canaries}")
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise ValueError(f"epsilon must be at least 0 and delta in [0, 1], got {epsilon} and {delta}")
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, chance))
    fewer = np.arange(1, right + 1)  # i
    gained = np.cumsum(binom.pmf(right - fewer, guesses, chance))  # f(v - i) - f(v)
    return min(1.0, tail + 2 * canaries * delta * float(np.max(gained / fewer, initial=0.0)))


def epsilon_bound(right: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that :func:`p_value` refutes at the given confidence; 0 if there is none."""
    from scipy.optimize import brentq

    def excess(epsilon: float) -> float:
        return p_value(right, guesses, canaries, epsilon, delta) - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    return float(brentq(excess, 0.0, LARGEST_EPSILON, xtol=1e-9))


def perfect_bound(guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """What :func:`lower_bound` would be if all ``guesses`` were right."""
    return epsilon_bound(guesses, guesses, canaries, delta, 1 - (1 - confidence) / len(SHARES))


@torch.no_grad()
def _losses(
    claim: Any, loss: Callable[[Any], Tensor], canaries: Sequence[Any], collate_fn: Callable[..., Any]
) -> np.ndarray:
    """The loss of each canary, computed alone; in eval mode if ``claim`` is an optimizer, which knows the model."""
    module = getattr(claim, "module", None)
    with eval_mode([] if module is None else module.modules()):
        losses = [torch.as_tensor(loss(collate_fn([canary]))) for canary in canaries]
    for value in losses:
        if value.numel() != 1:
            raise ValueError(f"loss must return one number for a record, as its mean, got shape {tuple(value.shape)}")
    return np.array([value.item() for value in losses])
