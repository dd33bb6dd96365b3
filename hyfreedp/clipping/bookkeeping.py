"""The fast engine: one backward pass that never computes a weight gradient (paper's section "Efficiency of algorithm").

A forward hook on each trainable layer keeps its input x; a hook on its output receives the output's gradient g, and the
two give each sample's share of the squared norm at once. When all factors c_i are known, each weight's clipped gradient
is one matrix product of x with g, scaled by c ("book-keeping", Bu et al. 2023; ghost norms, Li et al. 2022).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hyfreedp.batches import tensors_in
from hyfreedp.clipping.base import (
    GradientEngine,
    Misread,
    foreign_function,
    hidden_use,
    not_a_view,
    wrong_samples,
)
from hyfreedp.clipping.engine_hook import EngineHook
from hyfreedp.clipping.functions import Clipping
from hyfreedp.clipping.layers import LayerRule, input_to_keep, rule_of, ruled_parameters
from hyfreedp.clipping.operations import Operations, Recorded
from hyfreedp.clipping.per_sample import EmbeddingRows, Instantiated, PerSampleGradients, add_uses, join_views
from hyfreedp.clipping.saved_input import SavedInput
from hyfreedp.clipping.shared import Shared, plain
from hyfreedp.clipping.substitution import Substitution

# The gradients of parameters, and of values that were computed from parameters alone.
Gradients = Iterator[tuple[Tensor, PerSampleGradients]]

# An operation and its dimensions, or a layer; and after it the layer that uses parameters next.
Step = tuple[Any, ...]
_MANY = 8  # of a step, or more: loops over tokens have as many as there are tokens


class BookKeepingEngine(GradientEngine):
    """Clipped sums at nearly the cost of a plain backward pass.

    What a layer's call needs is stored on the autograd node of its output, so activations belong to exactly one graph
    and vanish with it; a forward pass whose loss is never differentiated leaves nothing behind. Parameters that are
    used outside a layer with a rule are followed through the operations on them, see :mod:`hyfreedp.clipping.shared`.

    A model may change after the first batches, and move its samples to another dimension, which no shape tells where
    that is as long as the batch. They must come back to dimension 0 of the losses, and so the graph between two uses of
    parameters has other operations then, or along other dimensions: a batch with such news is checked as the first is.
    """

    name = "bookkeeping"

    def __init__(self, module: nn.Module, clipping: Clipping, views: int = 1) -> None:
        super().__init__(module, clipping, views)
        self._traced: _Trace | None = None
        self._pass: _Pass | None = None
        self._steps: set[tuple[Step, int]] = set()  # how many a graph had whose gradients agreed with autograd's
        self._operations = Operations(module, self._record_operation)
        self._rules = {
            layer: rule for layer in module.modules() if ruled_parameters(layer) and (rule := rule_of(layer))
        }
        self._substitution = Substitution(module, self._operations, set(self._rules))
        self._handles = []
        for name, layer in module.named_modules():
            if layer in self._rules:
                # First in line, to see what the layer itself returned, before other hooks change it.
                hook = EngineHook(self._record_layer, name, self._rules[layer])
                self._handles.append(layer.register_forward_hook(hook, prepend=True, with_kwargs=True))
        self._substitution.attach()

    @classmethod
    def unsupported(cls, module: nn.Module) -> list[str]:
        return []

    def coverage(self) -> tuple[int, int]:
        """How many layers have a rule, and how many other parameters are followed through the operations on them."""
        return len(self._rules), self._substitution.followed

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._substitution.detach()

    def telling_size(self, above: int) -> int | None:
        return self._operations.telling_size(above)

    def expect(self, batch: Any) -> None:
        self._operations.expect(tensors_in(batch))

    def telling(self) -> AbstractContextManager[None]:
        return self._operations.telling()

    def was_misled(self) -> bool:
        found, self._operations.misled = self._operations.misled, False
        return found

    def clipped_sums(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        if any(len(norms) > 1 for norms in self.norms):  # gradients of single samples rest on no decision
            self._operations.settle()
        return super().clipped_sums(parameters)

    def _record_layer(
        self,
        name: str,
        rule: LayerRule,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> Tensor | None:
        trainable = ruled_parameters(layer)
        if not (trainable and layer.training and torch.is_grad_enabled()):
            return None
        if isinstance(output, Shared) or self in _metadata(cast(Node, output.grad_fn)):
            return None  # followed already, since its input or its weight is a shared value
        x = next(tensors_in((args, kwargs)))
        if self._substitution.active and not x.requires_grad and self._operations.is_constant(layer, x):
            return self._substitution.run(layer, args, kwargs)
        upstream = get_gradient_edge(x).node if x.requires_grad else None
        needed = input_to_keep(layer, x, output)
        saved = None if needed is None else SavedInput(needed, name)
        gradients = partial(rule.gradients, layer)
        output = not_a_view(output)
        self._record(_Use(name, layer, trainable, gradients, saved, upstream, rule.channels_first), output)
        return output

    def _record_operation(self, recorded: Recorded) -> None:
        parameters = list(dict.fromkeys(p for value in recorded.values for p in value.parameters))
        name, layer = self._substitution.owners[parameters[0]]
        x, rule = recorded.x, recorded.gradients  # not the record, which holds the output
        upstream = get_gradient_edge(x).node if x is not None and x.requires_grad else None
        saved = None
        if recorded.keep and x is not None:
            # Under autocast products are computed in the output's half precision, as in layers.
            saved = SavedInput(x.detach().to(recorded.output.dtype) if x.is_floating_point() else x.detach(), name)

        def gradients(x: Tensor | None, g: Tensor) -> Gradients:
            for value, each in rule(x, g):
                if value._version != value.met:
                    raise ValueError(
                        f"a value computed from the parameters of layer {name!r} was modified in place after it met "
                        "the samples: compute a new one instead"
                    )
                yield _of_parameter(value, each) or (value, each)

        use = _Use(name, layer, parameters, gradients, saved, upstream, recorded.by_row)
        self._record(use, recorded.output)
        if len(recorded.values) == 1 and x is None:
            value = recorded.values[0]
            use.since = self._substitution.entered(layer) if value.is_parameter else value.serial

    def _again(self, size: int) -> AbstractContextManager[None]:
        # A layer that checkpoints its own forward, as transformers' blocks do, is recomputed without its hooks.
        return self._substitution.again(size)

    def _backward(
        self,
        losses: Tensor,
        trainable: dict[nn.Parameter, str],
        add: bool,
        factors: Tensor | None,
        sample_weights: Tensor | None,
    ) -> Tensor:
        self._traced = self._trace(losses, trainable)
        # In the graph of one sample nothing can go to a wrong sample.
        new = self._traced.steps.items() - self._steps if len(losses) > 1 else set()
        if new:
            new = {(step, min(count, _MANY)) for step, count in new} - self._steps
        if new or self._operations.undecided:
            self._unseen |= set(trainable) if new else self._operations.undecided
            self._operations.undecided.clear()
            self._checked_samples = min(self._checked_samples, 1)  # another check against autograd
        try:
            norms = super()._backward(losses, trainable, add, factors, sample_weights)
        except Misread as error:
            error.sizes = self._operations.telling_sizes(error.parameters)
            raise
        finally:
            self._traced = None
        if self._checked_samples > 1:  # else there was none that would have shown everything
            self._steps |= new
        return norms

    def _record(self, use: _Use, output: Tensor) -> None:
        assert output.grad_fn is not None
        self._operations.serial += 1
        use.serial = self._operations.serial
        use.output_nr = output.output_nr
        _metadata(output.grad_fn).setdefault(self, []).append(use)
        output.register_hook(partial(self._receive, use))

    def _receive(self, use: _Use, g: Tensor) -> None:
        # Also asked for where this is another backward pass: what checkpointing recomputed for it is then let go.
        x = None if use.saved is None else use.saved.get()
        if self._pass is not None:
            if use.received:
                raise ValueError(
                    f"layer {use.name!r} gave an output that an earlier backward pass has used already: keep no "
                    "activations from one step to the next, or detach them"
                )
            self._types.add(g.dtype)
            use.saved, use.received = None, True
            self._pass.receive(use, x, g)

    def _per_sample_gradients(
        self, losses: Tensor, trainable: dict[nn.Parameter, str]
    ) -> dict[nn.Parameter, PerSampleGradients]:
        assert self._traced is not None
        uses, ends, _ = self._traced
        counts = Counter(p for use in uses for p in use.trainable)
        self._pass = current = _Pass(len(losses), self.views, {p for p, count in counts.items() if count > 1})
        try:
            if ends:
                torch.autograd.grad(losses, ends, torch.ones_like(losses), allow_unused=True)
        finally:
            self._pass = None
        return current.finish()

    def _trace(self, losses: Tensor, trainable: dict[nn.Parameter, str]) -> _Trace:
        """What a walk through the graph of ``losses`` finds.

        From a layer's output the walk goes straight to its input. So it meets a parameter only where that is used
        outside its layer, and differentiating with respect to the outputs of the lowest layers reaches every use
        without a single weight gradient.
        """
        uses, ends, steps = [], [], []
        seen, stack = set(), [(losses.grad_fn, "")]
        while stack:
            node, user = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            here = _metadata(node).get(self)
            if here is not None:
                steps.append((user, here[0].name))
                uses.extend(here)
                upstream = [use.upstream for use in here if use.upstream is not None]
                if not upstream:
                    ends.append(GradientEdge(node, here[0].output_nr))
                stack.extend((node, here[0].name) for node in upstream)
                continue
            kind = type(node)
            followed = tuple(upstream is not None for upstream, _ in node.next_functions)  # a product: from which side
            steps.append((user, kind, followed, *[getattr(node, name) for name in _dimensions(kind)]))
            if (leaf := getattr(node, "variable", None)) is not None:
                if leaf in trainable:
                    function = _function_of(node, seen)
                    name = trainable[leaf]
                    raise foreign_function(name, function) if function else hidden_use(name, self.module)
                ends.append(GradientEdge(node, 0))
            else:
                stack.extend((upstream, user) for upstream, _ in node.next_functions)
        return _Trace(uses, ends, Counter(steps))


class _Trace(NamedTuple):
    """What a walk through an autograd graph has found.

    Attributes:
        uses: of parameters.
        ends: edges at which a backward pass may end and has reached all uses.
        steps: what there is how often between the uses.
    """

    uses: list[_Use]
    ends: list[GradientEdge]
    steps: Counter[Step]


class _Use:
    """One use of some parameters in a forward pass: what their gradients will need in the backward pass.

    It is stored on the node of the output, so it must not refer to that node: the cycle would never be freed.

    Args:
        gradients: (input, output gradient) to the gradients of ``trainable``, or of values computed from them.
        saved: the input, None if no gradient needs it.
        upstream: the node that computed the input, None if that needs no gradient.
        by_row: where a sample has several rows in dimension 0, whether ``gradients`` takes each for a sample.

    Attributes:
        serial: its number among the uses of all passes.
        since: of a parameter that was there for a while before it met samples, the last number before.
        received: whether its gradient has been asked for.
    """

    serial: int
    since: int | None
    received: bool

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        trainable: list[nn.Parameter],
        gradients: Callable[[Tensor | None, Tensor], Gradients],
        saved: SavedInput | None,
        upstream: Node | None,
        by_row: bool,
    ) -> None:
        self.name, self.layer, self.trainable, self.gradients = name, layer, trainable, gradients
        self.saved, self.upstream, self.by_row, self.output_nr = saved, upstream, by_row, 0
        self.serial, self.since, self.received = 0, None, False


class _Pass:
    """What one backward pass collects; norms are taken at once, except those of parameters used more than once."""

    def __init__(self, batch_size: int, views: int, shared: set[nn.Parameter]) -> None:
        self.batch_size, self.views, self.shared = batch_size, views, shared
        self.gradients: dict[Tensor, list[PerSampleGradients]] = {}
        self.waiting: list[tuple[int, Tensor]] = []

    def receive(self, use: _Use, x: Tensor | None, g: Tensor) -> None:
        for target, gradients in self._gradients(use, x, g):
            if target not in self.gradients:
                self._put_in_order(target, use)
            self.gradients.setdefault(target, []).append(gradients)
            if isinstance(target, nn.Parameter) and target not in self.shared:
                _ = gradients.squared_norms  # computed while x and g are still in the cache

    def finish(self) -> dict[nn.Parameter, PerSampleGradients]:
        """All gradients of parameters; those of other values are carried on to the parameters first."""
        self._release(-1)
        values = [target for target in self.gradients if isinstance(target, Shared)]
        for value in values:
            gradients = add_uses(self.gradients.pop(value)).instantiate()
            for p, each in zip(value.parameters, _carry_on(value, gradients), strict=True):
                if each is not None:
                    self.gradients.setdefault(p, []).append(Instantiated(each))
        return {cast(nn.Parameter, p): add_uses(uses) for p, uses in self.gradients.items()}

    def _put_in_order(self, target: Tensor, use: _Use) -> None:
        # Norms are added up in the order of the backward pass, in which a parameter comes when its layer was entered.
        if use.since is not None:
            self.waiting.append((use.since, target))
            self.waiting.sort(key=lambda pair: -pair[0])
        else:
            self._release(use.serial)

    def _release(self, serial: int) -> None:
        while self.waiting and self.waiting[0][0] >= serial:
            _, target = self.waiting.pop(0)
            self.gradients[target] = self.gradients.pop(target)

    def _gradients(self, use: _Use, x: Tensor | None, g: Tensor) -> Gradients:
        rows, size = len(g), self.batch_size * self.views
        if rows % size or (x is not None and len(x) != rows):
            raise wrong_samples(use.name, use.layer, rows, self.batch_size, self.views)
        if rows == size or use.by_row:
            for target, gradients in use.gradients(x, g):
                yield target, join_views(gradients, rows // self.batch_size)
        else:
            of_samples = None if x is None else x.unflatten(0, (size, -1))
            for target, gradients in use.gradients(of_samples, g.unflatten(0, (size, -1))):
                yield target, join_views(gradients, self.views)


def _of_parameter(value: Shared, gradients: PerSampleGradients) -> tuple[Tensor, PerSampleGradients] | None:
    """The gradients of the one parameter of which ``value`` is rows, or which it is."""
    p = value.parameters[0]
    if value.is_parameter:
        return p, gradients
    if value.ids is None:
        return None
    rows = gradients.instantiate()
    ids, rows = value.ids.flatten().expand(len(rows), -1), rows.reshape(len(rows), -1, p.shape[-1])
    if value.padding_idx is not None:
        rows = rows.masked_fill((ids == value.padding_idx)[..., None], 0)
    return p, EmbeddingRows(ids, rows, len(p))


def _carry_on(value: Shared, gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients (B, *S) of a value of shape S to those of its parameters, by functorch."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        end = plain(value)
    return torch.autograd.grad(  # in which checkpointing may compute the value again, and follows it
        end,
        value.parameters,
        gradients.to(value.dtype),
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )


@cache
def _dimensions(kind: type[Node]) -> tuple[str, ...]:
    """The attributes in which a kind of operation keeps dimensions; numbers, so that no saved tensor is touched."""
    return tuple(name for name in dir(kind) if name.startswith("_saved_") and "dim" in name)


def _function_of(leaf: Node, nodes: Iterable[Node]) -> str:
    """The name of the ``torch.autograd.Function`` among ``nodes`` that was given a leaf; empty if none was."""
    for node in nodes:
        if isinstance(node, BackwardCFunction):
            given = [upstream for upstream, _ in node.next_functions if upstream is not None]
            # A followed parameter is an alias of it.
            if any(leaf in (upstream, *(n for n, _ in upstream.next_functions)) for upstream in given):
                return type(node).__name__.removesuffix("Backward")
    return ""


def _metadata(node: Node) -> dict[Any, Any]:
    return cast(dict[Any, Any], node.metadata)  # a property, which torch annotates as a method
