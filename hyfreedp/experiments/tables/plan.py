"""Which runs fill the accuracy tables (Tab. cv_main and its relatives): learners, budgets, methods, seeds.

A row of a table is a way to get a model. Some rows first search a learning rate, by runs that are scored on validation
data held out of the training part; the rate that scored best is then trained on all of it, once per seed, and tested.
Test data choose nothing.
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

# For all searches but the first two: the extended grid from where AdamW begins to learn within a hundred steps, so that
# the tables of the laptop take minutes.
UPPER_GRID = (1e-3, 5e-3, 1e-2, 2e-2)
MEAN_RUNS = 3.0  # of the random search
LORA_FACTOR = 10.0  # of the first learning rate (§Experiments, "we scale up our default initial learning rate")


@dataclass(frozen=True)
class Row:
    """A way to get a model.

    Attributes:
        method: that trains, a name in ``METHODS``.
        rates: the candidates; a single one is taken without a search.
        covered: True if the table's epsilon covers the choice of the rate too.
        paper: what the paper's tables call it, empty if they do not have it.
        paper_tuning: the tuning whose tables have it under that name; None: all.
        share: of epsilon that is left to the training.
        search: "grid": the best of ``rates`` on validation data; "random": a random number of random candidates, each
            with the noise that lets the whole search stay within epsilon.
        clipping_threshold: R_g where the method has one.
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
    # The paper's schedule is a cosine with BitFit, and not named with full fine-tuning.
    "grid_linear": Row("grid search, linear decay", "linear", UPPER_GRID, False, "NonDP-GS w/ LS", "full"),
    "grid_cosine": Row("grid search, cosine decay", "cosine", UPPER_GRID, False, "NonDP-GS w/ LS", "bitfit"),
    "vanilla": Row("grid search, clipping at 1", "vanilla", UPPER_GRID, False, clipping_threshold=1.0),
    "adaptive": Row(
        "grid search, adaptive clipping", "adaptive", UPPER_GRID, False, clipping_threshold=INITIAL_THRESHOLD
    ),
    # As the paper simulates it, with its narrow range at its narrowest: the best rate of the extended grid.
    "dp_hyper": Row("DP-hyper, simulated", "constant", EXTENDED_GRID, False, "DP-hyper", share=0.85),
    "random_search": Row("DP random search", "constant", EXTENDED_GRID, True, search="random"),
    "dadaptation": Row("D-Adaptation", "dadaptation", (1.0,), True, "D-Adaptation"),
    "prodigy": Row("Prodigy", "prodigy", (1.0,), True, "Prodigy"),
    "reference": Row("0.02, linear decay", "linear", (0.02,), True),
    "hyfreedp_paper": Row("HyFreeDP (preset paper)", "paper", (1e-4,), True, "HyFreeDP"),
    "hyfreedp_claimed": Row("HyFreeDP, as the paper accounts it", "paper_claimed", (1e-4,), False),
    "hyfreedp_robust": Row("preset robust (ours)", "robust", (1e-4,), True),
}
# Of the desktop's tables: those of the paper, the extended grid, the constant of ours, and preset robust.
DESKTOP_ROWS = (
    *("grid", "grid_extended", "grid_linear", "dp_hyper", "dadaptation", "prodigy", "reference"),
    *("hyfreedp_paper", "hyfreedp_robust"),
)
# Whose rates are recorded step by step: they are learned, or follow an estimate.
LEARNED = ("hyfreedp_robust", "hyfreedp_paper", "dadaptation", "prodigy")
TITLES = {name: row.title for name, row in ROWS.items()}
SPLIT_BUDGET = ("dp_hyper", "random_search")  # without privacy there is no budget to split: they are the grid search


@dataclass(frozen=True)
class Learner:
    """What learns: data, model, which parameters, for how many steps, from which documents (the task's own if None)."""

    task: str
    model: str
    tuning: Tuning
    steps: int | None = None
    source: str | None = None


@dataclass(frozen=True)
class Scale:
    """The tables of one profile: every row for every learner and epsilon, with seeds 0, ..., seeds - 1."""

    learners: tuple[Learner, ...]
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0, math.inf)
    seeds: int = 3
    rows: tuple[str, ...] = tuple(ROWS)


def _learners(tasks: tuple[str, ...], models: tuple[str, ...]) -> tuple[Learner, ...]:
    return tuple(Learner(task, model, tuning) for task, model, tuning in product(tasks, models, _TUNINGS))


_TUNINGS: tuple[Tuning, ...] = ("full", "bitfit")
_PARTS = ("cifar10_20k", "gtsrb_20k", "fashion_20k")
_DATA = ("cifar10", "cifar100", "svhn", "gtsrb", "food101")  # of the paper
_MODELS = ("vit_small_patch16_224", "vit_base_patch16_224")
SCALES = {
    "smoke": Scale((Learner("digits", "mlp", "full", 6),), epsilons=(3.0,), seeds=1),
    "laptop": Scale(
        (Learner("digits", "mlp", "full"), *(Learner("digits", "vit8_glyphs", tuning, 30) for tuning in _TUNINGS))
    ),
    "desktop": Scale(_learners(_PARTS, ("vit32_tiny_imagenet_d128",)), seeds=2, rows=DESKTOP_ROWS),
    # One claim of the paper, on one GPU in an evening: docs/gpu.md.
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
    """One number of a table: a row for a learner at an epsilon, with one seed."""

    learner: Learner
    epsilon: float
    row: str
    seed: int

    def searches(self) -> list[Spec]:
        """The runs on validation data from which the rate, or the model, is chosen; none if there is no choice."""
        row = ROWS[self.row]
        if len(row.rates) == 1:
            return []
        if row.search == "random":
            return self._random_runs()
        # One search serves all seeds, and the split budget searches with all of it.
        return [replace(self._run(rate, self.epsilon), seed=0, evaluation="validation") for rate in row.rates]

    def final(self, read: Reader) -> Spec | None:
        """The run whose test accuracy is the number; None as long as its search is not done."""
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
        row, learner = ROWS[self.row], self.learner
        random = NoiseGenerator(self.seed).child("random search", self.row)
        number = 1 + math.floor(math.log1p(-random.uniform(1).item()) / math.log1p(-gamma_for(1.0, MEAN_RUNS)))
        epsilon = random_search_epsilon(learner.task, learner.steps, self.epsilon)
        return [
            replace(self._run(float(rate), epsilon), seed=1000 * (self.seed + 1) + index, evaluation="validation")
            for index, rate in enumerate(row.rates[int(len(row.rates) * u)] for u in random.uniform(number))
        ]


@cache
def random_search_epsilon(task_name: str, steps: int | None, target_epsilon: float) -> float:
    """Epsilon of each run of a random search that as a whole stays within ``target_epsilon`` (RDP, geometric).

    The runs train on what is left without the validation data. By PLD, as all runs are calibrated, and rounded down.
    """
    task = TASKS[task_name]
    rate, length = task.batch_size / task.validation_start, steps or task.steps
    protocol: dict[str, Any] = {"target_delta": task.delta, "sample_rate": rate, "steps": length}
    sigma = search_noise(target_epsilon, mean=MEAN_RUNS, shape=1.0, **protocol)
    spent = composed_epsilon(((sigma, length),), sample_rate=rate, delta=task.delta, accountant="pld")
    return math.floor(1e4 * spent) / 1e4


def entries(scale: Scale) -> Iterator[Entry]:
    """Every number of the tables, in their order."""
    for learner, epsilon, row, seed in product(scale.learners, scale.epsilons, scale.rows, range(scale.seeds)):
        if not (math.isinf(epsilon) and row in SPLIT_BUDGET):
            yield Entry(learner, epsilon, row, seed)


def searches(wanted: Iterable[Entry]) -> list[Spec]:
    """The runs that choose, without repetitions: the first stage."""
    return list(dict.fromkeys(spec for entry in wanted for spec in entry.searches()))


def finals(wanted: Iterable[Entry], read: Reader) -> list[Spec]:
    """The runs whose numbers are shown, without repetitions: the second stage, as far as the first one is done."""
    runs = (entry.final(read) for entry in wanted)
    return list(dict.fromkeys(spec for spec in runs if spec is not None))


def table(scale: Scale, read: Reader) -> pd.DataFrame:
    """One tidy line per number.

    Returns:
        ``task``, ``model``, ``tuning``, ``epsilon``, ``row``, ``seed``; ``accuracy`` (test, a share; NaN while it is
        missing) and ``loss`` (the same, in nats; NaN too of a random search, whose test loss no record has),
        ``learning_rate`` (chosen, or first), ``runs`` (how many were trained for it, its search included),
        ``validation_accuracy`` (of a searched rate or model), ``epsilon_run`` (what the run itself spent), ``key`` of
        its cell and ``seconds``.
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
    """The rows of a :func:`table`, with those of a committed one where there is no number.

    Seeds of one mean are of one version: where a row has numbers of a later one, older seeds are left out.
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
NUMBER = [*CELL, "seed"]  # what names a number of a table
COLUMNS = (
    *(*NUMBER, "accuracy", "loss", "learning_rate"),
    *("runs", "validation_accuracy", "epsilon_run", "key", "seconds"),
)
