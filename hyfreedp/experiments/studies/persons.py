"""A person as the unit of privacy: ``python -m hyfreedp.experiments.studies.persons`` (for notebook 00).

Each of GTSRB's 1,307 tracks, 30 photographs of one sign, stands for a person. A linear model on fixed features
learns the signs, and a person's epsilon is kept in several ways. Recorded runs are not trained again.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from hyfreedp import PrivacyEngine
from hyfreedp.accounting.composition import epsilon as epsilon_of
from hyfreedp.experiments.data.image_files import GTSRB_32
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.paths import RESULTS
from hyfreedp.experiments.store.provenance import one_thread, with_versions

TABLE = RESULTS / "laptop" / "persons.csv"
EPSILONS, SEEDS, STEPS, RATE, DELTA, MOST = (3.0, 8.0), (0, 1, 2), 60, 0.25, 1e-5, 30
OWNERS: dict[str, int | None] = {"owners": None, "owners, 4": 4, "owners, 1": 1}  # their records_per_owner
GROUP, TEXTBOOK, RECORD = "records_per_person=30", "epsilon / 30", "record"
WAYS = (*OWNERS, GROUP, TEXTBOOK, RECORD)
CELL = ["data", "way", "epsilon", "seed"]
Parts = dict[str, tuple[Tensor, Tensor]]
DATA = ("equal", "unequal")  # everyone has 30 records; one person in ten has 30, the others 3


def features(images: np.ndarray) -> Tensor:
    """Histograms of oriented gradients (Dalal and Triggs, 2005): 36 cells of 8 directions, from (N, 32, 32, 3)."""
    found = []
    for some in torch.from_numpy(images).split(1000):
        grey = some.float().mean(3) / 255
        across, down = grey[:, 1:-1, 2:] - grey[:, 1:-1, :-2], grey[:, 2:, 1:-1] - grey[:, :-2, 1:-1]
        length, direction = (across**2 + down**2).sqrt(), torch.atan2(down, across) * 4 / math.pi
        near = (1 - (direction[:, None] - torch.arange(-4.0, 5.0)[:, None, None]).abs()).clamp(min=0) * length[:, None]
        cells = F.avg_pool2d(torch.cat([near[:, :1] + near[:, 8:], near[:, 1:8]], dim=1), 5).flatten(1)
        found.append(10 * F.normalize(cells))
    return torch.cat(found)


def load() -> tuple[Parts, np.ndarray]:
    """Features and labels of "train", "validation" (a fifth of the tracks) and "test"; the tracks of "train"."""
    train, test = GTSRB_32.read(Path(os.environ["HYFREEDP_DATA"]))
    assert train.groups is not None
    tracks = np.random.default_rng(0).permutation(train.groups.max() + 1)
    held_out = np.isin(train.groups, tracks[: len(tracks) // 5])
    x, y = features(np.asarray(train.images)), torch.tensor(train.labels)
    parts = {name: (x[rows], y[rows]) for name, rows in (("train", ~held_out), ("validation", held_out))}
    return parts | {"test": (features(np.asarray(test.images)), torch.tensor(test.labels))}, train.groups[~held_out]


def thinned(owners: np.ndarray) -> np.ndarray:
    """A mask that leaves nine persons in ten three records each."""
    person = np.unique(owners, return_inverse=True)[1]
    return (person % 10 == 0) | (pd.Series(person).groupby(person).cumcount().to_numpy() % 10 == 5)


def run(way: str, target: float, seed: int, parts: Parts, owners: np.ndarray) -> dict[str, Any]:
    """Train a model with budget ``target`` for a person, or for a record if ``way`` is "record".

    The textbook way, group privacy: k records are (e, d)-DP if one is (e/k, d (e^(e/k)-1) / (e^e-1))-DP.

    Returns:
        ``epsilon_person``; ``noise`` on each entry of the mean gradient, in units of the clip; and two accuracies.
    """
    torch.manual_seed(seed)
    model, number = nn.Linear(parts["train"][0].shape[1], 43), len(owners)
    settings: dict[str, Any] = {"target_epsilon": target, "target_delta": DELTA}
    if way == TEXTBOOK:
        delta = DELTA * math.expm1(target / MOST) / math.expm1(target)
        settings = {"target_epsilon": target / MOST, "target_delta": delta}
    elif way == GROUP:
        settings["records_per_person"] = MOST
    elif way in OWNERS:
        settings |= {"owners": owners, "records_per_owner": OWNERS[way]}
        number = len(np.unique(owners))
    _, optimizer, loader = PrivacyEngine(seed=seed).make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        data_loader=DataLoader(TensorDataset(*parts["train"]), batch_size=round(RATE * number)),
        steps=STEPS,
        **settings,
    )
    while optimizer.steps_left:
        for batch in loader:
            optimizer.step(lambda record: F.cross_entropy(model(record[0]), record[1]), batch)
    split = optimizer.split
    person = epsilon_of(dataclasses.replace(split, records_per_person=MOST)) if way == RECORD else target
    found: dict[str, Any] = {"epsilon_person": person, "noise": split.sigma_gradient / optimizer.expected_batch_size}
    with optimizer.averaged(), torch.no_grad():
        for name, part in (("validation_accuracy", "validation"), ("accuracy", "test")):
            x, y = parts[part]
            found[name] = float((optimizer.module(x).argmax(1) == y).float().mean())
    return found


def record() -> pd.DataFrame:
    """Train the runs that the table lacks, and write it after each; ``seconds`` are processor time."""
    rows = pd.read_csv(TABLE) if TABLE.exists() else pd.DataFrame(columns=CELL)
    done = set(rows[CELL].itertuples(index=False, name=None))
    parts, owners = load()
    for seed, name, epsilon, way in tqdm(list(product(SEEDS, DATA, EPSILONS, WAYS)), unit="run"):
        if (name, way, epsilon, seed) in done:
            continue
        left = thinned(owners) if name == "unequal" else np.full(len(owners), True)
        x, y = parts["train"]
        start = time.process_time()
        with one_thread():
            found = run(way, epsilon, seed, parts | {"train": (x[left], y[left])}, owners[left])
        found |= {"seconds": time.process_time() - start}
        cell = {"data": name, "way": way, "epsilon": epsilon, "seed": seed}
        new = with_versions(pd.DataFrame([cell | found]))
        rows = pd.concat([rows, new], ignore_index=True) if len(rows) else new
        write_csv(TABLE, rows)
    return rows


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds, a row for each budget and way; noise in thousandths of the clip, accuracy in percent."""
    means = rows.groupby(["epsilon", "way", "data"])[["noise", "accuracy", "epsilon_person"]].mean().unstack()
    found = {f"noise, {name}": 1000 * means["noise"][name] for name in DATA}
    found |= {f"accuracy, {name}": 100 * means["accuracy"][name] for name in DATA}
    table = pd.DataFrame(found | {"epsilon_person": means["epsilon_person"]["equal"]})
    return table.reindex([(epsilon, way) for epsilon in EPSILONS for way in WAYS if (epsilon, way) in table.index])


if __name__ == "__main__":
    print(shares(record()).round(1))
