"""Time and peak memory of training steps, and time of whole runs."""

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

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler prints whenever it starts

MIB = 2**20
PACKAGES = ("torch", "opacus", "timm", "transformers", "peft", "hyfreedp")
_MEASURED = "measured steps"


def measure(case: Case, device: torch.device, rounds: int) -> pd.DataFrame:
    """One row per contender, on one thread: first all are timed in turns, then the memory of each is measured.

    If a contender raises an exception, ``failure`` has it. data/README.md describes the columns.
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
    """Seconds of each contender's first step; and seconds per step, a row for each round and a column for each.

    In a round each takes one period of steps, so that a slow phase of the machine affects all. Each round begins with
    another contender.
    """
    device = work.inputs.device
    # On a CPU, one thread's processor time, which other work on the machine hardly changes.
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
    """A whole run as one step: it makes model, optimizer and plan, takes all steps, and ends."""

    def run() -> None:
        step = CONTENDERS[name].make(work.copy(), Setup(steps=case.value))
        for _ in range(case.value):
            step()

    return run


@contextmanager
def _noting(failures: dict[str, str], name: str, device: torch.device) -> Iterator[None]:
    """A context whose exception is stored in ``failures``, as text: its traceback would keep a model in memory."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        failures[name] = f"{type(error).__name__}: {lines[0]}"[:200]
        gc.collect()
        if (module := backend(device)) is not None:
            module.empty_cache()


def _statistics(name: str, seconds: pd.DataFrame) -> dict[str, float]:
    """For one contender: seconds per step, and quartiles over rounds of its ratios to plain and to ours."""
    own = seconds[name]
    row = {"seconds": own.median(), "seconds_min": own.min(), "seconds_max": own.max()}
    for reference in ("plain", "ours"):
        if reference in seconds:
            ratio, quartiles = f"ratio_to_{reference}", (own / seconds[reference]).quantile([0.25, 0.5, 0.75])
            row |= dict(zip((f"{ratio}_q1", ratio, f"{ratio}_q3"), quartiles, strict=True))
    return row


def peak_memory(contender: Contender, work: Workload, setup: Setup) -> float:
    """Peak MiB of tensors during one period of steps, weights and optimizer state included.

    It is exact, as torch's allocator counts. The first step, which makes optimizer states and checks, is left out.
    """
    shared = sum(tensor.nbytes for tensor in work.frozen)
    grown = _peak_on_cpu if work.inputs.device == CPU else _peak_on_accelerator
    gc.collect()
    gc.disable()  # the time of a collection is random
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
    """:func:`_resident` in a new process, forked from one that has only imported this module."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_resident, case, name).result()


def _resident(case: Case, name: str) -> float:
    """Peak resident MiB of this process, libraries included, after making a contender and taking four steps.

    Call it in a process that has done nothing else.
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
