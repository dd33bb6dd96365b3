"""Figures and findings of notebook 10, from the tables of ``campaign``."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hyfreedp import NoiseSplit
from hyfreedp.accounting.split import Composition
from hyfreedp.experiments.audits import one_run, releases
from hyfreedp.experiments.audits.campaign import DELTA, LABELS, single_sigma
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.verdicts import Verdict
from hyfreedp.experiments.studies.noise_split import delta_curve, gdp_epsilon

TITLES = {"independent": "noise chosen by the independent count", "same_batch": "noise chosen by the same-batch count"}
CURVES: dict[Composition, tuple[str, str]] = {
    "independent": ("counted as independent", "paper"),
    "same_batch": ("counted as same batch", "best"),
}
LOOKS = {"constant": "line_search", "linear": "reference", "tuned": "best"}  # the presets have styles of their own


def percent(confidence: float) -> str:
    """As a label."""
    return f"{100 * confidence:g} %"


def draw_probes(probes: pd.DataFrame, epsilon: float, confidence: float) -> Figure:
    """Bounds of one probe and one vote against the factor on the noise, between the claim and the exact epsilon.

    Args:
        probes: of ``campaign.probe_audits`` at these epsilon and confidence.
        epsilon, confidence: as there.
    """
    factors = sorted(probes.factor.unique(), reverse=True)
    finely, sigma = np.geomspace(min(factors), 1, 50), single_sigma(epsilon)
    exact = [gdp_epsilon(1 / (factor * sigma), DELTA) for factor in finely]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, (probe, part) in zip(axes, probes.groupby("probe", sort=False), strict=True):
        axis.plot(finely, exact, label="exact, noise that is there", **plots.line(plots.STYLES["worst"]))
        axis.axhline(part.claimed.iloc[0], color="0.2", linewidth=1, label="claim, noise asked for")
        look = plots.marks(plots.SERIES[0])
        axis.plot(part.factor, part.lower_bound, label=f"audit, {percent(confidence)}", **look)
        axis.set(title=f"one probe, {probe}", xlabel="noise / noise asked for", xscale="log")
        plots.log_ticks(axis.xaxis, factors)
    axes[0].set_ylabel(r"$\varepsilon$ of the release")
    plots.shared_legend(figure, axes[:1], ncols=3, fontsize="small")
    return figure


def probe_findings(probes: pd.DataFrame) -> list[str]:
    """Under :func:`draw_probes`."""
    honest, faulty = probes[probes.factor == 1], probes[probes.factor < 1]
    noticed = faulty[faulty.lower_bound > faulty.claimed]
    from_which = f", from a factor of {noticed.factor.max():g} on" if len(noticed) else " by so few runs"
    return [
        *(
            f"One probe of {row.probe}: the bound is {row.lower_bound:.2f} where {row.claimed:.2f} is claimed, "
            f"{releases.verdict(row.claimed, row.lower_bound)}"
            for row in honest.itertuples()
        ),
        f"With the noise too small on purpose, {len(noticed)} of {len(faulty)} claims are refuted{from_which}",
        "No bound exceeds the accountant's epsilon of the noise that is there: "
        f"{(probes.lower_bound <= probes.true_epsilon).all()}",
    ]


def draw_joint(joint: pd.DataFrame, splits: dict[Composition, NoiseSplit], confidence: float) -> Figure:
    """epsilon(delta) of both splits, as counted in two ways, and the bounds found by running them.

    Args:
        joint: of ``campaign.joint_audits``.
        splits: of ``campaign.joint_splits``.
        confidence: of the bounds.
    """
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, (noise, split) in zip(axes, splits.items(), strict=True):
        grid = np.linspace(0.05, 1.75 * split.target_epsilon, 40)
        for count, (label, style) in CURVES.items():
            deltas = delta_curve(split, count, grid)  # type: ignore[arg-type]
            axis.plot(deltas, grid, label=label, **plots.line(plots.STYLES[style]))
        part = joint[(joint.noise == noise) & (joint.counted == noise)]
        look = plots.marks(plots.SERIES[0])
        axis.plot(part.delta, part.lower_bound, label=f"audit, {percent(confidence)}", **look)
        target = (split.target_delta, split.target_epsilon)
        axis.plot(*target, marker="*", color="0.2", markersize=12, linestyle="none", label="target")
        axis.set(xscale="log", xlim=(1e-6, 0.1), xlabel=r"$\delta$", title=TITLES[noise])
    axes[0].set_ylabel(r"$\varepsilon$")
    plots.shared_legend(figure, axes[:1], ncols=3, fontsize="small")
    return figure


def joint_findings(joint: pd.DataFrame, confidence: float) -> list[str]:
    """Under :func:`draw_joint`; the first row of each pair of ways is at the target's delta."""
    by = joint.set_index(["noise", "counted"])
    own, other, truth = (
        by.loc[pair]
        for pair in (("independent", "independent"), ("independent", "same_batch"), ("same_batch", "same_batch"))
    )
    refuted = own[own.verdict == "refuted"]
    where = "".join(
        f"; at delta = {row.delta:.2g} at least {row.lower_bound:.2f} where {row.claimed:.2f} is claimed"
        for row in refuted.itertuples()
    )
    of_same_batch = joint[joint.counted == "same_batch"]
    return [
        f"Noise by the independent count: its own claim is refuted at {len(refuted)} of {len(own)} values of delta, "
        f"jointly at {percent(confidence)}{where}",
        f"The same releases counted as one batch are claimed to cost {other.claimed.iloc[0]:.2f} at the target's "
        f"delta; the audit finds at least {other.lower_bound.iloc[0]:.2f}",
        f"Noise by the same-batch count: at most {truth.claimed.iloc[0]:.2f} is claimed, at least "
        f"{truth.lower_bound.iloc[0]:.2f} found",
        f"Claims of the same-batch count refuted: {(of_same_batch.verdict == 'refuted').sum()} of {len(of_same_batch)}",
    ]


def draw_canaries(canaries: pd.DataFrame, confidence: float) -> Figure:
    """Lower bounds from training runs beside what is claimed, a group per epsilon.

    Args:
        canaries: of ``campaign.canary_audits``.
        confidence: of the bounds.
    """
    figure, axis = plt.subplots(figsize=(7.5, 4))
    targets = list(canaries.target.unique())
    positions = np.arange(len(targets))
    for index, (method, label) in enumerate(LABELS.items()):
        part, look = canaries[canaries.method == method], plots.marks(plots.STYLES[LOOKS.get(method, method)])
        axis.plot(positions + 0.14 * (index - 2), part.lower_bound, label=label, markersize=7, **look)
    for position, target in zip(positions, targets, strict=True):
        if math.isfinite(target):
            label = "claimed" if position == 0 else ""
            axis.hlines(target, position - 0.4, position + 0.4, color="0.2", label=label)
    best = canaries.loc[canaries.lower_bound.idxmax()]
    ceiling = one_run.perfect_bound(int(best.guesses), int(best.canaries), DELTA, confidence)
    axis.axhline(ceiling, color="0.5", linestyle=":", label=f"{best.guesses:,} guesses, all right: {ceiling:.2f}")
    axis.set_xticks(positions, ["without noise" if math.isinf(target) else f"{target:g}" for target in targets])
    axis.set(xlabel=r"claimed $\varepsilon$", ylabel=rf"lower bound on $\varepsilon$, {percent(confidence)}")
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def canary_findings(canaries: pd.DataFrame) -> list[str]:
    """Under :func:`draw_canaries`."""
    private, bare = canaries[np.isfinite(canaries.claimed)], canaries[np.isinf(canaries.claimed)]
    largest = private.loc[private.lower_bound.idxmax()]
    at = canaries.set_index(["method", "target"]).lower_bound
    untuned = [
        f"{at['tuned', target]:.2f} (untuned {at['constant', target]:.2f}) where {target:g} is claimed"
        for target in canaries.target.unique()
        if math.isfinite(target)
    ]
    return [
        f"Without noise {(bare.right / bare.guesses).min():.0%} or more of the guesses are right, which gives lower "
        f"bounds of {bare.lower_bound.min():.2f} to {bare.lower_bound.max():.2f}: the canaries are remembered",
        f"With noise {(private.verdict == 'refuted').sum()} of {len(private)} claims are refuted; the largest bound is "
        f"{largest.lower_bound:.2f} where {largest.claimed:.2f} is claimed ({LABELS[largest.method]})",
        f"The rate tuned without privacy: {', '.join(untuned)}; "
        f"{(private[private.method == 'tuned'].verdict == 'refuted').sum()} of these claims are refuted by this audit",
    ]


def verdicts(joint: pd.DataFrame, canaries: pd.DataFrame, confidence: float) -> list[Verdict]:
    """On Algorithm 2, from :func:`joint_findings`' table, and on this package's own claims, from both tables."""
    paper = joint[(joint.noise == "independent") & (joint.counted == "independent")].iloc[0]
    own = joint[joint.counted == "same_batch"]
    private = canaries[np.isfinite(canaries.claimed)]
    wrong = int((own.verdict == "refuted").sum() + (private.verdict == "refuted").sum())
    return [
        Verdict(
            "Algorithm 2's count of a probe step, as independent batches, bounds epsilon",
            "contradicted" if paper.verdict == "refuted" else "reproduced",
            f"at least {paper.lower_bound:.2f} is found where {paper.claimed:.2f} is claimed, at {percent(confidence)} "
            "(noise by that count and PLD)",
        ),
        Verdict(
            "The default accounting of this package bounds epsilon (ours)",
            "contradicted" if wrong else "reproduced",
            f"{wrong} of {len(own) + len(private)} claims are refuted, which proves none of them",
        ),
    ]


def all_findings(table: pd.DataFrame) -> list[str]:
    """Of ``campaign.all_audits``: how many claims are refuted that should be, and that should not."""
    wrong = table.mechanism.str.contains("fault|noise independent, counted independent")
    refuted = table.verdict == "refuted"
    return [
        f"{len(table)} audits: of {wrong.sum()} claims that we know to be far too small {(wrong & refuted).sum()} are "
        f"refuted, and of {(~wrong & np.isfinite(table.claimed)).sum()} others {(~wrong & refuted).sum()}"
    ]
