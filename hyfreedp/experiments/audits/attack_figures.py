"""Figure and findings of the membership attack, see ``attack``."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyfreedp.experiments.audits.attack import advantage_bound
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import Verdict, by_attack, by_interval

RAW = plots.STYLES["reference"]


def draw_attack(games: pd.DataFrame, result: pd.DataFrame, *, exact: float, delta: float) -> Figure:
    """Learning rates with and without the outlier, and each observer's advantage against the bound of epsilon.

    Args:
        games, result: of ``attack.games`` and ``attack.advantages``.
        exact: b/a of the raw losses of seed 0's batch.
        delta: of the bound.
    """
    figure, axes = plt.subplots(1, 3, figsize=(11, 4.2), width_ratios=[1.25, 1, 1])
    _draw_rates(axes[0], games, exact)
    for axis, (observer, rows) in zip(axes[1:], result.groupby("observer", sort=False), strict=True):
        _draw_advantages(axis, rows, delta)
        axis.set_title(f"observer {observer}")
    axes[1].set_ylabel("membership advantage")
    figure.suptitle("A raw rate gives the outlier away, a private one does not")
    plots.legend_below(axes[1], ncols=1)
    return figure


def _draw_rates(axis: Axes, games: pd.DataFrame, exact: float) -> None:
    """How the rates of seed 0 are spread, with the outlier and without."""
    first = games[(games.seed == 0) & (games.observer == "sees a random batch") & games.weakening.isin([0.0, 1.0])]
    shown = first.assign(
        eta=first.eta.clip(*np.sort(exact * np.array([-0.25, 2.25]))),
        probe=first.probe.replace({"losses": "three losses"}),
        outlier=first.planted.map({False: "outlier not in the batch", True: "outlier in the batch"}),
    )
    colours = ["0.75", "0.35"]  # no colour of a probe
    sns.violinplot(shown, x="eta", y="probe", hue="outlier", split=True, palette=colours, density_norm="width", ax=axis)
    axis.set(xlabel="learning rate $b/a$ (beyond the axis: at its end)", ylabel="", title="what the observer sees")
    plots.legend_below(axis, ncols=2)


def _draw_advantages(axis: Axes, rows: pd.DataFrame, delta: float) -> None:
    """Advantages of one observer, with intervals."""
    budgets = np.geomspace(0.05, 12, 200)
    bound = advantage_bound(budgets, delta)
    axis.fill_between(budgets, bound, 1.1, color="0.9", linewidth=0)
    axis.plot(budgets, bound, color="0.3", label="bound of epsilon")
    private, look = rows[rows.probe == "losses"], plots.marks(plots.STYLES["paper"])
    ends = [private.advantage - private.low, private.high - private.advantage]
    axis.errorbar(private.epsilon, private.advantage, yerr=ends, capsize=3, label="three losses", **look)
    raw = rows[rows.probe == "raw"].iloc[0]
    axis.axhline(raw.advantage, label="raw rate: no epsilon", **plots.line(RAW))
    axis.axhspan(raw.low, raw.high, color=RAW["color"], alpha=0.2, linewidth=0)
    axis.set(xscale="log", xlabel=r"$\varepsilon$ of the release", ylim=(-0.2, 1.05))
    plots.log_ticks(axis.xaxis, [0.1, 1, 10])


def attack_findings(result: pd.DataFrame) -> list[str]:
    """The raw rate and the calibrated noise for each observer, and how many intervals are above the bound."""
    findings = []
    for row in result[(result.probe == "raw") | (result.weakening == 1.0)].itertuples():
        private = f"{row.probe}, epsilon {row.epsilon:.2f} (bound {row.bound:.2f})"
        findings.append(
            f"Observer {row.observer}, {'raw rate' if row.probe == 'raw' else private}: advantage {row.advantage:.2f}, "
            f"95 % interval [{row.low:.2f}, {row.high:.2f}]."
        )
    settings, above = _private(result)
    findings.append(
        f"Of {settings} private settings, weakened ones included, {above} {'has' if above == 1 else 'have'} "
        "an interval wholly above the bound."
    )
    return findings


def verdicts(result: pd.DataFrame) -> list[Verdict]:
    """On raw and private rates, from ``attack.advantages``."""
    raw = result[result.probe == "raw"].sort_values("advantage").iloc[-1]
    settings, above = _private(result)
    return [
        Verdict(
            "§ 4.1: a rate that is fitted to raw losses violates DP",
            by_interval(raw.low, raw.high, least=0.5),
            f"an outlier is found with advantage {raw.advantage:.2f}",
        ),
        Verdict(
            "§ 4.1: a rate that is fitted to private losses does not",
            by_attack(above),
            f"an advantage above the bound in {above} of {settings} private settings",
        ),
    ]


def _private(result: pd.DataFrame) -> tuple[int, int]:
    """How many settings have private rates, and how many of these an interval wholly above the bound."""
    rows = result[result.probe != "raw"]
    return len(rows), int((rows.low > rows.bound).sum())
