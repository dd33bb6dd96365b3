"""Who is measured: one complete training step, the way a user of each library would write it.

All take the same batch with the mean cross-entropy, the same torch optimizer, and, where private, clip every sample's
gradient to the same norm and add noise with the same multiplier.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import opacus
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from hyfreedp import PRESETS, HyFreeDPOptimizer, Preset, PrivacyEngine, calibrate_noise
from hyfreedp.clipping import AbadiClipping
from hyfreedp.experiments.baselines.line_search import LINE_SEARCH
from hyfreedp.experiments.benchmark.workloads import Workload

Step = Callable[[], object]

MAX_GRAD_NORM = 1.0
_BATCHES = 100  # per epoch; sets the sample rate
_DELTA = 1e-6
_STEPS = 1000  # more than any measurement takes
_ACCOUNTANT: Literal["rdp"] = "rdp"  # the quickest; it is asked before the first step only


@dataclass(frozen=True)
class Setup:
    """What all contenders have in common.

    Attributes:
        optimizer: makes the torch optimizer from the trainable parameters.
        epsilon: target of the run, which sets the noise; infinite for none.
    """

    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    epsilon: float = 3.0


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        make: attaches to a workload and returns the step, to be called again and again.
        period: K, after how many steps the work repeats; measured are whole periods.
    """

    label: str
    make: Callable[[Workload, Setup], Step]
    period: int = 1


def _flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """One row per prediction: (B T, outputs) and (B T,)."""
    return logits.flatten(0, -2), labels.flatten()


def _plain(work: Workload, setup: Setup, *, compiled: bool = False) -> Step:
    optimizer = setup.optimizer(work.trainable)
    model = _compiled(work.module) if compiled else work.module

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(*_flat(model(work.inputs), work.labels)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _compiled(module: nn.Module) -> Any:
    # Else code that was compiled for one contender's model is taken for another's, which has hooks.
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    return torch.compile(module)


def _opacus(work: Workload, setup: Setup, *, mode: str) -> Step:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its generator is not cryptographic, and its torch hooks' remarks
        made: Any = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=work.module,
            optimizer=setup.optimizer(work.trainable),
            criterion=nn.CrossEntropyLoss(),
            data_loader=_loader(work),
            noise_multiplier=_noise_multiplier(setup.epsilon),
            max_grad_norm=MAX_GRAD_NORM,
            poisson_sampling=False,  # the batch is given
            grad_sample_mode=mode,
        )
    module, optimizer = made[:2]
    # Ghost clipping hands back a criterion that does its two backward passes.
    criterion = made[2] if mode == "ghost" else _mean_loss

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


def _mean_loss(logits: Tensor, labels: Tensor, *, shape: torch.Size) -> Tensor:
    return F.cross_entropy(logits, labels)


def _opake(work: Workload, setup: Setup) -> Step:
    """Opake's functions with torch's optimizer; they need none of opake's patches for these models."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.random import key

    trainable = {name: p for name, p in work.module.named_parameters() if p.requires_grad}
    weights = {name: p.detach() for name, p in trainable.items()}  # the same memory
    optimizer = setup.optimizer(trainable.values())

    def loss(weights: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(*_flat(functional_call(work.module, weights, (sample[None],)), label))

    settings = {"clipping_norm": MAX_GRAD_NORM, "normalize_by": len(work.inputs), "batch_argnums": (1, 2)}
    clip, clip_state = clipped_grad(loss, **settings)
    privatize, noise_state = gaussian_noise(noise_multiplier=_noise_multiplier(setup.epsilon), key=key(0))

    def step() -> None:
        nonlocal clip_state, noise_state
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # attention has no batching rule on CPUs
            gradient, clip_state = clip(weights, work.inputs, work.labels, state=clip_state)
        private, noise_state = privatize(gradient, noise_state)
        for name, p in trainable.items():
            p.grad = private.pytree[name]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def private_step(work: Workload, setup: Setup, *, preset: Preset, steps: int = _STEPS, compiled: bool = False) -> Step:
    """This package's step, of a run of ``steps``; ``compiled``: the model goes through torch.compile, hooks and all."""
    _, optimizer, _ = PrivacyEngine(seed=0).make_private_with_epsilon(
        module=work.module,
        optimizer=setup.optimizer(work.trainable),
        data_loader=_loader(work),
        target_epsilon=setup.epsilon,
        target_delta=_DELTA,
        steps=steps,
        preset=preset,
        clipping=AbadiClipping(MAX_GRAD_NORM),
        gradient_engine="bookkeeping",
        accountant=_ACCOUNTANT,
    )
    optimizer.sampler = None  # the batch is given
    model = _compiled(work.module) if compiled else work.module

    def per_sample_loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        losses = F.cross_entropy(*_flat(model(inputs), labels), reduction="none")
        return losses.view(len(inputs), -1).mean(1)

    if compiled:  # the first batch takes two backward passes
        torch._functorch.config.donated_buffer = False
    return partial(optimizer.step, per_sample_loss, (work.inputs, work.labels))


def optimizer_of(step: Step) -> HyFreeDPOptimizer:
    """That of :func:`private_step`."""
    return step.func.__self__  # type: ignore[attr-defined]


def _loader(work: Workload) -> DataLoader:
    """Tells both engines the sample rate; its records are never asked for."""
    batch_size = len(work.inputs)
    return DataLoader(TensorDataset(torch.zeros(_BATCHES * batch_size, device="cpu")), batch_size=batch_size)


@cache
def _noise_multiplier(epsilon: float) -> float:
    return calibrate_noise(
        target_epsilon=epsilon,
        target_delta=_DELTA,
        sample_rate=1 / _BATCHES,
        steps=_STEPS,
        probe="none",
        gamma=None,
        accountant=_ACCOUNTANT,
    ).sigma


CONTENDERS: dict[str, Contender] = {
    "plain": Contender("plain, not private", _plain),
    "opacus_hooks": Contender("Opacus, hooks", partial(_opacus, mode="hooks")),
    "opacus_ghost": Contender("Opacus, ghost clipping", partial(_opacus, mode="ghost")),
    "opacus_functorch": Contender("Opacus, functorch", partial(_opacus, mode="functorch")),
    "ours": Contender("ours, fixed rate", partial(private_step, preset=PRESETS["fixed"])),
    **{
        f"ours_k{interval}": Contender(
            f"ours, HyFreeDP K = {interval}",
            partial(private_step, preset=replace(LINE_SEARCH, warmup=0.0, interval=interval)),
            period=interval,
        )
        for interval in (1, 5, 10)
    },
}
COMPILED: dict[str, Contender] = {  # measured on request: torch.compile takes minutes for some models
    "plain_compiled": Contender("plain, torch.compile", partial(_plain, compiled=True)),
    "ours_compiled": Contender("ours, torch.compile", partial(private_step, preset=PRESETS["fixed"], compiled=True)),
}
OTHER_LIBRARIES: dict[str, Contender] = {  # where they are installed, by the name of their package
    "opake": Contender("opake", _opake),
}
ALL_CONTENDERS = CONTENDERS | COMPILED | OTHER_LIBRARIES
