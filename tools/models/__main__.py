"""Measures private steps of current models in small; a run of all of them writes ``docs/models.md``."""

from __future__ import annotations

import argparse
import re
import signal
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import version
from statistics import median
from textwrap import shorten
from typing import Any

import torch
from catalog import cases
from measure import Finding, measure

from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.store.paths import ROOT

PAGE = ROOT / "docs" / "models.md"
SECONDS = 300  # per model

INTRODUCTION = """# Models

Models of timm {timm}, transformers {transformers} and PEFT {peft} in small, with random weights, measured by
`make models` with PyTorch {torch}. {counts}

* **Exact**: two private steps without noise, on batches of different sizes, equal those of a loop over records to one
  part in a million (double precision, no dropout), with all trained and with biases and head alone. Losses are those of
  training without privacy.
* **The number** is the processor time of a private step over a plain one (one thread, single precision, all trained).
  Models this small measure overhead; for arithmetic see [time and memory](results-cost.md). The first step of a run
  takes {first} plain ones.
* **g**, in groups: the loss [is mapped](method.md#how-a-gradient-is-clipped) over samples that agree in a decision of
  Python. **One at a time**: what cannot be mapped, for the reason below.
* `*`: batch norm mixes samples, so the model's were frozen in eval mode.
* **Opacus** {opacus}: its `GradSampleModule` on the same model and batch.
"""
OPACUS = {"exact": "Opacus is exact, too", "refused": "Opacus refuses", "wrong": "Opacus is wrong"}


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
    """The page of the findings: by library and what Opacus does, each model with its time and what is special."""
    versions = {name: version(name).split("+")[0] for name in ("timm", "transformers", "peft", "torch", "opacus")}
    first = [row["first"] for row in rows if row["first"]]
    spread = f"{min(first):.0f} to {max(first):.0f} (median {median(first):.0f})" if first else "several"
    lines = [INTRODUCTION.format(counts=counts(rows), first=spread, **versions)]
    notes: dict[str, int] = {}

    def noted(kind: str, reason: str) -> str:
        return f"{kind} ({notes.setdefault(reason, len(notes) + 1)})" if reason else kind

    for library in dict.fromkeys(row["library"] for row in rows):
        lines.append(f"## {library}\n")
        by_opacus: dict[str, list[str]] = {}
        for row in rows:
            if row["library"] == library:
                name = row["name"] + ("*" if row["frozen_norms"] else "")
                special = [noted(*outcome(row[kind])) for kind in ("full", "biases") if row[kind] != "exact"]
                special += [noted("one at a time", row["slow"])] if row["slow"] else []
                told = f"{row['ratio']:.1f}{'g' if row['groups'] > 1 else ''}" if row["ratio"] else "not measured"
                by_opacus.setdefault(row["opacus"].partition(":")[0], []).append(" ".join([name, told, *special]))
        for word in sorted(by_opacus):
            heading = OPACUS.get(word, "Not measured")
            lines.append(f"**{heading}** ({len(by_opacus[word])}): {'; '.join(by_opacus[word])}.\n")
    lines.append("## Why models are wrong, or computed one sample at a time\n")
    for reason, number in notes.items():
        lines.append(f"{number}. {shorten(reason, 160, placeholder=' …').replace('<', '&lt;')}")
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
