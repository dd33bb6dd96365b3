"""Atomic file writes (a temporary file is renamed when it is complete): texts, tables, checkpoints of runs."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pandas as pd  # takes long to import, so only where a table is read


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the folder of ``path``; renamed to ``path`` after the block, removed if the block fails.

    Raises:
        OSError: the file could not be written, for example on a full disk; names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex}{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut may leave the new name with nothing in it
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # a failed write does not name its file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write the columns of a table as CSV, atomically."""
    with replacing(path) as temporary:
        table.to_csv(temporary, index=False)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, from the texts of its heading and rows."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Part of every key: with noise of another construction the same arguments give another result.
NOISE = "keyed ChaCha20"


def key_of(arguments: dict[str, Any]) -> str:
    """Hash of named arguments (numbers, strings, lists of them), whatever their order: 16 hexadecimal digits."""
    text = json.dumps([NOISE, arguments], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cached(folder: Path, compute: Callable[..., pd.DataFrame], **arguments: Any) -> pd.DataFrame:
    """``compute(**arguments)``, read from ``<folder>/<function>-<key>.csv`` if it was computed before.

    The key is :func:`key_of` the arguments, so the result must depend on nothing else.
    """
    import pandas as pd

    path = folder / f"{compute.__name__}-{key_of(arguments)}.csv"
    if not path.exists():
        frame = compute(**arguments)
        write_csv(path, frame)
    # Read back even when just computed, so that the first call returns the same values and types as later ones.
    return pd.read_csv(path)


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain values of an unfinished run to ``path``, atomically.

    The file is what ``torch.save`` writes, after its SHA-256, since ``torch.load`` does not notice all damage. If it
    cannot be written, say because the disk is full, a RuntimeWarning says so and the run goes on.
    """
    rest = BytesIO()  # not to the disk: if that is full, torch.save hides the OSError, and may end the process
    torch.save(dict(state), rest)
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(hashlib.sha256(rest.getbuffer()).digest() + rest.getbuffer())
    except OSError as error:
        message = f"no checkpoint was written to {path} ({error.strerror}); the run goes on, and tries again later"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The checkpoint, on the CPU, or None. A damaged file gives a RuntimeWarning, is removed, and counts as none."""
    if not path.exists():
        return None
    content = memoryview(path.read_bytes())
    if content[:32] == hashlib.sha256(content[32:]).digest():
        return torch.load(BytesIO(content[32:]), weights_only=True, map_location="cpu")
    warnings.warn(f"checkpoint {path} is damaged; the run starts from its beginning", RuntimeWarning, stacklevel=2)
    path.unlink()
    return None
