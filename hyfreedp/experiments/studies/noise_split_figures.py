"""Figures, tables and findings of notebook 03, all from the table of ``noise_split.calibrations``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.studies import noise_split
from hyfreedp.experiments.studies.noise_split import DATA_SETS

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
PRICES = [
    ("losses", "constant", "three losses, constant (paper)", plots.STYLES["paper"]),
    ("losses", "per_step", "three losses, per step", plots.SERIES[5]),
    ("contrasts", "per_step", "contrasts, per step (line_search)", plots.STYLES["line_search"]),
]
LEVEL: dict[str, Any] = {"color": "0.3", "linewidth": 1}


# -- the two noises ----------------------------------------------------------------------------------------------------


def draw_noises(rows: pd.DataFrame, column: str, label: str, ticks: Sequence[float]) -> Figure:
    """Gradient noise above, loss noise below, one column per accountant.

    Args:
        rows: section "interval" or "epsilon".
        column: what to draw against.
        label: of its axis.
        ticks: of its axis.
    """
    figure, axes = plt.subplots(2, 3, figsize=(10, 6), sharex=True, sharey="row")
    for (accountant, composition, title), above, below in zip(COLUMNS, *axes, strict=True):
        here = rows[(rows.accountant == accountant) & (rows.composition == composition)].sort_values(column)
        even, split = here[here.even], here[~here.even & (here.loss_mechanism == "gaussian")]
        for name in ("sigma", "sigma_gradient"):
            _draw_noise(above, name, split[column], split[name])
        for mechanism in ("gaussian", "laplace"):
            chosen = here[~here.even & (here.loss_mechanism == mechanism)]
            _draw_noise(below, mechanism, chosen[column], chosen.loss_std)
        for axis in (above, below):
            _draw_noise(axis, "even", even[column], even.sigma_gradient)
        above.set_title(title)
        below.set(xscale="log", yscale="log", xlabel=label)
        plots.log_ticks(below.xaxis, ticks)
    _ticks_within(axes[1, 0], (0.2, 0.5, 1, 2, 5, 10, 20, 50))
    axes[0, 0].set_ylabel("gradient noise multiplier")
    axes[1, 0].set_ylabel("loss noise (standard deviation / $R_l$)")
    plots.shared_legend(figure, axes[:, 0], ncols=3, fontsize="small")
    return figure


def _draw_noise(axis: Axes, name: str, x: pd.Series, y: pd.Series) -> None:
    label, style = NOISES[name]
    axis.plot(x, y, label=label, markersize=5, **style)


def _ticks_within(axis: Axes, ticks: Sequence[float]) -> None:
    """Label the y axis at those ticks that are within its limits."""
    low, high = axis.get_ylim()
    shown = [tick for tick in ticks if low <= tick <= high]
    axis.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axis.yaxis.set_minor_formatter(NullFormatter())


def interval_findings(rows: pd.DataFrame, grid: dict[str, Any], epsilon: float) -> list[str]:
    """Of section "interval" at ``epsilon``; ``grid`` is that of ``noise_split_rows.grid_of``."""
    keys = ["accountant", "interval"]
    gaussian = rows[(rows.loss_mechanism == "gaussian") & ~rows.even].set_index(keys)
    laplace = rows[rows.loss_mechanism == "laplace"].set_index(keys)
    even = rows[rows.even].set_index(keys)
    seldom, often = max(grid["intervals_laplace"]), min(grid["intervals"])
    growth = 100 * (gaussian.sigma_gradient / gaussian.sigma - 1)
    even_growth = 100 * (even.sigma_gradient / even.sigma - 1)
    findings = [
        f"{accountant.upper()} ({composition.replace('_', ' ')}), epsilon {epsilon:g}: the gradient noise grows by "
        f"{growth[accountant, often]:.1f} % at every K, with the even split by {even_growth[accountant, often]:.0f} % "
        f"at K = {often}; sigma_l is {gaussian.sigma_loss[accountant, often]:.2f} at K = {often} and "
        f"{gaussian.sigma_loss[accountant, seldom]:.2f} at K = {seldom}"
        for accountant, composition, _ in COLUMNS
    ]
    more = (laplace.loss_std / gaussian.loss_std)["pld", seldom] ** 2 - 1
    return [
        *findings,
        f"At K = {seldom}, Laplace noise of the same privacy has {100 * more:.0f} % more variance than Gaussian (PLD)",
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


# -- gamma and allocation ----------------------------------------------------------------------------------------------


def draw_price(rows: pd.DataFrame, batch_size: int) -> Figure:
    """Noise of the probes, and their share of epsilon, against gamma; ``rows`` are section "gamma"."""
    figure, (noise_axis, share_axis) = plt.subplots(1, 2, figsize=(10, 4))
    for probe, kind, label, style in PRICES:
        line = rows[(rows.probe == probe) & (rows.allocation == kind)].sort_values("gamma")
        more = 100 * (line.gamma - 1)
        noise_axis.plot(more, 100 * line.loss_std / batch_size, label=label, markersize=5, **style)
        share_axis.plot(more, line.probe_share, label=label, markersize=5, **style)
    for axis in (noise_axis, share_axis):
        axis.set(xscale="log", yscale="log", xlabel=r"more gradient noise, $100(\gamma - 1)$ (%, root mean square)")
        axis.xaxis.set_major_formatter(PercentFormatter(decimals=1, symbol=""))
    _ticks_within(noise_axis, (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10))
    share_axis.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=1))
    noise_axis.set(ylabel=f"noise of each mean (% of its clip, B = {batch_size:,})")
    noise_axis.set_title("What it buys: precise probes")
    share_axis.set_ylabel(r"share of $\varepsilon$ left to the probes")
    share_axis.set_title("What it takes from the gradients")
    plots.shared_legend(figure, [noise_axis], ncols=2, fontsize="small")
    return figure


def price_findings(rows: pd.DataFrame) -> list[str]:
    """Of section "gamma", from its smallest to its largest gamma."""
    at = rows.set_index(["probe", "allocation", "gamma"])
    small, large = rows.gamma.min(), rows.gamma.max()
    return [
        f"{label}: from gamma = {small:g} to {large:g} sigma_l falls from {at.sigma_loss[probe, kind, small]:.2f} to "
        f"{at.sigma_loss[probe, kind, large]:.2f}, while the probes' share of epsilon grows from "
        f"{100 * at.probe_share[probe, kind, small]:.2f} to {100 * at.probe_share[probe, kind, large]:.1f} %"
        for probe, kind, label, _ in PRICES
    ]


def allocation_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Both allocations and probes against the interval, by PLD with Gaussian noise, of the whole table."""
    rows = table[(table.section == "allocation") | ((table.section == "interval") & ~table.even)]
    rows = rows[(rows.accountant == "pld") & (rows.loss_mechanism == "gaussian")]
    return rows.set_index(["probe", "allocation", "interval"], drop=False).sort_index()


def draw_allocation(table: pd.DataFrame, intervals: Sequence[int], interval: int) -> Figure:
    """Gradient noise over some steps at ``interval``, and loss noise against the interval.

    Args:
        table: the whole.
        intervals: that it has; the last stands in if ``interval`` is not one of them.
        interval: K.
    """
    rows = allocation_rows(table)
    figure, (step_axis, noise_axis) = plt.subplots(1, 2, figsize=(10, 4))
    steps = range(2 * interval + 2)
    shown = interval if interval in intervals else intervals[-1]
    largest = 1.0
    for probe, kind, label, style in PRICES:
        line = rows.loc[(probe, kind)]
        noise_axis.plot(line.index, line.loss_std, label=label, markersize=5, **style)
        if probe == "losses":
            split = noise_split.split_of(rows.loc[(probe, kind, shown)])
            noise = [split.gradient_noise_multiplier(t) / split.sigma for t in steps]
            step_axis.plot(steps, noise, label=label, drawstyle="steps-mid", markersize=5, **style)
            largest = max(largest, *noise)
    step_axis.axhline(1, color=plots.STYLES["best"]["color"], linewidth=1, label=r"vanilla DP-SGD, $\sigma$")
    step_axis.set(xlabel="step $t$", ylabel=r"gradient noise / $\sigma$")
    step_axis.set_title(f"Gradient noise over the steps (K = {shown})")
    step_axis.set_ylim(top=1 + 1.5 * (largest - 1))
    plots.legend_below(step_axis)
    noise_axis.set(xscale="log", xlabel="probing interval $K$ (steps)", ylabel=r"$\sigma_l$ (in units of the clip)")
    noise_axis.set_title("Loss noise")
    plots.log_ticks(noise_axis.xaxis, intervals)
    plots.legend_below(noise_axis)
    return figure


def allocation_findings(table: pd.DataFrame, intervals: Sequence[int], gamma: float) -> list[str]:
    """Per-step against constant allocation of three losses at every interval."""
    rows = allocation_rows(table)
    change = 100 * (rows.sigma_loss["losses", "per_step"] / rows.sigma_loss["losses", "constant"] - 1)
    raised = (rows.sigma_gradient_probe / rows.sigma)["losses", "per_step"]
    return [
        f"K = {k}: per step needs {change[k]:+.1f} % loss noise against constant (losses, gamma = {gamma:g}, PLD); on "
        f"probe steps its gradient noise is {raised[k]:.3f} sigma"
        for k in intervals
    ]


# -- the paper's data sets ---------------------------------------------------------------------------------------------


def data_set_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Section "data" with the size of each data set; shares and noise in percent."""
    sizes = {chosen.title: chosen for chosen in DATA_SETS}
    chosen = [sizes[name] for name in rows.data]
    return pd.DataFrame(
        {
            "data": rows.data,
            "N": [data.records for data in chosen],
            "B": [data.batch_size for data in chosen],
            "epochs": [data.epochs for data in chosen],
            "T": rows.steps,
            "delta": rows.target_delta,
            "epsilon": rows.target_epsilon,
            "preset": rows.preset,
            "accountant": rows.accountant,
            "sigma": rows.sigma,
            "sigma_g": rows.sigma_gradient,
            "sigma_g_probe": rows.sigma_gradient_probe,
            "sigma_l": rows.sigma_loss,
            "share_percent": 100 * rows.probe_share,
            "noise_percent": 100 * rows.loss_std / [data.batch_size for data in chosen],
            "true_epsilon": rows.true_epsilon,
        }
    )


def data_set_findings(worked: pd.DataFrame) -> list[str]:
    """Of :func:`data_set_table`."""
    share = worked.groupby("preset").share_percent
    return [
        f"Preset {name}: the probes take {low:.2f} to {high:.2f} % of epsilon over all data sets and budgets"
        for name, low, high in share.agg(["min", "max"]).itertuples()
    ]


# -- the share of the probes (notebook 09) -----------------------------------------------------------------------------


def draw_shares(splits: pd.DataFrame, interval: int, records: int, epsilon: float) -> Figure:
    """HyFreeDP's share of epsilon against the budget for several data sets, and against K for several gammas.

    Args:
        splits: calibrations of ``noise_split_rows.share_rows``.
        interval: of its section "data".
        records, epsilon: N and budget of its section "interval".
    """
    figure, (data_axis, setting_axis) = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    of_data, of_settings = splits[splits.section == "data"], splits[splits.section == "interval"]
    for (name, line), style in zip(of_data.groupby("data", sort=False), plots.SERIES, strict=False):
        data_axis.plot(line.target_epsilon, 100 * line.probe_share, label=name, markersize=5, **style)
    data_axis.set(xscale="log", xlabel=r"target $\varepsilon$", ylabel=r"HyFreeDP's share of $\varepsilon$ (%)")
    data_axis.set_title(rf"$\gamma$ = 1.01, $K$ = {interval}")
    plots.log_ticks(data_axis.xaxis, list(of_data.target_epsilon.unique()))
    for (gamma, line), style in zip(of_settings.groupby("gamma"), plots.SERIES, strict=False):
        label = rf"$\gamma$ = {gamma:g}"
        setting_axis.plot(line.interval, 100 * line.probe_share, label=label, markersize=5, **style)
    setting_axis.set(xscale="log", xlabel="probing interval $K$ (steps)")
    setting_axis.set_title(rf"N = {records:,}, $\varepsilon$ = {epsilon:g}")
    plots.log_ticks(setting_axis.xaxis, list(of_settings.interval.unique()))
    for axis in (data_axis, setting_axis):
        axis.axhline(1, **LEVEL)
    for axis in (data_axis, setting_axis):
        plots.legend_below(axis, ncols=3)
    data_axis.set_ylim(bottom=0)
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
            f"gamma = {gamma:g}: {low:.2f} %, whatever K is ({intervals})"
            if f"{low:.2f}" == f"{high:.2f}"
            else f"gamma = {gamma:g}: {low:.2f} to {high:.2f} % over K = {intervals}"
            for gamma, low, high in over_settings.agg(["min", "max"]).itertuples()
        ),
    ]
