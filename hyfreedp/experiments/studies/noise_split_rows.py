"""Which calibrations notebook 03 compares: rows for :func:`~hyfreedp.experiments.studies.noise_split.calibrations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyfreedp.experiments.studies.noise_split import DATA_SETS, PAPER_SPLIT, DataSet, preset_split, settings

ACCOUNTANTS = ["rdp", "pld", "gdp"]
COMPOSITIONS = ["same_batch", "independent", "epsilon_sum"]
_AS_THE_PAPER = {"accountant": ["rdp", "gdp"], "composition": "independent"}
_SOUND = {"accountant": "pld", "composition": "same_batch"}
_LAPTOP: dict[str, Any] = {
    "intervals": [1, 2, 5, 10, 20],
    "intervals_laplace": [1, 5, 20],  # of Laplace noise under PLD, the slowest
    "epsilons": [0.5, 1.0, 2.0, 3.0, 5.0, 8.0],
    "epsilons_pld": [1.0, 3.0, 8.0],
    "epsilons_pld_laplace": [1.0, 3.0],
    "targets": [1.0, 3.0, 8.0],
    "gammas": [1.001, 1.002, 1.005, 1.01, 1.02, 1.05, 1.1],
    "runs": 100_000,
}


def grid_of(profile: str, epsilon: float, interval: int) -> dict[str, Any]:
    """The values that notebook 03 compares at a profile: lists, and the number of simulated ``runs``."""
    if profile == "smoke":
        grid: dict[str, Any] = {name: [0.5] for name in _LAPTOP} | {"gammas": [1.005, 1.05], "runs": 5000}
        grid |= {"intervals": [interval], "intervals_laplace": [interval]}
    elif profile == "paper":
        intervals = [1, 2, 3, 5, 7, 10, 20, 50]
        budgets = _LAPTOP["epsilons"]
        grid = _LAPTOP | {"intervals": intervals, "intervals_laplace": intervals, "runs": 1_000_000}
        grid |= {"epsilons_pld": budgets, "epsilons_pld_laplace": budgets}
    else:
        grid = _LAPTOP
    return grid | {"targets": sorted({*grid["targets"], epsilon})}


def rows_of(
    profile: str, data: DataSet, grid: dict[str, Any], *, epsilon: float, interval: int, gamma: float
) -> list[dict[str, Any]]:
    """All sections of the notebook's table: "interval", "epsilon", "true cost", "gamma", "allocation" and "data".

    Args:
        profile: smoke has one data set and budget in section "data".
        data: of the other sections.
        grid: of :func:`grid_of`.
        epsilon, interval, gamma: where a section does not vary them.
    """
    at: dict[str, Any] = data.budget(epsilon) | {"interval": grid["intervals"]}
    ours = PAPER_SPLIT | {"gamma": gamma}
    normal, both = {"loss_mechanism": "gaussian"}, {"loss_mechanism": ["gaussian", "laplace"]}
    laplace = {"loss_mechanism": "laplace"}

    def at_budgets(section: str, targets: list[float], **choices: Any) -> list[dict[str, Any]]:
        return [row for target in targets for row in settings(section, **data.budget(target), **choices)]

    against_interval = [
        *settings("interval", **at, **ours, **_AS_THE_PAPER, **both),
        *settings("interval", **at, **ours, **_SOUND, **normal),
        *settings("interval", **at | {"interval": grid["intervals_laplace"]}, **ours, **_SOUND, **laplace),
        *settings("interval", even=True, **at, **_AS_THE_PAPER),
        *settings("interval", even=True, **at, **_SOUND),
    ]
    here = ours | {"interval": interval}
    against_epsilon = [
        *at_budgets("epsilon", grid["epsilons"], **here, **_AS_THE_PAPER, **both),
        *at_budgets("epsilon", grid["epsilons_pld"], **here, **_SOUND, **normal),
        *at_budgets("epsilon", grid["epsilons_pld_laplace"], **here, **_SOUND, **laplace),
        *at_budgets("epsilon", grid["epsilons"], even=True, **_AS_THE_PAPER, interval=interval),
        *at_budgets("epsilon", grid["epsilons_pld"], even=True, **_SOUND, interval=interval),
    ]
    counting = {"accountant": ACCOUNTANTS, "composition": COMPOSITIONS} | normal
    papers_way = {"accountant": "rdp", "composition": "independent"} | normal
    true_cost = [
        *at_budgets("true cost", grid["targets"], measured=True, **here, **counting),
        *at_budgets("true cost", grid["targets"], measured=True, probe="none", accountant=ACCOUNTANTS),
        *settings("true cost by interval", measured=True, **at, **ours, **papers_way),
    ]
    by_gamma = data.budget(epsilon) | {"accountant": "rdp", "gamma": grid["gammas"], "interval": interval}
    both_probes = {"probe": ["losses", "contrasts"]}
    price = [
        *settings("gamma", measured=True, **by_gamma, **PAPER_SPLIT),
        *settings("gamma", measured=True, **by_gamma, **both_probes),
    ]
    allocation = settings("allocation", **at, **both_probes, accountant="pld", gamma=gamma)
    return against_interval + against_epsilon + true_cost + price + allocation + _worked_rows(profile)


def _worked_rows(profile: str) -> list[dict[str, Any]]:
    """Both presets on the paper's data sets."""
    data_sets, budgets = (DATA_SETS[:1], [0.5]) if profile == "smoke" else (DATA_SETS, [1.0, 3.0, 8.0])
    rows = []
    for name, accountant in (("line_search", "pld"), ("paper", "rdp")):
        for target in budgets:
            for chosen in data_sets:
                budget = chosen.budget(target)
                choices: dict[str, Any] = budget | preset_split(name, int(budget["steps"]))
                labels = {"data": chosen.title, "preset": name}
                rows += [row | labels for row in settings("data", measured=True, accountant=accountant, **choices)]
    return rows


def share_rows(
    data_sets: Sequence[DataSet],
    targets: list[float],
    data: DataSet,
    *,
    epsilon: float,
    interval: int,
    gammas: list[float],
    intervals: list[int],
) -> list[dict[str, Any]]:
    """Three losses by RDP, for notebook 09: sections "data" (data sets and budgets) and "interval" (gamma and K).

    Args:
        data_sets, targets: of section "data", at ``interval`` and gamma = 1.01.
        data, epsilon: of section "interval".
        interval: K of section "data".
        gammas, intervals: of section "interval".
    """
    plan = PAPER_SPLIT | {"accountant": "rdp", "measured": True}
    rows = [
        row | {"data": chosen.title}
        for chosen in data_sets
        for target in targets
        for row in settings("data", **chosen.budget(target), **plan, gamma=1.01, interval=interval)
    ]
    return rows + settings("interval", **data.budget(epsilon), **plan, gamma=gammas, interval=intervals)
