"""Operations at which shared values meet samples, and what each gives to per-sample gradients.

Samples are rows of a tensor: dimension 0 has k rows for each of the B samples, sample by sample (k > 1 for windows of
an image, for instance). A shared value is repeated for every sample, and the gradients of these copies are the
per-sample gradients. A weight that multiplies tokens would be large B times over: such operations have rules of their
own, which keep input and output gradient as a layer's rule does. Any other operation is mapped over the samples by
functorch.

Which tensors hold samples is not written on them. Whatever needs a gradient and is not shared does. Of the others
(masks, ids, outputs of frozen layers) the shape decides, and a use whose shape said otherwise once is never taken for
samples again. Each new decision is checked against autograd, see :attr:`Operations.undecided`, and by passes of another
size, see :meth:`Operations.telling_size`: a gradient may be too small for the former, and a single record makes it
large.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyfreedp.checks import listed
from hyfreedp.clipping.attention import multi_head_attention
from hyfreedp.clipping.base import Misread
from hyfreedp.clipping.convolution import convolution
from hyfreedp.clipping.per_sample import (
    EmbeddingRows,
    Instantiated,
    PerSampleGradients,
    products,
    sum_positions,
    sum_tokens,
)
from hyfreedp.clipping.recurrent import cell
from hyfreedp.clipping.shared import Shared, as_shared, plain

Function = Callable[..., Any]
# (input, output gradient) to the gradients of each shared value
Rule = Callable[[Tensor | None, Tensor], Iterator[tuple[Shared, PerSampleGradients]]]
Record = Callable[["Recorded"], None]
_Key = tuple[Any, ...]  # of a use: the operation, or the layer, and what it was used with

_BROADCASTS = frozenset(
    "add sub subtract rsub mul multiply div divide true_divide __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ "
    "__truediv__ __rtruediv__ __iadd__ __isub__ __imul__ __itruediv__ add_ sub_ mul_ div_ pow __pow__ __rpow__ "
    "maximum minimum where lerp addcmul addcdiv copy_ clamp".split()
)
_BATCHED = frozenset("matmul __matmul__ bmm baddbmm scaled_dot_product_attention".split())  # likewise, of three or more
_TOKENS_FIRST = frozenset({"multi_head_attention_forward"})  # which has samples, in dimension 1
_REPEATS = frozenset({"expand", "repeat", "broadcast_to", "expand_as"})


@dataclass(frozen=True)
class Recorded:
    """A use of shared values.

    Attributes:
        values: what was used.
        gradients: (kept input, output gradient) to the gradients of ``values``.
        x: the samples that met them, None if they met none yet.
        keep: whether ``gradients`` needs x.
        output: the result.
        by_row: whether ``gradients`` takes every row for a sample, rather than (B, k, ...) for k rows each.
    """

    values: list[Shared]
    gradients: Rule
    x: Tensor | None
    keep: bool
    output: Tensor
    by_row: bool = False


class Operations:
    """Follows shared values through one forward pass at a time; see :class:`hyfreedp.clipping.shared.Follower`.

    Args:
        module: the model, whose buffers are constants.
        record: is told every use.

    Attributes:
        undecided: the parameters at which a shape was taken for the first time to tell samples from constants; whoever
            has seen the pass's gradients of them agree with autograd's removes them.
        misled: whether a doubtful decision was wrong; whoever makes the passes again that rest on it resets this.
    """

    def __init__(self, module: nn.Module, record: Record) -> None:
        self._module, self._record = module, record
        self.undecided: set[nn.Parameter] = set()
        self.misled = False
        self.serial = 0
        self.used: set[nn.Parameter] = set()
        self.size = 0
        self._batch: set[int] = set()
        self._inputs: set[int] = set()
        self._held: set[int] = set()  # storages of the model's own tensors
        self._decisions: dict[_Key, bool] = {}  # whether it holds samples
        # Those that do by their shape, by key and how often it was asked before in the pass, and of which no pass of
        # another size has told: how many rows there were, in all and for each sample, and what they met.
        self._doubtful: dict[tuple[_Key, int], tuple[set[tuple[int, int]], set[nn.Parameter]]] = {}
        self._told: set[tuple[_Key, int, int]] = set()  # of which one has
        self._asked: Counter[_Key] = Counter()
        self._recomputes = False
        self._compared: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._said: dict[_Key, bool] | None = None  # by shapes of the pass that is to tell
        self._met: set[tuple[_Key, int, int]] = set()  # in that pass

    def expect(self, batch: Iterable[Tensor]) -> None:
        """What comes next is a pass of this batch, of whose tensors there is no doubt."""
        self._batch = {_storage(x) for x in batch}

    def begin(self, size: int, inputs: Iterable[Tensor]) -> None:
        """A pass of ``size`` samples, of which ``inputs`` are tensors."""
        self.size, self._inputs, self._held = size, {_storage(x) for x in inputs}, set()
        self._asked.clear()
        self._recomputes = False

    def resume(self, size: int) -> None:
        """The last pass again, as checkpointing recomputes it."""
        self.size, self._recomputes = size, True

    def telling_sizes(self, parameters: Set[nn.Parameter]) -> frozenset[int]:
        """Of how many samples a pass would show which tensors are constants, if a shape has misled the decisions.

        An identity matrix, as DoRA multiplies by, has a multiple of the samples in rows wherever the batch divides its
        width. What has 16 rows for three samples is a constant.

        Args:
            parameters: at which. A decision that such a pass has met is not doubted any more, nor is one on which
                released gradients rest (:meth:`settle`): they would have been wrong.
        """
        doubtful = (found for found, met in self._doubtful.values() if met & parameters)
        return frozenset(next(size for size in count(2) if rows % size) for found in doubtful for rows, _ in found)

    def telling_size(self, above: int) -> int | None:
        """As :meth:`telling_sizes`, one number above this one that would show it of all; None if none is doubtful."""
        numbers = {rows for found, _ in self._doubtful.values() for rows, _ in found}
        sizes = (size for size in count(above + 1) if all(rows % size for rows in numbers))
        return next(sizes) if numbers else None

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around a pass of such a size: what it shows to be a constant and samples in the same place is refused."""
        self._said, self._met = {}, set()
        try:
            yield
            for place, (found, _) in list(self._doubtful.items()):
                told = {(rows, each) for rows, each in found if rows % self.size and (*place, each) in self._met}
                self._told |= {(*place, each) for _, each in told}
                found -= told
                if not found:
                    del self._doubtful[place]
        finally:
            self._said = None

    def settle(self) -> None:
        """Stand by all decisions so far: gradients that rest on them are released now."""
        self._told |= {(*place, each) for place, (found, _) in self._doubtful.items() for _, each in found}
        self._doubtful.clear()

    def is_constant(self, layer: nn.Module, x: Tensor) -> bool:
        """Whether the input of a layer is the same for every sample, such as numbers of positions."""
        # A frozen one has no gradient by which a check could see it.
        trained = (p for p in layer.parameters(recurse=False) if p.requires_grad)
        return not self._holds_samples(x, (layer,), trained)

    def meets_samples(self, name: str, args: Any, values: list[Shared], others: list[Tensor]) -> bool:
        key, parameters = (name, *map(id, values[0].parameters)), list(_parameters(values))
        self.used.update(parameters)
        if name in _TOKENS_FIRST:
            tokens = args[0].shape[1] if args[0].dim() > 1 else 0
            if not all(isinstance(t, Shared) for t in args[:3]) or self._decide(
                (*key, "repeated"), tokens, tokens == self.size, parameters
            ):
                return True
        if name in _REPEATS and args[0] is values[0]:
            return self._repeats(name, args, (*key, "rows"), parameters)
        return any(self._holds_samples(t, (*key, t.dim(), t.dtype), parameters) for t in others)

    def meet(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function.__name__
        if _in_place(name) and isinstance(args[0], Shared):
            raise self._lost(args[0].parameters)
        if _in_place(name) and name != "copy_":  # which must happen once, and to the target itself
            another = getattr(Tensor, f"__{name[3:]}" if name.startswith("__i") else name[:-1])
            return args[0].copy_(self.meet(another, (args[0].clone(), *args[1:]), kwargs))
        rule = _RULES.get(name)
        vectors = name in _BATCHED and any(isinstance(a, Shared) and a.dim() < 2 for a in args)
        if name in _BROADCASTS or (name in _BATCHED and not vectors):
            result = self._broadcast(function, args, kwargs) if rule is None else rule(self, function, *args, **kwargs)
            return self._broadcast(function, args, kwargs) if result is NotImplemented else result
        result = NotImplemented if rule is None else rule(self, function, *args, **kwargs)
        return self._map(function, args, kwargs) if result is NotImplemented else result

    # -- what holds samples --------------------------------------------------------------------------------------------

    def _holds_samples(self, x: Tensor, key: tuple[Any, ...], parameters: Iterable[nn.Parameter]) -> bool:
        if x.requires_grad:
            return True
        if x.dim() == 0 or len(x) == 0:
            return False
        multiple = len(x) % self.size == 0
        if _storage(x) in self._batch:
            return multiple
        if _storage(x) in self._inputs:
            return self._decide((*key, "input"), len(x), multiple, parameters)
        if _storage(x) in self._constants():  # repeated for the samples, or not
            return x.stride(0) == 0 and self._decide((*key, "held"), len(x), len(x) == self.size, parameters)
        if x.is_floating_point():
            return self._decide(key, len(x), multiple, parameters)
        if len(x) == self.size and (x.dim() == 1 or len(x) == x.shape[1]):  # rather numbers or pairs of tokens
            return self._decisions.get(key, False)
        return self._decide(key, len(x), len(x) == self.size, parameters)

    def _constants(self) -> set[int]:
        if not self._held:
            self._held = {_storage(t) for t in (*self._module.buffers(), *self._module.parameters())}
        return self._held

    def _repeats(self, name: str, args: Any, key: tuple[Any, ...], parameters: Iterable[nn.Parameter]) -> bool:
        value, sizes = args[0], _sizes(name, args)
        new_rows = len(sizes) > 0 and (len(sizes) > value.dim() or value.shape[0] == 1)
        return new_rows and self.size > 1 and self._decide(key, sizes[0], sizes[0] == self.size, parameters)

    def _decide(self, key: tuple[Any, ...], rows: int, by_shape: bool, parameters: Iterable[nn.Parameter]) -> bool:
        telling = self._said is not None
        said = by_shape if self._said is None else self._said.setdefault(key, by_shape)
        if said is not by_shape and key[0] in _BROADCASTS:  # DoRA calls a layer with both
            raise self._lost(parameters)
        before = self._decisions.get(key)
        decision = by_shape and before is not False
        met, place, each = set(parameters), (key, self._asked[key]), rows // self.size
        self._asked[key] += 1
        if decision and telling:
            self._met.add((*place, each))
        elif decision and not self._recomputes and (*place, each) not in self._told:
            self._doubtful.setdefault(place, (set(), met))[0].add((rows, each))
        if self.size > 1:  # of one sample nothing can be learned; and nothing can go to a wrong sample
            self._decisions[key] = decision
            if decision != before:
                self.undecided |= met
            if before and not decision:
                self.misled = True
                self._doubtful = {other: found for other, found in self._doubtful.items() if other[0] != key}
        return decision

    # -- one copy per sample -------------------------------------------------------------------------------------------

    def use(
        self,
        values: list[Shared],
        rule: Rule,
        x: Tensor | None,
        output: Tensor,
        keep: bool = True,
        by_row: bool = False,
    ) -> Tensor:
        """Record a use and return its ``output``; see :class:`Recorded`."""
        for value in values:
            value.met = getattr(value, "met", value._version)
        self._record(Recorded(values, rule, x, keep, output, by_row))
        return output

    def copies(self, value: Shared, *shape: int) -> Tensor:
        """``value`` repeated for every sample, shape (B, \\*shape); with its last dimensions."""

        def gradients(x: Tensor | None, g: Tensor) -> Iterator[tuple[Shared, PerSampleGradients]]:
            yield value, Instantiated(g.reshape(len(g), -1, *value.shape).sum(1))  # of k calls' rows in one

        return self.use([value], gradients, None, plain(value).expand(self.size, *shape))

    def rows(self, value: Shared) -> Tensor:
        """``value`` whose rows belong to the samples, as a tensor of samples."""

        def gradients(x: Tensor | None, g: Tensor) -> Iterator[tuple[Shared, PerSampleGradients]]:
            own = g.reshape(len(g), -1, *value.shape[1:])
            samples = torch.arange(len(g), device=g.device)
            each = own.new_zeros(len(g), *own.shape)
            each[samples, samples] = own
            yield value, Instantiated(each.reshape(len(g), *value.shape))

        return self.use([value], gradients, None, plain(value))

    def broadcast(self, value: Shared, rows: int, dims: int) -> Tensor:
        """``value`` for an operation that broadcasts it over ``rows`` of ``dims`` dimensions; of shape (B, ...) or,
        where a sample has k > 1 rows, (B, k or 1, ...).
        """
        extra = () if rows == self.size else (1,)
        if value.dim() < dims:
            return self.copies(value, *extra, *[1] * (dims - 1 - value.dim()), *value.shape)
        if value.dim() == dims and value.shape[0] == 1:
            return self.copies(value, *extra, *value.shape[1:])
        if value.dim() == dims and value.shape[0] == rows:
            return self._by_sample(self.rows(value))
        raise self._lost(value.parameters)

    def _by_sample(self, x: Tensor) -> Tensor:
        """(k B, ...) to (B, k, ...), unless k is 1."""
        return x if len(x) == self.size else x.unflatten(0, (self.size, -1))

    def _broadcast(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Shared)]
        values = [leaf for leaf in leaves if isinstance(leaf, Shared)]
        dims = max(leaf.dim() for leaf in others)
        rows = max((len(leaf) for leaf in others if leaf.dim() == dims and dims), default=0)
        if rows == 0 or rows % self.size:
            raise self._lost(_parameters(values))
        batched = function.__name__ in _BATCHED  # which may not get another dimension
        several = rows != self.size and not batched

        def prepared(leaf: Any) -> Any:
            if isinstance(leaf, Shared):
                copies = self.broadcast(leaf, rows, dims)
                return copies if rows == self.size or not batched else _as_rows(copies, rows // self.size)
            if not several or not isinstance(leaf, Tensor) or leaf.dim() < dims:
                return leaf
            return self._by_sample(leaf) if len(leaf) == rows else leaf.unsqueeze(0)

        args, kwargs = tree_unflatten([prepared(leaf) for leaf in leaves], structure)
        result = function(*args, **kwargs)
        if function.__name__ == "copy_":
            return others[0]
        return result.flatten(0, 1) if several else result

    def _map(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function`` mapped over the samples by functorch, each with its rows of the others and its own copies."""
        leaves, structure = tree_flatten((args, kwargs))
        values = [leaf for leaf in leaves if isinstance(leaf, Shared)]
        key = (function.__name__, *map(id, values[0].parameters))
        layouts = tuple(_order(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        prepared: list[Any] = []
        dims: list[int | None] = []
        for leaf in leaves:
            each = isinstance(leaf, Shared)
            held = each or (
                isinstance(leaf, Tensor)
                and self._holds_samples(leaf, (*key, leaf.dim(), leaf.dtype), values[0].parameters)
            )
            if held and not each and (leaf.dim() == 0 or len(leaf) % self.size):
                raise self._lost(_parameters(values))
            prepared.append(
                self.copies(leaf, *leaf.shape) if each else leaf.unflatten(0, (self.size, -1)) if held else leaf
            )
            dims.append(0 if held else None)

        compared = (*key, layouts, *dims, self.size > 1)  # of one sample nothing can be learned

        def of_one(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(list(leaves), structure)
            return function(*args, **kwargs)

        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that vmap is slow on some functions
                result = torch.vmap(of_one, tuple(dims))(*prepared)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AssertionError) as error:
            raise self._lost(_parameters(values)) from error
        if not isinstance(result, Tensor):
            raise self._lost(_parameters(values))
        result = result.flatten(0, 1) if result.dim() > 1 else result
        if compared not in self._compared:  # it may do something else with rows than what it does with all
            with torch.no_grad():
                expected = function(*args, **kwargs)
            wide = torch.promote_types(expected.dtype, torch.float32)
            if expected.shape != result.shape or not _near(expected.to(wide), result.detach().to(wide)):
                raise self._lost(_parameters(values))
            self._compared[compared] = _order(expected)
        order = self._compared[compared]
        if _order(result) != order:  # a dropout after it draws in the order of memory
            result = result.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
        return result

    def _lost(self, parameters: Iterable[nn.Parameter]) -> Misread:
        names = {p: name for name, p in self._module.named_parameters()}
        parameters = dict.fromkeys(parameters)
        return Misread(
            "the samples cannot be told apart where they meet the parameters "
            + listed([repr(names.get(p, "?")) for p in parameters])
            + ": dimension 0 of the tensors there must be the samples, which it is not where a model computes with the "
            "tokens first, as XLNet does; freeze these parameters, or take a model that docs/models.md calls exact",
            parameters,
            sizes=self.telling_sizes(set(parameters)),
        )


def _parameters(values: Iterable[Shared]) -> Iterator[nn.Parameter]:
    return (p for value in values for p in value.parameters)


# -- operations with rules of their own --------------------------------------------------------------------------------


def _linear(
    operations: Operations, function: Function, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    if isinstance(input, Shared) or weight.dim() != 2:
        return NotImplemented

    def gradients(x: Tensor | None, g: Tensor) -> Iterator[tuple[Shared, PerSampleGradients]]:
        if isinstance(bias, Shared):
            yield bias, Instantiated(sum_tokens(g, 1))
        if isinstance(weight, Shared) and x is not None:
            yield weight, products(g, x)

    values = [v for v in (weight, bias) if isinstance(v, Shared)]
    return operations.use(values, gradients, input, function(input, weight, bias), keep=isinstance(weight, Shared))


def _matmul(operations: Operations, function: Function, input: Tensor, other: Tensor) -> Any:
    if not isinstance(other, Shared) or isinstance(input, Shared) or other.dim() != 2 or input.dim() < 2:
        return NotImplemented
    weight: Shared = other

    def gradients(x: Tensor | None, g: Tensor) -> Iterator[tuple[Shared, PerSampleGradients]]:
        yield weight, products(cast(Tensor, x), g)

    return operations.use([weight], gradients, input, function(input, other))


def _convolution(
    operations: Operations,
    function: Function,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    kind: Any = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}.get(weight.dim())
    if isinstance(input, Shared) or kind is None or input.dim() != weight.dim():
        return NotImplemented
    sizes = (weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]))
    layer = kind(*sizes, stride, padding, dilation, groups, bias=False, device="meta")

    def gradients(x: Tensor | None, g: Tensor) -> Iterator[tuple[Shared, PerSampleGradients]]:
        if isinstance(bias, Shared):
            yield bias, Instantiated(sum_positions(g))
        if isinstance(weight, Shared) and x is not None:
            yield weight, convolution(layer, x, g)

    output = function(input, weight, bias, stride, padding, dilation, groups)
    values = [v for v in (weight, bias) if isinstance(v, Shared)]
    return operations.use(values, gradients, input, output, keep=isinstance(weight, Shared), by_row=True)


def _embedding(
    operations: Operations,
    function: Function,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not isinstance(weight, Shared):
        return NotImplemented
    table: Shared = weight

    def gradients(x: Tensor | None, g: Tensor) -> Iterator[tuple[Shared, PerSampleGradients]]:
        ids, rows = cast(Tensor, x).reshape(len(g), -1), g.reshape(len(g), -1, g.shape[-1])
        if padding_idx is not None:
            rows = rows.masked_fill((ids == padding_idx % len(table))[..., None], 0)
        yield table, EmbeddingRows(ids, rows, len(table))

    return operations.use([table], gradients, input, function(input, weight, padding_idx, *args, **kwargs))


def _embedding_bag(
    operations: Operations,
    function: Function,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    if input.dim() != 2 or mode == "max":  # bags of different sizes in one row of ids have no samples in dimension 0
        return NotImplemented
    padding_idx = None if padding_idx is None else padding_idx % len(weight)
    rows = _embedding(operations, F.embedding, input, weight, padding_idx)
    counts = torch.ones_like(input, dtype=rows.dtype)
    if padding_idx is not None:
        counts = (input != padding_idx).to(rows.dtype)
    factors = counts if per_sample_weights is None else counts * per_sample_weights
    if mode == "mean":
        factors = factors / counts.sum(1, keepdim=True).clamp(min=1)
    return (rows * factors[..., None]).sum(1)


def _linear_of_samples(operations: Operations, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    followed = isinstance(weight, Shared) or isinstance(bias, Shared)
    return operations.meet(F.linear, (x, weight, bias), {}) if followed else F.linear(x, weight, bias)


def _cell(
    operations: Operations,
    function: Function,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    def of_samples(x: Tensor) -> Tensor:
        return operations.broadcast(x, operations.size, 2) if isinstance(x, Shared) else x

    state = tuple(map(of_samples, (hx,) if isinstance(hx, Tensor) else hx))
    given = _linear_of_samples(operations, of_samples(input), w_ih, b_ih)
    mode = function.__name__.removesuffix("_cell").upper()
    new = cell(mode, given, _linear_of_samples(operations, state[0], w_hh, b_hh), state)
    return new[0] if isinstance(hx, Tensor) else new


def _attention(operations: Operations, function: Function, *args: Any, **kwargs: Any) -> Any:
    linear = partial(_linear_of_samples, operations)

    def split(bias: Tensor) -> tuple[Tensor, ...]:
        parts = bias.chunk(3)
        return tuple(as_shared(part, [bias]) for part in parts) if isinstance(bias, Shared) else parts

    # Of tokens that all samples share, such as learned queries, and of a trained mask each sample gets its copy.
    copies = {
        id(x): operations.broadcast(cast(Shared, as_shared(x.transpose(0, 1), [x])), operations.size, 3).transpose(0, 1)
        for x in args[:3]
        if isinstance(x, Shared)
    }
    mask = kwargs.get("attn_mask")
    if isinstance(mask, Shared):
        each = operations.copies(mask, 1, *mask.shape) if mask.dim() == 2 else operations.broadcast(mask, len(mask), 3)
        kwargs["attn_mask"] = each if mask.dim() == 2 else each.reshape(mask.shape)
    return multi_head_attention(linear, split, *(copies.get(id(x), x) for x in args[:3]), *args[3:], **kwargs)


def _join(operations: Operations, function: Function, tensors: Any, dim: int = 0) -> Any:
    others = [t for t in tensors if not isinstance(t, Shared)]
    if function.__name__ not in ("cat", "concat", "concatenate", "stack") or dim % max(t.dim() for t in others) == 0:
        return NotImplemented
    rows = len(others[0])
    if any(isinstance(t, Shared) and len(t) != rows for t in tensors):
        return NotImplemented
    return function([operations.rows(t) if isinstance(t, Shared) else t for t in tensors], dim)


def _repeat(operations: Operations, function: Function, value: Shared, *args: Any, **kwargs: Any) -> Tensor:
    sizes = _sizes(function.__name__, (value, *args))
    copies = operations.broadcast(value, operations.size, len(sizes))
    return copies.repeat(1, *sizes[1:]) if function.__name__ == "repeat" else copies.expand(-1, *sizes[1:])


def _sizes(name: str, args: Any) -> tuple[int, ...]:
    """The sizes that ``expand`` and its like are given."""
    if name == "expand_as":
        return tuple(args[1].shape)
    return tuple(args[1]) if len(args) == 2 and isinstance(args[1], (tuple, list)) else tuple(args[1:])


def _as_rows(x: Tensor, each: int) -> Tensor:
    """(B, ``each`` or 1, ...) to (``each`` B, ...)."""
    return x.expand(-1, each, *x.shape[2:]).flatten(0, 1)


def _order(x: Tensor) -> tuple[int, ...]:
    """Its dimensions in the order of memory."""
    strides = x.stride()
    return tuple(sorted(range(x.dim()), key=lambda d: (-strides[d], d)))


def _near(expected: Tensor, found: Tensor) -> bool:
    same = (expected == found) | (expected.isnan() & found.isnan())
    apart = torch.where(same, 0.0, expected - found)
    # A few roundings; else rows were taken for others.
    return bool(apart.norm() <= 0.05 * expected.nan_to_num(0, 0, 0).norm())


def _storage(x: Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except NotImplementedError as error:
        raise ValueError(
            "the model maps a function over samples by torch.vmap that uses parameters directly: write it for a batch, "
            "or freeze these parameters"
        ) from error


def _in_place(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _set_item(operations: Operations, function: Function, target: Tensor, index: Any, value: Tensor) -> None:
    if isinstance(target, Shared):
        return NotImplemented
    part = target[index]
    if part.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
        operations.meet(Tensor.copy_, (part, value), {})
    elif isinstance(index, Tensor) and index.dtype == torch.bool and value.dim() <= target.dim() - index.dim():
        mask = index.reshape(*index.shape, *[1] * (target.dim() - index.dim()))
        target.copy_(operations.meet(torch.where, (mask, value, target), {}))
    else:
        return NotImplemented


_RULES: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "mm": _matmul,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
    "cat": _join,
    "concat": _join,
    "concatenate": _join,
    "stack": _join,
    "expand": _repeat,
    "repeat": _repeat,
    "broadcast_to": _repeat,
    "expand_as": _repeat,
    "__setitem__": _set_item,
    "multi_head_attention_forward": _attention,
    "lstm_cell": _cell,
    "gru_cell": _cell,
    "rnn_tanh_cell": _cell,
    "rnn_relu_cell": _cell,
}
