"""UCI bank marketing (Moro, Cortez and Rita 2014), a table of which one record in nine is of the second class."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from hyfreedp.experiments.data.given import given, looked_at

Labelled = tuple[Tensor, Tensor]  # features (N, d), and labels (N,) of two classes

# What the description of the data set says its categories can be, by column; and the numbers, by a public scale.
CATEGORIES = {
    1: "admin. blue-collar entrepreneur housemaid management retired self-employed services student technician "
    "unemployed unknown",
    2: "divorced married single",
    3: "primary secondary tertiary unknown",
    4: "no yes",
    6: "no yes",
    7: "no yes",
    8: "cellular telephone unknown",
    10: "jan feb mar apr may jun jul aug sep oct nov dec",
    15: "failure other success unknown",
}
NUMBERS = {0: 100.0, 5: 5000.0, 9: 31.0, 12: 10.0, 13: 365.0, 14: 10.0}  # beyond it they count as 1, or -1


@cache
def bank() -> Labelled:
    """UCI bank marketing (Moro, Cortez and Rita 2014): did a call sell a deposit? 50 features in [-1, 1].

    Without the length of the call, which is known only after it.

    Raises:
        FileNotFoundError: it is not in ``$HYFREEDP_DATA``, with what to do.
        ValueError: the file has another number of records.
    """
    path = given("kinds/bank-full.csv.gz", "bank-full.csv")
    if path is None:
        raise FileNotFoundError(
            f"UCI bank marketing is not {looked_at()}: set HYFREEDP_DATA to a folder with bank-full.csv, which is in "
            "the archive of https://archive.ics.uci.edu/dataset/222/bank+marketing"
        )
    rows = pd.read_csv(path, sep=";")
    y = torch.tensor((rows.iloc[:, -1] == "yes").to_numpy()).long()
    if len(y) not in (45_210, 45_211) or y.sum() != 5289:  # the packed copy lacks one "no"
        raise ValueError(f"{path} must have 45,211 records, 5,289 of them yes; got {len(y):,} and {int(y.sum()):,}")
    numbers = torch.tensor(rows.iloc[:, list(NUMBERS)].to_numpy(np.float32))
    features = [(numbers / torch.tensor([*NUMBERS.values()])).clamp(-1, 1)]
    for column, values in CATEGORIES.items():
        codes = pd.Categorical(rows.iloc[:, column], categories=values.split()).codes
        features.append(F.one_hot(torch.tensor(codes, dtype=torch.int64), len(values.split())).float())
    return torch.cat(features, 1), y


def bank_with(share: float) -> Labelled:
    """As many records of the bank, in one fixed random order, as can be with this share of yes."""
    x, y = bank()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(y)))
    no, yes = (order[y[order] == label] for label in (0, 1))
    size = min(len(no) / (1 - share), len(yes) / share)
    chosen = torch.cat([no[: round(size * (1 - share))], yes[: round(size * share)]])
    return x[chosen], y[chosen]
