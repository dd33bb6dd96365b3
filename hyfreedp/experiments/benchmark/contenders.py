"""The contenders: a complete training step with each library, as its users would write it.

All use the same batch, mean cross-entropy and torch optimizer. Private ones clip per-sample gradients at the same norm,
with the same noise multiplier.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from io import StringIO
from typing import Any
from unittest.mock import patch

import opacus
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hyfreedp import PRESETS, NoiseGenerator, Preset, PrivacyEngine, calibrate_noise
from hyfreedp.experiments.benchmark.workloads import Workload
from hyfreedp.gradients import AbadiClipping

Step = Callable[[], object]

MAX_GRAD_NORM = 1.0
_BATCHES = 100  # per epoch; gives the sample rate
_PLAN: dict[str, Any] = {"target_delta": 1e-6, "accountant": "rdp"}  # the quickest; used before the first step only


@dataclass(frozen=True)
class Setup:
    """What all contenders share: the torch optimizer, the target epsilon (infinite: no privacy) and the steps."""

    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    epsilon: float = 3.0
    steps: int = 1000  # more than any measurement of single steps takes


@dataclass(frozen=True)
class Contender:
    """One way to train: ``make(workload, setup)`` returns the step as a function; ``period`` is K."""

    label: str
    make: Callable[[Workload, Setup], Step]
    period: int = 1


def _flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, T, outputs) or (B, outputs) and labels with one row per prediction: (B T, outputs) and (B T,)."""
    return logits.flatten(0, -2), labels.flatten()


def _plain(work: Workload, setup: Setup) -> Step:
    optimizer = setup.optimizer(work.trainable)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(*_flat(work.module(work.inputs), work.labels)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _opacus(work: Workload, setup: Setup, *, mode: str) -> Step:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus's generator, which is not cryptographic, and of torch's hooks
        made: Any = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=work.module,
            optimizer=setup.optimizer(work.trainable),
            criterion=nn.CrossEntropyLoss(),
            data_loader=_loader(work),
            noise_multiplier=noise_multiplier(setup.epsilon, setup.steps),
            max_grad_norm=MAX_GRAD_NORM,
            poisson_sampling=False,  # the batch is given
            grad_sample_mode=mode,
        )
    module, optimizer = made[:2]
    # Ghost clipping returns a criterion, whose ``backward`` makes two passes.
    criterion = made[2] if mode == "ghost" else lambda logits, labels, shape: F.cross_entropy(logits, labels)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = module(work.inputs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            warnings.filterwarnings("ignore", "In CPU autocast")  # functorch mode, where token ids come in
            criterion(*_flat(logits, work.labels), shape=logits.shape).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _opake(work: Workload, setup: Setup) -> Step:
    """By the functional interface of the package "opake" of PyPI."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.random import key
    from torch.func import functional_call

    trained = {name: p for name, p in work.module.named_parameters() if p.requires_grad}
    weights, optimizer = {name: p.detach() for name, p in trained.items()}, setup.optimizer(work.trainable)

    def loss(weights: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(*_flat(functional_call(work.module, weights, (sample[None],)), label[None]))

    options: Any = {"clipping_norm": MAX_GRAD_NORM, "normalize_by": len(work.inputs), "batch_argnums": (1, 2)}
    clipped, clipping = clipped_grad(loss, **options)
    noised, noise = gaussian_noise(noise_multiplier=noise_multiplier(setup.epsilon, setup.steps), key=key(0))

    def step() -> None:
        nonlocal clipping, noise
        gradients, clipping = clipped(weights, work.inputs, work.labels, state=clipping)
        private, noise = noised(gradients, noise)
        for name, p in trained.items():
            p.grad = private.pytree[name]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _fastdp(work: Workload, setup: Setup) -> Step:
    """Book-keeping by Amazon's fastDP, which is not on PyPI: ``HYFREEDP_FASTDP`` is the folder that contains it."""
    if (folder := os.environ.get("HYFREEDP_FASTDP")) is None:
        raise ImportError("fastDP is on no package index: name the folder that holds it in HYFREEDP_FASTDP")
    if folder not in sys.path:
        sys.path.append(folder)
    with redirect_stdout(StringIO()):
        from fastDP import PrivacyEngine as Engine

        size = len(work.inputs)
        run: Any = {"batch_size": size, "sample_size": _BATCHES * size, "epochs": 1, "max_grad_norm": MAX_GRAD_NORM}
        run |= {"noise_multiplier": noise_multiplier(setup.epsilon, setup.steps), "clipping_fn": "Abadi"}
        optimizer = setup.optimizer(work.trainable)
        Engine(work.module, clipping_mode="MixOpt", **run).attach(optimizer)

    def step() -> None:
        with redirect_stdout(StringIO()):
            F.cross_entropy(*_flat(work.module(work.inputs), work.labels)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def _ours(work: Workload, setup: Setup, *, preset: Preset = PRESETS["fixed"]) -> Step:
    _, optimizer, _ = PrivacyEngine(seed=0).make_private_with_epsilon(
        module=work.module,
        optimizer=setup.optimizer(work.trainable),
        data_loader=_loader(work),
        target_epsilon=setup.epsilon,
        preset=preset,
        clipping=AbadiClipping(MAX_GRAD_NORM),
        steps=setup.steps,
        without_guarantee=True,  # the batch is given
        **_PLAN,
    )

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(*_flat(work.module(inputs), labels))

    return partial(optimizer.step, loss, (work.inputs, work.labels))


def _ours_with_torchs_noise(work: Workload, setup: Setup) -> Step:
    """Our step with PyTorch's noise, which is faster but not safe. It is not scaled, which takes no time anyway."""
    step = _ours(work, setup)

    def add(generator: NoiseGenerator, sums: Iterable[Tensor], *scale: Any, **mechanism: Any) -> None:
        for total in sums:
            total.add_(torch.randn_like(total))

    def replaced() -> None:
        with patch.object(NoiseGenerator, "add_noise", add):
            step()

    return replaced


def _loader(work: Workload) -> DataLoader:
    """A loader that gives an engine the sample rate; its records are never read."""
    batch_size = len(work.inputs)
    return DataLoader(TensorDataset(torch.zeros(_BATCHES * batch_size, device="cpu")), batch_size=batch_size)


@cache
def noise_multiplier(epsilon: float, steps: int) -> float:
    """Noise multiplier of a private run without probes."""
    plan = _PLAN | {"sample_rate": 1 / _BATCHES, "steps": steps, "probe": "none"}
    return calibrate_noise(target_epsilon=epsilon, **plan).sigma


CONTENDERS: dict[str, Contender] = {
    "plain": Contender("plain, not private", _plain),
    "opacus_hooks": Contender("Opacus, hooks", partial(_opacus, mode="hooks")),
    "opacus_ghost": Contender("Opacus, ghost clipping", partial(_opacus, mode="ghost")),
    "opacus_functorch": Contender("Opacus, functorch", partial(_opacus, mode="functorch")),
    "opake": Contender("opake", _opake),
    "fastdp": Contender("fastDP, book-keeping", _fastdp),
    "ours": Contender("ours, fixed rate", _ours),
    "ours_torch_noise": Contender("ours, PyTorch's noise (unsafe)", _ours_with_torchs_noise),
    "robust": Contender("ours, preset robust", partial(_ours, preset=PRESETS["robust"])),
}
for k in (1, 5, 10):
    with_probes = partial(_ours, preset=replace(PRESETS["paper"], interval=k))
    CONTENDERS[f"ours_k{k}"] = Contender(f"ours, HyFreeDP K = {k}", with_probes, period=k)
