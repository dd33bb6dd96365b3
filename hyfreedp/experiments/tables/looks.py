"""Preset robust on the places of version 0.1.0's record, on test data: ``python -m hyfreedp.experiments.tables.looks``.

That record (``data/results/laptop/targets.csv``) has, at each place, the test accuracy of the best of a search over
sixteen schedules that validation data chose. The same seeds are trained here with today's preset. Finished runs are
kept, so that an interrupted command goes on.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from hyfreedp.experiments.runs.cells import run_cell
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.paths import RESULTS, workspace
from hyfreedp.experiments.tasks.registry import TASKS

PLACE = ["task", "model", "tuning", "base", "steps", "epsilon"]


def places() -> pd.DataFrame:
    """Rows of the record whose tasks there still are, accuracies in percent."""
    rows = pd.read_csv(RESULTS / "laptop" / "targets.csv")
    rows = rows[rows.task.isin(TASKS)]
    return rows.assign(accuracy=100 * rows.accuracy)


def run(found: pd.DataFrame) -> pd.DataFrame:
    """The rows of preset robust, with its accuracy of today."""
    rows: list[dict[str, Any]] = []
    for row in found[found.name == "robust"].sort_values("seconds").to_dict("records"):
        spec = Spec(method="robust", seed=row["seed"], **{name: row[name] for name in PLACE})
        record = run_cell(spec, workspace().cells)
        rows.append({name: row[name] for name in (*PLACE, "seed")} | {"accuracy": 100 * record["accuracy"]})
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def gaps(found: pd.DataFrame, today: pd.DataFrame) -> pd.DataFrame:
    """Mean accuracy at each place of the search, and how far 0.02 with linear decay and both presets are from it."""
    columns = {name: rows.groupby(PLACE).accuracy.mean() for name, rows in found.groupby("name")}
    table = pd.DataFrame(columns | {"today": today.groupby(PLACE).accuracy.mean()})
    return table.assign(**{name: table[name] - table.best for name in table.columns if name != "best"})


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Over the places with privacy: mean gap, share within a point, and the worst."""
    private = table[table.index.get_level_values("epsilon") < float("inf")].drop(columns="best")
    return pd.DataFrame(
        {"mean": private.mean(), "within 1 (%)": 100 * (private >= -1).mean(), "worst": private.min()}
    ).round(1)


if __name__ == "__main__":
    record = places()
    today = run(record)
    write_csv(RESULTS / "laptop" / "looks.csv", today)
    table = gaps(record, today)
    print(table.round(1).to_string(), summary(table).to_string(), sep="\n\n")
