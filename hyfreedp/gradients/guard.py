"""A loss must not write into the model: it would write raw values, which the state_dict would publish.

Each pass must also start from the same state. So plain attributes of layers, buffers that are not in the state_dict
(caches), and which parameters require gradients are silently restored after each pass.
"""

from __future__ import annotations

import copy
import io
import operator
from collections.abc import Iterator
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


@contextmanager
def unchanged(module: nn.Module, *, by_value: bool = False) -> Iterator[None]:
    """A context for passes: Refused, naming it, if they write into a buffer or parameter, or replace it; restores both.

    Buffers are compared by value, since a write through a NumPy array that shares their memory leaves no other trace,
    and what ``get_extra_state`` of a layer returns as pickled. Parameters are compared by version counter, and with
    ``by_value`` by value, too: a loss of samples one at a time may write through ``.data``, which a map refuses.
    """
    layers = layers_of(module)
    scripts = torch.jit.ScriptModule  # these keep their attributes elsewhere
    contents = {layer: _contents(layer) for layer in layers if not isinstance(layer, scripts)}
    extra = {layer: _pickled(layer) for layer in layers if _defines(layer, "get_extra_state")}
    buffers, parameters = (
        {(layer, name): t for layer in layers for name, t in getattr(layer, kind).items() if t is not None}
        for kind in ("_buffers", "_parameters")
    )
    versions = [(place, t, t._version) for place, t in (buffers | parameters).items()]
    copies = {place: t.detach().clone() for place, t in (buffers | parameters if by_value else buffers).items()}
    require_gradients = [(p, p.requires_grad) for p in parameters.values()]
    try:
        yield
    finally:
        changed = [place for layer in contents for place in _put_back(layer, *contents[layer])]
        changed += [(layer, "get_extra_state()") for layer in extra if _put_back_extra(layer, *extra[layer])]
        for p, required in require_gradients:
            p.requires_grad_(required)
        for place, tensor, version in versions:
            layer, name = place
            before = copies.get(place)
            if tensor._version == version and (before is None or not _bits_differ(tensor, before)):
                continue
            if name in layer._non_persistent_buffers_set:
                layer._buffers[name] = before  # a backward pass may need the values of the other tensor
                continue
            if before is not None:
                tensor.data.copy_(before)
            changed.append(place)
    if changed:
        paths = {layer: path for path, layer in module.named_modules()}
        names = [repr(f"{paths.get(layer, '?')}.{name}".lstrip(".")) for layer, name in changed]
        raise Refused(
            "the forward pass in train mode changed these buffers or parameters of the model: "
            f"{listed(names)}, which would publish raw data with the state_dict (undone but for what a script "
            "of samples that are mapped wrote into a parameter). Call .eval() of what keeps statistics, or replace "
            "it by a layer without; register a cache with persistent=False"
        )


def _contents(layer: nn.Module) -> Contents:
    """The attributes of a layer, and those that are lists, sets or dictionaries, each with a copy."""
    attributes = dict(vars(layer))
    containers = {name: v for name, v in attributes.items() if isinstance(v, _CONTAINERS)}
    return attributes, {name: (v, v.copy() if v else ()) for name, v in containers.items()}


def _put_back(layer: nn.Module, attributes: dict[str, Any], containers: dict[str, tuple[Any, Any]]) -> list[Place]:
    """Restore attributes and their contents; returns parameters, persistent buffers and layers that were replaced."""
    now, changed = vars(layer), []
    for name, (container, before) in containers.items():
        if name in _REGISTRIES and not _same_contents(here := now.get(name, ()), before):
            old, new = dict(before), dict(here)
            changed += [(layer, name) for name in old | new if old.get(name) is not new.get(name)]
        if not _same_contents(container, before):
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)
    if not _same_contents(now, attributes):
        now.clear()
        now.update(attributes)
    return [(layer, name) for layer, name in changed if name not in layer._non_persistent_buffers_set]


def _same_contents(here: Any, before: Any) -> bool:
    """Whether two lists, sets or dictionaries hold the same objects, in the same order."""
    if not here or not before:
        return not here and not before
    if len(here) != len(before) or not all(map(operator.is_, here, before)):  # of a dictionary these are the keys
        return False
    return not isinstance(here, dict) or all(map(operator.is_, here.values(), before.values()))


def _bits_differ(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one shape and type differ in a bit, of which 0.0 and -0.0 do, and equal NaNs do not.

    False for sparse ones, for which only the version counter tells.
    """
    if one.layout != torch.strided:
        return False
    bits = [t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (one, other)]
    return not torch.equal(*bits)


def _put_back_extra(layer: nn.Module, state: Any, pickled: bytes) -> bool:
    """Whether a layer's extra state was changed; restores it if the layer has ``set_extra_state``."""
    if changed := _pickled(layer)[1] != pickled:
        if _defines(layer, "set_extra_state"):
            layer.set_extra_state(state)
    return changed


def _defines(layer: nn.Module, method: str) -> bool:
    return getattr(type(layer), method) is not getattr(nn.Module, method)


def _pickled(layer: nn.Module) -> tuple[Any, bytes]:
    """A copy of a layer's extra state, and its pickled bytes."""
    state, file = copy.deepcopy(layer.get_extra_state()), io.BytesIO()
    torch.save(state, file)
    return state, file.getvalue()
