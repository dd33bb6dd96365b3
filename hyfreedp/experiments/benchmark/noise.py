"""What noise costs: ours beside PyTorch's and NumPy's, alone and within a step; and what a check of samples costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from hyfreedp import NoiseGenerator
from hyfreedp.devices import named_device, synchronize
from hyfreedp.experiments.benchmark.contenders import CONTENDERS, Setup, Step, optimizer_of
from hyfreedp.experiments.benchmark.measure import garbage_stays, ratio_quartiles, time_rounds
from hyfreedp.experiments.benchmark.record import environment
from hyfreedp.experiments.benchmark.workloads import MODELS, make_workload

NUMBERS = 2**22
# The benchmark's batches are small; private training has larger ones, over which noise and checks are spread.
LARGE, LARGE_BATCH = ("vit_d192", "vit_small"), 128
REFERENCE = "PyTorch, float32"
AddNoise = Callable[[Sequence[Tensor]], None]


def _add_torchs(sums: Sequence[Tensor], dtype: torch.dtype) -> None:
    for total in sums:
        total.copy_(total + torch.randn(total.shape, dtype=dtype, device=total.device))


def _add_numpys(sums: Sequence[Tensor], generator: np.random.Generator) -> None:
    for total in sums:
        total.copy_(total.cpu() + torch.from_numpy(generator.standard_normal(tuple(total.shape))))


def sources() -> dict[str, AddNoise]:
    """Ways to add standard normal noise to float32 sums in place, by name."""
    return {
        REFERENCE: partial(_add_torchs, dtype=torch.float32),
        "PyTorch, float64": partial(_add_torchs, dtype=torch.float64),
        "NumPy's Philox, float64": partial(_add_numpys, generator=np.random.Generator(np.random.Philox(0))),
        "ours": partial(NoiseGenerator(0).add_noise, scale=1.0),
        "ours, secure": partial(NoiseGenerator(0, secure=True).add_noise, scale=1.0),
    }


def measure_noise(models: Sequence[str], *, device: str, rounds: int, numbers: int = NUMBERS) -> pd.DataFrame:
    """Seconds of noise and of checks, interleaved in rounds.

    Args:
        models: of ``MODELS``, trained in full, for the costs within a step.
        numbers: how many are drawn where noise is timed alone.

    Returns:
        One row per ``what`` ("noise alone", "step", "check") and ``source``, with the ``model``, its ``batch_size`` and
        number of trained ``parameters`` (of noise alone: the numbers drawn), ``seconds`` (median) and the quartiles of
        the ``ratio``: to PyTorch's float32 noise, of a step to the same step with that noise, and of a step with a
        check to one without.
    """
    rows = []
    where = named_device(device)
    wait = partial(synchronize, where)
    total = torch.zeros(numbers, device=where)

    def compare(what: str, model: str, batch: int, size: int, steps: Mapping[str, Step], reference: str) -> None:
        with garbage_stays():
            for step in steps.values():
                step()
            seconds, failed = time_rounds({name: (step, 1) for name, step in steps.items()}, rounds, wait=wait)
        assert not failed, failed
        for name, times in seconds.items():
            lower, middle, upper = ratio_quartiles(times, seconds[reference])
            measured = {"what": what, "model": model, "batch_size": batch, "parameters": size, "source": name}
            measured |= {"seconds": float(np.median(times)), "ratio_q1": lower, "ratio": middle, "ratio_q3": upper}
            rows.append(measured | environment(where))

    compare("noise alone", "", 0, numbers, {name: partial(add, [total]) for name, add in sources().items()}, REFERENCE)
    shapes = [(model, MODELS[model]) for model in models]
    shapes += [(model, replace(shape, batch_size=LARGE_BATCH)) for model, shape in shapes if model in LARGE]
    for model, shape in tqdm(shapes, desc="noise within a step", unit="model"):
        work = make_workload(shape, "full", where)
        step = CONTENDERS["ours"].make(work, Setup())
        size = sum(parameter.numel() for parameter in work.trainable)
        optimizer = optimizer_of(step)
        names = (REFERENCE, "ours", "ours, secure")
        variants = {name: partial(_with_noise, step, sources()[name]) for name in names}
        compare("step", model, shape.batch_size, size, variants, REFERENCE)

        def checked(optimizer: Any = optimizer, step: Step = step) -> None:
            optimizer._checks_due = [0]
            step()

        optimizer._checks_due = []
        compare("check", model, shape.batch_size, size, {"without": step, "with": checked}, "without")
    return pd.DataFrame(rows)


def _with_noise(step: Step, add: AddNoise) -> None:
    """A step whose noise is added in this way, whatever its scale: that takes the same time."""
    original = NoiseGenerator.add_noise
    NoiseGenerator.add_noise = lambda self, sums, scale, mechanism="gaussian": add(sums)  # type: ignore[method-assign]
    try:
        step()
    finally:
        NoiseGenerator.add_noise = original  # type: ignore[method-assign]
