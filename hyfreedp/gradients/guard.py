"""A loss must not write into the model: it would write raw values, which the state_dict would publish.

Each pass must also start from the same state. So plain attributes of layers, and buffers that are not in the state_dict
(caches), are silently restored after each pass.
"""

from __future__ import annotations

import copy
import io
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.checks import listed
from hyfreedp.errors import Refused
from hyfreedp.pytorch.layers import layers_of

Place = tuple[nn.Module, str]


class ModelGuard:
    """Refuses passes that write into buffers or parameters of a module, or replace them; restores both.

    Between passes anything may change, as when a state is loaded. Tensors are compared by version counter and, if
    samples are computed one at a time, by value, since a write through ``.data``, which a map refuses, leaves no other
    trace. What ``get_extra_state`` of a layer returns is compared as pickled.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @contextmanager
    def unchanged(self, *, by_value: bool = False) -> Iterator[None]:
        """A context for passes: Refused, naming it, if they changed what is in the state_dict.

        With ``by_value`` a write that no version counter shows is found, too.
        """
        layers = layers_of(self._module)
        scripts = torch.jit.ScriptModule  # these keep their attributes elsewhere
        attributes = {layer: _contents(vars(layer)) for layer in layers if not isinstance(layer, scripts)}
        extra = {layer: _pickled(layer) for layer in layers if _defines(layer, "get_extra_state")}
        buffers, parameters = _tensors(layers, "_buffers"), _tensors(layers, "_parameters")
        tensors = buffers | parameters
        copied = tensors if by_value else buffers
        copies = {place: tensor.detach().clone() for place, tensor in copied.items()}
        versions = [tensor._version for tensor in tensors.values()]
        try:
            yield
        finally:
            changed = _put_back(attributes) + _put_back_extra(extra)
            for (place, tensor), version in zip(tensors.items(), versions, strict=True):
                if tensor._version == version and not (by_value and _bits_differ(tensor, copies[place])):
                    continue
                layer, name = place
                if name in layer._non_persistent_buffers_set:
                    layer._buffers[name] = copies[place]  # a backward pass may need the values of the other tensor
                    continue
                if place in copies:
                    tensor.data.copy_(copies[place])
                changed.append(place)
        if changed:
            paths = {layer: path for path, layer in self._module.named_modules()}
            names = [repr(f"{paths.get(layer, '?')}.{name}".lstrip(".")) for layer, name in changed]
            raise Refused(
                "the forward pass in train mode changed these buffers or parameters of the model: "
                f"{listed(names)}, which would publish raw data with the state_dict (undone but for what a script "
                "of samples that are mapped wrote into a parameter). Call "
                ".eval() of what keeps statistics, or replace it by a layer without; register a cache with "
                "persistent=False"
            )


def _contents(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The attributes of a layer, each with a copy if it is a list, set or dictionary, else with None."""
    return {name: (v, v.copy() if isinstance(v, dict | list | set) else None) for name, v in attributes.items()}


def _put_back(attributes: dict[nn.Module, dict[str, tuple[Any, Any]]]) -> list[Place]:
    """Restore attributes and their contents; returns parameters, persistent buffers and layers that were replaced."""
    changed = []
    for layer, kept in attributes.items():
        for registry in ("_parameters", "_buffers", "_modules"):
            here, (_, before) = getattr(layer, registry), kept[registry]
            names = [name for name in {**before, **here} if here.get(name) is not before.get(name)]
            changed += [(layer, name) for name in names if name not in layer._non_persistent_buffers_set]
        for value, content in kept.values():
            if content is None or _same_contents(value, content):
                continue
            value.clear()
            if isinstance(value, list):
                value.extend(content)
            else:
                value.update(content)
        now = vars(layer)
        if len(now) != len(kept) or any(now.get(name) is not value for name, (value, _) in kept.items()):
            now.clear()
            now.update({name: value for name, (value, _) in kept.items()})
    return changed


def _same_contents(here: Any, before: Any) -> bool:
    """Whether two lists, sets or dictionaries hold the same objects."""
    if len(here) != len(before):
        return False
    if isinstance(here, dict):
        return all(name in here and here[name] is value for name, value in before.items())
    if isinstance(here, set):
        return here == before
    return all(map(operator.is_, here, before))


def _tensors(layers: Iterable[nn.Module], registry: str) -> dict[Place, Tensor]:
    """The tensors in "_buffers" or "_parameters" of the layers."""
    return {(layer, name): t for layer in layers for name, t in getattr(layer, registry).items() if t is not None}


def _bits_differ(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one shape and type differ in a bit, of which 0.0 and -0.0 do, and equal NaNs do not."""
    bits = [t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (one, other)]
    return not torch.equal(*bits)


def _put_back_extra(before: dict[nn.Module, tuple[Any, bytes]]) -> list[Place]:
    """Restore extra states of layers that have ``set_extra_state``; returns all that were changed."""
    changed = [layer for layer, (_, mark) in before.items() if _pickled(layer)[1] != mark]
    for layer in changed:
        if _defines(layer, "set_extra_state"):
            layer.set_extra_state(before[layer][0])
    return [(layer, "get_extra_state()") for layer in changed]


def _defines(layer: nn.Module, method: str) -> bool:
    return getattr(type(layer), method) is not getattr(nn.Module, method)


def _pickled(layer: nn.Module) -> tuple[Any, bytes]:
    """A copy of a layer's extra state, and its pickled bytes."""
    state, file = copy.deepcopy(layer.get_extra_state()), io.BytesIO()
    torch.save(state, file)
    return state, file.getvalue()
