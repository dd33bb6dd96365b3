"""Figures and findings of notebook 01 on bias and noise of private losses, see ``bias_variance``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from hyfreedp import NoiseSplit, clipping_bias, normal_clipping_bias
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import Verdict
from hyfreedp.experiments.studies import clouds
from hyfreedp.experiments.studies.bias_variance import (
    RATIOS,
    TradeOff,
    normal_errors,
    relative_biases,
    wide_thresholds,
)
from hyfreedp.privatize import loss_noise_std, optimal_threshold

RED, ORANGE, GREEN = (plots.STYLES[name] for name in ("paper", "line_search", "best"))
LINES = {"bias": RED, "noise": GREEN, "rmse": ORANGE}
NAMES = {"bias": "clipping bias", "noise": "noise (sd)", "rmse": "total (root sum of squares)"}
ALPHAS = np.linspace(-3, 3, 121)
MARKED = [-1.0, 0.0, 1.0, 2.0]  # values of alpha with a dot
DOTTED: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (1, 1))}
DASHED: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (6, 2))}


def _normal_bias(alphas: Any) -> np.ndarray:
    """Corollary 1 in standard deviations of the loss."""
    return np.asarray(normal_clipping_bias(alphas, mean=0.0, std=1.0))


def draw_normal_bias() -> Figure:
    """Fig. "truncated normal": the clipping bias of normal losses against alpha."""
    figure, axis = plt.subplots(figsize=(5, 3.4))
    axis.plot(ALPHAS, _normal_bias(ALPHAS), color=ORANGE["color"])
    biases = _normal_bias(MARKED)
    axis.plot(MARKED, biases, linestyle="none", marker="o", color=ORANGE["color"])
    for alpha, bias in zip(MARKED, biases, strict=True):
        axis.annotate(f"{bias:.3f}", (alpha, bias), textcoords="offset points", xytext=(6, 6))
    axis.set(xlabel=r"$\alpha = (R_l - \mu)\,/\,\xi$", ylabel=r"$\phi(\alpha) - \alpha\,(1 - \Phi(\alpha))$")
    return figure


def normal_bias_findings() -> list[str]:
    """Under :func:`draw_normal_bias`."""
    at = dict(zip(MARKED, _normal_bias(MARKED), strict=True))
    return [
        f"Strictly falling; {at[0.0]:.4f} = 1/sqrt(2 pi) at alpha = 0, {at[1.0]:.4f} at 1 and {at[2.0]:.4f} at 2 "
        "(in standard deviations of the loss)."
    ]


def draw_theorem(
    dots: pd.DataFrame,
    curves: pd.DataFrame,
    releases: pd.DataFrame,
    *,
    batches: int,
    batch_size: int,
    real_size: int,
    runs: int,
) -> Figure:
    """Corollary 1 and Theorem 1 beside their simulations.

    Args:
        dots: of ``normal_bias_dots``, from ``batches`` batches of ``batch_size``.
        curves, releases: of ``one_batch``, from ``runs`` releases of a batch of ``real_size``.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    left.plot(ALPHAS, _normal_bias(ALPHAS), color=ORANGE["color"], label="Corollary 1")
    low, high = dots.bias - dots.spread, dots.bias + dots.spread
    left.fill_between(dots.alpha, low, high, color="0.85", label="one batch (1 sd)")
    bars: dict[str, Any] = {"fmt": "o", "color": "0.2", "markersize": 4, "capsize": 2}
    left.errorbar(dots.alpha, dots.bias, yerr=2 * dots.error, label="mean of batches", **bars)
    left.set(
        xlabel=r"$\alpha = (R_l - \mu)\,/\,\xi$",
        ylabel="clipping bias (sd of the loss)",
        title=f"{batches} batches of {batch_size} normal losses",
    )
    plots.legend_below(left, ncols=2)
    for name in ("bias", "noise"):
        right.plot(curves.threshold, curves[name], label=f"{NAMES[name]}: Theorem 1", **plots.line(LINES[name]))
        right.errorbar(
            releases.threshold,
            releases[name],
            yerr=2 * releases[f"{name}_error"],
            label=f"{NAMES[name]}: simulated",
            markersize=5,
            capsize=2,
            **plots.marks(LINES[name]),
        )
    right.set(
        xlabel="threshold $R_l$ (nats)",
        ylabel="error of the mean loss (nats)",
        title=f"one real batch of {real_size}, {runs} releases",
    )
    plots.legend_below(right, ncols=2)
    return figure


def theorem_findings(
    dots: pd.DataFrame, releases: pd.DataFrame, losses: np.ndarray, noise_multiplier: float
) -> list[str]:
    """Largest distances of simulation and closed form, in standard errors; ``losses`` are those released."""
    z, z_bias, z_noise = _standard_errors(dots, releases, losses, noise_multiplier)
    return [
        f"Corollary 1: the {len(dots)} simulated means lie within {z.abs().max():.1f} standard errors of the closed "
        "form (they share their draws).",
        f"Theorem 1: the {len(releases)} simulated biases lie within {z_bias.abs().max():.1f}, the noises within "
        f"{z_noise.abs().max():.1f} standard errors of it.",
    ]


def _standard_errors(
    dots: pd.DataFrame, releases: pd.DataFrame, losses: np.ndarray, noise_multiplier: float
) -> tuple[pd.Series, pd.Series, pd.Series]:
    """Distances from Corollary 1, and of bias and noise from Theorem 1."""
    z = (dots.bias - _normal_bias(dots.alpha)) / dots.error
    # The releases at one threshold test both formulas; thresholds share no noise.
    z_bias = (releases.bias - clipping_bias(losses, releases.threshold)) / releases.bias_error
    exact_noise = loss_noise_std(releases.threshold, noise_multiplier, losses.size)
    return z, z_bias, (releases.noise - exact_noise) / releases.noise_error


def draw_trade_offs(found: dict[int, TradeOff], mean: float) -> Figure:
    """Bias, noise and total error against R_l, a panel per batch size; ``mean`` is that of the losses."""
    figure, axes = plt.subplots(1, len(found), figsize=(3.6 * len(found), 4.1), sharey=True, squeeze=False)
    for axis, (size, trade) in zip(axes[0], found.items(), strict=True):
        for name, style in LINES.items():
            axis.plot(trade.curves.threshold, trade.curves[name], label=NAMES[name], **plots.line(style))
        dots = trade.releases
        bars: dict[str, Any] = {"fmt": "o", "color": ORANGE["color"], "markersize": 4, "capsize": 2}
        axis.errorbar(dots.threshold, dots.rmse, yerr=2 * dots.rmse_error, label="total, simulated", **bars)
        star: dict[str, Any] = {"marker": "*", "markersize": 14, "linestyle": "none", "color": "0.1"}
        axis.plot(trade.best, trade.error_at(trade.best), label="least error", **star)
        axis.axvline(mean, color="0.4", label="the paper's $R_l = L$", **DOTTED)
        axis.axvline(3 * mean, color="0.4", label="sum of three losses", **DASHED)
        axis.set(xscale="log", yscale="log", title=f"B = {size:,}", xlabel="threshold $R_l$ (nats)", ylim=(1e-3, 10))
        plots.log_ticks(axis.xaxis, [0.5, 1, 2, 5, 10])
    axes[0, 0].set_ylabel("error of the mean loss (nats)")
    plots.shared_legend(figure, axes[0], ncols=4)
    return figure


def trade_off_findings(found: dict[int, TradeOff], mean: float) -> list[str]:
    """Under :func:`draw_trade_offs`."""
    findings = []
    for size, trade in found.items():
        least = trade.error_at(trade.best)
        at_mean, at_sum = trade.error_at(mean), trade.error_at(3 * mean)
        findings.append(
            f"B = {size:,}: least error {least:.3g} nats at R_l = {trade.best:.2f} = {trade.best / mean:.2f} L; "
            f"{at_mean / least:.1f} times that at R_l = L and {at_sum / least:.1f} times at the sum of three losses."
        )
    return findings


def verdicts(
    dots: pd.DataFrame, releases: pd.DataFrame, losses: np.ndarray, noise_multiplier: float, moments: pd.DataFrame
) -> list[Verdict]:
    """On Theorem 1 and on R_l = L.

    Args:
        dots, releases, losses, noise_multiplier: as of :func:`theorem_findings`.
        moments: of ``loss_moments``; a bias of at most 5 % of the loss counts as close to zero.
    """
    bias = moments.bias_at_L
    farthest = max(z.abs().max() for z in _standard_errors(dots, releases, losses, noise_multiplier))
    shares = ", ".join(f"{share:.0%} at step {step}" for step, share in bias.items())
    return [
        Verdict(
            "Theorem 1 and Corollary 1: clipping bias and noise of a private mean loss",
            "reproduced" if farthest < 4 else "contradicted",
            f"{len(dots) + 2 * len(releases)} simulated values lie within {farthest:.1f} standard errors of the "
            "formulas",
        ),
        Verdict(
            "R_l = L leaves a clipping bias close to zero",
            "reproduced" if bias.max() < 0.05 else "contradicted",
            f"of the mean loss it is {shares}",
        ),
    ]


def draw_losses(probed: Sequence[pd.DataFrame], stages: Sequence[int]) -> Figure:
    """Losses of one batch beside a normal, and below the clipping bias that each implies, over all runs."""
    figure, axes = plt.subplots(2, len(stages), figsize=(3.6 * len(stages), 5.6), squeeze=False)
    for (top, bottom), stage in zip(axes.T, stages, strict=True):
        batches = [clouds.losses_of(table, stage, "batch")[1] for table in probed]
        _draw_density(top, batches[0])
        top.set_title(f"step {stage}")
        biases = np.array([relative_biases(batch) for batch in batches])
        for values, style, label in zip(
            biases.swapaxes(0, 1), (ORANGE, RED), ("actual", "normal (Corollary 1)"), strict=True
        ):
            bottom.plot(RATIOS, values.mean(axis=0), label=label, **plots.line(style))
            band: dict[str, Any] = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
            bottom.fill_between(RATIOS, values.min(axis=0), values.max(axis=0), **band)
        bottom.axvline(1, color="0.4", **DOTTED)
        bottom.set(xscale="log", yscale="log", ylim=(1e-3, 3), xlabel="threshold $R_l$ / mean loss $L$")
        plots.log_ticks(bottom.xaxis, [0.2, 1, 5, 20])
    axes[0, 0].set_ylabel("density (1/nat)")
    axes[1, 0].set_ylabel("clipping bias / mean loss")
    plots.shared_legend(figure, axes[1, :1], ncols=2)
    plots.shared_legend(figure, axes[0, :1], loc="outside upper center", ncols=3, fontsize="small")
    return figure


def _draw_density(axis: Axes, losses: np.ndarray) -> None:
    mean, std = losses.mean(), losses.std()
    grid = np.linspace(mean - 3.5 * std, mean + 5 * std, 200)
    axis.hist(losses, bins=grid[::4].tolist(), density=True, color="0.7", linewidth=0, label="losses of one batch")
    axis.plot(grid, stats.norm.pdf(grid, mean, std), label="normal, same mean and sd", **plots.line(RED))
    axis.axvline(mean, color="0.4", label="$R_l = L$", **DOTTED)
    axis.set(xlabel="loss of a sample (nats)", xlim=(grid[0], grid[-1]))


def loss_findings(moments: pd.DataFrame, seeds: int) -> list[str]:
    """Under :func:`draw_losses`, from ``loss_moments`` over ``seeds`` runs."""
    return [
        f"Step {stage}: mean {row['mean']:.2f}, sd {row.sd:.2f}, skewness {row.skewness:.1f}; clipping at R_l = L "
        f"takes {row.bias_at_L:.1%} of the mean loss, a normal would say {row.normal_bias_at_L:.1%}. "
        f"To keep 99 % of it, R_l must be {row.keeps_99_percent:.1f} L (mean of {seeds} seed{'s' * (seeds > 1)})."
        for stage, row in moments.iterrows()
    ]


def draw_mechanisms(splits: dict[str, NoiseSplit], *, mean: float, std: float, batch_size: int) -> Figure:
    """Density of Gaussian and Laplace noise, and the total error of the mean of N(mean, std^2) losses under each.

    Args:
        splits: one of each ``loss_mechanism``, by its name.
        mean, std: of the losses.
        batch_size: B.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.7))
    deviations = {name: _deviation(split, batch_size) for name, split in splits.items()}
    grid = np.linspace(-4.5, 4.5, 401) * deviations["gaussian"]
    thresholds = wide_thresholds(mean)
    for (name, split), style in zip(splits.items(), (ORANGE, RED), strict=True):
        scale = split.sigma_loss / batch_size
        density = stats.norm(scale=scale) if name == "gaussian" else stats.laplace(scale=scale)
        left.plot(grid, density.pdf(grid), label=f"{name}, sd {deviations[name]:.3f}", **plots.line(style))
        trade = _trade_off(split, mean, std, batch_size)
        least = trade.error_at(trade.best)
        right.plot(thresholds, trade.curves.rmse, label=f"{name}: least {least:.3f} nats", **plots.line(style))
        right.plot(trade.best, least, marker="*", markersize=13, color=style["color"])
    left.set(xlabel="noise of the private mean loss (units of $R_l$)", ylabel="density", yscale="log")
    left.set_ylim(bottom=1e-3)
    right.axvline(mean, color="0.4", label="$R_l = L$", **DOTTED)
    right.set(xscale="log", yscale="log", xlabel="threshold $R_l$ (nats)", ylabel="total error of the mean loss (nats)")
    plots.log_ticks(right.xaxis, [0.5, 1, 2, 5, 10])
    plots.log_ticks(right.yaxis, [0.1, 0.2, 0.5, 1, 2])
    for axis in (left, right):
        plots.legend_below(axis)
    return figure


def mechanism_findings(splits: dict[str, NoiseSplit], *, mean: float, std: float, batch_size: int) -> list[str]:
    """Under :func:`draw_mechanisms`."""
    gaussian, laplace = splits["gaussian"], splits["laplace"]
    ratio = _deviation(laplace, batch_size) / _deviation(gaussian, batch_size)
    normal, other = (_trade_off(split, mean, std, batch_size) for split in (gaussian, laplace))
    return [
        f"At epsilon = {gaussian.target_epsilon:g} on the same batch, Laplace noise has {ratio**2 - 1:+.0%} variance "
        f"(sigma_l = {laplace.sigma_loss:.1f} against {gaussian.sigma_loss:.1f}); its least error is "
        f"{other.error_at(other.best) / normal.error_at(normal.best):.2f} times the Gaussian's, at a threshold of "
        f"{other.best:.2f} instead of {normal.best:.2f} nats."
    ]


def _deviation(split: NoiseSplit, batch_size: int) -> float:
    """Of the noise of a mean loss, in units of R_l."""
    return float(loss_noise_std(1.0, split.sigma_loss, batch_size, split.loss_mechanism))


def _trade_off(split: NoiseSplit, mean: float, std: float, batch_size: int) -> TradeOff:
    setting: dict[str, Any] = {
        "noise_multiplier": split.sigma_loss,
        "expected_batch_size": batch_size,
        "mechanism": split.loss_mechanism,
    }
    curves = normal_errors(wide_thresholds(mean), mean=mean, std=std, **setting)
    return TradeOff(curves, pd.DataFrame(), optimal_threshold(mean, std, **setting))
