"""Command line of the benchmark: ``python -m hyfreedp.experiments.benchmark --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pandas as pd
import torch
from tqdm import tqdm

from hyfreedp.checks import check_count
from hyfreedp.experiments.benchmark.cases import PARTS, Case, cases
from hyfreedp.experiments.benchmark.contenders import CONTENDERS
from hyfreedp.experiments.benchmark.measure import measure
from hyfreedp.experiments.benchmark.workloads import MODELS, Tuning
from hyfreedp.experiments.store.device import default_device
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.pytorch.devices import CPU

DESCRIPTION = """\
Measures seconds and peak memory of one training step: plain, by Opacus, by this package, and with HyFreeDP.

In each round all contenders take turns. Results are medians over rounds, of seconds and of ratios within a round. On a
CPU seconds are processor time of one thread. opake is measured if it is installed, fastDP if HYFREEDP_FASTDP is the
folder that contains it.

Records are written to data/results/laptop (cpu) or data/results/gpu, a file for each of --parts: "table" is the paper's
Tab. "eff" (efficiency.csv); "growth" varies batch size, depth, width and tokens. On a CPU also: "peers" has all
libraries on small and large models; "runs" has whole runs; "noise" has the cost of our safe noise. --models, --tunings
and --contenders select cases, whose results are then written to build/benchmark.

The file is written after each case. With --resume, results in the record are kept and not measured again, and selected
cases are added to it. Run it on an idle machine.

examples:
  python -m hyfreedp.experiments.benchmark --parts table --models vit_d192 --tunings full --rounds 15
  python -m hyfreedp.experiments.benchmark --device accelerator --models vit_base --tunings full biases

exit status: 0; 2 if the command is wrong; 130 if it was interrupted."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hyfreedp.experiments.benchmark",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu", help="default: %(default)s")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="records to make (default: all)")
    for option, names in {"models": MODELS, "tunings": get_args(Tuning), "contenders": CONTENDERS}.items():
        shown = f"among {', '.join(names)}"
        parser.add_argument(f"--{option}", nargs="+", choices=names, metavar="NAME", help=shown)
    parser.add_argument("--resume", action="store_true", help="measure what the record does not have yet")
    parser.add_argument("--rounds", type=int, default=7, help="how often everything is timed (default: 7)")
    options = parser.parse_args(arguments)

    whole = not (options.models or options.tunings or options.contenders)
    place, profile = workspace(), "laptop" if options.device == CPU.type else "gpu"
    folder = place.results / profile if whole or options.resume else place.build / "benchmark"
    try:
        check_count("rounds", options.rounds, 1)
        where = CPU if options.device == CPU.type else default_device()
        if profile == "gpu" and where == CPU:
            raise ValueError("--device accelerator needs one, and torch finds none on this machine")
        models, tunings = options.models or MODELS, options.tunings or get_args(Tuning)
        todo = {
            part: [case for case in cases(part, profile) if case.model in models and case.tuning in tunings]
            for part in options.parts
        }
        if not any(todo.values()):
            raise ValueError(f"no case of {', '.join(options.parts)} has one of these models and tunings")
        for part, found in todo.items():
            chosen = [replace(case, contenders=tuple(options.contenders or case.contenders)) for case in found]
            if chosen:
                _record(chosen, folder / PARTS[part], options.resume, where, options.rounds)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted; with --resume it goes on from here", flush=True)
        return 130
    return 0


def _record(chosen: Sequence[Case], path: Path, resume: bool, device: torch.device, rounds: int) -> None:
    """Measure cases and write ``path`` after each; with ``resume`` its other rows stay. Prints the rows at the end."""
    record = pd.DataFrame(columns=[*chosen[0].key, "contender"])
    if resume and path.exists():
        record = pd.read_csv(path, dtype=str, keep_default_na=False)  # as texts, to be written back unchanged
    for case in (bar := tqdm(chosen, unit="case")):
        bar.set_description(" ".join(case.key.values()))
        own = (record[[*case.key]].astype(str) == list(case.key.values())).all(axis=1)
        known = list(record.contender[own])
        if set(case.contenders) <= set(known):
            continue
        every = tuple(dict.fromkeys([*known, *case.contenders]))  # all are measured again, since they take turns
        rows = measure(replace(case, contenders=every), device, rounds)
        record = pd.concat([record[~own], rows], ignore_index=True) if len(record) else rows
        write_csv(path, record)
    shown = ["model", "tuning", "varied", "value", "contender", "seconds", "ratio_to_plain", "ratio_to_ours", "failure"]
    print(pd.read_csv(path)[shown].round(3).to_string(index=False, na_rep=""), f"in {path}", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
