"""Weights of classes in private training: beside the loss and within it, ours and Opacus, on imbalanced tasks.

Opacus and plain torch take their learning rate from validation data, which epsilon does not cover. Ours take none.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import opacus
import pandas as pd
import torch
import torch.nn.functional as F
from opacus.accountants.utils import get_noise_multiplier
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hyfreedp import PrivacyEngine
from hyfreedp.experiments.data.bank import Labelled, bank_with
from hyfreedp.experiments.data.in_memory import Records, as_is
from hyfreedp.experiments.store.provenance import with_versions
from hyfreedp.experiments.studies.growing import grown
from hyfreedp.experiments.tasks.scores import Evaluation
from hyfreedp.gradients import AbadiClipping, Clipping

# -- tasks -------------------------------------------------------------------------------------------------------------


def eights() -> Labelled:
    """scikit-learn's digits: is it an 8? 64 features in [0, 1]."""
    features, labels = load_digits(return_X_y=True)
    return torch.from_numpy(features / 16).float(), torch.from_numpy(labels == 8).long()


@dataclass(frozen=True)
class Task:
    """What is public of a task: the share of the minority, by which it is weighed, batch size and number of steps."""

    title: str
    load: Callable[[], Labelled]
    share: float
    batch_size: int
    steps: int

    def data(self, evaluation: Evaluation) -> tuple[Labelled, Labelled]:
        """For training and for scores: a fifth is for the test, and a fifth of the rest for validation."""
        x, y = self.load()
        order = torch.from_numpy(np.random.default_rng(1).permutation(len(y)))
        test, rest = order[: len(y) // 5], order[len(y) // 5 :]
        if evaluation == "validation":
            test, rest = rest[: len(rest) // 5], rest[len(rest) // 5 :]
        return (x[rest], y[rest]), (x[test], y[test])


TASKS = {
    "bank24": Task("bank, 24 %", cache(lambda: bank_with(0.24)), 0.24, 500, 150),
    "bank10": Task("bank, 10 %", cache(lambda: bank_with(0.10)), 0.10, 500, 150),
    "eights": Task("digits, 10 %", cache(eights), 0.10, 200, 100),
}
MODELS = {"logistic": "logistic regression", "mlp": "MLP"}


def model_of(name: str, features: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if name == "logistic":
        return nn.Linear(features, 2)
    return nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 2))


# -- contenders --------------------------------------------------------------------------------------------------------


Kind = Literal["largest 1", "mean 1"]


@dataclass(frozen=True)
class Contender:
    """Who trains, and where the weights of the classes go.

    Attributes:
        inside: weights within the loss, with their largest or their mean made 1.
        beside: ``weights=`` of the step.
        clipping: as of ``make_private_with_epsilon``.
    """

    title: str
    library: Literal["ours", "opacus", "torch"] = "ours"
    inside: Kind | None = None
    beside: bool = False
    clipping: Clipping | None = None


CONTENDERS = {
    "ours": Contender("ours"),
    "ours_inside": Contender("ours, weights in the loss", inside="largest 1"),
    "ours_weights": Contender("ours, `weights=`", beside=True),
    "ours_weights_flat": Contender("ours, `weights=`, flat clipping", beside=True, clipping=AbadiClipping(1.0)),
    "opacus": Contender("Opacus", "opacus"),
    "opacus_inside": Contender("Opacus, weights in the loss, largest 1", "opacus", "largest 1"),
    "opacus_inside_mean": Contender("Opacus, weights in the loss, mean 1", "opacus", "mean 1"),
    "torch": Contender("not private, weights in the loss", "torch", "mean 1"),
}
RATES = (0.001, 0.01, 0.1, 1.0)
EPSILONS = (3.0, 8.0)


def class_weights(share: float, kind: Kind) -> Tensor:
    """Of majority and minority: in the inverse ratio of their shares, with the largest or the mean weight made 1."""
    weights = torch.tensor([share / (1 - share), 1.0])
    return weights if kind == "largest 1" else weights / (2 * share)


@cache
def _noise_multiplier(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    return get_noise_multiplier(
        target_epsilon=epsilon, target_delta=delta, sample_rate=sample_rate, steps=steps, accountant="prv"
    )


def train(
    model: nn.Module, data: Labelled, task: Task, contender: Contender, epsilon: float, rate: float, seed: int
) -> None:
    """Train ``model`` for the task's steps, with delta = 1 / (10 N)."""
    beside = class_weights(task.share, "largest 1")
    inside = class_weights(task.share, contender.inside) if contender.inside else None
    delta = 1 / (10 * len(data[1]))
    loader: Any = DataLoader(Records(*data), task.batch_size, shuffle=contender.library == "torch", collate_fn=as_is)
    # Ours learns its rate, and wants a positive one nevertheless.
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=rate or 0.001)

    def losses(batch: Labelled) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=inside, reduction="none")

    if contender.library == "ours":
        _, optimizer, loader = PrivacyEngine(seed=seed).make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            target_epsilon=epsilon,
            target_delta=delta,
            steps=task.steps,
            clipping=contender.clipping,
        )
    elif contender.library == "opacus":
        sigma = _noise_multiplier(epsilon, delta, 1 / len(loader), task.steps)
        model, optimizer, loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=sigma, max_grad_norm=1.0
        )
    batches = (batch for _ in range(task.steps) for batch in loader)
    for _, batch in zip(range(task.steps), batches, strict=False):
        if contender.library == "ours":
            optimizer.step(losses, batch, weights=(lambda batch: beside[batch[1]]) if contender.beside else None)
        else:
            optimizer.zero_grad()
            losses(batch).mean().backward()
            optimizer.step()


# -- runs --------------------------------------------------------------------------------------------------------------

RUN = ["task", "model", "contender", "epsilon", "rate", "seed", "evaluation"]
SCORES = ["minority_recall", "majority_recall", "balanced_accuracy", "auc", "log_loss"]
Run = tuple[str, str, str, float, float, int, Evaluation]


def scores_of(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Of logits (N, 2) for labels (N,): the recall of each class, their mean, AUC, and log loss (nats)."""
    right = (logits.argmax(1) == labels).double()
    majority, minority = (right[labels == label].mean().item() for label in (0, 1))
    auc = roc_auc_score(labels.numpy(), (logits[:, 1] - logits[:, 0]).numpy())
    loss = F.cross_entropy(logits.double(), labels).item()
    return dict(zip(SCORES, (minority, majority, (minority + majority) / 2, float(auc), loss), strict=True))


def run_of(run: Run) -> pd.DataFrame:
    """Train one run; its row."""
    name, model_name, contender, epsilon, rate, seed, evaluation = run
    data, (x, y) = TASKS[name].data(evaluation)
    model, started = model_of(model_name, data[0].shape[1], seed), time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Secure RNG|Optimal order|Full backward hook")  # Opacus's, and its hooks'
        train(model, data, TASKS[name], CONTENDERS[contender], epsilon, rate, seed)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        scores = scores_of(model(x), y)
    row: dict[str, Any] = dict(zip(RUN, run, strict=True)) | {"records": len(data[1]), "held_out": len(y)}
    return with_versions(pd.DataFrame([row | scores | {"seconds": seconds}]))


def places() -> Iterator[tuple[str, str, str, float]]:
    """Task, model, contender and epsilon."""
    for task, model, (name, contender) in product(TASKS, MODELS, CONTENDERS.items()):
        for epsilon in (math.inf,) if contender.library == "torch" else EPSILONS:
            yield task, model, name, epsilon


def searches() -> list[Run]:
    """The runs on validation data."""
    searching = [place for place in places() if CONTENDERS[place[2]].library != "ours"]
    return [(*place, rate, seed, "validation") for place, rate, seed in product(searching, RATES, (10, 11))]


def tested(rows: pd.DataFrame) -> list[Run]:
    """The runs that are tested: at the rate of the best balanced accuracy on validation data, 0 where it is learned."""
    means = rows[rows.evaluation == "validation"].groupby([*RUN[:4], "rate"]).balanced_accuracy.mean()
    rates = {place: means[place].idxmax() if CONTENDERS[place[2]].library != "ours" else 0.0 for place in places()}
    return [(*place, rate, seed, "test") for place, rate in rates.items() for seed in range(5)]


def record(table: Path) -> pd.DataFrame:
    """Train the runs that the table lacks and add them to it; the table."""
    searched = grown(table, RUN, searches(), run_of, label="weights: rates")
    return grown(table, RUN, tested(searched), run_of, label="weights")


TABLES = (
    ("Recall of the minority / of the majority", ["minority_recall", "majority_recall"], EPSILONS[:1]),
    ("Balanced accuracy", ["balanced_accuracy"], EPSILONS),
    ("AUC", ["auc"], EPSILONS[:1]),
)


def summarise(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over seeds, in percent, at each place; public runs stand at every epsilon."""
    tested = rows[rows.evaluation == "test"]
    public = tested[tested.epsilon == math.inf]
    whole = pd.concat([tested.drop(public.index), *(public.assign(epsilon=epsilon) for epsilon in EPSILONS)])
    return 100 * whole.groupby(["task", "model", "epsilon", "contender"])[SCORES].agg(["mean", "std"])


def markdown(rows: pd.DataFrame) -> str:
    """The tables of docs/results.md: mean ± standard deviation in percent."""
    summary, tables = summarise(rows), []
    for title, scores, epsilons in TABLES:
        header = [title, *(contender.title for contender in CONTENDERS.values())]
        lines = [header, ["---"] * len(header)]
        for task, model, epsilon in product(TASKS, MODELS, epsilons):
            places = summary.loc[task, model, epsilon]
            cells = [
                " / ".join(f"{places[score, 'mean'][name]:.1f} ± {places[score, 'std'][name]:.1f}" for score in scores)
                for name in CONTENDERS
            ]
            lines.append([f"{TASKS[task].title}, {MODELS[model]}, epsilon = {epsilon:g}", *cells])
        tables.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(tables)
