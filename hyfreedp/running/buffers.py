"""A forward pass must not write into the model: what it writes is a raw value that the state_dict would publish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hyfreedp.noise.cipher import derive, universal_hashes
from hyfreedp.running.checks import listed

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
        before = {
            (layer, name): (buffer, None if buffer is None else buffer.detach().clone())
            for layer in self._module.modules()
            for name, buffer in layer._buffers.items()
        }
        parameters = self._parameters(by_value)
        try:
            yield
        finally:
            changed = self._restored(before)
        after = self._parameters(by_value)
        changed += [name for name, mark in parameters.items() if after.get(name) != mark]
        if changed:
            raise ValueError(
                "the forward pass in train mode changed these buffers or parameters of the model: "
                f"{listed([repr(name) for name in changed])}, which would publish raw data with the state_dict (in "
                "buffers it was undone). Call .eval() of what keeps statistics, or replace it by a layer without"
            )

    def _parameters(self, by_value: bool) -> dict[str, tuple[int, int, bytes]]:
        parameters = dict(self._module.named_parameters())
        hashes = universal_hashes(list(parameters.values()), _KEY) if by_value else [b""] * len(parameters)
        return {name: (id(p), p._version, mark) for (name, p), mark in zip(parameters.items(), hashes, strict=True)}

    @torch.no_grad()
    def _restored(self, before: dict[tuple[nn.Module, str], tuple[Tensor | None, Tensor | None]]) -> list[str]:
        """Undo what was done to buffers; their names."""
        changed = [(m, name) for m in self._module.modules() for name in m._buffers if (m, name) not in before]
        for layer, name in changed:
            del layer._buffers[name]
        flags = [(buffer != copy).any() for buffer, copy in before.values() if buffer is not None and copy is not None]
        # Read at once: each reading waits for the device.
        differ = iter(torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else ())
        for (layer, name), (buffer, copy) in before.items():
            same = layer._buffers.get(name) is buffer
            layer._buffers[name] = buffer
            if buffer is not None and copy is not None and next(differ):
                same = bool((buffer.isnan() & copy.isnan() | (buffer == copy)).all()) and same
                buffer.copy_(copy)
            if not same:
                changed.append((layer, name))
        paths = {layer: path for path, layer in self._module.named_modules()}
        return [f"{paths[layer]}.{name}".lstrip(".") for layer, name in changed]
