"""Measures cases one after the other, as tidy rows."""

from __future__ import annotations

import gc
import platform
import resource
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from hyfreedp.checks import check_choice, check_count
from hyfreedp.experiments.benchmark.contenders import ALL_CONTENDERS, CONTENDERS, RUN, RUNS, Setup, Step
from hyfreedp.experiments.benchmark.measure import garbage_stays, peak_memory, reason, time_rounds
from hyfreedp.experiments.benchmark.workloads import MODELS, Shape, Tuning, Workload, make_workload
from hyfreedp.experiments.store.provenance import one_thread
from hyfreedp.pytorch.devices import CPU, backend, hardware, named_device, synchronize

PACKAGES = ("torch", "opacus", "timm", "transformers", "peft", "hyfreedp")
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


def measure(todo: Iterable[Case], *, device: str, rounds: int) -> pd.DataFrame:
    """Measure cases with a progress bar, on one thread; one row per case and contender.

    Raises:
        ValueError: bad ``device`` or ``rounds``.
    """
    where, rows = named_device(device), []
    check_count("rounds", rounds, 1)
    for case in (bar := tqdm(list(todo), unit="case")):
        bar.set_description(str(case))
        with one_thread(), garbage_stays():
            rows += measure_case(case, where, rounds)
    return pd.DataFrame(rows)


def measure_case(case: Case, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """The rows of one case: first the time of all contenders in turns, then the memory of each alone."""
    work, shape = make_workload(case.shape, case.tuning, device), case.shape
    common = {name: getattr(case, name) for name in ("model", "tuning", "varied", "value")}
    common |= {name: getattr(shape, name) for name in ("batch_size", "tokens", "width", "depth")}
    common |= {"parameters": sum(p.numel() for p in work.module.parameters())}
    common |= {"trainable": sum(p.numel() for p in work.trainable)} | environment(device)
    seconds, firsts, failed = _time(case, work, rounds)
    rows = []
    for name in case.contenders:
        row: dict[str, Any] = {"contender": name, "rounds": rounds} | _statistics(name, seconds)
        if name in seconds:
            if "plain" in seconds:
                row["first_to_plain"] = firsts[name] / float(np.median(seconds["plain"]))
            try:
                row["peak_mib"] = peak_memory(ALL_CONTENDERS[name], work, Setup())
                if device == CPU:
                    row["resident_mib"] = _resident_elsewhere(case, name)
            except Exception as error:
                failed[name] = reason(error)
            _free(device)
        row["failure"] = failed.get(name, "")
        rows.append(common | row)
    return rows


def _time(case: Case, work: Workload, rounds: int) -> tuple[dict[str, list[float]], dict[str, float], dict[str, str]]:
    """Seconds of each contender's steps and of its first, and why some failed."""
    device = work.inputs.device
    # Processor time, which other work on the machine hardly changes, where one thread computes.
    clock = time.process_time if device == CPU else time.perf_counter
    steps: dict[str, tuple[Step, int]] = {}
    firsts: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name in case.contenders:
        contender = ALL_CONTENDERS[name]
        try:
            step = contender.make(work.copy(), Setup())
            synchronize(device)
            started = clock()
            step()
            synchronize(device)
            firsts[name] = clock() - started
            step()
        except Exception as error:  # another library may refuse a model in any way; the record says how
            failed[name] = reason(error)
            _free(device)
        else:
            steps[name] = (step, contender.period)
    seconds, failed_later = time_rounds(steps, rounds, wait=partial(synchronize, device), clock=clock)
    steps.clear()
    _free(device)
    return seconds, firsts, failed | failed_later


def _resident_elsewhere(case: Case, name: str) -> float:
    """:func:`_resident` in a process of its own, forked from one that has imported this and done nothing."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_resident, case, name).result()


def _resident(case: Case, name: str) -> float:
    """Largest number of MiB of this process, as the system counts it, while it makes a contender and takes a few steps.

    Libraries are included, so it is asked in a process that has done nothing else.
    """
    with one_thread():
        step = ALL_CONTENDERS[name].make(make_workload(case.shape, case.tuning), Setup())
        for _ in range(4):
            step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure_runs(models: Sequence[str], *, rounds: int) -> pd.DataFrame:
    """Whole runs of :data:`RUN` steps in full tuning on the CPU, wiring, first step and checks included.

    Returns:
        A row for each model and contender of :data:`RUNS`: the statistics of :func:`measure`.
    """
    rows = []
    for model in tqdm(models, unit="model"):
        with one_thread(), garbage_stays():
            work = make_workload(MODELS[model], "full")
            steps = {name: (run.make(work, Setup()), 1) for name, run in RUNS.items()}
            seconds, failed = time_rounds(steps, rounds, clock=time.process_time)
            for name in RUNS:
                row = {"model": model, "contender": name, "steps": RUN, "rounds": rounds, **environment(CPU)}
                rows.append(row | _statistics(name, seconds) | {"failure": failed.get(name, "")})
    return pd.DataFrame(rows)


def _statistics(name: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Of one contender: seconds per step, and quartiles of the ratios to the references, round by round."""
    if (own := seconds.get(name)) is None:
        return {}
    row = {"seconds": float(np.median(own)), "seconds_min": min(own), "seconds_max": max(own)}
    for reference in _REFERENCES:
        if reference in seconds:
            lower, median, upper = np.quantile(np.divide(own, seconds[reference]), (0.25, 0.5, 0.75)).tolist()
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
