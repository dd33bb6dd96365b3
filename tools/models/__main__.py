"""Measures private steps of current models in small; a run of all of them writes ``docs/models.md``."""

from __future__ import annotations

import argparse
import re
import signal
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from catalog import cases
from measure import Finding, measure

from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.store.paths import ROOT

PAGE = ROOT / "docs" / "models.md"
SECONDS = 300  # per model

INTRODUCTION = """# Models

What trains privately as it is: models of timm {timm}, transformers {transformers} and PEFT {peft} in small, with random
weights, measured by `make models` with PyTorch {torch}. {counts}

- **Exact**: two private steps without noise, on batches of different sizes, equal those of a loop over records, in
  double precision and without dropout, to one part in a million; with all trained, and with biases and head alone. A
  model where one of the two is not says so beside its name. Losses are those of training without privacy.
- **Step**: processor time of a private step over a plain one, all trained, one thread, in single precision; **first**:
  of the first step. Models this small measure the overhead rather than the arithmetic, for which see `make benchmark`.
  The loss is [mapped over samples](method.md#how-a-gradient-is-clipped): all at once, or in *groups* where they differ
  in a decision of Python. *One at a time* is said of models that do what cannot be mapped, for the reason below.
- **Opacus** {opacus}: its `GradSampleModule` on the same model and batch.
- **Norms frozen**: batch norm mixes samples, so those of the model were frozen in eval mode.

"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/models", description=__doc__)
    parser.add_argument("--only", metavar="REGEX", default="", help="models whose library/name it is found in; no page")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time (default 1)")
    arguments = parser.parse_args()
    names = [f"{case.library}/{case.name}" for case in cases()]
    chosen = [name for name in names if re.search(arguments.only, name)]
    found = {}
    with ProcessPoolExecutor(arguments.jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(find, name) for name in chosen]):
            name, row = done.result()
            found[name] = row
            path = f"one at a time ({row['slow']})" if row["slow"] else f"mapped in {row['groups']}"
            print(
                f"{len(found):3}/{len(chosen)} {name:50} full {row['full']}; biases {row['biases']}; {path}; "
                f"x{row['first']:.2f}, then x{row['ratio']:.2f}; opacus {row['opacus'].partition(':')[0]}"[:400],
                flush=True,
            )
    rows = [found[name] for name in chosen]
    print(counts(rows))
    if not arguments.only:
        write_text(PAGE, page(rows))


def find(name: str) -> tuple[str, dict[str, Any]]:
    """The findings of one model, or that it took too long."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    warnings.simplefilter("ignore")
    case = next(case for case in cases() if f"{case.library}/{case.name}" == name)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return name, measure(case)
    except Exception as error:
        said = f"not measured: {type(error).__name__}: {error}"
        return name, asdict(Finding(case.library, case.name, full=said, biases=said))
    finally:
        signal.alarm(0)


def page(rows: list[dict[str, Any]]) -> str:
    """The page of the findings."""
    versions = {name: version(name).split("+")[0] for name in ("timm", "transformers", "peft", "torch", "opacus")}
    lines = [INTRODUCTION.format(counts=counts(rows), **versions)]
    notes: dict[str, int] = {}

    def noted(kind: str, reason: str) -> str:
        return f"{kind} ({notes.setdefault(reason, len(notes) + 1)})" if reason else kind

    for library in dict.fromkeys(row["library"] for row in rows):
        lines.append(f"## {library}\n\n| model | first | step | Opacus | norms frozen |")
        lines.append("| --- | ---: | --- | --- | ---: |")
        for row in (row for row in rows if row["library"] == library):
            inexact = [row[kind] for kind in ("full", "biases") if row[kind] != "exact"]
            name = ", ".join([row["name"], *(noted(*outcome(found)) for found in dict.fromkeys(inexact))])
            how = f", {row['groups']} groups" if row["groups"] > 1 else ""
            how = noted(", one at a time", row["slow"]) if row["slow"] else how
            first, step = (f"{row[kind]:.1f}" if row[kind] else "" for kind in ("first", "ratio"))
            cells = name, first, step + how, row["opacus"].partition(":")[0]
            lines.append(f"| {' | '.join(cells)} | {row['frozen_norms'] or ''} |")
        lines.append("")
    lines.append("## Why models are wrong, or computed one sample at a time\n")
    for reason, number in notes.items():
        plain = " ".join(reason.split()).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"{number}. {plain}")
    return "\n".join(lines).rstrip() + "\n"


def outcome(found: str) -> tuple[str, str]:
    """In a word, and why."""
    word, _, reason = found.partition(": ")
    return word, f"relative difference {reason}" if word == "wrong" else reason


def counts(rows: list[dict[str, Any]]) -> str:
    exact = [row for row in rows if row["full"] == "exact"]
    mapped = [row for row in exact if not row["slow"]]
    wrong = sum("wrong" in row["full"] + row["biases"] for row in rows)
    opacus = [row["opacus"].partition(":")[0] for row in rows]
    return (
        f"Of {len(rows)} models {len(exact)} are exact when all is trained, {len(mapped)} of them mapped "
        f"({sum(row['groups'] > 1 for row in mapped)} in groups), and {wrong} {'is' if wrong == 1 else 'are'} wrong. "
        f"Opacus is exact on {opacus.count('exact')}, refuses "
        f"{opacus.count('refused')} and is wrong on {opacus.count('wrong')} of the same models."
    )


if __name__ == "__main__":
    main()
