"""Seconds and peak memory of training steps, and of whole runs."""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from timeit import timeit
from typing import Any

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import benchmark

from hyfreedp.experiments.benchmark.cases import Case
from hyfreedp.experiments.benchmark.contenders import CONTENDERS, Contender, Setup, Step
from hyfreedp.experiments.benchmark.workloads import Workload, make_workload
from hyfreedp.experiments.store.provenance import one_thread
from hyfreedp.pytorch.devices import CPU, backend, hardware

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports its every start otherwise

MIB = 2**20
PACKAGES = ("torch", "opacus", "timm", "transformers", "peft", "hyfreedp")
_MEASURED = "measured steps"


def measure(case: Case, device: torch.device, rounds: int) -> pd.DataFrame:
    """A row for each contender of a case, on one thread: first the time of all in turns, then the memory of each alone.

    A contender that fails, as another library's may in any way, has the reason in ``failure``. The columns are
    described in data/README.md.
    """
    with one_thread():
        work, failures = make_workload(case.shape, case.tuning, device), dict.fromkeys(case.contenders, "")
        firsts, seconds = _time_in_turns(case, work, rounds, failures)
        common: dict[str, Any] = {**case.key}
        common |= {name: getattr(case.shape, name) for name in ("batch_size", "tokens", "width", "depth")}
        common |= {"parameters": sum(p.numel() for p in work.module.parameters())}
        common |= {"trainable": sum(p.numel() for p in work.trainable)} | _environment(device)
        rows = []
        for name in case.contenders:
            row = common | {"contender": name, "rounds": rounds}
            if not failures[name]:
                row |= _statistics(name, seconds)
                if "plain" in seconds:
                    row["first_to_plain"] = firsts[name] / seconds["plain"].median()
            if not failures[name] and not case.whole_run:
                with _noting(failures, name, device):
                    row["peak_mib"] = peak_memory(CONTENDERS[name], work, Setup())
                    if device == CPU:
                        row["resident_mib"] = _resident_elsewhere(case, name)
            rows.append(row | {"failure": failures[name]})
    return pd.DataFrame(rows)


def _time_in_turns(
    case: Case, work: Workload, rounds: int, failures: dict[str, str]
) -> tuple[dict[str, float], pd.DataFrame]:
    """Seconds of each contender's first step; and seconds per step in every round, a column for each.

    In a round each takes one period of its steps; what slows the machine for a while then slows all of them. Each round
    begins with another one.
    """
    device = work.inputs.device
    # Processor time, which other work on the machine hardly changes, where one thread computes.
    clock = time.process_time if device == CPU else benchmark.timer
    steps: dict[str, Step] = {}
    firsts: dict[str, float] = {}
    for name in case.contenders:
        with _noting(failures, name, device):
            step = _whole_run(case, name, work) if case.whole_run else CONTENDERS[name].make(work.copy(), Setup())
            firsts[name] = timeit(step, timer=clock, number=1)
            steps[name] = step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    turns = deque(steps)
    for _ in range(rounds):
        for name in turns:
            if not failures[name]:
                period = CONTENDERS[name].period
                with _noting(failures, name, device):
                    seconds[name].append(timeit(steps[name], timer=clock, number=period) / period)
        turns.rotate(-1)
    return firsts, pd.DataFrame({name: own for name, own in seconds.items() if not failures[name]})


def _whole_run(case: Case, name: str, work: Workload) -> Step:
    """A run as one step: it makes all that it needs, first step and checks included, and ends."""

    def run() -> None:
        step = CONTENDERS[name].make(work.copy(), Setup(steps=case.value))
        for _ in range(case.value):
            step()

    return run


@contextmanager
def _noting(failures: dict[str, str], name: str, device: torch.device) -> Iterator[None]:
    """What is raised ends the block and is noted. Only words are: a traceback would keep a model's memory alive."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        failures[name] = f"{type(error).__name__}: {lines[0]}"[:200]
        gc.collect()
        if (module := backend(device)) is not None:
            module.empty_cache()


def _statistics(name: str, seconds: pd.DataFrame) -> dict[str, float]:
    """Of one contender: seconds per step, and quartiles of the ratios to the references, round by round."""
    own = seconds[name]
    row = {"seconds": own.median(), "seconds_min": own.min(), "seconds_max": own.max()}
    for reference in ("plain", "ours"):
        if reference in seconds:
            ratio, quartiles = f"ratio_to_{reference}", (own / seconds[reference]).quantile([0.25, 0.5, 0.75])
            row |= dict(zip((f"{ratio}_q1", ratio, f"{ratio}_q3"), quartiles, strict=True))
    return row


def peak_memory(contender: Contender, work: Workload, setup: Setup) -> float:
    """Largest number of MiB in tensors at any time during one period of steps, weights and optimizer state included.

    Counted by torch's allocator on every device, so it is exact. The first step, which sets up optimizer and checks, is
    left out.
    """
    shared = sum(tensor.nbytes for tensor in work.frozen)
    grown = _peak_on_cpu if work.inputs.device == CPU else _peak_on_accelerator
    gc.collect()
    gc.disable()  # when it is collected is chance
    try:
        return (shared + grown(contender, work, setup)) / MIB
    finally:
        gc.enable()


def _peak_on_accelerator(contender: Contender, work: Workload, setup: Setup) -> int:
    device = work.inputs.device
    allocator = torch.get_device_module(device)
    before = allocator.memory_allocated(device)
    step = contender.make(work.copy(), setup)
    step()
    allocator.reset_peak_memory_stats(device)
    for _ in range(contender.period):
        step()
    return allocator.max_memory_allocated(device) - before


def _peak_on_cpu(contender: Contender, work: Workload, setup: Setup) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step = contender.make(work.copy(), setup)
        step()
        with record_function(_MEASURED):
            for _ in range(contender.period):
                step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    start = next(event["ts"] for event in events if event["name"] == _MEASURED)
    changes = [event for event in events if event["name"] == "[memory]"]
    first = min(changes, key=lambda change: change["ts"])["args"]
    before = first["Total Allocated"] - first["Bytes"]
    return max(change["args"]["Total Allocated"] for change in changes if change["ts"] >= start) - before


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
        step = CONTENDERS[name].make(make_workload(case.shape, case.tuning), Setup())
        for _ in range(4):
            step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _environment(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, and the day."""
    return {
        "device": device.type,
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "date": datetime.now(UTC).date().isoformat(),
    }
