"""Checkpoints of unfinished runs: checksummed, whole or absent, read as tensors and plain values only.

A file is a line that says what it is, the SHA-256 of the rest, and the rest as ``torch.save`` writes it. So file and
checksum cannot be torn apart, and a file that was cut short or changed on the disk is noticed.
"""

from __future__ import annotations

import hashlib
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
    """Write a checkpoint of tensors and plain values in place of the one that was there.

    Where it cannot be written, as on a full disk, a RuntimeWarning says so: a run had better go on than end.
    """
    rest = BytesIO()  # on a full disk torch.save would make its own error of an OSError, and may end the process
    torch.save(dict(state), rest)
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(_TITLE + hashlib.sha256(rest.getbuffer()).digest() + rest.getbuffer())
    except OSError as error:
        message = f"no checkpoint was written to {path} ({error.strerror}); the run goes on, and tries again later"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def load(path: Path) -> dict[str, Any] | None:
    """The checkpoint, on the CPU; None if there is none, or if it is damaged, with a RuntimeWarning, and removed."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        start, rest = file.read(_START_BYTES), BytesIO(file.read())
    if start == _TITLE + hashlib.sha256(rest.getbuffer()).digest():
        return torch.load(rest, weights_only=True, map_location="cpu")
    warnings.warn(f"checkpoint {path} is damaged; the run starts from its beginning", RuntimeWarning, stacklevel=2)
    path.unlink()
    return None


def discard(path: Path) -> None:
    """Remove a checkpoint, if it is there; where that is not allowed, it stays."""
    with suppress(OSError):
        path.unlink()
