"""A forward pass must not write into the model: what it writes is a raw value that the state_dict would publish."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.noise.cipher import derive, universal_hashes
from hyfreedp.running.checks import listed
from hyfreedp.running.layers import layers_of

_KEY = derive(b"", "parameters")  # not secret: nobody chooses what a model writes against it


class BufferGuard:
    """Refuses forward passes that change, add or replace a buffer, and undoes what they did; or change a parameter.

    Between passes all may change, as when a state is loaded. Buffers are compared by value, since writing through
    ``.data``, as codebooks do, leaves no other trace; and what ``get_extra_state`` of a layer puts into the state_dict,
    as it is pickled. Parameters are large: they are compared by version counter or, where that is asked for, by a
    hash of their values. Values kept elsewhere, as plain attributes, are not seen.

    Buffers that are no part of the state_dict may change: caches, which grow with the longest sample. They are put
    back without a word, and with them the plain attributes of their layer, which say what is cached. So each pass
    starts from the same state, and none depends on records of those before it.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @contextmanager
    def unchanged(self, *, by_value: bool = False) -> Iterator[None]:
        """Around forward passes, and backward ones.

        Args:
            by_value: compare the values of parameters too.

        Raises:
            ValueError: it changed something, which is named. Buffers are as they were before, and extra states where
                there is a ``set_extra_state``.
        """
        layers = layers_of(self._module)
        before = {
            (layer, name): (buffer, None if buffer is None else buffer.detach().clone())
            for layer in layers
            for name, buffer in layer._buffers.items()
        }
        attributes = {layer: vars(layer).copy() for layer in layers}
        extra = {layer: _pickled(layer) for layer in layers if _defines(layer, "get_extra_state")}
        parameters = _parameters(layers, by_value)
        try:
            yield
        finally:
            changed = self._restored(before, attributes) + _restored_extra(extra)
        after = _parameters(layers, by_value)
        changed += [place for place, mark in parameters.items() if after.get(place) != mark]
        if changed:
            paths = {layer: path for path, layer in self._module.named_modules()}
            names = [repr(f"{paths[layer]}.{name}".lstrip(".")) for layer, name in changed]
            raise ValueError(
                "the forward pass in train mode changed these buffers or parameters of the model: "
                f"{listed(names)}, which would publish raw data with the state_dict (in "
                "buffers it was undone). Call .eval() of what keeps statistics, or replace it by a layer without; "
                "register a cache with persistent=False"
            )

    @torch.no_grad()
    def _restored(
        self,
        before: dict[tuple[nn.Module, str], tuple[Tensor | None, Tensor | None]],
        attributes: dict[nn.Module, dict[str, Any]],
    ) -> list[tuple[nn.Module, str]]:
        """Undo what was done to buffers; those of them that the state_dict has."""
        present = [(m, name) for m in layers_of(self._module) for name, _ in m._buffers.items()]  # also of scripts
        changed = [place for place in present if place not in before]
        for layer, name in changed:
            del layer._buffers[name]
        flags = [(buffer != kept).any() for buffer, kept in before.values() if buffer is not None and kept is not None]
        # Read at once: each reading waits for the device.
        differ = iter(torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else ())
        for (layer, name), (buffer, kept) in before.items():
            same = layer._buffers.get(name) is buffer
            layer._buffers[name] = buffer
            if buffer is not None and kept is not None and next(differ):
                same = bool((buffer.isnan() & kept.isnan() | (buffer == kept)).all()) and same
                if name in layer._non_persistent_buffers_set:
                    layer._buffers[name] = kept  # a backward pass may need what the other holds now
                else:
                    buffer.copy_(kept)
            if not same:
                changed.append((layer, name))
        for layer in {layer for layer, _ in changed}:
            vars(layer).clear()
            vars(layer).update(attributes[layer])
        return [(layer, name) for layer, name in changed if name not in layer._non_persistent_buffers_set]


def _restored_extra(before: dict[nn.Module, tuple[Any, bytes]]) -> list[tuple[nn.Module, str]]:
    """Undo what was done to extra states, where that can be."""
    changed = [layer for layer, (_, mark) in before.items() if _pickled(layer)[1] != mark]
    for layer in changed:
        if _defines(layer, "set_extra_state"):
            layer.set_extra_state(before[layer][0])
    return [(layer, "get_extra_state()") for layer in changed]


def _parameters(layers: Iterable[nn.Module], by_value: bool) -> dict[tuple[nn.Module, str], tuple[int, int | bytes]]:
    """What tells whether a parameter was replaced or written to; by value, one may be written to and restored."""
    found = {(layer, name): p for layer in layers for name, p in layer._parameters.items() if p is not None}
    with torch._C.DisableTorchFunctionSubclass():  # they may be followed
        marks: list[Any] = (
            universal_hashes([*found.values()], _KEY) if by_value else [p._version for p in found.values()]
        )
        return {place: (id(p), mark) for (place, p), mark in zip(found.items(), marks, strict=True)}


def _defines(layer: nn.Module, method: str) -> bool:
    return getattr(type(layer), method) is not getattr(nn.Module, method)


def _pickled(layer: nn.Module) -> tuple[Any, bytes]:
    """A copy of a layer's extra state, and what a file of it would hold."""
    state, file = copy.deepcopy(layer.get_extra_state()), io.BytesIO()
    torch.save(state, file)
    return state, file.getvalue()
