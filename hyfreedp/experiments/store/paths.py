"""Where the repository's folders are, from whatever working directory a notebook runs in."""

from __future__ import annotations

import os
from pathlib import Path

# An installed copy of the package has no repository around it: HYFREEDP_ROOT then names one.
ROOT = Path(os.environ.get("HYFREEDP_ROOT", Path(__file__).resolve().parents[3]))
NOTEBOOKS = ROOT / "notebooks"
FIGURES = Path(os.environ.get("HYFREEDP_FIGURES", ROOT / "figures"))
CELLS = Path(os.environ.get("HYFREEDP_CELLS", ROOT / "data" / "cells"))
CACHE = Path(os.environ.get("HYFREEDP_CACHE", ROOT / "data" / "cache"))  # decoded data sets
CHECKPOINTS = ROOT / "data" / "checkpoints"
RESULTS = ROOT / "data" / "results"
BUILD = ROOT / "build"
