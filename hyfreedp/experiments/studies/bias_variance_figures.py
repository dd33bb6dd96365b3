"""Figures and findings of notebook 01 on bias and noise of private losses, see ``bias_variance``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from hyfreedp import clipping_bias, normal_clipping_bias
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import Verdict, by_proof, by_row
from hyfreedp.experiments.studies import clouds
from hyfreedp.experiments.studies.bias_variance import RATIOS, TradeOff, relative_biases
from hyfreedp.privatize import loss_noise_std

RED, ORANGE, GREEN = (plots.STYLES[name] for name in ("paper", "alternative", "best"))
LINES = {"bias": RED, "noise": GREEN, "rmse": plots.SERIES[0]}
NAMES = {"bias": "clipping bias", "noise": "noise (sd)"}
SQUARES = {"bias": "squared bias", "noise": "variance", "rmse": "their sum"}
DOTTED: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (1, 1))}
DASHED: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (6, 2))}
BARS: dict[str, Any] = {"fmt": "o", "markersize": 4, "capsize": 2}


def normal_bias(alphas: Any) -> np.ndarray:
    """Corollary 1 in standard deviations of the loss."""
    return np.asarray(normal_clipping_bias(alphas, mean=0.0, std=1.0))


def draw_theorem(dots: pd.DataFrame, curves: pd.DataFrame, releases: pd.DataFrame) -> Figure:
    """Corollary 1 and Theorem 1 beside their simulations.

    Args:
        dots: of ``normal_bias_dots``.
        curves, releases: of ``one_batch``.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    alphas = np.linspace(-3, 3, 121)
    left.plot(alphas, normal_bias(alphas), color=ORANGE["color"], label="Corollary 1")
    low, high = dots.bias - dots.spread, dots.bias + dots.spread
    left.fill_between(dots.alpha, low, high, color="0.85", label="one batch (1 sd)")
    left.errorbar(dots.alpha, dots.bias, yerr=2 * dots.error, label="mean of batches", color="0.2", **BARS)
    left.set(
        xlabel=r"$\alpha = (R_l - \mu)\,/\,\xi$",
        ylabel="clipping bias (sd of the loss)",
        title="Simulated means lie on Corollary 1",
    )
    for name in ("bias", "noise"):
        right.plot(curves.threshold, curves[name], label=f"{NAMES[name]}: Theorem 1", **plots.line(LINES[name]))
        look = {"color": LINES[name]["color"], "yerr": 2 * releases[f"{name}_error"]} | BARS
        right.errorbar(releases.threshold, releases[name], label=f"{NAMES[name]}: simulated", **look)
    right.set(
        xlabel="threshold $R_l$ (nats)",
        ylabel="error of the mean loss (nats)",
        title="One batch, released again: on Theorem 1",
    )
    for axis in (left, right):
        plots.legend_below(axis, ncols=2)
    return figure


def standard_errors(
    dots: pd.DataFrame, releases: pd.DataFrame, losses: np.ndarray, noise_multiplier: float
) -> tuple[pd.Series, pd.Series, pd.Series]:
    """Distances from Corollary 1, and of bias and noise from Theorem 1; ``losses`` are those released."""
    z = (dots.bias - normal_bias(dots.alpha)) / dots.error
    # The releases at one threshold test both formulas; thresholds share no noise.
    z_bias = (releases.bias - clipping_bias(losses, releases.threshold)) / releases.bias_error
    exact_noise = loss_noise_std(releases.threshold, noise_multiplier, losses.size)
    return z, z_bias, (releases.noise - exact_noise) / releases.noise_error


def draw_trade_offs(found: dict[int, TradeOff], mean: float) -> Figure:
    """Squared bias, variance and their sum against R_l, a panel per batch size; ``mean`` is that of the losses."""
    figure, axes = plt.subplots(1, len(found), figsize=(3.6 * len(found), 4.1), squeeze=False)
    for axis, (size, trade) in zip(axes[0], found.items(), strict=True):
        for name, style in LINES.items():
            axis.plot(trade.curves.threshold, trade.curves[name] ** 2, label=SQUARES[name], **plots.line(style))
        dots, look = trade.releases, {"color": "0.1", "label": "sum, simulated (± 2 standard errors)"} | BARS
        axis.errorbar(dots.threshold, dots.rmse**2, yerr=4 * dots.rmse * dots.rmse_error, **look)
        least, star = trade.error_at(trade.best) ** 2, {"marker": "*", "markersize": 16, "color": ORANGE["color"]}
        axis.plot(trade.best, least, label="least", linestyle="none", markeredgecolor="black", zorder=4, **star)
        axis.axvline(mean, color="0.4", label="the paper's $R_l = L$", **DOTTED)
        axis.axvline(3 * mean, color="0.4", label="sum of three losses", **DASHED)
        axis.set(xlim=(0, 4 * mean), ylim=(0, 6 * least), xlabel="threshold $R_l$ (nats)")
        axis.ticklabel_format(axis="y", scilimits=(-2, 2), useMathText=True)
        times = trade.error_at(mean) ** 2 / least
        axis.set_title(f"B = {size:,}: at L {times:.3g} times the least", y=1.06)
    axes[0, 0].set_ylabel("squared error of the mean loss (nats²)")
    plots.shared_legend(figure, axes[0], ncols=3)
    return figure


def trade_off_findings(found: dict[int, TradeOff], mean: float) -> list[str]:
    """Under :func:`draw_trade_offs`."""
    findings = []
    for size, trade in found.items():
        least, at_mean, at_sum = (trade.error_at(place) ** 2 for place in (trade.best, mean, 3 * mean))
        findings.append(
            f"B = {size:,}: least error {least:.3g} nats² at {trade.best:.2f} nats = {trade.best / mean:.2f} L; "
            f"{at_mean / least:.3g} times that at R_l = L and {at_sum / least:.3g} times at the sum of three losses."
        )
    return findings


def verdicts(farthest: float, values: int, moments: pd.DataFrame) -> list[Verdict]:
    """On Theorem 1 and on R_l = L.

    Args:
        farthest: largest of :func:`standard_errors`, of so many ``values``.
        moments: of ``loss_moments``; a bias of at most 5 % of the loss counts as close to zero.
    """
    bias = moments.bias_at_L
    shares = ", ".join(f"{share:.0%} at step {step}" for step, share in bias.items())
    return [
        Verdict(
            "Theorem 1 and Corollary 1: clipping bias and noise of a private mean loss",
            by_proof(farthest < 4),
            f"{values} simulated values lie within {farthest:.1f} standard errors of the formulas",
        ),
        Verdict(
            "R_l = L leaves a clipping bias close to zero", by_row(bias < 0.05), f"of the mean loss it is {shares}"
        ),
    ]


def draw_losses(probed: Sequence[pd.DataFrame], stages: Sequence[int]) -> Figure:
    """Losses of one batch beside a normal, and below the clipping bias that each implies, over all runs."""
    figure, axes = plt.subplots(2, len(stages), figsize=(3.6 * len(stages), 5.6), squeeze=False)
    for (top, bottom), stage in zip(axes.T, stages, strict=True):
        batches = [clouds.losses_of(table, stage, "batch")[1] for table in probed]
        mean, std = batches[0].mean(), batches[0].std()
        grid = np.linspace(mean - 3.5 * std, mean + 5 * std, 200)
        top.hist(batches[0], bins=grid[::4].tolist(), density=True, color="0.7", label="losses of one batch")
        top.plot(grid, stats.norm.pdf(grid, mean, std), label="normal, same mean and sd", **plots.line(RED))
        top.axvline(mean, color="0.4", label="$R_l = L$", **DOTTED)
        top.set(title=f"step {stage}", xlabel="loss of a sample (nats)")
        biases = np.array([relative_biases(batch) for batch in batches]).swapaxes(0, 1)
        for values, style, label in zip(biases, (ORANGE, RED), ("actual", "normal (Corollary 1)"), strict=True):
            bottom.plot(RATIOS, values.mean(axis=0), label=label, **plots.line(style))
            bottom.fill_between(RATIOS, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.2)
        actual, normal = (np.interp(1, RATIOS, values.mean(axis=0)) for values in biases)
        bottom.set_title(f"at L {actual:.0%} is cut; a normal says {normal:.0%}")
        bottom.axvline(1, color="0.4", **DOTTED)
        bottom.set(xscale="log", yscale="log", ylim=(1e-3, 3), xlabel="threshold $R_l$ / mean loss $L$")
        plots.log_ticks(bottom.xaxis, [0.2, 1, 5, 20])
    axes[0, 0].set_ylabel("density (1/nat)")
    axes[1, 0].set_ylabel("clipping bias / mean loss")
    plots.shared_legend(figure, axes[:, 0], ncols=3)
    return figure
