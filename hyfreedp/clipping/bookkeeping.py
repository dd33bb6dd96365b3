"""The fast engine: one backward pass that never computes a weight gradient (paper's section "Efficiency of algorithm").

A forward hook on each trainable layer keeps its input x; a hook on its output receives the output's gradient g, and the
two give each sample's share of the squared norm at once. When all factors c_i are known, each weight's clipped gradient
is one matrix product of x with g, scaled by c ("book-keeping", Bu et al. 2023; ghost norms, Li et al. 2022).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hyfreedp.batches import tensors_in
from hyfreedp.clipping.base import GradientEngine, hidden_use, wrong_samples
from hyfreedp.clipping.broadcast import PositionExpander, free_parameters, repeat, restore, substitute
from hyfreedp.clipping.engine_hook import EngineHook
from hyfreedp.clipping.functions import Clipping
from hyfreedp.clipping.layers import Gradients, LayerRule, input_to_keep, rule_of, ruled_parameters
from hyfreedp.clipping.per_sample import Instantiated, PerSampleGradients, add_uses, join_views
from hyfreedp.clipping.saved_input import SavedInput


class BookKeepingEngine(GradientEngine):
    """Clipped sums at nearly the cost of a plain backward pass.

    What a layer's call needs is stored on the autograd node of its output, so activations belong to exactly one graph
    and vanish with it; a forward pass whose loss is never differentiated leaves nothing behind.
    """

    name = "bookkeeping"

    def __init__(self, module: nn.Module, clipping: Clipping, views: int = 1) -> None:
        super().__init__(module, clipping, views)
        self._pass: _Pass | None = None
        self._expander = PositionExpander(module)
        self._handles = []
        self._free: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []
        for name, layer in module.named_modules():
            if ruled_parameters(layer) and (rule := rule_of(layer)):
                # First in line, to see what the layer itself returned, before other hooks change it.
                hook = EngineHook(self._record_layer, name, rule)
                self._handles.append(layer.register_forward_hook(hook, prepend=True, with_kwargs=True))
            elif free := free_parameters(layer):
                before = layer.register_forward_pre_hook(EngineHook(self._repeat_free, name, free), with_kwargs=True)
                after = layer.register_forward_hook(EngineHook(_restore_free, free), always_call=True)
                self._handles += [before, after]
                self._free.append((layer, free))

    @classmethod
    def unsupported(cls, module: nn.Module) -> list[str]:
        ruled = [layer for layer in module.modules() if ruled_parameters(layer) and rule_of(layer)]
        covered = {p for layer in ruled for p in ruled_parameters(layer)}
        problems = []
        for name, layer in module.named_modules():
            what = f"layer {name!r} ({type(layer).__name__})"
            if isinstance(layer, nn.MultiheadAttention) and any(p.requires_grad for p in layer.parameters()):
                problems.append(
                    f"{what} uses its projections without calling them: replace it by an attention made of nn.Linear "
                    "layers, such as opacus.layers.DPMultiheadAttention with batch_first=True, or freeze it"
                )
                continue
            own = {n: p for n, p in layer.named_parameters(recurse=False) if p.requires_grad and p not in covered}
            free = free_parameters(layer) if own else {}
            problems += [
                f"{what} has no rule for its parameter {n!r} of shape {tuple(p.shape)}: use a supported layer, give a "
                "parameter that is broadcast over the samples the shape (1, ...), or freeze it"
                for n, p in own.items()
                if n not in free
            ]
        return problems

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._free = [], []
        self._expander.detach()

    def _record_layer(
        self,
        name: str,
        rule: LayerRule,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> None:
        trainable = ruled_parameters(layer)
        if trainable and layer.training and torch.is_grad_enabled():
            x = next(tensors_in((args, kwargs)))
            upstream = get_gradient_edge(x).node if x.requires_grad else None
            needed = input_to_keep(layer, x, output)
            saved = None if needed is None else SavedInput(needed, name)
            self._record(_Use(name, layer, trainable, partial(rule.gradients, layer), saved, upstream), output)

    def _repeat_free(
        self,
        name: str,
        free: dict[str, nn.Parameter],
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        x = next(tensors_in((args, kwargs)), None)
        if x is None or not (layer.training and torch.is_grad_enabled()):
            return
        views = {n: repeat(p, x.shape[0], x.dim()) for n, p in free.items() if p.requires_grad}
        for n, view in views.items():
            self._record(_Use(name, layer, [free[n]], partial(_free_gradients, free[n]), None, None), view)
        substitute(layer, views)

    def _backward(self, losses: Tensor, trainable: dict[nn.Parameter, str], add: bool) -> Tensor:
        # A layer that checkpoints its own forward, as transformers' blocks do, is recomputed without its hooks.
        layers = [(layer, free) for layer, free in self._free if layer.training]
        for layer, free in layers:
            with torch.enable_grad():  # as in the forward pass, so that recomputing saves the same tensors
                kept = {n: p for n, p in free.items() if p.requires_grad and p.dim() >= 2}
                substitute(layer, {n: repeat(p, len(losses) * self.views, p.dim()) for n, p in kept.items()})
        try:
            return super()._backward(losses, trainable, add)
        finally:
            for layer, free in layers:
                restore(layer, free)

    def _record(self, use: _Use, output: Tensor) -> None:
        assert output.grad_fn is not None
        use.output_nr = output.output_nr
        _metadata(output.grad_fn)[self] = use
        output.register_hook(partial(self._receive, use))

    def _receive(self, use: _Use, g: Tensor) -> None:
        # Also asked for where this is another backward pass: what checkpointing recomputed for it is then let go.
        x = None if use.saved is None else use.saved.get()
        if self._pass is not None:
            self._types.add(g.dtype)
            use.saved = None
            self._pass.receive(use, x, g)

    def _per_sample_gradients(
        self, losses: Tensor, trainable: dict[nn.Parameter, str]
    ) -> dict[nn.Parameter, PerSampleGradients]:
        uses, ends = self._trace(losses, trainable)
        counts = Counter(p for use in uses for p in use.trainable)
        self._pass = current = _Pass(len(losses), self.views, {p for p, count in counts.items() if count > 1})
        try:
            if ends:
                torch.autograd.grad(losses, ends, torch.ones_like(losses), allow_unused=True)
        finally:
            self._pass = None
        return {p: add_uses(uses) for p, uses in current.gradients.items()}

    def _trace(self, losses: Tensor, trainable: dict[nn.Parameter, str]) -> tuple[list[_Use], list[GradientEdge]]:
        """The uses of parameters in the graph of ``losses``, and the edges at which its backward pass may end.

        From a layer's output the walk goes straight to its input. So it meets a parameter only where that is used
        outside its layer, and differentiating with respect to the outputs of the lowest layers reaches every use
        without a single weight gradient.
        """
        uses, ends = [], []
        seen, stack = set(), [losses.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            use = _metadata(node).get(self)
            if use is not None:
                uses.append(use)
                if use.upstream is None:
                    ends.append(GradientEdge(node, use.output_nr))
                else:
                    stack.append(use.upstream)
            elif (leaf := getattr(node, "variable", None)) is not None:
                if leaf in trainable:
                    raise hidden_use(trainable[leaf])
                ends.append(GradientEdge(node, 0))
            else:
                stack.extend(upstream for upstream, _ in node.next_functions)
        return uses, ends


class _Use:
    """One use of some parameters in a forward pass: what their gradients will need in the backward pass.

    It is stored on the node of the layer's output, so it must not refer to that node: the cycle would never be freed.

    Args:
        gradients: (input, output gradient) to the gradients of ``trainable``.
        saved: the input, None if no gradient needs it.
        upstream: the node that computed the layer's input, None if that needs no gradient.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        trainable: list[nn.Parameter],
        gradients: Callable[[Tensor | None, Tensor], Gradients],
        saved: SavedInput | None,
        upstream: Node | None,
    ) -> None:
        self.name, self.layer, self.trainable, self.gradients = name, layer, trainable, gradients
        self.saved, self.upstream, self.output_nr = saved, upstream, 0


class _Pass:
    """What one backward pass collects; norms are taken at once, except those of parameters used more than once."""

    def __init__(self, batch_size: int, views: int, shared: set[nn.Parameter]) -> None:
        self.batch_size, self.views, self.shared = batch_size, views, shared
        self.gradients: dict[nn.Parameter, list[PerSampleGradients]] = {}

    def receive(self, use: _Use, x: Tensor | None, g: Tensor) -> None:
        rows = self.batch_size * self.views
        if len(g) != rows or (x is not None and len(x) != rows):
            raise wrong_samples(use.name, use.layer, len(g), self.batch_size, self.views)
        for p, of_rows in use.gradients(x, g):
            gradients = join_views(of_rows, self.views)
            self.gradients.setdefault(p, []).append(gradients)
            if p not in self.shared:
                _ = gradients.squared_norms  # computed while x and g are still in the cache


def _metadata(node: Node) -> dict[Any, Any]:
    return cast(dict[Any, Any], node.metadata)  # a property, which torch annotates as a method


def _free_gradients(p: nn.Parameter, x: None, g: Tensor) -> Gradients:
    yield p, Instantiated(g.reshape(len(g), *p.shape))


def _restore_free(free: dict[str, nn.Parameter], layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    restore(layer, free)
