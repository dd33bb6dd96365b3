"""What the engines make of one model: exact, refused and why, or wrong; and the time of a step beside a plain one."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from catalog import SAMPLES, Case
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyfreedp.clipping import AutomaticClipping, BookKeepingEngine, make_engine

_TOLERANCE = 1e-6  # of relative differences, which double precision leaves below 1e-8
_ROUNDS = 5


@dataclass
class Finding:
    """One row of the table.

    Attributes:
        full, biases: what the engine does when all is trained, or biases and head: "exact", "refused: ..." or
            "wrong: ...", for two batches of different sizes.
        error: the largest relative difference of a norm or of the clipped sum from a loop over samples.
        layers, followed: layers with a rule, and parameters that are followed through their operations, in "full".
        ratio: time of a step beside a plain one, full, float32.
        opacus: what Opacus does, in "full".
    """

    library: str
    name: str
    full: str = ""
    biases: str = ""
    error: float = 0.0
    layers: int = 0
    followed: int = 0
    frozen_norms: int = 0
    ratio: float = 0.0
    opacus: str = ""


def measure(case: Case, *, beside: bool = True) -> dict[str, Any]:
    """All that the table says of ``case``; without what Opacus and a plain step do unless ``beside``."""
    finding = Finding(case.library, case.name)
    try:
        model, batch, loss = case.build()
    except Exception as error:
        finding.full = finding.biases = finding.opacus = f"not built: {_said(error)}"
        return asdict(finding)
    finding.frozen_norms = _freeze_batch_norms(model)
    batches = [batch(SAMPLES), batch(SAMPLES + 1)]
    truth = [_gradients(model, b, loss) for b in batches]
    finding.full = _judge(model, batches, truth, loss, finding)
    if beside:
        finding.opacus = _opacus(model, batches[0], truth[0], loss)
    if beside and finding.full == "exact":
        finding.ratio = _ratio(model, batches[0], loss)
    few = copy.deepcopy(model)
    _biases_and_head(few, case.name)
    trained = [n for n, p in few.named_parameters() if p.requires_grad]
    order = [n for n, p in model.named_parameters() if p.requires_grad]
    sizes = dict(model.named_parameters())
    columns = torch.cat([torch.full((sizes[n].numel(),), n in set(trained)) for n in order])
    finding.biases = _judge(few, batches, [t[:, columns] for t in truth], loss, finding)
    return asdict(finding)


def _freeze_batch_norms(model: nn.Module) -> int:
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    for layer in layers:
        layer.requires_grad_(False).eval()
    return len(layers)


def _biases_and_head(model: nn.Module, name: str) -> None:
    """Biases and the layer of the last weight."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    head = next((n for n, p in reversed(named) if p.dim() > 1), named[-1][0]).rpartition(".")[0]
    for n, p in named:
        p.requires_grad_(n.endswith("bias") or n.startswith(f"{head}."))


def _gradients(model: nn.Module, batch: tuple[Tensor, ...], loss: Callable[..., Tensor]) -> Tensor:
    """Every sample's gradient, shape (B, D), one sample at a time.

    Beside a copy of itself: for single images in double precision torch's backward pass of a batch norm in eval mode is
    wrong where the gradient's channels come last.
    """
    parameters, rows = [p for p in model.parameters() if p.requires_grad], []
    for i in range(len(batch[0])):
        value, _ = loss(model, *(t[[i, i]] for t in batch))
        gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def _judge(
    model: nn.Module, batches: list[Any], truth: list[Tensor], loss: Callable[..., Tensor], finding: Finding
) -> str:
    model, clipping = copy.deepcopy(model), AutomaticClipping()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = make_engine(model, clipping)
            worst = 0.0
            for batch, gradients in zip(batches, truth, strict=True):
                model.zero_grad()
                norms = engine.backward(loss(model, *batch))
                found = torch.cat(
                    [p.grad.flatten() for p in model.parameters() if p.requires_grad and p.grad is not None]
                )
                true = gradients.norm(dim=1)
                expected = clipping.factors(true) @ gradients
                worst = max(
                    worst, float((norms / true - 1).abs().max()), float((found - expected).norm() / expected.norm())
                )
    except Exception as error:
        own = isinstance(error, ValueError | TypeError) and "hyfreedp" in _origin(error)
        return f"{'refused' if own else 'crash'}: {_said(error)}"
    finding.error = max(finding.error, worst)
    if isinstance(engine, BookKeepingEngine) and not finding.full:
        finding.layers, finding.followed = engine.coverage()
    if worst > _TOLERANCE:
        return f"wrong: {worst:.1e}"
    return "exact" if isinstance(engine, BookKeepingEngine) else "exact (hooks)"


def _opacus(model: nn.Module, batch: Any, truth: Tensor, loss: Callable[..., Tensor]) -> str:
    from opacus import GradSampleModule

    model = copy.deepcopy(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = GradSampleModule(model, loss_reduction="sum")
            loss(wrapped, *batch).sum().backward()
            missing = [
                n for n, p in model.named_parameters() if p.grad is not None and getattr(p, "grad_sample", None) is None
            ]
            if missing:  # as its optimizer says
                return f"refused: no per-sample gradient of {missing[0]}"
            rows = [
                (sum(p.grad_sample) if isinstance(p.grad_sample, list) else p.grad_sample).flatten(1)
                if getattr(p, "grad_sample", None) is not None
                else torch.zeros(len(truth), p.numel(), dtype=p.dtype)
                for p in model.parameters()
                if p.requires_grad
            ]
            norms = torch.cat(rows, 1).norm(dim=1)
    except Exception as error:
        return f"refused: {_said(error)}"
    worst = float((norms / truth.norm(dim=1) - 1).abs().max())
    return "exact" if worst < _TOLERANCE else f"wrong: {worst:.1e}"


def _ratio(model: nn.Module, batch: Any, loss: Callable[..., Tensor]) -> float:
    """The median ratio of a private step's processor time to a plain one's, in turns."""
    models = [copy.deepcopy(model).float() for _ in range(2)]
    batch = tuple(t.float() if t.is_floating_point() else t for t in batch)
    engine = make_engine(models[1], AutomaticClipping())
    ratios = []
    try:
        for _ in range(_ROUNDS + 2):
            times = []
            for private, each in enumerate(models):
                each.zero_grad()
                start = time.process_time()
                losses = loss(each, *batch)
                engine.backward(losses) if private else losses.mean().backward()
                times.append(time.process_time() - start)
            ratios.append(times[1] / times[0])
    except Exception:  # in single precision only
        return 0.0
    return statistics.median(ratios[2:])


def _origin(error: BaseException) -> str:
    trace, last = error.__traceback__, ""
    while trace is not None:
        last, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return last


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:520]
