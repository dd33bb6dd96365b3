"""Shared values in the place of a model's parameters, while it computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hyfreedp.batches import tensors_in
from hyfreedp.clipping.engine_hook import EngineHook
from hyfreedp.clipping.operations import Operations
from hyfreedp.clipping.recurrent import unrolled
from hyfreedp.clipping.shared import Shared, share
from hyfreedp.devices import random_states

_UNROLLED = frozenset({nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward})


class Substitution:
    """Lets parameters that no layer rule covers be shared values during forward passes in train mode.

    While ``module`` computes, that is so wherever the parameters are read; if a layer is called by itself, in its own
    forward pass. In the first pass, the parameters of layers with a rule are shared values outside these layers too:
    those that are read there stay so.

    Args:
        module: the model.
        operations: follows the values.
        ruled: layers with a rule for their ``weight`` and ``bias``.
    """

    def __init__(self, module: nn.Module, operations: Operations, ruled: Set[nn.Module]) -> None:
        self._module, self._operations = module, operations
        self._own: dict[nn.Module, dict[str, nn.Parameter]] = {}  # without a rule, by layer
        self._outside: dict[nn.Module, dict[str, nn.Parameter]] = {}  # of layers with one, watched outside them
        self.owners: dict[nn.Parameter, tuple[str, nn.Module]] = {}
        covered = {layer._parameters.get(name) for layer in ruled for name in ("weight", "bias")}
        for name, layer in module.named_modules():
            trainable = {n: p for n, p in layer.named_parameters(recurse=False) if p.requires_grad}
            self.owners |= {p: (name, layer) for p in trainable.values()}
            if layer in ruled:
                self._outside[layer] = {n: p for n, p in trainable.items() if n in ("weight", "bias")}
            # A container may hold its layer's parameter too, as BERT holds its output bias.
            mine = {n: p for n, p in trainable.items() if p not in covered or isinstance(layer, nn.Embedding)}
            if layer in ruled:
                mine = {n: p for n, p in mine.items() if n not in ("weight", "bias")}
            if mine:
                self._own[layer] = mine
        self._entered: dict[nn.Module, int] = {}
        self._scope: nn.Module | None = None
        self._substituted: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._forwards: dict[nn.Module, Any] = {}  # replaced: what the instance itself had, None if its class's
        self._learned = False
        self._handles: list[Any] = []
        self._watchers: dict[nn.Module, list[Any]] = {}

    @property
    def active(self) -> bool:
        """Whether a pass is under way whose number of samples is known."""
        return self._scope is not None

    def entered(self, layer: nn.Module) -> int:
        """How many uses had been recorded when ``layer`` was called last."""
        return self._entered.get(layer, 0)

    @property
    def followed(self) -> int:
        """How many parameters are replaced."""
        return len({p for parameters in [*self._own.values(), *self._outside.values()] for p in parameters.values()})

    def attach(self) -> None:
        """Register the hooks; after all others, so that these see the model as it is."""
        # torch.compile, imported by EngineHook, is to leave operations on shared values alone, as before torch 2.8.
        if hasattr(torch._dynamo.config, "nontraceable_tensor_subclasses"):
            torch._dynamo.config.nontraceable_tensor_subclasses.add(Shared)
        for layer in dict.fromkeys([self._module, *self._own]):
            before = layer.register_forward_pre_hook(EngineHook(self._enter), with_kwargs=True)
            self._handles += [before, layer.register_forward_hook(EngineHook(self._leave), always_call=True)]
        for layer in self._outside:
            self._watchers[layer] = [
                layer.register_forward_pre_hook(EngineHook(self._inside)),
                layer.register_forward_hook(EngineHook(self._back_outside), always_call=True),
            ]

    def detach(self) -> None:
        for handle in [*self._handles, *(handle for handles in self._watchers.values() for handle in handles)]:
            handle.remove()
        self._handles, self._watchers = [], {}
        self._stop()

    def run(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a layer with a rule, its parameters being shared values in it."""
        parameters = {n: p for n, p in layer.named_parameters(recurse=False) if p.requires_grad}
        _substitute(layer, {n: share(p, self._operations) for n, p in parameters.items()})
        try:
            return layer.forward(*args, **kwargs)
        finally:
            _restore(layer, parameters)

    @contextmanager
    def again(self, size: int) -> Iterator[None]:
        """Around a backward pass, in which checkpointing calls layers again, of ``size`` samples."""
        self._operations.resume(size)
        with torch.enable_grad():
            self._start(self._module, {**self._own, **self._outside})
        try:
            yield
        finally:
            self._stop()

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entered[layer] = self._operations.serial
        if layer is self._module and self._scope in (None, layer):
            self._stop()  # of a last call that was interrupted
        if layer in self._substituted:
            self._again(layer)
        if self._scope is not None or not layer.training:
            return
        if not torch.is_grad_enabled():
            if layer is self._module:
                self._unroll_dropout()
            return
        inputs = list(tensors_in((args, kwargs)))
        if not inputs or inputs[0].dim() == 0 or len(inputs[0]) == 0:
            return
        if isinstance(layer, nn.RNNBase):  # torch has chosen its forward already
            raise ValueError(
                f"{type(layer).__name__} is called outside of the model's forward pass: let a module call it that "
                "holds it, such as nn.Sequential, and give that to the engine"
            )
        self._operations.begin(len(inputs[0]), inputs)
        whole = layer is self._module
        self._start(layer, {**self._own, **self._outside} if whole else {layer: self._own[layer]})

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._scope is not layer:
            if self._scope is None and layer is self._module:
                self._stop()  # of a pass without gradients
            return
        self._stop()
        if layer is self._module and not self._learned:
            self._learned = True
            used = self._operations.used
            for other in [o for o, parameters in self._outside.items() if not used & set(parameters.values())]:
                del self._outside[other]
                for handle in self._watchers.pop(other):
                    handle.remove()

    def _start(self, scope: nn.Module, layers: dict[nn.Module, dict[str, nn.Parameter]]) -> None:
        self._scope = scope
        self._substituted = layers
        for layer, parameters in layers.items():
            if layer.training and _routes(layer):
                self._replace_forward(layer, partial(self._one_by_one, layer, parameters, layer.forward))
            elif layer.training:
                self._share(layer, parameters)
                if isinstance(layer, nn.RNNBase):
                    if not _is_plain(layer):
                        name, _ = self.owners[next(iter(parameters.values()))]
                        raise ValueError(
                            f"layer {name!r} ({type(layer).__name__}) has a forward of its own, inside which its steps "
                            "cannot be followed: let a module hold a plain LSTM, GRU or RNN of torch.nn and do the "
                            "rest, or freeze its parameters"
                        )
                    self._replace_forward(layer, partial(unrolled, layer))

    def _unroll_dropout(self) -> None:
        """Let a pass without gradients, such as a probe, drop what the pass with them did at the same random state."""
        for layer in self._own:
            if isinstance(layer, nn.RNNBase) and layer.training and layer.dropout and _is_plain(layer):
                self._replace_forward(layer, partial(unrolled, layer))

    def _replace_forward(self, layer: nn.Module, forward: Any) -> None:
        self._forwards[layer] = layer.__dict__.get("forward")
        layer.__dict__["forward"] = forward

    def _again(self, layer: nn.Module) -> None:
        """Let what torch.func.functional_call put in the place of parameters be what ``layer`` computes with."""
        parameters = self._substituted[layer]
        if any((n in layer.__dict__) != (layer._parameters.get(n) is p) for n, p in parameters.items()):
            _restore(layer, parameters)
            if layer.training and not _routes(layer):
                self._share(layer, parameters)

    def _share(self, layer: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        # One that was replaced meanwhile, by torch.func.functional_call or for good, is not what is shared.
        same = {n: p for n, p in parameters.items() if p.requires_grad and layer._parameters.get(n) is p}
        _substitute(layer, {n: share(p, self._operations) for n, p in same.items()})

    def _stop(self) -> None:
        for layer, parameters in self._substituted.items():
            _restore(layer, parameters)
        for layer, own in self._forwards.items():
            _restore(layer, ("forward",))
            layer.__dict__.update({} if own is None else {"forward": own})
        self._scope, self._substituted, self._forwards = None, {}, {}

    def _one_by_one(
        self, layer: nn.Module, parameters: dict[str, nn.Parameter], forward: Any, *args: Tensor, **named: Tensor
    ) -> Tensor:
        """The output of a layer that treats each row by itself, from one forward pass for the rows of each sample."""
        size, given = self._operations.size, (*args, *named.values())
        if any(len(x) % size for x in given):
            return cast(Tensor, forward(*args, **named))  # in which no row can be followed: refused later
        trained = {n: p for n, p in parameters.items() if p.requires_grad}
        copies = {n: self._operations.copies(share(p, self._operations), *p.shape) for n, p in trained.items()}
        outputs, states = [], random_states(given[0].device)
        try:
            for i, rows in enumerate(zip(*(x.unflatten(0, (size, -1)) for x in given), strict=True)):
                layer.__dict__.update({n: each[i] for n, each in copies.items()})
                outputs.append(forward(*rows[: len(args)], **dict(zip(named, rows[len(args) :], strict=True))))
        finally:
            _restore(layer, copies)
        if any(not torch.equal(*pair) for pair in zip(states, random_states(given[0].device), strict=True)):
            name, _ = self.owners[next(iter(parameters.values()))]
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) draws random numbers, such as a dropout's, and would draw "
                "others for the rows of one sample than for all: set its dropout to 0, or freeze its parameters"
            )
        return torch.cat(outputs)

    def _inside(self, layer: nn.Module, args: Any) -> None:
        _restore(layer, self._outside[layer])

    def _back_outside(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._scope is self._module and layer.training:
            self._share(layer, self._outside.get(layer, {}))


def _is_plain(layer: nn.RNNBase) -> bool:
    """Whether it has no forward of its own."""
    return "forward" not in layer.__dict__ and type(layer).forward in _UNROLLED


def _routes(layer: nn.Module) -> bool:
    """Whether it is the experts of a mixture, which gather their rows from all samples."""
    return type(layer).__name__.endswith("Experts")


def _substitute(layer: nn.Module, values: dict[str, Shared]) -> None:
    """Let ``layer.name`` be ``values[name]``. Registered parameters, and so the state_dict, stay what they are."""
    # Python finds an entry of the instance's own dictionary before nn.Module looks among its parameters.
    layer.__dict__.update(values)


def _restore(layer: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        layer.__dict__.pop(name, None)
