"""Buffers must not learn: what a forward pass writes into one is a raw value that the state_dict would publish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class BufferGuard:
    """Refuses forward passes that change, add or replace a buffer, and undoes what they did.

    Between passes buffers may change, as when a state is loaded. A comparison costs a look at each buffer's version
    counter; a copy is taken only of those that have changed since the last one. Values kept elsewhere than in
    registered buffers, as plain attributes of the model, are not seen.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[str, tuple[Tensor, int, Tensor]] = {}  # the buffer, its version, a copy

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around a forward pass.

        Raises:
            ValueError: it changed buffers, which are named; all are as they were before.
        """
        before = dict(self._module.named_buffers())
        for name, buffer in before.items():
            if not self._same(name, buffer):
                self._known[name] = (buffer, buffer._version, buffer.detach().clone())
        self._known = {name: self._known[name] for name in before}
        try:
            yield
        finally:
            changed = self._restore()
        if changed:
            raise ValueError(
                f"the forward pass in train mode changed these buffers of the model: {', '.join(map(repr, changed))}. "
                "What it writes there is computed from raw data and would be published with the state_dict; it was "
                "undone. Freeze what keeps such statistics by calling its .eval(), or replace it by a layer without"
            )

    def _same(self, name: str, buffer: Tensor) -> bool:
        known = self._known.get(name)
        return known is not None and known[0] is buffer and known[1] == buffer._version

    @torch.no_grad()
    def _restore(self) -> list[str]:
        after = dict(self._module.named_buffers())
        changed = [name for name in after if name not in self._known]
        for name in changed:
            owner, _, last = name.rpartition(".")
            del self._module.get_submodule(owner)._buffers[last]
        for name, (buffer, _, copy) in self._known.items():
            if name in after and self._same(name, after[name]):
                continue
            changed.append(name)
            buffer.copy_(copy)
            owner, _, last = name.rpartition(".")
            self._module.get_submodule(owner)._buffers[last] = buffer
            self._known[name] = (buffer, buffer._version, copy)
        return changed
