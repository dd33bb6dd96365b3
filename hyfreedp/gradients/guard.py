"""Refuses a loss that writes into the model: it would write raw values, which the state_dict would publish.

Each pass must also start from the same state. So what is not in the state_dict is silently restored after each pass:
attributes of layers (tensors, too), buffers that are caches, and which parameters require gradients. The cache of an
autocast around the step, as in Lightning, is cleared, since it would not notice that a look has moved the weights.
"""

import operator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyfreedp.checks import listed
from hyfreedp.data.batches import is_plain
from hyfreedp.errors import Refused

Place = tuple[nn.Module, str]


class unchanged(AbstractContextManager[None]):
    """A context for passes: if they write into a buffer or parameter, or replace it, it restores it and raises Refused.

    Buffers are compared by value, since a write through a NumPy array that shares their memory leaves no other trace.
    Parameters are compared by version counter, and if ``by_value`` also by value, for samples computed one at a time,
    whose loss may write through ``.data`` (a map refuses that).
    """

    def __init__(self, module: nn.Module, *, by_value: bool = False) -> None:
        torch.clear_autocast_cache()
        groups: Any = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]  # of processes
        self._messages = [(group, group._get_sequence_number_for_group()) for group in groups]
        layers = list(module.modules())
        self._module, self._registered = module, _registered(layers)
        self._versions = {place: t._version for place, t in self._registered.items()}
        compared = [(place, t) for place, t in self._registered.items() if by_value or place[1] in place[0]._buffers]
        self._copies = {place: t.detach().clone() for place, t in compared}
        self._require_gradients = [(p, p.requires_grad) for p in module.parameters()]
        containers = [container for layer in layers for container in _containers(layer)]
        self._contents = [(container, container.copy()) for container in containers if container]
        self._empty = [container for container in containers if not container]
        ids = {id(t) for t in self._registered.values()}
        others = [(old, key, t) for _, old in self._contents for key, t in _plain_tensors(old) if id(t) not in ids]
        self._others = [(old, key, t, t.detach().clone()) for old, key, t in others]  # of attributes

    def __exit__(self, kind: Any, *_: Any) -> None:
        changed = self._restore()
        if kind is None and any(group._get_sequence_number_for_group() != sent for group, sent in self._messages):
            raise Refused(
                "the loss (or weight) of a record met other processes, which hold other records, as by all_reduce: "
                "leave that out, since gradients are added up over all processes anyway"
            )
        if changed and kind is None:
            paths = {layer: path for path, layer in self._module.named_modules()}
            names = [repr(f"{paths.get(layer, '?')}.{name}".lstrip(".")) for layer, name in changed]
            raise Refused(
                "the forward pass in train mode changed these buffers or parameters of the model: "
                f"{listed(names)}, which would publish raw data with the state_dict (undone but for what a view or a "
                "script of mapped samples wrote into a parameter). Call .eval() of what keeps statistics, or replace "
                "it by a layer without; register a cache with persistent=False"
            )

    def _restore(self) -> list[Place]:
        """Undo all changes; returns the places of changed parameters and buffers without caches."""
        changed: list[Place] = []
        for old, key, t, copy in self._others:
            if bits_differ(t, copy):
                old[key] = copy
        differing: list[Any] = [(here, old) for here, old in self._contents if not _same_contents(here, old)]
        differing += [(here, ()) for here in self._empty if here]
        if differing:
            before, now = self._registered, _registered([*self._module.modules()])
            changed += [place for place in now | before if now.get(place) is not before.get(place)]
        for container, old in differing:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(old)
        for p, required in self._require_gradients:
            p.requires_grad_(required)
        for place, t in self._registered.items():
            (layer, name), kept = place, self._copies.get(place)
            if isinstance(layer, torch.jit.ScriptModule) and getattr(layer, name) is not t:
                setattr(layer, name, t)
            elif t._version == self._versions[place] and (kept is None or not bits_differ(t, kept)):
                continue
            changed.append(place)
            if name in layer._non_persistent_buffers_set:
                layer._buffers[name] = kept  # a backward pass may need the values of the other tensor
            elif kept is not None:
                t.data.copy_(kept)
        return [(layer, name) for layer, name in changed if name not in layer._non_persistent_buffers_set]


def _containers(layer: nn.Module) -> list[Any]:
    """A layer's ``vars``, and its attributes that are lists, sets or dictionaries, such as ``_buffers``."""
    if isinstance(layer, torch.jit.ScriptModule):  # it keeps its attributes elsewhere
        return []
    attributes = vars(layer)
    return [attributes, *[value for value in attributes.values() if isinstance(value, (dict, list, set))]]


def _plain_tensors(container: Any) -> list[tuple[Any, Tensor]]:
    """The plain tensors (no parameters) in a list or dictionary, each with its index or key."""
    if isinstance(container, set):
        return []
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, t) for key, t in items if type(t) is Tensor and is_plain(t)]


def _registered(layers: list[nn.Module]) -> dict[Place, Tensor]:
    """Buffers, caches (non-persistent ones) among them, and parameters."""
    kinds = [(layer, tensors) for layer in layers for tensors in (layer._buffers, layer._parameters)]
    return {(layer, name): t for layer, tensors in kinds for name, t in tensors.items() if t is not None}


def _same_contents(here: Any, before: Any) -> bool:
    """Whether two lists, sets or dictionaries hold the same objects, in the same order."""
    if len(here) != len(before) or not all(map(operator.is_, here, before)):  # of a dictionary these are the keys
        return False
    return not isinstance(here, dict) or all(map(operator.is_, here.values(), before.values()))


def bits_differ(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and type differ in a bit: 0.0 and -0.0 do, equal NaNs do not."""
    if not is_plain(a):  # for sparse tensors, say, there is only the version counter
        return False
    bits = [t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (a, b)]
    return not torch.equal(*bits)
