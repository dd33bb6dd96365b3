"""One forward and one backward pass in which parameters are followed: what their uses give to per-sample gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hyfreedp.gradients.autograd import explained
from hyfreedp.gradients.followed import Followed, derived, followed_parameters, plain
from hyfreedp.gradients.gathers import keeps_rows, moves
from hyfreedp.gradients.per_sample import ROOM, EmbeddingRows, Instantiated, PerSampleGradients, add_uses, join_views
from hyfreedp.gradients.saved_input import SavedInput
from hyfreedp.running.layers import parameters_of

Gradients = Iterator[tuple[Followed, PerSampleGradients]]
GradientRule = Callable[[Tensor | None, Tensor], Gradients]  # (kept input, output gradient) to those of what was used


class Seen(NamedTuple):
    """How rows of samples met a parameter, so that one use that was verified does not stand for another.

    Attributes:
        parameter: its name.
        how: "operation" of two operands, "layer", or "input 1", "input 2", ... of layers, without gradient.
        rows: for each view of a sample.
    """

    parameter: str
    how: str
    rows: int


@dataclass
class _Use:
    """One use of followed values in a forward pass. It is stored on the node of its output, to which it must not refer.

    Attributes:
        values: what was used.
        gradients: to the gradients of ``values``.
        saved: the input; None if no gradient needs it.
        upstream: the node that computed the input; None if that needs no gradient.
        by_row: where a sample has several rows in dimension 0, whether ``gradients`` takes each for a sample.
        seen: how rows of samples met its values.
        output_nr: which output of its node.
    """

    values: list[Followed]
    gradients: GradientRule
    saved: SavedInput | None = None
    upstream: Node | None = None
    by_row: bool = False
    seen: tuple[Seen, ...] = ()
    output_nr: int = 0


class Recorder:
    """Follows the parameters of a model through its passes.

    What a use of parameters needs is stored on the autograd node of its output, so activations belong to one graph and
    vanish with it. Non-reentrant activation checkpointing drops and recomputes them.

    Args:
        module: the model.
        views: rows in dimension 0 that each sample has, one after the other, and whose gradients are added up.

    Attributes:
        lost: why no pass of this model can be relied on, once that was found; None before.
        size: samples times views of the pass under way, of which rows are a multiple; 0 if there is none.
        seen: uses that the losses of the last pass depend on.
        moved: what its operations did along dimensions, see :func:`~.gathers.moves`, and how often.
        known: what they did in batches that were compared.
        dead: while ``watching``, those of them whose output had a gradient for one sample at most, so that no
            comparison could show an error.
        constant: names of parameters whose inputs without gradient had the same rows in batches of different sizes.
        samples: names of those that met inputs without gradient whose rows were verified to be samples.
        types: of the last pass's gradients.
        compared: whether samples of a batch were found not to mix.
        trained: parameters that are trained, with their names, as they were when the last pass began.
        room: bytes of gradients that a backward pass may keep in the place of smaller factors, for speed.
    """

    def __init__(self, module: nn.Module, views: int) -> None:
        self.module, self.views = module, views
        self.lost: str | None = None
        self.size = 0
        self.seen: set[Seen] = set()
        self.dead: set[Seen] = set()
        self.moved: Counter[tuple[str, int, int]] = Counter()
        self.known: set[tuple[str, int, int]] = set()
        self.constant: set[str] = set()
        self.samples: set[str] | None = None  # None before anything was verified
        self.types: set[torch.dtype] = set()
        self.compared = False
        self.trained: dict[nn.Parameter, str] = {}
        self.watching = False  # for what is dead, which waits for the device
        self.room = ROOM
        self._left = 0  # of it, in the pass under way
        self._names: dict[nn.Parameter, str] = {}
        self._inputs: Counter[str] = Counter()
        self._received: dict[int, tuple[Followed, list[PerSampleGradients]]] | None = None

    def trainable(self) -> dict[nn.Parameter, str]:
        """The parameters that are trained, with their names."""
        found = [p for p in parameters_of(self.module) if p.requires_grad]
        if not self._names.keys() >= set(found):
            self._names = {p: name for name, p in self.module.named_parameters()}
        return {p: self._names[p] for p in found}

    def lose(self, reason: str) -> None:
        """Say that no pass can be relied on, and why; the first reason stays."""
        self.lost = self.lost or reason

    # -- a forward pass ------------------------------------------------------------------------------------------------

    @contextmanager
    def following(self, samples: int) -> Iterator[None]:
        """Around a forward pass of so many samples, and a backward pass, where checkpointing computes layers again."""
        self.size, self._inputs = samples * self.views, Counter()
        self.trained = self.trainable()
        try:
            with followed_parameters(self.module, self, self.trained):
                yield
        finally:
            self.size = 0

    def layer(
        self,
        call: Callable[[], Tensor],
        x: Tensor,
        parameters: tuple[Tensor | None, ...],
        gradients: GradientRule,
        *,
        by_row: bool = False,
        multiplies: bool = False,
    ) -> Tensor:
        """The output of an operation of a layer, whose use of parameters is recorded.

        Args:
            call: computes it.
            x: its input: samples if it needs a gradient, or, without, where batches of other sizes have said so.
            parameters: weight, which alone needs the input for its gradient, and bias.
            gradients: to the gradients of ``parameters``.
            by_row: see :class:`_Use`.
            multiplies: whether x is rounded to the output's type, as autocast does.
        """
        output, values = call(), [p for p in parameters if isinstance(p, Followed)]
        if any(p.requires_grad and not isinstance(p, Followed) for p in parameters if p is not None):
            return output  # computed from samples
        if isinstance(x, Followed) or not (x.requires_grad or self._holds_samples(values[0].origin, x)):
            return derived(output, values[0] if values else cast(Followed, x))
        if not values or x.dim() < 2 - (not x.is_floating_point()) or len(output) != len(x) or len(x) % self.size:
            return output
        use = _Use(values, gradients, by_row=by_row)
        if isinstance(parameters[0], Followed):
            kept = x.detach().to(output.dtype) if multiplies and x.is_floating_point() else x.detach()
            use.saved = SavedInput(kept, values[0].origin)
        use.upstream = get_gradient_edge(x).node if x.requires_grad else None
        if output._is_view():  # an operation in place on a view would take its node out of the graph
            output = torch.ops.aten._unsafe_view(output, output.shape)
        for value in values:
            self._inputs[value.origin] += not x.requires_grad
            how = "layer" if x.requires_grad else f"input {self._inputs[value.origin]}"
            use.seen += (Seen(value.origin, how, len(x) // self.size),)
        return self._record(use, output)

    def copies(self, value: Followed, rows: int, *shape: int) -> Tensor:
        """``value`` repeated for every sample, shape (B, \\*shape), with its last dimensions; it meets so many rows."""

        def gradients(x: Tensor | None, g: Tensor) -> Gradients:
            yield value, Instantiated(g.reshape(len(g), -1, *value.shape).sum(1))  # of k calls' rows in one

        seen = (Seen(value.origin, "operation", rows // self.size),)
        return self._record(_Use([value], gradients, seen=seen), plain(value).expand(self.size, *shape))

    def rows(self, value: Followed) -> Tensor:
        """``value``, whose rows go to the rows of the samples, as a tensor of samples."""

        def gradients(x: Tensor | None, g: Tensor) -> Gradients:
            own = g.reshape(len(g), -1, *value.shape[1:])
            samples = torch.arange(len(g), device=g.device)
            each = own.new_zeros(len(g), *own.shape)
            each[samples, samples] = own
            yield value, Instantiated(each.reshape(len(g), *value.shape))

        seen = (Seen(value.origin, "operation", len(value) // self.size),)
        return self._record(_Use([value], gradients, seen=seen), plain(value).clone())

    def rows_of_samples(self, tensors: Iterable[Tensor]) -> tuple[int, int]:
        """Rows and dimensions of the operand that depends on samples, to which others are broadcast; 0 rows if none."""
        tensors = list(tensors)
        samples = [t for t in tensors if t.requires_grad and not isinstance(t, Followed)]
        dims = max((t.dim() for t in samples), default=0)
        rows = max((len(t) for t in samples if t.dim() == dims), default=0) if dims else 0
        fits = rows > 0 and rows % self.size == 0 and all(t.dim() <= dims for t in tensors)
        return (rows if fits and all(len(t) in (1, rows) for t in tensors if t.dim() == dims) else 0), dims

    def _holds_samples(self, name: str, x: Tensor) -> bool:
        """Whether an input without gradient may have a whole number of rows for each sample, as verified before."""
        rows = len(x) if x.dim() else 1
        may = self.samples is None or name in self.samples
        return rows % self.size == 0 and rows > 0 and may and name not in self.constant

    def _record(self, use: _Use, output: Tensor) -> Tensor:
        use.output_nr = output.output_nr
        _metadata(cast(Node, output.grad_fn)).setdefault(self, []).append(use)
        output.register_hook(partial(self._receive, use))
        return output

    # -- a backward pass -----------------------------------------------------------------------------------------------

    def per_sample_gradients(
        self, losses: Tensor, *, verified: set[Seen] | None = None
    ) -> dict[nn.Parameter, PerSampleGradients] | None:
        """One backward pass of ``losses`` (B,), within :meth:`following`.

        None if it cannot be relied on, or has other uses than those that were ``verified``.

        Raises:
            ValueError: losses depend on no parameter, or the model uses reentrant checkpointing.
        """
        if not losses.requires_grad:
            raise ValueError("losses depend on no trainable parameter: was the forward pass run under no_grad?")
        ends = self.trace(losses)
        if ends is None or (verified is not None and not self.seen <= verified):
            return None
        new = any(move[2] % self.size == 0 for move in self.moved.keys() - self.known)
        if verified is not None and new and self.size > 1:
            return None  # rows may be moved as in no batch that was compared
        self.types, self.dead, self._received, self._left = set(), set(), {}, self.room
        try:
            # Autocast would round products of gradients to half precision.
            with explained(), torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
                if ends:
                    torch.autograd.grad(losses, ends, torch.ones_like(losses), allow_unused=True)
                return _carried_back(self._received.values(), list(self.trained))
        finally:
            self._received = None

    def _receive(self, use: _Use, g: Tensor) -> None:
        # Also asked for in another backward pass: what checkpointing recomputed for it is then let go.
        x = None if use.saved is None else use.saved.get()
        if self._received is None:
            return
        self.types.add(g.dtype)
        rows, size = len(g), self.size
        if self.watching and int(g.detach().reshape(size, -1).any(1).sum()) < 2:
            self.dead.update(use.seen)
        if rows != size and not use.by_row:
            x, g = None if x is None else x.unflatten(0, (size, -1)), g.unflatten(0, (size, -1))
        for value, gradients in use.gradients(x, g):
            joined = join_views(gradients, self.views * (rows // size if use.by_row else 1)).cheaper(self._left)
            if isinstance(joined, Instantiated):  # in float32 or wider, as the sum reads them
                self._left -= joined.gradients.numel() * max(4, joined.gradients.element_size())
            self._received.setdefault(id(value), (value, []))[1].append(joined)

    def trace(self, losses: Tensor) -> list[GradientEdge] | None:
        """The edges at which a backward pass may end and has reached all uses; None if it cannot be relied on.

        From an operation's output the walk goes straight to its input. So it meets a parameter only where it was used
        without a rule. Nowhere on the way may an operation move rows from one sample to another by what tensors hold.
        Values made of parameters must be made of nothing else: no use lies in their graph.
        """
        self.seen, self.moved = set(), Counter()
        ends, values, visited, used, mover, rows = {}, [], set[Node](), False, "", len(losses) * self.views
        stack: list[Node | None] = [losses.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            uses = _metadata(node).get(self)
            if uses is not None:
                used = True
                self.seen.update(seen for use in uses for seen in use.seen)
                values += [v for use in uses for v in use.values if v.parameter is None]
                upstream = [use.upstream for use in uses if use.upstream is not None]
                if not upstream:
                    ends[node] = GradientEdge(node, uses[0].output_nr)
                stack.extend(upstream)
            elif (leaf := getattr(node, "variable", None)) is not None:
                if leaf in self.trained:
                    self._not_covered(self.trained[leaf])
                    return None
                ends[node] = GradientEdge(node, 0)
            else:
                self.moved.update(moves(node))
                if not mover and not keeps_rows(node, rows):
                    mover = node.name()
                stack.extend(earlier for earlier, _ in node.next_functions)
        if used and mover:
            self.lose(f"{mover} may move rows from one sample to another")
            return None
        made, walked = [(value.grad_fn, value.origin) for value in values], set[Node]()
        while made:
            node, name = made.pop()
            if node is not None and node not in walked:
                walked.add(node)
                if self in _metadata(node):
                    self._not_covered(name)
                    return None
                made.extend((earlier, name) for earlier, _ in node.next_functions)
        return list(ends.values())

    def _not_covered(self, parameter: str) -> None:
        owner = self.module.get_submodule(parameter.rpartition(".")[0])
        self.lose(f"no rule covers what {type(owner).__name__} does with the parameter {parameter!r}")


def _carried_back(
    received: Iterable[tuple[Followed, list[PerSampleGradients]]], trainable: Sequence[nn.Parameter]
) -> dict[nn.Parameter, PerSampleGradients] | None:
    """The gradients of parameters, those of values computed from them carried back.

    None if a row of such a value is not finite: 0 times it would be everybody's NaN.
    """
    found: dict[nn.Parameter, list[PerSampleGradients]] = {}
    for value, gradients in received:
        if value.parameter is not None:
            found.setdefault(value.parameter, []).extend(gradients)
            continue
        each = add_uses(gradients).instantiate()
        if value.looked_up is not None:
            ids, padding, table = value.looked_up
            rows = each.reshape(len(each), -1, each.shape[-1])
            numbers = ids.flatten().expand(len(rows), -1)
            found.setdefault(table, []).append(EmbeddingRows(numbers, rows, len(table), padding))
            continue
        carried = list(_carry(value, each, trainable))
        fine = each.reshape(len(each), -1).isfinite().all(1)
        if any(bool((fine & ~g.reshape(len(g), -1).isfinite().all(1)).any()) for _, g in carried):
            return None
        for p, gradient in carried:
            found.setdefault(p, []).append(Instantiated(gradient))
    return {p: add_uses(found[p]) for p in trainable if p in found}


def _carry(
    value: Followed, gradients: Tensor, parameters: Sequence[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Gradients (B, *S) of a value of shape S to those of the parameters that it was computed from."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        end = plain(value)
    given, back = gradients.to(value.dtype), partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
    try:
        found: Sequence[Tensor | None] = back(end, parameters, given, is_grads_batched=True)
    except RuntimeError:  # functorch knows not all operations
        rows = [back(end, parameters, g) for g in given]
        found = [None if r[0] is None else torch.stack(cast(Any, r)) for r in zip(*rows, strict=True)]
    yield from ((p, g) for p, g in zip(parameters, found, strict=True) if g is not None)


def _metadata(node: Node) -> dict[Any, Any]:
    return cast(dict[Any, Any], node.metadata)  # a property, which torch annotates as a method
