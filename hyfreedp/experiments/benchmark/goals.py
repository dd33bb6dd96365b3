"""What the package promises about its cost, and whether a record shows it."""

from __future__ import annotations

import numpy as np
import pandas as pd

from hyfreedp.experiments.benchmark.contenders import ALL_CONTENDERS, RUNS

# Upper limits: what is compared, contender, reference, limit by tuning.
GOALS: tuple[tuple[str, str, str, dict[str, float]], ...] = (
    ("time, to a plain step", "ours", "plain", {"full": 1.30, "biases": 1.03}),
    ("time, to Opacus ghost clipping", "ours", "opacus_ghost", {"full": 0.65, "biases": 0.62}),
    ("time, to Opacus hooks", "ours", "opacus_hooks", {"full": 0.85, "biases": 0.97}),
    ("time with HyFreeDP K = 1, to without", "ours_k1", "ours", {"full": 1.50, "biases": 2.00}),
    ("time with HyFreeDP K = 5, to without", "ours_k5", "ours", {"full": 1.10, "biases": 1.20}),
    ("time with HyFreeDP K = 10, to without", "ours_k10", "ours", {"full": 1.05, "biases": 1.10}),
)


def measured_ratio(rows: pd.DataFrame, contender: str, reference: str) -> float:
    """Time of one contender relative to another in the rows of one model and tuning; NaN if either is missing.

    The median of the rounds' ratios, which are recorded relative to "plain" and "ours"; else the inverse of that of
    "ours" to the reference.
    """
    by_name = rows.set_index("contender")
    if not {contender, reference} <= set(by_name.index):
        return np.nan
    if reference in ("plain", "ours"):
        return float(by_name[f"ratio_to_{reference}"][contender])
    return float(1 / by_name.ratio_to_ours[reference])


def markdown(rows: pd.DataFrame) -> str:
    """A record as docs/results.md prints it: per goal the limit and the ratio of every model, in bold if above it.

    What was not measured, or failed, is left out.
    """
    by_case = dict(list(rows.groupby(["tuning", "model"], sort=False)))
    models = list(rows.model.unique())
    lines = [f"| Ratio | Tuning | Goal | {' | '.join(models)} |", "| --- | --- | --- |" + " --- |" * len(models)]
    for goal, contender, reference, limits in GOALS:
        for tuning, limit in limits.items():
            cells = []
            for model in models:
                case = by_case.get((tuning, model))
                ratio = np.nan if case is None else measured_ratio(case, contender, reference)
                text = f"**{ratio:.2f}**" if ratio > limit else f"{ratio:.2f}"
                cells.append("" if np.isnan(ratio) else text)
            if any(cells):
                lines.append(f"| {goal} | {tuning} | {limit:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def peers(rows: pd.DataFrame) -> str:
    """All models with all parameters trained, as docs/results.md prints them: plain steps that each contender takes.

    Ours is bold where it is the quickest private one, and is followed by its first step and by its process's memory.
    """
    rows = rows[rows.tuning == "full"]
    shown = [name for name in ("opacus_hooks", "opacus_ghost", "opake", "fastdp") if name in set(rows.contender)]
    times = rows.pivot(index="model", columns="contender", values="ratio_to_plain").loc[rows.model.unique()]
    ours = rows[rows.contender == "ours"].set_index("model")
    plain = rows[rows.contender == "plain"].set_index("model")
    titles = [*(ALL_CONTENDERS[name].label for name in shown), "ours", "its first step", "memory of its process"]
    lines = [f"| Model, batch | {' | '.join(titles)} |", "| --- |" + " --- |" * len(titles)]
    for model, own in times.iterrows():
        quickest = own.ours <= own[shown].min()
        cells = [f"{own[name]:.2f}" if np.isfinite(own[name]) else "fails" for name in shown]
        cells.append(f"**{own.ours:.2f}**" if quickest else f"{own.ours:.2f}")
        memory = ours.resident_mib[model] / plain.resident_mib[model]
        cells += [f"{ours.first_to_plain[model]:.1f}", f"{memory:.2f}"]
        lines.append(f"| {model}, {ours.batch_size[model]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def runs(rows: pd.DataFrame) -> str:
    """A record of whole runs, as docs/results.md prints it: plain runs that each takes."""
    names = [name for name in RUNS if name != "plain"]
    times = rows.pivot(index="model", columns="contender", values="ratio_to_plain").loc[rows.model.unique(), names]
    lines = [f"| 100 steps of | {' | '.join(RUNS[name].label for name in names)} |", "| --- |" + " --- |" * len(names)]
    lines += [f"| {model} | {' | '.join(f'{ratio:.2f}' for ratio in own)} |" for model, own in times.iterrows()]
    return "\n".join(lines)
