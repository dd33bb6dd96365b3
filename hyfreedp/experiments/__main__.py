"""Command line of the reproduction: ``python -m hyfreedp.experiments --help``."""

from __future__ import annotations

import argparse
import sys

from hyfreedp.experiments import notebooks, study
from hyfreedp.experiments.paths import CELLS, RESULTS


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hyfreedp.experiments", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    reproduce = commands.add_parser("reproduce", help="execute the notebooks, write figures/ and print a summary")
    reproduce.add_argument("--profile", choices=notebooks.PROFILES, default="laptop")

    commands.add_parser("notebooks", help="execute each notebook's .py source into the .ipynb beside it")

    accuracy = commands.add_parser("accuracy", help="presets against the learning-rate grid; minutes to an hour")
    accuracy.add_argument("--evaluation", choices=("test", "validation"), default="test")
    accuracy.add_argument("--seeds", type=int, default=5)
    accuracy.add_argument("--jobs", type=int, default=1, help="worker processes")

    options = parser.parse_args(arguments)
    if options.command == "reproduce":
        return notebooks.reproduce(options.profile)
    if options.command == "notebooks":
        return notebooks.pair()
    suffix = "" if options.evaluation == "test" else f"_{options.evaluation}"
    rows = study.run(
        CELLS,
        RESULTS / "laptop" / f"accuracy{suffix}.csv",
        evaluation=options.evaluation,
        seeds=options.seeds,
        jobs=options.jobs,
    )
    print(study.markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
