"""Command line of the reproduction: ``python -m hyfreedp.experiments --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyfreedp.experiments.book import committed, notebooks, page
from hyfreedp.experiments.book.batch import plan, reproduce
from hyfreedp.experiments.runs.cells import reader, run_cell
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store import archive
from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.experiments.studies import document_runs, dynamics
from hyfreedp.experiments.tables import control, grid, language_generation, small_tasks
from hyfreedp.experiments.tables.plan import SCALES

REPRODUCE = """\
Executes the notebooks and writes them to build/<profile>/, with figures/ and report.html. No committed file changes.

Training runs are read from the committed records, data/results/<profile>/runs.tar.xz, if they are there. Seven of them,
drawn at random, are trained again and compared (not with --only). --fresh trains all runs. An interrupted command can
be repeated: finished runs are in data/cells (or $HYFREEDP_CELLS), and a notebook is executed again only if its source,
its parameters or the package have changed.

examples:
  python -m hyfreedp.experiments reproduce --profile smoke
  python -m hyfreedp.experiments reproduce --only 00 03 --set epsilon=1.0 seeds=5

exit status: 0; 1 if a notebook failed, or a run differs more from its record than another seed would; 2 if the command
is wrong, 130 if interrupted."""

RUN = """\
Trains the run of a spec and prints one line. A finished run is not trained again. One that was killed continues from
its checkpoint and gives the same numbers. If several processes get the same spec, one of them trains.

example:
  echo '{"task": "digits", "method": "robust", "epsilon": 3}' | python -m hyfreedp.experiments run -

exit status: 0; 1 if the run failed, 2 if the command or the spec is wrong, 130 if interrupted."""

GRID = """\
Trains missing runs of the accuracy tables, first the searches for a learning rate on validation data, then the tested
runs, and writes data/results/<profile>/image_classification.csv. An interrupted command can be repeated. A failed run
does not stop the others, and is reported at the end with its error.

exit status: 0; 1 if a run failed; 2 if the command is wrong, 130 if interrupted."""


def _accuracy(options: argparse.Namespace) -> None:
    here = workspace()
    rows = small_tasks.run(here.cells, here.results / "laptop" / "accuracy.csv", seeds=options.seeds, jobs=options.jobs)
    print(small_tasks.gaps(rows).round(1).to_string(index=False))


def _slides(options: argparse.Namespace) -> None:
    path = workspace().build / "slides.html"
    write_text(path, page.slides())
    print(f"{path}: open it in a browser; → and ← lead on and back")


def _control(options: argparse.Namespace) -> None:
    print(control.record(options.profile, workspace().cells, jobs=options.jobs).to_string())


def _fine_tuning(options: argparse.Namespace) -> None:
    rows = dynamics.record(workspace().cells, workspace().results / dynamics.TABLE, jobs=options.jobs)
    print(rows.groupby("series", sort=False).test_accuracy.last().to_string())


def _sentences(options: argparse.Namespace) -> None:
    here = workspace()
    print(language_generation.record(here.cells, here.results, train=not options.write, jobs=options.jobs))


def _documents(options: argparse.Namespace) -> None:
    table = workspace().results / document_runs.TABLE
    rows = document_runs.record(options.file, workspace().cells, table, jobs=options.jobs)
    print(document_runs.rates(rows).to_string())


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hyfreedp.experiments", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int | None], text: str, more: str = "") -> Any:
        raw = argparse.RawDescriptionHelpFormatter
        made = commands.add_parser(name, help=text, description=more or text, formatter_class=raw)
        made.set_defaults(run=run, error=made.error)
        return made

    only: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "NN"}
    only["help"] = "numbers or names of notebooks; else all"
    jobs: dict[str, Any] = {"type": int, "choices": range(1, 65), "default": 1, "metavar": "N"}
    profile: dict[str, Any] = {"choices": notebooks.PROFILES, "default": "laptop", "help": "(default: %(default)s)"}

    batch = command("reproduce", _reproduce, "execute the notebooks into build/<profile>/, with report.html", REPRODUCE)
    batch.add_argument("--only", **only)
    batch.add_argument("--profile", **profile)
    settings: dict[str, Any] = {"nargs": "+", "action": "extend", "default": [], "metavar": "NAME=VALUE"}
    settings["help"] = "parameters, for each notebook that has them; checked before anything runs"
    batch.add_argument("--set", dest="settings", type=_setting, **settings)
    batch.add_argument("--jobs", **jobs, help="notebooks at a time")
    batch.add_argument("--fresh", action="store_true", help="execute all and train all again, in build/<profile>")
    text = "renew what is committed: figures/ and each notebook's .ipynb, on a clean tree"
    command("update", _update, text).add_argument("--only", **only)
    command("slides", _slides, "ten slides of the course: build/slides.html, one file, without network")
    records = command("records", _records, "commit the runs of the last reproduce --fresh as records to read")
    records.add_argument("--profile", **profile)
    small = command("accuracy", _accuracy, "presets against the learning-rate grid; minutes to an hour")
    small.add_argument("--seeds", type=int, default=5)
    tuning = command("fine-tuning", _fine_tuning, "training dynamics on CIFAR-10 for notebook 05; an hour")
    e2e = command("sentences", _sentences, "the language table on all of E2E, for notebook 07; half a day")
    e2e.add_argument("--write", action="store_true", help="train nothing: score and write what is there")
    controls = command("control", _control, "the paper's method by both accountings, for notebook 06")
    controls.add_argument("--profile", choices=("laptop", "desktop"), required=True, help="desktop: hours")
    texts = command("documents", _documents, "rates learned on the documents of a file, for notebook 07; an hour")
    texts.add_argument("file", help=".txt, or .jsonl with the key text or abstract: a record each")
    tables = command("grid", _grid, "train what the accuracy tables need; minutes (laptop) to days (paper)", GRID)
    tables.add_argument("--profile", choices=SCALES, required=True, help="how large")
    for training in (small, tuning, e2e, controls, texts, tables):
        training.add_argument("--jobs", **jobs, help="worker processes")
    cells: dict[str, Any] = {"type": Path, "default": workspace().cells, "metavar": "FOLDER"}
    one = command("run", _run, "train one run, from a file of its fields", RUN)
    one.add_argument("spec", metavar="SPEC.json", help="file with the fields of a run; - for standard input")
    for training in (one, tables):
        training.add_argument("--cells", **cells, help="where records are kept (default: %(default)s)")
    instead = tables.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="only list the runs, done or missing")
    instead.add_argument("--write-specs", type=Path, metavar="FOLDER", help="only write specs, for workflow managers")

    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", flush=True)
        return 130


def _reproduce(options: argparse.Namespace) -> int:
    try:
        jobs = plan(notebooks.sources(options.only), options.profile, dict(options.settings))
    except (TypeError, ValueError) as error:
        options.error(str(error))
    return reproduce(jobs, options.profile, workers=options.jobs, fresh=options.fresh, remake=not options.only)


def _update(options: argparse.Namespace) -> None:
    try:
        committed.update(notebooks.sources(options.only))
    except (ValueError, RuntimeError) as error:
        options.error(str(error))


def _records(options: argparse.Namespace) -> None:
    here = workspace()
    cells, path = here.build / options.profile / "cells", here.results / options.profile / archive.NAME
    if not cells.is_dir():
        options.error(f"{cells} is not there: it is made by reproduce --fresh --profile {options.profile}")
    print(f"{path}: {archive.pack(cells, path)} runs")


def _run(options: argparse.Namespace) -> int:
    try:
        text = sys.stdin.read() if options.spec == "-" else Path(options.spec).read_text(encoding="utf-8")
        spec = Spec.from_json(text)
    except (OSError, TypeError, ValueError) as error:
        options.error(str(error))
    told = "" if reader(options.cells)(spec) is None else "already there: "
    try:
        record = run_cell(spec, options.cells)
    except OSError as error:  # a full disk, a folder without write permission, missing data
        print(f"failed: {error}", file=sys.stderr)
        return 1
    told += f"accuracy {record['accuracy']:.4f}, epsilon {record['epsilon_spent']:.4g}, {record['seconds']:.1f} s"
    print(f"{told}: {options.cells / spec.key}.json")
    return 0


def _grid(options: argparse.Namespace) -> int | None:
    if options.dry_run:
        print(grid.listing(options.profile, options.cells))
    elif options.write_specs:
        grid.write_specs(options.profile, options.cells, options.write_specs)
    else:
        return grid.run(options.profile, options.cells, workspace().results, jobs=options.jobs)
    return None


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
