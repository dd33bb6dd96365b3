"""Measures private steps of small versions of current models; if all are measured, writes ``docs/models.md``."""

from __future__ import annotations

import argparse
import re
import warnings
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from textwrap import shorten

import torch
from catalog import cases
from measure import Finding, measure

from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.store.paths import ROOT

INTRODUCTION = Path(__file__).with_name("introduction.md").read_text(encoding="utf-8")
OPACUS = {"exact": "Opacus is exact, too", "refused": "Opacus refuses", "wrong": "Opacus is wrong"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/models", description=__doc__)
    parser.add_argument("--only", metavar="REGEX", default="", help="only models whose library/name matches; no page")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [case for case in cases() if re.search(only, f"{case.library}/{case.name}")]
    rows = []
    for case in chosen:
        try:
            row = measure(case)
        except Exception as error:
            said = f"not measured: {type(error).__name__}: {error}"
            row = Finding(case.library, case.name, full=said, biases=said, opacus=said)
        rows.append(row)
        print(f"{len(rows)}/{len(chosen)} {row}"[:400], flush=True)
    print(counts(rows))
    if not only:
        write_text(ROOT / "docs" / "models.md", page(rows))


def page(rows: list[Finding]) -> str:
    """docs/models.md: models by library and by what Opacus does, each with its time and what is special."""
    versions = {name: version(name).split("+")[0] for name in ("timm", "transformers", "peft", "torch", "opacus")}
    first = [row.first for row in rows if row.first]
    spread = f"{min(first):.0f} to {max(first):.0f} (median {median(first):.0f})"
    lines = [INTRODUCTION.format(first=spread, **counts(rows), **versions)]
    notes: dict[str, int] = {}
    for library in dict.fromkeys(row.library for row in rows):
        lines.append(f"## {library}\n")
        by_opacus = defaultdict(list)
        for row in rows:
            if row.library == library:
                by_opacus[row.opacus.split(":")[0]].append(described(row, notes))
        for word, models in sorted(by_opacus.items()):
            lines.append(f"**{OPACUS.get(word, 'Not measured')}** ({len(models)}): {'; '.join(models)}.\n")
    lines.append("## Why models are wrong, or computed one sample at a time\n")
    for reason, number in notes.items():
        lines.append(f"{number}. {shorten(reason, 160, placeholder=' …').replace('<', '&lt;')}")
    return "\n".join(lines).rstrip() + "\n"


def described(row: Finding, notes: dict[str, int]) -> str:
    """A model with its time and what is special; reasons are numbered in ``notes``, which this extends."""
    name = row.name + ("*" if row.frozen_norms else "")
    parts = [name, f"{row.ratio:.1f}{'g' if row.groups > 1 else ''}"]
    special = [found.partition(": ") for found in (row.full, row.biases) if found != "exact"]
    special += [("one at a time", "", row.slow)] if row.slow else []
    for word, _, reason in special:
        parts.append(f"{word} ({notes.setdefault(reason, len(notes) + 1)})")
    return " ".join(parts)


def counts(rows: list[Finding]) -> dict[str, int]:
    """The numbers of models in ``introduction.md``, by their placeholders."""
    exact = [row for row in rows if row.full == "exact"]
    mapped = [row for row in exact if not row.slow]
    wrong = [row for row in rows if "wrong" in row.full + row.biases]
    found = {"models": len(rows), "exact": len(exact), "mapped": len(mapped), "wrong": len(wrong)}
    found["in_groups"] = sum(row.groups > 1 for row in mapped)
    return found | {f"opacus_{word}": sum(row.opacus.startswith(word) for row in rows) for word in OPACUS}


if __name__ == "__main__":
    main()
