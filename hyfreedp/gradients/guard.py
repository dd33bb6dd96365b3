"""A loss must not write into the model: it would write raw values, which the state_dict would publish.

Each pass must also start from the same state. So plain attributes of layers, buffers that are not in the state_dict
(caches), and which parameters require gradients are silently restored after each pass.
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
Contents = tuple[dict[str, Any], dict[str, tuple[Any, Any]]]
_CONTAINERS = (dict, list, set)
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class ModelGuard:
    """Refuses passes that write into buffers or parameters of a module, or replace them; restores both.

    Between passes anything may change, as when a state is loaded. Buffers are compared by value, since a write through
    a NumPy array that shares their memory leaves no other trace. Parameters are compared by version counter and, if
    samples are computed one at a time, by value, since they may write through ``.data``, which a map refuses. What
    ``get_extra_state`` of a layer returns is compared as pickled.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @contextmanager
    def unchanged(self, *, by_value: bool = False) -> Iterator[None]:
        """A context for passes: Refused, naming it, if they changed what is in the state_dict.

        With ``by_value`` a write into a parameter that no version counter shows is found, too.
        """
        layers = layers_of(self._module)
        scripts = torch.jit.ScriptModule  # these keep their attributes elsewhere
        contents = {layer: _contents(layer) for layer in layers if not isinstance(layer, scripts)}
        extra = {layer: _pickled(layer) for layer in layers if _defines(layer, "get_extra_state")}
        buffers, parameters = _tensors(layers, "_buffers"), _tensors(layers, "_parameters")
        tensors = buffers | parameters
        copies = {place: t.detach().clone() for place, t in (tensors if by_value else buffers).items()}
        versions = [tensor._version for tensor in tensors.values()]
        require_gradients = [tensor.requires_grad for tensor in parameters.values()]
        try:
            yield
        finally:
            changed = _put_back(contents) + _put_back_extra(extra)
            for tensor, required in zip(parameters.values(), require_gradients, strict=True):
                tensor.requires_grad_(required)
            for (place, tensor), version in zip(tensors.items(), versions, strict=True):
                if tensor._version == version and not (place in copies and _bits_differ(tensor, copies[place])):
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


def _contents(layer: nn.Module) -> Contents:
    """The attributes of a layer, and those that are lists, sets or dictionaries, each with a copy."""
    attributes = dict(vars(layer))
    containers = {name: v for name, v in attributes.items() if isinstance(v, _CONTAINERS)}
    return attributes, {name: (v, v.copy() if v else ()) for name, v in containers.items()}


def _put_back(contents: dict[nn.Module, Contents]) -> list[Place]:
    """Restore attributes and their contents; returns parameters, persistent buffers and layers that were replaced."""
    changed = []
    for layer, (attributes, containers) in contents.items():
        now = vars(layer)
        for name, (container, before) in containers.items():
            here = now.get(name, ())
            if name in _REGISTRIES and not _same_contents(here, before):
                old, new = dict(before), dict(here)
                names = [name for name in old | new if old.get(name) is not new.get(name)]
                changed += [(layer, name) for name in names if name not in layer._non_persistent_buffers_set]
            if not _same_contents(container, before):
                container.clear()
                if isinstance(container, list):
                    container.extend(before)
                else:
                    container.update(before)
        if not _same_contents(now, attributes):
            now.clear()
            now.update(attributes)
    return changed


def _same_contents(here: Any, before: Any) -> bool:
    """Whether two lists, sets or dictionaries hold the same objects, in the same order but for sets."""
    if not here or not before:
        return not here and not before
    if len(here) != len(before):
        return False
    if isinstance(here, set):
        return bool(here == before)
    same = all(map(operator.is_, here, before))  # of a dictionary these are the keys
    return same and not (isinstance(here, dict) and any(map(operator.is_not, here.values(), before.values())))


def _tensors(layers: Iterable[nn.Module], registry: str) -> dict[Place, Tensor]:
    """The tensors in "_buffers" or "_parameters" of the layers."""
    return {(layer, name): t for layer in layers for name, t in getattr(layer, registry).items() if t is not None}


def _bits_differ(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one shape and type differ in a bit, of which 0.0 and -0.0 do, and equal NaNs do not.

    False for sparse ones, for which only the version counter tells.
    """
    if one.layout != torch.strided:
        return False
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
