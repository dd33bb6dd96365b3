"""A record that grows by a run at a time, so that a killed study loses none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from hyfreedp.experiments.runs.train import one_thread
from hyfreedp.experiments.store.files import write_csv


def grown(
    table: Path,
    key: list[str],
    runs: Iterable[tuple[Any, ...]],
    rows_of: Callable[[Any], pd.DataFrame],
    *,
    label: str,
) -> pd.DataFrame:
    """Make the runs that the table lacks and add their rows to it; the table.

    Args:
        table: a CSV file, which need not be there yet.
        key: the columns that name a run.
        runs: the values of these columns.
        rows_of: makes a run; its rows.
        label: of the progress bar.
    """
    rows = pd.read_csv(table) if table.exists() else pd.DataFrame(columns=key)
    done = set(rows[key].itertuples(index=False, name=None))
    with one_thread():
        for run in tqdm([run for run in runs if run not in done], desc=label, unit="run"):
            rows = pd.concat([rows, rows_of(run)], ignore_index=True) if len(rows) else rows_of(run)
            write_csv(table, rows)
    return rows
