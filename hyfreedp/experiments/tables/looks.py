"""Preset robust on test data, at version 0.1.0's places: ``python -m hyfreedp.experiments.tables.looks``.

``data/results/laptop/targets.csv``, the record of that version, has for each place the test accuracy of the best of
sixteen schedules, chosen on validation data. Here preset robust is trained with the same seeds. Finished runs are kept,
so an interrupted command can be repeated.
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
CONTENDERS = {"today": "preset robust", "robust": "the rule of version 0.1.0", "0.02, linear": "0.02, linear decay"}


def places() -> pd.DataFrame:
    """Rows of the record whose tasks still exist."""
    rows = pd.read_csv(RESULTS / "laptop" / "targets.csv")
    return rows[rows.task.isin(TASKS)]


def run(found: pd.DataFrame) -> pd.DataFrame:
    """Today's preset robust at those places, one row per run, as ``cells.tabulate`` gives it."""
    rows = found[found.name == "robust"].sort_values("seconds")[[*PLACE, "seed"]].to_dict("records")
    return tabulate(run_cells([Spec(method="robust", **row) for row in rows], workspace().cells))


def differences(found: pd.DataFrame, today: pd.DataFrame) -> pd.DataFrame:
    """Points of accuracy of every private run above the search's best, with the same seed.

    Returns:
        Columns of ``PLACE``, ``seed``, ``contender`` (a title of ``CONTENDERS``) and ``points``.
    """
    runs = pd.concat([found, today.assign(name="today")])
    runs = runs[runs.epsilon < float("inf")].set_index([*PLACE, "seed"])
    best = runs[runs.name == "best"].accuracy.rename("best")
    rest = runs[runs.name != "best"].join(best, how="inner")
    rest = rest.assign(points=100 * (rest.accuracy - rest.best), contender=rest.name.map(CONTENDERS))
    return rest.reset_index()[[*PLACE, "seed", "contender", "points"]]


def gaps(points: pd.DataFrame) -> pd.DataFrame:
    """Means of :func:`differences` over seeds: a row for each place, a column for each contender."""
    return points.groupby([*PLACE, "contender"]).points.mean().unstack()


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Over the places of :func:`gaps`: mean, percentage at -1 point or above, and worst."""
    within = 100 * (table >= -1).sum() / table.count()
    return pd.DataFrame({"mean": table.mean(), "within 1 (%)": within, "worst": table.min()}).round(1)


def judged(table: pd.DataFrame) -> list[Verdict]:
    """The verdict on preset robust by :func:`gaps`; for texts a point is one percent of tokens."""
    points = table[CONTENDERS["today"]].dropna().droplevel(PLACE[1:])
    number = f"{means_in_words(points)}; {CHOSEN_HERE}"
    return [Verdict(OURS, "not shown", number, "ours", f"{len(points)} small places")]


def sentence(today: pd.DataFrame) -> str:
    """The sentence in README on preset robust."""
    row = summary(gaps(differences(places(), today))).loc[CONTENDERS["today"]]
    share = f"{row['within 1 (%)']:.0f} %"
    return f"{row['mean']:+.1f} points from the best of a search in the mean, at most one behind at {share}"


if __name__ == "__main__":
    record = places()
    today = run(record)
    write_csv(RESULTS / "laptop" / "looks.csv", today)
    table = gaps(differences(record, today))
    print(table.round(1).to_string(), summary(table).to_string(), sep="\n\n")
