"""The noise of a private mean loss, in percent of its clip R_l: ``python -m hyfreedp.experiments.studies.loss_noise``.

It decides how well a line search can work. It is sigma_l / B, which follows from N, B, T, K, epsilon and delta, without
data. Most of our runs have more noise than runs at the paper's scale. Notebooks 04 and 11 and docs/verdicts.md show it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import torch

from hyfreedp import calibrate_noise, fit_quadratic
from hyfreedp.experiments.accounting_of_the_paper import Counting, calibrate
from hyfreedp.experiments.store.files import markdown_table, write_csv
from hyfreedp.experiments.store.paths import RESULTS
from hyfreedp.experiments.store.provenance import with_versions
from hyfreedp.experiments.store.verdicts import Verdict, by_row
from hyfreedp.experiments.studies.noise_split import DATA_SETS
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_gradient, privatize_loss

TABLE = RESULTS / "laptop" / "loss_noise.csv"
PAPER = "the paper's scale"
EPSILONS, INTERVAL = (1.0, 3.0, 8.0), 5
WAYS = {"soundly": "sound", "the paper's count": "claimed"}
# N, B, T and delta by setting. The paper prints no protocol for images; this is the one of its authors' public script.
SETTINGS: dict[str, tuple[int, int, int, float]] = {
    "digits, MLP": (1_500, 500, 100, 1e-4),
    "digits, ViT": (1_500, 500, 30, 1e-4),
    "real images": (20_000, 400, 250, 20_000**-1.1),
    "speeches": (20_331, 200, 306, 20_331**-1.1),
    "E2E": (42_061, 1_024, 420, 42_061**-1.1),
    PAPER: (50_000, 1_000, 250, DATA_SETS[0].budget(1.0)["target_delta"]),
}


def noise(setting: str, epsilon: float) -> dict[str, Any]:
    """A row of the record: ``claimed_percent`` by the paper's own accounting, ``sound_percent`` by preset paper's."""
    records, batch_size, steps, delta = SETTINGS[setting]
    budget: dict[str, Any] = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": batch_size / records}
    budget |= {"steps": steps, "interval": INTERVAL}
    claimed = calibrate(counting=Counting("rdp", "independent"), **budget).sigma_loss / batch_size
    sound = calibrate_noise(**budget, probe="losses", allocation="constant").sigma_loss / batch_size
    row = {"setting": setting, "records": records, "batch_size": batch_size, "steps": steps, "interval": INTERVAL}
    return row | {"epsilon": epsilon, "claimed_percent": 100 * claimed, "sound_percent": 100 * sound}


def recorded() -> pd.DataFrame:
    """The committed record, indexed by ``setting`` and ``epsilon``."""
    return pd.read_csv(TABLE).set_index(["setting", "epsilon"])


def at_the_papers_scale(epsilon: float) -> dict[str, float]:
    """sigma_l / B at the paper's scale, by both ways of accounting, at the nearest recorded epsilon."""
    rows = recorded().loc[PAPER]
    near = rows.loc[min(rows.index, key=lambda one: abs(math.log(one / epsilon)))]
    return {f"{PAPER}, {way}": near[f"{column}_percent"] / 100 for way, column in WAYS.items()}


def magnitudes() -> Verdict:
    """Verdict on Tab. "diff priv": E|noise| of a private loss, and of a private gradient in d dimensions, simulated.

    The library releases zero losses and zero gradients, with sigma = R = 1.
    """
    draws, dimension, batch_size = 20_000, 1_000, 1_000
    random: dict[str, Any] = {"expected_batch_size": batch_size, "generator": NoiseGenerator(0)}
    losses = privatize_loss(torch.zeros(draws, 1, dtype=torch.float64), 1.0, 1.0, **random).abs()
    sums = [torch.zeros(200, dimension, dtype=torch.float64)]
    privatize_gradient(sums, 1.0, sensitivity=1.0, **random)
    off = []
    for found, formula in ((losses, math.sqrt(2 / math.pi)), (sums[0].norm(dim=1), math.sqrt(dimension))):
        stated = formula / batch_size  # sqrt(d) is the limit of large d
        off.append(abs(found.mean().item() - stated) / (found.std().item() / math.sqrt(len(found)) + 1e-3 * stated))
    number = f"simulated means lie within {max(off):.1f} standard errors of the formulas (d = {dimension:,})"
    return Verdict('Tab. "diff priv": the expected noise of a loss and of a gradient', by_row([max(off) < 4]), number)


def more_points() -> Verdict:
    """Verdict on the footnote that more points may stabilise the fit, by the noise of the fitted slope.

    As the footnote says, "using more privacy budget": each loss has the same noise. Equal privacy is reported, too.
    """
    slopes = {}
    for power in (0.0, 0.5):  # noise (n / 3)^power: the same on each loss; then the same privacy
        fits = {n: fit_quadratic(np.linspace(-1, 1, n), np.zeros(n), (n / 3) ** power) for n in (3, 5, 9)}
        slopes[power] = {n: fits[n].slope_std / fits[3].slope_std for n in (5, 9)}
    more, same = (", ".join(f"{slope:.2f} times with {n}" for n, slope in found.items()) for found in slopes.values())
    claim = "Footnote: more points than three may stabilise the fit, using more privacy budget"
    number = f"with that the slope's noise is {more} points; at the same privacy, {same}"
    return Verdict(claim, by_row([slope < 1 for slope in slopes[0.0].values()]), number)


def markdown(rows: pd.DataFrame) -> str:
    """The table of docs/verdicts.md: rows of the record at epsilon = 3, in percent of the clip."""
    lines = []
    for one in rows[rows.epsilon == 3].itertuples():
        numbers = [f"{getattr(one, f'{column}_percent'):.2g}" for column in WAYS.values()]
        lines.append([one.setting, f"{one.records:,}, {one.batch_size:,}, {one.steps}", *numbers])
    return markdown_table(["Setting", "N, B, T", *WAYS], lines)


if __name__ == "__main__":
    table = pd.DataFrame([noise(setting, epsilon) for setting in SETTINGS for epsilon in EPSILONS])
    write_csv(TABLE, with_versions(table))
    print(markdown(table))
