"""What becomes of a run that something happens to: every fault is made for real, and its outcome shown.

``python tests/faults.py`` (``make faults``) ends each fault in the numbers of an undisturbed run (record and per-step
rows equal to the last bit, the seconds aside) or in one sentence, and writes the table ``tests/FAULTS.md``. The exit
status is 1 if an outcome is another.

The faults befall child processes, forked from this one so that fifty kills need no fifty imports of PyTorch; in all
else they run the code of the commands. Their runs are short, and save a checkpoint after every step.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import io
import itertools
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import torch
from torchvision.datasets.utils import download_and_extract_archive
from tqdm import tqdm

from hyfreedp import HyFreeDPOptimizer
from hyfreedp.experiments.data import datasets
from hyfreedp.experiments.data.image_files import Part
from hyfreedp.experiments.runs import __main__ as cell
from hyfreedp.experiments.runs import cells, train
from hyfreedp.experiments.runs.cells import read_cell, read_steps, run_cell
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.store.paths import ROOT
from hyfreedp.experiments.tables import grid
from hyfreedp.experiments.tables import plan as comparison
from hyfreedp.experiments.tables.plan import Learner, Scale

TABLE = ROOT / "tests" / "FAULTS.md"
SPEC = Spec(method="robust", epsilon=8.0, steps=16)
SCALE = Scale((Learner("digits", "mlp", "full", 5),), epsilons=(3.0,), seeds=1, rows=("vanilla", "reference"))
STEP = HyFreeDPOptimizer.step
SAME = "same numbers"
FORK = get_context("fork")

Fault = Callable[[Path, int], str]
FAULTS: dict[str, Fault] = {}


def fault(name: str) -> Callable[[Fault], Fault]:
    """Add a function of an empty folder and a number of kills that makes a fault and returns its outcome."""

    def add(function: Fault) -> Fault:
        FAULTS[name] = function
        return function

    return add


# ---- children, and what they leave -----------------------------------------------------------------------------------


def _child(function: Callable[[], int | None], output: Path) -> None:
    os.setsid()  # so that it can be killed with its workers
    with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            status = function() or 0
        except BaseException:
            traceback.print_exc()
            status = 1
    os._exit(status)


def start(function: Callable[[], int | None], output: Path) -> ForkProcess:
    """Run a function in a child process; what it prints goes to a file."""
    process = FORK.Process(target=_child, args=(function, output))
    process.start()
    return process


def call(function: Callable[[], int | None], folder: Path) -> tuple[int, str]:
    """Exit status of a child that runs a function, and what it printed."""
    output = folder / "output"
    process = start(function, output)
    process.join()
    assert process.exitcode is not None
    return process.exitcode, output.read_text().replace(str(folder), "FOLDER").strip()


def command(folder: Path, checkpoint_seconds: float = 0.0) -> int:
    """As ``python -m hyfreedp.experiments.runs``, but for the time between checkpoints."""
    train.CHECKPOINT_SECONDS = checkpoint_seconds
    (folder / "spec.json").write_text(SPEC.to_json())
    return cell.main([str(folder / "spec.json"), "--cells", str(folder / "cells")])


def result(spec: Spec, cells: Path) -> str:
    """Everything that a finished cell says, without the seconds."""
    record = read_cell(spec, cells)
    assert record is not None, "there is no record"
    record["seconds"] = None
    return json.dumps(record) + (cells / f"{spec.key}.csv").read_text()


@functools.cache
def undisturbed() -> tuple[str, float]:
    """Result of the run, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):  # the first also fills the caches that the children inherit
            started = time.perf_counter()
            run_cell(SPEC, Path(folder) / str(started))
        return result(SPEC, Path(folder) / str(started)), time.perf_counter() - started


def same(folder: Path) -> str:
    """Compare the cell in a folder with the undisturbed one, and see that nothing else was left."""
    assert result(SPEC, folder / "cells") == undisturbed()[0], "the numbers are others"
    names = sorted(path.name for path in (folder / "cells").iterdir())
    assert names == [f"{SPEC.key}.csv", f"{SPEC.key}.json"], f"left behind: {names}"
    return SAME


def finish(folder: Path) -> str:
    """Run the command again, and compare."""
    status, printed = call(lambda: command(folder), folder)
    assert status == 0, printed
    return same(folder)


def sentence(printed: str) -> str:
    """The last line, which is all there may be but progress and warnings; no traceback."""
    assert "Traceback" not in printed, printed
    return printed.splitlines()[-1]


def warnings_in(printed: str) -> list[str]:
    return [line.split("RuntimeWarning: ")[1] for line in printed.splitlines() if "RuntimeWarning: " in line]


# ---- kills -----------------------------------------------------------------------------------------------------------


@fault("kill -9 at random moments of a run")
def kill_run(folder: Path, kills: int) -> str:
    chance = random.Random(1)
    done = finished = 0
    while done < kills:
        home = folder / str(finished)
        home.mkdir()
        while done < kills:
            process = start(functools.partial(command, home), home / "output")
            process.join(chance.uniform(0, undisturbed()[1]))
            process.kill()
            process.join()
            if process.exitcode != -signal.SIGKILL:
                break
            done += 1
        finish(home)
        finished += 1
    return f"{SAME}: {done} kills, {finished} runs"


def small_grid(folder: Path, jobs: int = 2) -> int:
    """The command ``grid``, as small as can be."""
    comparison.SCALES["smoke"] = SCALE
    train.CHECKPOINT_SECONDS = 0.0
    cells.get_context = lambda _: FORK  # workers without a new import of everything
    return grid.run("smoke", folder / "cells", folder / "results", jobs=jobs)


@functools.cache
def undisturbed_grid() -> tuple[dict[str, str], float]:
    """Everything that the records, rows and tables of the grid say; seconds."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        for name in ("first", "second"):  # the first also fills the caches that the children inherit
            started = time.perf_counter()
            status = small_grid(Path(folder) / name, jobs=1)
            assert status == 0, f"exit status {status}"
        return grid_results(Path(folder) / name), time.perf_counter() - started


def grid_results(folder: Path) -> dict[str, str]:
    cells = folder / "cells"
    specs = [Spec.from_json(json.dumps(json.loads(path.read_text())["spec"])) for path in cells.glob("*.json")]
    table = pd.read_csv(next((folder / "results").rglob("*.csv"))).drop(columns="seconds", errors="ignore")
    return {spec.key: result(spec, cells) for spec in specs} | {"table": table.to_csv()}


@fault("kill -9 at random moments of a grid: of the command, a worker, or all")
def kill_grid(folder: Path, kills: int) -> str:
    chance = random.Random(2)
    expected, seconds = undisturbed_grid()
    done = finished = 0
    while done < kills:
        home, started = folder / str(finished), []
        home.mkdir()
        while done < kills:
            process = start(functools.partial(small_grid, home), home / "output")
            started.append(process)
            process.join(chance.uniform(0, seconds))
            if process.exitcode == 0:
                break
            whom = chance.choice(("command", "worker", "all"))
            workers = psutil.Process(process.pid).children() if process.is_alive() else []
            if whom == "worker" and workers:
                chance.choice(workers).kill()
                process.join()  # it goes on without, and names the run that was lost
            elif whom == "all":
                _kill_group(process)
            process.kill()  # workers that are left end after the run they are at
            process.join()
            done += 1
        status, printed = call(lambda home=home: small_grid(home), home)  # type: ignore[misc]
        assert status == 0, printed
        assert grid_results(home) == expected, "the numbers are others"
        finished += 1
        for process in started:  # forked workers hold each other's pipes open, and so do not see that the command died
            _kill_group(process)
    return f"{SAME}: {done} kills, {finished} grids"


def _kill_group(process: ForkProcess) -> None:
    assert process.pid is not None
    with suppress(ProcessLookupError):  # none is left, or it has not called setsid yet
        os.killpg(process.pid, signal.SIGKILL)


@fault("a worker process dies")
def worker_dies(folder: Path, kills: int) -> str:
    def dies(self: HyFreeDPOptimizer, *args: object) -> object:
        if self.ledger.steps == 3 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return STEP(self, *args)

    def disturbed() -> int:
        HyFreeDPOptimizer.step = dies
        return small_grid(folder)

    status, printed = call(disturbed, folder)
    lines = [line for line in printed.splitlines() if line.startswith("failed: ")]
    assert status == 1 and len(lines) == 1, printed
    status, printed = call(lambda: small_grid(folder), folder)
    assert status == 0 and grid_results(folder) == undisturbed_grid()[0], printed
    return f'the other runs end; "{lines[0].split("): ", 1)[1]}"; the same command then gives the {SAME}'


@fault("two processes on one cell")
def company(folder: Path, kills: int) -> str:
    processes = [start(lambda: command(folder), folder / f"output{number}") for number in range(2)]
    for process in processes:
        process.join()
    printed = [(folder / f"output{number}").read_text() for number in range(2)]
    assert [process.exitcode for process in processes] == [0, 0], printed
    # Both print the record of the one that trained, its seconds included.
    assert len({line.removeprefix("already there: ") for line in printed}) == 1, printed
    return f"one trains, the other waits: {same(folder)}"


# ---- disks -----------------------------------------------------------------------------------------------------------


def full_disk(folder: Path, size: int) -> None:
    """Give this process a disk of ``size`` bytes at a folder, or files of at most that size where it may not mount."""
    folder.mkdir()
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux" and library.unshare(0x20000) == 0:  # mounts of its own, which end with the process
        options = ("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
        if all(
            subprocess.run(["mount", *words], capture_output=True).returncode == 0
            for words in (("--make-rprivate", "/"), options)
        ):
            return
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@fault("the disk is full when a checkpoint is written")
def full_at_checkpoint(folder: Path, kills: int) -> str:
    def disturbed() -> int:
        full_disk(folder / "cells", 100_000)  # enough for the record
        if (status := command(folder)) == 0:
            same(folder)  # here, as what is mounted ends with this process
        return status

    status, printed = call(disturbed, folder)
    assert status == 0, printed
    return f'"{warnings_in(printed)[0]}": {SAME}'


@fault("the disk is full when the record is written")
def full_at_record(folder: Path, kills: int) -> str:
    def disturbed() -> int:
        full_disk(folder / "cells", 1)  # a page
        (folder / "cells" / "other").write_bytes(bytes(1))
        status = command(folder, checkpoint_seconds=math.inf)
        left = [path.name for path in (folder / "cells").iterdir() if path.suffix not in (".lock", "")]
        assert not left, f"left behind: {left}"
        return status

    status, printed = call(disturbed, folder)
    assert status == 1, printed
    for path in (folder / "cells").iterdir():  # where mounting was not allowed
        path.unlink()
    finish(folder)
    return f'"{sentence(printed)}", nothing half-written'


@fault("the folder for results is read-only")
def read_only(folder: Path, kills: int) -> str:
    (folder / "cells").mkdir()
    (folder / "cells").chmod(0o555)

    def disturbed() -> int:
        HyFreeDPOptimizer.step = None  # nothing is trained
        (folder / "spec.json").write_text(SPEC.to_json())
        if os.geteuid() == 0:  # may write everywhere
            os.chmod(folder, 0o755)
            os.setuid(65534)
        return cell.main([str(folder / "spec.json"), "--cells", str(folder / "cells")])

    status, printed = call(disturbed, folder)
    assert status == 1, printed
    return f'"{sentence(printed)}", before the training'


def damaged(folder: Path, damage: Callable[[Path], None], which: str = "*.ckpt") -> tuple[str, int]:
    """Kill a run at its tenth step, damage what it left, finish it; the warnings, and how many steps were trained."""

    def dies(self: HyFreeDPOptimizer, *args: object) -> object:
        if self.ledger.steps == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return STEP(self, *args)

    def killed() -> int:
        HyFreeDPOptimizer.step = dies
        return command(folder)

    def counted() -> int:
        steps = itertools.count(1)

        def step(self: HyFreeDPOptimizer, *args: object) -> object:
            (folder / "steps").write_text(str(next(steps)))
            return STEP(self, *args)

        HyFreeDPOptimizer.step = step
        return command(folder)

    status, printed = call(killed, folder)
    assert status == -signal.SIGKILL, printed
    for path in (folder / "cells").glob(which):
        damage(path)
    status, printed = call(counted, folder)
    assert status == 0, printed
    same(folder)
    return '"' + '", "'.join(warnings_in(printed)) + '"', int((folder / "steps").read_text())


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def flip(path: Path) -> None:
    """Another value of one bit."""
    content = bytearray(path.read_bytes())
    place = random.Random(3).randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


@fault("the newest checkpoint is truncated")
def truncated(folder: Path, kills: int) -> str:
    said, steps = damaged(folder, truncate)
    assert steps == 16 - 8, f"{steps} steps were trained"
    return f"{said}: {SAME}"


@fault("one bit of the newest checkpoint is flipped")
def flipped(folder: Path, kills: int) -> str:
    said, steps = damaged(folder, flip)
    assert steps == 16 - 8, f"{steps} steps were trained"
    return f"{said}: {SAME}"


@fault("both checkpoints are damaged")
def both_damaged(folder: Path, kills: int) -> str:
    said, steps = damaged(folder, truncate, "*.ckpt*")
    assert steps == 16, f"{steps} steps were trained"
    return f"{said}: {SAME}"


# ---- clock, network, numbers -----------------------------------------------------------------------------------------


@fault("all clocks go backwards, an hour per look")
def clock(folder: Path, kills: int) -> str:
    def disturbed() -> int:
        for name in ("time", "monotonic", "perf_counter"):
            ticks = itertools.count(getattr(time, name)(), -3600.0)
            setattr(time, name, functools.partial(next, ticks))
        cells.run_cells([SPEC], folder / "cells")  # with its progress bar
        return 0

    status, printed = call(disturbed, folder)
    assert status == 0, printed
    return same(folder)


@contextmanager
def server(content: bytes, broken: threading.Event) -> Iterator[str]:
    """Address of an archive; while ``broken``, downloads end halfway."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if broken.is_set() else content)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}/images.zip"
        listening.shutdown()


@fault("a download is interrupted")
def download(folder: Path, kills: int) -> str:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    packed, array = io.BytesIO(), io.BytesIO()
    np.save(array, pixels)
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("images.npy", array.getvalue())
    checksum = hashlib.md5(packed.getvalue()).hexdigest()

    def disturbed() -> int:
        os.environ.pop("HYFREEDP_DATA", None)
        datasets.CACHE = folder / "cache"
        broken = threading.Event()
        broken.set()
        with server(packed.getvalue(), broken) as address:

            def official(place: Path, may_download: bool) -> tuple[Part, Part]:
                download_and_extract_archive(address, place, md5=checksum)
                images = np.load(place / "images.npy")
                return Part(np.arange(20), images[:20], 32), Part(np.arange(10), images[20:], 32)

            datasets.IMAGES["svhn"] = datasets.ImageSet("SVHN", (20, 10), 16, official)
            try:
                datasets.images("svhn")
            except FileNotFoundError as error:
                (folder / "said").write_text(str(error).split(": connect")[0])
            assert not list((folder / "cache").iterdir()), "something is left of it"
            broken.clear()
            found = datasets.images("svhn")
        assert np.array_equal(found.test[0].numpy(), pixels[20:].transpose(0, 3, 1, 2))
        return 0

    status, printed = call(disturbed, folder)
    assert status == 0, printed
    said = (folder / "said").read_text().replace(str(folder), "FOLDER")
    return f'"{said}", nothing is left; the next try gives the whole'


def with_nan(folder: Path, rows: slice) -> str:
    """Losses of some records of every batch are NaN from the eighth step on."""

    def step(self: HyFreeDPOptimizer, loss: Callable[[object], torch.Tensor], batch: object) -> object:
        def spoilt(piece: object) -> torch.Tensor:
            losses = loss(piece)
            factors = torch.ones_like(losses)
            if self.ledger.steps >= 7:
                factors[rows] = math.nan
            return losses * factors

        record = STEP(self, spoilt, batch)
        finite = all(bool(parameter.isfinite().all()) for parameter in self.module.parameters())
        assert finite, f"weights are not finite after step {self.ledger.steps}"
        return record

    def disturbed() -> int:
        HyFreeDPOptimizer.step = step
        return command(folder)

    status, printed = call(disturbed, folder)
    assert status == 0, printed
    rows_of_steps = read_steps(SPEC, folder / "cells")
    assert len(rows_of_steps) == SPEC.steps and np.isfinite(rows_of_steps.eta).all()
    record = read_cell(SPEC, folder / "cells")
    assert record is not None and record["epsilon_spent"] <= SPEC.epsilon
    return f"the run goes on to its end, weights and learning rates finite, accuracy {record['accuracy']:.2f}"


@fault("the loss of one record is NaN from the middle of a run on")
def one_nan(folder: Path, kills: int) -> str:
    return with_nan(folder, slice(0, 1))


@fault("all losses are NaN from the middle of a run on")
def all_nan(folder: Path, kills: int) -> str:
    return with_nan(folder, slice(None))


# ---- the table -------------------------------------------------------------------------------------------------------

HEAD = """# What happens to a run

Made by `make faults`. "{same}": the record and the rows of all steps equal those of an undisturbed run to the last bit.
Texts in quotation marks are what the user reads. Python {python}, PyTorch {torch}.

| fault | outcome | seconds |
| --- | --- | --- |
"""


def main(arguments: list[str] | None = None) -> int:
    """Make every fault; the exit status."""
    parser = argparse.ArgumentParser(description="Makes every fault, shows its outcome and writes the table.")
    parser.add_argument("--kills", type=int, default=50, help="of the run, and of the grid (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults whose name has this text")
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help="to write (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.kills < 1:
        parser.error(f"--kills must be at least 1, got {options.kills}")
    chosen = {name: function for name, function in FAULTS.items() if options.only in name}
    if not chosen:
        parser.error(f"--only must be part of a fault's name, got {options.only!r}; there are: {', '.join(FAULTS)}")
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no thread here: the children are forked
    undisturbed()
    rows, failed = [], False
    for name, function in chosen.items():
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = function(Path(folder), options.kills)
            except AssertionError as error:
                outcome, failed = f"DIFFERS: {error}", True
        rows.append((name, outcome, f"{time.perf_counter() - started:.1f}"))
        print(*rows[-1], sep=" | ", flush=True)
    head = HEAD.format(same=SAME, python=sys.version.split()[0], torch=torch.__version__.split("+")[0])
    if not options.only and not failed:
        write_text(options.table, head + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
