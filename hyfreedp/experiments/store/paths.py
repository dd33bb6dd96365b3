"""The folders of the repository, whatever the working directory is, and data files that the user has."""

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
    """The folders, by the present environment variables.

    ``HYFREEDP_ROOT`` is the repository; if unset, the one that this file is in (an installed package must set it).
    ``HYFREEDP_CELLS`` and ``HYFREEDP_CACHE`` name these two folders if they are elsewhere.
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


# For notebooks and tests: the folders at import.
_HERE = workspace()
ROOT, FIGURES, CELLS = _HERE.root, _HERE.figures, _HERE.cells
CHECKPOINTS, RESULTS = _HERE.checkpoints, _HERE.results


def given(*names: str) -> Path | None:
    """The first of these files that exists, each given by its path below ``$HYFREEDP_DATA``; else None."""
    folder = os.environ.get("HYFREEDP_DATA")
    paths = [Path(folder, name) for name in names] if folder else []
    return next((path for path in paths if path.exists()), None)


def looked_at() -> str:
    """Where :func:`given` looked, as words for an error message: "... is not {looked_at()}"."""
    folder = os.environ.get("HYFREEDP_DATA")
    return f"in HYFREEDP_DATA={folder}" if folder else "on this machine (HYFREEDP_DATA is not set)"
