"""Figure, table and findings of notebook 09 on what tuning costs, from the rows of ``tuning_budget``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.cache import cached
from hyfreedp.experiments.store.verdicts import Verdict
from hyfreedp.experiments.tables import tuning_budget

RATES, THRESHOLDS = 5, 6  # a vanilla grid: the paper's five rates, six thresholds


@dataclass(frozen=True)
class Method:
    """A row of Tab. "hyperparam comparison".

    Attributes:
        method, setting: of the row of ``tuning_budget.budget_rows``.
        label: for figures.
        searches_rate, searches_threshold: "yes" or "no", as printed.
        paper_percent: as printed.
    """

    method: str
    setting: float
    label: str
    searches_rate: str
    searches_threshold: str
    paper_percent: str

    @property
    def title(self) -> str:
        """The label as plain text."""
        return self.label.replace("$", "").replace("\\", "")


def methods(runs: float) -> list[Method]:
    """What the notebook compares; random searches have ``runs`` runs on average."""
    searches = [
        Method(f"random search, {name}", runs, f"DP-hyper, {name}, {runs:g} runs on average", "yes", "no", "20")
        for name in tuning_budget.SHAPES
    ]
    pairs = RATES * THRESHOLDS
    return [
        Method("hyfreedp", 1.01, r"HyFreeDP, $\gamma$ = 1.01", "no", "no", "<1"),
        Method("adaptive clipping", 0.05, r"adaptive clipping, $\sigma_b = B/20$", "yes", "no", "20"),
        Method("split", 0.85, "DP-hyper as simulated: 85 % kept", "yes", "no", "15"),
        *searches,
        Method("grid search", RATES, f"automatic clipping, {RATES} rates, all counted", "yes", "no", "0"),
        Method("grid search", pairs, f"vanilla, {RATES} x {THRESHOLDS} pairs, all counted", "yes", "yes", "0"),
    ]


def costs(
    folder: Path, budgets: Sequence[dict[str, float]], *, batch_size: int, interval: int, runs: list[float]
) -> pd.DataFrame:
    """``tuning_budget.budget_rows`` of all :func:`methods` at several budgets, kept in ``folder``.

    Returns:
        Its rows, with ``method``, ``setting`` and ``target_epsilon`` as index.
    """
    choices: dict[str, Any] = {
        "batch_size": batch_size,
        "interval": interval,
        "gammas": [1.01],
        "kept": [0.85],
        "trials": [RATES, RATES * THRESHOLDS],
        "runs": runs,
        "quantile_parts": [0.05],
    }
    table = pd.concat(cached(folder, tuning_budget.budget_rows, budget=budget, **choices) for budget in budgets)
    return table.set_index(["method", "setting", "target_epsilon"]).sort_index()


def comparison(found: pd.DataFrame, chosen: Sequence[Method], targets: Sequence[float]) -> pd.DataFrame:
    """Tab. "hyperparam comparison" with our numbers, a row per method and budget; ``found`` is of :func:`costs`."""
    rows = []
    for one in chosen:
        for target in targets:
            row = found.loc[(one.method, one.setting, target)]
            rows.append(
                {
                    "method": one.title,
                    "searches_eta": one.searches_rate,
                    "searches_R_g": one.searches_threshold,
                    "epsilon": target,
                    "paper_percent": one.paper_percent,
                    "share_percent": row.share_percent,
                    "noise_percent": row.noise_percent,
                }
            )
    return pd.DataFrame(rows)


def draw_costs(found: pd.DataFrame, chosen: Sequence[Method], targets: Sequence[float]) -> Figure:
    """Share of the budget and additional noise of every method; arguments as for :func:`comparison`."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    labels = {
        "share_percent": r"share of $\varepsilon$ not left to training (%)",
        "noise_percent": "more gradient noise than vanilla (%)",
    }
    for axis, (column, label) in zip(axes, labels.items(), strict=True):
        for index, (target, style) in enumerate(zip(targets, plots.SERIES, strict=False)):
            values = [found[column][one.method, one.setting, target] for one in chosen]
            places = np.arange(len(chosen)) + 0.2 * (index - (len(targets) - 1) / 2)
            name = rf"$\varepsilon$ = {target:g}"
            axis.plot(values, places, label=name, markersize=6, **plots.marks(style))
        axis.set(xscale="log", xlabel=label)
    left = axes[0].get_xlim()[0]  # where a logarithmic axis has its 0
    look: dict[str, Any] = {"markersize": 14, "markeredgewidth": 2, "linestyle": "none", "color": "0.3"}
    numbers = {one.paper_percent: float(one.paper_percent) for one in chosen if one.paper_percent not in ("<1", "0")}
    for text, marker, known in (("figure", "|", numbers), ("<1", "$<$", {"<1": 1.0}), ("0", "$0$", {"0": left})):
        printed = {row: known[one.paper_percent] for row, one in enumerate(chosen) if one.paper_percent in known}
        axes[0].plot(
            list(printed.values()), list(printed), marker=marker, clip_on=False, label=f"the paper's {text}", **look
        )
    axes[0].set_xlim(left=left)
    axes[0].axvline(1, color="0.3", linewidth=1, linestyle=":")
    axes[0].set_yticks(range(len(chosen)), [one.label for one in chosen])
    axes[0].invert_yaxis()
    plots.shared_legend(figure, axes[:1], ncols=5, fontsize="small")
    return figure


def cost_findings(
    found: pd.DataFrame, chosen: Sequence[Method], budget: dict[str, float], batch_size: int
) -> list[str]:
    """All methods at one budget, and what noise adaptive clipping would need to cost more.

    Args:
        found, chosen: as for :func:`comparison`.
        budget: as of ``tuning_budget.budget_rows``.
        batch_size: B.
    """
    target = budget["target_epsilon"]
    at = found.xs(target, level="target_epsilon")
    a_fifth, a_percent = (tuning_budget.quantile_noise_for_share(part, budget=budget) for part in (0.2, 0.01))
    return [
        *(
            f"{one.title}: {at.share_percent[one.method, one.setting]:.3g} % of epsilon = {target:g}, "
            f"{at.noise_percent[one.method, one.setting]:.3g} % more gradient noise"
            for one in chosen
        ),
        f"Adaptive clipping would take 20 % only with sigma_b = {a_fifth:.2f}, that is B / {batch_size / a_fifth:.0f}, "
        f"and 1 % with {a_percent:.2f}",
    ]


def verdicts(found: pd.DataFrame, chosen: Sequence[Method], target: float) -> list[Verdict]:
    """On Tab. "hyperparam comparison"; ``found`` and ``chosen`` as for :func:`comparison`, at one budget."""
    share = found.share_percent.xs(target, level="target_epsilon")
    ours = share["hyfreedp", 1.01]
    adaptive = share["adaptive clipping", 0.05]
    searches = [share[one.method, one.setting] for one in chosen if one.method.startswith("random search")]
    return [
        Verdict(
            "HyFreeDP takes less than 1 % of the budget",
            "reproduced" if ours < 1 else "contradicted",
            f"{ours:.1f} % of epsilon = {target:g} at gamma = 1.01",
        ),
        Verdict(
            "Adaptive clipping takes about 20 %",
            "reproduced" if 10 < adaptive < 40 else "contradicted",
            f"{adaptive:.2f} % by its authors' own analysis",
        ),
        Verdict(
            "DP-hyper takes about 20 %",
            "reproduced" if 10 < min(searches) and max(searches) < 30 else "contradicted",
            f"{min(searches):.0f} to {max(searches):.0f} % for a random search of five runs",
        ),
    ]


def small_batches(sigma: float, sizes: Sequence[int]) -> pd.DataFrame:
    """What adaptive clipping with sigma_b = B/20 adds to the gradient noise ``sigma`` at several B."""
    more = [100 * (tuning_budget.update_noise(sigma, size / 20) / sigma - 1) for size in sizes]
    return pd.DataFrame({"B": sizes, "more_noise_percent": more})
