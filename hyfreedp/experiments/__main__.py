"""Command line of the reproduction: ``python -m hyfreedp.experiments --help``."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from hyfreedp.experiments.book import committed, notebooks
from hyfreedp.experiments.book.batch import reproduce
from hyfreedp.experiments.book.jobs import plan
from hyfreedp.experiments.store import archive
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.experiments.studies import calibration, dynamics, fine_tuning, weights
from hyfreedp.experiments.tables import grid, language_generation, small_tasks, targets
from hyfreedp.experiments.tables import plan as comparison

REPRODUCE = """\
Executes the notebooks and writes build/<profile>/: the notebooks, figures/, and report.html. No committed file changes.
It prints a line for each notebook as it ends, with the numbers of those that are left.

Training runs are read from the committed records, data/results/<profile>/runs.tar.xz, as far as these have them, and
seven of those, others each time, are trained again and compared (not with --only). --fresh trains all.

An interrupted or repeated command goes on where it was: training runs are kept as cells in data/cells (or
$HYFREEDP_CELLS), and a notebook is executed again only if its source, its parameters, the package, the files it
read or the figures it made have changed since. A failed notebook does not stop the others; it is named at the
end with its traceback.

examples:
  python -m hyfreedp.experiments reproduce --profile smoke
  python -m hyfreedp.experiments reproduce --only 00 03 --set epsilon=1.0 seeds=5

exit status: 0; 1 if a notebook failed, or if a run ended farther from its record than another seed would; 2 if the
command is wrong, 130 if interrupted."""

GRID = """\
Trains the runs of the accuracy tables that are missing, first those that search a learning rate on validation data,
then those that are tested, and writes data/results/<profile>/image_classification.csv.

An interrupted or repeated command goes on where it was. A failed run does not stop the others; it is named at the end
with its error.

exit status: 0; 1 if a run failed, or if one trained again ended farther from its record than another seed would; 2 if
the command is wrong, 130 if interrupted."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hyfreedp.experiments", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    only = argparse.ArgumentParser(add_help=False)
    only.add_argument("--only", nargs="+", default=[], metavar="NN", help="numbers or names of notebooks; else all")

    batch = commands.add_parser(
        "reproduce",
        parents=[only],
        help="execute the notebooks into build/<profile>/, with report.html",
        description=REPRODUCE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    batch.add_argument("--profile", choices=notebooks.PROFILES, default="laptop", help="how large (default: laptop)")
    batch.add_argument(
        "--set",
        dest="settings",
        nargs="+",
        action="extend",
        type=_setting,
        default=[],
        metavar="NAME=VALUE",
        help="parameters, for each notebook that has them; checked before anything runs",
    )
    batch.add_argument("--jobs", type=int, choices=range(1, 65), default=1, metavar="N", help="notebooks at a time")
    batch.add_argument(
        "--fresh",
        action="store_true",
        help="execute all again and train every cell again, in build/<profile>/cells, which is emptied first",
    )
    batch.set_defaults(run=_reproduce, error=batch.error)

    renewed = commands.add_parser(
        "update", parents=[only], help="renew what is committed: figures/ and each notebook's .ipynb, on a clean tree"
    )
    renewed.set_defaults(run=_update, error=renewed.error)

    records = commands.add_parser("records", help="commit the runs of the last reproduce --fresh as records to read")
    records.add_argument("--profile", choices=notebooks.PROFILES, default="laptop", help="of which (default: laptop)")
    records.set_defaults(run=_records, error=records.error)

    accuracy = commands.add_parser("accuracy", help="presets against the learning-rate grid; minutes to an hour")
    accuracy.add_argument("--seeds", type=int, default=5)
    accuracy.add_argument("--jobs", type=int, default=1, help="worker processes")
    accuracy.set_defaults(run=_accuracy)

    ablation = commands.add_parser("ablation", help="step rules and parts of the line search, on digits; some minutes")
    ablation.add_argument("--seeds", type=int, default=5)
    ablation.add_argument("--jobs", type=int, default=1, help="worker processes")
    ablation.set_defaults(run=_ablation)

    sureness = commands.add_parser("calibration", help="how sure models are, and what mends it; a quarter of an hour")
    sureness.set_defaults(run=_calibration)

    real = commands.add_parser("fine-tuning", help="training dynamics on CIFAR-10 for notebook 05; an hour")
    real.add_argument("--jobs", type=int, default=1, help="worker processes")
    real.set_defaults(run=_fine_tuning)

    language = commands.add_parser("sentences", help="the language table on all of E2E, for notebook 07; half a day")
    language.add_argument("--jobs", type=int, default=1, help="worker processes")
    language.add_argument("--write", action="store_true", help="train nothing: score and write what is there")
    language.set_defaults(run=_sentences)

    reach = commands.add_parser("targets", help="preset robust against sixteen rates and schedules; two hours")
    reach.add_argument("--only", choices=sorted({group.task for group in targets.GROUPS}), default="", help="one task")
    reach.add_argument("--jobs", type=int, default=1, help="worker processes")
    reach.set_defaults(run=_targets)

    classes = commands.add_parser("weights", help="weights of classes, ours and Opacus's, on imbalanced tasks; minutes")
    classes.set_defaults(run=_weights)

    tables = commands.add_parser(
        "grid",
        help="train what the accuracy tables need; minutes (laptop) to days (paper)",
        description=GRID,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tables.add_argument("--profile", choices=comparison.SCALES, required=True, help="how large")
    tables.add_argument("--jobs", type=int, choices=range(1, 65), default=1, metavar="N", help="worker processes")
    cells = workspace().cells
    tables.add_argument(
        "--cells", type=Path, default=cells, metavar="FOLDER", help="where records are kept (default: %(default)s)"
    )
    instead = tables.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="only list the runs, done or missing")
    instead.add_argument(
        "--write-specs", type=Path, metavar="FOLDER", help="only write the runs' specs, for workflow managers"
    )
    instead.add_argument(
        "--again", type=int, metavar="N", help="train N committed numbers again, others each time, and compare"
    )
    tables.set_defaults(run=_grid, error=tables.error)

    options = parser.parse_args(arguments)
    return options.run(options)


def _reproduce(options: argparse.Namespace) -> int:
    try:
        jobs = plan(notebooks.sources(options.only), options.profile, dict(options.settings))
    except (TypeError, ValueError) as error:
        options.error(str(error))
    whole = not options.only
    return reproduce(jobs, options.profile, workers=options.jobs, fresh=options.fresh, remake=whole)


def _update(options: argparse.Namespace) -> int:
    try:
        committed.update(notebooks.sources(options.only))
    except (ValueError, RuntimeError) as error:
        options.error(str(error))
    return 0


def _records(options: argparse.Namespace) -> int:
    here = workspace()
    cells, path = here.build / options.profile / "cells", here.results / options.profile / archive.NAME
    if not cells.is_dir():
        options.error(f"{cells} is not there: it is made by reproduce --fresh --profile {options.profile}")
    print(f"{path}: {archive.pack(cells, path)} runs")
    return 0


def _accuracy(options: argparse.Namespace) -> int:
    here = workspace()
    rows = small_tasks.run(here.cells, here.results / "laptop" / "accuracy.csv", seeds=options.seeds, jobs=options.jobs)
    print(small_tasks.markdown(rows))
    return 0


def _ablation(options: argparse.Namespace) -> int:
    here = workspace()
    record = here.results / "laptop" / "ablation.csv"
    rows = dynamics.record_ablation(here.cells, record, seeds=options.seeds, jobs=options.jobs)
    print(dynamics.accuracy_table(rows).to_string())
    return 0


def _calibration(_: argparse.Namespace) -> int:
    print(calibration.markdown(calibration.record(workspace().results / "laptop" / "calibration.csv")))
    return 0


def _fine_tuning(options: argparse.Namespace) -> int:
    rows = fine_tuning.record(workspace().cells, fine_tuning.record_path(), jobs=options.jobs)
    print(rows.groupby("series", sort=False).test_accuracy.last().to_string())
    return 0


def _sentences(options: argparse.Namespace) -> int:
    here = workspace()
    print(language_generation.record(here.cells, here.results, train=not options.write, jobs=options.jobs))
    return 0


def _targets(options: argparse.Namespace) -> int:
    here = workspace()
    rows = targets.run(here.cells, here.results / "laptop" / "targets.csv", only=options.only, jobs=options.jobs)
    print(targets.markdown(rows))
    return 0


def _weights(options: argparse.Namespace) -> int:
    print(weights.markdown(weights.record(workspace().results / "laptop" / "weights.csv")))
    return 0


def _grid(options: argparse.Namespace) -> int:
    if options.dry_run:
        print(grid.listing(options.profile, options.cells))
    elif options.write_specs:
        grid.write_specs(options.profile, options.cells, options.write_specs)
    elif options.again is not None:
        return _grid_again(options)
    else:
        return grid.run(options.profile, options.cells, workspace().results, jobs=options.jobs)
    return 0


def _grid_again(options: argparse.Namespace) -> int:
    here = workspace()
    folder, table = here.build / options.profile / "again", here.results / options.profile / comparison.TABLE
    if options.again < 1:
        options.error(f"--again must be at least 1, got {options.again}")
    if not table.exists():
        options.error(f"no number of profile {options.profile} is committed: {table} is not there")
    shutil.rmtree(folder, ignore_errors=True)  # of the time before
    return grid.again(options.profile, folder, here.results, number=options.again, jobs=options.jobs)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
