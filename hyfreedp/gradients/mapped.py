"""Maps a loss over samples: the result for one sample cannot depend on another, since the loss sees only one.

The loss runs once, within a level of ``torch.vmap``, where each tensor of the batch looks like that of one sample. A
``TorchFunctionMode`` intercepts every torch operation in it:

* *Layers* that use trained parameters have a rule, see :mod:`hyfreedp.gradients.rules`. It takes the underlying tensor
  (B, ...), whose dimension 0 is the samples, and keeps what the parameters' gradients need.
* *Other uses* of a parameter of shape S get a copy for each sample: a leaf (B, *S), whose gradient is per sample.
* *Decisions of Python* (``if mask.all()``, ``.item()``) are answered if all samples agree. Otherwise
  :class:`DecisionsDiffer` has the answer of each sample, and groups of samples that agree are mapped one by one.

One backward pass outside of the map then gives all gradients. It also asks for gradients of the parameters themselves:
if there is one, a parameter was used where nothing was intercepted (in a script, say), and the map is rejected.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves, tree_map

from hyfreedp.errors import Refused
from hyfreedp.gradients.functorch import Level, backward, innermost, is_wrapped, maps_marked, saved_hook, unwrapped
from hyfreedp.gradients.per_sample import Instantiated, PerSampleGradients, add_uses
from hyfreedp.pytorch.devices import without_autocast

Gradients = dict[nn.Parameter, PerSampleGradients]
Call = Callable[[Tensor], Tensor]
Backward = Callable[[Any, Tensor, bool], Tensor | None]
Path = tuple[Tensor, ...]  # an execution path: the answers to decisions of Python that a group of samples shares

_DECISIONS = {
    getattr(Tensor, name)
    for name in "__bool__ item __int__ __float__ __index__ __complex__ tolist is_nonzero __contains__".split()
}
_FACTORIES = {
    getattr(torch, name) for name in "zeros ones full empty zeros_like ones_like full_like empty_like".split()
}
_FACTORIES |= {torch.tensor, torch.arange, torch.eye, torch.linspace}
_FACTORIES |= {getattr(Tensor, name) for name in "new_zeros new_ones new_full new_empty new_tensor".split()}
_METADATA = {Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__}  # type: ignore[attr-defined]
_METADATA |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, Tensor.layout.__get__}  # type: ignore[attr-defined]
_MEMORY_LAYOUT = {Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset}
_REQUIRES_GRAD = {Tensor.requires_grad.__get__, Tensor.requires_grad.__set__, Tensor.requires_grad_}  # type: ignore[attr-defined]
_EXPOSES_ALL_SAMPLES = {Tensor.__reduce_ex__, Tensor._base.__get__}  # type: ignore[union-attr]
_MISMAPPED = {  # functions that vmap maps wrongly
    getattr(of, name)
    for of in (torch, Tensor, torch.nn.functional)
    for name in (
        "resize_ resize_as_ as_strided as_strided_ as_strided_copy set_ select_scatter linear_cross_entropy "
        "quantize_per_tensor quantize_per_tensor_dynamic quantize_per_channel _is_all_true _is_any_true"
    ).split()
    if hasattr(of, name)
}
_TORCH_NAMESPACES = ("aten", "prims", "prim", "profiler")
_SAVES_INPUTS: Any = getattr(torch.utils.checkpoint, "_NoopSaveInputs", object)  # before torch 2.12
_REACHES_STORAGE = {Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__}  # type: ignore[attr-defined]


class DecisionsDiffer(Exception):
    """Samples differ in the decision of Python after those of ``path``; ``answers`` has a row for each sample."""

    def __init__(self, path: Path, answers: Tensor) -> None:
        self.path, self.answers = path, answers


class DecisionsChanged(Exception):
    """Samples answer a decision differently than before, because it depends on random numbers."""


class TooLarge(Exception):
    """Copies of parameters exceed the memory budget; at most ``size`` samples may be mapped together."""

    def __init__(self, size: int) -> None:
        self.size = size


class Unmappable(RuntimeError):
    """The loss does something that cannot be mapped, so its samples are computed one at a time."""


class Pass(TorchFunctionMode):
    """One forward pass of samples that are mapped together, and its backward pass.

    Args:
        trained: parameters whose gradients are taken; empty if only losses are needed.
        size: number of samples B.
        path: answers to the first decisions, known from an earlier pass.
        wanted: positions of the samples that answer decisions; None for all.
        memory_budget: bytes that per-sample gradients, and copies of parameters, may take.
        own_factories: whether tensors from ``torch.zeros`` and the like get a copy for each sample, so that the loss
            may write samples' values into them.

    Attributes:
        path: answers to all decisions so far.
    """

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        size: int,
        *,
        path: Path = (),
        wanted: Tensor | None = None,
        memory_budget: int,
        own_factories: bool = False,
    ) -> None:
        super().__init__()
        self._wanted = slice(None) if wanted is None else wanted
        self._raised: BaseException | None = None
        self._seed = torch.default_generator.initial_seed()
        self.level, self.path, self.memory_budget = Level(size), path, memory_budget
        self.trained = {id(p): p for p in trained}
        self.memory_left = memory_budget
        self.anchor = torch.zeros((), requires_grad=True)  # connects layers to the graph whose input needs no gradient
        self.checkpoints = False  # whether the model recomputes activations (gradient checkpointing)
        self._decisions = 0  # answered so far
        self._copies: dict[int, Tensor] = {}  # of parameters, (B, *S), by the parameter's id
        self._uses: dict[nn.Parameter, list[PerSampleGradients]] | None = None  # only during the backward pass
        self._own_factories = own_factories
        self._paused = False
        self._mark = object()  # marks the tensors of this pass

    # -- forward -------------------------------------------------------------------------------------------------------

    def losses(self, loss: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """The losses (B,) of samples, of which sample i gets row i of each of the ``tensors``.

        Raises DecisionsDiffer, DecisionsChanged or TooLarge if samples must be mapped in other groups, Refused if the
        loss uses a tensor of an earlier pass or random numbers that are not the run's, and Unmappable, or functorch's
        error, if the loss cannot be mapped.
        """
        if foreign_modes():
            raise Unmappable("a mode around the step, which sees tensors of all samples")
        copies = [t.as_subclass(Tensor).clone() for t in tensors]  # a loss may write into its record
        with warnings.catch_warnings(), _eager(), maps_marked(self._marked), self.level:
            warnings.filterwarnings("ignore", message=".*performance drop.*")  # of vmap
            try:
                with self:
                    value = loss([self.of_sample(t) for t in copies])
            finally:
                raised, self._raised = self._raised, None
                try:
                    if raised is not None:  # even if the loss caught it, since it would catch it for all samples
                        raise raised
                finally:
                    del raised  # its traceback would keep this frame, and all tensors of the pass, alive
            values = self.samples(value)
        if values is None:
            raise Unmappable("the loss belongs to a map within")
        copied = sum(copy.numel() * max(4, copy.element_size()) for copy in self._copies.values())
        if copied > self.memory_budget and self.level.size > 1:
            raise TooLarge(max(1, int(self.level.size * self.memory_budget / copied)))
        return values

    def of_sample(self, samples: Tensor) -> Tensor:
        """A tensor (B, ...) as a sample's tensor (...) of this pass."""
        mapped = self.level.mapped(samples)
        mapped._made_in = self._mark  # type: ignore[attr-defined]
        return mapped

    def samples(self, t: Tensor) -> Tensor | None:
        """The tensor (B, ...) behind a sample's; a shared tensor is repeated. None if ``t`` is of a map within."""
        if self.level.holds(t):
            return self.level.samples(t)
        if self.is_trained(t):
            return self._copy(t)
        return None if is_wrapped(t) else t.expand(self.level.size, *t.shape)

    def is_trained(self, t: Any) -> bool:
        return id(t) in self.trained

    def layer(
        self, call: Call, backward: Backward, x: Tensor, *, keeps_input: bool = True, rows: int | None = None
    ) -> Tensor:
        """A sample's output of a layer that has a rule.

        Args:
            call: computes the layer's output from ``x``.
            backward: called with ``x``, the output's gradient, and whether the input's gradient is needed, which it
                then returns; passes the parameters' gradients to :meth:`add`.
            x: the input, a plain tensor whose dimension 0 is the samples.
            keeps_input: whether ``backward`` needs ``x``; otherwise it gets None.
            rows: if given, dimension 0 of ``x`` is (samples * rows).
        """
        y = _Layer.apply(self, call, backward, keeps_input, x, self.anchor) if torch.is_grad_enabled() else call(x)
        return self.of_sample(y if rows is None else y.unflatten(0, (-1, rows)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self._paused or func in _METADATA:
            return func(*args, **(kwargs or {}))
        try:
            return self._intercept(func, args, kwargs or {})
        except BaseException as error:
            if self._uses is None:  # not in a backward pass, where a checkpoint's recomputation ends by an exception
                self._raised = self._raised or error
            raise

    def _intercept(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if (hook := saved_hook()) is not None:
            if getattr(hook, "__module__", "") != "torch.utils.checkpoint":
                raise Unmappable("hooks on saved tensors")
            self.checkpoints = True
        if torch._C._len_torch_dispatch_stack() > 0:
            raise Unmappable("a TorchDispatchMode")
        if torch.default_generator.initial_seed() != self._seed:
            raise Refused(SEEDED)
        trained = False
        for leaf in _tensors(args, kwargs):
            trained = trained or id(leaf) in self.trained
            if is_wrapped(leaf):
                self._check_own(leaf)
        if func in _DECISIONS and is_wrapped(args[0]):
            return self._answer(func, *args)
        if (composed := _COMPOSED.get(func)) is not None:
            with self:  # intercepts what it calls
                result = composed(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if (rule := _RULES.get(func)) is not None and self.level.is_innermost():
            with self.level.left():
                result = rule(self, func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if kwargs.get("generator") is not None:
            raise Refused(_GENERATOR)
        if func in _REQUIRES_GRAD:
            has = innermost(args[0]).requires_grad  # of a sample's tensor functorch returns False
            if func == Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
                return has
            if args[1:] == (has,) or (is_wrapped(args[0]) and args[1:] in ((), (True,))):
                return args[0]  # a sample's tensors have gradients anyway
        if args and args[0] is _SAVES_INPUTS:  # a checkpoint that saves its inputs
            with self.level.left():
                return args[0].apply(*args[1:])
        if func in _MEMORY_LAYOUT and is_wrapped(args[0]):  # answered for a contiguous tensor of one sample
            return func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs)
        if any(isinstance(t, nn.Parameter) for t in _written(func, args, kwargs)):
            raise Refused(_WRITES_PARAMETER)
        _check_mappable(func, args, kwargs)
        if isinstance(out := kwargs.get("out"), Tensor):  # which functorch cannot map
            with self:
                result = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
                if result.shape != out.shape:
                    raise Unmappable("out= of another shape")
                return out.copy_(result)
        if trained:
            if getattr(func, "__name__", "") == "__get__" and not isinstance(result := func(*args), Tensor):
                return result  # a size or a type
            args = tuple([self._repeated(arg) for arg in args])
            kwargs = {name: self._repeated(arg) for name, arg in kwargs.items()}
        result = func(*args, **kwargs)
        if self._own_factories and func in _FACTORIES and not is_wrapped(result):
            with self.level.left():
                own = result.expand(self.level.size, *result.shape).clone()
            return self.of_sample(own)
        return self._marked(result)

    def _answer(self, func: Any, x: Tensor, *arguments: Any) -> Any:
        """The common answer of all samples to a decision; within a known path, the answer from there."""
        if func is Tensor.__contains__:
            with self:
                return bool((x == arguments[0]).any())
        if not self.level.is_innermost() or not self.level.holds(x):
            raise Unmappable("a decision within a map")
        with self.level.left():
            answers = self.level.samples(x).detach()[self._wanted]
            if self._decisions < len(self.path):
                if not _agree(answers, self.path[self._decisions]):
                    raise DecisionsChanged
            elif len(bits(answers).unique(dim=0)) > 1:
                raise DecisionsDiffer(self.path, answers)
            else:
                self.path += (answers[0].clone(),)
            self._decisions += 1
            return func(self.path[self._decisions - 1], *arguments)

    def _repeated(self, arg: Any) -> Any:
        """An argument of a use without a rule: of a parameter an expanded copy for each sample."""
        if self.is_trained(arg):
            return self.of_sample(self._copy(arg))
        return tree_map(self._repeated, arg) if isinstance(arg, (tuple, list, dict)) else arg

    def _copy(self, p: Tensor) -> Tensor:
        """A leaf (B, *S), of which only the gradient takes memory."""
        if (copy := self._copies.get(id(p))) is None:
            with self.level.left(), torch.enable_grad():
                copy = p.detach().expand(self.level.size, *p.shape).requires_grad_()
            self._copies[id(p)] = copy
        return copy

    def _marked(self, result: Any) -> Any:
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if is_wrapped(leaf):
                leaf._made_in = self._mark  # type: ignore[attr-defined, union-attr]
        return result

    def _check_own(self, t: Any) -> None:
        """Refuse a wrapped tensor of another pass; functorch cannot tell, since levels are numbers that it reuses."""
        while is_wrapped(t):
            made_in = getattr(t, "_made_in", None)
            if made_in is self._mark:
                return
            if made_in is not None:
                raise Refused(_ESCAPED)
            if self.level.holds(t):
                raise Unmappable("what no operation of torch shows, as a compiled script")
            t = unwrapped(t)

    # -- backward ------------------------------------------------------------------------------------------------------

    def gradients(self, losses: Tensor) -> Gradients:
        """The per-sample gradients of losses (B,) of this pass, without parameters on which no loss depends.

        Refused if there is none; Unmappable if a parameter was used where nothing was intercepted.
        """
        if not losses.requires_grad:
            raise Refused(NO_GRADIENT)
        raw = list(self.trained.values())
        ends = [*self._copies.values(), self.anchor, *raw]
        self._uses = {}
        with ExitStack() as stack:
            stack.enter_context(explained())
            stack.enter_context(without_autocast(losses.device))  # it would round gradients
            if self.checkpoints:
                stack.enter_context(self.level)
                stack.enter_context(self)
            found = backward(losses, ends)
        if any(g is not None for g in found[len(ends) - len(raw) :]):
            raise Unmappable("a parameter is used where no operation of torch shows, as in a compiled script")
        uses, self._uses = self._uses, None
        for key, g in zip(self._copies, found, strict=False):
            if g is not None:
                uses.setdefault(self.trained[key], []).append(Instantiated(g))
        if not uses:
            raise Refused(NO_GRADIENT)
        return {p: add_uses(uses_of_p) for p, uses_of_p in uses.items()}

    def add(self, p: nn.Parameter, gradients: PerSampleGradients) -> None:
        """Add the gradients from one use of ``p``, in the fastest form that the memory left allows."""
        if self._uses is None:
            raise Unmappable("a gradient within the loss")
        gradients = gradients.cheaper(self.memory_left)
        if isinstance(gradients, Instantiated):
            self.memory_left -= gradients.gradients.numel() * max(4, gradients.gradients.element_size())
        self._uses.setdefault(p, []).append(gradients)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context outside of the level in which nothing is intercepted, even if activations are recomputed."""
        before, self._paused = self._paused, True
        try:
            with self.level.left():
                yield
        finally:
            self._paused = before


class _Layer(torch.autograd.Function):
    """A layer with a rule, see :meth:`Pass.layer`."""

    @staticmethod
    def forward(
        ctx: Any, one_pass: Pass, call: Call, backward: Backward, keeps_input: bool, x: Tensor, anchor: Tensor
    ) -> Tensor:
        ctx.one_pass, ctx.backward_of = one_pass, backward
        ctx.save_for_backward(*[x] * keeps_input)
        y = call(x)
        # Before torch 2.9 autograd refuses in-place operations on an output that it takes for a view.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # a checkpoint recomputes them here
        with ctx.one_pass.paused():
            x = saved[0].detach() if saved else None  # detached, so that the gradients keep no graph alive
            return None, None, None, None, ctx.backward_of(x, g, ctx.needs_input_grad[4]), None


class SingleSample(TorchFunctionMode):
    """A mode around the loss of one sample that is computed alone; it refuses tensors of an earlier sample.

    ``path`` has the expected answers to the first decisions; for another one :class:`DecisionsChanged` is raised.
    """

    def __init__(self, path: Path = ()) -> None:
        super().__init__()
        self._mark, self._path = object(), list(path)

    def mark(self, t: Any) -> Any:
        """Mark a tensor as this sample's; returns it."""
        if isinstance(t, Tensor) and not isinstance(t, nn.Parameter):  # ModelGuard compares these, and puts them back
            t._made_in = self._mark  # type: ignore[attr-defined]
        return t

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        marks = {getattr(t, "_made_in", None) for t in _tensors(args, kwargs or {})} - {None}
        if marks - {self._mark}:
            raise Refused(_ESCAPED)
        if marks and self._path and func in _DECISIONS and not _agree(args[0].detach()[None], self._path.pop(0)):
            raise DecisionsChanged
        result = func(*args, **(kwargs or {}))
        if not marks:
            return result
        for written in _written(func, args, kwargs or {}):
            self.mark(written)
            self.mark(written._base)  # of which it may be a view
        return tree_map(self.mark, result)


_RULES: dict[Any, Callable[..., Any]] = {}  # by torch function, see hyfreedp.gradients.rules
_COMPOSED: dict[Any, Callable[..., Any]] = {}


def rule(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a replacement of torch functions, which is called with the pass, the function and its arguments.

    It is called outside of the level and returns a sample's output, or NotImplemented if it does not apply.
    """

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.update(dict.fromkeys(functions, replacement))
        return replacement

    return register


def composed(function: Any, replacement: Callable[..., Any]) -> None:
    """Register a replacement that computes a torch function by other torch functions, or returns NotImplemented."""
    _COMPOSED[function] = replacement


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of an operation, including those in lists, tuples and dictionaries."""
    tensors = []
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
        elif isinstance(arg, (tuple, list, dict)):
            tensors += [leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)]
    return tensors


def bits(answers: Tensor) -> Tensor:
    """The bits of rows (n, ...), as bytes (n, k): as these, 0.0 differs from -0.0, and NaN equals NaN."""
    return answers.contiguous().reshape(len(answers), -1).view(torch.uint8)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors into which an operation of torch writes."""
    if isinstance(func, OpOverload):
        given = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **kwargs}
        writes = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        return _tensors([given.get(name) for name in writes], {})
    if _is_in_place(func):
        return _tensors([args[0], kwargs.get("out")], {})
    return _tensors([kwargs["out"]], {}) if "out" in kwargs else []


@lru_cache
def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return func is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__") and func not in _REQUIRES_GRAD)


def _agree(answers: Tensor, before: Tensor) -> bool:
    """Whether all answers equal an earlier one, up to rounding, which differs with the size of a group."""
    if answers.is_floating_point() or answers.is_complex():
        return torch.allclose(answers, before.expand_as(answers), rtol=1e-4, equal_nan=True)
    return bool((answers == before).all())


def foreign_modes() -> bool:
    """Whether function or dispatch modes are active in this thread, other than torch's default device."""
    stack = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return torch._C._len_torch_dispatch_stack() > 0 or any(type(mode) is not DeviceContext for mode in stack)


def _check_mappable(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse operations that would give code which is not intercepted the tensors of all samples."""
    calls = any(callable(arg) and not isinstance(arg, type) for arg in (*args, *kwargs.values()))
    if calls or getattr(func, "__name__", "") == "custom_function_call":
        raise Unmappable(f"{getattr(args[0], '__name__', func)}, whose own code would not be met")
    if (why := _why_unmappable(func)) is not None:
        raise Unmappable(why)
    if func in _EXPOSES_ALL_SAMPLES and is_wrapped(args[0]):
        raise Unmappable(f"{func} reaches a tensor's memory")


@lru_cache
def _why_unmappable(func: Any) -> str | None:
    """Why no arguments of an operation can be mapped; None if some can."""
    name = getattr(func, "__name__", "")
    if isinstance(func, OpOverload | OpOverloadPacket) and str(func).split(".")[0] not in _TORCH_NAMESPACES:
        return f"{func}, an operation of another library"
    if func in _MISMAPPED or str(func).startswith("aten.as_strided"):
        return f"{name}, which functorch maps wrongly"
    if name == "__set__" or func in _REACHES_STORAGE:
        return f"{func} reaches a tensor's memory"
    return None


@contextmanager
def explained() -> Iterator[None]:
    """A context for a backward pass: if the model uses reentrant checkpointing, a ValueError says what to do."""
    try:
        yield
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower() or ".grad()" not in str(error):
            raise
        raise ValueError(
            "the model uses reentrant checkpointing, in whose backward pass no per-sample gradients can be taken: pass "
            "use_reentrant=False to torch.utils.checkpoint, or to transformers' gradient_checkpointing_enable "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        ) from error


def _eager() -> Any:
    """A context in which compiled functions run without torch.compile, as they were written."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


_ESCAPED = (
    "the loss uses a tensor of another pass, which holds other records: let loss and model keep nothing of a batch (a "
    "cache, a memory, the last output) from one call to the next"
)
_WRITES_PARAMETER = (
    "the loss writes into a parameter of the model, which would publish raw data with the state_dict (nothing was "
    "written): let it compute a new tensor"
)
NO_GRADIENT = "loss must have a gradient by the model's parameters: is it under no_grad, detached, or by another model?"
SEEDED = (
    "torch's random numbers were seeded while a loss was computed, by it or by another thread: whoever knows the seed "
    "knows dropout's masks. Seed nothing in the loss; numbers come from the run's key"
)
_GENERATOR = (
    "the loss draws from a random generator of its own, which remembers how much was drawn for other records: draw "
    "from the global generators of torch, NumPy or Python, whose numbers come from the run's key"
)
