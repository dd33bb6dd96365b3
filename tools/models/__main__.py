"""Measures the engines on current models in small and writes ``docs/models.md``; see ``make models``."""

from __future__ import annotations

import argparse
import fnmatch
import json
import signal
import time
from typing import Any

from catalog import Case, cases
from measure import measure
from page import FINDINGS, PAGE, page

from hyfreedp.experiments.store.files import write_text

_LIMIT = 300  # seconds per model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/models", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="names of models, such as 'swin*' or 'timm/*'; else all")
    parser.add_argument("--missing", action="store_true", help="only models without a finding")
    arguments = parser.parse_args()
    found = json.loads(FINDINGS.read_text(encoding="utf-8")) if FINDINGS.exists() else {}
    wanted = list(cases())
    for case in wanted:
        key = f"{case.library}/{case.name}"
        chosen = not arguments.patterns or any(
            fnmatch.fnmatch(n, p) for n in (key, case.name) for p in arguments.patterns
        )
        if chosen and not (arguments.missing and key in found):
            start = time.perf_counter()
            found[key] = limited(case)
            row = found[key]
            print(
                f"{key:50} full {row['full'][:150]:12} biases {row['biases'][:60]:12} opacus {row['opacus'][:30]:16} "
                f"{row['layers']}+{row['followed']} x{row['ratio']:.2f} {time.perf_counter() - start:.0f} s",
                flush=True,
            )
            write_text(FINDINGS, json.dumps(found, indent=0, sort_keys=True) + "\n")
    found = {
        f"{c.library}/{c.name}": found[f"{c.library}/{c.name}"] for c in wanted if f"{c.library}/{c.name}" in found
    }
    write_text(PAGE, page(found))


def limited(case: Case) -> dict[str, Any]:
    """The findings of one model, or that it took too long."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {_LIMIT} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_LIMIT)
    try:
        return measure(case)
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main()
