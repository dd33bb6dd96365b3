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
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

import torch

from hyfreedp.experiments.store.files import replacing

_TITLE = b"hyfreedp checkpoint 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint; the one that was there becomes the previous one.

    Args:
        path: of the checkpoint. At every moment a whole one is there or beside it, under ``<name>.previous``.
        state: tensors and plain values.

    Warns:
        RuntimeWarning: the file could not be written, for example on a full disk. What was there is still there, and
            a run had better go on than end.
    """
    try:
        with replacing(path) as temporary:
            with temporary.open("wb") as file:
                _write(file, state)
            with suppress(FileNotFoundError):  # none yet, or it was damaged
                os.replace(path, _previous(path))
    except OSError as error:
        message = f"no checkpoint was written to {path} ({error.strerror}); the run goes on, and tries again later"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def load(path: Path) -> dict[str, Any] | None:
    """The newest checkpoint that is whole, on the CPU; None if there is none. Damaged ones are removed.

    Args:
        path: as for :func:`save`.

    Warns:
        RuntimeWarning: a checkpoint is damaged; says where the run starts instead.
    """
    candidates = [one for one in (path, _previous(path)) if one.exists()]
    for index, candidate in enumerate(candidates):
        with candidate.open("rb") as file:
            if _is_whole(file):
                return torch.load(file, weights_only=True, map_location="cpu")
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


class _Hashed:
    """A file for ``torch.save``, which would make its own error of an OSError, and may end the process in cleaning up:
    the first one is kept for later instead.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        self.hash.update(data)
        return len(data)

    def flush(self) -> None:
        """Leave that to the closing of the file."""


def _write(file: IO[bytes], state: Mapping[str, Any]) -> None:
    file.write(_TITLE + bytes(_DIGEST_BYTES))
    hashed = _Hashed(file)
    torch.save(dict(state), cast(IO[bytes], hashed))  # which needs no more than these two methods
    if hashed.error is not None:
        raise hashed.error
    file.seek(len(_TITLE))
    file.write(hashed.hash.digest())


def _is_whole(file: BufferedReader) -> bool:
    """Whether a file holds what was written; it is then read up to the beginning of the rest."""
    start = file.read(len(_TITLE) + _DIGEST_BYTES)
    whole = start == _TITLE + hashlib.file_digest(file, "sha256").digest()
    file.seek(len(start))
    return whole
