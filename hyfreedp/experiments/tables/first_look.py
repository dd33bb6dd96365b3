"""Four ways to choose the rate of one small task, beside each other (notebook 12)."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyfreedp import NoiseSplit
from hyfreedp.accounting.composition import spent
from hyfreedp.experiments.runs.cells import Spec, read_steps, tabulate, with_seeds
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import COMPARABLE, Verdict, Whose, over_places
from hyfreedp.experiments.tables import small_tasks
from hyfreedp.experiments.tasks.registry import TASKS


@dataclass(frozen=True)
class Choice:
    """A way to get the rate: its name in figures, and the run of its first seed."""

    title: str
    spec: Spec


def choices(recorded: pd.DataFrame, *, epsilon: float, interval: int, steps: int | None) -> dict[str, Choice]:
    """Both presets, and the best and the worst of the learning-rate grid on digits; names are those of ``STYLES``.

    Args:
        recorded: rows of ``small_tasks``; the nearest epsilon of them tells best and worst.
        epsilon: of the runs.
        interval: of preset paper.
        steps: of the runs; None for the task's own.
    """
    grid = small_tasks.summarise(recorded)
    grid = grid[grid.method.isin(small_tasks.GRID_METHODS) & (grid.task == "digits")]
    distance = np.log(grid.epsilon / epsilon).abs()
    grid = grid[distance == distance.min()].sort_values("mean")
    common: dict[str, Any] = {"epsilon": epsilon, "steps": steps}
    found = {
        "robust": Choice("HyFreeDP, preset robust", Spec(method="robust", **common)),
        "paper": Choice("HyFreeDP, preset paper", Spec(method="paper", interval=interval, **common)),
    }
    for name, row in (("best", grid.iloc[-1]), ("worst", grid.iloc[0])):
        spec = Spec(method=row.method, learning_rate=float(row.learning_rate), **common)
        found[name] = Choice(f"grid's {name}: {row.learning_rate:g}, {row.method}", spec)
    return found


def grid_epsilon(split: NoiseSplit, trials: int) -> float:
    """What ``trials`` runs with this split cost together, by composition at its delta."""
    return spent(split, trials * split.steps, trials * split.probe_steps)


def history(found: dict[str, Choice], seeds: int, folder: Path) -> pd.DataFrame:
    """One row per step of all finished runs, with the ``choice`` and the ``seed`` of its run."""
    return pd.concat(
        read_steps(spec, folder).assign(choice=name, seed=spec.seed)
        for name, choice in found.items()
        for spec in with_seeds(choice.spec, seeds)
    )


def draw_runs(steps: pd.DataFrame, found: dict[str, Choice], sigma_loss: float) -> Figure:
    """Rate and accuracy of all choices, the private losses of preset paper and the looks of preset robust.

    Args:
        steps: of :func:`history`.
        found: of :func:`choices`.
        sigma_loss: noise multiplier of the losses of preset paper.
    """
    figure, axes = plt.subplots(2, 2, figsize=(10, 7))
    rate_axis, accuracy_axis, loss_axis, look_axis = axes.flat
    epsilon = found["robust"].spec.epsilon
    _draw_ranges(rate_axis, steps, "eta", found)
    rate_axis.set(yscale="log", title="Preset paper stays where it starts", ylabel="learning rate")
    _draw_ranges(accuracy_axis, steps.assign(percent=100 * steps.test_accuracy), "percent", found)
    accuracy_axis.set(
        title=f"A rate that is too low learns nothing (epsilon = {epsilon:g})",
        ylabel="test accuracy (%)",
        ylim=(0, 100),
    )
    _draw_losses(loss_axis, steps, sigma_loss)
    for axis in axes.flat:
        axis.set_xlabel("step")
    _draw_looks(look_axis, looks_of(steps))
    plots.legend_below(accuracy_axis, ncols=2)
    return figure


def _draw_ranges(axis: Axes, steps: pd.DataFrame, column: str, found: dict[str, Choice]) -> None:
    """Mean over seeds with the range from lowest to highest."""
    for name, choice in found.items():
        rows, style = steps[(steps.choice == name) & steps[column].notna()], plots.STYLES[name]
        by_step = rows.groupby("step")[column]
        middle, low, high = by_step.mean(), by_step.min(), by_step.max()
        axis.plot(middle.index, middle, label=choice.title, markevery=0.2, markersize=5, **style)
        axis.fill_between(middle.index, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _draw_losses(axis: Axes, steps: pd.DataFrame, sigma_loss: float) -> None:
    """Released mean losses of preset paper's first run, with the standard deviation of their noise."""
    first = steps[(steps.choice == "paper") & (steps.seed == 0) & steps.private_loss.notna()]
    noise = first.loss_threshold * sigma_loss / TASKS["digits"].batch_size
    look: dict[str, Any] = {"fmt": "s", "capsize": 2, "markersize": 4, "color": plots.STYLES["paper"]["color"]}
    axis.errorbar(first.step, first.private_loss, yerr=noise, **look)
    axis.set(title="Preset paper: noise (1 sd) drowns the changes", ylabel="private mean loss (nats)")


def looks_of(steps: pd.DataFrame) -> pd.DataFrame:
    """The rows with a look; ladder and margins are tuples again, as before they were written to a file."""
    rows = steps[steps.margins.notna()]
    return rows.assign(**{name: rows[name].map(ast.literal_eval) for name in ("rates", "margins")})


def _draw_looks(axis: Axes, looks: pd.DataFrame) -> None:
    """Margins between neighbouring rates with the standard deviation of their noise, seeds side by side."""
    for place, (step, rows) in enumerate(looks.groupby("step")):
        for first, row in enumerate(rows.itertuples()):
            between = [(high * low) ** 0.5 * 1.03**row.seed for high, low in pairwise(row.rates)]
            margins = np.array(row.margins, float)  # NaN, and not drawn, where none was asked
            options: dict[str, Any] = {"fmt": "os"[place % 2], "capsize": 2, "markersize": 4, "color": f"C{place}"}
            axis.errorbar(between, margins, row.margin_std, label=None if first else f"steps made: {step}", **options)
    axis.axhline(0, color="0.3", linewidth=0.8)
    axis.set(xscale="log", title="Preset robust: many votes are clear of it (1 sd)")
    plots.plain_log_ticks(axis.xaxis)
    axis.set(xlabel="learning rate", ylabel="share for the higher rate")
    plots.legend_below(axis, ncols=2)


def findings(steps: pd.DataFrame) -> list[str]:
    """What :func:`draw_runs` shows."""
    looks = looks_of(steps)
    found, margins = looks.groupby("seed").eta_next.last(), np.array(looks.margins.to_list(), float)
    of_paper = steps[(steps.choice == "paper") & steps.slope.notna()]
    signal = (of_paper.slope.abs() / of_paper.slope_std).median()
    start = of_paper[of_paper.step == of_paper.step.min()]
    released, threshold = start.private_loss.mean(), start.loss_threshold.mean()
    rates = steps.groupby("choice").eta.agg(["first", "max"])
    lines = [
        f"Preset robust starts at {rates['first']['robust']:.3g}; its looks lead to rates from {found.min():.3g} to "
        f"{found.max():.3g}. The margins lie between {np.nanmin(margins):+.2f} and "
        f"{np.nanmax(margins):+.2f}, their noise has a standard deviation of at most {looks.margin_std.max():.3f}",
        f"Preset paper starts at {rates['first']['paper']:.3g} and never exceeds {rates['max']['paper']:.3g}. The "
        f"slope that a probe of three losses sees is {signal:.2f} times the standard deviation of its noise (median)",
    ]
    if abs(released / threshold - 1) < 0.1:
        lines.append(
            f"Its first released loss is {released:.2f} where R_l is still {threshold:g}: the losses are above it and "
            "clipped to it, so that this number says hardly anything of the data"
        )
    return lines


def cost_table(
    records: Iterable[dict[str, Any]], found: dict[str, Choice], seeds: int, tuned_epsilon: float
) -> pd.DataFrame:
    """Accuracy in percent and epsilon of each choice, a row each; best and worst of the grid cost ``tuned_epsilon``.

    Args:
        records: of all runs, choice by choice and seed by seed.
        found: of :func:`choices`.
        seeds: of each.
        tuned_epsilon: of the whole grid.
    """
    results = tabulate(records)
    results["choice"] = [name for name in found for _ in range(seeds)]
    by_choice = results.groupby("choice", sort=False)
    table = by_choice.agg(
        accuracy=("accuracy", "mean"), sd=("accuracy", "std"), epsilon_of_the_run=("epsilon_spent", "max")
    )
    table[["accuracy", "sd"]] *= 100
    tuned = table.index.isin(["best", "worst"])
    table["epsilon_with_tuning"] = np.where(tuned, tuned_epsilon, table.epsilon_of_the_run)
    return table.set_axis([found[name].title for name in table.index])


def cost_findings(table: pd.DataFrame) -> list[str]:
    """Of :func:`cost_table`."""
    return [
        f"{title}: accuracy {row.accuracy:.1f}" + ("" if np.isnan(row.sd) else f" ± {row.sd:.1f}") + " %, epsilon "
        f"{row.epsilon_of_the_run:.2f} for the run, {row.epsilon_with_tuning:.2f} with tuning"
        for title, row in table.iterrows()
    ]


GAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("0.02, linear decay", plots.STYLES["alternative"]),
    "robust": ("preset robust", plots.STYLES["robust"]),
    "paper": ("preset paper, from 1e-4 (arrow: beyond the axis)", plots.STYLES["paper"]),
}


def draw_gaps(compared: pd.DataFrame) -> Figure:
    """The gaps of ``small_tasks.gaps`` with standard errors, a line per task and budget; far ones stand at the edge."""
    places = compared[["task", "epsilon"]].drop_duplicates().sort_values(["task", "epsilon"])
    names = list(places.itertuples(index=False, name=None))
    figure, axis = plt.subplots(figsize=(9, 3.8))
    for shift, (method, (title, style)) in zip((-0.15, 0.15, 0.0), GAPS.items(), strict=True):
        found = compared[compared.method == method].set_index(["task", "epsilon"]).reindex(names)
        look = plots.marks(style) | ({"marker": "<"} if (far := found.gap.max() < -5) else {})
        gaps, ends = found.gap.clip(lower=-5), found["std"] / found["count"] ** 0.5
        axis.errorbar(gaps, np.arange(len(names)) + shift, xerr=0 if far else ends, capsize=2, label=title, **look)
        for place, gap in enumerate(found.gap):
            if gap < -5:
                axis.annotate(f"{gap:.0f}", (-5, place), (8, -3), textcoords="offset points", fontsize="small")
    axis.axvline(0, color="0.3", linewidth=1)
    axis.set_yticks(range(len(names)), [f"{TASKS[task].title}, epsilon = {epsilon:g}" for task, epsilon in names])
    axis.invert_yaxis()
    axis.set(xlim=(-5.3, 3), xlabel="points of accuracy to the best of 16 runs, ± standard error of the mean of five")
    axis.set_title("Preset robust is within a point of a rate tuned by hand, preset paper far away")
    plots.shared_legend(figure, [axis], ncols=3)
    return figure


def gap_findings(compared: pd.DataFrame) -> list[str]:
    """What the gaps of ``small_tasks.gaps`` say."""
    of_robust = compared[compared.method == "robust"]
    return [
        f"Preset robust: from {of_robust.gap.min():+.1f} to {of_robust.gap.max():+.1f} points to the grid's best, "
        f"{of_robust.gap.mean():+.1f} in the mean"
    ]


def verdicts(compared: pd.DataFrame) -> list[Verdict]:
    """On both presets: a rate learned within the budget matches the grid's best if it is comparable to it.

    Args:
        compared: of ``small_tasks.gaps``.
    """
    claims: dict[str, tuple[str, Whose]] = {
        "paper": ('Tab. "cv_main": HyFreeDP matches a tuned learning rate (preset paper)', "the paper's"),
        "robust": ("Preset robust matches a tuned learning rate", "ours"),
    }
    found = []
    for method, (claim, whose) in claims.items():
        gaps = compared[compared.method == method].gap
        outcome, words = over_places(gaps, COMPARABLE)
        number = f"{gaps.mean():+.1f} points to the best of 16 runs ({gaps.min():+.1f} at worst), {words}"
        found.append(Verdict(claim, outcome, number, whose))
    return found
