"""Figures and findings of notebook 08, from the records of the benchmark."""

from __future__ import annotations

import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hyfreedp.experiments.benchmark import tables
from hyfreedp.experiments.benchmark.contenders import CONTENDERS
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import Verdict

LABELS = {name: contender.label for name, contender in CONTENDERS.items()}
PRIVATE = [name for name in CONTENDERS if name != "plain"]
TUNINGS = ("full", "biases", "lora")
_ORDER = ["ours", "ours_k1", "ours_k5", "opacus_hooks", "opacus_functorch", "ours_k10", "opacus_ghost"]
_LOOKS = [plots.STYLES["robust"], *plots.SERIES[1:]]  # ours is blue
_HATCHES = ("", "//", "..", "\\\\", "xx", "++", "oo")
BARS: dict[str, dict[str, Any]] = {
    name: {"color": style["color"], "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
    for name, style, hatch in zip(_ORDER, _LOOKS, _HATCHES, strict=True)
}
PLAIN: dict[str, Any] = {"color": "0.2", "linestyle": ":", "linewidth": 1.2}
GROWTH = dict(zip(("ours", "opacus_hooks", "opacus_ghost"), _LOOKS, strict=False))
VARIED = {"batch_size": "batch size $B$", "depth": "depth (blocks)", "width": "width", "tokens": "tokens $T$"}


def tunings_of(rows: pd.DataFrame) -> list[str]:
    """What a record has, in the order of ``TUNINGS``."""
    return [tuning for tuning in TUNINGS if tuning in set(rows.tuning)]


# -- contenders --------------------------------------------------------------------------------------------------------


def source_text(rows: pd.DataFrame, source: str) -> str:
    """Where the numbers of a record come from, and what its columns are."""
    first = rows.iloc[0]
    return (
        f"Numbers below are those {source} unless said otherwise: {first.hardware}, {first.threads} thread(s), medians "
        f"of {first.rounds} rounds, torch {first.torch}, Opacus {first.opacus}, {first.date}. A row says what one "
        "contender did on one model:\n\n"
        "* `seconds`, `seconds_min`, `seconds_max`: per step, over the rounds; with a probe every $K$ steps, the "
        "average over $K$ steps,\n"
        "* `ratio_to_plain` and `ratio_to_ours` with quartiles `_q1`, `_q3`: median over rounds of the ratio *within* "
        "a round,\n"
        "* `peak_mib`: most memory in tensors at any time, weights and optimizer state included, counted by torch's "
        "allocator,\n"
        "* `failure`: why a contender could not train the model, if so."
    )


def time_table(rows: pd.DataFrame) -> pd.DataFrame:
    """A record in milliseconds, by model, tuning and contender."""
    low, high = 1e3 * rows.seconds_min, 1e3 * rows.seconds_max
    table = rows.assign(
        contender=rows.contender.map(LABELS),
        milliseconds=1e3 * rows.seconds,
        range=[f"{a:.0f} to {b:.0f}" for a, b in zip(low, high, strict=True)],
    ).set_index(["model", "tuning", "contender"])
    return table[["milliseconds", "range", "ratio_to_plain", "ratio_to_ours", "peak_mib"]]


def failure_text(rows: pd.DataFrame) -> str:
    """Which contenders could not train which model."""
    failed = rows[rows.failure.notna()]
    lines = [f"* {row.model}, {row.tuning}: {LABELS[row.contender]}: {row.failure}" for row in failed.itertuples()]
    return "\n".join(lines) or "Every contender could train every model."


def draw_contenders(rows: pd.DataFrame) -> Figure:
    """Time and peak memory of every private contender relative to a plain step, a column per tuning.

    Args:
        rows: of the benchmark.
    """
    rows = rows.assign(memory_ratio=tables.memory_ratio(rows))
    tunings = tunings_of(rows)
    widths = [rows[rows.tuning == tuning].model.nunique() + 0.5 for tuning in tunings]
    shape: dict[str, Any] = {"sharex": "col", "sharey": "row", "squeeze": False, "width_ratios": widths}
    figure, axes = plt.subplots(2, len(tunings), figsize=(10.5, 6), **shape)
    for (above, below), tuning in zip(axes.T, tunings, strict=True):
        chosen = rows[rows.tuning == tuning]
        models = list(chosen.model.unique())
        for axis, value, who in ((above, "ratio_to_plain", PRIVATE), (below, "memory_ratio", PRIVATE[:4])):
            width = 0.85 / len(who)
            for i, name in enumerate(who):
                bars = chosen[chosen.contender == name].set_index("model").reindex(models)
                places = np.arange(len(models)) + width * (i - (len(who) - 1) / 2)
                axis.bar(places, bars[value], width, label=LABELS[name], **BARS[name])
                if value == "ratio_to_plain":
                    ends = [bars[value] - bars[f"{value}_q1"], bars[f"{value}_q3"] - bars[value]]
                    axis.errorbar(places, bars[value], ends, fmt="none", ecolor="0.2", elinewidth=0.8)
            axis.axhline(1, **PLAIN)
            axis.set_xticks(range(len(models)), models, rotation=20)
            axis.grid(False, axis="x")
        above.set_title(tuning)
    axes[0, 0].set_ylabel("time per step / plain step")
    axes[1, 0].set_ylabel("peak memory / plain step")
    plots.shared_legend(figure, axes[0, :1], ncols=4, fontsize="small")
    return figure


def contender_findings(rows: pd.DataFrame) -> list[str]:
    """Ranges over the models of what :func:`draw_contenders` shows, for four contenders."""
    rows = rows.assign(memory_ratio=tables.memory_ratio(rows))
    lines = []
    for column, what in (("ratio_to_plain", "time"), ("memory_ratio", "peak memory")):
        for tuning in tunings_of(rows):
            chosen = rows[rows.tuning == tuning]
            ranges = [f"{LABELS[name]} {_range(chosen[chosen.contender == name][column])}" for name in PRIVATE[:4]]
            lines.append(f"{tuning}: {what} to a plain step {', '.join(ranges)}")
    return lines


def _range(values: pd.Series) -> str:
    values = values.dropna()
    if values.empty:
        return "not measured"
    return f"{values.min():.2f}" + (f" to {values.max():.2f}" if len(values) > 1 else "")


# -- the interval ------------------------------------------------------------------------------------------------------


def interval_table(paper: pd.DataFrame, sources: dict[str, pd.DataFrame | None], device: str) -> pd.DataFrame:
    """``tables.beside_paper`` with the model that stands for each of the paper's on a device, and the theory."""
    table = tables.beside_paper(paper, sources)
    cases = zip(table.paper_model, table.tuning, strict=True)
    table["model"] = [tables.PAPER_CASES[name, tuning][device][0] for name, tuning in cases]
    table["theory, f = 1/3"] = [tables.interval_ratio(interval, 1 / 3) for interval in table.interval]
    return table[["paper_model", "model", "tuning", "interval", "paper", *sources, "theory, f = 1/3"]]


def interval_findings(compared: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """The paper's ratios beside ours where :func:`interval_table` has them, else those of ``rows`` at K = 1."""
    ours = compared["record"].fillna(compared["this notebook"])
    return [
        f"{row.paper_model} ({row.tuning}), K = {row.interval}: paper {row.paper:.3f}, ours ({row.model}) {value:.3f}"
        for row, value in zip(compared.itertuples(), ours, strict=True)
        if math.isfinite(value)
    ] or [
        f"{row.model} ({row.tuning}), K = 1: {row.ratio_to_ours:.2f}"
        for row in rows[rows.contender == "ours_k1"].itertuples()
    ]


def verdicts(compared: pd.DataFrame) -> list[Verdict]:
    """On Tab. "eff", from :func:`interval_table`: ours may be at most 2 % above the largest of the paper's ratios."""
    found = []
    for interval in (min(tables.INTERVALS), max(tables.INTERVALS)):
        at = compared[compared.interval == interval]
        ours = at["record"].fillna(at["this notebook"]).dropna()
        if len(ours):
            theirs = f"{at.paper.min():.3g} to {at.paper.max():.3g}"
            found.append(
                Verdict(
                    f'Tab. "eff": a learned rate takes {theirs} times a private step at K = {interval}',
                    "reproduced" if ours.max() <= 1.02 * at.paper.max() else "contradicted",
                    f"{ours.min():.2f} to {ours.max():.2f} times, on smaller models of the same families",
                )
            )
    return found


def draw_intervals(compared: pd.DataFrame, rows: pd.DataFrame, device: str) -> Figure:
    """Cost of HyFreeDP against K: the paper's table, ours with quartiles, and the model 1 + 2 f / K.

    Args:
        compared: of :func:`interval_table`.
        rows: of the benchmark.
        device: of the rows.
    """
    figure, (theirs, ours) = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    grid = np.geomspace(1, 10, 50)
    for axis in (theirs, ours):
        for share, dashes, text in ((1 / 3, "-", "theory: f = 1/3"), (1 / 2, "--", "theory: f = 1/2")):
            axis.plot(grid, [tables.interval_ratio(k, share) for k in grid], color="0.45", linestyle=dashes, label=text)
        axis.set(xscale="log", xlabel="interval $K$ (steps)")
        plots.log_ticks(axis.xaxis, tables.INTERVALS)
    for (name, tuning), style in zip(tables.PAPER_CASES, plots.SERIES, strict=False):
        found = compared[(compared.paper_model == name) & (compared.tuning == tuning)]
        theirs.plot(found.interval, found.paper, label=f"{name}, {tuning}", **plots.marks(style))
    probing = rows[rows.contender.isin([f"ours_k{k}" for k in tables.INTERVALS])]
    for tuning, style, shift in zip(TUNINGS, plots.SERIES, (0.96, 1.0, 1.04), strict=False):
        found = probing[probing.tuning == tuning]
        if found.empty:
            continue
        places = found.contender.str.removeprefix("ours_k").astype(int) * shift
        ends = [found.ratio_to_ours - found.ratio_to_ours_q1, found.ratio_to_ours_q3 - found.ratio_to_ours]
        ours.errorbar(places, found.ratio_to_ours, ends, label=tuning, elinewidth=0.8, **plots.marks(style))
    theirs.set(title="The paper's Tab. eff", ylabel="time with HyFreeDP / without")
    ours.set_title(f"Ours, one mark per model ({device})")
    for axis in (theirs, ours):
        plots.legend_below(axis, ncols=2)
    return figure


def share_findings(rows: pd.DataFrame) -> list[str]:
    """The share of a forward pass in our step that the ratios at K = 1 imply, by tuning."""
    implied = rows[rows.contender == "ours_k1"]
    shares = implied.ratio_to_ours.map(tables.forward_share).groupby(implied.tuning, sort=False)
    return [
        f"{tuning}: a forward pass is {low:.2f}"
        + (f" to {high:.2f}" if high > low else "")
        + " of our private step, by K = 1"
        for tuning, low, high in shares.agg(["min", "max"]).itertuples()
    ]


def interval_text(compared: pd.DataFrame) -> str:
    """The paper's text against its own table."""
    at_one = compared[compared.interval == 1].set_index(["paper_model", "tuning"]).paper
    return (
        "The paper's text says that LoRA and BitFit have *lower* additional costs. Its own table says the opposite: "
        f"for $K = 1$, {at_one['Vit-base', 'bitfit']:.2f} with BitFit against {at_one['Vit-base', 'full']:.2f} with "
        f"full tuning of the same model, and {at_one['Llama2-7B', 'lora']:.2f} with LoRA. The theory agrees with the "
        "table: with few weight gradients the step itself is shorter, so the same two forward passes weigh more. The "
        "paper's ratios of whole runs can lie below $1 + 2/3$, since data loading and slower clipping are part of both "
        "runs."
    )


# -- growth ------------------------------------------------------------------------------------------------------------


def draw_growth(growth: pd.DataFrame) -> Figure:
    """Time and memory relative to a plain step against one dimension of the model's shape at a time.

    Args:
        growth: of the benchmark's growth record.
    """
    growth = growth.assign(memory_ratio=tables.memory_ratio(growth))
    varied = list(growth.varied.unique())
    shape: dict[str, Any] = {"sharex": "col", "sharey": "row", "squeeze": False}
    figure, axes = plt.subplots(2, len(varied), figsize=(10.5, 5.2), **shape)
    for (above, below), name in zip(axes.T, varied, strict=True):
        here = growth[growth.varied == name].sort_values("value")
        for contender, style in GROWTH.items():
            found = here[here.contender == contender]
            above.plot(found.value, found.ratio_to_plain, label=LABELS[contender], **style)
            band: dict[str, Any] = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
            above.fill_between(found.value, found.ratio_to_plain_q1, found.ratio_to_plain_q3, **band)
            below.plot(found.value, found.memory_ratio, **style)
        below.set(xscale="log", xlabel=VARIED[name])
        plots.log_ticks(below.xaxis, list(here.value.unique()))
        for axis in (above, below):
            axis.axhline(1, **PLAIN)
    axes[0, 0].set_ylabel("time / plain step")
    axes[1, 0].set_ylabel("peak memory / plain step")
    plots.shared_legend(figure, axes[0, :1], ncols=3, fontsize="small")
    return figure


def growth_findings(growth: pd.DataFrame) -> list[str]:
    """Ranges over all sizes of what :func:`draw_growth` shows."""
    growth = growth.assign(memory_ratio=tables.memory_ratio(growth))
    return [
        f"{LABELS[str(contender)]}: time {found.ratio_to_plain.min():.2f} to {found.ratio_to_plain.max():.2f}, "
        f"peak memory {found.memory_ratio.min():.2f} to {found.memory_ratio.max():.2f} of a plain step"
        for contender, found in growth[growth.contender.isin(GROWTH)].groupby("contender", sort=False)
    ]
