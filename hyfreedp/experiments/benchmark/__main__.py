"""Command line of the benchmark: ``python -m hyfreedp.experiments.benchmark --help``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from hyfreedp.experiments.benchmark import efficiency
from hyfreedp.experiments.benchmark.cases import Case, cases, measure, measure_runs
from hyfreedp.experiments.benchmark.contenders import ALL_CONTENDERS, CONTENDERS, PEERS
from hyfreedp.experiments.benchmark.efficiency import GROWTH, GROWTH_CONTENDERS
from hyfreedp.experiments.benchmark.workloads import MODELS, ON_CPU, ON_GPU, SMALL, Tuning
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.pytorch.devices import CPU

PARTS = ("table", "growth", "peers", "runs")
BESIDE_PEERS = ("vit_d192", "gpt2_d256", *SMALL)
WHOLE_RUNS = ("vit_d192", "mlp_b256", "convnet_b32")
DESCRIPTION = """\
Measures seconds and peak memory of one training step: plain, by Opacus, by this package, and with HyFreeDP.

All contenders of a case take turns in every round; reported are medians over rounds and medians of the rounds' ratios.
Seconds on a CPU are those of its one thread. opake is measured if it is installed, fastDP if HYFREEDP_FASTDP names the
folder that holds it.

Without --models, --tunings and --contenders, whole records are written to data/results/laptop (cpu) or data/results/gpu
(else), those of --parts: "table", efficiency.csv, the paper's Tab. "eff"; "growth", efficiency_growth.csv, against
batch size, depth, width and sequence length; on a CPU "peers", efficiency_peers.csv, every library on models small and
large, and "runs", efficiency_runs.csv, whole runs. A selection goes to build/benchmark. With --resume all goes into the
record, each case as it ends, and what the record has is not measured again. Run it on an idle machine.

examples:
  python -m hyfreedp.experiments.benchmark
  python -m hyfreedp.experiments.benchmark --device accelerator --models vit_base --tunings full biases

exit status: 0; 2 if the command is wrong; 130 if it was interrupted."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hyfreedp.experiments.benchmark",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    device = "cpu, accelerator, or a device by torch's name (default: cpu)"
    parser.add_argument("--device", metavar="NAME", default="cpu", help=device)
    parser.add_argument("--models", nargs="+", metavar="NAME", help=f"among {', '.join(MODELS)}")
    parser.add_argument("--tunings", nargs="+", metavar="NAME", help=f"among {', '.join(get_args(Tuning))}")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"among {', '.join(ALL_CONTENDERS)}")
    parser.add_argument("--resume", action="store_true", help="put into the record what it does not have yet")
    parser.add_argument("--rounds", type=int, default=7, help="how often everything is timed (default: 7)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="records to make (default: all)")
    options = parser.parse_args(arguments)

    whole = not (options.models or options.tunings or options.contenders)
    place, profile = workspace(), "laptop" if options.device == CPU.type else "gpu"
    folder = place.results / profile if whole or options.resume else place.build / "benchmark"
    models = options.models or (ON_CPU if profile == "laptop" else ON_GPU)
    unsafe = () if profile == "laptop" else ("ours_torch_noise",)  # what the safe noise costs
    tunings, contenders = options.tunings or get_args(Tuning), options.contenders or (*CONTENDERS, *unsafe)
    parts = options.parts if whole else PARTS[:1]
    settings = {"device": options.device, "rounds": options.rounds}
    try:
        if "table" in parts:
            todo = cases(models, tunings, contenders)
            rows = _record(todo, folder / "efficiency.csv", options.resume, settings)
            if len(rows):
                print("\nGoals (for the CPU):", efficiency.markdown(rows), sep="\n")
        if "growth" in parts:
            model, grid = GROWTH[profile]
            todo = [Case(model, "full", GROWTH_CONTENDERS, varied, n) for varied in grid for n in grid[varied]]
            _record(todo, folder / "efficiency_growth.csv", options.resume, settings)
        if "peers" in parts and profile == "laptop":
            here = {"opake": find_spec("opake") is not None, "fastdp": "HYFREEDP_FASTDP" in os.environ}
            peers = [name for name in PEERS if here[name]]
            todo = cases(BESIDE_PEERS, ("full",), ("plain", "opacus_hooks", "opacus_ghost", *peers, "ours"))
            _record(todo, folder / "efficiency_peers.csv", options.resume, settings)
        if "runs" in parts and profile == "laptop":
            runs = measure_runs(WHOLE_RUNS, rounds=options.rounds)
            write_csv(folder / "efficiency_runs.csv", runs)
            print(efficiency.runs(runs))
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted" + ("; the same command goes on from here" if options.resume else ""), flush=True)
        return 130
    return 0


def _record(todo: Sequence[Case], path: Path, resume: bool, settings: dict[str, Any]) -> pd.DataFrame:
    """Measure cases and write them: at the end, or each as it ends into a record to be resumed; their rows."""
    before = pd.DataFrame()
    if resume and path.exists():
        before = pd.read_csv(path, dtype=str, keep_default_na=False)  # to be written as it was
    tables: list[pd.DataFrame] = []
    for case in todo:
        own = _rows(before, case)
        known = list(own.get("contender", []))
        if set(case.contenders) <= set(known):
            print(f"{case}: recorded before")
            continue
        before = before.drop(own.index)  # all of a case take turns, so all are measured again
        tables.append(measure([replace(case, contenders=tuple(dict.fromkeys((*known, *case.contenders))))], **settings))
        if resume:  # else an interrupt would leave a part for the whole
            write_csv(path, pd.concat([before, *tables], ignore_index=True))
    if not tables:
        return pd.DataFrame()
    rows = pd.concat(tables, ignore_index=True)
    if not resume:
        write_csv(path, rows)
    named = rows.assign(contender=[ALL_CONTENDERS[name].label for name in rows.contender], ms=1e3 * rows.seconds)
    columns = ["model", "tuning", "contender", "ms", "ratio_to_plain", "ratio_to_ours", "first_to_plain"]
    columns += ["resident_mib", "failure"]
    print(named.reindex(columns=columns).round(3).to_string(index=False, na_rep=""))
    print(f"wrote {path}")
    return rows


def _rows(record: pd.DataFrame, case: Case) -> pd.DataFrame:
    """What a record has of a case."""
    if record.empty:
        return record
    named = (record.model == case.model) & (record.tuning == case.tuning) & (record.varied == case.varied)
    return record[named & (record.value == str(case.value))]


if __name__ == "__main__":
    sys.exit(main())
