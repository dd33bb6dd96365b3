"""Figures, tables and findings of notebook 03 on what calibrated pairs really cost, see ``noise_split``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyfreedp import NoiseSplit
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import Verdict
from hyfreedp.experiments.studies import noise_split
from hyfreedp.experiments.studies.noise_split_figures import LEVEL
from hyfreedp.experiments.studies.noise_split_rows import ACCOUNTANTS, COMPOSITIONS


def papers_pair(rows: pd.DataFrame, epsilon: float) -> NoiseSplit:
    """The pair of section "true cost" that the paper's way of counting (RDP, independent) allows at ``epsilon``."""
    chosen = (rows.probe == "losses") & (rows.accountant == "rdp") & (rows.composition == "independent")
    return noise_split.split_of(rows[chosen & (rows.target_epsilon == epsilon)].iloc[0])


def draw_true_costs(rows: pd.DataFrame, targets: Sequence[float], split: NoiseSplit, simulated: pd.DataFrame) -> Figure:
    """What each pair costs over what it claims, and delta(epsilon) of the paper's pair with a simulation.

    Args:
        rows: section "true cost".
        targets: epsilons in the left panel.
        split: of :func:`papers_pair`.
        simulated: of ``noise_split.simulated_deltas`` for it.
    """
    figure, (cost_axis, curve_axis) = plt.subplots(1, 2, figsize=(10, 4.4), width_ratios=(1.15, 1))
    ways = [(accountant, composition) for composition in COMPOSITIONS for accountant in ACCOUNTANTS]
    pairs = rows[rows.probe == "losses"]
    for style, target in zip(plots.SERIES, targets, strict=False):
        at = pairs[pairs.target_epsilon == target].set_index(["accountant", "composition"]).true_epsilon / target
        label = rf"target $\varepsilon$ = {target:g}"
        cost_axis.plot([at[way] for way in ways], range(len(ways)), label=label, **plots.marks(style))
    cost_axis.axvline(1, **LEVEL)
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
        deltas = noise_split.delta_curve(split, composition, epsilons)  # type: ignore[arg-type]
        _draw_delta(curve_axis, epsilons, deltas, label, plots.STYLES[name])
    bars: dict[str, Any] = {"fmt": "D", "color": "black", "markersize": 4, "capsize": 2}
    bars |= {"yerr": 2 * simulated.error, "label": "simulated runs (2 standard errors)"}
    curve_axis.errorbar(simulated.epsilon, simulated.delta, **bars)
    _finish_deltas(curve_axis, split.target_delta)
    curve_axis.set_title(rf"The pair of RDP, independent, target $\varepsilon$ = {split.target_epsilon:g}")
    return figure


def _draw_delta(axis: Axes, epsilons: np.ndarray, deltas: Any, label: str, style: dict[str, Any]) -> None:
    axis.plot(epsilons, deltas, label=label, markevery=8, markersize=5, **style)


def _finish_deltas(axis: Axes, target: float) -> None:
    """Scales and labels of a panel of delta(epsilon), and the target's line."""
    axis.axhline(target, **LEVEL)
    axis.text(0, target, r" target $\delta$", va="bottom", fontsize="small")
    axis.set(yscale="log", ylim=(target / 20, 1), xlabel=r"$\varepsilon$", ylabel=r"$\delta(\varepsilon)$")
    plots.legend_below(axis)


def true_cost_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The pairs of section "true cost", and what each really costs."""
    columns = ["composition", "accountant", "target_epsilon", "sigma_gradient", "sigma_loss", "guaranteed"]
    pairs = rows[rows.probe == "losses"].assign(guaranteed=rows.guarantee)[[*columns, "true_epsilon"]]
    return pairs.sort_values(["composition", "accountant", "target_epsilon"], ascending=[False, True, True])


def true_cost_findings(
    table: pd.DataFrame, grid: dict[str, Any], split: NoiseSplit, simulated: pd.DataFrame
) -> list[str]:
    """Of sections "true cost" and "true cost by interval" of the whole ``table``; the rest as in the figure."""
    rows = table[(table.section == "true cost") & (table.probe == "losses")]
    at = rows.set_index(["accountant", "composition", "target_epsilon"]).sort_index()
    cost = at.true_epsilon
    findings = [
        f"Target {value:g}: the paper's pair (RDP, independent) really costs {cost['rdp', 'independent', value]:.2f}, "
        f"the same way of counting by PLD {cost['pld', 'independent', value]:.2f}; same batch by PLD "
        f"{cost['pld', 'same_batch', value]:.2f}; the sum of epsilons by RDP {cost['rdp', 'epsilon_sum', value]:.2f}"
        for value in grid["targets"]
    ]
    bounds = at.loc[["pld", "rdp"]].sigma_loss
    waste = bounds.xs("epsilon_sum", level="composition") / bounds.xs("same_batch", level="composition")
    by_interval = table[table.section == "true cost by interval"].set_index("interval").true_epsilon
    often, seldom = min(grid["intervals"]), max(grid["intervals"])
    last = simulated.iloc[-1]
    counted = noise_split.delta_curve(split, "independent", [last.epsilon])[0]
    run = noise_split.delta_curve(split, "same_batch", [last.epsilon])[0]
    return [
        *findings,
        f"The sum of epsilons takes {waste.min():.1f} to {waste.max():.1f} times the loss noise that same-batch "
        "counting needs (RDP and PLD)",
        f"The less often it probes, the more the paper's counting understates: target {split.target_epsilon:g} really "
        f"costs {by_interval[often]:.2f} at K = {often} and {by_interval[seldom]:.2f} at K = {seldom}",
        f"Simulated, target {split.target_epsilon:g}: delta({last.epsilon:g}) = {last.delta:.2e} ± {last.error:.1e}; "
        f"PLD says {run:.2e} for one batch per step and {counted:.2e} for independent batches",
    ]


def verdicts(rows: pd.DataFrame, by_interval: pd.DataFrame, targets: Sequence[float]) -> list[Verdict]:
    """On the price of a learned rate, and on Algorithm 2.

    Args:
        rows: of section "true cost".
        by_interval: of section "interval".
        targets: budgets, of which the largest decides.
    """
    gaussian = by_interval[(by_interval.loss_mechanism == "gaussian") & ~by_interval.even]
    growth = 100 * (gaussian.sigma_gradient / gaussian.sigma - 1).max()
    pairs = rows[(rows.probe == "losses") & (rows.accountant == "rdp") & (rows.composition == "independent")]
    cost = pairs.set_index("target_epsilon").true_epsilon
    costs = ", ".join(f"{cost[target]:.2f} for {target:g}" for target in targets)
    return [
        Verdict(
            "A learned rate takes about 1 % more noise on the gradient",
            "reproduced" if growth < 1.5 else "contradicted",
            f"{growth:.1f} % more at every interval K",
        ),
        Verdict(
            "Algorithm 2: its pair of noises keeps Algorithm 1 within epsilon",
            "contradicted" if (cost[list(targets)] > targets).any() else "reproduced",
            f"on the one batch that a step has, its pairs really cost {costs}",
        ),
    ]


# -- the mu-GDP equation -----------------------------------------------------------------------------------------------


def mu_gdp_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Eq. (muGDP) beside the library's accountant "gdp", one row per budget of section "true cost".

    Returns:
        ``target``; ``mu_vanilla`` and ``mu_ours`` of the equation; ``epsilon_formula`` and ``epsilon_library`` of the
        pair; what vanilla DP-SGD and the pair under two compositions really cost.
    """
    at = rows[rows.probe == "losses"].set_index(["accountant", "composition", "target_epsilon"]).loc["gdp"]
    vanilla = rows[(rows.probe == "none") & (rows.accountant == "gdp")].set_index("target_epsilon")
    found = []
    for target, pair in at.loc["independent"].sort_index().iterrows():
        schedule: dict[str, Any] = {"sample_rate": pair.sample_rate, "steps": pair.steps}
        probes: dict[str, Any] = {"probe_steps": pair.probe_steps, "sigma_loss": pair.sigma_loss}
        mu = noise_split.mu_gdp(sigma=pair.sigma_gradient, **schedule, **probes)
        found.append(
            {
                "target": target,
                "mu_vanilla": noise_split.mu_gdp(sigma=pair.sigma, **schedule),
                "mu_ours": mu,
                "epsilon_formula": noise_split.gdp_epsilon(mu, pair.target_delta),
                "epsilon_library": pair.epsilon,
                "true_vanilla": vanilla.true_epsilon[target],
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
    positions = np.arange(len(formula))
    for offset, (name, label, style, hatch) in enumerate(
        [
            ("true_vanilla", r"vanilla DP-SGD at the $\sigma$ of GDP", "best", ""),
            ("true_same_batch", "pair of GDP, same batch", "robust", "//"),
            ("true_independent", "pair of GDP, independent (the equation)", "paper", ".."),
        ]
    ):
        look: dict[str, Any] = {"color": plots.STYLES[style]["color"], "hatch": hatch, "edgecolor": "white"}
        places, heights = positions + 0.27 * (offset - 1), formula[name] / formula.target
        axis.bar(places, heights, width=0.25, label=label, **look)
    axis.axhline(1, **LEVEL)
    axis.set_xticks(positions, [f"{value:g}" for value in formula.target])
    axis.set(xlabel=r"target $\varepsilon$", ylabel=r"true $\varepsilon$ / target $\varepsilon$")
    axis.set_title("What GDP's pairs cost")
    plots.legend_below(axis)

    chosen = (rows.probe == "none") & (rows.accountant == "gdp") & (rows.target_epsilon == epsilon)
    plain = noise_split.split_of(rows[chosen].iloc[0])
    mu = noise_split.mu_gdp(sample_rate=plain.sample_rate, steps=plain.steps, sigma=plain.sigma)
    epsilons = np.linspace(0, 2.2 * epsilon, 45)
    central = noise_split.gdp_delta(mu, epsilons)
    exact = noise_split.delta_curve(plain, "same_batch", epsilons)  # type: ignore[arg-type]
    _draw_delta(curve_axis, epsilons, central, rf"$\mu$-GDP, $\mu$ = {mu:.2f}", plots.STYLES["reference"])
    _draw_delta(curve_axis, epsilons, exact, "PLD (exact to its grid)", plots.STYLES["best"])
    _finish_deltas(curve_axis, plain.target_delta)
    curve_axis.set_title(rf"Vanilla DP-SGD, $\sigma$ = {plain.sigma:.3f}, T = {plain.steps}")
    return figure


def mu_gdp_findings(formula: pd.DataFrame) -> list[str]:
    """Of :func:`mu_gdp_table`."""
    difference = (formula.epsilon_formula - formula.epsilon_library).abs().max()
    return [
        f"The paper's formula and the library's accountant agree to {difference:.0e} in epsilon",
        *(
            f"Target {row.target:g}: vanilla DP-SGD at the sigma of GDP costs {row.true_vanilla:.2f}, the pair "
            f"{row.true_same_batch:.2f} counted on the same batch, {row.true_independent:.2f} by the equation"
            for row in formula.itertuples()
        ),
    ]
