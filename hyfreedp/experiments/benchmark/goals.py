"""What the package promises about its cost, and whether a record shows it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Goal:
    """An upper limit for a cost of ``contender`` relative to ``reference``.

    Attributes:
        contender, reference: names of contenders.
        quantity: "time" or "memory".
        limits: tuning -> largest ratio allowed.
    """

    text: str
    contender: str
    reference: str
    quantity: str
    limits: dict[str, float]


GOALS = (
    Goal("time, to a plain step", "ours", "plain", "time", {"full": 1.30, "biases": 1.03}),
    Goal("time, to Opacus ghost clipping", "ours", "opacus_ghost", "time", {"full": 0.65, "biases": 0.62}),
    Goal("time, to Opacus hooks", "ours", "opacus_hooks", "time", {"full": 0.85, "biases": 0.97}),
    Goal("peak memory, to a plain step", "ours", "plain", "memory", {"full": 1.15, "biases": 1.05}),
    Goal("time with HyFreeDP K = 1, to without", "ours_k1", "ours", "time", {"full": 1.50, "biases": 2.00}),
    Goal("time with HyFreeDP K = 5, to without", "ours_k5", "ours", "time", {"full": 1.10, "biases": 1.20}),
    Goal("time with HyFreeDP K = 10, to without", "ours_k10", "ours", "time", {"full": 1.05, "biases": 1.10}),
)


def measured_ratio(rows: pd.DataFrame, contender: str, reference: str, quantity: str) -> float:
    """Cost of one contender relative to another in the rows of one model and tuning; NaN if either is missing.

    For time it is the median of the rounds' ratios. They are recorded relative to "plain" and to "ours"; between "ours"
    and a third contender the inverse of the latter's ratio is the median of the inverse ratios (for an odd number of
    rounds exactly).
    """
    by_name = rows.set_index("contender")
    if not {contender, reference} <= set(by_name.index):
        return np.nan
    if quantity == "memory":
        return float(by_name.peak_mib[contender] / by_name.peak_mib[reference])
    if reference in ("plain", "ours"):
        return float(by_name[f"ratio_to_{reference}"][contender])
    return float(1 / by_name.ratio_to_ours[reference])


def judge(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per goal, model and tuning of a record, with its limit, what was measured and whether that is within.

    What was not measured, or failed, is left out.
    """
    judged = [
        {"goal": goal.text, "tuning": tuning, "model": model, "limit": limit, "measured": ratio, "met": ratio <= limit}
        for goal in GOALS
        for tuning, limit in goal.limits.items()
        for model, group in rows[rows.tuning == tuning].groupby("model", sort=False)
        if np.isfinite(ratio := measured_ratio(group, goal.contender, goal.reference, goal.quantity))
    ]
    return pd.DataFrame(judged, columns=["goal", "tuning", "model", "limit", "measured", "met"])


def summarise(judged: pd.DataFrame) -> pd.DataFrame:
    """One row per goal and tuning: the limit, the ratio of every model, and on how many of them it is met."""
    keys = ["goal", "tuning", "limit"]
    table = judged.pivot(index=keys, columns="model", values="measured")[list(judged.model.unique())]
    counts = judged.groupby(keys).met.agg(["sum", "size"])
    table["met"] = [f"{counts['sum'][key]} of {counts['size'][key]}" for key in table.index]
    return table.reindex(judged.set_index(keys).index.unique()).reset_index()


def missed_text(judged: pd.DataFrame) -> str:
    """How many goals of :func:`judge` are met, and which are not."""
    missed = [
        f"{row.goal}, {row.tuning}, {row.model}: {row.measured:.2f} > {row.limit:.2f}"
        for row in judged[~judged.met].itertuples()
    ]
    rest = f"Missed: {'; '.join(missed)}." if missed else "None missed."
    return f"{int(judged.met.sum())} of {len(judged)} met. {rest}"


def markdown(rows: pd.DataFrame) -> str:
    """A record as docs/results.md prints it: per goal the limit and the ratio of every model, in bold if above it."""
    table = summarise(judge(rows))
    models = [name for name in table.columns if name not in ("goal", "tuning", "limit", "met")]
    lines = [
        "| Ratio | Tuning | Goal | " + " | ".join(models) + " |",
        "| --- | --- | --- |" + " --- |" * len(models),
    ]
    for row in table.to_dict("records"):
        measured = [_cell(row[model], row["limit"]) for model in models]
        lines.append(f"| {row['goal']} | {row['tuning']} | {row['limit']:.2f} | " + " | ".join(measured) + " |")
    return "\n".join(lines)


def _cell(ratio: float, limit: float) -> str:
    if np.isnan(ratio):
        return ""
    return f"{ratio:.2f}" if ratio <= limit else f"**{ratio:.2f}**"
