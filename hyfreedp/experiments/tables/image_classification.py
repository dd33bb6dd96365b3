"""Notebook 05: the accuracy tables as the paper prints them, ours beside its own, and what they say together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from hyfreedp.experiments.models.vision import MODELS
from hyfreedp.experiments.runs.cells import read_steps, reader, run_cells
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.experiments.tables import paper
from hyfreedp.experiments.tables.plan import COLUMNS, ROWS, SCALES, TABLE, Scale, entries, finals, searches, table
from hyfreedp.experiments.tasks.registry import TASKS

NUMBER = ["task", "model", "tuning", "epsilon", "row", "seed"]
CELL = NUMBER[:-1]
PLACE = CELL[:-1]

# What the paper's tables call our tasks and models. The small pre-trained ViT stands beside its smaller one.
PAPER_TASKS = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "svhn": "SVHN", "gtsrb": "GTSRB", "food101": "Food101"}
PAPER_MODELS = {
    "vit_small_patch16_224": "Vit-Small",
    "vit_base_patch16_224": "Vit-Base",
    "vit32_tiny_imagenet": "Vit-Small",
}
PAPER_TABLES = ("cv_main", "cv_main_eps8", "nondp_ls")
PAPER_GRID_ROW = "NonDP-GS"


def scale_of(profile: str, seeds: int) -> Scale:
    """The tables of a profile with another number of seeds."""
    return replace(SCALES[profile], seeds=seeds)


def numbers(scale: Scale, profile: str, cells: Path, *, train: bool, jobs: int = 1) -> pd.DataFrame:
    """All numbers of the tables, see :func:`hyfreedp.experiments.tables.plan.table`.

    Args:
        scale: which.
        profile: whose committed records fill what has no cell.
        cells: folder of the cells.
        train: whether to train what is missing first; else what is neither a cell nor committed stays missing.
        jobs: worker processes.

    Returns:
        The table, with ``source``: "cell", "committed" or "missing".
    """
    read = reader(cells)
    if train:
        run_cells(searches(scale), cells, jobs=jobs, description="searches")
        run_cells(finals(scale, read), cells, jobs=jobs, description="tested runs")
    rows = table(scale, read)
    rows["source"] = np.where(rows.accuracy.isna(), "missing", "cell")
    committed = workspace().results / profile / TABLE
    if committed.exists() and rows.accuracy.isna().any():
        known = pd.read_csv(committed, usecols=COLUMNS).dropna(subset="accuracy")
        filled = rows[NUMBER].merge(known, on=NUMBER, how="left")
        fills = rows.accuracy.isna() & filled.accuracy.notna()
        for name in known.columns:
            rows[name] = filled[name].where(fills, rows[name])
        rows.loc[fills, "source"] = "committed"
    return rows


def summarise(rows: pd.DataFrame) -> pd.DataFrame:
    """Over seeds: ``mean``, ``std`` (NaN for a single one) in percent, and ``count``; in the order of ``rows``."""
    percent = rows.assign(percent=100 * rows.accuracy)
    return percent.groupby(CELL, sort=False).percent.agg(["mean", "std", "count"]).reset_index()


def paper_numbers() -> pd.DataFrame:
    """The paper's accuracies in percent: ``tuning``, ``epsilon``, ``method``, ``model``, ``dataset``, ``value``.

    Numbers that two of its tables print are the main table's.
    """
    printed = pd.concat([paper.load(name) for name in PAPER_TABLES])
    keys = ["tuning", "epsilon", "method", "model", "dataset"]
    return printed.drop_duplicates(keys)[[*keys, "value"]].dropna(subset="value")


def with_paper(summary: pd.DataFrame) -> pd.DataFrame:
    """The summary with ``paper``, the number at the same place of the paper's tables; NaN if it has none."""
    places = summary.assign(
        dataset=summary.task.map(PAPER_TASKS),
        paper_model=summary.model.map(PAPER_MODELS),
        method=summary.row.map({name: row.paper for name, row in ROWS.items()}),
    )
    known = paper_numbers().rename(columns={"model": "paper_model", "value": "paper"})
    return places.merge(known, on=["tuning", "epsilon", "method", "paper_model", "dataset"], how="left")[
        [*summary.columns, "paper"]
    ]


def printed(summary: pd.DataFrame, model: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One model's table as the paper prints it: blocks of epsilon, a line per method, a column per tuning and task.

    Args:
        summary: of :func:`with_paper`.
        model: a name in ``MODELS``.

    Returns:
        The table of strings "paper | ours +- std (seeds)", and the differences that colour it, in points: ours less the
        paper's where it has the number, else ours less the grid search of the same place.
    """
    chosen = summary[summary.model == model].copy()
    grid = chosen[chosen.row == "grid"].set_index(PLACE)["mean"]
    reference = [grid.get(place, math.nan) for place in chosen[PLACE].itertuples(index=False, name=None)]
    chosen["difference"] = chosen["mean"] - chosen.paper.fillna(pd.Series(reference, chosen.index))
    chosen["text"] = [
        _text(*values) for values in zip(*(chosen[c] for c in ("paper", "mean", "std", "count")), strict=True)
    ]
    chosen["column"] = [f"{tuning}, {_short(task)}" for tuning, task in zip(chosen.tuning, chosen.task, strict=True)]
    order = {"index": chosen[["epsilon", "row"]].drop_duplicates(), "columns": chosen.column.drop_duplicates()}
    index = pd.MultiIndex.from_frame(order["index"])
    texts, differences = (
        chosen.pivot(index=["epsilon", "row"], columns="column", values=value).reindex(index, columns=order["columns"])
        for value in ("text", "difference")
    )
    for frame in (texts, differences):
        frame.index = pd.MultiIndex.from_tuples(
            [(f"{epsilon:g}", ROWS[row].title) for epsilon, row in frame.index], names=["epsilon", "method"]
        )
        frame.columns.name = None
    return texts.fillna(""), differences


def _text(printed_value: float, mean: float, std: float, count: int) -> str:
    theirs = "–" if math.isnan(printed_value) else f"{printed_value:.2f}"
    if math.isnan(mean):
        return f"{theirs} | missing"
    return f"{theirs} | {mean:.1f}" + ("" if math.isnan(std) else f" ± {std:.1f}") + f" ({count})"


def _short(task: str) -> str:
    return TASKS[task].title.split(" (")[0]


def gaps(summary: pd.DataFrame) -> pd.DataFrame:
    """Points to the grid search over the paper's rates, ours and the paper's, averaged over tasks and models.

    Returns:
        ``source`` ("ours" or "paper"), ``tuning``, ``epsilon``, ``row``, ``gap`` (mean), ``low`` and ``high`` (range
        over the places), ``places`` (their number).
    """
    ours = summary.dropna(subset="mean").copy()
    grid = ours[ours.row == "grid"].set_index(PLACE)["mean"].rename("grid")
    ours = ours.join(grid, on=PLACE).assign(gap=lambda frame: frame["mean"] - frame.grid, source="ours")
    theirs = paper_numbers()
    place = ["tuning", "epsilon", "model", "dataset"]
    grid = theirs[theirs.method == PAPER_GRID_ROW].set_index(place).value.rename("grid")
    names = {row.paper: name for name, row in ROWS.items() if row.paper}
    theirs = theirs.join(grid, on=place).assign(
        gap=lambda frame: frame.value - frame.grid, row=theirs.method.map(names), source="paper"
    )
    together = pd.concat([frame[["source", "tuning", "epsilon", "row", "gap"]] for frame in (ours, theirs)])
    grouped = together.dropna().groupby(["source", "tuning", "epsilon", "row"], sort=False).gap
    return grouped.agg(gap="mean", low="min", high="max", places="count").reset_index()


def ranking(summary: pd.DataFrame) -> pd.DataFrame:
    """Mean rank of each method over the places that have them all (1 is best, ties share), best first.

    Returns:
        ``row``, ``rank``, ``places``, of the private places; empty if none has all methods.
    """
    private = summary[np.isfinite(summary.epsilon)]
    wide = private.pivot(index=PLACE, columns="row", values="mean").dropna()
    ranks = wide.rank(axis=1, ascending=False).mean().sort_values()
    return pd.DataFrame({"row": ranks.index, "rank": ranks.to_numpy(), "places": len(wide)}).dropna()


def best_grid(rows: pd.DataFrame) -> pd.DataFrame:
    """At each place and seed the test accuracy of the grid search that had the best *validation* accuracy there."""
    grids = rows[rows.row.isin(["grid_extended", "grid_linear", "grid_cosine"])].dropna(subset="accuracy")
    searched = grids.groupby([*PLACE, "row"], sort=False).validation_accuracy.max().reset_index()
    best = searched.loc[searched.groupby(PLACE).validation_accuracy.idxmax(), [*PLACE, "row"]]
    return grids.merge(best, on=[*PLACE, "row"])


def paired(rows: pd.DataFrame, row: str, *, epsilons: Sequence[float] | None = None) -> dict[str, Any]:
    """A method against the best grid search, paired by place and seed: difference in points, its interval, a test.

    Args:
        rows: of :func:`numbers`.
        row: a name in ``ROWS``.
        epsilons: only these.

    Returns:
        ``mean`` difference (NaN without pairs); ``low`` and ``high``, its 95 % t interval over the *places* (the seeds
        of one place share its task and its chosen rate, so that they are averaged first; NaN for a single place);
        ``p``, two-sided, of a sign-flip permutation test over the places, exact up to twelve; ``places``; ``pairs``,
        and how many of them are ``wins``.
    """
    ours = rows[rows.row == row].dropna(subset="accuracy")
    pairs = ours.merge(best_grid(rows), on=[*PLACE, "seed"], suffixes=("", "_grid"))
    if epsilons is not None:
        pairs = pairs[pairs.epsilon.isin(epsilons)]
    pairs = pairs.assign(difference=100 * (pairs.accuracy - pairs.accuracy_grid))
    by_place = pairs.groupby(PLACE).difference.mean().to_numpy()
    mean = by_place.mean() if len(by_place) else math.nan
    found = {"mean": mean, "places": len(by_place), "pairs": len(pairs), "low": math.nan, "high": math.nan}
    found |= {"wins": int((pairs.difference > 0).sum()), "p": math.nan}
    if len(by_place) > 1:
        found["low"], found["high"] = stats.t.interval(
            0.95, len(by_place) - 1, loc=by_place.mean(), scale=stats.sem(by_place)
        )
        test = stats.permutation_test(
            (by_place,), np.mean, permutation_type="samples", n_resamples=4096, random_state=0
        )
        found["p"] = float(test.pvalue)
    return found


def markdown(rows: pd.DataFrame) -> str:
    """Every method against the best grid search at finite epsilon, see :func:`paired`, as the README prints it."""
    finite = rows[np.isfinite(rows.epsilon)]
    lines = [
        "| Method | epsilon covers the choice | points to the best grid search | 95 % interval | better in |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in ROWS.items():
        found = paired(finite, name)
        interval = f"{found['low']:+.1f} to {found['high']:+.1f}"
        covered = "yes" if row.covered else "no"
        lines.append(
            f"| {row.title} | {covered} | {found['mean']:+.1f} | {interval} | {found['wins']} of {found['pairs']} |"
        )
    return "\n".join(lines)


def rates(scale: Scale, cells: Path, names: Sequence[str], epsilons: Sequence[float]) -> pd.DataFrame:
    """The learning rate at every step of some methods: one line per step of the finished runs, with their place."""
    read = reader(cells)
    found = []
    for entry in entries(scale):
        if entry.row in names and entry.epsilon in epsilons:
            final = entry.final(read)
            if final is not None and (cells / f"{final.key}.csv").exists():
                place = {"task": entry.learner.task, "model": entry.learner.model, "tuning": entry.learner.tuning}
                steps = read_steps(final, cells)[["step", "eta"]]
                found.append(steps.assign(**place, epsilon=entry.epsilon, row=entry.row, seed=entry.seed))
    none = pd.DataFrame(columns=["step", "eta", *NUMBER]).astype({name: float for name in ("step", "eta", "epsilon")})
    return pd.concat(found, ignore_index=True) if found else none


def without_bias_correction(step: Any) -> Any:
    """How much longer the given step (1-based) of Adam is without its bias correction, of steady gradients.

    D-Adaptation and Prodigy recommend to leave it off. (1 - beta_1^t) / sqrt(1 - beta_2^t), with their betas.
    """
    return (1 - 0.9**step) / (1 - 0.999**step) ** 0.5


def verdicts(rows: pd.DataFrame, steps: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """How the rate that a method ended with compares with the best constant one of the extended grid.

    Args:
        rows: of :func:`numbers`.
        steps: of :func:`rates`.
        names: the methods, in ``ROWS``.

    Returns:
        One line per place of ``steps`` and method: ``last_rate`` (median over seeds), ``as_adam`` (the rate at which
        Adam with its bias correction would take the same last step), ``grid_rate``, ``accuracy`` and ``grid_accuracy``
        (means in percent), and the ``verdict`` on ``as_adam``: "never left the start" if the largest of the last rates
        is below ten times the smallest first one, else "too high" or "too low" by more than a factor of three, or
        "near".
    """
    keys = [*PLACE, "row"]
    by_run = steps[steps.row.isin(names)].sort_values("step", kind="stable").groupby([*keys, "seed"], sort=False).eta
    ends = by_run.agg(["first", "last", "size"]).reset_index()
    found = ends.groupby(keys, sort=False).agg(
        last_rate=("last", "median"), highest=("last", "max"), start=("first", "min"), length=("size", "max")
    )
    found["as_adam"] = found.last_rate * without_bias_correction(found.length)
    grid = rows[rows.row == "grid_extended"].groupby(PLACE, sort=False)
    found = found.reset_index().join(grid.learning_rate.median().rename("grid_rate"), on=PLACE)
    found = found.join(100 * grid.accuracy.mean().rename("grid_accuracy"), on=PLACE)
    found = found.join(100 * rows.groupby(keys).accuracy.mean(), on=keys)
    ratio = found.as_adam / found.grid_rate
    found["verdict"] = np.select(
        [found.highest < 10 * found.start, ratio > 3, ratio < 1 / 3],
        ["never left the start", "too high", "too low"],
        default="near",
    )
    return found[[*keys, "last_rate", "as_adam", "grid_rate", "accuracy", "grid_accuracy", "verdict"]]


def title_of(model: str, tuning: str) -> str:
    """For figures."""
    return f"{MODELS[model].title}\n{ {'full': 'full fine-tuning', 'bitfit': 'BitFit', 'lora': 'LoRA'}[tuning] }"
