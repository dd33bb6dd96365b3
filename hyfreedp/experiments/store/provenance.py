"""What a result was computed with: versions, hardware, threads, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from threadpoolctl import threadpool_limits

from hyfreedp.experiments.store.device import default_device
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.pytorch.devices import CPU, hardware


def environment() -> dict[str, str]:
    """Versions and hardware that a result depends on."""
    packages = ("hyfreedp", "torch", "opacus", "dp-accounting", "autodp", "numpy", "scipy")
    device = default_device()
    return {
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "accelerator": "none" if device == CPU else hardware(device),
    }


def columns_of(record: Mapping[str, Any]) -> dict[str, str]:
    """``date`` and ``version_...`` from a run's record; the date is empty for old runs, which recorded none."""
    versions = {f"version_{name}": value for name, value in record["environment"].items()}
    return {"date": record.get("date", ""), **versions}


def with_versions(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with today's ``date``, and :func:`environment` in columns ``version_...``."""
    return rows.assign(**columns_of({"date": str(date.today()), "environment": environment()}))


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch and NumPy use one thread, so that results do not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(threads)


def made_by(rows: pd.DataFrame) -> str:
    """The versions of the package in a record, with dates, as "version 0.3.0, 2026-11-26 to 2026-11-27"."""
    version = "version_hyfreedp" if "version_hyfreedp" in rows else "hyfreedp"
    dates = rows.dropna(subset=version).groupby(version).date.agg(["min", "max"])
    spans = {one: first if first == last else f"{first} to {last}" for one, first, last in dates.itertuples()}
    return "; ".join(f"version {one}, {days}" for one, days in spans.items())


def git(*words: str, root: Path) -> str:
    """What a git command prints; RuntimeError if it fails, say because ``root`` is no repository."""
    try:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"git failed in {root}: {error}") from error


def commit() -> str:
    """The repository's commit, with "-dirty" if files differ from it; "unknown" if there is no repository."""
    try:
        return git("describe", "--always", "--dirty", root=workspace().root).strip()
    except RuntimeError:
        return "unknown"
