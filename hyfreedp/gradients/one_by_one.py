"""Per-sample gradients where nothing has to be known of the model: one sample at a time.

No sample can be taken for another, and none can depend on another, since each is computed alone. Where functorch can
compute the model (``torch.func.vmap`` of ``torch.func.grad``) and agrees with such a loop on two samples, it computes
chunks of samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyfreedp.data.batches import PerSampleLoss, batch_length, take
from hyfreedp.gradients.autograd import explained, sums_in_float32
from hyfreedp.gradients.per_sample import Instantiated
from hyfreedp.running.layers import replaced
from hyfreedp.running.random_states import random_states, set_random_states

if TYPE_CHECKING:
    from hyfreedp.gradients.bookkeeping import GradientEngine

_CHUNK = 2**26  # numbers of gradients in a chunk, at most, unless one sample has more
_AGREES = 1e-4  # relative difference of two samples' gradients from the loop's; dropout, say, draws other numbers

Row = tuple[Tensor, dict[nn.Parameter, Tensor]]  # losses (n,) and gradients (n, *S)


class OneByOne:
    """Clipped sums of ``engine``, one sample at a time.

    Args:
        engine: whose model, clipping and sums these are.
    """

    def __init__(self, engine: GradientEngine) -> None:
        self._engine = engine
        self._mapped: bool | None = None  # whether functorch agrees with the loop; None before it was tried

    def add(self, loss: PerSampleLoss, batch: Any, weights: Tensor | None, *, chunks: bool) -> tuple[Tensor, Tensor]:
        """As :meth:`GradientEngine.add`; in ``chunks`` where functorch can."""
        losses, norms, start = [], [], 0
        for values, gradients in self._chunks(loss, batch) if chunks else self._loop(loss, batch):
            some = None if weights is None else weights[start : start + len(values)]
            norms.append(self._engine.add_clipped({p: Instantiated(g) for p, g in gradients.items()}, values, some))
            losses.append(values.detach())
            start += len(values)
        return torch.cat(losses), torch.cat(norms)

    def losses(self, loss: PerSampleLoss, batch: Any, *, chunks: bool) -> Tensor:
        """Losses (B,), with the random numbers that :meth:`add` draws."""
        if chunks and self._mapped:
            try:
                return torch.cat([_mapped(lambda sample: loss(sample)[0], part) for part in self._parts(batch)])
            except RuntimeError:  # a branch that the gradients did not open
                self._mapped = False
        return torch.cat([loss(take(batch, slice(i, i + 1))) for i in range(batch_length(batch))])

    def _loop(self, loss: PerSampleLoss, batch: Any) -> Iterator[Row]:
        parameters = list(self._engine.recorder.trainable())
        for i in range(batch_length(batch)):
            with torch.enable_grad():
                value = loss(take(batch, slice(i, i + 1)))
            with explained(), sums_in_float32():
                gradients = torch.autograd.grad(value.sum(), parameters, allow_unused=True, materialize_grads=True)
            yield value, {p: g[None] for p, g in zip(parameters, gradients, strict=True)}

    def _chunks(self, loss: PerSampleLoss, batch: Any) -> Iterator[Row]:
        if self._mapped is None and batch_length(batch) > 1:
            self._mapped = self._agrees(loss, take(batch, slice(0, 2)))
        if not self._mapped:
            yield from self._loop(loss, batch)
            return
        for part in self._parts(batch):
            device = next(self._engine.module.parameters()).device
            states = random_states(device)
            try:
                row = self._map(loss, part)
            except RuntimeError:  # a branch that the first records did not open
                self._mapped = False
                set_random_states(device, states)
                yield from self._loop(loss, part)
            else:
                yield row

    def _parts(self, batch: Any) -> Iterator[Any]:
        numbers = sum(p.numel() for p in self._engine.recorder.trainable())
        each = max(1, _CHUNK // numbers)
        for start in range(0, batch_length(batch), each):
            yield take(batch, slice(start, start + each))

    def _map(self, loss: PerSampleLoss, batch: Any) -> Row:
        module, trained = self._engine.module, list(self._engine.recorder.trainable())

        def of_one(values: list[Tensor], sample: Any) -> Tensor:
            with replaced(module, dict(zip(trained, values, strict=True))):
                return loss(sample)[0]

        step = torch.func.grad_and_value(of_one)
        gradients, losses = _mapped(lambda sample: step([p.detach() for p in trained], sample), batch)
        return losses, dict(zip(trained, gradients, strict=True))

    def _agrees(self, loss: PerSampleLoss, batch: Any) -> bool:
        device = next(self._engine.module.parameters()).device
        states = random_states(device)
        expected = list(self._loop(loss, batch))
        set_random_states(device, states)
        try:
            values, found = self._map(loss, batch)
        except Exception:  # whatever functorch cannot do
            return False
        finally:
            set_random_states(device, states)
        for p, g in found.items():
            true = torch.cat([gradients[p] for _, gradients in expected])
            if not bool((g - true).norm() <= _AGREES * true.norm()):
                return False
        return torch.allclose(values, torch.cat([value for value, _ in expected]).detach(), rtol=_AGREES)


def _mapped(function: Callable[[Any], Any], batch: Any) -> Any:
    """``function`` of each sample as a batch of one, mapped over the samples by functorch."""
    leaves, structure = tree_flatten(batch)

    def of_one(*sample: Tensor) -> Any:
        return function(tree_unflatten([t.unsqueeze(0) for t in sample], structure))

    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that vmap is slow on some functions
        return torch.vmap(of_one, randomness="different")(*leaves)
