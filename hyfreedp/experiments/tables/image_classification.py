"""Notebook 06: our accuracy tables beside the paper's, comparisons of methods, and verdicts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hyfreedp.experiments.models.image_models import MODELS, Tuning
from hyfreedp.experiments.runs.cells import reader
from hyfreedp.experiments.store.files import markdown_table
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.experiments.store.verdicts import COMPARABLE, POOR, Verdict, Whose, mean_interval, over_data_sets
from hyfreedp.experiments.tables import paper, plan
from hyfreedp.experiments.tables.grid import train_missing
from hyfreedp.experiments.tables.plan import COLUMNS, LEARNED, RATES, ROWS, SCALES, TABLE, TITLES, Scale, entries, table
from hyfreedp.experiments.tasks.registry import TASKS

CELL = ["profile", *plan.CELL]
PLACE = CELL[:-1]

# For each profile, others whose committed numbers are shown before its own.
SHOWN_FIRST = {"laptop": ("desktop",)}
SEARCHED = ("grid_extended", "grid_linear", "grid_cosine")  # the best of these is "the best grid search"
PAPER_TABLES = ("cv_main", "cv_main_eps8", "nondp_ls")
TUNING_TITLES = {"full": "full fine-tuning", "bitfit": "BitFit", "lora": "LoRA"}
PAPER_PLACE = ["tuning", "epsilon", "model", "dataset"]


def shown(profile: str, seeds: int, cells: Path, *, train: bool, jobs: int = 1) -> pd.DataFrame:
    """:func:`numbers` of a profile, after the complete places of the profiles in ``SHOWN_FIRST``."""
    first = [whole_places(numbers(SCALES[name], name, cells, train=False)) for name in SHOWN_FIRST.get(profile, ())]
    own = numbers(replace(SCALES[profile], seeds=seeds), profile, cells, train=train, jobs=jobs)
    return pd.concat([rows for rows in [*first, own] if len(rows)], ignore_index=True)


def whole_places(rows: pd.DataFrame) -> pd.DataFrame:
    """The numbers at those places where each method has at least one, so that all are compared on the same places."""
    there = rows.accuracy.notna()
    has_one = there.groupby([rows[name] for name in [*PLACE, "row"]]).transform("any")
    return rows[there & has_one.groupby([rows[name] for name in PLACE]).transform("all")]


def numbers(scale: Scale, profile: str, cells: Path, *, train: bool, jobs: int = 1) -> pd.DataFrame:
    """All numbers of the tables, see :func:`hyfreedp.experiments.tables.plan.table`, with ``profile`` and ``source``.

    With ``train``, missing cells are trained first. A number without a cell is taken from the profile's committed
    table. ``source`` is "cell", "committed" or "missing".
    """
    if train:
        train_missing(entries(scale), cells, jobs=jobs)
    rows, committed = table(scale, reader(cells)), workspace().results / profile / TABLE
    found = plan.filled(rows, pd.read_csv(committed)) if committed.exists() else rows
    source = np.select([found.accuracy.isna(), rows.accuracy.isna()], ["missing", "committed"], "cell")
    return found[[*COLUMNS]].assign(source=source, profile=profile)


def summarise(rows: pd.DataFrame) -> pd.DataFrame:
    """By ``CELL``, over seeds: ``mean`` and ``std`` of accuracy in percent (NaN for one seed), and ``count``."""
    percent = rows.assign(percent=100 * rows.accuracy)
    return percent.groupby(CELL, sort=False).percent.agg(["mean", "std", "count"]).reset_index()


def paper_numbers() -> pd.DataFrame:
    """The paper's accuracies in percent: ``tuning``, ``epsilon``, ``row``, ``model``, ``dataset``, ``value``.

    ``row`` is our name of its method. A number that is in two of its tables is taken from the main one.
    """
    printed = pd.concat([paper.load(name) for name in PAPER_TABLES])
    found = printed.drop_duplicates([*PAPER_PLACE, "method"]).dropna(subset="value")
    names = [
        {"tuning": tuning, "method": row.paper, "row": name}
        for name, row in ROWS.items()
        for tuning in ("full", "bitfit")
        if row.paper and row.paper_tuning in (None, tuning)
    ]
    return found.merge(pd.DataFrame(names), on=["tuning", "method"])[[*PAPER_PLACE, "row", "value"]]


def beside_paper(summary: pd.DataFrame) -> pd.DataFrame:
    """The paper's numbers, followed by ours of :func:`summarise`.

    Columns: ``whose``, ``place`` (the data set), ``tuning``, ``epsilon``, ``row``, ``mean`` (percent) and ``gap``,
    points above the grid search over the paper's rates at the same place.
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
    """The data set's name; for digits, where there are two models, also the kind of model."""
    return f"{data_set(task)}, {MODELS[model].title.split(',')[0]}" if task == "digits" else data_set(task)


def data_set(task: str) -> str:
    """A task's title without the part in brackets."""
    return TASKS[task].title.split(" (")[0]


def best_grid(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the grid search with the best *validation* accuracy at each place, for all its seeds."""
    grids = rows[rows.row.isin(SEARCHED)].dropna(subset="accuracy")
    searched = grids.groupby([*PLACE, "row"], sort=False).validation_accuracy.max().reset_index()
    best = searched.loc[searched.groupby(PLACE).validation_accuracy.idxmax(), [*PLACE, "row"]]
    return grids.merge(best, on=[*PLACE, "row"])


def paired(rows: pd.DataFrame, row: str, *, against: str | None = None, tuning: str | None = None) -> dict[str, Any]:
    """Accuracy of a method minus another's (None: the best grid search), in points, paired by place and seed.

    Returns:
        ``by_place``, mean differences over seeds, indexed by data set; ``mean``, over data sets (NaN without pairs);
        ``low`` and ``high``, its 95 % t interval over data sets, whose places are not independent (NaN for fewer than
        three); and ``pairs``, the number of pairs.
    """
    other = best_grid(rows) if against is None else rows[rows.row == against].dropna(subset="accuracy")
    ours = rows[rows.row == row].dropna(subset="accuracy")
    pairs = ours.merge(other, on=[*PLACE, "seed"], suffixes=("", "_other"))
    if tuning is not None:
        pairs = pairs[pairs.tuning == tuning]
    pairs = pairs.assign(difference=100 * (pairs.accuracy - pairs.accuracy_other))
    by_place = pairs.groupby(PLACE, sort=False).difference.mean()
    by_place.index = pd.Index([data_set(task) for task in by_place.index.get_level_values("task")], name="data")
    means = by_place.groupby(level=0, sort=False).mean()
    low, high = mean_interval(list(means))
    return {"mean": means.mean(), "low": low, "high": high, "by_place": by_place, "pairs": len(pairs)}


@dataclass(frozen=True)
class Claim:
    """The claim that ``better`` is at least ``least`` points above ``worse`` (names in ``ROWS``) on every data set.

    ``worse`` None is the best grid search, and ``tuning`` None all tunings. ``private``: at places with privacy, else
    without. Claims with the same ``text`` are cases of one claim.
    """

    text: str
    better: str
    worse: str | None
    least: float
    tuning: Tuning | None = None
    case: str = ""
    private: bool = True


# Claims of which several notebooks have cases.
CLOSE, OURS = "HyFreeDP comes close to a rate that was tuned", "Preset robust comes close to a rate that was tuned"
CHOSEN_HERE = "these tasks chose its constants"  # of preset robust
CHOSE = ("CIFAR-10", "GTSRB", "digits")  # whose validation data did (study-of-looks, study-of-shares)
SURPASSES, BEATS = "DP-hyper surpasses D-Adaptation and Prodigy", "HyFreeDP outperforms "
RIVALS = {"dadaptation": "D-Adaptation", "prodigy": "Prodigy", "dp_hyper": "DP-hyper"}
FROM = "from 0.0001"
CLAIMS = (
    Claim(CLOSE, "hyfreedp_paper", "grid", COMPARABLE, "full", f"all weights, {FROM}"),
    Claim(CLOSE, "hyfreedp_paper", "grid", COMPARABLE, "bitfit", f"BitFit, {FROM}"),
    *(Claim(BEATS + name, "hyfreedp_paper", row, 0.0, "full", f"all weights, {FROM}") for row, name in RIVALS.items()),
    Claim(BEATS + "Prodigy", "hyfreedp_paper", "prodigy", 0.0, "bitfit", f"BitFit, {FROM}"),  # the one with BitFit
    Claim("D-Adaptation performs poorly with full fine-tuning", "grid", "dadaptation", POOR, "full"),
    Claim("Prodigy performs poorly with full fine-tuning", "grid", "prodigy", POOR, "full"),
    Claim("With BitFit, Prodigy is comparable to NonDP-GS", "prodigy", "grid", COMPARABLE, "bitfit"),
    Claim("DP-hyper loses by its noise", "grid_extended", "dp_hyper", 0.0, "full"),
    Claim('Tab. "nondp_ls": a linear schedule hurts DP training', "grid_extended", "grid_linear", POOR, "full"),
    Claim('Tab. "nondp_ls": not without privacy', "grid_linear", "grid_extended", COMPARABLE, "full", private=False),
    Claim(SURPASSES, "dp_hyper", "dadaptation", 0.0, "full", "D-Adaptation"),
    Claim(SURPASSES, "dp_hyper", "prodigy", 0.0, "full", "Prodigy"),
    Claim("Without privacy HyFreeDP comes close to NonDP-GS", "hyfreedp_paper", "grid", COMPARABLE, private=False),
    Claim(OURS, "hyfreedp_robust", None, COMPARABLE, case="the best grid search"),
)


def within_reach(rows: pd.DataFrame) -> pd.Series:
    """For each row, whether preset paper could reach, from its first rate, the rate that the grid search chose.

    A probe raises the rate by at most a tenth (GeN's guards and smoothing), which in a short run may not suffice.
    """
    chosen = rows[rows.row == "grid"].groupby(PLACE).learning_rate.max().rename("chosen")
    learners = {(name, one.task, one.model): one for name, scale in SCALES.items() for one in scale.learners}
    keys = zip(rows.profile, rows.task, rows.model, strict=True)
    steps = [learners[key].steps or TASKS[key[1]].steps for key in keys]
    return rows.join(chosen, on=PLACE).chosen <= [highest_rate(number) for number in steps]


def highest_rate(steps: int, first: float = 1e-4, interval: int = 5) -> float:
    """The highest rate that preset paper can reach in so many steps, by a tenth at each probe."""
    return first * 1.1 ** (steps // interval)


def judged(rows: pd.DataFrame) -> list[Verdict]:
    """Verdicts on ``CLAIMS`` from our numbers of all profiles together, with the paper's mean difference.

    Comparisons of HyFreeDP with a search leave out places that are not :func:`within_reach` (see notebook 12), and the
    claim on preset robust data sets that chose its constants.
    """
    theirs, decided = paper_numbers().pivot(index=PAPER_PLACE, columns="row", values="value"), []
    theirs["grid_extended"] = theirs.grid  # from whose rate the paper's DP-hyper starts
    finite = np.isfinite(theirs.index.get_level_values("epsilon"))
    for claim in CLAIMS:
        at = rows[np.isfinite(rows.epsilon) == claim.private]
        versus: dict[str, Any] = {"against": claim.worse, "tuning": claim.tuning}
        counts, why = pd.Series(True, at.index), ""
        if claim.better == "hyfreedp_paper" and claim.worse in ("grid", "dp_hyper"):
            counts, why = within_reach(at), "beyond reach"
        elif claim.text == OURS:
            counts, why = ~at.task.map(data_set).isin(CHOSE), "they chose its constants"
        points, left_out = (paired(part, claim.better, **versus)["by_place"] for part in (at[counts], at[~counts]))
        if not len(points):
            continue
        outcome, number = over_data_sets(points, claim.least, left_out, why)
        if claim.better in theirs and claim.worse in theirs:
            printed = (theirs[claim.better] - theirs[claim.worse])[finite == claim.private]
            printed = printed if claim.tuning is None else printed.loc[[claim.tuning]]
            number += f" (paper: {printed.mean():+.1f})"
        whose: Whose = "ours" if claim.text == OURS else "the paper's"
        decided.append(Verdict(claim.text, outcome, number, whose, claim.case))
    return decided


def _versions(rows: pd.DataFrame) -> str:
    """A line with how many numbers are of which version, and which methods have only those of a rarer version."""
    rows = rows.dropna(subset="version_hyfreedp")
    counts = rows.version_hyfreedp.value_counts()
    versions = rows.groupby(rows.row.map(TITLES), sort=False).version_hyfreedp.agg(set)
    told = []
    for version, number in counts.items():
        names = ", ".join(versions.index[(versions == {version}) & (version != counts.index[0])])
        told.append(f"{version} ({number:,}, with all of {names})" if names else f"{version} ({number:,})")
    return f"Versions, with their numbers of runs: {'; '.join(told)}."


def markdown(rows: pd.DataFrame) -> str:
    """The table of docs/results-accuracy.md: every method against the best grid search, see :func:`paired`.

    Only places with privacy count. The log loss is the mean over places and seeds.
    """
    finite = rows[np.isfinite(rows.epsilon)]
    columns = ["Method", "epsilon covers the choice", "points to the best grid search", "worst and best place"]
    lines = []
    for name, row in ROWS.items():
        found, loss = paired(finite, name), finite.loss[finite.row == name].mean()
        reach = f"{found['by_place'].min():+.1f} to {found['by_place'].max():+.1f}"
        line = [row.title, "yes" if row.covered else "no", f"{found['mean']:+.1f}", reach]
        lines.append([*line, "–" if math.isnan(loss) else f"{loss:.2f}"])
    return f"{markdown_table([*columns, 'log loss, nats'], lines)}\n\n{_versions(rows)}"


def markdown_by_place(rows: pd.DataFrame) -> str:
    """The table of docs/results-images.md: mean accuracy in percent at every place.

    Columns are the search over the paper's rates, the best search, and methods that need no search.
    """
    titled = {"grid": ROWS["grid"].title, "best": "best search"}
    titled |= {name: ROWS[name].title for name in ("dadaptation", "prodigy", "hyfreedp_paper", "hyfreedp_robust")}
    both = pd.concat([rows, best_grid(rows).assign(row="best")])
    means, lines = 100 * both.groupby([*PLACE, "row"], sort=False).accuracy.mean(), []
    for place in dict.fromkeys(rows[PLACE].itertuples(index=False, name=None)):
        _, task, model, tuning, epsilon = place
        values = [means.get((*place, name), math.nan) for name in titled]
        texts = ["–" if math.isnan(value) else f"{value:.1f}" for value in values]
        lines.append([f"{_place(task, model)}, {tuning}", f"{epsilon:g}", *texts])
    columns = ["Data, trained", "epsilon", *titled.values()]
    return f"{markdown_table(columns, lines)}\n\n{_versions(rows)}"


def rates(rows: pd.DataFrame, cells: Path) -> pd.DataFrame:
    """Learned rates of the runs of :func:`numbers`, at all steps of a cell, or at the recorded steps of other runs.

    Columns are ``step``, ``eta`` and those of ``CELL``, and ``seed``.
    """
    columns = ["key", "step", "eta"]
    committed = workspace().results / rows.profile.iloc[0] / RATES
    known = pd.read_csv(committed, usecols=columns) if committed.exists() else pd.DataFrame(columns=columns)
    learned = rows[rows.row.isin(LEARNED)].dropna(subset="key")
    files = {key: path for key in learned.key.unique() if (path := cells / f"{key}.csv").exists()}
    own = [pd.read_csv(path, usecols=["step", "eta"]).assign(key=key) for key, path in files.items()]
    steps = pd.concat([known[~known.key.isin(files)], *own])
    found = learned[[*CELL, "seed", "key"]].merge(steps, on="key").drop(columns="key")
    return found.astype({"step": float, "eta": float})


def comparisons(rows: pd.DataFrame) -> pd.DataFrame:
    """:func:`paired` for every method in the rows (the index) against the best grid search, with privacy only."""
    finite = rows[np.isfinite(rows.epsilon)]
    names = [name for name in ROWS if name in set(rows.row)]
    table = pd.DataFrame.from_dict({name: paired(finite, name) for name in names}, orient="index")
    table.insert(0, "method", [ROWS[name].title for name in names])
    return table
