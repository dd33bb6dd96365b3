"""Where the repository's folders are, from whatever working directory a notebook runs in, and files of the user."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workspace:
    """The folders of a repository."""

    root: Path
    notebooks: Path
    figures: Path  # those that are committed
    cells: Path
    cache: Path  # decoded data sets
    checkpoints: Path
    results: Path
    paper: Path
    build: Path

    def output(self, profile: str) -> Path:
        """Where notebooks write their figures and tables, one folder for each profile."""
        return self.build / profile / "figures"


def workspace() -> Workspace:
    """The folders that the environment names at present.

    ``HYFREEDP_ROOT`` is the repository: the one around this file if unset, which an installed package does not have.
    ``HYFREEDP_CELLS`` and ``HYFREEDP_CACHE`` move one folder out of it.
    """
    root = Path(os.environ.get("HYFREEDP_ROOT", Path(__file__).resolve().parents[3]))
    data = root / "data"
    return Workspace(
        root=root,
        notebooks=root / "notebooks",
        figures=root / "figures",
        cells=Path(os.environ.get("HYFREEDP_CELLS", data / "cells")),
        cache=Path(os.environ.get("HYFREEDP_CACHE", data / "cache")),
        checkpoints=data / "checkpoints",
        results=data / "results",
        paper=data / "paper",
        build=root / "build",
    )


# What notebooks and tests name: the folders at the import.
_HERE = workspace()
ROOT, FIGURES, CELLS = _HERE.root, _HERE.figures, _HERE.cells
CHECKPOINTS, RESULTS = _HERE.checkpoints, _HERE.results


def given(*names: str) -> Path | None:
    """The first of these files that is there, each named by its path below ``$HYFREEDP_DATA``."""
    folder = os.environ.get("HYFREEDP_DATA")
    return next((path for name in names if (path := Path(folder, name)).exists()), None) if folder else None


def looked_at() -> str:
    """Where that was, for the sentence that says what is missing."""
    folder = os.environ.get("HYFREEDP_DATA")
    return f"in HYFREEDP_DATA={folder}" if folder else "on this machine (HYFREEDP_DATA is not set)"
