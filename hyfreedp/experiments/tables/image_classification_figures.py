"""Figures, tables and findings of notebook 06, from the tables of ``image_classification``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import Outcome, Verdict
from hyfreedp.experiments.tables import image_classification
from hyfreedp.experiments.tables.image_classification import PLACE
from hyfreedp.experiments.tables.plan import ROWS, SCALES

LEARNER = ["task", "model", "tuning"]
FAR = 20.0  # points below the best grid search, from where a method is drawn at the edge with its number
PROFILES = {
    "smoke": "digits",
    "laptop": "digits",
    "desktop": "real images",
    "gpu": "real images",
    "paper": "as the paper",
}
# Methods whose rate is drawn, with their looks.
RATES = {
    "hyfreedp_robust": plots.line(plots.STYLES["robust"]),
    "hyfreedp_paper": plots.line(plots.STYLES["paper"]),
    "dadaptation": plots.line(plots.STYLES["reference"]),
    "prodigy": plots.line(plots.STYLES["line_search"]),
}
COLLAPSING = ["dadaptation", "prodigy"]
TUNINGS = {"full": "full fine-tuning, or from scratch", "bitfit": "BitFit", "lora": "LoRA"}
LOOKS = dict(
    zip(("the paper", "desktop", "laptop"), (plots.STYLES[name] for name in ("paper", "robust", "best")), strict=True)
)


def row_table() -> pd.DataFrame:
    """All rows of the accuracy tables, and whether they are private from end to end."""
    return pd.DataFrame(
        [
            {
                "row": row.title,
                "in the paper": row.paper or "–",
                "candidates": len(row.rates),
                "epsilon covers the choice": "yes" if row.covered else "no",
                "share of epsilon for training": f"{row.share:.0%}" if row.search == "grid" else "by the bound",
            }
            for row in ROWS.values()
        ]
    )


def missing_text(rows: pd.DataFrame, profile: str) -> str:
    """Whether numbers or whole places of a profile are missing, how many, and how to fill them."""
    missing, scale = int(rows.accuracy.isna().sum()), SCALES[profile]
    places, planned = len(rows[PLACE].drop_duplicates()), len(scale.learners) * len(scale.epsilons)
    fill = f"To fill them: `python -m hyfreedp.experiments grid --profile {profile}`"
    if missing:
        return f"**{missing} of {len(rows)} numbers are missing.** {fill}"
    if places < planned:
        return f"All {len(rows)} numbers of {places} places; **{planned - places} places are missing.** {fill}"
    return f"All {len(rows)} numbers are there."


def together(summary: pd.DataFrame) -> pd.DataFrame:
    """The texts of ``image_classification.beside_paper`` of both tunings as one table, the tuning in front."""
    frames = []
    for tuning in ("full", "bitfit"):
        texts, _ = image_classification.beside_paper(summary, tuning)
        texts.columns = [f"{whose}: {place}" for whose, place in texts.columns]
        frames.append(texts.reset_index().assign(tuning=tuning))
    table = pd.concat(frames, ignore_index=True).fillna("")
    return table[["tuning", *table.columns.drop("tuning")]]


# -- all methods at a glance -------------------------------------------------------------------------------------------


def learners_of(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Task, model and tuning of the tables, in their order."""
    return list(dict.fromkeys(rows[LEARNER].itertuples(index=False, name=None)))


def _title(task: str, model: str, tuning: str) -> str:
    return f"{image_classification.data_set(task)}\n{image_classification.title_of(model, tuning)}"


def _panel(rows: pd.DataFrame, learner: tuple[str, str, str], epsilon: float) -> pd.DataFrame:
    """The rows of one learner at one epsilon."""
    return rows[(rows[LEARNER] == list(learner)).all(axis=1) & (rows.epsilon == epsilon)]


def _name_of(epsilon: float) -> str:
    return rf"$\varepsilon$ = {'∞' if math.isinf(epsilon) else f'{epsilon:g}'}"


def draw_distances(rows: pd.DataFrame) -> Figure:
    """Points to the best grid search, mean and range of every method, a panel per budget and learner.

    Filled where epsilon covers the choice; a method that is farther behind than ``FAR`` stands at the edge, with its
    number.

    Args:
        rows: of ``image_classification.numbers``, of one profile.
    """
    best = 100 * image_classification.best_grid(rows).groupby(PLACE).accuracy.mean()
    learners, epsilons = learners_of(rows), list(dict.fromkeys(rows.epsilon))
    order = [name for name in ROWS if name in set(rows.row)][::-1]
    size = (2.6 + 2.9 * len(learners), (0.8 + 0.22 * len(order)) * len(epsilons))
    shape: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False}
    figure, axes = plt.subplots(len(epsilons), len(learners), figsize=size, **shape)
    for line, epsilon in zip(axes, epsilons, strict=True):
        for axis, learner in zip(line, learners, strict=True):
            level = best.get((rows.profile.iloc[0], *learner, epsilon), math.nan)
            _draw_methods(axis, _panel(rows, learner, epsilon), level, order)
        line[0].set_ylabel(_name_of(epsilon))
    for top, bottom, (task, model, tuning) in zip(axes[0], axes[-1], learners, strict=True):
        top.set_title(f"{_title(task, model, tuning)}\n{top.get_title()}", fontsize="small")
        bottom.set_xlabel("points to the best grid search")
    return figure


def _say_missing(axis: Axes) -> None:
    axis.text(0.5, 0.5, "not trained yet", transform=axis.transAxes, ha="center", va="center", color="0.5")


def _draw_methods(axis: Axes, here: pd.DataFrame, level: float, order: Sequence[str]) -> None:
    """A dot with its range per method, from bottom to top; nothing where the level is not known."""
    for height, name in enumerate(order):
        points = 100 * here[here.row == name].accuracy.dropna() - level
        if points.isna().all():
            continue
        style = plots.STYLES.get(name.removeprefix("hyfreedp_"), {}) if name.startswith("hyfreedp") else {}
        color, marker = style.get("color", "#333333"), style.get("marker", "o")
        face = color if ROWS[name].covered else "white"
        if points.mean() < -FAR:
            axis.plot(-FAR, height, "<", color=color, markerfacecolor=face, markersize=6)
            axis.annotate(
                f"{points.mean():+.0f}",
                (-FAR, height),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize="x-small",
            )
            continue
        axis.plot([max(points.min(), -FAR), points.max()], [height, height], "-", color=color, linewidth=1.5)
        axis.plot(points.mean(), height, marker, color=color, markerfacecolor=face, markersize=6)
    if here.accuracy.isna().all():
        _say_missing(axis)
    axis.axvline(0, color=plots.STYLES["best"]["color"], linestyle="--", linewidth=1.2)
    axis.set_yticks(range(len(order)), [ROWS[name].title for name in order], fontsize="small")
    axis.set_xlim(-FAR - 1.5, 6)
    axis.set_title("" if math.isnan(level) else f"best grid search {level:.1f} %", fontsize="small")


def comparisons(rows: pd.DataFrame) -> pd.DataFrame:
    """Every method of the rows (the index) against the best grid search, see ``image_classification.paired``."""
    epsilons = [epsilon for epsilon in dict.fromkeys(rows.epsilon) if math.isfinite(epsilon)]
    names = [name for name in ROWS if name in set(rows.row)]
    found = {name: image_classification.paired(rows, name, epsilons=epsilons) for name in names}
    columns = ["mean", "low", "high", "p", "wins", "pairs", "places"]
    table = pd.DataFrame.from_dict(found, orient="index", columns=columns)
    return table.assign(method=[ROWS[name].title for name in names])[["method", *columns]]


def accuracy_findings(compared: pd.DataFrame, rank: pd.DataFrame) -> list[str]:
    """The private methods against the best grid search, and the first four ranks.

    Args:
        compared: of :func:`comparisons`.
        rank: of ``image_classification.ranking``.
    """
    names = ["hyfreedp_robust", "hyfreedp_paper", "reference", "dp_hyper", "random_search"]
    lines = [f"{ROWS[name].title}: {_in_words(compared.loc[name])}" for name in names if name in compared.index]
    if len(rank):
        first = ", ".join(f"{ROWS[one.row].title} ({one.rank:.1f})" for one in rank.head(4).itertuples())
        lines.append(f"Mean rank over {rank.places.iloc[0]} private places, of {len(rank)} methods: {first}")
    return lines


def _in_words(found: pd.Series) -> str:
    if not found.pairs:
        return "no numbers yet"
    interval = "" if math.isnan(found.low) else f", 95 % interval {found.low:+.1f} to {found.high:+.1f}"
    test = "" if math.isnan(found.p) else f", sign-flip p = {found.p:.2g}"
    return (
        f"{found['mean']:+.1f} points to the best grid search (mean of {found.places} private places{interval}{test}; "
        f"better in {found.wins} of {found.pairs} pairs)"
    )


def rank_table(rank: pd.DataFrame) -> pd.DataFrame:
    """``image_classification.ranking`` with titles."""
    return pd.DataFrame(
        {"method": [ROWS[name].title for name in rank.row], "rank": rank["rank"], "places": rank.places}
    )


# -- the collapse ------------------------------------------------------------------------------------------------------


def draw_rates(steps: pd.DataFrame, learners: Sequence[tuple[str, str, str]], epsilons: Sequence[float]) -> Figure:
    """The rate at every step of the methods in ``RATES``: median and range over seeds.

    Args:
        steps: of ``image_classification.rates``.
        learners: a column each, of :func:`learners_of`.
        epsilons: a row each.
    """
    size = (2 + 3.2 * len(learners), 5)
    shape: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False}
    figure, axes = plt.subplots(len(epsilons), len(learners), figsize=size, **shape)
    for line, epsilon in zip(axes, epsilons, strict=True):
        for axis, learner in zip(line, learners, strict=True):
            here = _panel(steps, learner, epsilon)
            for name, look in RATES.items():
                found = here[here.row == name].groupby("step").eta.agg(["median", "min", "max"])
                low = found["min"].clip(lower=1e-9)
                axis.plot(found.index, found["median"], label=ROWS[name].title, **look)
                axis.fill_between(found.index, low, found["max"], color=look["color"], alpha=0.15)
            if here.empty:
                _say_missing(axis)
            axis.set(yscale="log", ylim=(3e-7, 1))
        line[0].set_ylabel(f"learning rate,\n{_name_of(epsilon)}")
    for top, bottom, (task, model, tuning) in zip(axes[0], axes[-1], learners, strict=True):
        top.set_title(_title(task, model, tuning), fontsize="small")
        bottom.set_xlabel("step")
    axes[0, -1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def collapse_findings(outcome: pd.DataFrame) -> list[str]:
    """Of ``image_classification.verdicts``, by tuning and with or without privacy, method by method."""
    lines = []
    for tuning, word in (("full", "All parameters trained"), ("bitfit", "BitFit")):
        for private, budget in ((True, "with privacy"), (False, "without")):
            chosen = outcome[(outcome.tuning == tuning) & (np.isfinite(outcome.epsilon) == private)]
            found = [_collapse(ROWS[str(name)].title, part) for name, part in chosen.groupby("row", sort=False)]
            if found:
                lines.append(f"{word}, {budget}: " + "; ".join(found))
    return lines


def _collapse(title: str, places: pd.DataFrame) -> str:
    counts = ", ".join(f"{verdict} in {count}" for verdict, count in places.verdict.value_counts().items())
    points = (places.accuracy - places.grid_accuracy).mean()
    return f"the rate of {title} {counts} of {len(places)} places, {points:+.0f} points to the extended grid search"


def titled(outcome: pd.DataFrame) -> pd.DataFrame:
    """The same table with the titles of the methods in column ``row``."""
    return outcome.assign(row=[ROWS[name].title for name in outcome.row])


# -- the paper's pattern -----------------------------------------------------------------------------------------------


def draw_gaps(gaps: pd.DataFrame) -> Figure:
    """Points to the grid search, the paper's and ours, a panel per tuning: mean and range over places and budgets.

    Args:
        gaps: of ``image_classification.gaps``.
    """
    order = [name for name, row in ROWS.items() if row.paper and name != "grid"] + ["hyfreedp_robust"]
    order = [name for name in order if name in set(gaps.row)][::-1]
    tunings, sources = list(dict.fromkeys(gaps.tuning)), list(dict.fromkeys(gaps.source))
    shape: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False}
    figure, axes = plt.subplots(1, len(tunings), figsize=(2 + 4 * len(tunings), 3.8), **shape)
    for axis, tuning in zip(axes[0], tunings, strict=True):
        for place, source in enumerate(sources):
            look, shift = LOOKS.get(source, plots.STYLES["robust"]), 0.2 * ((len(sources) - 1) / 2 - place)
            chosen = gaps[(gaps.source == source) & (gaps.tuning == tuning)]
            ranges = chosen.groupby("row").agg(gap=("gap", "mean"), low=("low", "min"), high=("high", "max"))
            for name, found in ranges[ranges.index.isin(order)].iterrows():
                height = order.index(str(name)) + shift
                axis.plot([found.low, found.high], [height] * 2, color=look["color"], linewidth=1.2)
                axis.plot(found.gap, height, look["marker"], color=look["color"])
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(order)), [ROWS[name].title for name in order])
        axis.set_title(TUNINGS[tuning])
        axis.set_xlabel("points to the grid search")
    handles = [
        Line2D([], [], color=look["color"], marker=look["marker"], label=_source(source))
        for source in sources
        for look in [LOOKS.get(source, plots.STYLES["robust"])]
    ]
    axes[0, -1].legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _source(source: str) -> str:
    return f"ours, {PROFILES[source]}" if source in PROFILES else source


def gap_findings(gaps: pd.DataFrame) -> list[str]:
    """Mean of :func:`draw_gaps`, by tuning and method, for those that the paper or we have."""
    lines = []
    for tuning in dict.fromkeys(gaps.tuning):
        for name in ("hyfreedp_paper", "hyfreedp_robust", "prodigy", "dp_hyper"):
            chosen = gaps[(gaps.tuning == tuning) & (gaps.row == name)]
            means = chosen.groupby("source", sort=False).gap.mean()
            values = [f"{mean:+.1f} ({_source(str(source))})" for source, mean in means.items()]
            if values:
                lines.append(f"{TUNINGS[tuning]}, {ROWS[name].title}: {', '.join(values)} points to the grid search")
    return lines


# -- verdicts ----------------------------------------------------------------------------------------------------------


def judged_table(judged: pd.DataFrame) -> pd.DataFrame:
    """``image_classification.judged`` as it is read: points with their sign, the interval as one text."""
    interval = [
        f"{low:+.1f} to {high:+.1f}" if math.isfinite(low) else "–"
        for low, high in zip(judged.low, judged.high, strict=True)
    ]
    numbers = {name: judged[name].map("{:+.1f}".format, na_action="ignore").fillna("–") for name in ("paper", "mean")}
    return pd.DataFrame(
        {
            "claim": judged.claim,
            "says at least": judged.least.map("{:+.0f}".format),
            "paper's tables": numbers["paper"],
            "ours": numbers["mean"],
            "95 % interval": interval,
            "places": judged.places,
            "verdict": judged.verdict,
        }
    )


def verdicts(judged: pd.DataFrame, *, real: bool) -> list[Verdict]:
    """Those claims of ``image_classification.judged`` that are about the grid searches, where there are numbers.

    Args:
        real: whether it judged real images, which alone can contradict a claim about them.
    """
    found = []
    for row in judged[judged.claim.str.contains("NonDP-GS|grid search") & (judged.places > 0)].itertuples():
        decided = row.verdict == "reproduced" or (row.verdict == "contradicted" and real)
        outcome: Outcome = row.verdict if decided else "not at this scale"
        claim = row.claim.replace("(Ours) preset", "Ours: preset")
        # That of two places, a t interval with one degree of freedom, would be wider than accuracies are.
        interval = f", 95 % interval {row.low:+.1f} to {row.high:+.1f}" if row.places > 2 else ""
        number = f"{row.mean:+.1f} points{interval}, {row.places} private place{'s' * (row.places > 1)}"
        found.append(Verdict(claim, outcome, number))
    return found


def optimism(rows: pd.DataFrame) -> pd.DataFrame:
    """Validation less test accuracy of the grid searches, in points: mean and deviation by model, tuning, epsilon."""
    grids = rows[rows.row.str.startswith("grid")].dropna(subset=["accuracy"])
    points = 100 * (grids.validation_accuracy - grids.accuracy)
    return points.groupby([grids.model, grids.tuning, grids.epsilon], sort=False).agg(["mean", "std"])
