"""The batch run: executes notebooks into ``build/<profile>/``, one or more at a time, and writes a report.

Only :mod:`hyfreedp.experiments.book.committed` changes committed files.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import nbformat
import papermill
import psutil
from jupyter_core.utils import ensure_event_loop

import hyfreedp
from hyfreedp.checks import nearest
from hyfreedp.experiments.book import committed, notebooks, page
from hyfreedp.experiments.book.parameters import parse_value
from hyfreedp.experiments.runs import again
from hyfreedp.experiments.store import archive
from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.store.paths import workspace

PACKAGE = Path(hyfreedp.__file__).parent


@dataclass(frozen=True)
class Job:
    """One notebook of a batch: its source, and the parameters to set, among them ``profile``."""

    source: Path
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of its files without their suffixes."""
        return self.source.stem

    @property
    def executed(self) -> Path:
        """The path of the notebook with its outputs."""
        return workspace().build / self.parameters["profile"] / f"{self.name}.ipynb"

    @property
    def command(self) -> str:
        """The command line for this notebook alone."""
        settings = [f"{name}={value}" for name, value in self.parameters.items() if name != "profile"]
        text = f"python -m hyfreedp.experiments reproduce --profile {self.parameters['profile']} --only {self.name}"
        return f"{text} --set {shlex.join(settings)}" if settings else text

    @property
    def done(self) -> bool:
        """Whether it was executed with these parameters, since its source and the package last changed."""
        if not self.executed.exists():
            return False
        newest = max(path.stat().st_mtime for path in (self.source, *PACKAGE.rglob("*.py")))
        known = nbformat.read(self.executed, as_version=4).metadata.get("parameters")
        return self.executed.stat().st_mtime > newest and known == self.parameters


@dataclass(frozen=True)
class Outcome:
    """The result of a job; "up to date" if an earlier batch had finished it."""

    job: Job
    status: Literal["done", "up to date", "failed"]
    seconds: float = 0.0
    error: str = ""


def plan(selected: Sequence[Path], profile: str, settings: Mapping[str, str]) -> list[Job]:
    """The jobs of a batch, with all parameters checked (ValueError or TypeError) before anything runs.

    ``settings`` maps a parameter's name to its text; each is set in those notebooks that have the parameter.
    """
    defaults = {source: notebooks.defaults(source) for source in selected}
    known = sorted({name for own in defaults.values() for name in own} - {"profile"})
    for name in set(settings) - set(known):
        hint = nearest(name, known)
        raise ValueError(f"no selected notebook has a parameter {name!r}: they take {', '.join(known)}{hint}")
    jobs = []
    for source, own in defaults.items():
        given = {name: parse_value(name, text, own[name]) for name, text in settings.items() if name in own}
        jobs.append(Job(source, {"profile": profile} | given))
    return jobs


def reproduce(jobs: Sequence[Job], profile: str, *, workers: int = 1, fresh: bool = False, remake: bool = False) -> int:
    """Run a batch, print one line per notebook, write ``report.html``, and return the exit status.

    Training runs without a cell are read from the committed records.

    Args:
        fresh: execute all notebooks again, and train all their runs again, in ``build/<profile>/cells``.
        remake: train a few committed runs again, see :func:`hyfreedp.experiments.runs.again.again`.
    """
    here = workspace()
    folder, cells = here.build / profile, here.cells
    recorded: dict[str, bytes] = {}
    if fresh:
        cells = folder / "cells"
        shutil.rmtree(cells, ignore_errors=True)
        for job in jobs:
            job.executed.unlink(missing_ok=True)
    else:
        recorded = archive.read(here.results / profile / archive.NAME)
        archive.unpack(recorded, cells)
    known, remade = _runs(cells), []
    inherited = {"HYFREEDP_CELLS": str(cells.resolve())} | ({archive.FRESH: "1"} if fresh else {})
    with patch.dict(os.environ, inherited):  # by the kernels, too
        outcomes = run(jobs, workers)
        if remake:
            shutil.rmtree(folder / "again", ignore_errors=True)  # from an earlier batch
            remade = again.again(recorded, folder / "again", jobs=workers)
    told = [*map(str, remade)]
    told.append(f"{len(recorded) // 2:,} runs are committed records, {_runs(cells) - known} were trained here")
    made = [path.name for job in jobs for path in here.output(profile).glob(f"{job.name}*")]
    told.append(committed.compare(here.figures, here.output(profile), made))
    write_text(folder / "report.html", page.page(outcomes, profile, told))
    print(*told, sep="\n", flush=True)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        print(f"\n{outcome.job.name} failed:\n{outcome.error}", flush=True)
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} notebooks finished; report: {folder / 'report.html'}")
    if failed:
        print(f"failed: {', '.join(outcome.job.name for outcome in failed)}", flush=True)
    return 1 if failed or any(one.outcome == "beyond" for one in remade) else 0


def _runs(cells: Path) -> int:
    return sum("." not in path.stem for path in cells.glob("*.json"))  # not <key>.scores.json, a run's scores


def run(jobs: Sequence[Job], workers: int = 1) -> list[Outcome]:
    """Execute the jobs that are not done, and print a line when each ends; a failed one does not stop the others."""
    outcomes: dict[str, Outcome] = {}

    def ended(outcome: Outcome) -> None:
        outcomes[outcome.job.name] = outcome
        took = outcome.status + ("" if outcome.status == "up to date" else f" after {outcome.seconds:.0f} s")
        left = ", ".join(job.name[:2] for job in jobs if job.name not in outcomes)
        print(f"[{len(outcomes)}/{len(jobs)}] {outcome.job.name}: {took}; {left or 'none'} left", flush=True)

    for job in jobs:
        if job.done:
            ended(Outcome(job, "up to date"))
    # Threads of one process, so that no two kernels get the same ports.
    with ThreadPoolExecutor(workers) as pool:
        # With several workers, the last notebooks begin: they take longest, so that all workers end at about one time.
        ordered = jobs if workers == 1 else jobs[::-1]
        futures = [pool.submit(_execute, job) for job in ordered if job.name not in outcomes]
        try:
            for future in as_completed(futures):
                ended(future.result())
        except KeyboardInterrupt:
            logging.getLogger("papermill").setLevel(logging.CRITICAL)  # silent about the kernels that are stopped here
            for future in futures:
                future.cancel()
            while wait(futures, timeout=0.5).not_done:  # a kernel may be just starting
                _stop_kernels()
            raise
    return [outcomes[job.name] for job in jobs]


def _stop_kernels() -> None:
    for process in psutil.Process().children():
        with suppress(psutil.Error):  # it ended by itself
            if any("ipykernel" in word for word in process.cmdline()):
                process.terminate()


def _execute(job: Job) -> Outcome:
    started = time.perf_counter()
    try:
        with closing(ensure_event_loop()):  # Jupyter makes one for each thread and does not close it
            notebooks.make(job.source, job.executed, job.parameters)
    except Exception as error:  # also if a kernel died or did not start
        told = str(error) if isinstance(error, papermill.PapermillExecutionError) else traceback.format_exc()
        return Outcome(job, "failed", time.perf_counter() - started, told)
    return Outcome(job, "done", time.perf_counter() - started)
