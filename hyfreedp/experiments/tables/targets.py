"""How far one setting reaches: preset robust, and rates that need no search, against a search with twice eight rates.

Places are tasks, models, lengths, base optimizers and budgets. At each, eight rates, constant and with linear decay,
are scored on validation data; the best is trained on all of the training part and tested, with several seeds. Test data
choose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from hyfreedp.experiments.models.vision import Tuning
from hyfreedp.experiments.runs.cells import reader, run_cells
from hyfreedp.experiments.runs.methods import EXTENDED_GRID
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.provenance import with_versions
from hyfreedp.experiments.tables.plan import Reader, best_of, first_rate
from hyfreedp.experiments.tasks.language import LANGUAGE_TASKS
from hyfreedp.experiments.tasks.registry import TASKS

SCHEDULES = ("constant", "linear")
SGD_GRID = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # of gradients normalised to 1, with momentum 0.9
BUDGETS = (1.0, 3.0, 8.0)
PLACE = ["task", "model", "tuning", "base", "steps", "epsilon"]
START = 1e-4  # of the line search; votes have none


@dataclass(frozen=True)
class Group:
    """Places that differ in length and budget only.

    Attributes:
        steps: lengths; None is the task's own.
        seeds: of what is tested.
    """

    task: str
    model: str | None = None
    tuning: Tuning | None = None
    base: str | None = None
    steps: tuple[int | None, ...] = (None,)
    epsilons: tuple[float, ...] = BUDGETS
    seeds: int = 5


GROUPS = (
    *(Group(task, steps=(25, 400)) for task in ("digits", "classification")),
    *(Group(task, epsilons=(*BUDGETS, math.inf)) for task in ("digits", "classification")),
    *(Group(task, base="sgd") for task in ("digits", "classification")),
    Group("glyphs"),
    *(
        Group("digits", "vit8_glyphs", tuning, steps=(30,), epsilons=(*BUDGETS, math.inf))
        for tuning in ("full", "bitfit")
    ),
    *(Group(task, "mlp32", seeds=3) for task in ("cifar10_some", "gtsrb_some")),
    Group("restaurants", "gpt2_sentences", "full", epsilons=(3.0, 8.0), seeds=3),
    Group("reports", "llama_sentences", "lora", epsilons=(8.0,), seeds=3),
    *(Group(task, "convnet32", epsilons=(1.0, 8.0), seeds=3) for task in ("cifar10_some", "gtsrb_some")),
)


def rivals(group: Group) -> tuple[tuple[str, str, float], ...]:
    """Name, method and ``learning_rate`` of what is tested beside the best of the search."""
    methods = ("robust", "line_search")
    found = tuple((method, method, first_rate(method, START, group.tuning)) for method in methods)
    return found if group.base == "sgd" else (*found, ("0.02, linear", "linear", 0.02))


def places(group: Group) -> Iterator[Spec]:
    """A run of preset robust at each place of a group, with seed 0."""
    for steps, epsilon in product(group.steps, group.epsilons):
        yield Spec(group.task, "robust", epsilon, model=group.model, tuning=group.tuning, base=group.base, steps=steps)


def searches(place: Spec) -> list[Spec]:
    """The sixteen runs that choose a rate and a schedule for a place."""
    rates = SGD_GRID if place.base == "sgd" else EXTENDED_GRID
    return [
        replace(place, method=method, learning_rate=rate, evaluation="validation")
        for method, rate in product(SCHEDULES, rates)
    ]


def finals(group: Group, place: Spec, read: Reader) -> dict[str, list[Spec]]:
    """The tested runs of a place by name, once its search is done: its "best", and each of :func:`rivals`."""
    scores = {spec: record for spec in searches(place) if (record := read(spec)) is not None}
    best = best_of(list(scores), list(scores.values()))
    chosen = {"best": replace(best, evaluation="test")}
    for name, method, rate in rivals(group):
        chosen[name] = replace(place, method=method, learning_rate=rate)
    return {name: [replace(spec, seed=seed) for seed in range(group.seeds)] for name, spec in chosen.items()}


def run(cells: Path, table: Path, *, only: str = "", jobs: int = 1) -> pd.DataFrame:
    """Train what is missing and write one row per tested run; groups whose data cannot be had are named and left out.

    Args:
        table: the CSV file, replaced once a group is done. Rows of other groups that it has are kept.
        only: groups of one task; all if empty.

    Returns:
        The table: fields of the run, ``name`` (see :func:`finals`), ``accuracy``, ``loss`` (of test data), ``seconds``,
        and the versions that made it.
    """
    read = reader(cells)
    rows = pd.read_csv(table) if table.exists() else pd.DataFrame()
    for group in GROUPS:
        if only not in ("", group.task):
            continue
        try:
            _ = TASKS[group.task].source
        except OSError as error:
            print(f"left out: {group.task}: {error}")
            continue
        run_cells([run for place in places(group) for run in searches(place)], cells, jobs=jobs, description="searches")
        shown = [
            (name, run) for place in places(group) for name, runs in finals(group, place, read).items() for run in runs
        ]
        records = run_cells([run for _, run in shown], cells, jobs=jobs, description="tested runs")
        made = with_versions(
            pd.DataFrame(
                [
                    {
                        "name": name,
                        **_place(run),
                        "method": run.method,
                        "learning_rate": run.learning_rate,
                        "seed": run.seed,
                    }
                    | {column: record[column] for column in ("accuracy", "loss", "epsilon_spent", "seconds")}
                    for (name, run), record in zip(shown, records, strict=True)
                ]
            )
        )
        rows = pd.concat([rows, made]).drop_duplicates([*PLACE, "name", "seed"], keep="last").reset_index(drop=True)
        write_csv(table, rows)
    return rows


def _place(run: Spec) -> dict[str, object]:
    model = run.model or TASKS[run.task].models[0]
    return {
        "task": run.task,
        "model": model,
        "tuning": run.tuning or "full",
        "base": run.optimizer,
        "steps": run.steps or run.problem.steps,
        "epsilon": run.epsilon,
    }


def gaps(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds at each place: one line per place.

    Returns:
        ``PLACE``; ``best``, of the search, in percent, and its ``schedule``; the gap of each rival to it, in points, by
        its name; ``error``, the standard error of that of preset robust; and ``perplexity``, how far that of preset
        robust is above the search's, in percent (of language, and NaN elsewhere).
    """
    percent = rows.assign(accuracy=100 * rows.accuracy)
    means = percent.pivot_table(index=PLACE, columns="name", values="accuracy", sort=False)
    errors = percent.groupby([*PLACE, "name"]).accuracy.sem().unstack("name").reindex(means.index)
    losses = rows.pivot_table(index=PLACE, columns="name", values="loss", sort=False)
    language = means.index.get_level_values("task").isin(LANGUAGE_TASKS)
    best = rows[rows.name == "best"].drop_duplicates(PLACE).set_index(PLACE)
    table = means.sub(means.best, axis=0).drop(columns="best")
    table.insert(0, "best", means.best)
    table.insert(1, "schedule", best.learning_rate.map("{:g}, ".format) + best.method)
    ratio = 100 * np.expm1(losses.robust - losses.best)
    return table.assign(error=np.hypot(errors.best, errors.robust), perplexity=ratio.where(language)).reset_index()


def markdown(rows: pd.DataFrame) -> str:
    """:func:`gaps` as docs/step_rule.md prints it."""
    lines = [
        "| Task, model | base | T | epsilon | best of the search | robust | 0.02, linear | former default |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in gaps(rows).to_dict("records"):
        learner = f"{row['task']}, {row['model']}" + ("" if row["tuning"] == "full" else f", {row['tuning']}")
        robust = f"{row['robust']:+.1f} ± {row['error']:.1f}"
        if not math.isnan(row["perplexity"]):
            robust += f"; perplexity {row['perplexity']:+.0f} %"
        reference = "" if math.isnan(row["0.02, linear"]) else f"{row['0.02, linear']:+.1f}"
        place = f"{learner} | {row['base']} | {row['steps']} | {row['epsilon']:g}"
        best = f"{row['best']:.1f} ({row['schedule']})"
        lines.append(f"| {place} | {best} | {robust} | {reference} | {row['line_search']:+.1f} |")
    return "\n".join(lines)
