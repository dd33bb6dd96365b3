"""Figures and findings of notebook 06, from the tables of ``language_generation``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from torch import nn

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.tables.language_generation import METRICS
from hyfreedp.experiments.tables.plan import ROWS, Learner
from hyfreedp.experiments.tasks.language import Documents, LanguageTask
from hyfreedp.experiments.tasks.scores import Scores

STYLES = {"grid": "best", "reference": "reference", "hyfreedp_paper": "paper", "hyfreedp_robust": "robust"}
PANELS = {
    "eta": r"learning rate $\eta$",
    "loss_threshold": r"clipping threshold $R_l$ (nats)",
    "test_loss": "loss (nats per token)",
    "test_perplexity": "test perplexity",
}


def start_text(task: LanguageTask, learner: Learner, model: nn.Module, scores: Scores) -> str:
    """Data, model and what it says before private training, with ``scores`` on the test part."""
    texts, architecture, written = task.load(), task.architecture(learner.model), task.outputs(model, learner.model)
    assert not isinstance(texts, Documents) and written is not None
    meaning, references = texts.test[0]
    return (
        f"**{task.title}**, {texts.source}. N = {task.train_size:,}, B = {task.batch_size}, "
        f"T = {learner.steps or task.steps}, delta = {task.delta:.1e}; {len(texts.test)} meanings to test. Model: "
        f"{architecture.title}, {sum(p.numel() for p in model.parameters()):,} parameters. Before private training it "
        f"predicts {100 * scores.accuracy:.0f} % of the test tokens right ({scores.loss:.2f} nats per token).\n\n"
        f"> {meaning}\n\n*A reference:* {references[0]}\n\n*The public start:* {written[0]}"
    )


def draw_metrics(summary: pd.DataFrame, methods: Sequence[str], epsilons: Sequence[float]) -> Figure:
    """Every metric and the perplexity, mean and deviation over seeds, a panel each.

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
            bars: dict[str, Any] = {"xerr": chosen["std"].fillna(0), "markersize": 5}
            label = rf"$\varepsilon$ = {epsilon:g}"
            axis.errorbar(chosen["mean"], places, label=label, **bars, **plots.marks(style))
        axis.set_title(metric)
        axis.set_xlabel("per token, lower is better" if metric == "perplexity" else "score")
        axis.margins(x=0.15)
    axes[-1].set_xscale("log")
    axes[0].set_yticks(range(len(methods)), [ROWS[name].title for name in methods])
    axes[0].invert_yaxis()
    plots.shared_legend(figure, axes[:1], ncols=len(epsilons))
    return figure


def metric_findings(
    summary: pd.DataFrame, methods: Sequence[str], epsilons: Sequence[float], start_loss: float
) -> list[str]:
    """The best, the worst and HyFreeDP at every epsilon; arguments as for :func:`draw_metrics`.

    ``start_loss`` is that before private training, in nats per token.
    """
    means = summary.set_index(["metric", "epsilon", "row"])["mean"]
    lines = [f"before private training the perplexity is {math.exp(start_loss):.0f}"]
    for epsilon in epsilons:
        perplexity, bleu = (
            {row: means.get((metric, epsilon, row), math.nan) for row in methods} for metric in ("perplexity", "BLEU")
        )
        by_perplexity = sorted(methods, key=perplexity.__getitem__)
        lowest, highest, best = by_perplexity[0], by_perplexity[-1], max(methods, key=bleu.__getitem__)
        lines.append(
            f"epsilon = {epsilon:g}: lowest perplexity {ROWS[lowest].title} ({perplexity[lowest]:.2f}), highest "
            f"{ROWS[highest].title} ({perplexity[highest]:.3g}); best BLEU {ROWS[best].title} ({bleu[best]:.3f})"
        )
        lines += [
            f"epsilon = {epsilon:g}: {ROWS[row].title} has BLEU {bleu[row]:.3f} and perplexity {perplexity[row]:.2f}, "
            f"the uncounted grid search {bleu['grid']:.3f} and {perplexity['grid']:.2f}"
            for row in ("hyfreedp_robust", "hyfreedp_paper")
            if row in methods and "grid" in methods
        ]
    if summary[summary.metric == "METEOR"]["mean"].isna().any():
        lines.append("METEOR needs Java, which this machine lacks")
    return lines


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
            f"{rate.iloc[-1]:.2g} at the end; test perplexity {perplexity[row]:.2f} at the end"
        )
    return lines
