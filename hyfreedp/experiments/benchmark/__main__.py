"""Command line of the benchmark: ``python -m hyfreedp.experiments.benchmark --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import torch

from hyfreedp.devices import CPU
from hyfreedp.experiments.benchmark import goals
from hyfreedp.experiments.benchmark.contenders import ALL_CONTENDERS, CONTENDERS
from hyfreedp.experiments.benchmark.learning import measure_learning
from hyfreedp.experiments.benchmark.noise import measure_noise
from hyfreedp.experiments.benchmark.record import Case, cases, growth_cases, limited_threads, measure
from hyfreedp.experiments.benchmark.workloads import MODELS, ON_CPU, ON_GPU, Tuning
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.paths import workspace

DESCRIPTION = """\
Measures seconds and peak memory of one training step: plain, by Opacus, by this package, and with HyFreeDP.

All contenders of a case take turns in every round; reported are medians over rounds and medians of the rounds' ratios.
Without --models, --tunings and --contenders, the whole record is measured and written to data/results/laptop (cpu) or
data/results/gpu (else): efficiency.csv, efficiency_growth.csv on how the cost grows with batch size, depth, width and
sequence length, efficiency_noise.csv on noise and checks (--noise: this one alone), and efficiency_learning.csv on
what learning the rate costs in a whole run (--learning). efficiency_opake.csv has opake beside the others, on request
(--opake; pip install opake, which wants PyTorch 2.9). A selection goes to build/benchmark instead, or with --record
into that record, in place of its rows of the same cases; with --resume what the record has is not measured again.
There every case is written as it ends. Run it on a machine that does nothing else.

examples:
  python -m hyfreedp.experiments.benchmark
  python -m hyfreedp.experiments.benchmark --device accelerator --models vit_base --tunings full biases

exit status: 0; 2 if the command is wrong; 130 if it was interrupted."""

# What names a row of a record.
_CASE = ("model", "tuning", "varied", "value", "what", "batch_size", "contender", "source", "method")
_BESIDE_OPAKE = ("plain", "opacus_hooks", "opacus_ghost", "opacus_functorch", "ours", "opake")
_GROWTH_CONTENDERS = ("plain", "opacus_hooks", "opacus_ghost", "ours")
_GROWTH = {
    "laptop": (
        "vit_d192",
        {
            "batch_size": (4, 8, 16, 32, 64),
            "depth": (1, 2, 4, 8),
            "width": (96, 192, 384, 576),
            "tokens": (17, 65, 145, 257),
        },
    ),
    "gpu": (
        "vit_small",
        {
            "batch_size": (8, 16, 32, 64, 128),
            "depth": (3, 6, 12, 24),
            "width": (192, 384, 768, 1152),
            "tokens": (50, 197, 401, 785),
        },
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hyfreedp.experiments.benchmark",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", metavar="NAME", default="cpu", help="cpu, accelerator, or a device by torch's name (default: cpu)"
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help=f"among {', '.join(MODELS)}")
    parser.add_argument("--tunings", nargs="+", metavar="NAME", help=f"among {', '.join(get_args(Tuning))}")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"among {', '.join(ALL_CONTENDERS)}")
    parser.add_argument("--record", action="store_true", help="put what is measured into the record, beside the rest")
    parser.add_argument("--resume", action="store_true", help="as --record, without what the record has already")
    parser.add_argument("--rounds", type=int, default=7, help="how often everything is timed (default: 7)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch on the CPU")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--noise", action="store_true", help="measure only what noise and checks cost")
    only.add_argument("--growth", action="store_true", help="measure only how the cost grows")
    only.add_argument("--learning", action="store_true", help="measure only what learning the rate costs")
    only.add_argument("--opake", action="store_true", help="measure only opake, beside the others")
    options = parser.parse_args(arguments)
    if options.opake and find_spec("opake") is None:
        parser.error("--opake needs opake, which is not installed: pip install opake")

    whole = not (options.models or options.tunings or options.contenders)
    here = workspace()
    profile = "laptop" if options.device == CPU.type else "gpu"
    beside = options.record or options.resume
    output = here.results / profile if whole or beside else here.build / "benchmark"
    models = options.models or (ON_CPU if profile == "laptop" else ON_GPU)
    full = [model for model in models if model in MODELS and "full" in MODELS[model].tunings]
    settings = {"device": options.device, "rounds": options.rounds, "threads": options.threads}
    contenders = options.contenders or tuple(CONTENDERS)
    steps = not (options.noise or options.learning or options.growth or options.opake)
    record = partial(_record, folder=output, beside=beside, resume=options.resume)
    measured = partial(measure, **settings)
    try:
        if steps:
            table = record(measured, cases(models, options.tunings or get_args(Tuning), contenders), "", _shown)
            if len(table) and len(judged := goals.judge(table)):
                summary = goals.summarise(judged).round(3).to_string(index=False, na_rep="")
                print("\nGoals (for the CPU):", summary, sep="\n")
        if options.opake:
            record(measured, cases(models, options.tunings or get_args(Tuning), _BESIDE_OPAKE), "_opake", _shown)
        if options.growth or (steps and whole):
            record(measured, growth_cases(*_GROWTH[profile], _GROWTH_CONTENDERS), "_growth", _shown)
        if options.noise or (steps and whole):
            with limited_threads(options.threads):
                noise = partial(measure_noise, device=options.device, rounds=options.rounds)
                record(noise, full, "_noise", _shown_noise)
        if options.learning or (steps and whole):
            shown = ["model", "method", "ratio", "copies", "budget_percent"]
            record(partial(measure_learning, **settings), full, "_learning", lambda table: table[shown])
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted" + ("; the same command goes on from here" if options.resume else ""), flush=True)
        return 130
    return 0


def _record(
    measured: Callable[[list[Any]], pd.DataFrame],
    todo: Sequence[Case | str],
    what: str,
    shown: Callable[[pd.DataFrame], pd.DataFrame],
    *,
    folder: Path,
    beside: bool,
    resume: bool,
) -> pd.DataFrame:
    """Measure cases, or models, and write them, each as it ends if beside a record; the rows of this time."""
    path = folder / f"efficiency{what}.csv"
    before = pd.DataFrame()
    if beside and path.exists():
        before = pd.read_csv(path, dtype=str, keep_default_na=False)  # to be written as it was
    table = pd.DataFrame()
    for one in todo:
        if resume and _has(before, one):
            print(f"{one}: recorded before")
            continue
        rows = measured([one])
        table = replaced(table, rows) if len(table) else rows  # noise alone is measured beside each model's
        if beside:  # else an interrupt would leave a part for the whole
            write_csv(path, replaced(before, table) if len(before) else table)
    if len(table):
        if not beside:
            write_csv(path, table)
        print(shown(table).round(3).to_string(index=False, na_rep=""))
        print(f"wrote {path}")
    return table


def _has(record: pd.DataFrame, one: Case | str) -> bool:
    """Whether a record has all rows of a case, or a model."""
    if record.empty:
        return False
    if isinstance(one, str):
        return one in set(record.model)
    place = record[(record.model == one.model) & (record.tuning == one.tuning) & (record.varied == one.varied)]
    return set(one.contenders) <= set(place[place.value == str(one.value)].contender)


def _shown_noise(table: pd.DataFrame) -> pd.DataFrame:
    named = table.assign(ns_per_number=1e9 * table.seconds / table.parameters)
    return named[["what", "model", "batch_size", "source", "ns_per_number", "ratio"]]


def replaced(record: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """A record with new rows in place of its rows of the same cases, and at its end where there are none."""
    names = [name for name in _CASE if name in rows]
    texts = (frame[names].map(lambda value: "" if pd.isna(value) else str(value)) for frame in (record, rows))
    old, new = (list(text.itertuples(index=False)) for text in texts)
    kept = record[[case not in set(new) for case in old]]
    return pd.concat([kept, rows], ignore_index=True)


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    named = table.assign(contender=[ALL_CONTENDERS[name].label for name in table.contender], ms=1e3 * table.seconds)
    columns = ["model", "tuning", "contender", "ms", "ratio_to_plain", "ratio_to_ours", "peak_mib", "failure"]
    return named[[name for name in columns if name in named]]


if __name__ == "__main__":
    sys.exit(main())
