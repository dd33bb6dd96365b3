"""Figures and findings of notebook 05, from the tables of ``dynamics``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import COMPARABLE, Verdict, over_places
from hyfreedp.experiments.studies import dynamics

# Column -> title of a panel, as in the paper's figure; the test loss stands in for that of the batch, which is private.
PANELS = {
    "loss_threshold": "threshold $R_l$ (nats)",
    "eta": r"learning rate $\eta$",
    "test_loss": "test loss (nats)",
    "percent": "test accuracy (%)",
}
LOGARITHMIC = ("loss_threshold", "eta")
THRESHOLD_TITLES = {"paper_previous": "$R_l$: the previous loss", "paper": "$R_l$: the sum of three (preset paper)"}
# Colours that no method has.
BLACK: dict[str, Any] = {"color": "black", "linestyle": "-", "marker": "."}
INTERVAL_STYLES = dict(zip(dynamics.INTERVALS, (BLACK, plots.STYLES["reference"], plots.STYLES["worst"]), strict=True))


def draw_band(axis: Axes, rows: pd.DataFrame, column: str, style: dict[str, Any], label: str = "") -> None:
    """Median over the runs as a line, their range as a band; nothing where the column has no values.

    Args:
        axis: to draw on.
        rows: per-step rows of the runs of one series.
        column: what to draw against ``step``.
        style: colour, dashes and marker, from :mod:`hyfreedp.experiments.store.plots`.
        label: of the line.
    """
    if column not in rows or rows[column].isna().all():
        return
    band = dynamics.bands(rows, column)
    axis.plot(band.index, band["median"], label=label, markevery=0.2, markersize=4, **style)
    axis.fill_between(band.index, band.low, band.high, color=style["color"], alpha=0.15, linewidth=0)


def draw(series: dict[str, dict[str, pd.DataFrame]], styles: dict[str, dict[str, Any]], title: str) -> Figure:
    """Threshold, rate, loss and accuracy over the steps: a row of panels per line of ``series``, a line per entry.

    Args:
        series: title of a row -> label -> per-step rows of the runs of that label.
        styles: of the labels.
        title: of the figure, what it shows.
    """
    size = (11, 0.9 + 2.5 * len(series))
    figure, axes = plt.subplots(len(series), len(PANELS), figsize=size, sharex=True, squeeze=False)
    for line, (row, entries) in zip(axes, series.items(), strict=True):
        for axis, column in zip(line, PANELS, strict=True):
            for label, rows in entries.items():
                draw_band(axis, rows.assign(percent=100 * rows.test_accuracy), column, styles[label], label)
            if column in LOGARITHMIC:
                axis.set_yscale("log")
                plots.plain_log_ticks(axis.yaxis)
        line[0].set_ylabel(row)
    for top, bottom, name in zip(axes[0], axes[-1], PANELS.values(), strict=True):
        top.set_title(name)
        bottom.set_xlabel("step")
    some = next(iter(next(iter(series.values())).values()))
    figure.suptitle(title)
    numbers = sorted({rows.seed.nunique() for entries in series.values() for rows in entries.values()})
    runs = f"epsilon = {some.epsilon.iloc[0]:g}; median and range of {' or '.join(map(str, numbers))} runs"
    plots.shared_legend(figure, [axes[0, 1]], ncols=5, title=runs)
    return figure


def draw_curves(rows: pd.DataFrame, tuned: dict[str, Spec], specs: Sequence[Spec]) -> Figure:
    """Preset paper at every K, a row per task and first rate, beside preset robust and the rate tuned by hand.

    Args:
        rows: of ``dynamics.steps_of``.
        tuned: task -> what was tuned by hand there.
        specs: of ``dynamics.curve_specs``.
    """
    styles = {f"K = {interval}": style for interval, style in INTERVAL_STYLES.items()}
    series: dict[str, dict[str, pd.DataFrame]] = {}
    for spec in specs:
        line = series.setdefault(f"{spec.task}, from $\\eta$ = {spec.learning_rate:g}", {})
        line[f"K = {spec.interval}"] = dynamics.of_spec(rows, spec)
        rivals = {"preset robust": dynamics.robust_spec(tuned[spec.task]), "tuned by hand": tuned[spec.task]}
        for label, rival in rivals.items():
            line.pop(label, None)  # below every K
            line[label] = dynamics.of_spec(rows, rival)
    styles |= {"preset robust": plots.STYLES["robust"], "tuned by hand": plots.STYLES["best"]}
    return draw(series, styles, "The first rate decides: the search keeps it, whether it suits or not")


def draw_real(rows: pd.DataFrame) -> Figure:
    """The same on real images, from the rows of ``fine_tuning.record``: a line per series."""
    looks = [*INTERVAL_STYLES.values(), plots.STYLES["robust"], plots.STYLES["best"]]
    by_series = dict(list(rows.groupby("series", sort=False)))
    styles = dict(zip(by_series, looks, strict=False))
    return draw({"CIFAR-10": by_series}, styles, "On real images, too, the search never climbs from its first rate")


def findings(named: dict[str, pd.DataFrame]) -> list[str]:
    """Accuracy, rates and threshold of every series: name -> per-step rows of its runs."""
    lines = []
    for name, rows in named.items():
        last = rows.sort_values("step").groupby("seed").last()
        line = f"{name}: accuracy {dynamics.spread(100 * last.test_accuracy)} %; "
        line += f"rate at most {rows.eta.max():.1g}, {last.eta.median():.1g} at the end"
        if rows.loss_threshold.notna().any():
            at, left = dynamics.peak(rows, "loss_threshold")
            line += f"; R_l is highest after {100 * at:.0f} % of the run and ends at {100 * left:.0f} % of that"
        lines.append(line)
    return lines


def curve_findings(rows: pd.DataFrame, specs: Sequence[Spec]) -> list[str]:
    """:func:`findings` of line searches, preset robust and what was tuned by hand."""
    names = {"paper": "K = {0.interval} from {0.learning_rate:g}", "robust": "preset robust"}
    return findings(
        {
            f"{spec.task}, " + names.get(spec.method, "tuned by hand ({0.learning_rate:g}, {0.method})").format(spec): (
                dynamics.of_spec(rows, spec)
            )
            for spec in specs
        }
    )


def draw_rates(rows: pd.DataFrame, specs: Sequence[Spec]) -> Figure:
    """The absolute rate of every run, a panel per spec; a cross wherever it is negative."""
    figure, axes = plt.subplots(1, len(specs), figsize=(9, 3.6), sharex=True, sharey=True)
    for axis, spec in zip(axes, specs, strict=True):
        chosen = dynamics.of_spec(rows, spec)
        for seed, run in chosen.groupby("seed"):
            axis.plot(run.step, run.eta.abs(), **plots.line(plots.SERIES[int(seed) % len(plots.SERIES)]))
            below = run[run.eta < 0]
            axis.plot(below.step, below.eta.abs(), "x", color="black", markersize=4)
        lowest = chosen.eta.abs().min()
        axis.set(title=f"{dynamics.TITLES[spec.method]}: down to {lowest:.0e}", xlabel="step")
    axes[0].set(yscale="log", ylim=(1e-8, 1e-2), ylabel=r"learning rate $|\eta|$ (cross: negative)")
    figure.suptitle("Noise moves both rules downwards: fast without guards, slowly with them")
    return figure


def rule_findings(table: pd.DataFrame) -> list[str]:
    """Of ``dynamics.behaviour_table``: what the step rules did."""
    return [
        f"{row.what}: {row.clear:.0f} % of the slopes are clear, {row.rejected:.0f} % of the fits rejected, "
        f"{row.negative:.0f} % of the rates negative; rates from {row.smallest:.1e} to {row.largest:.1e}; accuracy "
        f"{row.accuracy}"
        for row in table.itertuples()
    ]


def draw_thresholds(rows: pd.DataFrame, specs: Sequence[Spec]) -> Figure:
    """R_l in units of the test loss, a line per rule for R_l."""
    figure, axis = plt.subplots(figsize=(7, 3.6))
    for spec, style in zip(specs, (plots.STYLES["alternative"], plots.STYLES["paper"]), strict=True):
        chosen = dynamics.of_spec(rows, spec)
        chosen = chosen.assign(ratio=chosen.groupby("seed").loss_threshold.ffill() / chosen.test_loss)
        draw_band(axis, chosen, "ratio", style, THRESHOLD_TITLES[spec.method])
    axis.axhline(1, color="0.3", linewidth=1)
    axis.set(xlabel="step", ylabel="$R_l$ / test loss", yscale="log")
    axis.set_title("Both rules end below the loss that they are to measure")
    plots.log_ticks(axis.yaxis, (0.3, 0.5, 1, 2, 4))
    axis.legend()
    return figure


def threshold_findings(rows: pd.DataFrame, results: pd.DataFrame, specs: Sequence[Spec]) -> list[str]:
    """What :func:`draw_thresholds` shows, over the last quarter of the runs; ``results`` of ``runs.cells.tabulate``."""
    lines = []
    for spec in specs:
        chosen = dynamics.of_spec(rows, spec)
        start = min(0.75 * chosen.step.max(), chosen.dropna(subset="private_loss").step.max())  # short runs: a probe
        late = chosen[chosen.step >= start][["loss_threshold", "private_loss", "test_loss"]].median()
        lines.append(
            f"{dynamics.TITLES[spec.method]}, K = {spec.interval}: R_l is {late.loss_threshold:.2g}, the released loss "
            f"{late.private_loss:.2g}, the test loss {late.test_loss:.2g} nats; accuracy "
            f"{dynamics.reached(results, spec)}"
        )
    return lines


def verdicts(results: pd.DataFrame, tuned: dict[str, Spec]) -> list[Verdict]:
    """On Fig. "train curve": the best K of preset paper, from its own first rate, against the rate tuned by hand.

    Args:
        results: of ``runs.cells.tabulate``.
        tuned: of ``dynamics.tuned_by_hand``, by task.
    """
    of = 100 * results.set_index(["task", "method", "learning_rate", "interval", "seed"]).accuracy.sort_index()
    gaps, told = [], []
    for task, spec in tuned.items():
        by_hand = of[task, spec.method, spec.learning_rate].groupby("seed").mean()
        gap = of[task, "paper", dynamics.STARTS[0]].unstack("interval").sub(by_hand, axis="index")
        best = gap.mean().idxmax()
        gaps.append(gap[best].mean())
        first = f"{gap.mean().iloc[0]:+.1f} at K = {gap.columns[0]}"
        told.append(f"{gap[best].mean():+.1f} points on {task} at its best K, {first}")
    outcome, words = over_places(gaps, COMPARABLE)
    claim = 'Fig. "train curve": the learned schedule approaches the one tuned by hand (preset paper)'
    return [Verdict(claim, outcome, f"{', '.join(told)}; {words}")]
