"""What learning the rate costs, all told: time, memory and budget of whole runs beside the same run at a fixed rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from hyfreedp import PRESETS, HyFreeDPOptimizer, Preset
from hyfreedp.accounting import PrivacyLedger
from hyfreedp.accounting.composition import shares
from hyfreedp.devices import named_device, synchronize
from hyfreedp.experiments.baselines.line_search import LINE_SEARCH
from hyfreedp.experiments.benchmark.contenders import Contender, Setup, Step, optimizer_of, private_step
from hyfreedp.experiments.benchmark.measure import garbage_stays, peak_memory, ratio_quartiles, time_rounds
from hyfreedp.experiments.benchmark.record import environment, limited_threads
from hyfreedp.experiments.benchmark.workloads import MODELS, Workload, make_workload
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.tables.image_classification import paired
from hyfreedp.experiments.tables.plan import ROWS
from hyfreedp.records import VoteResult
from hyfreedp.votes import VotedRate

STEPS = 30  # of a run: as short as the shortest of the accuracy tables, in which what happens once weighs most
MEMORY_STEPS = 10  # in which each rule has everything in memory that it ever has
REFERENCE = "fixed"
LOST = VoteResult(margin=-1.0, margin_std=0.0, needed=0.0, lost=True)
PRESETS_MEASURED = {
    REFERENCE: PRESETS["fixed"],
    "hyfreedp_robust": PRESETS["robust"],
    "hyfreedp_paper": PRESETS["paper"],
    "line_search": LINE_SEARCH,
}


def measure_learning(
    models: Sequence[str], *, device: str, rounds: int, threads: int, steps: int = STEPS
) -> pd.DataFrame:
    """Whole runs on one batch with every parameter trained, interleaved in rounds.

    The run of preset robust is a dear one: it loses its opening vote and its last review, whatever the records say, so
    that two gradients are taken again.

    Returns:
        One row per ``model`` and ``method``: ``seconds`` of a run (median), the quartiles of the ``ratio`` to a fixed
        rate, ``peak_mib`` and ``copies`` (how many more copies of the trained weights are in memory than at a fixed
        rate), and ``budget_percent``, the share of epsilon that the gradients leave to the rate.
    """
    with limited_threads(threads):
        rows = [
            row
            for model in tqdm(models, "learning the rate", unit="model")
            for row in _rows(model, named_device(device), rounds, steps)
        ]
    return pd.DataFrame(rows)


def _rows(model: str, device: torch.device, rounds: int, steps: int) -> list[dict[str, Any]]:
    rows = []
    shape = replace(MODELS[model], batch_size=min(MODELS[model].batch_size, 8))
    runs, budget, peaks = {}, {}, {}
    for method, preset in PRESETS_MEASURED.items():

        def make(work: Workload, setup: Setup, steps: int = steps, preset: Preset = preset) -> Step:
            return _dear(private_step(work, setup, preset=preset, steps=steps))

        step = make(make_workload(shape, "full", device), Setup())
        optimizer = optimizer_of(step)
        parts = shares(optimizer.split)
        budget[method] = 100 * (1 - parts["gradients"] / parts["together"])
        runs[method] = partial(_run, optimizer, step, copy.deepcopy(optimizer.state_dict()))
        whole = Contender(method, partial(make, steps=MEMORY_STEPS), period=MEMORY_STEPS - 1)
        with garbage_stays():
            peaks[method] = peak_memory(whole, make_workload(shape, "full", device), Setup())
    with garbage_stays():
        for run in runs.values():
            run()
        wait = partial(synchronize, device)
        seconds, failed = time_rounds({name: (run, 1) for name, run in runs.items()}, rounds, wait=wait)
    assert not failed, failed
    trained = sum(p.nbytes for p in make_workload(shape, "full", device).trainable) / 2**20
    for method, times in seconds.items():
        lower, middle, upper = ratio_quartiles(times, seconds[REFERENCE])
        row = {"model": model, "method": method, "steps": steps, "batch_size": shape.batch_size}
        row |= {"seconds": float(np.median(times)), "ratio_q1": lower, "ratio": middle, "ratio_q3": upper}
        row |= {"peak_mib": peaks[method], "copies": (peaks[method] - peaks[REFERENCE]) / trained}
        rows.append(row | {"budget_percent": budget[method], "rounds": rounds} | environment(device))
    return rows


def _dear(step: Step) -> Step:
    """The step of a run that loses its first and its last vote, whatever the records say."""
    optimizer = optimizer_of(step)
    if isinstance(optimizer.rate_learner, VotedRate):
        ends = {optimizer.split.vote_steps[0], optimizer.split.vote_steps[-1]}
        optimizer.rate_learner.count = (  # type: ignore[method-assign]
            lambda margin, margin_std: replace(LOST, lost=optimizer.ledger.steps in ends)
        )
    return step


def _run(optimizer: HyFreeDPOptimizer, step: Step, start: Mapping[str, Any]) -> None:
    """A run from its first state, with an account of its own: it may round otherwise each time, on an accelerator."""
    optimizer.ledger = PrivacyLedger(optimizer.split)
    optimizer.load_state_dict(copy.deepcopy(start))
    while optimizer.steps_left:
        step()


STYLES = {f"hyfreedp_{name}": plots.STYLES[name] for name in ("robust", "paper")}
STYLES |= {name: plots.STYLES[name] for name in ("line_search", "reference")}
_OTHER: dict[str, Any] = {"color": "#7F7F7F", "marker": "o"}


def costs(measured: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """What every way to get a rate costs, and what it brings; ways whose number of runs is random are left out.

    Args:
        measured: of :func:`measure_learning`.
        rows: numbers of the accuracy tables, see :func:`hyfreedp.experiments.tables.image_classification.numbers`.

    Returns:
        One row per name in ``ROWS`` (the index): ``time`` of the training, in runs at a fixed rate, ``percent`` of
        epsilon for the rate, points to the best grid search (``gap``) with its interval ``low`` to ``high``, NaN for a
        single place, and whether its time is ``measured``.
    """
    ratio = measured.groupby("method").ratio.mean()
    share = measured.groupby("method").budget_percent.mean()
    private, found = rows[np.isfinite(rows.epsilon)], {}
    for name, row in ROWS.items():
        if row.search != "random":
            gap = paired(private, name)
            found[name] = {
                "time": ratio.get(name, 1.0) + (len(row.rates) if len(row.rates) > 1 else 0),
                "percent": share.get(name, 100 * (1 - row.share)),
                "gap": gap["mean"],
                "low": gap["low"],
                "high": gap["high"],
                "measured": name in share,
            }
    return pd.DataFrame.from_dict(found, orient="index")


def draw(found: pd.DataFrame) -> Figure:
    """Accuracy against what it costs to have a rate: training time, then share of the budget.

    Methods in ``STYLES`` stand out, others are grey with a label for each kind; filled where epsilon covers the choice.

    Args:
        found: of :func:`costs`.
    """
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.2), sharey=True)
    for name, cost in found.iterrows():
        row = ROWS[str(name)]
        look = STYLES.get(str(name), _OTHER)
        other = "other, without a search" if row.covered else "a search, beside epsilon"
        label = row.title if name in STYLES else other
        bars = None if math.isnan(cost.low) else [[cost.gap - cost.low], [cost.high - cost.gap]]
        style: dict[str, Any] = {"color": look["color"], "marker": look["marker"], "linestyle": "none"}
        style["markerfacecolor"] = look["color"] if row.covered else "white"
        for axis, value in zip(axes, (cost.time, cost.percent), strict=True):
            known = label in axis.get_legend_handles_labels()[1]
            axis.errorbar(value, cost.gap, yerr=bars, label=None if known else label, **style)
    axes[0].set(xscale="log", xlabel="training, in runs at a fixed rate", ylabel="points to the best grid search")
    axes[1].set(xlabel=r"share of $\varepsilon$ for the rate (%)")
    plots.shared_legend(figure, axes[:1], loc="outside right center", fontsize="small")
    return figure


def findings(found: pd.DataFrame, measured: pd.DataFrame) -> list[str]:
    """What :func:`draw` shows, a line per method that was measured, and the cost of preset robust on every model."""
    return [
        f"{ROWS[str(name)].title}: {row.time:.2f} times the time, {row.percent:.1f} % of epsilon, {row.gap:+.1f} points"
        for name, row in found[found.measured].iterrows()
    ] + [
        f"Preset robust on {row.model}: {row.ratio:.2f} times the time, {row.copies:.1f} copies of the trained weights "
        "more"
        for row in measured[measured.method == "hyfreedp_robust"].itertuples()
    ]
