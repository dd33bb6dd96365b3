"""Figures and findings of notebook 07, from the tables of ``language_generation``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import Verdict
from hyfreedp.experiments.tables.language_generation import METRICS, START
from hyfreedp.experiments.tables.plan import ROWS, Learner
from hyfreedp.experiments.tasks.language import Documents, LanguageTask

STYLES = {"grid": "best", "reference": "reference", "hyfreedp_paper": "paper", "hyfreedp_robust": "robust"}
PANELS = {
    "eta": r"learning rate $\eta$",
    "loss_threshold": r"clipping threshold $R_l$ (nats)",
    "test_loss": "loss (nats per token)",
    "test_perplexity": "test perplexity",
}


def start_text(task: LanguageTask, learner: Learner, start: dict[str, Any]) -> str:
    """Data, model and what it says before private training, as ``language_generation.public_start`` found."""
    texts, architecture, model = task.load(), task.architecture(learner.model), task.model(0, learner.model)
    assert not isinstance(texts, Documents)
    meaning, references = texts.test[0]
    return (
        f"**{task.title}**, {texts.source}. N = {task.train_size:,}, B = {task.batch_size}, "
        f"T = {learner.steps or task.steps}, delta = {task.delta:.1e}; {len(texts.test)} meanings to test. Model: "
        f"{architecture.title}, {sum(p.numel() for p in model.parameters()):,} parameters. Before private training it "
        f"predicts {100 * start['accuracy']:.0f} % of the test tokens right ({start['loss']:.2f} nats per token).\n\n"
        f"> {meaning}\n\n*A reference:* {references[0]}\n\n*The public start:* {start['outputs'][0]}"
    )


def draw_metrics(summary: pd.DataFrame, methods: Sequence[str], epsilons: Sequence[float]) -> Figure:
    """Every metric and the perplexity, mean and range over seeds, a panel each; the public start is a line.

    Args:
        summary: of ``language_generation.summarise``.
        methods: names in ``ROWS``, from top to bottom.
        epsilons: of the summary.
    """
    figure, axes = plt.subplots(1, len(METRICS) + 1, figsize=(13, 3.4), sharey=True)
    for axis, metric in zip(axes, [*METRICS, "perplexity"], strict=True):
        for index, (epsilon, style) in enumerate(zip(epsilons, plots.SERIES, strict=False)):
            chosen = summary[(summary.metric == metric) & (summary.epsilon == epsilon)]
            chosen = chosen.set_index("row").reindex(methods)
            places = [place + 0.2 * (index - (len(epsilons) - 1) / 2) for place in range(len(methods))]
            ranges = [(chosen["mean"] - chosen.low).fillna(0), (chosen.high - chosen["mean"]).fillna(0)]
            bars: dict[str, Any] = {"xerr": ranges, "markersize": 5}
            label = rf"$\varepsilon$ = {epsilon:g}"
            axis.errorbar(chosen["mean"], places, label=label, **bars, **plots.marks(style))
        for value in summary[(summary.metric == metric) & (summary.row == START)]["mean"]:
            axis.axvline(value, label="public start", linestyle=":", color="0.4")
        axis.set_title(metric)
        axis.set_xlabel("per token, lower is better" if metric == "perplexity" else "score")
        axis.margins(x=0.15)
    axes[-1].set_xscale("log")
    axes[0].set_yticks(range(len(methods)), [ROWS[name].title for name in methods])
    axes[0].invert_yaxis()
    plots.shared_legend(figure, axes[:1], ncols=len(epsilons) + 1)
    return figure


def metric_findings(summary: pd.DataFrame, methods: Sequence[str], epsilons: Sequence[float]) -> list[str]:
    """The start, and the best, the worst and HyFreeDP at every epsilon; arguments as for :func:`draw_metrics`."""
    means = summary.set_index(["metric", "epsilon", "row"])["mean"]
    perplexity, bleu = (means.get((metric, 0.0, START), math.nan) for metric in ("perplexity", "BLEU"))
    lines = [f"before private training the perplexity is {perplexity:.0f} and BLEU {bleu:.3f}"]
    for epsilon in epsilons:
        measured = [row for row in methods if not math.isnan(means.get(("BLEU", epsilon, row), math.nan))]
        if len(measured) < 2:
            continue
        perplexity, bleu = ({row: means[metric, epsilon, row] for row in measured} for metric in ("perplexity", "BLEU"))
        by_perplexity = sorted(measured, key=perplexity.__getitem__)
        lowest, highest, best = by_perplexity[0], by_perplexity[-1], max(measured, key=bleu.__getitem__)
        lines.append(
            f"epsilon = {epsilon:g}: lowest perplexity {ROWS[lowest].title} ({perplexity[lowest]:.2f}), highest "
            f"{ROWS[highest].title} ({perplexity[highest]:.3g}); best BLEU {ROWS[best].title} ({bleu[best]:.3f})"
        )
        lines += [
            f"epsilon = {epsilon:g}: {ROWS[row].title} has BLEU {bleu[row]:.3f} and perplexity {perplexity[row]:.2f}, "
            f"the uncounted grid search {bleu['grid']:.3f} and {perplexity['grid']:.2f}"
            for row in ("hyfreedp_robust", "hyfreedp_paper")
            if row in measured and "grid" in measured
        ]
    there = summary.dropna(subset="mean").metric
    if (there == "BLEU").sum() > (there == "METEOR").sum():
        lines.append("METEOR needs Java, which this machine lacks")
    return lines


def edge_findings(rows: pd.DataFrame) -> list[str]:
    """Where a grid search chose the smallest or largest of its rates; ``rows`` of ``language_generation.scored``."""
    found = rows[rows.row.str.startswith("grid")].dropna(subset="learning_rate").drop_duplicates(["epsilon", "row"])
    return [
        f"epsilon = {epsilon:g}: {ROWS[row].title} chose {rate:g}{at_edge(row, rate)}"
        for epsilon, row, rate in found[["epsilon", "row", "learning_rate"]].itertuples(index=False, name=None)
    ]


def below_start_findings(rows: pd.DataFrame) -> list[str]:
    """Which runs write worse than the model they began from; ``rows`` of ``language_generation.scored``."""
    start = float(rows.BLEU[rows.row == START].iloc[0])
    lines = []
    for (epsilon, row), runs in rows[rows.row != START].dropna(subset="BLEU").groupby(["epsilon", "row"], sort=False):
        if len(below := runs.BLEU[runs.BLEU < start]):
            scores = " and ".join(f"{score:.3f}" for score in below)
            lines.append(
                f"epsilon = {epsilon:g}: {len(below)} of {len(runs)} runs of {ROWS[str(row)].title} ended below the "
                f"public start's BLEU of {start:.3f}: {scores}"
            )
    return lines


def at_edge(row: str, rate: float) -> str:
    """What to add to a rate that a search chose at an end of its grid; else nothing."""
    candidates = ROWS[row].rates
    ends = {min(candidates): "smallest", max(candidates): "largest"} if len(candidates) > 1 else {}
    return f", the {ends[rate]} of its rates: a wider grid may do better" if rate in ends else ""


def judged_table(judged: pd.DataFrame) -> pd.DataFrame:
    """``language_generation.judged`` as it is read: ranges as one text."""
    table = {"epsilon": judged.epsilon.map("{:g}".format), "claim": judged.claim, "share of grid search": judged.says}
    for title, low, high in (("paper's scores", "paper_low", "paper_high"), ("ours", "low", "high")):
        ranges = zip(judged[low], judged[high], strict=True)
        table[title] = [f"{a:.2f} to {b:.2f}" if math.isfinite(a) else "–" for a, b in ranges]
    return pd.DataFrame(table | {"runs": judged.runs, "verdict": judged.verdict})


def verdicts(summary: pd.DataFrame, epsilons: Sequence[float], data: str) -> list[Verdict]:
    """On Tab. "gpt2": BLEU of both presets in units of the uncounted grid search.

    Args:
        summary, epsilons: as for :func:`draw_metrics`.
        data: what the runs were trained on, in words.

    Returns:
        Of each preset that has, as the grid search, a number at one of ``epsilons``.
    """
    scored = summary[(summary.metric == "BLEU") & summary["mean"].notna()].set_index(["row", "epsilon"])
    bleu, runs = scored["mean"], scored["count"]
    claims = {
        "hyfreedp_paper": 'Tab. "gpt2": HyFreeDP writes as well as the grid search (preset paper)',
        "hyfreedp_robust": "A rate learned within the budget writes as well as the grid search (preset robust, ours)",
    }
    found = []
    for row, claim in claims.items():
        both = [epsilon for epsilon in epsilons if {(row, epsilon), ("grid", epsilon)} <= {*bleu.index}]
        if not both:  # a profile without them
            continue
        shares = [bleu[row, epsilon] / bleu["grid", epsilon] for epsilon in both]
        number = (
            " and ".join(f"{share:.0%}" for share in shares) + f" of the grid search's BLEU on {data} at epsilon = "
        )
        number += " and ".join(f"{epsilon:g}" for epsilon in both)
        counts = sorted({int(runs[key, epsilon]) for key in (row, "grid") for epsilon in both})
        number += f", {' to '.join(map(str, counts))} {'run' if counts == [1] else 'runs'} each"
        found.append(Verdict(claim, "reproduced" if min(shares) > 0.95 else "not at this scale", number))
    return found


def draw_dynamics(curves: pd.DataFrame) -> Figure:
    """Rate, threshold, loss and perplexity over the steps, mean and range over seeds.

    Args:
        curves: of ``language_generation.dynamics``.
    """
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 3.4))
    for axis, (column, label) in zip(axes, PANELS.items(), strict=True):
        for row, group in curves.dropna(subset=column).groupby("row", sort=False):
            look: dict[str, Any] = plots.STYLES[STYLES[str(row)]] | {"marker": None, "label": ROWS[str(row)].title}
            sns.lineplot(group, x="step", y=column, ax=axis, errorbar=("pi", 100), legend=False, **look)
        axis.set(xlabel="step", ylabel=label)
    released = curves.dropna(subset="private_loss")
    dots: dict[str, Any] = {"s": 8, "alpha": 0.5, "color": plots.STYLES["paper"]["color"]}
    axes[2].scatter(released.step, released.private_loss, label="released, paper preset", **dots)
    for axis in axes[:2]:
        axis.set_yscale("log")
    plots.shared_legend(figure, axes[2:3], ncols=5, fontsize="small")
    return figure


def dynamics_findings(curves: pd.DataFrame) -> list[str]:
    """What :func:`draw_dynamics` shows, a line per method."""
    ends = curves.sort_values("step").groupby(["row", "seed"], sort=False).last(numeric_only=True)
    perplexity = ends.groupby("row").test_perplexity.mean()
    lines = []
    for row in curves.row.unique():
        rate = curves[curves.row == row].groupby("step").eta.median()
        lines.append(
            f"{ROWS[row].title}: rate {rate.iloc[0]:.2g} at first, at most {rate.max():.2g} (step {rate.idxmax()}), "
            f"{rate.iloc[-1]:.2g} at the end{at_edge(str(row), rate.iloc[0])}; test perplexity {perplexity[row]:.2f}"
        )
    return lines
