"""The batch run: notebooks executed one or more at a time, resumed where interrupted, reported at the end.

It writes below ``build/<profile>/``: what is committed changes by :mod:`hyfreedp.experiments.book.committed` alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import shutil
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

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
from hyfreedp.experiments.store.provenance import commit, environment

PACKAGE = Path(hyfreedp.__file__).parent


@dataclass(frozen=True)
class Job:
    """One notebook of a batch: its source and the parameters set in it, ``profile`` among them."""

    source: Path
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        """The stem of its files."""
        return self.source.stem

    @property
    def output(self) -> Path:
        """The folder of its figures and tables."""
        return workspace().output(self.parameters["profile"])

    @property
    def record(self) -> Path:
        """What is kept of its execution."""
        return workspace().build / self.parameters["profile"] / f"{self.name}.json"

    @property
    def command(self) -> str:
        """The command line that does this job alone."""
        settings = [f"{name}={value}" for name, value in self.parameters.items() if name != "profile"]
        words = ["reproduce", "--profile", self.parameters["profile"], "--only", self.name]
        return shlex.join(["python", "-m", "hyfreedp.experiments", *words, *(["--set", *settings] if settings else [])])


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        status: "up to date" if an earlier batch finished the same job and its figures are still there.
        made: names of the files that it made, in its job's folder.
        made_with: versions, hardware and commit of that execution.
    """

    job: Job
    status: Literal["done", "up to date", "failed"]
    seconds: float
    made: Sequence[str] = ()
    made_with: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Origin:
    """Where the training runs of a batch come from.

    Attributes:
        committed: keys of the committed runs that were read, or stood ready to be.
        trained: how many runs the batch trained itself.
        made_with: versions and hardware of the committed ones, a line each.
        again: a sentence on those that were trained once more, then a line each; none if all were trained here.
    """

    committed: frozenset[str] = frozenset()
    trained: int = 0
    made_with: Sequence[str] = ()
    again: Sequence[str] = ()

    def __str__(self) -> str:
        if not self.committed:
            return "every run was trained on this machine"
        ready = f"{len(self.committed):,} runs are read from committed records, {self.trained} others were trained here"
        return f"{ready}; {self.again[0]}" if self.again else ready


def plan(selected: Sequence[Path], profile: str, settings: Mapping[str, str]) -> list[Job]:
    """The jobs of a batch, all parameters checked before anything runs.

    Args:
        settings: parameter name -> text; each goes to those notebooks that have the parameter.
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
    """Run a batch into ``build/<profile>/``, one line per notebook, and write ``report.html`` there; the exit status.

    Runs that the folder of cells lacks are taken from the committed records.

    Args:
        fresh: execute finished notebooks again and train their cells again, in ``build/<profile>/cells``.
        remake: train a few of the committed records again, see :func:`hyfreedp.experiments.runs.again.again`.
    """
    here = workspace()
    folder, cells = here.build / profile, here.cells
    recorded: dict[str, bytes] = {}
    if fresh:
        cells = folder / "cells"
        shutil.rmtree(cells, ignore_errors=True)
        for job in jobs:
            job.record.unlink(missing_ok=True)
    else:
        recorded = archive.read(here.results / profile / archive.NAME)
        archive.unpack(recorded, cells)
    known, path, remade = _runs(cells), folder / "report.html", []
    with patch.dict(os.environ, HYFREEDP_CELLS=str(cells.resolve())):  # which the kernels inherit
        try:
            outcomes = run(jobs, workers)
            if remake:
                shutil.rmtree(folder / "again", ignore_errors=True)  # of the batch before
                remade = again.again(recorded, folder / "again", jobs=workers)
        except KeyboardInterrupt:
            print("\ninterrupted; the same command goes on from here", flush=True)
            return 130
        made = [name for outcome in outcomes for name in outcome.made]
        comparison = committed.compare(here.figures, here.output(profile), made)
        origin = _origin(recorded, cells, known, remade)
        write_text(path, page.page(outcomes, profile, comparison, origin))
    print(*origin.again, origin, comparison, sep="\n", flush=True)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        print(f"\n{outcome.job.name} failed:\n{outcome.error}", flush=True)
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} notebooks finished; report: {path}", flush=True)
    if failed:
        print(f"failed: {', '.join(outcome.job.name for outcome in failed)}", flush=True)
    return 1 if failed or any(one.outcome == "beyond" for one in remade) else 0


def _runs(cells: Path) -> set[str]:
    return {path.stem for path in cells.glob("*.json") if "." not in path.stem}  # a run's scores lie beside it


def _origin(recorded: dict[str, bytes], cells: Path, known: set[str], remade: list[again.Again]) -> Origin:
    keys = archive.unchanged(recorded, cells)
    environments = [json.loads(recorded[f"{key}.json"])["environment"] for key in sorted(keys)]
    made_with = [", ".join(f"{name} {value}" for name, value in one.items()) for one in environments]
    lines = [again.summary(remade, len(recorded) // 2), *map(str, remade)] if remade else []
    return Origin(frozenset(keys), len(_runs(cells) - known), list(dict.fromkeys(made_with)), lines)


def run(jobs: Sequence[Job], workers: int = 1) -> list[Outcome]:
    """Execute what is not up to date; a failed notebook does not stop the others.

    One line is printed for each as it ends, which says what is left, and nothing else.
    """
    outcomes: dict[str, Outcome] = {}

    def ended(outcome: Outcome) -> None:
        outcomes[outcome.job.name] = outcome
        done = outcome.status + ("" if outcome.status == "up to date" else f" after {outcome.seconds:.0f} s")
        left = ", ".join(job.name[:2] for job in jobs if job.name not in outcomes)
        print(f"[{len(outcomes)}/{len(jobs)}] {outcome.job.name}: {done}; {left or 'none'} left", flush=True)

    for job in jobs:
        if finished := _finished(job):
            ended(finished)
    # Threads, because kernels of one process never take each other's ports.
    with ThreadPoolExecutor(workers) as pool:
        # Of several at a time the last first: the later ones run longest, and no worker is idle for long at the end.
        ordered = jobs if workers == 1 else jobs[::-1]
        futures = [pool.submit(_execute, job) for job in ordered if job.name not in outcomes]
        try:
            for future in as_completed(futures):
                ended(future.result())
        except KeyboardInterrupt:
            logging.getLogger("papermill").setLevel(logging.CRITICAL)  # that these kernels die is no error
            for future in futures:
                future.cancel()
            while wait(futures, timeout=0.5).not_done:  # one may just be starting
                _stop_kernels()
            raise
    return [outcomes[job.name] for job in jobs]


def _stop_kernels() -> None:
    for process in psutil.Process().children():
        with suppress(psutil.Error):  # it ended by itself
            if any("ipykernel" in word for word in process.cmdline()):
                process.terminate()


def _execute(job: Job) -> Outcome:
    fingerprint = _fingerprint(job)
    started = time.perf_counter()
    try:
        with closing(ensure_event_loop()):  # Jupyter opens one per thread and leaves it open
            made = notebooks.make(job.source, job.record.with_suffix(".ipynb"), job.parameters)
    except Exception as error:  # a kernel that died or never came up too; the other notebooks may still succeed
        told = str(error) if isinstance(error, papermill.PapermillExecutionError) else traceback.format_exc()
        return Outcome(job, "failed", time.perf_counter() - started, error=told)
    seconds = time.perf_counter() - started
    made_with = {"commit": commit(), **environment()}
    record = {
        "fingerprint": fingerprint,
        "seconds": seconds,
        "made_with": made_with,
        "made": made,
        "files": {str(path): _digest(path) for path in _files(job, made)},
    }
    write_text(job.record, json.dumps(record, indent=1) + "\n")
    return Outcome(job, "done", seconds, made, made_with)


def _finished(job: Job) -> Outcome | None:
    """The outcome of an earlier batch, if executing the job again could give nothing else."""
    record = json.loads(job.record.read_text(encoding="utf-8")) if job.record.exists() else None
    if record is None or record["fingerprint"] != _fingerprint(job):
        return None
    if any(_digest(Path(name)) != digest for name, digest in record["files"].items()):
        return None
    return Outcome(job, "up to date", record["seconds"], record["made"], record["made_with"])


def _fingerprint(job: Job) -> str:
    """Hash of all that the notebook's result follows from, but for the files that it reads."""
    digest = hashlib.sha256(json.dumps([job.parameters, environment()], sort_keys=True).encode())
    for path in [job.source, *sorted(PACKAGE.rglob("*.py"))]:
        digest.update(_digest(path).encode())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    """Hash of a file's content; empty if there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _files(job: Job, made: Sequence[str]) -> set[Path]:
    """The files that a notebook made, and those of the repository that they say they were made from."""
    paths = {job.output / name for name in made}
    described = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.suffix == ".json"]
    read = {workspace().root / name for made_of in described for name in made_of["inputs"]}
    return paths | {path for path in read if path.is_file()}
