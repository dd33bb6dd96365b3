"""One training run: making its optimizer and loader, and training, from its checkpoint if there is one."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from tqdm import tqdm

from hyfreedp import HyFreeDPOptimizer, NoiseSplit, PrivacyEngine
from hyfreedp.experiments import accounting_of_the_paper
from hyfreedp.experiments.baselines.adaptive_clipping import AdaptiveClipping
from hyfreedp.experiments.runs.methods import BASES, METHODS
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.device import default_device
from hyfreedp.experiments.store.files import load_checkpoint, save_checkpoint
from hyfreedp.gradients import AbadiClipping, Clipping
from hyfreedp.noise import NoiseGenerator

CHECKPOINT_SECONDS = 20.0
EVALUATE_EVERY = 5  # steps, in short runs; in longer ones the task sets the number of evaluations


def make_run(spec: Spec) -> tuple[HyFreeDPOptimizer, DataLoader]:
    """The optimizer of a spec (``optimizer.module`` is the model) and its Poisson loader, before the first step.

    The model is on the accelerator if there is one; the task's ``losses_of(model)`` moves batches there.
    """
    task, method = spec.problem, METHODS[spec.method]
    clipping: Clipping | None = None
    if spec.clipping_threshold is not None:
        clipping = (AdaptiveClipping if spec.method == "adaptive" else AbadiClipping)(spec.clipping_threshold)
    train, _ = task.datasets(spec.evaluation, spec.model)
    model = task.model(spec.seed, spec.model, spec.tuning or "full")
    model.to(default_device())
    learned: dict[str, Any] = (
        {"initial_learning_rate": spec.learning_rate, "interval": spec.interval} if method.searches else {}
    )
    rate: dict[str, Any] = {} if method.learns else {"lr": spec.learning_rate}
    _, optimizer, loader = PrivacyEngine(seed=spec.seed).make_private_with_epsilon(
        module=model,
        optimizer=BASES[spec.base or method.base]([p for p in model.parameters() if p.requires_grad], **rate),
        data_loader=DataLoader(train, batch_size=task.batch_size, collate_fn=task.collate),
        target_epsilon=spec.epsilon,
        target_delta=task.delta,
        steps=spec.steps or task.steps,
        preset=method.preset,
        max_physical_batch_size=task.physical_batches(spec.model),
        clipping=clipping,
        split=None if method.noise == "sound" else _claimed_split(spec, len(train)),
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


def _claimed_split(spec: Spec, records: int) -> NoiseSplit | None:
    """The noise of Algorithm 2 by the paper's own accounting, or a millionth of it on losses; None without privacy."""
    if math.isinf(spec.epsilon):
        return None
    task = spec.problem
    split = accounting_of_the_paper.calibrate(
        target_epsilon=spec.epsilon,
        target_delta=task.delta,
        sample_rate=task.batch_size / records,
        steps=spec.steps or task.steps,
        interval=spec.interval,
    )
    return split if METHODS[spec.method].noise == "claimed" else replace(split, sigma_loss=split.sigma_loss / 1e6)


def train(spec: Spec, checkpoint: Path) -> tuple[HyFreeDPOptimizer, list[dict[str, Any]]]:
    """Train to the end. Returns the optimizer, and a row per step, some (the last, too) with test accuracy and loss."""
    optimizer, loader = make_run(spec)
    clipping = optimizer.gradient_engine.clipping
    adaptive = clipping if isinstance(clipping, AdaptiveClipping) else None
    task, model = spec.problem, optimizer.module
    _, held_out = task.datasets(spec.evaluation, spec.model)
    loss = task.losses_of(model)
    every = max(EVALUATE_EVERY, optimizer.split.steps // task.evaluations)
    rows: list[dict[str, Any]] = []
    if (state := load_checkpoint(checkpoint)) is not None:
        whole = state["optimizer"] | {"model": model.state_dict() | state["optimizer"]["model"]}
        optimizer.load_state_dict(whole)
        rows = state["rows"]
        if adaptive is not None:
            adaptive.load_state_dict(state["clipping"])
    last_saved, pause = time.monotonic(), CHECKPOINT_SECONDS
    # Shown only if the run takes more than a minute, below the bar of all runs.
    bar = tqdm(desc=spec.task, total=optimizer.split.steps, initial=optimizer.ledger.steps, delay=60, leave=False)
    while optimizer.steps_left:
        for batch in loader:
            factor = rate_factor(optimizer)
            record = optimizer.step(loss, batch)
            bar.update()
            rows.append(record.to_dict() | {"eta": record.eta * factor})
            if adaptive is not None:
                rows[-1]["clipping_threshold"] = adaptive.threshold
                adaptive.update()
            if optimizer.steps_left % every == 0:
                with optimizer.averaged():
                    scores = task.evaluate(model, held_out, spec.model)
                rows[-1] |= {"test_accuracy": scores.accuracy, "test_loss": scores.loss}
            if (now := time.monotonic()) - last_saved > pause:
                extra = None if adaptive is None else adaptive.state_dict()
                whole = {"optimizer": _without_frozen(optimizer), "clipping": extra, "rows": rows}
                save_checkpoint(checkpoint, whole)
                last_saved = time.monotonic()
                took = last_saved - now
                pause = max(CHECKPOINT_SECONDS, 20 * took if took > 1 else 0)  # less often if saving takes long
    bar.close()
    return optimizer, rows


def _without_frozen(optimizer: HyFreeDPOptimizer) -> dict[str, Any]:
    """The optimizer's state without frozen parameters, which the spec determines."""
    frozen = {name for name, parameter in optimizer.module.named_parameters() if not parameter.requires_grad}
    state = optimizer.state_dict()
    return state | {"model": {name: value for name, value in state["model"].items() if name not in frozen}}


def rate_factor(optimizer: HyFreeDPOptimizer) -> float:
    """The factor on the learning rate that D-Adaptation and Prodigy estimate, their d; else 1."""
    return float(optimizer.base.param_groups[0].get("d", 1.0))
