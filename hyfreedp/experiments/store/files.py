"""Files that are whole or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

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
