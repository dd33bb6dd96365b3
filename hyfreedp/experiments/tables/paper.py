"""The numbers printed in the paper, one file per table in data/paper."""

from __future__ import annotations

import pandas as pd

from hyfreedp.experiments.store.paths import workspace

COLUMNS = ("table", "tuning", "epsilon", "method", "model", "dataset", "metric", "value", "std")


def load(table: str) -> pd.DataFrame:
    """One table of the paper, one row per printed number.

    Returns:
        ``COLUMNS``: epsilon is ``inf`` for runs without privacy, and NaN if the table has none; std is NaN if none is
        printed; other fields that a table does not have are empty.
    """
    types = {name: float if name in ("epsilon", "value", "std") else str for name in COLUMNS}
    frame = pd.read_csv(workspace().paper / f"{table}.csv", dtype=types)
    return frame.fillna({name: "" for name, kind in types.items() if kind is str})
