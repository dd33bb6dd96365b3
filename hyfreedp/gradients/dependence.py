"""Does the loss of a sample depend on the others? Compared on a few samples, before anything of their step is released.

Clipping bounds what one sample's gradient contributes; it bounds nothing if a sample also moves the losses of others.
The check takes a few samples of the batch and computes their losses twice: among all of them, and with some of the
others left out. Nothing else differs, least of all random numbers, so neither may a loss.

It does so at the weights as they are and at perturbed weights, where random numbers are added to all trained
parameters: that opens branches that a zero closes (gates, LayerScale, LoRA's B), and brings a model that fits its data
back to losses whose rounding is small beside them. Weights and random states are put back bit for bit.

What it cannot see: mixing that is smaller than rounding, that begins only with more samples than it takes (at most
``SAMPLES``), that depends on the size of the batch alone where the forward pass also draws random numbers outside
dropout layers, or that happens at none of the steps at which it is asked. A check is no proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.data.batches import batch_length, take
from hyfreedp.noise import NoiseGenerator
from hyfreedp.running.random_states import RandomStates, random_states, set_random_states

SAMPLES = 16  # that are looked at, of a batch
_PERTURB = 0.3  # standard deviation of what is added to a weight, in units of 1 / sqrt(inputs of its unit)

# Relative difference of two losses beyond which samples mix, by the narrowest type in which layers compute. Rounding on
# the ViT, GPT-2, LLaMA and BERT of the tests: below 1e-7 (float32), and none in the others, whose last bits hide it; a
# GPU may choose another algorithm for another batch size.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-3}  # else as bfloat16


# Checks after the first: one more for so many steps, and no more than so many; together under 1 % of a longer run.
_STEPS_PER_CHECK, _MOST = 100, 5


def steps_to_check(first: int, steps: int, generator: NoiseGenerator) -> list[int]:
    """The steps, from ``first`` to ``steps``, at which samples are checked not to mix: the first, and random others."""
    chosen = generator.child("checks").permutation(steps)[: min(_MOST, 1 + steps // _STEPS_PER_CHECK)]
    return [first, *sorted(step for step in chosen.tolist() if step > first)]


def check_samples_apart(
    per_sample_loss: Callable[[Any], Tensor],
    samples: Any,
    *,
    module: nn.Module,
    narrowest_type: torch.dtype,
    generator: NoiseGenerator,
) -> None:
    """Refuse a loss that mixes the samples of a batch.

    One bad record cannot cause a refusal, since it has one loss: more than a quarter of them must differ, and two at
    least (one of the smallest batches, where only one is compared).

    Args:
        per_sample_loss: maps a batch to losses of shape ``(B,)``.
        samples: a batch of at least two samples.
        module: the model, in train mode.
        narrowest_type: in which its layers compute.
        generator: chooses samples and perturbs weights.

    Raises:
        ValueError: losses changed with the other samples of the batch.
    """
    size = batch_length(samples)
    parameters = [p for p in module.parameters() if p.requires_grad]
    device = parameters[0].device
    kept = generator.permutation(size)[: max(1, size // 2)]
    present, pairs = random_states(device), []
    with torch.no_grad():
        try:
            with _without_dropout(module) as rests:
                pairs.append(_losses_twice(per_sample_loss, samples, kept, device, present))
            with perturbed(parameters, generator):
                pairs.append(_losses_twice(per_sample_loss, samples, kept, device, present))
                if rests:  # as it is trained; and as above, for what depends on the number of samples
                    with _without_dropout(module):
                        pairs.append(_losses_twice(per_sample_loss, samples, kept, device, present))
        finally:
            set_random_states(device, present)
    # A model that fits has losses near zero, all rounding; at perturbed weights it has forgotten.
    pairs = [pair for pair in pairs if len(pair[0])]
    scale = max((float(one.abs().nan_to_num(nan=0.0, posinf=0.0).median()) for one, _ in pairs), default=0.0)
    for together, apart in pairs:
        allowed = _TOLERANCE.get(narrowest_type, 4e-3) * (together.abs() + scale)
        differs = ~((together - apart).abs() <= allowed) & ~(together == apart) & ~(together.isnan() & apart.isnan())
        if int(differs.sum()) > min(max(1, len(differs) // 4), max(0, len(differs) - 1)):
            raise ValueError(
                f"the losses of {int(differs.sum())} of {len(differs)} samples depend on which other samples are in "
                "the batch, so clipping bounds nothing. Each loss must depend on its own sample only: dimension 0 of "
                "every tensor must be the samples (attention with batch_first=True), statistics such as means, class "
                "counts or numbers of tokens must be a sample's own, and random numbers must come from torch"
            )


def _losses_twice(
    per_sample_loss: Callable[[Any], Tensor], samples: Any, kept: Tensor, device: torch.device, states: RandomStates
) -> tuple[Tensor, Tensor]:
    """Losses of the ``kept`` samples among all and without the others, float64; from the same random state."""
    set_random_states(device, states)
    losses = per_sample_loss(samples).double()
    drawn = random_states(device)
    if states.same(drawn):
        return losses[kept], per_sample_loss(take(samples, kept)).double()
    # A smaller batch would draw other random numbers: fill the others' places with copies instead. So would one without
    # its longest sample, where the loss cuts padding off: then keep the other half, which has that sample.
    size = batch_length(samples)
    others = torch.tensor([row for row in range(size) if row not in kept.tolist()])
    for half in (kept, others):
        rows = half.repeat(math.ceil(size / len(half)))[:size]
        rows[half] = half
        set_random_states(device, states)
        apart = per_sample_loss(take(samples, rows)).double()[half]
        if drawn.same(random_states(device)):
            return losses[half], apart
    return losses[:0], losses[:0]  # nothing can be compared


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[bool]:
    """Layers named after dropping (Dropout, DropPath, StochasticDepth) rest, so that batches may differ in size."""
    resting = [layer for layer in module.modules() if layer.training and _drops(layer)]
    for layer in resting:
        layer.training = False
    try:
        yield bool(resting)
    finally:
        for layer in resting:
            layer.training = True


def _drops(layer: nn.Module) -> bool:
    name = type(layer).__name__.lower()
    leaf = next(layer.children(), None) is None and next(layer.parameters(), None) is None
    return leaf and ("drop" in name or "stochasticdepth" in name)


@contextmanager
def perturbed(parameters: Sequence[nn.Parameter], generator: NoiseGenerator) -> Iterator[None]:
    """Random numbers are added to all ``parameters``, and taken away again bit for bit."""
    kept = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            for p in parameters:
                inputs = math.prod(p.shape[1:])
                noise = generator.normal(*p.shape, device=p.device).mul_(_PERTURB / math.sqrt(max(1, inputs)))
                p.add_(noise.to(p.device, p.dtype))
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(list(parameters), kept)
