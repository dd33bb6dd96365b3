"""Measures a private step of one model: exact, refused or wrong; mapped over samples or not; and its time."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time
from timeit import timeit
from typing import Any

import torch
from catalog import SAMPLES, Case
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset

from hyfreedp import HyFreeDPOptimizer, PrivacyEngine
from hyfreedp.gradients import AutomaticClipping
from hyfreedp.gradients.pieces import Partition

_TOLERANCE = 1e-6  # the largest relative difference for "exact"; rounding in double precision is below 1e-8
_ROUNDS = 7

Loss = Callable[..., Tensor]


@dataclass
class Finding:
    """The result for one model; all but ``biases`` with all parameters trained.

    Attributes:
        full, biases: with all parameters, or biases and head trained: "exact", "refused: ..." or "wrong: ...".
        slow: why samples are computed one at a time; empty if they are mapped.
        groups: in how many groups the last batch was mapped.
        first, ratio: time of the first private step, and of a later one, over that of a plain one (float32).
        opacus: the same for Opacus as ``full``.
        frozen_norms: number of batch norms, which mix samples and so are frozen.
    """

    library: str
    name: str
    full: str = ""
    biases: str = ""
    slow: str = ""
    groups: int = 0
    first: float = 0.0
    ratio: float = 0.0
    opacus: str = ""
    frozen_norms: int = 0


def measure(case: Case) -> Finding:
    """Measure one case."""
    model, batch, loss = case.build()
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    for layer in norms:
        layer.requires_grad_(False).eval()
    finding = Finding(case.library, case.name, frozen_norms=len(norms))
    batches = [batch(SAMPLES), batch(SAMPLES + 1)]
    finding.full, finding.slow, finding.groups = _judge(model, batches, loss)
    finding.opacus = _opacus(model, batches[0], loss)
    if finding.full == "exact":
        finding.first, finding.ratio = _ratios(model, batches[0], loss)
    _biases_and_head(model)
    finding.biases, *_ = _judge(model, batches, loss)
    return finding


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _biases_and_head(model: nn.Module) -> None:
    """Freeze, in place, all but biases and the layer that has the last weight matrix."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    head = next((n for n, p in reversed(named) if p.dim() > 1), named[-1][0]).rpartition(".")[0]
    for n, p in named:
        p.requires_grad_(n.endswith("bias") or n.startswith(f"{head}."))


def _gradients(model: nn.Module, batch: Sequence[Tensor], loss: Loss) -> Tensor:
    """Per-sample gradients, shape (B, D), by a loop over samples.

    Each sample is in a batch with a copy of itself, which has the same mean loss. For a single image in float64 torch's
    backward pass of a batch norm in eval mode is wrong if the gradient's memory format is channels last.
    """
    rows = []
    for i in range(len(batch[0])):
        value = loss(model, *(t[[i, i]] for t in batch))
        gradients = torch.autograd.grad(value, _trained(model), allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def _private(model: nn.Module) -> HyFreeDPOptimizer:
    """An optimizer (SGD at rate 1) whose step is minus the mean of clipped gradients, without noise."""
    loader = DataLoader(TensorDataset(torch.zeros(4 * SAMPLES)), batch_size=SAMPLES)
    settings = {"steps": 100, "preset": "fixed", "clipping": AutomaticClipping(), "target_epsilon": math.inf}
    settings |= {"optimizer": torch.optim.SGD(_trained(model), lr=1.0), "target_delta": 1e-3}
    return PrivacyEngine(seed=0).make_private_with_epsilon(module=model, data_loader=loader, **settings)[1]


def _judge(model: nn.Module, batches: list[Any], loss: Loss) -> tuple[str, str, int]:
    """``full``, ``slow`` and ``groups`` of a :class:`Finding`: steps on the batches against true gradients."""
    truth = [_gradients(model, batch, loss) for batch in batches]
    model = copy.deepcopy(model)
    parameters = _trained(model)
    start = [p.detach().clone() for p in parameters]
    worst = 0.0
    try:
        optimizer = _private(model)
        for batch, gradients in zip(batches, truth, strict=True):
            with torch.no_grad():
                torch._foreach_copy_(parameters, start)
            optimizer.step(lambda b: loss(model, *b), batch)
            moved = torch.cat([(s - p.detach()).flatten() for s, p in zip(start, parameters, strict=True)])
            expected = AutomaticClipping().factors(gradients.norm(dim=1)) @ gradients / SAMPLES
            worst = max(worst, float((moved - expected).norm() / expected.norm()))
        partition = Partition.of(batches[-1])
        optimizer.gradient_engine.losses(lambda b: loss(model, *b), partition)
    except Exception as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        own = isinstance(error, ValueError | TypeError) and "hyfreedp" in raised_in
        return f"{'refused' if own else 'crash'}: {_said(error)}", "", 0
    slow = optimizer.gradient_engine.fallback_reason or ""
    found = "exact" if worst < _TOLERANCE else f"wrong: relative difference {worst:.1e}"
    return found, slow, 0 if slow else len(partition.pieces)


def _opacus(model: nn.Module, batch: Any, loss: Loss) -> str:
    from opacus import GradSampleModule

    truth = _gradients(model, batch, loss)
    model = copy.deepcopy(model)
    try:
        loss(GradSampleModule(model, loss_reduction="mean"), *batch).backward()
        rows = []
        for name, p in model.named_parameters():
            sample = getattr(p, "grad_sample", None)
            if p.grad is not None and sample is None:  # Opacus's optimizer raises then
                return f"refused: no per-sample gradient of {name}"
            if sample is not None:
                rows.append((sum(sample) if isinstance(sample, list) else sample).flatten(1))
        norms = torch.cat(rows, 1).norm(dim=1)
    except Exception as error:
        return f"refused: {_said(error)}"
    whole = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in _trained(model)])
    weights = torch.linalg.lstsq(truth.T, len(truth) * whole[:, None]).solution[:, 0]  # if a mean is over tokens
    worst = float((norms / (weights * truth.norm(dim=1)) - 1).abs().max())
    return "exact" if worst < _TOLERANCE else f"wrong: {worst:.1e}"


def _ratios(model: nn.Module, batch: Any, loss: Loss) -> tuple[float, float]:
    """Processor time of the first private step and of later ones (median), over plain steps taken in turns."""
    plain, private = (copy.deepcopy(model).float() for _ in range(2))
    batch = tuple(t.float() if t.is_floating_point() else t for t in batch)
    optimizer, step = torch.optim.SGD(_trained(plain), lr=1e-4), _private(private)
    step.param_groups[0]["lr"] = 1e-4

    def plainly() -> None:
        optimizer.zero_grad()
        loss(plain, *batch).backward()
        optimizer.step()

    turns = (plainly, lambda: step.step(lambda b: loss(private, *b), batch))
    seconds = torch.tensor([[timeit(one, timer=process_time, number=1) for one in turns] for _ in range(_ROUNDS + 2)])
    theirs, ours = seconds[2:].median(dim=0).values.tolist()
    return seconds[0, 1].item() / theirs, ours / theirs


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
