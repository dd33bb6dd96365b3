"""Noise splits by several ways of accounting, and their true epsilons (notebooks 03 and 09)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from hyfreedp.accounting import NoiseSplit, calibrate_noise
from hyfreedp.accounting.composition import shares
from hyfreedp.experiments.accounting_of_the_paper import (
    SOUND,
    Counting,
    Mechanism,
    calibrate,
    even_split,
    gdp_epsilon,
    mu_gdp,
)
from hyfreedp.experiments.store.files import cached
from hyfreedp.experiments.store.verdicts import Verdict, by_attack, by_proof, by_row

# True epsilons use a grid of privacy losses ten times coarser than the calibration's: ten times faster, still an upper
# bound, and at most 0.1 % higher.
COARSENESS = 10

LABELS = ("section", "data")  # keys of rows that are no arguments of the calibration
ACCOUNTANTS = ["rdp", "pld", "gdp"]
COMPOSITIONS = ["same_batch", "independent", "epsilon_sum"]
_AS_THE_PAPER = {"accountant": ["rdp", "gdp"], "composition": "independent"}
_LAPTOP: dict[str, Any] = {
    "intervals": [1, 2, 5, 10, 20],
    "epsilons": [0.5, 1.0, 2.0, 3.0, 5.0, 8.0],
    "epsilons_pld": [1.0, 3.0, 8.0],
    "targets": [1.0, 3.0, 8.0],
    "gammas": [1.001, 1.002, 1.005, 1.01, 1.02, 1.05, 1.1],
    "runs": 100_000,
}


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set of the paper with N records, and the expected batch size B and number of epochs that we chose."""

    title: str
    records: int
    batch_size: int
    epochs: float

    def budget(self, target_epsilon: float) -> dict[str, float]:
        """Arguments of :func:`hyfreedp.calibrate_noise`, with delta = N^-1.1 as in the paper."""
        return {
            "target_epsilon": target_epsilon,
            "target_delta": self.records**-1.1,
            "sample_rate": self.batch_size / self.records,
            "steps": max(1, round(self.epochs * self.records / self.batch_size)),
        }


# Sizes of the training parts that torchvision and the E2E challenge distribute. The paper states neither B nor
# epochs: we chose 5 epochs of B = 1,000 for images, 10 of B = 1,024 for E2E.
DATA_SETS = (
    DataSet("CIFAR-10", 50_000, 1000, 5),
    DataSet("CIFAR-100", 50_000, 1000, 5),
    DataSet("SVHN", 73_257, 1000, 5),
    DataSet("GTSRB", 26_640, 1000, 5),
    DataSet("Food-101", 75_750, 1000, 5),
    DataSet("E2E", 42_061, 1024, 10),
)


def settings(section: str, **choices: Any) -> list[dict[str, Any]]:
    """All combinations of arguments for :func:`calibration`, each given as a list or one value; with ``section``."""
    names = list(choices)
    values = [choice if isinstance(choice, list) else [choice] for choice in choices.values()]
    return [{"section": section, **dict(zip(names, row, strict=True))} for row in product(*values)]


def grid_of(profile: str, epsilon: float, interval: int) -> dict[str, Any]:
    """The lists of values that notebook 03 compares at a profile, and its number of simulated ``runs``."""
    grid = _LAPTOP
    if profile == "smoke":
        grid = {name: [0.5] for name in _LAPTOP} | {"gammas": [1.005, 1.05], "runs": 5000, "intervals": [interval]}
    elif profile == "paper":
        intervals = [1, 2, 3, 5, 7, 10, 20, 50]
        grid = _LAPTOP | {"intervals": intervals, "epsilons_pld": _LAPTOP["epsilons"], "runs": 1_000_000}
    return grid | {"targets": sorted({*grid["targets"], epsilon})}


def rows_of(
    data: DataSet, grid: dict[str, Any], *, epsilon: float, interval: int, gamma: float
) -> Iterator[dict[str, Any]]:
    """Arguments for all calibrations of notebook 03, by section.

    The sections are "interval", "epsilon", "true cost", "true cost by interval" and "gamma".
    """
    at: dict[str, Any] = data.budget(epsilon) | {"interval": grid["intervals"]}
    measured: dict[str, Any] = {"measured": True, "gamma": gamma}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("epsilons", _AS_THE_PAPER | {"loss_mechanism": ["gaussian", "laplace"], "gamma": gamma}),
        ("epsilons_pld", {"accountant": "pld", "gamma": gamma}),
        ("epsilons", _AS_THE_PAPER | {"even": True}),
        ("epsilons_pld", {"accountant": "pld", "even": True}),
    ]
    for _, way in ways:
        yield from settings("interval", **at, **way)
    for targets, way in ways:
        for target in grid[targets]:
            yield from settings("epsilon", **data.budget(target), **way, interval=interval)
    every: dict[str, Any] = {"accountant": ACCOUNTANTS, "composition": COMPOSITIONS, "interval": interval}
    for target in grid["targets"]:
        yield from settings("true cost", **data.budget(target), **measured, **every)
    yield from settings("true cost by interval", **at, **measured, accountant="rdp", composition="independent")
    each: dict[str, Any] = {"allocation": ["constant", "per_step"], "gamma": grid["gammas"], "interval": interval}
    yield from settings("gamma", **data.budget(epsilon), measured=True, accountant="rdp", **each)


def calibrations(rows: Iterable[dict[str, Any]], folder: Path) -> pd.DataFrame:
    """One table of :func:`calibration`, each row cached in ``folder``, with the columns of ``LABELS`` added."""
    tables = []
    for row in tqdm(list(rows), desc="calibrations", unit="pair"):
        labels = {name: value for name, value in row.items() if name in LABELS}
        arguments = {name: value for name, value in row.items() if name not in LABELS}
        tables.append(cached(folder, calibration, **arguments).assign(**labels))
    return pd.concat(tables, ignore_index=True)


def calibration(
    *,
    accountant: Any,
    composition: Any = "same_batch",
    loss_mechanism: Any = "gaussian",
    allocation: Any = "constant",
    even: bool = False,
    measured: bool = False,
    **budget: Any,
) -> pd.DataFrame:
    """One row: the fields of a calibrated :class:`~hyfreedp.NoiseSplit` for three losses, and the choices below.

    Args:
        accountant, composition, loss_mechanism: of a :class:`~hyfreedp.experiments.accounting_of_the_paper.Counting`.
        allocation: "per_step" or "constant" noise; "per_step" only if the counting is sound.
        even: take :func:`even_split`.
        measured: add ``true_epsilon`` (by PLD, gradient and probe on one batch), ``vanilla_epsilon`` (of DP-SGD at
            ``sigma``) and, if the counting is sound, ``probe_share`` of epsilon.
        **budget: arguments of :func:`hyfreedp.calibrate_noise`.
    """
    counting = Counting(accountant, composition, loss_mechanism)
    if even:
        split = even_split(**budget, counting=counting)
    elif counting.sound and loss_mechanism == "gaussian":
        split = calibrate_noise(**budget, probe="losses", allocation=allocation, accountant=accountant)
    else:
        split = calibrate(**budget, counting=counting)
    deviation = split.sigma_loss * (math.sqrt(2) if loss_mechanism == "laplace" else 1)
    row = split.to_dict() | dataclasses.asdict(counting) | {"even": even, "loss_std": deviation}
    if measured:
        vanilla = (Mechanism(split.sigma), split.steps)
        row["true_epsilon"] = SOUND.epsilon(split, coarseness=COARSENESS)
        row["vanilla_epsilon"] = SOUND.cost((vanilla,), split.sample_rate, split.target_delta, COARSENESS)
        if counting.sound:
            parts = shares(split, coarseness=COARSENESS)
            row["probe_share"] = 1 - parts["gradients"] / parts["together"]
    return pd.DataFrame([row])


def split_of(row: pd.Series) -> NoiseSplit:
    """The split from a row of :func:`calibrations`."""
    names = [field.name for field in dataclasses.fields(NoiseSplit) if field.name in row]
    plain = row[names].to_dict()
    return NoiseSplit.from_dict(plain | {"accountant": "pld", "vote_steps": json.loads(str(plain["vote_steps"]))})


def mu_gdp_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Eq. (muGDP) as printed, for the noise that it allows; one row per budget of section "true cost".

    Returns:
        ``target``; ``mu_vanilla`` and ``mu_ours`` of the equation, and its ``epsilon``; and true epsilons:
        ``true_vanilla`` of DP-SGD, ``true_same_batch`` and ``true_independent`` of GDP's noise by either composition.
    """
    at = rows[rows.accountant == "gdp"].set_index(["composition", "target_epsilon"]).sort_index()
    lines = []
    for target, pair in at.loc["independent"].iterrows():
        run: dict[str, Any] = {"sample_rate": pair.sample_rate, "steps": pair.steps}
        mu = mu_gdp(**run, sigma=pair.sigma_gradient, probe_steps=pair.probe_steps, sigma_loss=pair.sigma_loss)
        line = {"target": target, "mu_vanilla": mu_gdp(**run, sigma=pair.sigma), "mu_ours": mu}
        line |= {"epsilon": gdp_epsilon(mu, pair.target_delta), "true_vanilla": pair.vanilla_epsilon}
        line |= {"true_same_batch": at.true_epsilon["same_batch", target], "true_independent": pair.true_epsilon}
        lines.append(line)
    return pd.DataFrame(lines)


CLOSE = 0.05  # the largest relative error of a good estimate of epsilon


def judged(table: pd.DataFrame, targets: Iterable[float]) -> list[Verdict]:
    """Verdicts on the paper's accounting, by section "true cost"; true epsilons are by PLD on one batch per step."""
    names = ["accountant", "composition", "target_epsilon"]
    rows = table[table.section == "true cost"].set_index(names, drop=False).sort_index()
    real = {(way, count): rows.loc[way, count].true_epsilon[targets] for way, count in rows.index.droplevel(2).unique()}

    def words(costs: pd.Series) -> str:
        return ", ".join(f"{one:.2f} for {target:g}" for target, one in costs.items())

    printed, added, by_gdp = real["rdp", "independent"], real["rdp", "epsilon_sum"], real["gdp", "epsilon_sum"]
    formula = mu_gdp_table(table[table.section == "true cost"]).set_index("target").true_independent
    # The epsilon of the gradients alone, which is that of DP-SGD with the same noise.
    alone = {
        target: SOUND.cost(((Mechanism(pair.sigma_gradient), pair.steps),), pair.sample_rate, pair.target_delta)
        for target, pair in rows.loc["rdp", "independent"].iterrows()
    }
    more = [f"{real:.2f} for {alone[target]:.2f}" for target, real in printed.items()]
    return [
        Verdict(
            "Algorithm 2: its pair of noises keeps Algorithm 1 within epsilon",
            by_proof((printed <= printed.index).all()),
            f"on the one batch that a step has, its pairs really cost {words(printed)}",
        ),
        Verdict(
            "Appendix: the pair of noises whose epsilons add up keeps Algorithm 1 within epsilon",
            by_attack(int((added > added.index).sum())),
            f"by RDP its pairs really cost {words(added)}; by GDP, which the appendix allows, {words(by_gdp)}. Three "
            "settings are no proof",
        ),
        Verdict(
            "Thm. 2: at the same gradient noise Algorithm 1 costs more than DP-SGD",
            by_row([real > alone[target] for target, real in printed.items()]),
            f"epsilon is {', '.join(more)} at three settings",
        ),
        Verdict(
            "Eq. (muGDP) estimates the epsilon of Algorithm 1",
            by_row(abs(formula / formula.index - 1) <= CLOSE),
            f"its pairs really cost {words(formula)}; the estimate should be within {CLOSE:.0%}",
        ),
    ]
