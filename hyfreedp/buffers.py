"""A forward pass must not write into the model: what it writes is a raw value that the state_dict would publish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hyfreedp.checks import listed
from hyfreedp.cipher import derive, universal_hashes

_KEY = derive(b"", "parameters")  # not secret: nobody chooses what a model writes against it


class BufferGuard:
    """Refuses forward passes that change, add or replace a buffer, and undoes what they did; or change a parameter.

    Between passes all may change, as when a state is loaded. Buffers are compared by value, since writing through
    ``.data``, as codebooks do, leaves no other trace. Parameters are large: they are compared by version counter, and
    by a hash of their values where that is asked for. Values kept elsewhere, as plain attributes, are not seen.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @contextmanager
    def unchanged(self, *, by_value: bool = False) -> Iterator[None]:
        """Around a forward pass.

        Args:
            by_value: compare the values of parameters too.

        Raises:
            ValueError: it changed something, which is named. Buffers are as they were before.
        """
        before = [
            (layer, name, buffer, None if buffer is None else buffer.detach().clone())
            for layer in self._module.modules()
            for name, buffer in layer._buffers.items()
        ]
        parameters = self._parameters(by_value)
        try:
            yield
        finally:
            added = self._added(before)
            changed = [*added, *self._restored(before)]
        after = self._parameters(by_value)
        changed += [name for name, mark in parameters.items() if after.get(name) != mark]
        if changed:
            raise ValueError(
                "the forward pass in train mode changed these buffers or parameters of the model: "
                f"{listed([repr(name) for name in changed])}. What it writes there is computed from raw data and would "
                "be published with the state_dict; in buffers it was undone. Freeze what keeps such statistics by "
                "calling its .eval(), or replace it by a layer without; initialise nothing from the data"
            )

    def _parameters(self, by_value: bool) -> dict[str, tuple[int, int, bytes]]:
        parameters = dict(self._module.named_parameters())
        hashes = universal_hashes(list(parameters.values()), _KEY) if by_value else [b""] * len(parameters)
        return {name: (id(p), p._version, mark) for (name, p), mark in zip(parameters.items(), hashes, strict=True)}

    def _name(self, layer: nn.Module, name: str) -> str:
        path = next(path for path, other in self._module.named_modules() if other is layer)
        return f"{path}.{name}".lstrip(".")

    def _added(self, before: list[tuple[nn.Module, str, Tensor | None, Tensor | None]]) -> list[str]:
        known = {(id(layer), name) for layer, name, _, _ in before}
        new = [(m, name) for m in self._module.modules() for name in m._buffers if (id(m), name) not in known]
        for layer, name in new:
            del layer._buffers[name]
        return [self._name(layer, name) for layer, name in new]

    @torch.no_grad()
    def _restored(self, before: list[tuple[nn.Module, str, Tensor | None, Tensor | None]]) -> list[str]:
        changed = []
        flags = [(buffer != copy).any() for _, _, buffer, copy in before if buffer is not None and copy is not None]
        # Read at once: each reading waits for the device.
        differ = iter(torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else ())
        for layer, name, buffer, copy in before:
            same = layer._buffers.get(name) is buffer
            layer._buffers[name] = buffer
            if buffer is not None and copy is not None and next(differ):
                same = bool((buffer.isnan() & copy.isnan() | (buffer == copy)).all()) and same
                buffer.copy_(copy)
            if not same:
                changed.append(self._name(layer, name))
        return changed
