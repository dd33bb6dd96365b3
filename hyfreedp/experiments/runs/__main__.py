"""One cell: ``python -m hyfreedp.experiments.runs SPEC.json`` trains what the spec says, once."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hyfreedp.experiments.runs.cells import read_cell, run_cell
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.paths import workspace

DESCRIPTION = """\
Trains what the spec says and prints one line. A finished cell is not trained again; one that was killed, however it
was, goes on from its checkpoint to the numbers that an undisturbed run gives. Of several processes with the same spec
one trains, and the others wait for it.

example:
  echo '{"task": "digits", "method": "robust", "epsilon": 3}' | python -m hyfreedp.experiments.runs -

exit status: 0; 1 if the run failed, 2 if the command or the spec is wrong, 130 if interrupted."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hyfreedp.experiments.runs",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("spec", metavar="SPEC.json", help="file with the fields of a run; - for standard input")
    cells = workspace().cells
    parser.add_argument(
        "--cells", type=Path, default=cells, metavar="FOLDER", help="where records are kept (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        text = sys.stdin.read() if options.spec == "-" else Path(options.spec).read_text(encoding="utf-8")
        spec = Spec.from_json(text)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    there = read_cell(spec, options.cells) is not None
    try:
        record = run_cell(spec, options.cells)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    except OSError as error:  # a full disk, a folder that may not be written to, data that are not there
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print(
        "already there: " if there else "",
        f"accuracy {record['accuracy']:.4f}, epsilon {record['epsilon_spent']:.4g}, {record['seconds']:.1f} s: ",
        options.cells / f"{spec.key}.json",
        sep="",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
