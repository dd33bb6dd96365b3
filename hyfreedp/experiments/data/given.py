"""Files that the user has: looked up in ``$HYFREEDP_DATA``."""

from __future__ import annotations

import os
from pathlib import Path


def given(*names: str) -> Path | None:
    """The first of these files that is there, each named by its path below ``$HYFREEDP_DATA``."""
    folder = os.environ.get("HYFREEDP_DATA")
    return next((path for name in names if (path := Path(folder, name)).exists()), None) if folder else None


def looked_at() -> str:
    """Where that was, for the sentence that says what is missing."""
    folder = os.environ.get("HYFREEDP_DATA")
    return f"in HYFREEDP_DATA={folder}" if folder else "on this machine (HYFREEDP_DATA is not set)"
