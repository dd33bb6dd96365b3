"""One cell: a frozen spec in, one JSON record and one per-step CSV out; finished cells are never trained again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from hyfreedp import HyFreeDPOptimizer, PrivacyEngine
from hyfreedp.accounting.arguments import check_choice
from hyfreedp.clipping import AbadiClipping
from hyfreedp.experiments.cache import key_of
from hyfreedp.experiments.datasets import as_is
from hyfreedp.experiments.files import replacing, write_text
from hyfreedp.experiments.methods import METHODS
from hyfreedp.experiments.models import MODELS, Model, Tuning
from hyfreedp.experiments.paths import ROOT
from hyfreedp.experiments.tasks import TASKS, Evaluation, evaluate

CHECKPOINT_SECONDS = 20.0
EVALUATE_EVERY = 5  # steps, in runs of up to a hundred; longer ones evaluate twenty times
BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}


@dataclass(frozen=True)
class Spec:
    """All that determines a run, randomness included.

    Attributes:
        task, method: names in ``TASKS`` and ``METHODS``.
        epsilon: target; ``inf`` for no privacy. delta belongs to the task.
        seed: of weights, sampling and noise.
        learning_rate: the rate, or its first value where it is learned.
        interval: K, for methods that learn the rate.
        evaluation: accuracy on "test" data, or on "validation" data held out of the training part.
        steps: length of the run; the task's own if None.
        clipping_threshold: R_g of Abadi's clipping, for method "vanilla" only.
        base: base optimizer, a name in ``BASES``; AdamW if None.
        model: a name in ``MODELS`` that fits the task; the task's own if None.
        tuning: which parameters are trained, see :func:`hyfreedp.experiments.models.choose_trainable`; all if None.

    Raises:
        ValueError: a name or number that is not allowed.
    """

    task: str = "digits"
    method: str = "robust"
    epsilon: float = 3.0
    seed: int = 0
    learning_rate: float = 1e-4
    interval: int = 5
    evaluation: Evaluation = "test"
    steps: int | None = None
    clipping_threshold: float | None = None
    base: str | None = None
    model: str | None = None
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        check_choice("task", self.task, TASKS)
        check_choice("method", self.method, METHODS)
        check_choice("evaluation", self.evaluation, Evaluation)
        if self.base is not None:
            check_choice("base", self.base, BASES)
        if self.model is not None:
            check_choice("model", self.model, TASKS[self.task].models)
        if self.tuning is not None:
            check_choice("tuning", self.tuning, self.architecture.tunings)
        if (self.clipping_threshold is not None) != (self.method == "vanilla"):
            raise ValueError(
                'clipping_threshold must be given exactly for method "vanilla", '
                f"got {self.clipping_threshold!r} for {self.method!r}"
            )

    @property
    def key(self) -> str:
        """Name of the cell's files: a hash of the spec, without later fields that a spec leaves at None."""
        later = ("clipping_threshold", "base", "model", "tuning")
        return key_of({name: value for name, value in asdict(self).items() if name not in later or value is not None})

    @property
    def architecture(self) -> Model:
        """The model that is trained."""
        return MODELS[self.model or TASKS[self.task].models[0]]


def run_cells(specs: Iterable[Spec], folder: Path, *, jobs: int = 1, description: str = "runs") -> list[dict[str, Any]]:
    """Run the cells that have no record yet, with a progress bar; the records of all of them, in order.

    Args:
        specs: what to run.
        folder: of the cells.
        jobs: worker processes; 1 runs in this process.
        description: of the progress bar.
    """
    specs = list(specs)
    bar = partial(tqdm, total=len(specs), desc=description, unit="run")
    if jobs == 1 or all((folder / f"{spec.key}.json").exists() for spec in specs):
        return [run_cell(spec, folder) for spec in bar(specs)]
    for task in {spec.task for spec in specs}:
        TASKS[task].arrays()  # downloaded and decoded once, here, and not by every worker
    # Fresh interpreters: a forked one inherits locks of torch's thread pool.
    with get_context("spawn").Pool(jobs) as pool:
        return list(bar(pool.imap(partial(run_cell, folder=folder), specs)))


def run_cell(spec: Spec, folder: Path) -> dict[str, Any]:
    """The record of one cell: read if it is there, else trained, from its checkpoint if there is one.

    Args:
        spec: what to run.
        folder: where ``<key>.json`` (the record) and ``<key>.csv`` (one row per step) are kept.
    """
    record_path = folder / f"{spec.key}.json"
    if record_path.exists():
        return json.loads(record_path.read_text(encoding="utf-8"))
    checkpoint = folder / f"{spec.key}.ckpt"
    started = time.perf_counter()
    with one_thread():
        optimizer = _train(spec, checkpoint)
    with replacing(folder / f"{spec.key}.csv") as temporary:
        pd.DataFrame(optimizer.history).to_csv(temporary, index=False)
    record = {
        "spec": asdict(spec),
        "accuracy": optimizer.history[-1]["test_accuracy"],
        "epsilon_spent": optimizer.epsilon_spent(),
        "guarantee": optimizer.split.guarantee,
        "noise_split": optimizer.split.to_dict(),
        "final_eta": optimizer.eta,
        "seconds": time.perf_counter() - started,
        "data": TASKS[spec.task].arrays().source,
        "environment": environment(),
    }
    write_text(record_path, json.dumps(record, indent=1))
    checkpoint.unlink(missing_ok=True)
    return record


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


def commit() -> str:
    """The repository's commit, with "-dirty" if files differ from it; "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def make_run(spec: Spec, *, diagnostics: bool = False) -> tuple[HyFreeDPOptimizer, DataLoader]:
    """The optimizer (with its model in ``optimizer.module``) and Poisson loader of a spec, ready for the first step.

    The model is on the GPU if there is one; :func:`losses_of` takes the loader's batches there.
    """
    task, method = TASKS[spec.task], METHODS[spec.method]
    train, _ = task.datasets(spec.evaluation)
    model = task.model(spec.seed, spec.model, spec.tuning or "full")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    learned: dict[str, Any] = (
        {"initial_learning_rate": spec.learning_rate, "interval": spec.interval} if method.learns else {}
    )
    rate: dict[str, Any] = {} if method.learns else {"lr": spec.learning_rate}
    _, optimizer, loader = PrivacyEngine(seed=spec.seed).make_private_with_epsilon(
        module=model,
        optimizer=BASES[spec.base or "adamw"]([p for p in model.parameters() if p.requires_grad], **rate),
        data_loader=DataLoader(train, batch_size=task.batch_size, collate_fn=as_is),
        target_epsilon=spec.epsilon,
        target_delta=task.delta,
        steps=spec.steps or task.steps,
        preset=method.preset,
        max_physical_batch_size=spec.architecture.physical_batch_size,
        clipping=None if spec.clipping_threshold is None else AbadiClipping(spec.clipping_threshold),
        diagnostics=diagnostics,
        **method.overrides,
        **learned,
    )
    return optimizer, loader


def losses_of(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """Per-sample cross-entropy, shape (B,), of a batch of features and labels, which goes to the model's device."""
    device = next(model.parameters()).device

    def per_sample_loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        features, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        return F.cross_entropy(model(features), labels, reduction="none")

    return per_sample_loss


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
    optimizer, loader = make_run(spec)
    _, held_out = TASKS[spec.task].datasets(spec.evaluation)
    model = optimizer.module
    per_sample_loss = losses_of(model)
    every, together = max(EVALUATE_EVERY, optimizer.split.steps // 20), spec.architecture.evaluation_batch_size
    if checkpoint.exists():
        optimizer.load_state_dict(torch.load(checkpoint, weights_only=True))
    saved = time.monotonic()
    while optimizer.steps_left:
        for batch in loader:
            optimizer.step(per_sample_loss, batch)
            if optimizer.steps_left % every == 0:
                scores = evaluate(model, held_out, together)
                optimizer.history[-1] |= {"test_accuracy": scores.accuracy, "test_loss": scores.loss}
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                with replacing(checkpoint) as temporary:
                    torch.save(optimizer.state_dict(), temporary)
                saved = time.monotonic()
            if not optimizer.steps_left:
                break
    return optimizer


def with_seeds(spec: Spec, seeds: int) -> list[Spec]:
    """The spec with seeds 0, ..., seeds - 1."""
    return [replace(spec, seed=seed) for seed in range(seeds)]
