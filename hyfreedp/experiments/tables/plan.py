"""Which runs the accuracy tables need (those of Tab. cv_main and similar ones): learners, budgets, methods, seeds.

A row of a table is a way to get a model. Some rows first search a learning rate, with runs that are scored on
validation data, held out of the training part. Runs with the best rate, on the whole training part, one per seed, are
then scored on test data, which choose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal

import pandas as pd
from packaging.version import Version

from hyfreedp.accounting.accountants import composed_epsilon
from hyfreedp.experiments.baselines.adaptive_clipping import INITIAL_THRESHOLD
from hyfreedp.experiments.models.image_models import Tuning
from hyfreedp.experiments.runs.methods import EXTENDED_GRID, METHODS, PAPER_GRID
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.tables.tuning_budget import gamma_for, search_noise
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.noise import NoiseGenerator

TABLE, RATES = "image_classification.csv", "image_classification_rates.csv"
Reader = Callable[[Spec], dict[str, Any] | None]  # the record of a finished run, None if there is none

# For all searches but the first two: the extended grid without the rates at which AdamW learns nothing in a hundred
# steps, so that the tables of profile laptop take minutes.
UPPER_GRID = (1e-3, 5e-3, 1e-2, 2e-2)
MEAN_RUNS = 3.0  # of a random search
LORA_FACTOR = 10.0  # on the first learning rate (§Experiments, "we scale up our default initial learning rate")


@dataclass(frozen=True)
class Row:
    """A way to get a model.

    Attributes:
        method: trains it; a name in ``METHODS``.
        rates: the candidates; if there is only one, nothing is searched.
        covered: True if the table's epsilon covers the choice of the rate, too.
        paper: its name in the paper's tables; empty if they do not have it.
        paper_tuning: the only tuning for which they have that name; None: all.
        share: of epsilon, for the final training.
        search: "grid": the best of ``rates`` on validation data; "random": the best of a random number of random
            candidates, each with enough noise to keep the whole search within epsilon.
        clipping_threshold: R_g, if the method has one.
    """

    title: str
    method: str
    rates: tuple[float, ...]
    covered: bool
    paper: str = ""
    paper_tuning: Tuning | None = None
    share: float = 1.0
    search: Literal["grid", "random"] = "grid"
    clipping_threshold: float | None = None


ROWS = {
    "grid": Row("grid search", "constant", PAPER_GRID, False, "NonDP-GS"),
    "grid_extended": Row("grid search, extended", "constant", EXTENDED_GRID, False),
    # With BitFit the paper's schedule is a cosine; with full fine-tuning it does not say.
    "grid_linear": Row("grid search, linear decay", "linear", UPPER_GRID, False, "NonDP-GS w/ LS", "full"),
    "grid_cosine": Row("grid search, cosine decay", "cosine", UPPER_GRID, False, "NonDP-GS w/ LS", "bitfit"),
    "vanilla": Row("grid search, clipping at 1", "vanilla", UPPER_GRID, False, clipping_threshold=1.0),
    "adaptive": Row(
        "grid search, adaptive clipping", "adaptive", UPPER_GRID, False, clipping_threshold=INITIAL_THRESHOLD
    ),
    # As the paper simulates it, but its narrow range of rates is here only the best one of the extended grid.
    "dp_hyper": Row("DP-hyper, simulated", "constant", EXTENDED_GRID, False, "DP-hyper", share=0.85),
    "random_search": Row("DP random search", "constant", EXTENDED_GRID, True, search="random"),
    "dadaptation": Row("D-Adaptation", "dadaptation", (1.0,), True, "D-Adaptation"),
    "prodigy": Row("Prodigy", "prodigy", (1.0,), True, "Prodigy"),
    "reference": Row("0.02, linear decay", "linear", (0.02,), True),
    "hyfreedp_paper": Row("HyFreeDP (preset paper)", "paper", (1e-4,), True, "HyFreeDP"),
    "hyfreedp_claimed": Row("HyFreeDP, as the paper accounts it", "paper_claimed", (1e-4,), False),
    "hyfreedp_robust": Row("preset robust (ours)", "robust", (1e-4,), True),
}
# Of profile desktop: the paper's, the extended grid, our constant 0.02, and preset robust.
DESKTOP_ROWS = (
    *("grid", "grid_extended", "grid_linear", "dp_hyper", "dadaptation", "prodigy", "reference"),
    *("hyfreedp_paper", "hyfreedp_robust"),
)
# Rows whose rates are recorded over the steps: they are learned, or scaled by an estimate.
LEARNED = ("hyfreedp_robust", "hyfreedp_paper", "dadaptation", "prodigy")
TITLES = {name: row.title for name, row in ROWS.items()}
SPLIT_BUDGET = ("dp_hyper", "random_search")  # left out without privacy, where they would equal the grid search


@dataclass(frozen=True)
class Learner:
    """Data, model, trained parameters, steps and documents (None: the task's) of a run."""

    task: str
    model: str
    tuning: Tuning
    steps: int | None = None
    source: str | None = None


@dataclass(frozen=True)
class Scale:
    """The tables of one profile: every row for every learner and epsilon, with seeds 0 to ``seeds - 1``."""

    learners: tuple[Learner, ...]
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0, math.inf)
    seeds: int = 3
    rows: tuple[str, ...] = tuple(ROWS)


def _learners(tasks: tuple[str, ...], models: tuple[str, ...]) -> tuple[Learner, ...]:
    return tuple(Learner(task, model, tuning) for task, model, tuning in product(tasks, models, _TUNINGS))


_TUNINGS: tuple[Tuning, ...] = ("full", "bitfit")
_PARTS = ("cifar10_20k", "gtsrb_20k", "fashion_20k", "cifar100_20k", "mnist_20k", "kmnist_8k", "notmnist_8k")
_DATA = ("cifar10", "cifar100", "svhn", "gtsrb", "food101")  # of the paper
_MODELS = ("vit_small_patch16_224", "vit_base_patch16_224")
SCALES = {
    "smoke": Scale((Learner("digits", "mlp", "full", 6),), epsilons=(3.0,), seeds=1),
    "laptop": Scale(
        (Learner("digits", "mlp", "full"), *(Learner("digits", "vit8_glyphs", tuning, 30) for tuning in _TUNINGS))
    ),
    "desktop": Scale(_learners(_PARTS, ("vit32_tiny_imagenet_d128",)), seeds=2, rows=DESKTOP_ROWS),
    # One claim of the paper, in an evening on one GPU, see docs/gpu.md.
    "claim": Scale(
        (Learner("cifar100", "vit_small_patch16_224", "full"),),
        epsilons=(3.0,),
        rows=("grid", "hyfreedp_paper", "hyfreedp_claimed", "hyfreedp_robust"),
    ),
    "gpu": Scale(_learners(("cifar10", "gtsrb"), ("vit32_tiny_imagenet",))),
    "paper": Scale(_learners(_DATA, _MODELS)),
}


@dataclass(frozen=True)
class Entry:
    """One number of a table: a row, for one learner, epsilon and seed."""

    learner: Learner
    epsilon: float
    row: str
    seed: int

    def searches(self) -> list[Spec]:
        """The runs, scored on validation data, among which the best rate (or model) is chosen; empty without search."""
        row = ROWS[self.row]
        if len(row.rates) == 1:
            return []
        if row.search == "random":
            return self._random_runs()
        # All seeds share one search, which has the whole epsilon even if ``share`` is below 1.
        return [replace(self._run(rate, self.epsilon), seed=0, evaluation="validation") for rate in row.rates]

    def final(self, read: Reader) -> Spec | None:
        """The run whose test accuracy is the number; None until its search is done."""
        row = ROWS[self.row]
        if len(row.rates) == 1:
            return self._run(row.rates[0], self.epsilon)
        runs = self.searches()
        records = [record for record in map(read, runs) if record is not None]
        if len(records) < len(runs):
            return None
        scores = [(record["accuracy"], -record["loss"]) for record in records]
        best = runs[scores.index(max(scores))]  # the first of equals
        if row.search == "random":
            return best
        return replace(best, epsilon=row.share * self.epsilon, seed=self.seed, evaluation="test")

    def _run(self, rate: float, epsilon: float) -> Spec:
        row, learner = ROWS[self.row], self.learner
        larger = METHODS[row.method].learns and learner.tuning == "lora"
        return Spec(
            method=row.method,
            epsilon=epsilon,
            seed=self.seed,
            learning_rate=rate * LORA_FACTOR if larger else rate,
            clipping_threshold=row.clipping_threshold,
            **asdict(learner),
        )

    def _random_runs(self) -> list[Spec]:
        """A geometric number of runs at random rates, each with its own seed (Papernot and Steinke, 2022)."""
        candidates, learner = ROWS[self.row].rates, self.learner
        random = NoiseGenerator(self.seed).child("random search", self.row)
        number = 1 + math.floor(math.log1p(-random.uniform(1).item()) / math.log1p(-gamma_for(1.0, MEAN_RUNS)))
        rates = [candidates[int(len(candidates) * u)] for u in random.uniform(number)]
        epsilon = random_search_epsilon(learner.task, learner.steps, self.epsilon)
        return [
            replace(self._run(rate, epsilon), seed=1000 * (self.seed + 1) + index, evaluation="validation")
            for index, rate in enumerate(rates)
        ]


@cache
def random_search_epsilon(task_name: str, steps: int | None, target_epsilon: float) -> float:
    """Epsilon for each run of a random search with a geometric number of runs that costs ``target_epsilon`` by RDP.

    The runs do not train on the validation data. Epsilon is by PLD, like all runs', and rounded down.
    """
    task = TASKS[task_name]
    rate, length = task.batch_size / task.validation_start, steps or task.steps
    protocol: dict[str, Any] = {"target_delta": task.delta, "sample_rate": rate, "steps": length}
    sigma = search_noise(target_epsilon, mean=MEAN_RUNS, shape=1.0, **protocol)
    spent = composed_epsilon(((sigma, length),), sample_rate=rate, delta=task.delta, accountant="pld")
    return math.floor(1e4 * spent) / 1e4


def entries(scale: Scale) -> Iterator[Entry]:
    """All numbers of the tables, in their order."""
    for learner, epsilon, row, seed in product(scale.learners, scale.epsilons, scale.rows, range(scale.seeds)):
        if not (math.isinf(epsilon) and row in SPLIT_BUDGET):
            yield Entry(learner, epsilon, row, seed)


def searches(wanted: Iterable[Entry]) -> list[Spec]:
    """The runs of all searches, without duplicates: the first stage."""
    return list(dict.fromkeys(spec for entry in wanted for spec in entry.searches()))


def finals(wanted: Iterable[Entry], read: Reader) -> list[Spec]:
    """The runs scored on test data, without duplicates: the second stage, as far as its searches are done."""
    runs = (entry.final(read) for entry in wanted)
    return list(dict.fromkeys(spec for spec in runs if spec is not None))


def table(scale: Scale, read: Reader) -> pd.DataFrame:
    """One row per number.

    Returns:
        ``task``, ``model``, ``tuning``, ``epsilon``, ``row``, ``seed``; test ``accuracy`` (a share) and ``loss`` (nats;
        of a random search it is not recorded), NaN if missing; ``learning_rate``, chosen or first; ``runs``, how many
        runs it took, with its search; ``validation_accuracy`` of a searched rate or model; ``epsilon_run``, spent by
        the run itself; ``key`` of its cell; and ``seconds``.
    """
    lines = []
    for entry in entries(scale):
        final, runs = entry.final(read), entry.searches()
        record = None if final is None else read(final)
        line: dict[str, Any] = {name: getattr(entry.learner, name) for name in LEARNER}
        line |= {"epsilon": entry.epsilon, "row": entry.row, "seed": entry.seed}
        line["runs"] = len(runs) + (final not in runs)
        if final is not None and record is not None:
            scored = [read(run) for run in runs if run.learning_rate == final.learning_rate]
            line |= {
                "accuracy": record["accuracy" if final.evaluation == "test" else "test_accuracy"],
                "loss": record["loss"] if final.evaluation == "test" else math.nan,
                "learning_rate": final.learning_rate,
                "validation_accuracy": max((one["accuracy"] for one in scored if one), default=math.nan),
                "epsilon_run": record["epsilon_spent"],
                "key": final.key,
                "seconds": record["seconds"],
            }
        lines.append(line)
    return pd.DataFrame(lines, columns=COLUMNS)


def filled(rows: pd.DataFrame, committed: pd.DataFrame) -> pd.DataFrame:
    """The rows of a :func:`table`; rows without a number are replaced by committed ones.

    A mean must not mix versions: committed seeds that are older than another seed of the same ``CELL`` are left out.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *committed.columns, "version_hyfreedp"])))
    known = rows[NUMBER].merge(committed, on=NUMBER, how="left").reindex(columns=rows.columns)
    named = {*rows.version_hyfreedp.dropna(), *known.version_hyfreedp.dropna()}
    order = {version: place for place, version in enumerate(sorted(named, key=Version))}
    versions, before = (table.version_hyfreedp.map(order).fillna(-1) for table in (rows, known))
    older = before < versions.groupby([rows[name] for name in CELL], dropna=False).transform("max")
    kept = known.accuracy.notna() & rows.accuracy.isna() & ~older
    return pd.concat([known[kept], rows[~kept]]).sort_index().astype({"runs": int})


LEARNER = ["task", "model", "tuning"]
CELL = [*LEARNER, "epsilon", "row"]
NUMBER = [*CELL, "seed"]  # the columns that identify a number
COLUMNS = (
    *(*NUMBER, "accuracy", "loss", "learning_rate"),
    *("runs", "validation_accuracy", "epsilon_run", "key", "seconds"),
)
