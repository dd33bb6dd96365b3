"""Command line of the benchmark: ``python -m hyfreedp.experiments.benchmark --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pandas as pd
import torch

from hyfreedp.experiments.benchmark import goals
from hyfreedp.experiments.benchmark.contenders import CONTENDERS
from hyfreedp.experiments.benchmark.learning import measure_learning
from hyfreedp.experiments.benchmark.noise import measure_noise
from hyfreedp.experiments.benchmark.record import Case, cases, growth_cases, limited_threads, measure, part_of
from hyfreedp.experiments.benchmark.workloads import MODELS, ON_CPU, ON_GPU, Tuning
from hyfreedp.experiments.store.files import replacing
from hyfreedp.experiments.store.paths import BUILD, CELLS, RESULTS

DESCRIPTION = """\
Measures seconds and peak memory of one training step: plain, by Opacus, by this package, and with HyFreeDP.

All contenders of a case take turns in every round; reported are medians over rounds and medians of the rounds' ratios.
Without --models, --tunings and --quick, the whole record is measured and written to data/results/laptop (cpu) or
data/results/gpu (cuda): efficiency.csv, efficiency_growth.csv on how the cost grows with batch size, depth, width and
sequence length, efficiency_noise.csv on noise and checks (--noise: this one alone), and efficiency_learning.csv on what
learning the rate costs in a whole run (--learning). A selection goes to build/benchmark instead. Run it on a machine
that does nothing else.

An interrupted command goes on where it was: each finished case waits in data/cells until the record is complete.

examples:
  python -m hyfreedp.experiments.benchmark
  python -m hyfreedp.experiments.benchmark --device cuda --models vit_base --tunings full biases
  python -m hyfreedp.experiments.benchmark --quick

exit status: 0; 2 if the command is wrong, 130 if interrupted."""

_PROFILES = {"cpu": "laptop", "cuda": "gpu"}
_QUICK_ROUNDS = 1
_GROWTH_CONTENDERS = ("plain", "opacus_hooks", "opacus_ghost", "ours")
_GROWTH = {
    "cpu": (
        "vit_d192",
        {
            "batch_size": (4, 8, 16, 32, 64),
            "depth": (1, 2, 4, 8),
            "width": (96, 192, 384, 576),
            "tokens": (17, 65, 145, 257),
        },
    ),
    "cuda": (
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
    parser.add_argument("--device", choices=tuple(_PROFILES), default="cpu")
    parser.add_argument("--models", nargs="+", metavar="NAME", help=f"among {', '.join(MODELS)}")
    parser.add_argument("--tunings", nargs="+", metavar="NAME", help=f"among {', '.join(get_args(Tuning))}")
    parser.add_argument("--rounds", type=int, default=7, help="how often everything is timed (default: 7)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch on the CPU")
    parser.add_argument("--noise", action="store_true", help="measure only what noise and checks cost")
    parser.add_argument("--learning", action="store_true", help="measure only what learning the rate costs")
    parser.add_argument("--quick", action="store_true", help="one round of the first model only, to see that all works")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where the tables are written")
    parser.add_argument("--fresh", action="store_true", help="forget what an interrupted command had measured")
    options = parser.parse_args(arguments)

    default_models = ON_GPU if options.device == "cuda" else ON_CPU
    whole = not (options.models or options.tunings or options.quick)
    output = options.output or (RESULTS / _PROFILES[options.device] if whole else BUILD / "benchmark")
    rounds = _QUICK_ROUNDS if options.quick else options.rounds
    models = options.models or (default_models[:1] if options.quick else default_models)
    try:
        only = options.noise or options.learning
        if options.noise or (whole and not only):
            _measure_noise(models, options.device, rounds, options.threads, output)
        if options.learning or (whole and not only):
            _measure_learning(models, options.device, rounds, options.threads, output)
        if only:
            return 0
        tables = {"efficiency": cases(models, options.tunings or get_args(Tuning))}
        if whole:
            model, grid = _GROWTH[options.device]
            tables["efficiency_growth"] = growth_cases(model, grid, _GROWTH_CONTENDERS)
        for name, todo in tables.items():
            table = _measure(todo, options.device, rounds, options.threads, options.fresh)
            with replacing(output / f"{name}.csv") as temporary:
                table.to_csv(temporary, index=False)
            print(f"wrote {output / name}.csv")
            if name == "efficiency":
                _show(table)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last finished case", file=sys.stderr)
        return 130
    # Only now, so that a command interrupted in its second table does not measure the first one again.
    for todo in tables.values():
        _forget(todo, options.device, rounds, options.threads)
    return 0


def _measure_noise(models: Sequence[str], device: str, rounds: int, threads: int, output: Path) -> None:
    with limited_threads(threads):
        table = measure_noise(models, device=device, rounds=rounds)
    with replacing(output / "efficiency_noise.csv") as temporary:
        table.to_csv(temporary, index=False)
    shown = table.assign(ns_per_number=1e9 * table.seconds / table.parameters)
    print(shown[["what", "model", "batch_size", "source", "ns_per_number", "ratio"]].round(3).to_string(index=False))
    print(f"wrote {output / 'efficiency_noise.csv'}")


def _measure_learning(models: Sequence[str], device: str, rounds: int, threads: int, output: Path) -> None:
    table = measure_learning(models, device=device, rounds=rounds, threads=threads)
    with replacing(output / "efficiency_learning.csv") as temporary:
        table.to_csv(temporary, index=False)
    print(table[["model", "method", "ratio", "copies", "budget_percent"]].round(3).to_string(index=False))
    print(f"wrote {output / 'efficiency_learning.csv'}")


def _measure(todo: list[Case], device: str, rounds: int, threads: int, fresh: bool) -> pd.DataFrame:
    if fresh:
        _forget(todo, device, rounds, threads)
    return measure(todo, device=device, rounds=rounds, threads=threads, parts=CELLS)


def _forget(todo: list[Case], device: str, rounds: int, threads: int) -> None:
    for case in todo:
        part_of(case, CELLS, device=device, rounds=rounds, threads=threads).unlink(missing_ok=True)


def _show(table: pd.DataFrame) -> None:
    shown = table.assign(contender=[CONTENDERS[name].label for name in table.contender], ms=1e3 * table.seconds)
    columns = ["model", "tuning", "contender", "ms", "ratio_to_plain", "ratio_to_ours", "peak_mib", "failure"]
    print(shown[[name for name in columns if name in shown]].round(3).to_string(index=False, na_rep=""))
    judged = goals.judge(table)
    if len(judged):
        print("\nGoals (for the CPU):", goals.summarise(judged).round(3).to_string(index=False, na_rep=""), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
