"""One cell: a frozen spec in, one JSON record and one per-step CSV out; finished cells are never trained again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock
from torch.utils.data import DataLoader
from tqdm import tqdm

from hyfreedp import HyFreeDPOptimizer, PrivacyEngine
from hyfreedp.clipping import AbadiClipping, Clipping
from hyfreedp.experiments import saved
from hyfreedp.experiments.adaptive_clipping import AdaptiveClipping
from hyfreedp.experiments.datasets import as_is
from hyfreedp.experiments.files import check_writable, replacing, write_text
from hyfreedp.experiments.methods import BASES, METHODS
from hyfreedp.experiments.paths import ROOT
from hyfreedp.experiments.spec import Spec
from hyfreedp.experiments.workers import attempt, in_workers
from hyfreedp.noise import NoiseGenerator

CHECKPOINT_SECONDS = 20.0
EVALUATE_EVERY = 5  # steps, in runs of up to a hundred; longer ones evaluate twenty times


def run_cells(specs: Iterable[Spec], folder: Path, *, jobs: int = 1, description: str = "runs") -> list[dict[str, Any]]:
    """Run the cells that have no record yet, with a progress bar; the records of all of them, in order.

    Args:
        specs: what to run.
        folder: of the cells.
        jobs: worker processes; 1 runs in this process.
        description: of the progress bar.
    """
    specs = list(specs)
    records = {}
    with closing(try_cells(specs, folder, jobs=jobs, description=description)) as cells:
        for spec, record in cells:
            if isinstance(record, Exception):
                raise record
            records[spec] = record
    return [records[spec] for spec in specs]


def try_cells(
    specs: Sequence[Spec], folder: Path, *, jobs: int, description: str
) -> Generator[tuple[Spec, dict[str, Any] | Exception], None, None]:
    """As :func:`run_cells`: each cell, as it ends, with its record or the error that it failed with."""
    bar = partial(tqdm, total=len(specs), desc=description, unit="run")
    one = partial(run_cell, folder=folder)
    if jobs == 1 or all((folder / f"{spec.key}.json").exists() for spec in specs):
        for spec in bar(specs):
            yield spec, attempt(one, spec)
        return
    for spec in {(spec.task, spec.source): spec for spec in specs}.values():
        _ = spec.problem.source  # downloaded and decoded once, here, and not by every worker
    with closing(in_workers(get_context("spawn"), one, specs, jobs)) as cells:
        yield from bar(cells)


def read_cell(spec: Spec, folder: Path) -> dict[str, Any] | None:
    """The record of a finished cell; None if it is not finished."""
    try:
        return json.loads((folder / f"{spec.key}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def reader(folder: Path) -> Callable[[Spec], dict[str, Any] | None]:
    """:func:`read_cell` of a folder, which reads each record once: they never change."""
    known: dict[Spec, dict[str, Any]] = {}

    def read(spec: Spec) -> dict[str, Any] | None:
        if spec not in known and (record := read_cell(spec, folder)) is not None:
            known[spec] = record
        return known.get(spec)

    return read


def run_cell(spec: Spec, folder: Path) -> dict[str, Any]:
    """The record of one cell: read if it is there, else trained, from its checkpoint if there is one.

    Args:
        spec: what to run.
        folder: where ``<key>.json`` (the record) and ``<key>.csv`` (one row per step) are kept. Of several processes
            that want the same cell one trains it, and the others wait.

    Raises:
        OSError: the record cannot be written; noticed before the training, unless the disk fills up during it.
    """
    if (record := read_cell(spec, folder)) is not None:
        _tidy(spec, folder)
        return record
    record_path = folder / f"{spec.key}.json"
    check_writable(folder)
    with FileLock(folder / f".{spec.key}.lock"):  # freed by the system if this process is killed
        if not record_path.exists():
            _make_cell(spec, folder, record_path)
        _tidy(spec, folder)
    return json.loads(record_path.read_text(encoding="utf-8"))


def _tidy(spec: Spec, folder: Path) -> None:
    """Remove what a finished cell no longer needs, left by a process that was killed or not."""
    saved.discard(_checkpoint(spec, folder))
    with suppress(OSError):
        (folder / f".{spec.key}.lock").unlink()  # whoever waits for it will find the record


def _checkpoint(spec: Spec, folder: Path) -> Path:
    return folder / f"{spec.key}.ckpt"


def _make_cell(spec: Spec, folder: Path, record_path: Path) -> None:
    for left in folder.glob(f".{spec.key}-*"):  # by a process that was killed while it wrote
        left.unlink()
    started = time.perf_counter()
    with one_thread():
        optimizer = _train(spec, _checkpoint(spec, folder))
        last = optimizer.history[-1]
        scores = {"accuracy": last["test_accuracy"], "loss": last["test_loss"]}
        if spec.evaluation == "validation":  # a random search releases the model that was scored
            _, test = spec.problem.datasets("test", spec.model)
            scores["test_accuracy"] = spec.problem.evaluate(optimizer.module, test, spec.model).accuracy
        texts = spec.problem.outputs(optimizer.module, spec.model) if spec.evaluation == "test" else None
    with replacing(folder / f"{spec.key}.csv") as temporary:
        pd.DataFrame(optimizer.history).to_csv(temporary, index=False)
    record = {
        "spec": asdict(spec),
        **scores,
        **({} if texts is None else {"outputs": texts}),
        "epsilon_spent": optimizer.epsilon_spent(),
        "guarantee": optimizer.split.guarantee,
        "noise_split": optimizer.split.to_dict(),
        "final_eta": optimizer.eta * _rate_factor(optimizer),
        "seconds": time.perf_counter() - started,
        "data": spec.problem.source,
        "weights": spec.weights,
        "environment": environment(),
    }
    write_text(record_path, json.dumps(record, indent=1))


def read_steps(spec: Spec, folder: Path) -> pd.DataFrame:
    """The per-step rows of a finished cell."""
    return pd.read_csv(folder / f"{spec.key}.csv")


def tabulate(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """One tidy row per record: the spec's fields, accuracy, epsilon, final rate, seconds."""
    names = ("accuracy", "epsilon_spent", "guarantee", "final_eta", "seconds")
    return pd.DataFrame([record["spec"] | {name: record[name] for name in names} for record in records])


def environment() -> dict[str, str]:
    """Versions and hardware that a result depends on."""
    packages = ("hyfreedp", "torch", "opacus", "dp-accounting", "autodp", "numpy", "scipy")
    return {
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def with_versions(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with :func:`environment` in columns ``version_...``."""
    return rows.assign(**{f"version_{name}": value for name, value in environment().items()})


def commit() -> str:
    """The repository's commit, with "-dirty" if files differ from it; "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def make_run(spec: Spec, *, diagnostics: bool = False) -> tuple[HyFreeDPOptimizer, DataLoader]:
    """The optimizer (with its model in ``optimizer.module``) and Poisson loader of a spec, ready for the first step.

    The model is on the GPU if there is one; the task's ``losses_of(model)`` takes the loader's batches there.
    """
    return _start(spec, _clipping(spec), diagnostics)


def _start(spec: Spec, clipping: Clipping | None, diagnostics: bool) -> tuple[HyFreeDPOptimizer, DataLoader]:
    task, method = spec.problem, METHODS[spec.method]
    train, _ = task.datasets(spec.evaluation, spec.model)
    model = task.model(spec.seed, spec.model, spec.tuning or "full")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    learned: dict[str, Any] = (
        {"initial_learning_rate": spec.learning_rate, "interval": spec.interval} if method.learns else {}
    )
    rate: dict[str, Any] = {} if method.learns else {"lr": spec.learning_rate}
    _, optimizer, loader = PrivacyEngine(seed=spec.seed).make_private_with_epsilon(
        module=model,
        optimizer=BASES[spec.optimizer]([p for p in model.parameters() if p.requires_grad], **rate),
        data_loader=DataLoader(train, batch_size=task.batch_size, collate_fn=as_is),
        target_epsilon=spec.epsilon,
        target_delta=task.delta,
        steps=spec.steps or task.steps,
        preset=method.preset,
        max_physical_batch_size=task.physical_batches(spec.model),
        clipping=clipping,
        diagnostics=diagnostics,
        **method.overrides,
        **learned,
    )
    if isinstance(clipping, AdaptiveClipping):
        clipping.start(
            sigma=optimizer.split.sigma,
            expected_batch_size=optimizer.expected_batch_size,
            generator=NoiseGenerator(spec.seed).child("adaptive clipping"),
        )
    return optimizer, loader


def _clipping(spec: Spec) -> Clipping | None:
    if spec.clipping_threshold is None:
        return None
    return (AdaptiveClipping if spec.method == "adaptive" else AbadiClipping)(spec.clipping_threshold)


@contextmanager
def one_thread() -> Iterator[None]:
    """Records must not depend on the number of cores; and these small networks gain nothing from a second thread, which
    on a busy machine only makes the first wait.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(spec: Spec, checkpoint: Path) -> HyFreeDPOptimizer:
    """Train to the end; every few steps, and at the last, the history gets test accuracy and loss."""
    clipping = _clipping(spec)
    adaptive = clipping if isinstance(clipping, AdaptiveClipping) else None
    optimizer, loader = _start(spec, clipping, diagnostics=False)
    task, model = spec.problem, optimizer.module
    _, held_out = task.datasets(spec.evaluation, spec.model)
    per_sample_loss = task.losses_of(model)
    every = max(EVALUATE_EVERY, optimizer.split.steps // 20)
    if (state := saved.load(checkpoint)) is not None:
        whole = state["optimizer"] | {"model": model.state_dict() | state["optimizer"]["model"]}
        optimizer.load_state_dict(whole)
        if adaptive is not None:
            adaptive.load_state_dict(state["clipping"])
    last_saved, pause = time.monotonic(), CHECKPOINT_SECONDS
    # Shown of runs that take more than a minute; a bar of runs stands above it.
    bar = tqdm(desc=spec.task, total=optimizer.split.steps, initial=optimizer.ledger.steps, delay=60, leave=False)
    while optimizer.steps_left:
        for batch in loader:
            factor = _rate_factor(optimizer)
            optimizer.step(per_sample_loss, batch)
            bar.update()
            optimizer.history[-1]["eta"] *= factor
            if adaptive is not None:
                optimizer.history[-1]["clipping_threshold"] = adaptive.threshold
                adaptive.update()
            if optimizer.steps_left % every == 0:
                scores = task.evaluate(model, held_out, spec.model)
                optimizer.history[-1] |= {"test_accuracy": scores.accuracy, "test_loss": scores.loss}
            if (now := time.monotonic()) - last_saved > pause:
                extra = None if adaptive is None else adaptive.state_dict()
                saved.save(checkpoint, {"optimizer": _without_frozen(optimizer), "clipping": extra})
                last_saved = time.monotonic()
                took = last_saved - now
                pause = max(CHECKPOINT_SECONDS, 20 * took if took > 1 else 0)  # a large model is saved more rarely
            if not optimizer.steps_left:
                break
    bar.close()
    return optimizer


def _without_frozen(optimizer: HyFreeDPOptimizer) -> dict[str, Any]:
    """The optimizer's state less the parameters that are not trained: the spec gives them again."""
    frozen = {name for name, parameter in optimizer.module.named_parameters() if not parameter.requires_grad}
    state = optimizer.state_dict()
    return state | {"model": {name: value for name, value in state["model"].items() if name not in frozen}}


def _rate_factor(optimizer: HyFreeDPOptimizer) -> float:
    """What the base optimizer multiplies its learning rate by: the distance d of D-Adaptation and Prodigy, else 1."""
    return float(optimizer.base.param_groups[0].get("d", 1.0))


def with_seeds(spec: Spec, seeds: int) -> list[Spec]:
    """The spec with seeds 0, ..., seeds - 1."""
    return [replace(spec, seed=seed) for seed in range(seeds)]
