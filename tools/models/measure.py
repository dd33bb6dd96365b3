"""What a private step makes of one model: exact, refused and why, or wrong; on the fast path or not; and its time."""

from __future__ import annotations

import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from catalog import SAMPLES, Case
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset

from hyfreedp import HyFreeDPOptimizer, PrivacyEngine
from hyfreedp.gradients import AutomaticClipping

_TOLERANCE = 1e-6  # of relative differences, which double precision leaves below 1e-8
_ROUNDS = 7

Loss = Callable[..., Tensor]


@dataclass
class Finding:
    """One row of the table.

    Attributes:
        full, biases: of steps that train all, or biases and head: "exact", "refused: ..." or "wrong: ...".
        slow: the layer and why, where the model is computed one sample at a time, in "full"; empty on the fast path.
        ratio: time of a step beside a plain one, full, float32.
        opacus: what Opacus does, in "full".
        frozen_norms: batch norms, which mix samples.
    """

    library: str
    name: str
    full: str = ""
    biases: str = ""
    slow: str = ""
    ratio: float = 0.0
    opacus: str = ""
    frozen_norms: int = 0


def measure(case: Case, *, beside: bool = True) -> dict[str, Any]:
    """All that the table says of ``case``; without what Opacus and a plain step do unless ``beside``."""
    finding = Finding(case.library, case.name)
    model, batch, loss = case.build()
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    for layer in norms:
        layer.requires_grad_(False).eval()
    finding.frozen_norms = len(norms)
    batches = [batch(SAMPLES), batch(SAMPLES + 1)]
    truth = [_gradients(model, b, loss) for b in batches]
    finding.full, finding.slow = _judge(model, batches, truth, loss)
    if beside:
        finding.opacus = _opacus(model, batches[0], truth[0], loss)
    if beside and finding.full == "exact":
        finding.ratio = _ratio(model, batches[0], loss)
    few = copy.deepcopy(model)
    _biases_and_head(few)
    trained = {n for n, p in few.named_parameters() if p.requires_grad}
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    columns = torch.cat([torch.full((p.numel(),), n in trained) for n, p in named])
    finding.biases, _ = _judge(few, batches, [t[:, columns] for t in truth], loss)
    return asdict(finding)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _biases_and_head(model: nn.Module) -> None:
    """Biases and the layer of the last weight."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    head = next((n for n, p in reversed(named) if p.dim() > 1), named[-1][0]).rpartition(".")[0]
    for n, p in named:
        p.requires_grad_(n.endswith("bias") or n.startswith(f"{head}."))


def _gradients(model: nn.Module, batch: Sequence[Tensor], loss: Loss) -> Tensor:
    """Every sample's gradient, shape (B, D), one sample at a time.

    Beside a copy of itself: for single images in double precision torch's backward pass of a batch norm in eval mode is
    wrong where the gradient's channels come last.
    """
    rows = []
    for i in range(len(batch[0])):
        value, _ = loss(model, *(t[[i, i]] for t in batch))
        gradients = torch.autograd.grad(value, _trained(model), allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def _private(model: nn.Module) -> HyFreeDPOptimizer:
    """An optimizer whose step is the mean of clipped gradients, without noise."""
    loader = DataLoader(TensorDataset(torch.zeros(4 * SAMPLES)), batch_size=SAMPLES)
    run = {"target_epsilon": math.inf, "target_delta": 1e-3, "steps": 100, "preset": "fixed"}
    _, optimizer, _ = PrivacyEngine(seed=0).make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(_trained(model), lr=1.0),
        data_loader=loader,
        clipping=AutomaticClipping(),
        **run,
    )
    return optimizer


def _judge(model: nn.Module, batches: list[Any], truth: list[Tensor], loss: Loss) -> tuple[str, str]:
    """Whether steps on the batches are those of the true gradients, and why they are slow, if they are."""
    model = copy.deepcopy(model)
    parameters = _trained(model)
    start = [p.detach().clone() for p in parameters]
    worst = 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = _private(model)
            for batch, gradients in zip(batches, truth, strict=True):
                with torch.no_grad():
                    torch._foreach_copy_(parameters, start)
                optimizer.step(lambda b: loss(model, *b), batch)
                moved = torch.cat([(s - p.detach()).flatten() for s, p in zip(start, parameters, strict=True)])
                expected = AutomaticClipping().factors(gradients.norm(dim=1)) @ gradients / SAMPLES
                worst = max(worst, float((moved - expected).norm() / expected.norm()))
    except Exception as error:
        own = isinstance(error, ValueError | TypeError) and "hyfreedp" in _origin(error)
        return f"{'refused' if own else 'crash'}: {_said(error)}", ""
    slow = getattr(optimizer.gradient_engine, "slow", None) or ""
    return "exact" if worst < _TOLERANCE else f"wrong: {worst:.1e}", slow


def _opacus(model: nn.Module, batch: Any, truth: Tensor, loss: Loss) -> str:
    from opacus import GradSampleModule

    model = copy.deepcopy(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = GradSampleModule(model, loss_reduction="sum")
            loss(wrapped, *batch).sum().backward()
        rows = []
        for name, p in model.named_parameters():
            sample = getattr(p, "grad_sample", None)
            if p.grad is not None and sample is None:  # as its optimizer says
                return f"refused: no per-sample gradient of {name}"
            if sample is not None:
                rows.append((sum(sample) if isinstance(sample, list) else sample).flatten(1))
        norms = torch.cat(rows, 1).norm(dim=1)
    except Exception as error:
        return f"refused: {_said(error)}"
    worst = float((norms / truth.norm(dim=1) - 1).abs().max())
    return "exact" if worst < _TOLERANCE else f"wrong: {worst:.1e}"


def _ratio(model: nn.Module, batch: Any, loss: Loss) -> float:
    """The median ratio of a private step's processor time to a plain one's, in turns."""
    plain, private = (copy.deepcopy(model).float() for _ in range(2))
    batch = tuple(t.float() if t.is_floating_point() else t for t in batch)
    optimizer, ratios = torch.optim.SGD(_trained(plain), lr=1e-4), []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = _private(private)
            ours.param_groups[0]["lr"] = 1e-4
            for _ in range(_ROUNDS + 2):
                start = time.process_time()
                optimizer.zero_grad()
                loss(plain, *batch).mean().backward()
                optimizer.step()
                middle = time.process_time()
                ours.step(lambda b: loss(private, *b), batch)
                ratios.append((time.process_time() - middle) / (middle - start))
                ours._checks_due = []  # of the first step and a few more in a run
    except Exception:  # in single precision only
        return 0.0
    return statistics.median(ratios[2:])


def _origin(error: BaseException) -> str:
    trace, last = error.__traceback__, ""
    while trace is not None:
        last, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return last


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
