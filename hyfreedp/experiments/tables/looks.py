"""Preset robust on the places of version 0.1.0's record, on test data: ``python -m hyfreedp.experiments.tables.looks``.

That record (``data/results/laptop/targets.csv``) has, at each place, the test accuracy of the best of a search over
sixteen schedules that validation data chose. The same seeds are trained here with preset robust. Finished runs are
kept, so that an interrupted command goes on.
"""

from __future__ import annotations

import pandas as pd

from hyfreedp.experiments.runs.cells import run_cells, tabulate
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.paths import RESULTS, workspace
from hyfreedp.experiments.store.verdicts import Verdict, means_in_words
from hyfreedp.experiments.tables.image_classification import CHOSEN_HERE, OURS
from hyfreedp.experiments.tasks.registry import TASKS

PLACE = ["task", "model", "tuning", "base", "steps", "epsilon"]


def places() -> pd.DataFrame:
    """Rows of the record whose tasks there still are."""
    rows = pd.read_csv(RESULTS / "laptop" / "targets.csv")
    return rows[rows.task.isin(TASKS)]


def run(found: pd.DataFrame) -> pd.DataFrame:
    """The rows of preset robust, trained today."""
    rows = found[found.name == "robust"].sort_values("seconds")[[*PLACE, "seed"]].to_dict("records")
    return tabulate(run_cells([Spec(method="robust", **row) for row in rows], workspace().cells))


def gaps(found: pd.DataFrame, today: pd.DataFrame) -> pd.DataFrame:
    """Percent accuracy of the search at each place, and how many points from it 0.02 and both presets are."""
    columns = {name: rows.groupby(PLACE).accuracy.mean() for name, rows in found.groupby("name")}
    table = 100 * pd.DataFrame(columns | {"today": today.groupby(PLACE).accuracy.mean()})
    return table.assign(**{name: table[name] - table.best for name in table.columns if name != "best"})


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Over the places with privacy: mean gap, share within a point, and the worst."""
    private = table[table.index.get_level_values("epsilon") < float("inf")].drop(columns="best")
    return pd.DataFrame(
        {"mean": private.mean(), "within 1 (%)": 100 * (private >= -1).sum() / private.count(), "worst": private.min()}
    ).round(1)


def judged(table: pd.DataFrame) -> list[Verdict]:
    """What :func:`gaps` say of preset robust at the places with privacy; of texts a point is one of right tokens."""
    private = table[table.index.get_level_values("epsilon") < float("inf")].today.dropna()
    points = pd.Series(private.to_numpy(), private.index.get_level_values("task"))
    number = f"{means_in_words(points)}; {CHOSEN_HERE}"
    return [Verdict(OURS, "not shown", number, "ours", f"{len(points)} small places")]


CONTENDERS = {
    "today": "preset robust",
    "robust": "the rule of version 0.1.0",
    "0.02, linear": "0.02, linear decay",
}


def differences(found: pd.DataFrame, today: pd.DataFrame) -> pd.DataFrame:
    """Points of accuracy of every run with privacy to the best of the search, run by run with the same seed.

    Returns:
        Columns of ``PLACE``, ``seed``, ``contender`` (a title of ``CONTENDERS``) and ``points``.
    """
    runs = pd.concat([found, today.assign(name="today")])
    runs = runs[runs.epsilon < float("inf")].set_index([*PLACE, "seed"])
    best = runs[runs.name == "best"].accuracy.rename("best")
    rest = runs[runs.name != "best"].join(best, how="inner")
    rest = rest.assign(points=100 * (rest.accuracy - rest.best), contender=rest.name.map(CONTENDERS))
    return rest.reset_index()[[*PLACE, "seed", "contender", "points"]]


def sentence(today: pd.DataFrame) -> str:
    """What the README says of preset robust."""
    row = summary(gaps(places(), today)).loc["today"]
    return f"{row['mean']:+.1f} points from the best of a search in the mean, within one at {row['within 1 (%)']:.0f} %"


if __name__ == "__main__":
    record = places()
    today = run(record)
    write_csv(RESULTS / "laptop" / "looks.csv", today)
    table = gaps(record, today)
    print(table.round(1).to_string(), summary(table).to_string(), sep="\n\n")
