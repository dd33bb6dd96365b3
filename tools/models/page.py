"""The table ``docs/models.md`` of the findings."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from hyfreedp.experiments.store.paths import ROOT

FINDINGS = ROOT / "tools" / "models" / "findings.json"
PAGE = ROOT / "docs" / "models.md"

_INTRODUCTION = """# Models

What trains privately as it is: models of timm {timm}, transformers {transformers} and PEFT {peft} in small, with random
weights, measured by `make models` with PyTorch {torch}. {counts}

- **All** trained, and only **biases and head**: "exact" if the norms of all per-sample gradients and the clipped sums
  of two batches of different sizes equal those of a loop over samples, in double precision and without dropout, to one
  part in a million. Else why the model is refused, below.
- **Engine**: layers with a rule of their own, and other parameters, which are followed through the operations on them.
- **Step**: processor time of forward and backward pass over that without privacy, all trained, in single precision.
  Models this small measure the overhead rather than the arithmetic, for which see `make benchmark`. Empty: not
  measured.
- **Opacus** {opacus}: its `GradSampleModule` on the same model and batch.
- **Norms frozen**: batch norm mixes samples, so those of the model were frozen in eval mode.

"""


def page(found: dict[str, dict[str, Any]]) -> str:
    """The page for findings by library and name."""
    rows = list(found.values())
    names = ("timm", "transformers", "peft", "torch", "opacus")
    lines = [_INTRODUCTION.format(counts=_counts(rows), **{name: version(name).split("+")[0] for name in names})]
    reasons: dict[str, int] = {}
    for library in dict.fromkeys(row["library"] for row in rows):
        lines.append(f"## {library}\n\n| model | all | biases and head | engine | step | Opacus | norms frozen |")
        lines.append("| --- | --- | --- | --- | ---: | --- | ---: |")
        for row in (row for row in rows if row["library"] == library):
            cells = (
                row["name"],
                _verdict(row["full"], reasons),
                _verdict(row["biases"], reasons),
                f"{row['layers']} + {row['followed']}" if row["full"] == "exact" else "",
                f"{row['ratio']:.1f}" if row["ratio"] else "",
                row["opacus"].partition(":")[0],
                str(row["frozen_norms"] or ""),
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines.append("## Why models are refused\n")
    lines += [f"{number}. {_plain(reason)}" for reason, number in reasons.items()]
    return "\n".join(lines).rstrip() + "\n"


def _counts(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    refused = sum(row["full"] != "exact" for row in rows)
    wrong = sum("wrong" in row["full"] + row["biases"] for row in rows)
    opacus = [row["opacus"].partition(":")[0] for row in rows]
    return (
        f"Of {len(rows)} models {len(rows) - refused} are exact when all is trained, {refused} are refused and {wrong} "
        f"are wrong. Opacus is exact on {opacus.count('exact')}, refuses {opacus.count('refused')} and is wrong on "
        f"{opacus.count('wrong')} of the same models."
    )


def _verdict(finding: str, reasons: dict[str, int]) -> str:
    kind, _, reason = finding.partition(": ")
    return f"{kind} ({reasons.setdefault(reason, len(reasons) + 1)})" if reason else kind


def _plain(reason: str) -> str:
    return " ".join(reason.split()).replace("|", "\\|").replace("<", "&lt;")
