"""Checkpoints of unfinished runs: checksummed, the one before kept, read as tensors and plain values only.

A file is a line that says what it is, the SHA-256 of the rest, and the rest as ``torch.save`` writes it. So file and
checksum cannot be torn apart, and a file that was cut short or changed on the disk is noticed.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from hyfreedp.experiments.store.files import replacing

_TITLE = b"hyfreedp checkpoint 2\n"
_START_BYTES = len(_TITLE) + hashlib.sha256().digest_size


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint; the one that was there becomes the previous one.

    Args:
        path: of the checkpoint. At every moment a whole one is there or beside it, under ``<name>.previous``.
        state: tensors and plain values.

    Warns:
        RuntimeWarning: the file could not be written, for example on a full disk. What was there is still there, and
            a run had better go on than end.
    """
    rest = BytesIO()  # on a full disk torch.save would make its own error of an OSError, and may end the process
    torch.save(dict(state), rest)
    try:
        with replacing(path) as temporary:
            with temporary.open("wb") as file:
                file.write(_TITLE + hashlib.sha256(rest.getbuffer()).digest())
                file.write(rest.getbuffer())
            with suppress(FileNotFoundError):  # none yet, or it was damaged
                os.replace(path, _previous(path))
    except OSError as error:
        message = f"no checkpoint was written to {path} ({error.strerror}); the run goes on, and tries again later"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def load(path: Path) -> dict[str, Any] | None:
    """The newest checkpoint that is whole, on the CPU; None if there is none. Damaged ones are removed.

    Warns:
        RuntimeWarning: a checkpoint is damaged; says where the run starts instead.
    """
    candidates = [one for one in (path, _previous(path)) if one.exists()]
    for index, candidate in enumerate(candidates):
        with candidate.open("rb") as file:
            start, rest = file.read(_START_BYTES), BytesIO(file.read())
        if start == _TITLE + hashlib.sha256(rest.getbuffer()).digest():
            return torch.load(rest, weights_only=True, map_location="cpu")
        instead = "from the one before it" if index + 1 < len(candidates) else "from its beginning"
        warnings.warn(f"checkpoint {candidate} is damaged; the run starts {instead}", RuntimeWarning, stacklevel=2)
        candidate.unlink()
    return None


def discard(path: Path) -> None:
    """Remove a checkpoint and the previous one, if they are there; where that is not allowed, they stay."""
    for one in (path, _previous(path)):
        with suppress(OSError):
            one.unlink()


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")
