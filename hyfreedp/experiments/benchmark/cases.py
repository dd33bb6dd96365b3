"""Measures cases one after the other, as tidy rows."""

from __future__ import annotations

import gc
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from hyfreedp.experiments.benchmark.contenders import ALL_CONTENDERS, CONTENDERS, Setup, Step
from hyfreedp.experiments.benchmark.measure import garbage_stays, peak_memory, ratio_quartiles, reason, time_rounds
from hyfreedp.experiments.benchmark.workloads import MODELS, Shape, Tuning, Workload, make_workload
from hyfreedp.running.checks import check_choice
from hyfreedp.running.devices import backend, hardware, named_device, synchronize

PACKAGES = ("torch", "opacus", "timm", "transformers", "peft", "hyfreedp")
_WARM_UP_STEPS = 2  # the first sets up the optimizer's state and our engine's check against autograd
_REFERENCES = ("plain", "ours")


@dataclass(frozen=True)
class Case:
    """One model with one choice of trainable parameters, trained by several contenders side by side.

    ``varied`` is a field of the model's shape that gets another ``value``, where growth is measured.
    """

    model: str
    tuning: Tuning
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    varied: str = ""
    value: int = 0

    def __post_init__(self) -> None:
        check_choice("models", self.model, MODELS)
        check_choice("tunings", self.tuning, Tuning)
        for name in self.contenders:
            check_choice("contenders", name, ALL_CONTENDERS)

    @property
    def shape(self) -> Shape:
        shape = MODELS[self.model]
        varied: dict[str, Any] = {self.varied: self.value} if self.varied else {}
        return replace(shape, **varied)

    def __str__(self) -> str:
        return f"{self.model} {self.tuning}" + (f" {self.varied} {self.value}" if self.varied else "")


def cases(
    models: Sequence[str], tunings: Sequence[str] = get_args(Tuning), contenders: Sequence[str] = tuple(CONTENDERS)
) -> list[Case]:
    """Every model with every tuning that it allows."""
    for name in models:
        check_choice("models", name, MODELS)
    for name in tunings:
        check_choice("tunings", name, Tuning)
    found = [Case(m, t, tuple(contenders)) for m in models for t in MODELS[m].tunings if t in tunings]
    if not found:
        raise ValueError(f"none of the models {', '.join(models)} can be trained by {', '.join(tunings)}")
    return found


def growth_cases(model: str, grid: Mapping[str, Sequence[int]], contenders: Sequence[str]) -> list[Case]:
    """Full tuning of a model of which one dimension at a time takes the values of ``grid``."""
    return [Case(model, "full", tuple(contenders), varied, n) for varied, values in grid.items() for n in values]


def measure(todo: Iterable[Case], *, device: str, rounds: int, threads: int) -> pd.DataFrame:
    """Measure cases with a progress bar; one row per case and contender.

    Raises:
        ValueError: bad ``device``, ``rounds`` or ``threads``.
    """
    where = named_device(device)
    for name, number in (("rounds", rounds), ("threads", threads)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    rows: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for case in (bar := tqdm(list(todo), unit="case")):
        bar.set_description(str(case))
        with garbage_stays():
            rows += measure_case(case, where, rounds)
    torch.set_num_threads(before)
    return pd.DataFrame(rows)


def measure_case(case: Case, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """The rows of one case: first the time of all contenders in turns, then the memory of each alone."""
    work, shape = make_workload(case.shape, case.tuning, device), case.shape
    common = {name: getattr(case, name) for name in ("model", "tuning", "varied", "value")}
    common |= {name: getattr(shape, name) for name in ("batch_size", "tokens", "width", "depth")}
    common |= {
        "parameters": sum(p.numel() for p in work.module.parameters()),
        "trainable": sum(p.numel() for p in work.trainable),
    } | environment(device)
    seconds, failed = _time(case, work, rounds)
    rows = []
    for name in case.contenders:
        row: dict[str, Any] = {"contender": name, "rounds": rounds}
        if name in seconds:
            row |= _statistics(name, seconds)
            try:
                row["peak_mib"] = peak_memory(ALL_CONTENDERS[name], work, Setup())
            except Exception as error:
                failed[name] = reason(error)
            _free(device)
        row["failure"] = failed.get(name, "")
        rows.append(common | row)
    return rows


def _time(case: Case, work: Workload, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    device = work.inputs.device
    steps: dict[str, tuple[Step, int]] = {}
    failed: dict[str, str] = {}
    for name in case.contenders:
        contender = ALL_CONTENDERS[name]
        try:
            step = contender.make(work.copy(), Setup())
            for _ in range(_WARM_UP_STEPS):
                step()
        except Exception as error:  # another library may refuse a model in any way; the record says how
            failed[name] = reason(error)
            _free(device)
        else:
            steps[name] = (step, contender.period)
    seconds, failed_later = time_rounds(steps, rounds, wait=partial(synchronize, device))
    steps.clear()
    _free(device)
    return seconds, failed | failed_later


def _statistics(name: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    own = seconds[name]
    row = {"seconds": float(np.median(own)), "seconds_min": min(own), "seconds_max": max(own)}
    for reference in _REFERENCES:
        if reference in seconds:
            lower, median, upper = ratio_quartiles(own, seconds[reference])
            ratio = f"ratio_to_{reference}"
            row |= {f"{ratio}_q1": lower, ratio: median, f"{ratio}_q3": upper}
    return row


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, and the day."""
    return {
        "device": device.type,
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "date": datetime.now(UTC).date().isoformat(),
    }


def _free(device: torch.device) -> None:
    gc.collect()
    if (module := backend(device)) is not None:
        module.empty_cache()
