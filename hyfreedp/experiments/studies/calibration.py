"""Probabilities after private training: how a change of clipping, of the loss or of the temperature mends them.

What serves is chosen on validation data. It is then trained on all of the training part and tested, with seeds that
chose nothing. The labels of three of the problems are partly noise, so that no one can be sure of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from hyfreedp import HyFreeDPOptimizer, PrivacyEngine
from hyfreedp.accounting.accountants import composed_epsilon
from hyfreedp.accounting.composition import releases
from hyfreedp.experiments.data import datasets
from hyfreedp.experiments.data.datasets import Arrays, Dataset
from hyfreedp.experiments.data.in_memory import as_is
from hyfreedp.experiments.runs.train import one_thread
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.provenance import with_versions
from hyfreedp.experiments.tasks.image_tasks import Task
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.experiments.tasks.scores import Evaluation, calibration_error
from hyfreedp.gradients import AbadiClipping, AutomaticClipping, Clipping

EPSILONS = (1.0, 3.0, 8.0)
RATE = 0.01  # of preset fixed
Fit = Literal["none", "votes", "slopes"]  # of a temperature


# -- problems ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Data and protocol of a task, the model of a seed, and the budgets at which settings are chosen and tested."""

    title: str
    task: Task
    model: Callable[[int], nn.Module]
    choosing: tuple[float, ...] = (3.0,)
    testing: tuple[float, ...] = EPSILONS


def _small_network(features: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 2))


def _synthetic(labels: Callable[[Tensor, torch.Generator], Tensor]) -> Arrays:
    """3,000 records of 20 normal features, and 4,000 to test with; ``labels`` draws theirs."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(7000, 20, generator=generator)
    drawn = labels(features, generator).long()
    return Arrays((features[:3000], drawn[:3000]), (features[3000:], drawn[3000:]), 2400, "drawn")


@cache
def coin() -> Arrays:
    """Two classes, 70 to 30: the label is drawn with log-odds 0.85 + x_0 / 2."""
    return _synthetic(lambda x, random: torch.rand(len(x), generator=random) < torch.sigmoid(0.85 + 0.5 * x[:, 0]))


@cache
def minority() -> Arrays:
    """Two classes, one record in ten of the second: where x_0 + x_1 and as much noise again exceed 2.2."""
    return _synthetic(lambda x, random: x[:, 0] + x[:, 1] + torch.randn(len(x), generator=random) > 2.2)


@cache
def flipped_digits() -> Arrays:
    """scikit-learn's digits; one label in five, in training and in test data, is another class, drawn at random."""
    known = datasets.digits()
    generator = torch.Generator().manual_seed(0)

    def flip(labels: Tensor) -> Tensor:
        wrong = torch.rand(len(labels), generator=generator) < 0.2
        return torch.where(wrong, (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10, labels)

    train, test = ((features, flip(labels)) for features, labels in (known.train, known.test))
    return Arrays(train, test, known.validation_start, known.source)


def _drawn(title: str, load: Callable[[], Arrays]) -> Problem:
    task = Task(title, Dataset(3000, 2400, 20, 2, load), (), batch_size=200, steps=150, delta=1e-4)
    return Problem(title, task, partial(_small_network, 20), choosing=EPSILONS)


def _task(name: str) -> Task:
    task = TASKS[name]
    assert isinstance(task, Task)
    return task


_FLIPPED = replace(_task("digits"), dataset=Dataset(1500, 1200, 64, 10, flipped_digits))
_TUNED = replace(_task("digits"), steps=30)
PROBLEMS = {
    "coin": _drawn("labels 70 to 30", coin),
    "minority": _drawn("minority of 10 %", minority),
    "flipped": Problem("digits, 20 % of labels wrong", _FLIPPED, _FLIPPED.model),
    "digits": Problem("digits", _task("digits"), _task("digits").model),
    "classification": Problem("make_classification", _task("classification"), _task("classification").model),
    "tuned": Problem("digits, pre-trained ViT", _TUNED, partial(_TUNED.model, name="vit8_glyphs"), (), (3.0,)),
}


# -- settings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A change to preset robust.

    Attributes:
        clipping: as of ``make_private_with_epsilon``; the preset's own if None.
        smoothing: of the labels, in the loss.
        weight_decay: of AdamW.
    """

    clipping: Clipping | None = None
    smoothing: float = 0.0
    weight_decay: float = 0.01


SETTINGS = {
    "default": Setting(),
    "stability 0.1": Setting(AutomaticClipping(0.1)),
    "stability 1": Setting(AutomaticClipping(1.0)),
    "stability 10": Setting(AutomaticClipping(10.0)),
    "flat 0.1": Setting(AbadiClipping(0.1)),
    "flat 1": Setting(AbadiClipping(1.0)),
    "flat 10": Setting(AbadiClipping(10.0)),
    "smoothing 0.1": Setting(smoothing=0.1),
    "decay 1": Setting(weight_decay=1.0),
}


TESTED = ("default", "flat 1", "smoothing 0.1")
FIXED = ("default", "stability 1", "flat 1", "smoothing 0.1")  # tried with preset fixed, too


# -- a temperature -----------------------------------------------------------------------------------------------------

LADDER = tuple(2.0 ** (k / 2) for k in range(-4, 13))  # temperatures, 1/4 to 64
QUESTIONS = 5  # which halving needs at most, to find one of 17
NOISE = 2.0  # of these, times that of a gradient: each costs a quarter of a step
SLOPE_BOUND = 4.0  # in units of the logits


def private_temperature(
    logits: Tensor, labels: Tensor, *, by: Fit, sample_rate: float, sigma: float, seed: int
) -> float:
    """What to divide the logits by: halving of the ladder, each time by what a new Poisson batch says with noise.

    A record says a number in [-1, 1], see :func:`answers`, so that a sum has sensitivity 1. By "votes" it is the sign
    of what its loss gains by one rung. By "slopes" it is the derivative of its loss by the inverse temperature, clipped
    at :data:`SLOPE_BOUND` and divided by it. The loss is convex in the inverse temperature, so the sum of slopes falls
    along the ladder, and halving finds where it changes sign: at the lowest mean loss, but for what is clipped. Votes
    find where the median record gains nothing. As long as most predictions are right, most want to be more sure.

    Args:
        logits, labels: of the training data, shapes (N, C) and (N,); logits of weights that are released.
        sample_rate: of the batches, at most :data:`QUESTIONS` of them.
        sigma: standard deviation of the noise on each sum.
        seed: of batches and noise: a simulation.
    """
    generator = torch.Generator().manual_seed(seed)
    low, high = 0, len(LADDER) - 1
    while low < high:
        rung = (low + high) // 2
        chosen = torch.rand(len(labels), generator=generator) < sample_rate
        total = answers(logits[chosen], labels[chosen], rung, by=by).sum()
        if total + sigma * torch.randn((), generator=generator) > 0:
            low = rung + 1
        else:
            high = rung
    return LADDER[low]


def answers(logits: Tensor, labels: Tensor, rung: int, *, by: Fit) -> Tensor:
    """What each record says, in [-1, 1], shape (B,): above zero if the next rung suits it better than this one."""
    if by == "votes":
        here, above = (F.cross_entropy(logits / LADDER[k], labels, reduction="none") for k in (rung, rung + 1))
        return (here - above).sign()
    inverse = (LADDER[rung] * LADDER[rung + 1]) ** -0.5  # between the two
    expected = ((inverse * logits).softmax(1) * logits).sum(1)
    slopes = expected - logits.gather(1, labels[:, None])[:, 0]
    return slopes.clamp(-SLOPE_BOUND, SLOPE_BOUND) / SLOPE_BOUND


def epsilon_with_temperature(optimizer: HyFreeDPOptimizer) -> float:
    """Epsilon of a whole run and of :data:`QUESTIONS` more batches with :data:`NOISE` times its noise."""
    split = optimizer.split
    run = releases(split, split.steps, split.probe_steps)
    asked = (NOISE * split.sigma, QUESTIONS)
    return composed_epsilon(
        (*run, asked), sample_rate=split.sample_rate, delta=split.target_delta, accountant=split.accountant
    )


# -- runs --------------------------------------------------------------------------------------------------------------

RUN = ["problem", "preset", "epsilon", "setting", "seed", "evaluation"]


def scores_of(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, mean confidence, log loss (nats) and calibration error of logits (N, C) for labels (N,)."""
    probabilities = logits.double().softmax(1)
    confidence, predicted = probabilities.max(1)
    return {
        "accuracy": (predicted == labels).double().mean().item(),
        "confidence": confidence.mean().item(),
        "log_loss": F.cross_entropy(logits.double(), labels).item(),
        "calibration_error": calibration_error(probabilities, labels),
    }


def base_rate_loss(labels: Tensor) -> float:
    """Log loss (nats) of the constant prediction that suits these labels best: the shares of the classes."""
    shares = torch.bincount(labels).double() / len(labels)
    return -torch.special.xlogy(shares, shares).sum().item()


def run_of(name: str, preset: str, epsilon: float, setting: str, seed: int, evaluation: Evaluation) -> pd.DataFrame:
    """Train one run; a row for it as it is, and one for each way to fit a temperature."""
    problem, change, started = PROBLEMS[name], SETTINGS[setting], time.perf_counter()
    data, held_out = problem.task.datasets(evaluation)
    model = problem.model(seed)
    plan: dict[str, Any] = {"target_delta": problem.task.delta, "steps": problem.task.steps}
    _, optimizer, loader = PrivacyEngine(seed=seed).make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=change.weight_decay),
        data_loader=DataLoader(data, batch_size=problem.task.batch_size, collate_fn=as_is),
        **plan | {"target_epsilon": epsilon, "preset": preset, "clipping": change.clipping},
    )

    def per_sample_loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        features, labels = batch
        return F.cross_entropy(model(features), labels, reduction="none", label_smoothing=change.smoothing)

    while optimizer.steps_left:
        for batch in loader:
            optimizer.step(per_sample_loss, batch)
    model.eval()
    with torch.no_grad():
        logits, held_out_logits = (model(part.tensors[0]) for part in (data, held_out))
    seconds, split = time.perf_counter() - started, optimizer.split
    rows: list[dict[str, Any]] = []
    ways: tuple[Fit, ...] = ("none", "slopes", "votes")
    for fit in ways:
        temperature, spent = 1.0, optimizer.epsilon_spent()
        if fit != "none":
            noise: dict[str, Any] = {"sample_rate": split.sample_rate, "sigma": NOISE * split.sigma, "seed": seed}
            temperature = private_temperature(logits, data.tensors[1], by=fit, **noise)
            spent = epsilon_with_temperature(optimizer)
        scores = scores_of(held_out_logits / temperature, held_out.tensors[1])
        rows.append({"fit": fit, "temperature": temperature, "epsilon_spent": spent} | scores)
    run: dict[str, Any] = dict(zip(RUN, (name, preset, epsilon, setting, seed, evaluation), strict=True))
    more = {"base_rate_loss": base_rate_loss(held_out.tensors[1]), "sigma": split.sigma, "seconds": seconds}
    return with_versions(pd.DataFrame([run | row | more for row in rows]))


def planned() -> Iterator[tuple[str, str, float, str, int, Evaluation]]:
    """All runs of the record, as arguments of :func:`run_of`. The seeds of tested runs chose nothing."""
    for name, problem in PROBLEMS.items():
        for setting, epsilon, seed in product(SETTINGS, problem.choosing, range(3)):
            yield name, "robust", epsilon, setting, seed, "validation"
        for setting, seed in product(FIXED if problem.choosing else (), range(3)):
            yield name, "fixed", 3.0, setting, seed, "validation"
        for setting, epsilon, seed in product(TESTED, problem.testing, range(10, 13)):
            yield name, "robust", epsilon, setting, seed, "test"


def record(table: Path) -> pd.DataFrame:
    """Train the runs that the table lacks and add them to it, three rows a run, so that a killed study loses none."""
    rows = pd.read_csv(table) if table.exists() else pd.DataFrame(columns=RUN)
    done = set(rows[RUN].itertuples(index=False, name=None))
    with one_thread():
        for run in tqdm([run for run in planned() if run not in done], desc="calibration", unit="run"):
            rows = pd.concat([rows, run_of(*run)], ignore_index=True) if len(rows) else run_of(*run)
            write_csv(table, rows)
    return rows


# -- tables ------------------------------------------------------------------------------------------------------------

WAYS = {
    ("default", "none"): "as it is",
    ("default", "slopes"): "a temperature by slopes",
    ("default", "votes"): "a temperature by votes",
    ("stability 0.1", "none"): "`AutomaticClipping(0.1)`",
    ("stability 1", "none"): "`AutomaticClipping(1.0)`",
    ("stability 10", "none"): "`AutomaticClipping(10.0)`",
    ("flat 0.1", "none"): "`AbadiClipping(0.1)`",
    ("flat 1", "none"): "`AbadiClipping(1.0)`",
    ("flat 10", "none"): "`AbadiClipping(10.0)`",
    ("smoothing 0.1", "none"): "`label_smoothing=0.1`",
    ("decay 1", "none"): "`weight_decay=1.0`",
    ("flat 1", "slopes"): "`AbadiClipping(1.0)`, and a temperature by slopes",
    ("smoothing 0.1", "slopes"): "`label_smoothing=0.1`, and a temperature by slopes",
}
WAY, PLACE = ["setting", "fit"], ["problem", "epsilon"]


def chosen(rows: pd.DataFrame, evaluation: Evaluation, preset: str = "robust") -> pd.DataFrame:
    """The rows of one stage and preset, those of ``WAYS`` in their order; of what chooses, those at epsilon 3."""
    here = rows[(rows.evaluation == evaluation) & (rows.preset == preset)]
    here = here[here.epsilon == 3.0] if evaluation == "validation" else here
    order = {way: place for place, way in enumerate(WAYS)}
    ranks = pd.Series([order.get(way, -1) for way in zip(here.setting, here.fit, strict=True)], index=here.index)
    return here.assign(rank=ranks)[ranks >= 0].sort_values("rank", kind="stable").drop(columns="rank")


def accuracy_costs(rows: pd.DataFrame) -> pd.DataFrame:
    """Points of accuracy that each way gains on preset robust as it is, paired by seed.

    Args:
        rows: of :func:`chosen`.

    Returns:
        By way: ``mean`` over the places (problem and epsilon), ``worst``, the least of them, and ``error``, the
        standard error of that one over its seeds.
    """
    table = 100 * rows.pivot_table(index=[*PLACE, "seed"], columns=WAY, values="accuracy", sort=False)
    gains = table.sub(table["default", "none"], axis=0)
    means, errors = gains.groupby(PLACE).mean(), gains.groupby(PLACE).sem()
    worst = means.idxmin()
    error = [errors[way][worst[way]] for way in means.columns]
    return pd.DataFrame({"mean": means.mean(), "worst": means.min(), "error": error})


def markdown(rows: pd.DataFrame, evaluation: Evaluation = "test", preset: str = "robust") -> str:
    """Every way at every problem, as docs/results.md prints it: accuracy (percent), log loss (nats), calibration error.

    They are means over budgets and seeds. Behind them are the points of accuracy of :func:`accuracy_costs`.
    """
    here = chosen(rows, evaluation, preset)
    names = [name for name in PROBLEMS if name in set(here.problem)]
    columns = [PROBLEMS[name].title for name in names]
    lines = [
        f"| Preset {preset} | {' | '.join(columns)} | points of accuracy: mean, worst place |",
        "| --- |" + " --- |" * (len(columns) + 1),
    ]
    means = here.groupby([*WAY, "problem"])[["accuracy", "log_loss", "calibration_error"]].mean()
    costs = accuracy_costs(here)
    for way in dict.fromkeys(zip(here.setting, here.fit, strict=True)):
        cells = [
            f"{100 * found.accuracy:.1f} / {found.log_loss:.2f} / {found.calibration_error:.2f}"
            for found in (means.loc[(*way, name)] for name in names)
        ]
        cost = costs.loc[way]
        points = f"{cost['mean']:+.1f}, {cost.worst:+.1f} ± {cost.error:.1f}" if way[0] != "default" else "none"
        lines.append(f"| {WAYS[way]} | {' | '.join(cells)} | {points} |")
    base = here.groupby("problem").base_rate_loss.first()
    lines.append(f"| shares of the classes | {' | '.join(f'{base[name]:.2f}' for name in names)} | |")
    return "\n".join(lines)
