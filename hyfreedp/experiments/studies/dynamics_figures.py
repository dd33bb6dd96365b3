"""Figures and findings of notebook 05, from the tables of ``dynamics``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyfreedp.experiments.runs.methods import METHODS
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import Verdict
from hyfreedp.experiments.studies import dynamics

# What each line search has of its own, and what all have: column -> title of a panel.
COLUMNS = {
    "line_search": {"difference_threshold": "$R_d$ (nats)", "bend_threshold": "$R_c$ (nats)"},
    "paper": {"loss_threshold": "$R_l$ (nats)", "private_loss": "released training loss (nats)"},
}
RATE = {"eta": r"learning rate $\eta$"}
RESULT = {"test_loss": "test loss (nats)", "percent": "test accuracy (%)"}
REAL = {"loss_threshold": "threshold $R_l$ (nats)"} | RATE | {"private_loss": "released training loss (nats)"} | RESULT
# Colours that no method has.
BLACK: dict[str, Any] = {"color": "black", "linestyle": "-", "marker": "."}
INTERVAL_STYLES = dict(zip(dynamics.INTERVALS, (BLACK, plots.STYLES["reference"], plots.STYLES["worst"]), strict=True))


LEAST_RATE = 1e-8  # that is drawn


# -- the figures -------------------------------------------------------------------------------------------------------


def draw_curves(
    rows: pd.DataFrame, tuned: dict[str, Spec], intervals: Sequence[int], panels: Literal["rate", "result"]
) -> Figure:
    """Thresholds and rate, or losses and accuracy, over the steps: a row per task and line search, a line per K.

    Beside them, where they have the column, the rate tuned by hand and preset robust.

    Args:
        rows: of ``dynamics.steps_of``.
        tuned: task -> what was tuned by hand there; its epsilon, seed and length are those of the line searches.
        intervals: values of K.
        panels: which half.
    """
    rows = rows.assign(percent=100 * rows.test_accuracy)
    lines = [(task, method) for task in tuned for method in dynamics.SEARCHES]
    shape: dict[str, Any] = {"figsize": (12 if panels == "rate" else 9, 2.9 * len(lines)), "squeeze": False}
    figure, axes = plt.subplots(len(lines), 3 if panels == "rate" else 2, **shape)
    for line, (task, method) in zip(axes, lines, strict=True):
        searches = [replace(Spec(task=task, epsilon=tuned[task].epsilon), method=method, interval=k) for k in intervals]
        columns = COLUMNS[method] | RATE if panels == "rate" else RESULT
        for axis, (column, name) in zip(line, columns.items(), strict=True):
            for spec in searches:
                chosen, style = dynamics.of_spec(rows, spec), INTERVAL_STYLES[spec.interval]
                draw_band(axis, chosen, column, style, f"K = {spec.interval}")
            if column in RATE | RESULT:
                by_hand = dynamics.of_spec(rows, tuned[task])
                draw_band(axis, by_hand, column, plots.STYLES["best"], "tuned by hand")
                robust = dynamics.of_spec(rows, dynamics.robust_spec(tuned[task]))
                draw_band(axis, robust, column, plots.STYLES["robust"], "preset robust")
            if column not in ("percent", "private_loss", "loss_threshold"):
                axis.set_yscale("log")
            axis.set(title=name, xlabel="step")
        if panels == "result":
            line[-1].set_ylim(0, 100)
        line[0].set_ylabel(f"{task}\n{method}", fontsize="large")
    plots.shared_legend(figure, axes[:1, -1], loc="outside upper center", ncols=5, title=_title(rows))
    return figure


def _title(rows: pd.DataFrame) -> str:
    return f"epsilon = {rows.epsilon.iloc[0]:g}; median and range of {rows.seed.nunique()} seeds"


def curve_findings(rows: pd.DataFrame, results: pd.DataFrame, specs: Sequence[Spec]) -> list[str]:
    """Accuracy of every spec of :func:`draw_curves`, and where the threshold of each line search peaks.

    Args:
        rows: of ``dynamics.steps_of``.
        results: of ``runs.cells.tabulate``.
        specs: line searches, preset robust and what was tuned by hand.
    """
    lines = []
    for spec in specs:
        accuracy = dynamics.reached(results, spec)
        if spec.method not in dynamics.SEARCHES:
            name = (
                "preset robust" if spec.method == "robust" else f"tuned by hand ({spec.learning_rate:g}, {spec.method})"
            )
            lines.append(f"{spec.task}, {name}: accuracy {accuracy}")
            continue
        column = next(iter(COLUMNS[spec.method]))
        shape = dynamics.peaks(dynamics.of_spec(rows, spec), column).median(numeric_only=True)
        lines.append(
            f"{spec.task}, {spec.method}, K = {spec.interval}: accuracy {accuracy}; "
            f"{'R_d' if spec.method == 'line_search' else 'R_l'} is highest after {100 * shape.peak_at:.0f} % of the "
            f"run and ends at {_percent(shape['last'])} of that"
        )
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share > 0.095 else f"{100 * share:.1g} %"


def draw_real(rows: pd.DataFrame) -> Figure:
    """Threshold, rate, losses and accuracy on real images: a line per series.

    Args:
        rows: of ``fine_tuning.record``.
    """
    rows = rows.assign(percent=100 * rows.test_accuracy)
    looks = [*INTERVAL_STYLES.values(), plots.STYLES["robust"], plots.STYLES["best"]]
    styles = dict(zip(dict.fromkeys(rows.series), looks, strict=False))
    figure, axes = plt.subplots(2, 3, figsize=(12, 6))
    axes[-1, -1].remove()
    for axis, (column, name) in zip(axes.flat[:-1], REAL.items(), strict=True):
        for series, style in styles.items():
            draw_band(axis, rows[rows.series == series], column, style, series)
        axis.set(title=name, xlabel="step", yscale="log" if column == "eta" else "linear")
    plots.shared_legend(figure, figure.axes, loc="outside upper center", ncols=3, title=_title(rows))
    return figure


def real_findings(rows: pd.DataFrame) -> list[str]:
    """Accuracy of every series of :func:`draw_real`, its largest and its last rate, and where R_l peaks."""
    lines = []
    for series, chosen in rows.groupby("series", sort=False):
        last = chosen.sort_values("step").groupby("seed").last()
        line = f"{series}: accuracy {dynamics.spread(100 * last.test_accuracy)} %; "
        line += f"rate at most {chosen.eta.max():.1g}, {last.eta.median():.1g} at the end"
        if chosen.loss_threshold.notna().any():
            highest = chosen.loc[chosen.loss_threshold.idxmax()]
            share, end = highest.step / chosen.step.max(), last.loss_threshold.median() / highest.loss_threshold
            line += f"; R_l is highest after {100 * share:.0f} % of the run and ends at {100 * end:.0f} % of that"
        lines.append(line)
    return lines


def verdicts(results: pd.DataFrame, tuned: dict[str, Spec]) -> list[Verdict]:
    """On Fig. "train curve": the best K of preset paper against the rate tuned by hand, on every task.

    Args:
        results: of ``runs.cells.tabulate``.
        tuned: of ``dynamics.tuned_by_hand``, by task.
    """
    means = 100 * results.groupby(["task", "method", "interval", "learning_rate"]).accuracy.mean()
    gaps = {
        task: means[task, "paper"] - means[task, spec.method].xs(spec.learning_rate, level="learning_rate").max()
        for task, spec in tuned.items()
    }
    told = [
        f"{gap.max():+.1f} points on {task} at its best K, {gap.iloc[0]:+.1f} at K = {gap.index[0][0]}"
        for task, gap in gaps.items()
    ]
    return [
        Verdict(
            'Fig. "train curve": the learned schedule approaches the one tuned by hand (preset paper)',
            "reproduced" if min(gap.max() for gap in gaps.values()) > -2 else "not at this scale",
            ", ".join(told),
        )
    ]


def draw_rates(rows: pd.DataFrame, base: Spec, methods: Iterable[str]) -> Figure:
    """The rate of every run, a panel per method of the ablation.

    Args:
        rows: of ``dynamics.steps_of``.
        base: its task and interval are those of the ablation.
        methods: in rows of four, or of three if there are six.
    """
    ablated, methods = dynamics.of_ablation(rows, base), list(methods)
    columns = 3 if len(methods) == 6 else 4
    shape: dict[str, Any] = {"figsize": (13, 2.7 * (len(methods) // columns)), "sharex": True, "sharey": True}
    figure, axes = plt.subplots(len(methods) // columns, columns, **shape)
    for axis, method in zip(axes.flat, methods, strict=True):
        chosen = ablated[ablated.method == method]
        style = plots.STYLES["paper" if METHODS[method].preset == "paper" else "line_search"]
        draw_runs(axis, chosen, "eta", style)
        axis.set_title(dynamics.TITLES[method])
        if (least := chosen.eta.abs().min()) < LEAST_RATE:
            axis.text(0.97, 0.05, f"down to {least:.0e}", transform=axis.transAxes, ha="right", fontsize="small")
    axes[0, 0].set(yscale="log", ylim=(LEAST_RATE, 10))
    figure.supxlabel(f"step (epsilon = {base.epsilon:g})")
    figure.supylabel(r"learning rate $|\eta|$, a line per run (cross: negative)")
    return figure


def rate_findings(table: pd.DataFrame) -> list[str]:
    """Of ``dynamics.behaviour_table``: what the step rules did."""
    literal, gen = table.loc["paper_literal"], table.loc["paper"]
    contrasts_literal, contrasts_gen = table.loc["line_search_literal"], table.loc["line_search_gen"]
    return [
        f"losses, literal: {literal.negative:.0f} % of the probes make the rate negative, and it shrinks to "
        f"{literal.smallest_eta:.0e} (only {literal.clear:.0f} % of the slopes are clear); accuracy {literal.spread} %",
        f"losses, gen: {gen.rejected:.0f} % of the probes are rejected, {gen.clamped:.0f} % clamped; the rate never "
        f"exceeds {gen.largest_eta:.1e} and falls to {gen.smallest_eta:.0e}; accuracy {gen.spread} %",
        f"contrasts, literal: {contrasts_literal.negative:.0f} % negative, rates up to "
        f"{contrasts_literal.largest_eta:.2g}; accuracy {contrasts_literal.spread} %",
        f"contrasts, gen: {contrasts_gen.clear:.0f} % of the slopes are clear, and the rate still gets no farther than "
        f"{contrasts_gen.largest_eta:.1e}; accuracy {contrasts_gen.spread} %",
    ]


def part_findings(table: pd.DataFrame) -> list[str]:
    """Of ``dynamics.behaviour_table``: the line search less one part, and versions of rule "gen"."""
    lines = [f"{row.what}: {_against(table, row)}" for row in table.loc[_parts_left_out()].itertuples()]
    return lines + [
        f"{row.what}: rates from {row.smallest_eta:.1e} to {row.largest_eta:.1e}; accuracy {row.spread} %"
        for row in table.loc[list(dynamics.SMOOTHINGS.values())].itertuples()
    ]


def _parts_left_out() -> list[str]:
    return [method for method in dynamics.PARTS.values() if method != "line_search"]


def _against(table: pd.DataFrame, row: Any) -> str:
    return f"{row.spread} %, {row.accuracy - table.accuracy['line_search']:+.1f} points to the whole line search"


def draw_thresholds(rows: pd.DataFrame, base: Spec) -> Figure:
    """R_l, released and test loss for both rules for R_l under two step rules, at the interval of ``base``."""
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), sharex=True, sharey=True)
    for axis, ((rule, threshold_rule), method) in zip(axes, dynamics.LOSS_THRESHOLDS.items(), strict=True):
        chosen = dynamics.of_spec(rows, replace(base, method=method))
        draw_band(axis, chosen, "loss_threshold", plots.STYLES["paper"], "threshold $R_l$")
        draw_band(axis, chosen, "test_loss", plots.STYLES["reference"], "test loss")
        draw_band(axis, chosen, "private_loss", plots.STYLES["worst"], "released loss")
        axis.set(title=f"rule {rule}, $R_l$: {threshold_rule}", xlabel="step", yscale="log", ylim=(5e-3, 20))
    axes[0].set_ylabel("nats")
    plots.shared_legend(figure, axes[:1], loc="outside upper center", ncols=3, title=_title(rows))
    return figure


def threshold_findings(rows: pd.DataFrame, results: pd.DataFrame, base: Spec) -> list[str]:
    """What :func:`draw_thresholds` shows, over the second half of the runs; ``results`` as for the curves."""
    late = dynamics.late_medians(rows, base)
    return [
        f"rule {rule}, R_l from the {threshold_rule}, K = {base.interval}: R_l is "
        f"{late.loss_threshold[rule, threshold_rule]:.2g}, the released loss "
        f"{late.private_loss[rule, threshold_rule]:.2g}, the test loss {late.test_loss[rule, threshold_rule]:.2g} "
        f"nats; accuracy {dynamics.reached(results, replace(base, method=method))}"
        for (rule, threshold_rule), method in dynamics.LOSS_THRESHOLDS.items()
    ]


def draw_ablation(results: pd.DataFrame, base: Spec, tuned: Spec) -> Figure:
    """Final accuracy of step rules on both probes, and of the line search less one part.

    Args:
        results: of ``runs.cells.tabulate``.
        base: its task and interval are those of the ablation.
        tuned: what was tuned by hand on that task.
    """
    figure, (rule_axis, part_axis) = plt.subplots(1, 2, figsize=(11, 3.8), sharex=True)
    final = dynamics.of_ablation(results, base)
    rules = list(dict.fromkeys(rule for _, rule in dynamics.RULES))
    for probe, search, shift in (("contrasts", "line_search", -0.12), ("losses", "paper", 0.12)):
        methods = {rule: dynamics.RULES[probe, rule] for rule in rules}
        draw_accuracies(rule_axis, final, methods, plots.STYLES[search], f"{probe} ({search})", shift)
    draw_accuracies(part_axis, final, dynamics.PARTS, plots.STYLES["line_search"])
    by_hand = 100 * dynamics.of_spec(results, tuned).accuracy.mean()
    for axis, title in ((rule_axis, "step rules on both probes"), (part_axis, "line search ...")):
        axis.axvline(by_hand, color=plots.STYLES["best"]["color"], linestyle="-.", label="tuned by hand")
        axis.set(title=title, xlabel=f"test accuracy (%), epsilon = {base.epsilon:g}", xlim=(0, 100))
    plots.shared_legend(figure, [rule_axis], loc="outside upper center", ncols=3)
    return figure


def ablation_findings(table: pd.DataFrame) -> list[str]:
    """Of ``dynamics.behaviour_table``, the most important part first."""
    lost = table.accuracy["line_search"] - table.accuracy
    probe, damping, warmup = (lost[f"line_search_{part}"] for part in ("losses", "undamped", "cold"))
    return [
        f"the probe: with three losses in place of the contrasts {probe:.1f} points are lost, which leaves "
        f"{table.spread['line_search_losses']} %",
        f"the rule: on the same contrasts rule gen loses {lost['line_search_gen']:.1f} points, b/a taken literally "
        f"{lost['line_search_literal']:.1f}",
        f"the damping: {damping:.1f} points; the probes at every step of the first tenth: {warmup:.1f}",
        f"a prior in place of the probe: three losses under rule anchored reach {table.spread['paper_anchored']} %, "
        f"the line search {table.spread['line_search']} %",
    ]


# -- panels ------------------------------------------------------------------------------------------------------------


def draw_band(
    axis: Axes, rows: pd.DataFrame, column: str, style: dict[str, Any], label: str = "", *, every: float = 0.2
) -> None:
    """Median over the runs as a line, their range as a band; nothing where the column has no values.

    Args:
        axis: to draw on.
        rows: per-step rows of the runs of one series.
        column: what to draw against ``step``.
        style: colour, dashes and marker, from :mod:`hyfreedp.experiments.store.plots`.
        label: of the line.
        every: spacing of the markers, as a share of the axis.
    """
    if column not in rows or rows[column].isna().all():
        return
    band = dynamics.bands(rows, column)
    axis.plot(band.index, band["median"], label=label, markevery=every, markersize=4, **style)
    axis.fill_between(band.index, band.low, band.high, color=style["color"], alpha=0.15, linewidth=0)


def draw_runs(axis: Axes, rows: pd.DataFrame, column: str, style: dict[str, Any]) -> None:
    """One line of absolute values per run; a cross wherever the value is negative."""
    for _, run in rows.dropna(subset=column).groupby("seed"):
        axis.plot(run.step, run[column].abs(), linewidth=1.2, color=style["color"], linestyle=style["linestyle"])
        below = run[run[column] < 0]
        axis.plot(below.step, below[column].abs(), "x", color="black", markersize=4)


def draw_accuracies(
    axis: Axes,
    results: pd.DataFrame,
    methods: dict[str, str],
    style: dict[str, Any],
    label: str = "",
    shift: float = 0.0,
) -> None:
    """Final accuracies: one row per entry of ``methods``, a small point per run, a large one with mean and deviation.

    Args:
        axis: to draw on; names go to its y axis, from top to bottom.
        results: one row per run, ``accuracy`` a share.
        methods: name to show -> method.
        style: colour and marker.
        label: of the series.
        shift: of the points within their row, for several series on one axis.
    """
    points = {"color": style["color"], "marker": style["marker"], "linestyle": "none"}
    for row, method in enumerate(methods.values()):
        percent = 100 * results[results.method == method].accuracy
        axis.plot(percent, [row + shift] * len(percent), alpha=0.4, markersize=4, **points)
        name = label if row == 0 else None
        axis.errorbar(percent.mean(), row + shift, xerr=percent.std(), capsize=3, markersize=7, label=name, **points)
    axis.set_yticks(range(len(methods)), list(methods))
    axis.set_ylim(len(methods) - 0.5, -0.5)
