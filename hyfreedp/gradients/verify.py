"""What is taken for samples, compared with batches of another size and with autograd, before it is relied on.

A few samples of the batch are computed twice: as they are, and with a copy of one of them. The rows of samples grow
with the batch, and other dimensions do not: a tensor of T tokens that has as many rows as samples by accident shows.
Then, for secret random weights of both signs, the weighted sum of per-sample gradients must be autograd's: at the
weights as they are, and with the copy at perturbed weights, which opens gates that hide gradients (LayerScale, LoRA's
B).

Clipping bounds nothing if a sample moves the losses of others: that is looked for too, and refused, see
:mod:`hyfreedp.gradients.dependence`. Where gradients disagree though samples do not mix, the model was misread: then
it is computed one sample at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.data.batches import PerSampleLoss, batch_length, take
from hyfreedp.gradients.autograd import weighted_gradients
from hyfreedp.gradients.clipping import Clipping, bounded_factors
from hyfreedp.gradients.dependence import (
    FIRST_DRAWS,
    LATER_DRAWS,
    SAMPLES,
    Halves,
    check_samples_apart,
    copied,
    halves_of,
    perturbed,
    scaled,
)
from hyfreedp.gradients.per_sample import norms_of, widened
from hyfreedp.gradients.recorder import Recorder, Seen
from hyfreedp.noise import NoiseGenerator
from hyfreedp.running.random_states import RandomStates, random_states, random_states_kept

_LOUDER = 1e3  # times as loud are the losses of those that are not looked at
_GRADIENTS = 4  # samples whose gradients are compared, of those that are looked at

# Relative difference from autograd's gradient that rounding explains, by the narrowest type in which layers compute.
# Measured on the ViT, GPT-2, LLaMA and BERT of the tests, at most: 8e-8 (LLaMA computes its norms in float32), 4e-7,
# 9e-4 and 6e-3. TF32, which float32 may mean on a GPU, rounds by 1e-3.
_ROUNDING = {torch.float64: 1e-5, torch.float32: 5e-3, torch.float16: 1e-2}  # else as bfloat16


def verified_uses(
    recorder: Recorder, clipping: Clipping, loss: PerSampleLoss, batch: Any, generator: NoiseGenerator
) -> set[Seen]:
    """The uses of parameters by a few samples of a batch that agree with autograd; ``recorder.lost`` if one does not.

    Random states are restored. Where fewer than two samples have finite gradients, or all have the same loss, nothing
    is learned.

    Args:
        recorder: of the model.
        clipping: scales gradients in the comparison as in what is released, so that no large one hides others.
        loss: maps samples to their losses (B,).
        batch: to choose the samples from.
        generator: chooses them, and signs.

    Raises:
        ValueError: losses depend on other samples, or on no parameter.
    """
    rows = generator.permutation(batch_length(batch))[:SAMPLES]
    parameters = list(recorder.trainable())
    with random_states_kept(parameters[0].device):
        samples = take(batch, rows.sort().values)
        with torch.no_grad(), random_states_kept(parameters[0].device):
            samples = take(samples, loss(samples).isfinite().cpu().nonzero()[:, 0])
        if batch_length(samples) < 2:
            return set()
        narrowest, module = _narrowest_type(recorder), recorder.module
        draws = LATER_DRAWS if recorder.compared else FIRST_DRAWS
        check_samples_apart(loss, samples, module=module, narrowest_type=narrowest, generator=generator, draws=draws)
        recorder.compared = True
        apart = torch.arange(0, batch_length(samples), max(1, batch_length(samples) // _GRADIENTS))
        samples = _finite(recorder, loss, take(samples, apart[:_GRADIENTS]))
        if samples is None:
            return set()
        larger = take(samples, torch.arange(batch_length(samples) + 1) % batch_length(samples))
        seen = _of_both_sizes(recorder, loss, samples, larger)
        if not seen or not _agrees(recorder, clipping, loss, samples, generator.child("as they are")):
            return set()
        with perturbed(parameters, generator.child("perturbed")):
            recorder.watching = True
            try:
                agrees = _agrees(recorder, clipping, loss, larger, generator.child("elsewhere"))
            finally:
                recorder.watching = False
            if not agrees or _alike(loss, samples):
                return set()
    return (seen & recorder.seen) - recorder.dead


def _narrowest_type(recorder: Recorder) -> torch.dtype:
    """The shortest type of the last backward pass's gradients and of what the model holds."""
    tensors = (*recorder.module.parameters(), *recorder.module.buffers())
    held = {t.dtype for t in tensors if t.is_floating_point()}
    return min(recorder.types | held, key=lambda dtype: torch.finfo(dtype).bits)


def _finite(recorder: Recorder, loss: PerSampleLoss, samples: Any) -> Any:
    """The samples whose gradients are finite; None if there are fewer than two."""
    for _ in range(2):
        if batch_length(samples) < 2:
            return None
        with recorder.following(batch_length(samples)):
            losses = loss(samples)
            gradients = recorder.per_sample_gradients(losses)
        if gradients is None:
            return None
        if not gradients:
            raise ValueError("losses depend on no trainable parameter: are they those of another model?")
        finite = norms_of(gradients.values(), losses).isfinite().cpu()
        if finite.all():
            return samples
        samples = take(samples, finite.nonzero()[:, 0])
    return None


def _alike(loss: PerSampleLoss, samples: Any) -> bool:
    """Whether all have the same loss: then nothing tells which row is whose, and no comparison shows anything."""
    with torch.no_grad():
        losses = loss(samples).double()
    return bool((losses - losses[0]).abs().max() <= 1e-6 * losses.abs().max())


def _of_both_sizes(recorder: Recorder, loss: PerSampleLoss, samples: Any, larger: Any) -> set[Seen]:
    """The uses that batches of two sizes have in common; none if one of them cannot be relied on."""
    device = next(recorder.module.parameters()).device
    while True:
        seen, moved = [], []
        for batch in (samples, larger):
            with random_states_kept(device), recorder.following(batch_length(batch)):
                losses = loss(batch)
            if recorder.trace(losses) is None:
                return set()
            seen.append(recorder.seen)
            moved.append(recorder.moved)
        recorder.known.update(*moved)
        sizes = [recorder.views * batch_length(batch) for batch in (samples, larger)]
        grown = [
            {(name, d, n // size) for name, d, n in moves - others if n % size == 0}
            for moves, others, size in zip(moved, moved[::-1], sizes, strict=True)
        ]
        if both := grown[0] & grown[1]:  # in this dimension the rows of samples lie
            recorder.lose(f"{min(both)[0]} along dimension {min(both)[1]} may move rows from one sample to another")
            return set()
        differ = {use.parameter for use in seen[0] ^ seen[1]}
        if differ <= recorder.constant:
            break
        recorder.constant |= differ  # an input without gradient had as many rows as samples by accident
    if wrong := sorted({use.parameter for use in seen[0]} & {use.parameter for use in seen[1]} & differ):
        recorder.lose(f"the rows of the tensors that meet the parameter {wrong[0]!r} do not grow with the batch")
        return set()
    return seen[0] & seen[1]


def _by_autograd(
    recorder: Recorder, loss: PerSampleLoss, batch: Any, weights: Tensor, halves: Halves, drawn: RandomStates
) -> dict[nn.Parameter, Tensor | None]:
    """Autograd's weighted gradients, with other samples in the place of the second half where the model takes them."""
    trainable, device = recorder.trainable(), next(recorder.module.parameters()).device
    for changed in (scaled(batch, halves[1], _LOUDER), copied(batch, *halves), batch):
        if changed is None:
            continue
        with random_states_kept(device), recorder.following(batch_length(batch)):
            try:
                losses = loss(changed)
            except Exception:
                if changed is batch:
                    raise
                continue
            if changed is batch or (drawn.same(random_states(device)) and bool(losses.isfinite().all())):
                return weighted_gradients(losses, weights, trainable)
    raise AssertionError("the last one is the batch itself")


def _agrees(recorder: Recorder, clipping: Clipping, loss: PerSampleLoss, batch: Any, generator: NoiseGenerator) -> bool:
    """Whether weighted sums of some samples' gradients are autograd's; False also where they tell nothing.

    Of the others, the losses are louder here and the samples other ones there: so gradients mix that differ, even where
    losses are apart, as by hooks or by what happens only where there are gradients.
    """
    size, device = batch_length(batch), next(recorder.module.parameters()).device
    halves = halves_of(batch, generator.child("halves"))
    with random_states_kept(device), recorder.following(size):
        losses = loss(batch)
        drawn = random_states(device)
        louder = torch.ones(size).index_fill(0, halves[1], _LOUDER).to(losses)
        gradients = recorder.per_sample_gradients(losses * louder)
    if gradients is None:
        return False
    trainable, norms = recorder.trainable(), norms_of(gradients.values(), losses)
    if not norms.isfinite().all():
        return False
    uniform = generator.uniform(2, size).to(losses.device, norms.dtype)
    factors = bounded_factors(clipping, norms, clipping.sensitivity) * (uniform[0] + 0.5)
    factors = factors.log2().floor().exp2()  # with which rounding commutes
    weights = torch.where(uniform[1] < 0.5, -factors, factors).index_fill(0, halves[1].to(losses.device), 0.0)
    reference = _by_autograd(recorder, loss, batch, weights, halves, drawn)
    sizes, errors = [], []
    for p in trainable:
        true, g = reference[p], gradients.get(p)
        true = widened(torch.zeros_like(p) if true is None else true)
        found = torch.zeros_like(true) if g is None else g.weighted_sum(weights)
        # Where a sum cancels by chance, as of records that are all alike, its rounding does not.
        single = norms.new_zeros(()) if g is None else (weights.square() * g.squared_norms.clamp(min=0)).sum().sqrt()
        whole = torch.linalg.vector_norm(true)
        sizes.append(whole.maximum(single.to(whole)))
        errors.append(torch.linalg.vector_norm(found - true) if found.shape == p.shape else true.new_tensor(torch.inf))
    numbers = [n.to(sizes[0].device, torch.float64) for n in (*sizes, *errors)]
    rows = torch.stack(numbers).view(2, -1).tolist()
    total, rounding = math.hypot(*rows[0]), _ROUNDING.get(_narrowest_type(recorder), 5e-2)
    if not math.isfinite(total):
        return False
    # A misread gradient is wrong by order one. The total is there for gradients that vanish but for rounding, such as
    # those of a key projection's bias in attention.
    for name, own, error in zip(trainable.values(), *rows, strict=True):
        if not error <= rounding * (own + 0.1 * total):
            recorder.lose(f"per-sample gradients of the parameter {name!r} disagree with autograd's")
            return False
    return True
