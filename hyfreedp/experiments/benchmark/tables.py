"""For notebook 08: measurements as cacheable tables, the paper's table beside them, and its model of the cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hyfreedp.experiments.benchmark.contenders import CONTENDERS
from hyfreedp.experiments.benchmark.record import Case, growth_cases, measure
from hyfreedp.experiments.benchmark.workloads import Tuning
from hyfreedp.experiments.store.cache import cached

# Rows of Tab. "eff", as (model, tuning) in data/paper, and the case that stands for each on either device.
PAPER_CASES: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("Llama2-7B", "lora"): {"accelerator": ("llama2_7b", "lora"), "cpu": ("llama_d256", "lora")},
    ("GPT2", "full"): {"accelerator": ("gpt2", "full"), "cpu": ("gpt2_d256", "full")},
    ("Vit-base", "full"): {"accelerator": ("vit_base", "full"), "cpu": ("vit_d384", "full")},
    ("Vit-base", "bitfit"): {"accelerator": ("vit_base", "biases"), "cpu": ("vit_d384", "biases")},
    ("Vit-small", "full"): {"accelerator": ("vit_small", "full"), "cpu": ("vit_d192", "full")},
}
INTERVALS = (1, 5, 10)


def efficiency(
    *, model: str, tuning: Tuning, contenders: Sequence[str], rounds: int, threads: int, device: str
) -> pd.DataFrame:
    """Measure one case; see :func:`~hyfreedp.experiments.benchmark.record.measure`."""
    return measure([Case(model, tuning, tuple(contenders))], device=device, rounds=rounds, threads=threads)


def efficiency_growth(
    *, model: str, varied: str, values: Sequence[int], contenders: Sequence[str], rounds: int, threads: int, device: str
) -> pd.DataFrame:
    """Measure how the cost of full tuning grows with one dimension of the model's shape."""
    return measure(growth_cases(model, {varied: values}, contenders), device=device, rounds=rounds, threads=threads)


def measure_once(folder: Path, selection: Iterable[tuple[str, str]], **settings: Any) -> pd.DataFrame:
    """:func:`efficiency` of several pairs (model, tuning), each read from ``folder`` if it was measured before."""
    return pd.concat(
        [cached(folder, efficiency, model=model, tuning=tuning, **settings) for model, tuning in selection],
        ignore_index=True,
    )


def measure_growth_once(folder: Path, model: str, grid: Mapping[str, list[int]], **settings: Any) -> pd.DataFrame:
    """:func:`efficiency_growth` along several dimensions, each read from ``folder`` if it was measured before."""
    return pd.concat(
        [
            cached(folder, efficiency_growth, model=model, varied=varied, values=values, **settings)
            for varied, values in grid.items()
        ],
        ignore_index=True,
    )


def measure_profile(folder: Path, profile: str, *, recorded: bool, **settings: Any) -> pd.DataFrame:
    """What notebook 08 measures itself: the stand-ins of ``PAPER_CASES`` on its device, in profile smoke a tiny model.

    Args:
        folder: of earlier measurements.
        profile: of the notebook.
        recorded: whether a record has all of it; periods of ten steps are then not measured again on a CPU, where they
            take half of all the time.
        **settings: ``rounds``, ``threads`` and ``device``.
    """
    device = settings["device"]
    selection = [("tiny", "full"), ("tiny", "biases")]
    if profile != "smoke":
        selection = [stand_ins[device] for stand_ins in PAPER_CASES.values()]
    contenders = [name for name in CONTENDERS if name != "ours_k10" or not recorded or device != "cpu"]
    return measure_once(folder, selection, contenders=contenders, **settings)


def measure_profile_growth(folder: Path, profile: str, **settings: Any) -> pd.DataFrame:
    """The same for the growth of the cost, on one vision transformer."""
    base, sizes = {
        "smoke": ("tiny", {"batch_size": [2, 4], "tokens": [5]}),
        "laptop": ("vit_d192", {"batch_size": [4, 16], "depth": [1, 4], "width": [96, 192], "tokens": [17, 65, 145]}),
    }.get(profile, ("vit_small", {"batch_size": [16, 64], "depth": [3, 12], "width": [192, 384], "tokens": [50, 197]}))
    contenders = ["plain", "opacus_hooks", "opacus_ghost", "ours"]
    return measure_growth_once(folder, base, sizes, contenders=contenders, **settings)


def first_known(path: Path, *tables: pd.DataFrame | None) -> pd.DataFrame:
    """The first table that is not None.

    Raises:
        RuntimeError: all are; ``path`` is that of the missing record.
    """
    for table in tables:
        if table is not None:
            return table
    raise RuntimeError(f"no accelerator here, and no record {path}: run the benchmark with --device accelerator")


def load(path: Path) -> pd.DataFrame | None:
    """A record written by the benchmark, or None if there is none."""
    return pd.read_csv(path) if path.exists() else None


def beside_paper(paper: pd.DataFrame, measured: Mapping[str, pd.DataFrame | None]) -> pd.DataFrame:
    """Tab. "eff" as ratios to the same private step without HyFreeDP, ours beside the paper's.

    Args:
        paper: table "eff" of :mod:`hyfreedp.experiments.tables.paper`.
        measured: title of a column -> rows of a record or measurement.

    Returns:
        One row per row of the table and interval: ``paper_model``, ``tuning``, ``interval``, ``paper``, and one column
        per title, NaN where that did not measure the case.
    """
    ratios = paper[paper.metric == "ratio"].set_index(["model", "tuning", "method"]).value
    rows = []
    for (name, tuning), stand_ins in PAPER_CASES.items():
        for interval in INTERVALS:
            row = {"paper_model": name, "tuning": tuning, "interval": interval}
            row["paper"] = float(ratios[name, tuning, f"K={interval}"])
            for title, frame in measured.items():
                row[title] = float("nan") if frame is None else _ratio(frame, stand_ins, interval)
            rows.append(row)
    return pd.DataFrame(rows)


def _ratio(frame: pd.DataFrame, stand_ins: Mapping[str, tuple[str, str]], interval: int) -> float:
    model, tuning = stand_ins[str(frame.device.iloc[0])]
    found = frame[(frame.model == model) & (frame.tuning == tuning) & (frame.contender == f"ours_k{interval}")]
    return float(found.ratio_to_ours.iloc[0]) if len(found) else float("nan")


def memory_ratio(rows: pd.DataFrame) -> pd.Series:
    """Peak memory of every row relative to the plain step of the same case; NaN where either is missing."""
    columns = (rows[name].map(str) for name in ("model", "tuning", "varied", "value"))
    keys = pd.Series(list(zip(*columns, strict=True)), rows.index)
    plain = rows.contender == "plain"
    return rows.peak_mib / keys.map(dict(zip(keys[plain], rows.peak_mib[plain], strict=True)))


def interval_ratio(interval: float, forward_share: float) -> float:
    """Cost of a step with a probe every K steps, relative to one without: 1 + 2 f / K.

    The probe's two forward passes are all that is added (section "Efficiency of algorithm"). With a forward pass of one
    unit and a backward pass of two, f = 1/3, and 3 units become 3 + 2/K.

    Args:
        interval: K.
        forward_share: f, the share of a forward pass in the step without probe.
    """
    return 1 + 2 * forward_share / interval


def forward_share(ratio: float, interval: int = 1) -> float:
    """The f that a measured ratio at K = ``interval`` implies; inverse of :func:`interval_ratio`."""
    return (ratio - 1) * interval / 2
