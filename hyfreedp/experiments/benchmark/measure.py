"""Seconds and peak memory of training steps."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hyfreedp.experiments.benchmark.contenders import Contender, Setup, Step
from hyfreedp.experiments.benchmark.workloads import Workload
from hyfreedp.pytorch.devices import CPU

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports its every start otherwise

MIB = 2**20
_MEASURED = "measured steps"


@contextmanager
def garbage_stays() -> Iterator[None]:
    """No automatic garbage collection meanwhile: it takes as long as a step, and would free what others had left."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_rounds(
    steps: Mapping[str, tuple[Step, int]],
    rounds: int,
    *,
    wait: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time several kinds of steps side by side: every round runs one period of each.

    What slows the machine for a while then slows all of them. Each round begins with another one.

    Args:
        steps: name -> the step and its period K.
        wait: waits for the device.
        clock: tells seconds.

    Returns:
        Name -> seconds per step, one number per round; and name -> the reason, for those whose step raised.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    failed: dict[str, str] = {}
    names = list(steps)
    for i in range(rounds):
        first = i % len(names) if names else 0
        for name in names[first:] + names[:first]:
            if name in failed:
                continue
            step, period = steps[name]
            wait()
            started = clock()
            try:
                for _ in range(period):
                    step()
                wait()
            except Exception as error:  # another library's step may fail in any way; the record says how
                failed[name] = reason(error)
                del seconds[name]
                continue
            seconds[name].append((clock() - started) / period)
    return seconds, failed


def peak_memory(contender: Contender, work: Workload, setup: Setup) -> float:
    """Largest number of MiB in tensors at any time during one period of steps, weights and optimizer state included.

    Counted by torch's allocator on every device, so it is exact. The first step, which sets up optimizer and checks, is
    left out. Call it without automatic garbage collection.
    """
    shared = sum(tensor.nbytes for tensor in work.frozen)
    grown = _peak_on_cpu if work.inputs.device == CPU else _peak_on_accelerator
    return (shared + grown(contender, work, setup)) / MIB


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
    return _peak_of_trace(events)


def _peak_of_trace(events: Sequence[dict]) -> int:
    """Bytes allocated at most within the measured steps, from a trace that begins before the first allocation."""
    start = next(event["ts"] for event in events if event["name"] == _MEASURED)
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda change: change[0])  # the allocator's own order where times are equal
    total = peak = 0
    for when, change in changes:
        total += change
        if when >= start:
            peak = max(peak, total)
    return peak


def reason(error: Exception) -> str:
    """What was raised, short enough for a table. Only this is kept: a traceback would keep a model's memory alive."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]
