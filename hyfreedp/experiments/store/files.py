"""Files that are whole or absent, written under a temporary name, then renamed: texts, tables, checkpoints of runs."""

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
    import pandas as pd  # loaded by those who have a table


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, renamed to it when the block ends well and removed when it fails.

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
        if error.filename is None and error.errno is not None:  # as a failed write says only why
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
    """A table of texts in Markdown, as a page of docs/ has it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Part of every name: what was computed with noise of another construction is another result.
NOISE = "keyed ChaCha20"


def key_of(arguments: dict[str, Any]) -> str:
    """Hash of plain arguments (numbers, strings, lists of them), independent of their order."""
    text = json.dumps([NOISE, arguments], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cached(folder: Path, compute: Callable[..., pd.DataFrame], **arguments: Any) -> pd.DataFrame:
    """``compute(**arguments)``, read from ``<folder>/<function>-<key>.csv`` if it was computed before.

    The result of the named function must depend on nothing but its arguments, plain values which make the key.
    """
    import pandas as pd

    path = folder / f"{compute.__name__}-{key_of(arguments)}.csv"
    if not path.exists():
        frame = compute(**arguments)
        write_csv(path, frame)
    # Read back even when just computed, so that a second run sees the very same values and types.
    return pd.read_csv(path)


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain values of an unfinished run in place of what was there.

    The file is the SHA-256 of the rest, and the rest as ``torch.save`` writes it, which itself notices no changed bit.
    Where it cannot be written, as on a full disk, a RuntimeWarning says so: a run had better go on than end.
    """
    rest = BytesIO()  # on a full disk torch.save would make its own error of an OSError, and may end the process
    torch.save(dict(state), rest)
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(hashlib.sha256(rest.getbuffer()).digest() + rest.getbuffer())
    except OSError as error:
        message = f"no checkpoint was written to {path} ({error.strerror}); the run goes on, and tries again later"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The checkpoint, on the CPU; None if there is none, or if it is damaged, with a RuntimeWarning, and removed."""
    if not path.exists():
        return None
    content = memoryview(path.read_bytes())
    if content[:32] == hashlib.sha256(content[32:]).digest():
        return torch.load(BytesIO(content[32:]), weights_only=True, map_location="cpu")
    warnings.warn(f"checkpoint {path} is damaged; the run starts from its beginning", RuntimeWarning, stacklevel=2)
    path.unlink()
    return None
