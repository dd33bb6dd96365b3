"""Figures, tables and findings of notebooks 03 and 09, all from the table of ``noise_split.calibrations``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyfreedp import NoiseSplit
from hyfreedp.experiments.accounting_of_the_paper import delta_curve, gdp_delta, gdp_epsilon, mu_gdp
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import Verdict, by_proof
from hyfreedp.experiments.studies.noise_split import ACCOUNTANTS, COMPOSITIONS, split_of

COLUMNS = [
    ("rdp", "independent", "RDP, as the paper composes"),
    ("gdp", "independent", r"$\mu$-GDP, as the paper composes"),
    ("pld", "same_batch", "PLD, same batch"),
]
NOISES: dict[str, tuple[str, dict[str, Any]]] = {
    "sigma": (r"vanilla DP-SGD, $\sigma$", plots.STYLES["best"]),
    "sigma_gradient": (r"HyFreeDP, $\sigma_g = \gamma\sigma$", plots.STYLES["robust"]),
    "gaussian": (r"$\sigma_l$, Gaussian", plots.STYLES["paper"]),
    "laplace": (r"$\sigma_l$, Laplace", plots.STYLES["reference"]),
    "even": (r"even split, $\sigma_g = \sigma_l$", {"color": "0.5", "linestyle": "--", "marker": "v"}),
}
LEVEL: dict[str, Any] = {"color": "0.3", "linewidth": 1}


# -- the two noises ----------------------------------------------------------------------------------------------------


def draw_noises(
    rows: pd.DataFrame, column: str, label: str, ticks: Sequence[float], finding: str, *, ratio: bool = False
) -> Figure:
    """Gradient noise above, loss noise below, one column per accountant.

    Args:
        rows: section "interval" or "epsilon".
        column: what to draw against.
        label: of its axis.
        ticks: of its axis.
        finding: its title.
        ratio: whether to draw how many times the gradient noise the loss noise is, in a third row.
    """
    figure, axes = plt.subplots(2 + ratio, 3, figsize=(10, 6 + 2 * ratio), sharex=True, sharey="row")
    for (accountant, composition, title), (above, below, *last) in zip(COLUMNS, axes.T, strict=True):
        here = rows[(rows.accountant == accountant) & (rows.composition == composition)].sort_values(column)
        even, split = here[here.even], here[~here.even]
        gaussian, laplace = (split[split.loss_mechanism == name] for name in ("gaussian", "laplace"))
        for axis, name, part, value in (
            (above, "sigma", gaussian, "sigma"),
            (above, "sigma_gradient", gaussian, "sigma_gradient"),
            (above, "even", even, "sigma_gradient"),
            (below, "gaussian", gaussian, "loss_std"),
            (below, "laplace", laplace, "loss_std"),
            (below, "even", even, "loss_std"),
        ):
            axis.plot(part[column], part[value], label=NOISES[name][0], markersize=5, **NOISES[name][1])
        for axis in last:
            values = gaussian.loss_std / gaussian.sigma_gradient
            axis.plot(gaussian[column], values, label=r"$\sigma_l/\sigma_g$, Gaussian", markersize=5, **plots.SERIES[0])
        above.set_title(title)
        below.set(xscale="log", yscale="log")
        [below, *last][-1].set_xlabel(label)
        plots.log_ticks(below.xaxis, ticks)
    axes[0, 0].set_ylabel("gradient noise multiplier")
    axes[1, 0].set_ylabel("loss noise\n(standard deviation / $R_l$)")
    plots.log_ticks(axes[1, 0].yaxis)
    if ratio:
        axes[2, 0].set(ylabel="ratio, loss to gradient", ylim=(0, None))
    figure.suptitle(finding, fontsize="large")
    plots.shared_legend(figure, axes[:, 0], ncols=3, fontsize="small")
    return figure


def interval_findings(rows: pd.DataFrame, grid: dict[str, Any], epsilon: float) -> list[str]:
    """Of section "interval" at ``epsilon``; ``grid`` is that of ``noise_split.grid_of``."""
    keys = ["accountant", "interval"]
    gaussian = rows[(rows.loss_mechanism == "gaussian") & ~rows.even].set_index(keys)
    even = rows[rows.even].set_index(keys)
    seldom, often = max(grid["intervals"]), min(grid["intervals"])
    growth = 100 * (gaussian.sigma_gradient / gaussian.sigma - 1)
    even_growth = 100 * (even.sigma_gradient / even.sigma - 1)
    return [
        f"{accountant.upper()} ({composition.replace('_', ' ')}), epsilon {epsilon:g}: the gradient noise grows by "
        f"{growth[accountant, often]:.1f} % at every K, with the even split by {even_growth[accountant, often]:.0f} % "
        f"at K = {often}; sigma_l is {gaussian.sigma_loss[accountant, often]:.2f} at K = {often} and "
        f"{gaussian.sigma_loss[accountant, seldom]:.2f} at K = {seldom}"
        for accountant, composition, _ in COLUMNS
    ]


def epsilon_findings(rows: pd.DataFrame, grid: dict[str, Any], interval: int) -> list[str]:
    """Of section "epsilon" at K = ``interval``."""
    split = rows[~rows.even & (rows.loss_mechanism == "gaussian")].set_index(["accountant", "target_epsilon"])
    ratios = split.sigma_loss / split.sigma_gradient
    low, high = min(grid["epsilons_pld"]), max(grid["epsilons_pld"])
    return [
        f"{accountant.upper()} ({composition.replace('_', ' ')}), K = {interval}: sigma_l / sigma_g = "
        f"{ratios[accountant, low]:.2f} at epsilon {low:g} and {ratios[accountant, high]:.2f} at {high:g}"
        for accountant, composition, _ in COLUMNS
    ]


# -- what pairs really cost --------------------------------------------------------------------------------------------


def papers_pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of section "true cost" that the paper's way of counting (RDP, independent) allows, by their target."""
    chosen = (rows.accountant == "rdp") & (rows.composition == "independent")
    return rows[chosen].set_index("target_epsilon", drop=False)


def draw_true_costs(rows: pd.DataFrame, targets: Sequence[float], split: NoiseSplit, simulated: pd.DataFrame) -> Figure:
    """What each pair costs over what it claims, and delta(epsilon) of the paper's pair with a simulation.

    Args:
        rows: section "true cost".
        targets: epsilons in the left panel.
        split: of one of :func:`papers_pairs`.
        simulated: of ``noise_split.simulated_deltas`` for it.
    """
    figure, (cost_axis, curve_axis) = plt.subplots(1, 2, figsize=(10, 4.4), width_ratios=(1.15, 1))
    ways = [(accountant, composition) for composition in COMPOSITIONS for accountant in ACCOUNTANTS]
    for place, (style, target) in enumerate(zip(plots.SERIES, targets, strict=False)):
        at = rows[rows.target_epsilon == target].set_index(["accountant", "composition"]).true_epsilon / target
        label = rf"target $\varepsilon$ = {target:g}"
        heights = np.arange(len(ways)) + 0.2 * (place - 1)  # side by side, so that none hides another
        cost_axis.plot([at[way] for way in ways], heights, label=label, **plots.marks(style))
    cost_axis.axvline(1, **LEVEL)
    shown = cost_axis.get_xlim()
    cost_axis.axvspan(1, shown[1], color=plots.STYLES["paper"]["color"], alpha=0.08, zorder=0)
    cost_axis.set_xlim(shown)
    names = [f"{composition.replace('_', ' ')}, {accountant.upper()}" for accountant, composition in ways]
    cost_axis.set_yticks(range(len(ways)), names)
    cost_axis.invert_yaxis()
    cost_axis.set_xlabel(r"true $\varepsilon$ / target $\varepsilon$")
    cost_axis.set_title("Right of the line: costs more than it claims")
    plots.legend_below(cost_axis, ncols=2)
    epsilons = np.linspace(0, 2.2 * split.target_epsilon, 45)
    for composition, label, name in (
        ("independent", "as counted: independent batches", "paper"),
        ("same_batch", "as run: one batch per step", "robust"),
    ):
        deltas = delta_curve(split, composition, epsilons)  # type: ignore[arg-type]
        curve_axis.plot(epsilons, deltas, label=label, markevery=8, markersize=5, **plots.STYLES[name])
    bars: dict[str, Any] = {"fmt": "D", "color": "black", "markersize": 4, "capsize": 2}
    bars |= {"yerr": 2 * simulated.error, "label": "simulated runs (2 standard errors)"}
    curve_axis.errorbar(simulated.epsilon, simulated.delta, **bars)
    _finish_deltas(curve_axis, split.target_delta)
    cost = papers_pairs(rows).true_epsilon[split.target_epsilon]
    curve_axis.set_title(f"The pair that should cost {split.target_epsilon:g} really costs {cost:.2f}")
    return figure


def _finish_deltas(axis: Axes, target: float) -> None:
    """Scales and labels of a panel of delta(epsilon), and the target's line."""
    axis.axhline(target, **LEVEL)
    axis.text(0, target, r" target $\delta$", va="bottom", fontsize="small")
    axis.set(yscale="log", ylim=(target / 20, 1), xlabel=r"$\varepsilon$", ylabel=r"$\delta(\varepsilon)$")
    plots.legend_below(axis)


def true_cost_findings(
    table: pd.DataFrame, grid: dict[str, Any], split: NoiseSplit, simulated: pd.DataFrame
) -> list[str]:
    """Of sections "true cost" and "true cost by interval" of the whole ``table``; the rest as in the figure."""
    rows = table[table.section == "true cost"]
    at = rows.set_index(["accountant", "composition", "target_epsilon"]).sort_index()
    cost, bounds = at.true_epsilon, at.loc[["pld", "rdp"]].sigma_loss
    waste = bounds.xs("epsilon_sum", level="composition") / bounds.xs("same_batch", level="composition")
    by_interval = table[table.section == "true cost by interval"].set_index("interval").true_epsilon
    often, seldom = min(grid["intervals"]), max(grid["intervals"])
    last = simulated.iloc[-1]
    names: Any = ("independent", "same_batch")
    (counted,), (run,) = (delta_curve(split, name, [last.epsilon]) for name in names)
    far = [abs(value - last.delta) / last.error for value in (run, counted)]
    return [
        *(
            f"Target {value:g}: the paper's pair (RDP, independent) really costs "
            f"{cost['rdp', 'independent', value]:.2f}, the same way of counting by PLD "
            f"{cost['pld', 'independent', value]:.2f}; same batch by PLD {cost['pld', 'same_batch', value]:.2f}; the "
            f"sum of epsilons by RDP {cost['rdp', 'epsilon_sum', value]:.2f}"
            for value in grid["targets"]
        ),
        f"The sum of epsilons takes {waste.min():.1f} to {waste.max():.1f} times the loss noise that same-batch "
        "counting needs (RDP and PLD)",
        f"The less often it probes, the more the paper's counting understates: target {split.target_epsilon:g} really "
        f"costs {by_interval[often]:.2f} at K = {often} and {by_interval[seldom]:.2f} at K = {seldom}",
        f"Simulated, target {split.target_epsilon:g}: delta({last.epsilon:g}) = {last.delta:.1e} (two standard errors: "
        f"{2 * last.error:.1e}). PLD says {run:.1e} for one batch per step, {far[0]:.1f} standard errors away, and "
        f"{counted:.0e} for independent batches, {far[1]:.1f} away",
    ]


def verdicts(rows: pd.DataFrame, targets: Sequence[float]) -> list[Verdict]:
    """On Algorithm 2, which counts the losses as if they had batches of their own, and on the appendix's way.

    Args:
        rows: of section "true cost".
        targets: budgets.
    """
    cost = rows.set_index(["accountant", "composition", "target_epsilon"]).true_epsilon
    found = []
    for composition, claim in (
        ("independent", "Algorithm 2: its pair of noises keeps Algorithm 1 within epsilon"),
        ("epsilon_sum", "Appendix: the pair of noises whose epsilons add up keeps Algorithm 1 within epsilon"),
    ):
        real = [float(cost["rdp", composition, target]) for target in targets]
        told = ", ".join(f"{one:.2f} for {target:g}" for one, target in zip(real, targets, strict=True))
        holds = all(one <= target for one, target in zip(real, targets, strict=True))
        number = f"on the one batch that a step has, its pairs really cost {told}"
        found.append(Verdict(claim, by_proof(holds), number))
    return found


# -- the mu-GDP equation -----------------------------------------------------------------------------------------------


def mu_gdp_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Eq. (muGDP) as printed for its own pairs, one row per budget of section "true cost".

    Returns:
        ``target``; ``mu_vanilla`` and ``mu_ours`` of the equation, and its ``epsilon``; what vanilla DP-SGD and the
        pair under two compositions really cost.
    """
    at = rows[rows.accountant == "gdp"].set_index(["composition", "target_epsilon"])
    found = []
    for target, pair in at.loc["independent"].sort_index().iterrows():
        schedule: dict[str, Any] = {"sample_rate": pair.sample_rate, "steps": pair.steps}
        mu = mu_gdp(sigma=pair.sigma_gradient, **schedule, probe_steps=pair.probe_steps, sigma_loss=pair.sigma_loss)
        found.append(
            {
                "target": target,
                "mu_vanilla": mu_gdp(sigma=pair.sigma, **schedule),
                "mu_ours": mu,
                "epsilon": gdp_epsilon(mu, pair.target_delta),
                "true_vanilla": pair.vanilla_epsilon,
                "true_same_batch": at.true_epsilon["same_batch", target],
                "true_independent": pair.true_epsilon,
            }
        )
    return pd.DataFrame(found)


def draw_mu_gdp(formula: pd.DataFrame, rows: pd.DataFrame, epsilon: float) -> Figure:
    """What the pairs of mu-GDP cost, and its delta(epsilon) of vanilla DP-SGD at ``epsilon`` beside the exact one.

    Args:
        formula: of :func:`mu_gdp_table`.
        rows: section "true cost".
        epsilon: one of its targets.
    """
    figure, (axis, curve_axis) = plt.subplots(1, 2, figsize=(10, 4))
    around: dict[str, Any] = {"markersize": 14, "markerfacecolor": "none", "markeredgewidth": 2, "linewidth": 4}
    for name, label, style, size in [
        ("true_vanilla", r"vanilla DP-SGD at the $\sigma$ of GDP", "best", around),
        ("true_same_batch", "pair of GDP, same batch", "robust", {}),
        ("true_independent", "pair of GDP, independent (the equation)", "paper", {}),
    ]:
        axis.plot(formula.target, formula[name] / formula.target, label=label, **plots.STYLES[style] | size)
    axis.axhline(1, **LEVEL)
    axis.set(xscale="log", xlabel=r"target $\varepsilon$", ylabel=r"true $\varepsilon$ / target $\varepsilon$")
    plots.log_ticks(axis.xaxis, list(formula.target))
    axis.set_title(f"GDP's pairs cost up to {(formula.true_independent / formula.target).max():.1f} times the target")
    plots.legend_below(axis)

    plain = split_of(rows[(rows.accountant == "gdp") & (rows.target_epsilon == epsilon)].iloc[0])
    mu = mu_gdp(sample_rate=plain.sample_rate, steps=plain.steps, sigma=plain.sigma)
    epsilons = np.linspace(0, 2.2 * epsilon, 45)
    alone = {"probe": "none", "sigma_gradient": plain.sigma, "vote_steps": []}  # DP-SGD
    exact = delta_curve(NoiseSplit.from_dict(plain.to_dict() | alone), "same_batch", list(epsilons))
    for deltas, label, style in (
        (gdp_delta(mu, epsilons), rf"$\mu$-GDP, $\mu$ = {mu:.2f}", "reference"),
        (exact, "PLD (exact to its grid)", "best"),
    ):
        curve_axis.plot(epsilons, deltas, label=label, markevery=8, markersize=5, **plots.STYLES[style])
    _finish_deltas(curve_axis, plain.target_delta)
    curve_axis.set_title(rf"$\mu$-GDP misses the tail (DP-SGD, $\sigma$ = {plain.sigma:.3f})")
    return figure


# -- the share of the probes (notebook 09) -----------------------------------------------------------------------------


def draw_shares(splits: pd.DataFrame, interval: int, records: int, epsilon: float) -> Figure:
    """HyFreeDP's share of epsilon against the budget for several data sets, and against K for several gammas.

    Args:
        splits: calibrations of ``noise_split.share_rows``.
        interval: of its section "data".
        records, epsilon: N and budget of its section "interval".
    """
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for axis, section, group, column in zip(
        axes, ("data", "interval"), ("data", "gamma"), ("target_epsilon", "interval"), strict=True
    ):
        part = splits[splits.section == section]
        for (name, line), style in zip(part.groupby(group, sort=False), plots.SERIES, strict=False):
            label = name if group == "data" else rf"$\gamma$ = {name:g}"
            axis.plot(line[column], 100 * line.probe_share, label=label, markersize=5, **style)
        axis.set_xscale("log")
        plots.log_ticks(axis.xaxis, list(part[column].unique()))
        axis.axhline(1, **LEVEL)
        plots.legend_below(axis, ncols=3)
    axes[0].set(xlabel=r"target $\varepsilon$", ylabel=r"HyFreeDP's share of $\varepsilon$ (%)", ylim=(0, None))
    axes[0].set_title(rf"The share grows with the budget ($\gamma$ = 1.01, $K$ = {interval})")
    axes[1].set(
        xlabel="probing interval $K$ (steps)",
        title=rf"$\gamma$ matters, $K$ does not (N = {records:,}, $\varepsilon$ = {epsilon:g})",
    )
    return figure


def share_findings(splits: pd.DataFrame, interval: int) -> list[str]:
    """Ranges of the shares in percent; arguments as for :func:`draw_shares`."""
    over_data = 100 * splits[splits.section == "data"].probe_share
    of_settings = splits[splits.section == "interval"]
    over_settings = (100 * of_settings.probe_share).groupby(of_settings.gamma)
    intervals = ", ".join(f"{value:g}" for value in of_settings.interval.unique())
    return [
        f"gamma = 1.01, K = {interval}: {over_data.min():.2f} to {over_data.max():.2f} % over the data sets and "
        "budgets",
        *(
            f"gamma = {gamma:g}: {low:.2f} to {high:.2f} % over K = {intervals}"
            for gamma, low, high in over_settings.agg(["min", "max"]).itertuples()
        ),
    ]
