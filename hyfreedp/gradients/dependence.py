"""Does the loss of a sample depend on the others? Compared on a few samples, before anything of their step is released.

Clipping bounds what one sample's gradient contributes; it bounds nothing if a sample also moves the losses of others.
The check takes a few samples of the batch and computes their losses twice: with the others as they are, and with the
others replaced, by copies of the samples themselves or by what they are times a large number, infinity or NaN. Random
numbers are the same, and so is the size of the batch: a loss of its own sample alone does not even round otherwise. So
one loss that changes is enough to refuse, and no record can cause that by what it is. Where the loss draws random
numbers, each of some twenty such comparisons has numbers of its own: mixing that happens with probability p in a pass
is missed by k of them with probability (1 - p)^k, which is one in 1,200 for p = 0.3 at the first check. In one
comparison more the others are left out, which shows what depends on how many there are, and on places; each operation
draws one number for all rows then. There rounding differs, so that a single loss decides nothing.

It does so at the weights as they are and at perturbed weights, where random numbers are added to all trained
parameters: that opens branches that a zero closes (gates, LayerScale, LoRA's B), and brings a model that fits its data
back to losses whose rounding is small beside them. Weights and random states are put back bit for bit.

What it cannot see: mixing that is smaller than rounding, that begins only with more samples than it takes (at most
``SAMPLES``), that depends on size or places alone where the forward pass draws a permutation, or from NumPy, Python or
an accelerator's fused dropout, that is too rare for the number of comparisons, or that happens at none of the steps at
which it is asked. A check is no proof; where each sample is computed alone, none is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyfreedp.data.batches import PerSampleLoss, batch_length, leaves, take
from hyfreedp.noise import NoiseGenerator
from hyfreedp.noise.cipher import derive
from hyfreedp.running.devices import CPU
from hyfreedp.running.layers import resting
from hyfreedp.running.random_states import (
    RandomStates,
    random_states,
    random_states_kept,
    random_states_of,
    seed_random_states,
)

SAMPLES = 16  # that are looked at, of a batch
_WHOLE, _FEW = 4, 4  # comparisons with all of them, and how many of them in others: a coin to mix is thrown for all
FIRST_DRAWS, LATER_DRAWS = 20, 4  # of random states, at the first check and at each later one
_MOST_OPERATIONS = 20_000  # of a pass beside extreme records, in which a loop may never end
_MOST_DRAWS = 1_000  # of operations in a pass where all draw alike, beyond which it may never end
_PERTURB = 0.3  # standard deviation of what is added to a weight, in units of 1 / sqrt(inputs of its unit)
# Others are replaced by copies (None) or made so many times as large. A branch on the largest number of a batch, or on
# whether all are finite, shows beside the last four, whatever the weights are.
_BESIDE: tuple[float | None, ...] = (None, 1e3, 1e3, None, math.nan, math.inf, 1e8, 1e30)

# Relative difference of two losses beyond which samples mix, by the narrowest type in which layers compute. Rounding on
# the ViT, GPT-2, LLaMA and BERT of the tests: below 1e-7 (float32), and none in the others, whose last bits hide it; a
# GPU may choose another algorithm for another batch size.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-3}  # else as bfloat16
_LARGE = 10  # times the tolerance: of a single loss, for models that cut padding off, and so round otherwise


# Checks after the first: one more for so many steps, and no more than so many; together under 1 % of a longer run.
_STEPS_PER_CHECK, _MOST = 100, 5


def steps_to_check(first: int, steps: int, generator: NoiseGenerator) -> list[int]:
    """The steps, from ``first`` to ``steps``, at which samples are checked not to mix: the first, and random others."""
    chosen = generator.child("checks").permutation(steps)[: min(_MOST, max(1, steps // _STEPS_PER_CHECK))]
    return [first, *sorted(step for step in chosen.tolist() if step > first)]


def check_samples_apart(
    per_sample_loss: PerSampleLoss,
    samples: Any,
    *,
    module: nn.Module,
    narrowest_type: torch.dtype,
    generator: NoiseGenerator,
    draws: int = FIRST_DRAWS,
) -> None:
    """Refuse a loss that mixes the samples of a batch.

    Args:
        per_sample_loss: maps a batch to losses of shape ``(B,)``.
        samples: a batch of at least two samples.
        module: the model, in train mode.
        narrowest_type: in which its layers compute.
        generator: chooses samples and random states, and perturbs weights.
        draws: of random states, each for one comparison.

    Raises:
        ValueError: losses changed with the other samples of the batch.
    """
    parameters, size = [p for p in module.parameters() if p.requires_grad], batch_length(samples)
    device = parameters[0].device
    fewer, replaced = [], []
    keys = (generator.child("states", number).key for number in count())
    with torch.no_grad(), random_states_kept(device):
        kinds = _BESIDE if device == CPU else _BESIDE[:4]  # there an operation that takes no NaN ends the process
        kinds = kinds if scaled(samples, torch.arange(size), 1e3) is not None else (None, None)
        for weights, beside in (nullcontext(), kinds), (perturbed(parameters, generator), kinds[:4]):
            with weights:
                with resting(filter(_drops, module.modules())):  # so that batches may differ in size
                    halves = halves_of(samples, generator)
                    pair, drew = _without_others(per_sample_loss, samples, halves, next(keys), device)
                    fewer.append(pair)
                first, together = int(generator.permutation(len(beside))[0]), None  # later checks make few of them
                for number in range(draws // 2 if drew else len(beside)):
                    whole = not drew or number < _WHOLE
                    some = samples if whole else take(samples, generator.permutation(size)[:_FEW])
                    if drew or together is None:  # else one random state is as good as another
                        key = next(keys)
                        together = _losses(per_sample_loss, some, key, device)
                    # Each half is looked at beside copies and beside large records.
                    halves = halves[::-1] if whole and number else halves_of(some, generator)
                    scale = beside[(first + number) % len(beside)]
                    replaced.append(_others_replaced(per_sample_loss, some, halves, key, device, together, scale))
    # A model that fits has losses near zero, all rounding; at perturbed weights it has forgotten.
    sizes = [one.abs().nan_to_num(nan=0.0, posinf=0.0).median() for one, _ in (*fewer, *replaced) if len(one)]
    scale, rounding = max(map(float, sizes), default=0.0), _TOLERANCE.get(narrowest_type, 4e-3)
    for pairs, same_size in ((fewer, False), (replaced, True)):
        for pair in pairs:
            compared, changed = len(pair[0]), int(_changed(*pair, rounding, scale).sum())
            single = same_size and bool(_changed(*pair, _LARGE * rounding, scale).any())
            if single or changed > min(max(1, compared // 4), max(0, compared - 1)):
                raise ValueError(
                    f"the losses of {changed} of {compared} samples depend on which other samples are in the batch, so "
                    "clipping bounds nothing. Each loss must depend on its own sample only: dimension 0 of every "
                    "tensor must be the samples (attention with batch_first=True), statistics such as means, class "
                    "counts or numbers of tokens must be a sample's own, random numbers must be those of the global "
                    "generators of torch, NumPy or Python, and batches must not be written to. Where that cannot be, "
                    "make_private_with_epsilon(isolate=True) computes each sample alone: slow, and safe"
                )


def _changed(together: Tensor, apart: Tensor, tolerance: float, scale: float) -> Tensor:
    """Which losses differ, shape ``(n,)``; one that is not finite does from one that is."""
    near = (together - apart).abs() <= tolerance * (together.abs() + scale)
    return ~near & ~(together == apart) & ~(together.isnan() & apart.isnan())


Halves = tuple[Tensor, ...]  # positions of samples
Pair = tuple[Tensor, Tensor]  # losses of some samples, float64; of none where the two passes tell nothing


def _without_others(
    loss: PerSampleLoss, samples: Any, halves: Halves, key: bytes, device: torch.device
) -> tuple[Pair, bool]:
    """Losses of half of the samples, among all and without the others; and whether random numbers were drawn."""
    kept, _ = halves
    seed_random_states(key, device)
    before, found, numbers, none = random_states(device), [], dict[str, float](), (torch.zeros(0), torch.zeros(0))
    for some in (samples, take(samples, kept)):
        try:
            with _RowsAlike(key, device, numbers) as mode:
                found.append(loss(some).double())
        except Exception:
            if not numbers:
                raise
            return none, True  # it cannot do with numbers that are all alike
        if not (mode.alike and before.same(random_states(device))):
            return none, True  # a smaller batch draws other random numbers
    return (found[0][kept], found[1]), bool(numbers)


class _RowsAlike(TorchDispatchMode):
    """All numbers that an operation draws are one number, whatever their places and how many they are.

    Args:
        numbers: those of each operation, which another shape would draw otherwise from the same state.

    Attributes:
        alike: whether they could be made so; not permutations, nor what was drawn and multiplied, as by fused dropout.
    """

    def __init__(self, key: bytes, device: torch.device, numbers: dict[str, float]) -> None:
        super().__init__()
        self._key, self._device, self._numbers, self._calls = key, device, numbers, 0
        self.alike = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs or {})
        self._calls += 1
        if self._calls > _MOST_DRAWS:
            raise RuntimeError("numbers are drawn until they differ")
        kind = str((func, *(one for one in args if isinstance(one, int | float))))
        for attempt in range(9):  # not zero, which would drop all there is to be seen
            with random_states_of(derive(self._key, kind, attempt), self._device):
                before = random_states(self._device)
                result = func(*args, **kwargs or {})
                if before.same(random_states(self._device)):
                    return result  # nothing was drawn, as by attention without dropout
            self.alike &= isinstance(result, Tensor) and "randperm" not in kind
            number = self._numbers.setdefault(kind, result.flatten()[0].item() if self.alike and result.numel() else 0)
            if number or not self.alike:
                break
            del self._numbers[kind]
        return result.fill_(number) if self.alike else result


class _Bounded(TorchDispatchMode):
    """Ends a pass that takes too many operations."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls > _MOST_OPERATIONS:
            raise RuntimeError("operations are repeated until numbers fall")
        return func(*args, **kwargs or {})


def _losses(loss: PerSampleLoss, samples: Any, key: bytes, device: torch.device) -> tuple[Tensor, RandomStates]:
    """Losses, float64, with the random numbers of ``key``, and the states after them."""
    seed_random_states(key, device)
    return loss(samples).double(), random_states(device)


def _others_replaced(
    loss: PerSampleLoss,
    samples: Any,
    halves: Halves,
    key: bytes,
    device: torch.device,
    among_all: tuple[Tensor, RandomStates],
    scale: float | None,
) -> Pair:
    """Losses of half of the samples, among all, and beside the others scaled or, if None, copies of themselves."""
    kept, others = halves
    replaced, together = None if scale is None else scaled(samples, others, scale), among_all[0][kept]
    try:
        with nullcontext() if replaced is None else _Bounded():
            values, drawn = _losses(loss, copied(samples, kept, others) if replaced is None else replaced, key, device)
    except Exception:
        if replaced is None:
            raise
        return together[:0], together[:0]  # numbers that the model does not take, such as probabilities above 1
    if not drawn.same(among_all[1]):
        return together[:0], together[:0]  # such as of padding, where the loss cuts it off
    return together, values[kept]


def halves_of(samples: Any, generator: NoiseGenerator) -> Halves:
    """A random half of the samples, even where their number is odd and odd where it is even, and the others.

    So a branch on the parity of a batch shows where the others are left out.
    """
    size = batch_length(samples)
    half = size // 2
    return tuple(generator.permutation(size).tensor_split([half + (size > 2 and half % 2 == size % 2)]))


def copied(samples: Any, kept: Tensor, others: Tensor) -> Any:
    """The samples, with those ``kept`` also in the places of the others."""
    rows = torch.arange(len(kept) + len(others))
    rows[others] = kept.repeat(3)[: len(others)]  # there are three times as many at most
    return take(samples, rows)


def scaled(samples: Any, rows: Tensor, scale: float) -> Any | None:
    """The samples, with those in ``rows`` times ``scale``; None if there is nothing to scale.

    Whole numbers stay: they may be classes, or positions in a table.
    """
    large, found = take(samples, torch.arange(batch_length(samples))), False
    for tensor in leaves(large):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            part = take(tensor, rows)
            fractions = part != part.round()
            tensor[rows.to(tensor.device)] = torch.where(fractions, part * scale, part)
            found |= bool(fractions.any())
    return large if found else None


def _drops(layer: nn.Module) -> bool:
    """Whether it is named after dropping (Dropout, DropPath, StochasticDepth)."""
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
                p.data.add_(noise.to(p.device, p.dtype))  # whose version counter, which guards look at, is not p's
        yield
    finally:
        for p, before in zip(parameters, kept, strict=True):
            p.data.copy_(before)
