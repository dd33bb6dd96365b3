"""Maps a loss over samples: the result for one sample cannot depend on another, since the loss sees only one.

The loss runs once, within a level of ``torch.vmap``, where each tensor of the batch looks like that of one sample. A
``TorchFunctionMode`` intercepts every torch operation in it, and leaves to functorch what it does not replace:

* *Known layers* have a rule, see :mod:`hyfreedp.gradients.rules`. It computes the layer on the underlying tensor
  (B, ...), whose dimension 0 is the samples, and keeps what the parameters' gradients need.
* *Other uses* of a parameter of shape S get a copy for each sample: a leaf (B, *S), whose gradient is per sample.
* *Decisions of Python* (``if mask.all()``, ``.item()``) are answered if all samples agree, see
  :mod:`hyfreedp.gradients.questions`.

One backward pass outside of the map then gives all gradients. It also asks for gradients of the parameters themselves.
If there is one, a parameter was used where nothing was intercepted (in a script, say), and the map is rejected.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_map

from hyfreedp.errors import REMEMBERS, Refused
from hyfreedp.gradients import functorch, operations
from hyfreedp.gradients.functorch import Level, is_wrapped
from hyfreedp.gradients.isolation import Gradients, Isolated, Loss, replaced
from hyfreedp.gradients.per_sample import Instantiated, PerSampleGradients
from hyfreedp.gradients.pieces import Decisions, Regroup, Unmappable
from hyfreedp.gradients.tables import add_uses
from hyfreedp.pytorch.devices import without_autocast

Call = Callable[[Tensor], Tensor]
Backward = Callable[[Any, Tensor, bool], Tensor | None]
_OF_TORCH: Any = Tensor.__torch_function__.__func__, nn.Parameter.__torch_function__  # type: ignore[attr-defined]

_REPLACEMENTS: dict[Any, list[Callable[..., Any]]] = {}  # by torch function, in order


def replaces(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: what a pass calls in place of torch functions, with itself, the function and its arguments.

    It returns the result, or NotImplemented: then the next replacement is tried, and functorch if there is none.
    """

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            _REPLACEMENTS.setdefault(function, []).append(replacement)
        return replacement

    return register


def rule(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: as :func:`replaces`, but called outside of the level, and not within a map of the loss's own."""

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        def outside(one_pass: Pass, *args: Any, **kwargs: Any) -> Any:
            if not one_pass.level.is_innermost():
                return NotImplemented
            with one_pass.level.left():
                return replacement(one_pass, *args, **kwargs)

        return replaces(*functions)(outside)

    return register


def composed(replacement: Callable[..., Any], *functions: Any) -> None:
    """Register a replacement that gets the arguments alone, and calls other torch functions, which are intercepted."""

    def within(one_pass: Pass, _: Any, *args: Any, **kwargs: Any) -> Any:
        with one_pass:
            return replacement(*args, **kwargs)

    for function in functions:
        _REPLACEMENTS.setdefault(function, []).insert(0, within)  # before a rule, whose arguments it may refuse


@lru_cache
def _is_ordinary(func: Any) -> bool:
    """Whether an operation has no replacement and needs nothing special, so that functorch maps it."""
    return func not in _REPLACEMENTS and operations.is_ordinary(func)


class Pass(Isolated):
    """One forward pass of samples that are mapped together, and its backward pass.

    Args:
        trained: the parameters to take gradients of; empty if only losses are needed.
        size: number of samples B.
        decisions: the known answers of the samples to decisions of Python.
        memory_budget: bytes that per-sample gradients, and copies of parameters, may take.
        sharing: the public number of samples that share this memory, for the form of gradients. None: ``size``.
        own_factories: whether tensors from ``torch.zeros`` and the like get a copy for each sample, so that the loss
            may write samples' values into them.
    """

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        size: int,
        decisions: Decisions | None = None,
        *,
        memory_budget: int,
        sharing: int | None = None,
        own_factories: bool = False,
    ) -> None:
        super().__init__(decisions or Decisions())
        self.level, self.memory_budget = Level(size), memory_budget
        self._room = memory_budget / (sharing or size)  # bytes left for each sample's gradients
        self.trained = {id(p): p for p in trained}
        self.anchor = torch.zeros((), requires_grad=True)  # an input that connects every layer to the graph
        self._own_factories = own_factories
        self._copies: dict[int, Tensor] = {}  # per-sample copies (B, *S) of parameters, by the parameter's id
        self._uses: dict[nn.Parameter, list[PerSampleGradients]] | None = None  # only during the backward pass
        self._raised: BaseException | None = None  # by an operation of the loss
        self.copied: list[tuple[Tensor, int]] = []  # what as_strided copied instead of viewing it; with the versions
        self.checkpoints = False  # whether the model recomputes activations (gradient checkpointing)

    def computed(self, loss: Loss, tensors: Sequence[Tensor]) -> tuple[Tensor, Gradients]:
        """The losses (B,) of samples, of which sample i gets row i of each of the ``tensors``, and their gradients.

        Gradients are those of all ``trained`` parameters on which a loss depends.

        Raises Regroup if copies of parameters exceed the memory, or if samples decide differently; Refused if the loss
        uses a tensor of an earlier pass, or random numbers that are not the run's; Unmappable, or an error of
        functorch, if the loss cannot be mapped, as where a parameter is used and nothing was intercepted.
        """
        around = [mode for mode in functorch.function_modes() if type(mode) is not DeviceContext]
        if around or functorch.dispatch_modes() > 0:
            raise Unmappable("a mode around the step, which sees tensors of all samples")
        copies = [t.as_subclass(Tensor).clone() for t in tensors]  # a loss may write into its record
        with self.entered():
            value = loss([self.of_sample(t) for t in copies])
            if self._raised is None and self.decisions.answered < len(self.decisions.path):  # it has kept an answer
                raise Refused(REMEMBERS)
        if (losses := self.samples(value)) is None:
            raise Unmappable("the loss belongs to a map within")
        leaves = [*self._copies.values()]
        taken = sum(leaf.numel() * max(4, leaf.element_size()) for leaf in leaves)
        if taken > self.memory_budget and self.level.size > 1:
            fitting = max(1, int(self.level.size * self.memory_budget / taken))
            raise Regroup(lambda piece: piece.cut(fitting))
        if not self.trained or not losses.requires_grad:
            return losses.detach(), {}
        uses = self._uses = dict[nn.Parameter, list[PerSampleGradients]]()
        with without_autocast(losses.device), self.entered() if self.checkpoints else nullcontext():  # it would round
            found = functorch.backward(losses, [*leaves, *self.trained.values(), self.anchor])
        self._uses = None
        if any(g is not None for g in found[len(leaves) : -1]):
            raise Unmappable("a parameter is used where no operation of torch shows, as in a compiled script")
        for key, g in zip(self._copies, found, strict=False):
            if g is not None:
                uses.setdefault(self.trained[key], []).append(Instantiated(g))
        return losses.detach(), {p: add_uses(uses_of_p) for p, uses_of_p in uses.items()}

    def met(self, t: Tensor) -> None:
        """Refuse to map a tensor that is not stacked: if a loss kept it, only a sample computed alone would tell."""
        raise Unmappable("a record has a tensor that cannot be stacked, or within an object")

    def of_sample(self, samples: Tensor) -> Tensor:
        """The tensor (B, ...) as code within the map sees it: as a sample's tensor (...) of this pass."""
        return self.mark(self.level.mapped(samples))

    def samples(self, t: Tensor) -> Tensor | None:
        """The tensor (B, ...) behind a sample's tensor ``t``; a shared one is expanded. None if an inner map has it."""
        if self.level.holds(t):
            return self.level.samples(t)
        if self.is_trained(t):
            return self._copy(t)
        return None if is_wrapped(t) else t.expand(self.level.size, *t.shape)

    def is_trained(self, t: Any) -> bool:
        return id(t) in self.trained

    def layer(self, call: Call, backward: Backward, x: Tensor, *, keeps_input: bool = True) -> Tensor:
        """The output of a layer that has a rule, as a sample's tensor.

        Args:
            call: computes the layer's output from ``x``.
            backward: called with ``x``, the output's gradient, and whether the input's gradient is needed, which it
                then returns; passes the parameters' gradients to :meth:`add`.
            x: the input, a plain tensor whose dimension 0 is the samples.
            keeps_input: whether ``backward`` needs ``x``; otherwise it gets None.
        """
        apply = super(Function, _Layer).apply  # past what :func:`functorch.intercepted` puts in its place
        y = apply(self, call, backward, keeps_input, x, self.anchor) if torch.is_grad_enabled() else call(x)
        return self.of_sample(y)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self.level.is_left or func in operations.METADATA:
            return func(*args, **(kwargs or {}))
        if (own := replaced(func)) is not None:
            with self:
                return own(*args, **(kwargs or {}))
        try:
            if types and any(getattr(f := kind.__torch_function__, "__func__", f) not in _OF_TORCH for kind in types):
                raise Unmappable(f"a kind of tensor, whose own code would see all samples: {types}")
            return self._intercept(func, args, kwargs or {})
        except BaseException as error:
            if type(error).__module__ != "torch.utils.checkpoint":  # whose recomputation is ended by an exception
                self._raised = self._raised or error
            raise

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context within the level, for code of the loss. It raises the first error of an operation, even if caught.

        The loss has caught that for all samples at once. So the piece is halved, again and again, until only the sample
        that causes it is computed without a map.
        """
        eager: Any = torch.compiler.set_stance("force_eager")  # compiled functions run uncompiled
        try:
            with eager, functorch.intercepted(self._marked), self.level, self:
                yield
            caught, half = self._raised, (self.level.size + 1) // 2
            if caught is not None and self.level.size > 1 and not isinstance(caught, (Unmappable, Refused, Regroup)):
                self._raised = Regroup(lambda piece: piece.cut(half))
        finally:
            error, caught, self._raised = self._raised, None, None
            try:
                if error is not None:
                    raise error
            finally:
                del error  # its traceback would keep this frame, and all tensors of the pass, alive
        if any(t._version != version for t, version in self.copied):
            raise Unmappable("a write into a tensor that as_strided views, or into its view")

    def _intercept(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation of the loss, by a replacement that takes it, or else by functorch."""
        self._check_hooks()
        self.check_random_numbers(*args, *kwargs.values())
        args = self.with_sizes(func, args)
        given = operations.tensors_in(*args, *kwargs.values())
        for t in given:
            self.check(t)
        trained = not self.trained.keys().isdisjoint(map(id, given))
        if not trained and _is_ordinary(func) and "out" not in kwargs and not operations.calls_back(args, kwargs):
            return self._marked(func(*args, **kwargs))
        for replacement in _REPLACEMENTS.get(func, ()):
            result = replacement(self, func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._by_functorch(func, args, kwargs, trained)

    def _check_hooks(self) -> None:
        """Unmappable if a mode or hooks would see the tensors of all samples; notes the hooks of a checkpoint."""
        if functorch.dispatch_modes() > 0:
            raise Unmappable("a TorchDispatchMode")
        if (hooks := functorch.saved_hooks(False)) is not None:
            if getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
                raise Unmappable("hooks on saved tensors")
            self.checkpoints = True

    def _by_functorch(self, func: Any, args: Any, kwargs: dict[str, Any], trained: bool) -> Any:
        """The result of an operation without replacement; ``trained``: whether arguments are trained parameters."""
        if trained and getattr(func, "__name__", "") == "__get__":  # an attribute of a parameter
            if not isinstance(attribute := func(*args), Tensor):
                return attribute  # a size or a type
        self._check_mappable(func, args, kwargs, trained)
        if isinstance(out := kwargs.get("out"), Tensor):  # which functorch cannot map
            with self:
                result = func(*args, **{**kwargs, "out": None})
                if result.shape != out.shape:
                    raise Unmappable("out= of another shape")
                return out.copy_(result)
        if trained:
            args, kwargs = tuple(map(self.repeated, args)), {name: self.repeated(arg) for name, arg in kwargs.items()}
        result = func(*args, **kwargs)
        if self._own_factories and func in operations.FACTORIES and not is_wrapped(result):
            with self.level.left():
                own = result.expand(self.level.size, *result.shape).clone()
            return self.of_sample(own)
        return self._marked(result)

    def _check_mappable(self, func: Any, args: Any, kwargs: dict[str, Any], trained: bool) -> None:
        """Refused for a write into a parameter; Unmappable for what functorch, or a rule, does not do rightly."""
        if any(isinstance(t, nn.Parameter) for t in operations.written(func, args, kwargs)):
            raise Refused(
                "the loss writes into a parameter of the model, which would publish raw data with the state_dict "
                "(nothing was written): let it compute a new tensor"
            )
        if func is nn.functional.embedding and (trained or is_wrapped(args[1])):
            raise Unmappable("an embedding of samples' tables within a map, with max_norm or scale_grad_by_freq")
        if (why := operations.why_unmappable(func, args, kwargs)) is not None:
            raise Unmappable(why)

    def check(self, t: Any) -> None:
        """Refuse a tensor of another pass, wrapped ones too. (functorch reuses its numbers of levels.)"""
        while not self.is_own(t) and (is_wrapped(t) or type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__):
            if self.level.holds(t) or not is_wrapped(t):
                raise Unmappable("what no operation of torch shows, as a compiled script, or a kind of tensor")
            t = functorch.unwrapped(t)

    def repeated(self, arg: Any) -> Any:
        """The argument, in which trained parameters are replaced by their per-sample copies."""
        if self.is_trained(arg):
            return self.of_sample(self._copy(arg))
        return tree_map(self.repeated, arg) if isinstance(arg, (tuple, list, dict)) else arg

    def _copy(self, p: Tensor) -> Tensor:
        """The per-sample copy of a parameter: an expanded leaf (B, *S), so that only its gradient takes memory."""
        if (copy := self._copies.get(id(p))) is None:
            with self.level.left(), torch.enable_grad():
                own = p.detach() if self.level.size > 1 else p.detach().clone()  # a loss may write into that of one
                self._copies[id(p)] = copy = own.expand(self.level.size, *p.shape).requires_grad_()
        return copy

    def _marked(self, result: Any) -> Any:
        for t in (result,) if type(result) is Tensor else operations.tensors_in(result):
            if is_wrapped(t):
                self.mark(t)
        return result

    def add(self, p: nn.Parameter, gradients: PerSampleGradients) -> None:
        """Add the gradients from one use of ``p``, in the fastest form that the remaining memory allows.

        Forms round differently, so the form must not depend on the number of samples: each sample has its own memory.
        """
        if self._uses is None:
            raise Unmappable("a gradient within the loss")
        gradients = gradients.cheaper(self._room)
        if isinstance(gradients, Instantiated):
            self._room -= p.numel() * max(4, gradients.rows.element_size())
        self._uses.setdefault(p, []).append(gradients)


class _Layer(Function):
    """A layer with a rule, see :meth:`Pass.layer`."""

    @staticmethod
    def forward(ctx: Any, one_pass: Pass, call: Any, backward: Any, keeps: bool, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.one_pass, ctx.backward_of = one_pass, backward
        ctx.save_for_backward(*[x] * keeps)
        y = call(x)
        # Before torch 2.9 autograd refuses in-place operations on an output that it takes for a view.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # a checkpoint recomputes them here
        with ctx.one_pass.level.left():
            x = saved[0].detach() if saved else None  # detached, so that gradients keep no graph alive
            return None, None, None, None, ctx.backward_of(x, g, ctx.needs_input_grad[4]), None
