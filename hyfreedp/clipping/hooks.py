"""The engine built on Opacus: instantiates every per-sample gradient. Slow and general."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.functorch import prepare_layer
from opacus.utils.module_utils import has_trainable_params
from torch import Tensor, nn

from hyfreedp.clipping.base import GradientEngine, hidden_use, not_a_view, wrong_samples
from hyfreedp.clipping.engine_hook import EngineHook
from hyfreedp.clipping.functions import Clipping
from hyfreedp.clipping.per_sample import Instantiated, PerSampleGradients, add_uses, join_views
from hyfreedp.clipping.positions import PositionExpander
from hyfreedp.clipping.saved_input import SavedInput

_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.RReLU)


class HooksEngine(GradientEngine):
    """Per-sample gradients by Opacus's samplers (``GradSampleHooks.GRAD_SAMPLERS``), functorch for other layers.

    Only the samplers are Opacus's. Its own hooks keep inputs on a stack per layer, so that one forward pass without a
    backward shifts every later pairing; here a hook on the layer's output carries the input through the autograd graph,
    and both vanish with it. Memory grows with batch size times trainable parameters.
    """

    name = "hooks"

    def __init__(self, module: nn.Module, clipping: Clipping, views: int = 1) -> None:
        super().__init__(module, clipping, views)
        self._batch_size = 0
        self._gradients: dict[nn.Parameter, PerSampleGradients] | None = None  # collected during a backward pass only
        layers = list(_sampled_layers(module))
        self._functorch: dict[nn.Module, Callable[..., Any]] = {}
        for _, layer in layers:  # before there are hooks, because functorch copies the layer with them
            if not _has_sampler(layer):
                prepare_layer(layer)
                self._functorch[layer] = layer.__dict__.pop("ft_compute_sample_grad")  # it could not be pickled
        self._expander = PositionExpander(module)
        self._handles = []
        for name, layer in layers:
            hook = EngineHook(self._keep_input, name)
            self._handles.append(layer.register_forward_hook(hook, prepend=True, with_kwargs=True))

    @classmethod
    def unsupported(cls, module: nn.Module) -> list[str]:
        problems = []
        for name, layer in _sampled_layers(module):
            what = f"layer {name!r} ({type(layer).__name__})"
            if isinstance(layer, nn.MultiheadAttention):
                problems.append(
                    f"{what} takes several inputs: use engine 'bookkeeping', or replace it by "
                    "opacus.layers.DPMultiheadAttention with batch_first=True"
                )
            elif isinstance(layer, nn.RNNBase):
                problems.append(
                    f"{what} hides its time steps: use engine 'bookkeeping', or replace it by opacus.layers.DPLSTM, "
                    "DPGRU or DPRNN"
                )
            elif isinstance(layer, nn.EmbeddingBag):
                problems.append(f"{what} has inputs without a batch dimension: use nn.Embedding and a sum")
            elif getattr(layer, "padding_mode", "zeros") != "zeros":
                problems.append(f"{what} has padding_mode {layer.padding_mode!r}, which Opacus takes for 'zeros'")
            elif _has_sampler(layer):
                continue
            elif any(True for _ in layer.buffers()):
                problems.append(f"{what} has buffers, which functorch cannot handle: freeze its own parameters")
            elif any(isinstance(child, _DROPOUTS) and getattr(child, "p", 1) for child in layer.modules()):
                problems.append(
                    f"{what} is recomputed by functorch, and its dropout would differ: "
                    "set the dropout to 0 or freeze the parameters registered directly on the layer"
                )
        return problems

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._functorch.clear()
        self._expander.detach()

    def _again(self, size: int) -> AbstractContextManager[None]:
        return self._expander.batch_of(size)

    def _per_sample_gradients(
        self, losses: Tensor, trainable: dict[nn.Parameter, str]
    ) -> dict[nn.Parameter, PerSampleGradients]:
        self._batch_size, self._gradients = len(losses), {}
        try:
            # Autograd's own weight gradients are not used: asking for them is what makes it visit every layer.
            unclipped = torch.autograd.grad(losses, list(trainable), torch.ones_like(losses), allow_unused=True)
            for (p, name), gradient in zip(trainable.items(), unclipped, strict=True):
                if gradient is not None and p not in self._gradients:
                    raise hidden_use(name, self.module)
            return self._gradients
        finally:
            self._gradients = None

    def _keep_input(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        if not (layer.training and torch.is_grad_enabled() and has_trainable_params(layer)):
            return None
        inputs = [x for x in (*args, *kwargs.values()) if x is not None]
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}): engine 'hooks' handles layers with one input tensor and one "
                "output tensor; freeze the parameters registered directly on it"
            )
        output = not_a_view(output)
        output.register_hook(partial(self._receive, name, layer, SavedInput(inputs[0].detach(), name)))
        return output

    def _receive(self, name: str, layer: nn.Module, saved: SavedInput, gradient: Tensor) -> None:
        # Also asked for where this is another backward pass: what checkpointing recomputed for it is then let go.
        x = saved.get()
        if self._gradients is None:
            return
        self._types.add(gradient.dtype)
        if not len(x) == len(gradient) == self._batch_size * self.views:
            raise wrong_samples(name, layer, len(x), self._batch_size, self.views)
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
            gradient = gradient.masked_fill((x == layer.padding_idx)[..., None], 0)  # Opacus overlooks the padding
        try:
            if layer in self._functorch:
                parameters = list(layer.parameters())
                computed = self._functorch[layer](parameters, _in_order(x), gradient)
                per_sample_gradients = dict(zip(parameters, computed, strict=True))
            else:
                per_sample_gradients = GradSampleHooks.GRAD_SAMPLERS[type(layer)](layer, [_in_order(x)], gradient)
        except RuntimeError as error:
            if not any(text in str(error) for text in ("saved tensor hooks", "_NoopSaveInputs")):  # the latter: 2.6
                raise
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) is recomputed by functorch, which allows no checkpointing in "
                "it: use engine 'bookkeeping', or freeze the parameters registered directly on the layer"
            ) from error
        for p, per_sample in per_sample_gradients.items():
            if p.requires_grad:
                earlier = [self._gradients[p]] if p in self._gradients else []
                self._gradients[p] = add_uses([*earlier, join_views(Instantiated(per_sample), self.views)])


def _in_order(x: Tensor) -> Tensor:
    """With the strides of a fresh tensor: Opacus's unfolding of convolutions misreads others.

    ``contiguous`` leaves those of dimensions of size one as they are, as of a 1 x 1 image whose channels come last.
    """
    fresh = torch.empty(x.shape, device="meta").stride()
    return x if x.stride() == fresh else x.clone(memory_format=torch.contiguous_format)


def _has_sampler(layer: nn.Module) -> bool:
    # Opacus's sampler of LayerNorm asks for a bias.
    without_bias = isinstance(layer, nn.LayerNorm) and layer.bias is None
    return type(layer) in GradSampleHooks.GRAD_SAMPLERS and not without_bias


def _sampled_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers with trainable parameters of their own. What functorch handles, it handles with all its children."""
    # A parameter may be registered on a container too, as BERT's output bias is: its layer takes care of it.
    covered = {p for layer in module.modules() if _has_sampler(layer) for p in layer.parameters(recurse=False)}
    stack = [("", module)]
    while stack:
        name, layer = stack.pop()
        own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
        by_functorch = not _has_sampler(layer) and any(p not in covered for p in own)
        if by_functorch or (own and _has_sampler(layer)):
            yield name, layer
        if not by_functorch:
            stack.extend((f"{name}.{child}".lstrip("."), sub) for child, sub in layer.named_children())
