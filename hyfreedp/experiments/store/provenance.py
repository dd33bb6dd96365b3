"""What a result was made with: versions, hardware, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version

import pandas as pd

from hyfreedp.experiments.store.paths import workspace
from hyfreedp.pytorch.devices import CPU, default_device, hardware


def environment() -> dict[str, str]:
    """Versions and hardware that a result depends on."""
    packages = ("hyfreedp", "torch", "opacus", "dp-accounting", "autodp", "numpy", "scipy")
    return {
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "accelerator": "none" if (device := default_device()) == CPU else hardware(device),
    }


def with_versions(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with :func:`environment` in columns ``version_...``."""
    return rows.assign(**{f"version_{name}": value for name, value in environment().items()})


def commit() -> str:
    """The repository's commit, with "-dirty" if files differ from it; "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=workspace().root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
