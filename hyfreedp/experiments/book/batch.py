"""The batch run: notebooks executed one or more at a time, resumed where interrupted, reported at the end.

It writes below ``build/<profile>/``: what is committed changes by :mod:`hyfreedp.experiments.book.committed` alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import papermill
import psutil
from jupyter_core.utils import ensure_event_loop

import hyfreedp
from hyfreedp.experiments.book import committed, notebooks, page
from hyfreedp.experiments.book.jobs import Job, Origin, Outcome
from hyfreedp.experiments.runs import again
from hyfreedp.experiments.store import archive
from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.experiments.store.provenance import commit, environment

PACKAGE = Path(hyfreedp.__file__).parent


def reproduce(jobs: Sequence[Job], profile: str, *, workers: int = 1, fresh: bool = False, remake: bool = False) -> int:
    """Run a batch into ``build/<profile>/``, one line per notebook, and write ``report.html`` there; the exit status.

    Runs that the folder of cells lacks are taken from the committed records.

    Args:
        fresh: execute finished notebooks again and train their cells again, in ``build/<profile>/cells``.
        remake: train a few of the committed records again, see :func:`hyfreedp.experiments.runs.again.again`.
    """
    here = workspace()
    folder, cells = here.build / profile, here.cells
    committed_runs: dict[str, bytes] = {}
    if fresh:
        cells = folder / "cells"
        shutil.rmtree(cells, ignore_errors=True)
        for job in jobs:
            _record_path(job).unlink(missing_ok=True)
    else:
        committed_runs = archive.read(here.results / profile / archive.NAME)
        archive.unpack(committed_runs, cells)
    known = _runs(cells)
    path = folder / "report.html"
    with _environment(HYFREEDP_CELLS=str(cells.resolve())):
        try:
            outcomes = run(jobs, workers)
            remade = _remade(committed_runs, folder / "again", workers) if remake else []
        except KeyboardInterrupt:
            print("\ninterrupted; the same command goes on from here", flush=True)
            return 130
        made = [name for outcome in outcomes for name in outcome.made]
        comparison = committed.compare(here.figures, here.output(profile), made)
        origin = _origin(committed_runs, cells, known, remade)
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


def _remade(committed_runs: dict[str, bytes], folder: Path, workers: int) -> list[again.Again]:
    shutil.rmtree(folder, ignore_errors=True)  # of the batch before
    return again.again(committed_runs, folder, jobs=workers)


def _origin(committed_runs: dict[str, bytes], cells: Path, known: set[str], remade: list[again.Again]) -> Origin:
    keys = archive.unchanged(committed_runs, cells)
    environments = [json.loads(committed_runs[f"{key}.json"])["environment"] for key in sorted(keys)]
    made_with = [", ".join(f"{name} {value}" for name, value in one.items()) for one in environments]
    lines = [again.summary(remade, len(committed_runs) // 2), *map(str, remade)] if remade else []
    return Origin(frozenset(keys), len(_runs(cells) - known), list(dict.fromkeys(made_with)), lines)


def run(jobs: Sequence[Job], workers: int = 1) -> list[Outcome]:
    """Execute what is not up to date; a failed notebook does not stop the others.

    One line is printed for each as it ends, which says what is left, and nothing else.
    """
    outcomes: dict[str, Outcome] = {}

    def ended(outcome: Outcome) -> None:
        outcomes[outcome.job.name] = outcome
        done = "up to date" if outcome.status == "up to date" else f"{outcome.status} after {outcome.seconds:.0f} s"
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
            made = notebooks.make(job.source, _record_path(job).with_suffix(".ipynb"), job.parameters)
    except papermill.PapermillExecutionError as error:
        return Outcome(job, "failed", time.perf_counter() - started, error=str(error))
    except Exception:  # a kernel that died or never came up; the other notebooks may still succeed
        return Outcome(job, "failed", time.perf_counter() - started, error=traceback.format_exc())
    seconds = time.perf_counter() - started
    made_with = {"commit": commit(), **environment()}
    record = {
        "fingerprint": fingerprint,
        "seconds": seconds,
        "made_with": made_with,
        "made": {name: _digest(job.output / name) for name in made},
        "read": {name: _digest(workspace().root / name) for name in _inputs(job, made)},
    }
    write_text(_record_path(job), json.dumps(record, indent=1) + "\n")
    return Outcome(job, "done", seconds, made, made_with)


def _finished(job: Job) -> Outcome | None:
    """The outcome of an earlier batch, if executing the job again could give nothing else."""
    path = _record_path(job)
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if record is None or record["fingerprint"] != _fingerprint(job):
        return None
    files = [(job.output, record["made"]), (workspace().root, record["read"])]
    if any(_digest(folder / name) != digest for folder, digests in files for name, digest in digests.items()):
        return None
    return Outcome(job, "up to date", record["seconds"], list(record["made"]), record["made_with"])


def _record_path(job: Job) -> Path:
    return workspace().build / job.parameters["profile"] / f"{job.name}.json"


def _fingerprint(job: Job) -> str:
    """Hash of all that the notebook's result follows from, but for the files that it reads."""
    digest = hashlib.sha256(json.dumps([job.parameters, environment()], sort_keys=True).encode())
    package = sorted(path for path in PACKAGE.rglob("*.*") if path.suffix in (".py", ".html", ".css", ".js"))
    for path in [job.source, *package]:
        digest.update(_digest(path).encode())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    """Hash of a file's content; empty if there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _inputs(job: Job, made: Sequence[str]) -> set[str]:
    """The files of the repository that figures and tables say they were made from."""
    root = workspace().root
    paths = [job.output / name for name in made if name.endswith(".json")]
    described = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return {name for made_of in described for name in made_of["inputs"] if (root / name).is_file()}


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Environment variables that the kernels inherit."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
