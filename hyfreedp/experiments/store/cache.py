"""Tables that notebooks compute once: a killed or repeated notebook reads what was finished."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from hyfreedp.experiments.store.files import write_csv

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
    path = folder / f"{compute.__name__}-{key_of(arguments)}.csv"
    if not path.exists():
        frame = compute(**arguments)
        write_csv(path, frame)
    # Read back even when just computed, so that a second run sees the very same values and types.
    return pd.read_csv(path)
