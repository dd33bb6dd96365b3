"""For notebook 08: measurements as cacheable tables, the paper's table beside them, and its model of the cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from hyfreedp.experiments.benchmark.contenders import ALL_CONTENDERS

# Rows of Tab. "eff", as (model, tuning) in data/paper, and the case that stands for each on either device.
PAPER_CASES: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("Llama2-7B", "lora"): {"accelerator": ("llama2_7b", "lora"), "cpu": ("llama_d256", "lora")},
    ("GPT2", "full"): {"accelerator": ("gpt2", "full"), "cpu": ("gpt2_d256", "full")},
    ("Vit-base", "full"): {"accelerator": ("vit_base", "full"), "cpu": ("vit_d384", "full")},
    ("Vit-base", "bitfit"): {"accelerator": ("vit_base", "biases"), "cpu": ("vit_d384", "biases")},
    ("Vit-small", "full"): {"accelerator": ("vit_small", "full"), "cpu": ("vit_d192", "full")},
}
INTERVALS = (1, 5, 10)
DRAWN = ("opacus_hooks", "opacus_ghost", "ours")
GROWTH_CONTENDERS = ("plain", *DRAWN)
# A model, and the values that one dimension of its shape at a time takes.
_ON_CPU = {"batch_size": [4, 8, 16, 32, 64], "depth": [1, 2, 4, 8]}
_ON_CPU |= {"width": [96, 192, 384, 576], "tokens": [17, 65, 145, 257]}
_ON_GPU = {"batch_size": [8, 16, 32, 64, 128], "depth": [3, 6, 12, 24]}
_ON_GPU |= {"width": [192, 384, 768, 1152], "tokens": [50, 197, 401, 785]}
GROWTH: dict[str, tuple[str, dict[str, list[int]]]] = {"laptop": ("vit_d192", _ON_CPU), "gpu": ("vit_small", _ON_GPU)}


def relative(rows: pd.DataFrame, contenders: Sequence[str]) -> pd.DataFrame:
    """Time and peak memory of some contenders relative to the plain step of the same case, a line for each."""
    frame = rows.assign(time=rows.ratio_to_plain, memory=memory_ratio(rows))
    frame = frame[frame.contender.isin(contenders)].replace({"contender": labels()})
    case = ["model", "tuning", "varied", "value", "contender"]
    return frame.melt(case, ["time", "memory"], var_name="quantity", value_name="ratio").dropna(subset="ratio")


def labels() -> dict[str, str]:
    """Of all contenders, by name."""
    return {name: contender.label for name, contender in ALL_CONTENDERS.items()}


def memory_ratio(rows: pd.DataFrame) -> pd.Series:
    """Peak memory of every row relative to the plain step of the same case; NaN where either is missing."""
    columns = (rows[name].map(str) for name in ("model", "tuning", "varied", "value"))
    keys = pd.Series(list(zip(*columns, strict=True)), rows.index)
    plain = rows.contender == "plain"
    return rows.peak_mib / keys.map(dict(zip(keys[plain], rows.peak_mib[plain], strict=True)))


def beside_paper(paper: pd.DataFrame, measured: Mapping[str, pd.DataFrame | None], device: str) -> pd.DataFrame:
    """Tab. "eff" as ratios to the same private step without HyFreeDP, ours beside the paper's.

    Args:
        paper: table "eff" of :mod:`hyfreedp.experiments.tables.paper`.
        measured: title of a column -> rows of a record or measurement.
        device: of these, "cpu" or "accelerator".
    """
    ratios = paper[paper.metric == "ratio"].set_index(["model", "tuning", "method"]).value
    rows = []
    for (name, tuning), stand_ins in PAPER_CASES.items():
        model, ours = stand_ins[device]
        for k in INTERVALS:
            row: dict[str, Any] = {"paper_model": name, "model": model, "tuning": tuning, "interval": k}
            row["paper"] = float(ratios[name, tuning, f"K={k}"])
            for title, frame in measured.items():
                if frame is not None:
                    found = frame[(frame.model == model) & (frame.tuning == ours) & (frame.contender == f"ours_k{k}")]
                    row[title] = found.ratio_to_ours.mean()
            rows.append(row | {"theory": interval_ratio(k, 1 / 3 if tuning == "full" else 1 / 2)})
    columns = ["paper_model", "model", "tuning", "interval", "paper", *measured, "theory"]
    return pd.DataFrame(rows).reindex(columns=columns)


def interval_ratio(interval: float, forward_share: float) -> float:
    """Cost of a step with a probe every K steps, relative to one without: 1 + 2 f / K.

    The probe's two forward passes are all that is added (section "Efficiency of algorithm"), f being the share of one
    in the step without probe. With a backward pass of two forward ones, f = 1/3, and 3 units become 3 + 2/K.
    """
    return 1 + 2 * forward_share / interval


def forward_share(ratio: float, interval: int = 1) -> float:
    """The f that a measured ratio at K = ``interval`` implies; inverse of :func:`interval_ratio`."""
    return (ratio - 1) * interval / 2
