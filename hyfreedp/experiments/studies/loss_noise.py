"""The noise of a private mean loss, in percent of its clip R_l: ``python -m hyfreedp.experiments.studies.loss_noise``.

A line search rests on it. It is sigma_l / B, so it depends on N, B, T, K and epsilon alone, and no data are read. What
the paper's runs have is of its own scale; most runs here have more. Notebooks 04 and 11 and docs/verdicts.md show it.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from hyfreedp import calibrate_noise
from hyfreedp.experiments.accounting_of_the_paper import Counting, calibrate
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.paths import RESULTS
from hyfreedp.experiments.store.provenance import with_versions
from hyfreedp.experiments.studies.noise_split import DATA_SETS

TABLE = RESULTS / "laptop" / "loss_noise.csv"
PAPER = "the paper's scale"
EPSILONS, INTERVAL = (1.0, 3.0, 8.0), 5
WAYS = {"soundly": "sound", "the paper's count": "claimed"}
# Setting: N, B, T, delta. The paper prints no protocol of its images; that of its authors' public script is taken.
SETTINGS: dict[str, tuple[int, int, int, float]] = {
    "digits, MLP": (1_500, 500, 100, 1e-4),
    "digits, ViT": (1_500, 500, 30, 1e-4),
    "real images": (20_000, 400, 250, 20_000**-1.1),
    "speeches": (20_331, 200, 306, 20_331**-1.1),
    "E2E": (42_061, 1_024, 420, 42_061**-1.1),
    PAPER: (50_000, 1_000, 250, DATA_SETS[0].budget(1.0)["target_delta"]),
}


def noise(setting: str, epsilon: float) -> dict[str, Any]:
    """A row of the record: ``claimed`` is by the paper's own count, ``sound`` by preset paper's (PLD, one batch)."""
    records, batch_size, steps, delta = SETTINGS[setting]
    budget: dict[str, Any] = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": batch_size / records}
    budget |= {"steps": steps, "interval": INTERVAL}
    claimed = calibrate(counting=Counting("rdp", "independent"), **budget).sigma_loss / batch_size
    sound = calibrate_noise(**budget, probe="losses", allocation="constant").sigma_loss / batch_size
    row = {"setting": setting, "records": records, "batch_size": batch_size, "steps": steps, "interval": INTERVAL}
    return row | {"epsilon": epsilon, "claimed_percent": 100 * claimed, "sound_percent": 100 * sound}


def recorded() -> pd.DataFrame:
    """The record, with ``setting`` and ``epsilon`` as index."""
    return pd.read_csv(TABLE).set_index(["setting", "epsilon"])


def told(setting: str, epsilon: float) -> str:
    """The noise of a setting beside that of the paper's, at one budget, in words for a verdict."""
    rows = recorded()
    here, there = rows.loc[setting, epsilon], rows.loc[PAPER, epsilon]
    return (
        f"noise of a mean loss {here.sound_percent:.2g} % of R_l, at {PAPER} {there.sound_percent:.2g} % soundly and "
        f"{there.claimed_percent:.2g} % by its count (epsilon = {epsilon:g})"
    )


def markdown(rows: pd.DataFrame) -> str:
    """The table of docs/verdicts.md, from rows of the record."""
    percent = {f"{way}, epsilon = {e:g}": (f"{column}_percent", e) for way, column in WAYS.items() for e in EPSILONS}
    lines = [f"| Setting | N, B, T | {' | '.join(percent)} |", "| --- |" + " --- |" * (len(percent) + 1)]
    for setting, found in rows.groupby("setting", sort=False):
        one, at = found.iloc[0], found.set_index("epsilon")
        numbers = " | ".join(f"{at[column][e]:.2g} %" for column, e in percent.values())
        lines.append(f"| {setting} | {one.records:,}, {one.batch_size:,}, {one.steps} | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    table = pd.DataFrame([noise(setting, epsilon) for setting in SETTINGS for epsilon in EPSILONS])
    write_csv(TABLE, with_versions(table))
    print(markdown(table))
