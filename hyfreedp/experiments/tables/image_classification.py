"""Notebook 06: the accuracy tables as the paper prints them, ours beside its own, and what they say together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hyfreedp.experiments.models.image_models import MODELS, Tuning
from hyfreedp.experiments.runs.cells import reader
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.experiments.store.verdicts import Verdict, by_interval, mean_interval, would_decide
from hyfreedp.experiments.tables import paper, plan
from hyfreedp.experiments.tables.grid import train_missing
from hyfreedp.experiments.tables.plan import COLUMNS, LEARNED, RATES, ROWS, SCALES, TABLE, Scale, entries, table
from hyfreedp.experiments.tasks.registry import TASKS

CELL = ["profile", *plan.CELL]
PLACE = CELL[:-1]

# Profiles whose records are shown before those of another one.
SHOWN_FIRST = {"laptop": ("desktop",)}
SEARCHED = ("grid_extended", "grid_linear", "grid_cosine")  # of which the best grid search is taken
PAPER_TABLES = ("cv_main", "cv_main_eps8", "nondp_ls")
TUNING_TITLES = {"full": "full fine-tuning", "bitfit": "BitFit", "lora": "LoRA"}
PAPER_PLACE = ["tuning", "epsilon", "model", "dataset"]


def shown(profile: str, seeds: int, cells: Path, *, train: bool, jobs: int = 1) -> pd.DataFrame:
    """The numbers of a profile, after the whole places of the profiles that are shown first; as :func:`numbers`."""
    first = [whole_places(numbers(SCALES[name], name, cells, train=False)) for name in SHOWN_FIRST.get(profile, ())]
    own = numbers(replace(SCALES[profile], seeds=seeds), profile, cells, train=train, jobs=jobs)
    return pd.concat([*(rows for rows in first if len(rows)), own], ignore_index=True)


def whole_places(rows: pd.DataFrame) -> pd.DataFrame:
    """The numbers of those places where each method has one at least, so that all are compared on the same places."""
    there = rows.accuracy.notna()
    has_one = there.groupby([rows[name] for name in [*PLACE, "row"]]).transform("any")
    return rows[there & has_one.groupby([rows[name] for name in PLACE]).transform("all")]


def numbers(scale: Scale, profile: str, cells: Path, *, train: bool, jobs: int = 1) -> pd.DataFrame:
    """All numbers of the tables, see :func:`hyfreedp.experiments.tables.plan.table`, with ``profile`` and ``source``.

    What has no cell is trained first if asked for, or taken from the committed record of the profile: ``source`` is
    "cell", "committed" or "missing".
    """
    if train:
        train_missing(entries(scale), cells, jobs=jobs)
    rows, committed = table(scale, reader(cells)), workspace().results / profile / TABLE
    found = plan.filled(rows, pd.read_csv(committed)) if committed.exists() else rows
    source = np.select([found.accuracy.isna(), rows.accuracy.isna()], ["missing", "committed"], "cell")
    return found[[*COLUMNS]].assign(source=source, profile=profile)


def summarise(rows: pd.DataFrame) -> pd.DataFrame:
    """Over seeds: ``mean``, ``std`` (NaN for a single one) in percent, and ``count``; in the order of ``rows``."""
    percent = rows.assign(percent=100 * rows.accuracy)
    return percent.groupby(CELL, sort=False).percent.agg(["mean", "std", "count"]).reset_index()


def paper_numbers() -> pd.DataFrame:
    """The paper's accuracies in percent: ``tuning``, ``epsilon``, ``row``, ``model``, ``dataset``, ``value``, ``std``.

    ``row`` is our name of its method. Numbers that two of its tables print are the main table's; deviations are printed
    in its appendix alone, for full fine-tuning.
    """
    printed = pd.concat([paper.load(name) for name in PAPER_TABLES])
    keys = [*PAPER_PLACE, "method"]
    found = printed.drop_duplicates(keys)[[*keys, "value"]].dropna(subset="value")
    found = found.merge(paper.load("app_cv_main")[[*keys, "std"]], on=keys, how="left")
    names = [
        {"tuning": tuning, "method": row.paper, "row": name}
        for name, row in ROWS.items()
        for tuning in ("full", "bitfit")
        if row.paper and row.paper_tuning in (None, tuning)
    ]
    return found.merge(pd.DataFrame(names), on=["tuning", "method"])[[*PAPER_PLACE, "row", "value", "std"]]


def beside_paper(summary: pd.DataFrame) -> pd.DataFrame:
    """The paper's numbers, and ours of :func:`summarise` below them.

    Columns: ``whose``, ``place`` (the data set), ``tuning``, ``epsilon``, ``row``, ``mean`` (percent) and ``gap``,
    points to the grid search over the paper's rates at the same place.
    """
    theirs = paper_numbers().rename(columns={"value": "mean", "dataset": "place"})
    theirs["whose"] = "the paper's " + theirs.model
    places = [_place(task, model) for task, model in zip(summary.task, summary.model, strict=True)]
    both = pd.concat([theirs, summary.assign(whose="ours, " + summary.profile, place=places)], ignore_index=True)
    keys = ["whose", "place", "tuning", "epsilon"]
    grid = both[both.row == "grid"].set_index(keys)["mean"].rename("grid")
    both["gap"] = both["mean"] - both.join(grid, on=keys).grid
    return both[[*keys, "row", "mean", "gap"]]


def _place(task: str, model: str) -> str:
    """The data set, and the kind of model where a data set has several."""
    return f"{data_set(task)}, {MODELS[model].title.split(',')[0]}" if task == "digits" else data_set(task)


def data_set(task: str) -> str:
    """A task's title without what is said of it in brackets."""
    return TASKS[task].title.split(" (")[0]


def best_grid(rows: pd.DataFrame) -> pd.DataFrame:
    """At each place and seed the test accuracy of the grid search that had the best *validation* accuracy there."""
    grids = rows[rows.row.isin(SEARCHED)].dropna(subset="accuracy")
    searched = grids.groupby([*PLACE, "row"], sort=False).validation_accuracy.max().reset_index()
    best = searched.loc[searched.groupby(PLACE).validation_accuracy.idxmax(), [*PLACE, "row"]]
    return grids.merge(best, on=[*PLACE, "row"])


def paired(
    rows: pd.DataFrame,
    row: str,
    *,
    against: str | None = None,
    tuning: str | None = None,
) -> dict[str, Any]:
    """A method against another (None: the best grid search), paired by place and seed, in points of accuracy.

    Returns:
        ``mean`` difference (NaN without pairs); ``low`` and ``high``, its 95 % t interval over the *places*, for the
        seeds of one place share its task and its chosen rate (NaN for a single place); ``places``; ``pairs``, and how
        many of them are ``wins``; ``by_place``, the differences themselves.
    """
    rows = rows if "profile" in rows else rows.assign(profile="")
    other = best_grid(rows) if against is None else rows[rows.row == against].dropna(subset="accuracy")
    ours = rows[rows.row == row].dropna(subset="accuracy")
    pairs = ours.merge(other, on=[*PLACE, "seed"], suffixes=("", "_other"))
    if tuning is not None:
        pairs = pairs[pairs.tuning == tuning]
    pairs = pairs.assign(difference=100 * (pairs.accuracy - pairs.accuracy_other))
    by_place = pairs.groupby(PLACE).difference.mean().to_numpy()
    mean = by_place.mean() if len(by_place) else math.nan
    found: dict[str, Any] = {"by_place": by_place}
    found |= {"mean": mean, "places": len(by_place), "pairs": len(pairs), "low": math.nan, "high": math.nan}
    found["wins"] = int((pairs.difference > 0).sum())
    if len(by_place) > 1:
        found["low"], found["high"] = mean_interval(by_place)
    return found


@dataclass(frozen=True)
class Claim:
    """That ``better`` beats ``worse`` (None: the best grid search) by ``least`` points or more, at private places.

    -1 says "comparable". Of one ``tuning`` or, if None, of all.
    """

    text: str
    better: str
    worse: str | None
    least: float
    tuning: Tuning | None = None


CLAIMS = (
    Claim("HyFreeDP outperforms D-Adaptation", "hyfreedp_paper", "dadaptation", 0.0),
    Claim("HyFreeDP outperforms Prodigy", "hyfreedp_paper", "prodigy", 0.0),
    Claim("HyFreeDP outperforms DP-hyper", "hyfreedp_paper", "dp_hyper", 0.0),
    Claim("With BitFit, HyFreeDP is comparable or superior to NonDP-GS", "hyfreedp_paper", "grid", -1.0, "bitfit"),
    Claim("With full fine-tuning, HyFreeDP comes close to NonDP-GS", "hyfreedp_paper", "grid", -1.0, "full"),
    Claim("D-Adaptation performs poorly with full fine-tuning", "grid", "dadaptation", 5.0, "full"),
    Claim("Prodigy performs poorly with full fine-tuning", "grid", "prodigy", 5.0, "full"),
    Claim("DP-hyper loses by its noise", "grid_extended", "dp_hyper", 0.0),
    Claim("(Ours) preset robust is comparable or superior to the best grid search", "hyfreedp_robust", None, -1.0),
)


def judged(rows: pd.DataFrame) -> pd.DataFrame:
    """What the paper claims of its tables, and what we claim, judged by our numbers at private places.

    Returns:
        A line per claim: ``claim``; ``least``; ``paper``, the mean difference in the paper's own tables (NaN if it has
        none); ``mean``, ``low``, ``high`` and ``places`` of :func:`paired`; ``verdict``; ``places_needed`` to decide.
    """
    private = rows[np.isfinite(rows.epsilon)]
    theirs = paper_numbers()
    wide = theirs[np.isfinite(theirs.epsilon)].pivot(index=PAPER_PLACE, columns="row", values="value")
    wide["grid_extended"] = wide.grid  # from whose rate its DP-hyper starts, too
    lines = []
    for claim in CLAIMS:
        found = paired(private, claim.better, against=claim.worse, tuning=claim.tuning)
        there = wide if claim.tuning is None else wide.loc[[claim.tuning]]
        known = claim.better in wide and claim.worse in wide
        printed = (there[claim.better] - there[claim.worse]).mean() if known else math.nan
        verdict = by_interval(found["low"], found["high"], claim.least)
        needed = would_decide(found["by_place"], claim.least) if verdict == "not shown" else None
        measured = {name: found[name] for name in ("mean", "low", "high", "places")}
        decided = {"verdict": verdict, "places_needed": needed}
        lines.append({"claim": claim.text, "least": claim.least, "paper": printed} | measured | decided)
    return pd.DataFrame(lines)


def markdown(rows: pd.DataFrame) -> str:
    """Every method against the best grid search at finite epsilon, see :func:`paired`, as docs/results.md prints it.

    The log loss is the mean over all places and seeds.
    """
    finite = rows[np.isfinite(rows.epsilon)]
    columns = ["epsilon covers the choice", "points to the best grid search", "95 % interval", "better in"]
    lines = [f"| Method | {' | '.join(columns)} | log loss, nats |", "| --- |" + " --- |" * (len(columns) + 1)]
    for name, row in ROWS.items():
        found = paired(finite, name)
        interval = f"{found['low']:+.1f} to {found['high']:+.1f}"
        covered = "yes" if row.covered else "no"
        loss = finite.loss[finite.row == name].mean()
        cells = (row.title, covered, f"{found['mean']:+.1f}", interval, f"{found['wins']} of {found['pairs']}")
        lines.append(f"| {' | '.join(cells)} | {'–' if math.isnan(loss) else f'{loss:.2f}'} |")
    return "\n".join(lines)


def markdown_by_place(rows: pd.DataFrame) -> str:
    """Mean accuracy in percent of every method, a column each, at every place, as docs/results.md prints it."""
    means = 100 * rows.groupby([*PLACE, "row"], sort=False).accuracy.mean()
    names = [name for name in ROWS if name in set(rows.row)]
    titles = " | ".join(ROWS[name].title for name in names)
    lines = [f"| Data | trained | epsilon | {titles} |", f"| --- | --- | --- |{' --- |' * len(names)}"]
    for place in dict.fromkeys(rows[PLACE].itertuples(index=False, name=None)):
        _, task, model, tuning, epsilon = place
        values = [means.get((*place, name), math.nan) for name in names]
        texts = ["–" if math.isnan(value) else f"{value:.1f}" for value in values]
        lines.append(f"| {_place(task, model)} | {TUNING_TITLES[tuning]} | {epsilon:g} | {' | '.join(texts)} |")
    return "\n".join(lines)


def rates(rows: pd.DataFrame, cells: Path) -> pd.DataFrame:
    """The learned rate over the steps of the runs of :func:`numbers`: every step of a cell, some of a committed run.

    Columns are ``step``, ``eta`` and what ``NUMBER`` names.
    """
    committed = workspace().results / rows.profile.iloc[0] / RATES
    known = pd.read_csv(committed) if committed.exists() else pd.DataFrame(columns=["key", "step", "eta"])
    by_key = dict(list(known.groupby("key")[["step", "eta"]]))
    names, found = [*CELL, "seed"], []
    for row in rows[rows.row.isin(LEARNED)].dropna(subset="key").to_dict("records"):
        path = cells / f"{row['key']}.csv"
        steps = pd.read_csv(path, usecols=["step", "eta"]) if path.exists() else by_key.get(row["key"])
        if steps is not None:
            found.append(steps[["step", "eta"]].assign(**{name: row[name] for name in names}))
    none = pd.DataFrame(columns=["step", "eta", *names])
    none = none.astype({name: float for name in ("step", "eta", "epsilon")})
    return pd.concat(found, ignore_index=True) if found else none


def comparisons(rows: pd.DataFrame) -> pd.DataFrame:
    """Every method of the rows (the index) against the best grid search at private places, see :func:`paired`."""
    finite = rows[np.isfinite(rows.epsilon)]
    names = [name for name in ROWS if name in set(rows.row)]
    table = pd.DataFrame.from_dict({name: paired(finite, name) for name in names}, orient="index")
    table.insert(0, "method", [ROWS[name].title for name in names])
    return table


def on_the_board(judged: pd.DataFrame) -> list[Verdict]:
    """All claims of :func:`judged` of which there are numbers."""
    found = []
    for row in judged[judged.places > 0].itertuples():
        ours = row.claim.startswith("(Ours) ")
        # That of two places, a t interval with one degree of freedom, would be wider than accuracies are.
        words = f", 95 % interval {row.low:+.1f} to {row.high:+.1f}" if row.places > 2 else ""
        number = f"{row.mean:+.1f} points{words}, {row.places} private place{'s' * (row.places > 1)}"
        if row.verdict == "not shown" and (row.places_needed or 0) > row.places:
            number += f"; {row.places_needed:.0f} would decide"
        claim = row.claim.removeprefix("(Ours) ")
        found.append(Verdict(claim[0].upper() + claim[1:], row.verdict, number, "ours" if ours else "the paper's"))
    return found
