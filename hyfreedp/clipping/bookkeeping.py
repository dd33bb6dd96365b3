"""The fast engine: one backward pass that never computes a weight gradient (paper's section "Efficiency of algorithm").

A forward hook on each trainable layer keeps its input x; a hook on its output receives the output's gradient g, and the
two give each sample's share of the squared norm at once. When all factors c_i are known, each weight's clipped gradient
is one matrix product of x with g, scaled by c ("book-keeping", Bu et al. 2023; ghost norms, Li et al. 2022).
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hyfreedp.clipping.base import GradientEngine
from hyfreedp.clipping.broadcast import PositionExpander
from hyfreedp.clipping.factors import Clipping
from hyfreedp.clipping.layers import LayerRule, needs_input, rule_of
from hyfreedp.clipping.persample import PerSampleGradients, add_uses


class BookKeepingEngine(GradientEngine):
    """Clipped sums at nearly the cost of a plain backward pass.

    What a layer's call needs is stored on the autograd node of its output, so activations belong to exactly one graph
    and vanish with it; a forward pass whose loss is never differentiated leaves nothing behind.
    """

    name = "bookkeeping"

    def __init__(self, module: nn.Module, clipping: Clipping) -> None:
        super().__init__(module, clipping)
        self._pass: _Pass | None = None
        self._expander = PositionExpander(module)
        self._handles = []
        for name, layer in module.named_modules():
            if rule := rule_of(layer):
                hook = partial(self._record, name, rule)
                # First in line, to see what the layer itself returned, before hooks that change it.
                self._handles.append(layer.register_forward_hook(hook, prepend=True, with_kwargs=True))

    @classmethod
    def unsupported(cls, module: nn.Module) -> list[str]:
        covered = {p for layer in module.modules() if rule_of(layer) for p in layer.parameters(recurse=False)}
        problems = []
        for name, layer in module.named_modules():
            own = [n for n, p in layer.named_parameters(recurse=False) if p.requires_grad and p not in covered]
            if own:
                problems.append(
                    f"layer {name!r} ({type(layer).__name__}) has no rule for its parameters {', '.join(own)}"
                )
        return problems

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._expander.detach()

    def _record(
        self,
        name: str,
        rule: LayerRule,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> None:
        trainable = [p for p in layer.parameters(recurse=False) if p.requires_grad]
        if not (trainable and layer.training and torch.is_grad_enabled() and output.requires_grad):
            return
        (x,) = (*args, *kwargs.values())
        use = _Use(name, rule, layer, trainable, x, output)
        output.grad_fn.metadata[self] = use
        output.register_hook(partial(self._receive, use))

    def _receive(self, use: _Use, g: Tensor) -> None:
        if self._pass is not None:
            self._pass.receive(use, g)

    def _per_sample_gradients(
        self, losses: Tensor, trainable: dict[nn.Parameter, str]
    ) -> dict[nn.Parameter, PerSampleGradients]:
        uses, sources = self._trace(losses, trainable)
        counts = Counter(p for use in uses for p in use.trainable)
        self._pass = current = _Pass(len(losses), {p for p, count in counts.items() if count > 1})
        try:
            torch.autograd.grad(losses, sources, torch.ones_like(losses), allow_unused=True)
        finally:
            self._pass = None
        return current.finish()

    def _trace(self, losses: Tensor, trainable: dict[nn.Parameter, str]) -> tuple[list[_Use], list[GradientEdge]]:
        """The uses of layers in the graph of ``losses``, and the edges at which its backward pass may end.

        From a layer's output the walk goes straight to its input. So it meets a parameter only where that is used
        outside its layer, and differentiating with respect to the outputs of the lowest layers reaches every use
        without a single weight gradient.
        """
        uses, sources = [], []
        seen, stack = set(), [losses.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            use = node.metadata.get(self)
            if use is not None:
                uses.append(use)
                if use.upstream is None:
                    sources.append(GradientEdge(node, use.output_nr))
                else:
                    stack.append(use.upstream)
            elif (leaf := getattr(node, "variable", None)) is not None:
                if leaf in trainable:
                    raise ValueError(
                        f"parameter {trainable[leaf]!r} is used outside the forward pass of its layer, or while that "
                        "is in eval mode: put the layer in train mode and call it as a module, or freeze the parameter"
                    )
                sources.append(GradientEdge(node, 0))
            else:
                stack.extend(upstream for upstream, _ in node.next_functions)
        return uses, sources


class _Use:
    """One call of one layer: what its gradients need, from its forward pass to its backward pass."""

    def __init__(
        self, name: str, rule: LayerRule, layer: nn.Module, trainable: list[nn.Parameter], x: Tensor, output: Tensor
    ) -> None:
        self.name, self.rule, self.layer, self.trainable = name, rule, layer, trainable
        self.output_nr = output.output_nr
        # A node, not an edge of the output: that would tie this object and the node it is stored on into a cycle.
        self.upstream: Node | None = get_gradient_edge(x).node if x.requires_grad else None
        self.x: Tensor | None = None
        if needs_input(layer):
            self.x = x.detach()
            if rule.cast_input and x.dtype != output.dtype:
                self.x = self.x.to(output.dtype)
            self._version = self.x._version

    def take_input(self) -> Tensor | None:
        """The input, which is let go. None if no gradient needs it."""
        x, self.x = self.x, None
        if x is not None and x._version != self._version:
            raise ValueError(f"the input of layer {self.name!r} was modified in place after its forward pass")
        return x


class _Pass:
    """What one backward pass collects: the gradients of each parameter, norms taken at once where used only once."""

    def __init__(self, batch_size: int, shared: set[nn.Parameter]) -> None:
        self.batch_size, self.shared = batch_size, shared
        self.uses: dict[nn.Parameter, list[PerSampleGradients]] = {}

    def receive(self, use: _Use, g: Tensor) -> None:
        x = use.take_input()
        if len(g) != self.batch_size or (x is not None and len(x) != self.batch_size):
            raise ValueError(
                f"layer {use.name!r} ({type(use.layer).__name__}) saw {len(g)} samples, but there are "
                f"{self.batch_size} losses: dimension 0 of its input must be the samples"
            )
        for p, gradients in use.rule.gradients(use.layer, x, g):
            if p not in self.shared:
                _ = gradients.squared_norms  # while x and g are still in the cache
            self.uses.setdefault(p, []).append(gradients)

    def finish(self) -> dict[nn.Parameter, PerSampleGradients]:
        return {p: add_uses(uses) for p, uses in self.uses.items()}
