"""The paper's method by its own accounting and by the sound one, from its first rate and from larger ones.

``python -m hyfreedp.experiments.tables.control --profile laptop|desktop [--jobs N]`` trains what is missing, of all
places one seed before the next, and writes ``data/results/<profile>/control.csv``, which notebook 06 shows. It can be
interrupted.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from itertools import product

import pandas as pd

from hyfreedp.experiments.runs.cells import reader, tabulate, try_cells
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.paths import RESULTS, workspace
from hyfreedp.experiments.tables.plan import SCALES

FIRST_RATES = (1e-4, 1e-3, 1e-2)  # the paper's, and two with which it would have begun near a searched one
METHODS = ("paper_claimed", "paper", "algorithm1_claimed")
SEEDS = 3


def runs(profile: str) -> list[Spec]:
    """Every method from every first rate, but Algorithm 1 as printed, which begins at the paper's."""
    scale = SCALES[profile]
    return [
        Spec(
            task=learner.task,
            method=method,
            epsilon=epsilon,
            seed=seed,
            learning_rate=rate,
            steps=learner.steps,
            model=learner.model,
            tuning=learner.tuning,
        )
        for seed, rate, method in product(range(SEEDS), FIRST_RATES, METHODS)
        for learner, epsilon in product(scale.learners, scale.epsilons)
        if epsilon < float("inf") and (method != "algorithm1_claimed" or rate == FIRST_RATES[0])
    ]


def main() -> None:
    """Train what is missing, and write what is there: columns as in ``accuracy.csv``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=("laptop", "desktop"), required=True)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    wanted, cells = runs(given.profile), workspace().cells
    read = reader(cells)
    missing = [spec for spec in wanted if read(spec) is None]
    with closing(try_cells(missing, cells, jobs=given.jobs, description=f"{given.profile}, control")) as ended:
        for _, result in ended:
            if isinstance(result, Exception):
                raise result
            records = [record for record in map(read, wanted) if record is not None]
            write_csv(RESULTS / given.profile / "control.csv", tabulate(records))
    found = pd.read_csv(RESULTS / given.profile / "control.csv")
    by = ["task", "tuning", "epsilon", "method", "learning_rate"]
    print(found.groupby(by)[["accuracy", "final_eta", "epsilon_spent"]].mean().to_string())


if __name__ == "__main__":
    main()
