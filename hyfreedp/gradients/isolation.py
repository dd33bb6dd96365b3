"""Modes around a loss that mark its tensors as those of these samples, and refuse tensors of other samples."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils._pytree import tree_map

from hyfreedp.errors import Refused
from hyfreedp.gradients.functorch import backward
from hyfreedp.gradients.guard import bits_differ
from hyfreedp.gradients.operations import ALIASES, DECISIONS, GRADIENT, SIZED, asked, tensors_in, written
from hyfreedp.gradients.per_sample import Instantiated, PerSampleGradients
from hyfreedp.gradients.pieces import Decisions

Gradients = dict[nn.Parameter, PerSampleGradients]
Loss = Callable[[Sequence[Tensor]], Tensor]  # of a record, by the tensors in it

_seed = torch.default_generator.initial_seed  # a function: the current seed of torch's random numbers


def inlined(function: Any, **others: Any) -> Any:
    """A Python function of torch, such that a mode meets its operations, or ``others`` that take their place."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = vars(F) | dict.fromkeys(checks, lambda *tensors: False) | others
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def replaced(func: Any) -> Any:
    """For a mode: torch's own function, which tells it that it is ``func``, by which a library replaced it; or None."""
    teller = sys._getframe(2)
    own: Any = teller.f_back if teller.f_code is handle_torch_function.__code__ else None
    if own is None or own.f_globals is not vars(F) or own.f_code is getattr(func, "__code__", None):
        return None
    return inlined(FunctionType(own.f_code, vars(F)))


class Isolated(TorchFunctionMode):
    """Refuses what a loss must not do, for samples mapped together or one alone; ``decisions`` are their answers."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self.decisions, self._mark, self._seed = decisions, object(), _seed()

    def mark(self, t: Any) -> Any:
        """Mark a tensor as one of these samples; returns it."""
        t._made_in = self._mark
        return t

    def is_own(self, t: Tensor) -> bool:
        """Whether a tensor is marked as one of these samples; Refused if it is one of others."""
        made_in = getattr(t, "_made_in", None)
        if made_in is not None and made_in is not self._mark:
            raise Refused(
                "the loss uses a tensor of another pass, which holds other records: let loss and model keep nothing of "
                "a batch (a cache, a memory, the last output) from one call to the next"
            )
        return made_in is not None

    def with_sizes(self, func: Any, args: Any) -> Any:
        """An operation's arguments, in which sizes that are tensors are numbers, by decisions of Python."""
        if (first := SIZED.get(func)) is None or not tensors_in(*args[first:]):
            return args
        with self:
            return *args[:first], *tree_map(lambda t: t.item() if isinstance(t, Tensor) else t, args[first:])

    def check_random_numbers(self, *arguments: Any) -> None:
        """Refused if an operation with these arguments would draw random numbers that are not of the run's key."""
        if _seed() != self._seed:
            raise Refused(
                "torch's random numbers were seeded while a loss was computed, by it or by another thread: whoever "
                "knows the seed knows dropout's masks. Seed nothing in the loss; numbers come from the run's key"
            )
        if any(issubclass(type(argument), torch.Generator) for argument in arguments):  # isinstance would be slow
            raise Refused(
                "the loss draws from a random generator of its own, which remembers how much was drawn for other "
                "records: draw from the global ones of torch, NumPy or Python, whose numbers come from the run's key"
            )


class SingleSample(Isolated):
    """A mode around the loss of one sample that is computed alone.

    A tensor is the sample's own, or shared, as parameters and constants are. An operation on an own one makes its
    result own, and what it writes into: after ``cache.copy_(x)`` a cache is own, and the next sample is refused it.

    Args:
        trained: the parameters to take gradients of, of which a map would have copies for each sample.
        guarded: the model's parameters, which are not marked, since the guard compares and restores them.
    """

    def __init__(self, trained: Sequence[nn.Parameter], decisions: Decisions, guarded: Iterable[nn.Parameter]) -> None:
        super().__init__(decisions)
        self.trained, self._guarded = {id(p): p for p in trained}, {id(p) for p in guarded}
        self._in_backward = False  # where hooks and Functions get gradients, which nothing has marked

    def computed(self, loss: Loss, tensors: Sequence[Tensor]) -> tuple[Tensor, Gradients]:
        """The loss (1,) and gradients of the sample, see :class:`~.mapped.Pass`; ``tensors`` are of shape (1, ...)."""
        with self:
            value = loss([self.mark(t[0].clone()) for t in tensors])[None]  # a loss may write into them
            for p in self.trained.values():
                p.requires_grad_()  # the loss may have frozen it
            self._in_backward = True
            found = backward(value, [*self.trained.values()]) if self.trained and value.requires_grad else ()
        pairs = zip(self.trained.values(), found, strict=False)
        return value.detach(), {p: Instantiated(g[None]) for p, g in pairs if g is not None}

    def is_own(self, t: Tensor) -> bool:
        return id(t) in self.trained or super().is_own(t)

    def mark(self, t: Any) -> Any:
        return super().mark(t) if isinstance(t, Tensor) and id(t) not in self._guarded else t

    met = mark  # called with a tensor that is not stacked, of a record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if (own := replaced(func)) is not None:
            with self:
                return own(*args, **kwargs)
        self.check_random_numbers(*args, *kwargs.values())
        args = self.with_sizes(func, args)
        tensors = tensors_in(*args, *kwargs.values())
        shared = [t for t in tensors if not self.is_own(t)]
        if func in GRADIENT:  # own, since a backward pass within the loss has made it, or added to it
            gradient = func(*args)
            return gradient if self.is_own(gradient) else self.mark(gradient)
        if func is Tensor.register_hook and len(args) == 2:
            return func(args[0], lambda g: args[1](self.mark(g)))
        if len(shared) == len(tensors) and not (self._in_backward and tensors):
            result = func(*args, **kwargs)
            if func in ALIASES:
                result._alias_of = tensors[0]
            return result
        if func in DECISIONS and self.decisions.path and len(shared) < len(tensors):
            self.decisions.answer(asked(func, *args, **kwargs)[1][None])
        versions = [_version(t) for t in shared]
        name = getattr(func, "__name__", "")
        copies = [t.clone() for t in shared] if "norm" in name or "moving_avg" in name else []
        result = func(*args, **kwargs)
        changed: list[Any] = [t for t, version in zip(shared, versions, strict=True) if _version(t) != version]
        # Norms change their statistics without a new version.
        changed += [t for t, copy in zip(shared, copies, strict=False) if bits_differ(t, copy)]
        for t in [*written(func, args, kwargs), *changed]:
            while t is not None:  # and every tensor that it is a view or an alias of
                self.mark(t)
                t = getattr(t, "_alias_of", t._base)
        for t in tensors_in(result):
            if not any(t is one for one in shared):  # some operations return an argument as it is
                self.mark(t)
        if func in ALIASES and shared:
            result._alias_of = shared[0]
        return result


def _version(t: Tensor) -> int:
    """How often torch knows that a tensor was written into; 0 in inference mode, where it does not count."""
    return 0 if t.is_inference() else t._version


@contextmanager
def masks_traced() -> Iterator[None]:
    """A context in which transformers takes samples' tensors for traced ones, and does not ask for their values.

    Otherwise its attention drops masks without padding, so that samples with and without padding form two groups.
    """
    utils: Any = sys.modules.get("transformers.utils.import_utils", SimpleNamespace())
    is_fake = getattr(utils, "is_fake_tensor", lambda t: False)  # before transformers 5 nothing calls it
    utils.is_fake_tensor = lambda t: hasattr(t, "_made_in") or is_fake(t)
    try:
        yield
    finally:
        utils.is_fake_tensor = is_fake
