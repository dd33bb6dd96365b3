"""Training dynamics (notebook 05): which runs show them, one row per step of these, their bands, and the ablation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler

from hyfreedp.curvefit import QuadraticFit
from hyfreedp.experiments.runs.cells import read_steps, run_cells, tabulate
from hyfreedp.experiments.runs.methods import EXTENDED_GRID, METHODS
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.provenance import with_versions
from hyfreedp.experiments.tables import small_tasks
from hyfreedp.step_rules import gen

PROFILE_TASKS = {
    "smoke": ("digits",),
    "laptop": ("digits",),
    "gpu": ("gtsrb", "cifar10"),
    "paper": ("svhn", "gtsrb"),
}
SEARCHES = ("line_search", "paper")
INTERVALS = (1, 5, 10)

# Every step rule on every probe, all else as in the line search that the probe belongs to: (probe, rule) -> method.
RULES = {
    ("contrasts", "literal"): "line_search_literal",
    ("contrasts", "gen"): "line_search_gen",
    ("contrasts", "posterior"): "line_search",
    ("contrasts", "anchored"): "line_search_anchored",
    ("losses", "literal"): "paper_literal",
    ("losses", "gen"): "paper",
    ("losses", "posterior"): "paper_posterior",
    ("losses", "anchored"): "paper_anchored",
}
# The line search, whole and with one of its parts left out at a time.
PARTS = {
    "as it is": "line_search",
    "without damping": "line_search_undamped",
    "without warm-up": "line_search_cold",
    "with losses, not contrasts": "line_search_losses",
}
# What published versions of rule "gen" differ in: (weight of the new rate, batch that probes) -> method. The authors'
# package is (0.1, "next"), and 0.9 is an independent one's; Alg. 1 probes on the same batch and prints no smoothing.
SMOOTHINGS = {
    (0.1, "same"): "paper",
    (0.1, "next"): "paper_next",
    (0.9, "same"): "paper_fast",
    (0.9, "next"): "paper_fast_next",
}
# Both published rules for R_l, under a step rule that does not learn on small data and one that does:
# (step rule, rule for R_l) -> method.
LOSS_THRESHOLDS = {
    ("gen", "previous"): "paper_previous",
    ("gen", "sum"): "paper",
    ("anchored", "previous"): "paper_anchored_previous",
    ("anchored", "sum"): "paper_anchored",
}
ABLATION = tuple(
    dict.fromkeys([*RULES.values(), *PARTS.values(), *SMOOTHINGS.values(), *LOSS_THRESHOLDS.values(), "algorithm1"])
)

# What each is called in this notebook, by what sets it apart; the two that are presets elsewhere say so.
TITLES = {method: METHODS[method].title for method in ABLATION} | {
    "line_search": "contrasts, posterior (line_search)",
    "paper": "losses, gen (preset paper)",
}

# What tells the runs of this notebook apart.
SPEC_COLUMNS = ("task", "method", "epsilon", "seed", "learning_rate", "interval")


# -- which runs --------------------------------------------------------------------------------------------------------


def curve_specs(base: Spec, intervals: Sequence[int] = INTERVALS) -> list[Spec]:
    """Both line searches at every K; task, epsilon, seed and length are those of ``base``."""
    return [replace(base, method=method, interval=interval) for method, interval in product(SEARCHES, intervals)]


def robust_spec(base: Spec) -> Spec:
    """Preset robust at the task, the epsilon, the seed and the length of ``base``."""
    return replace(base, method="robust", learning_rate=Spec.learning_rate, interval=Spec.interval)


def ablation_specs(base: Spec) -> list[Spec]:
    """All methods of the ablation at the K of ``base``."""
    return [replace(base, method=method) for method in ABLATION]


def threshold_specs(base: Spec) -> list[Spec]:
    """Both rules for R_l under both step rules, at the K of ``base``."""
    return [replace(base, method=method) for method in LOSS_THRESHOLDS.values()]


def probes_to_reach(target: float, start: float) -> int:
    """After how many probes rule "gen" is at ``target`` if every one of them says: farther than you may go."""
    far, eta, probes = QuadraticFit(slope=1.0, curvature=1e-12, intercept=0.0), start, 0
    while eta < target:
        eta, probes = gen(far, eta).eta, probes + 1
    return probes


def tuned_by_hand(base: Spec, recorded: pd.DataFrame, folder: Path) -> Spec:
    """The grid's best rate, constant or with linear decay, by mean *test* accuracy: in its favour, and not private.

    Args:
        base: its task and epsilon are asked for, and the nearest epsilon recorded is taken.
        recorded: rows of the accuracy study. A task without rows gets its grid trained, one run (the seed of
            ``base``) per rate.
        folder: of the cells.
    """
    if base.task not in set(recorded.task):
        specs = [
            replace(base, method=method, learning_rate=rate)
            for method, rate in product(small_tasks.GRID_METHODS, EXTENDED_GRID)
        ]
        recorded = tabulate(run_cells(specs, folder, description=f"grid on {base.task}"))
    grid = small_tasks.summarise(recorded)
    grid = grid[(grid.task == base.task) & grid.method.isin(small_tasks.GRID_METHODS)]
    distance = np.log(grid.epsilon / base.epsilon).abs()
    grid = grid[distance == distance.min()]
    best = grid.loc[grid["mean"].idxmax()]
    return replace(base, method=str(best.method), learning_rate=float(best.learning_rate))


# -- tables ------------------------------------------------------------------------------------------------------------


def steps_of(specs: Iterable[Spec], folder: Path) -> pd.DataFrame:
    """The per-step rows of finished cells, one below the other, each with the spec of its run."""
    return pd.concat(
        [
            read_steps(spec, folder).assign(**{name: getattr(spec, name) for name in SPEC_COLUMNS})
            for spec in dict.fromkeys(specs)
        ],
        ignore_index=True,
    )


def of_spec(table: pd.DataFrame, spec: Spec) -> pd.DataFrame:
    """The rows of a spec in a table with its columns, whatever their seed."""
    names = [name for name in SPEC_COLUMNS if name != "seed"]
    return table[np.all([table[name] == getattr(spec, name) for name in names], axis=0)]


def bands(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """``median``, ``low`` and ``high`` (the range) of a column over the runs in ``rows``, for each step with values."""
    by_step = rows.dropna(subset=column).groupby("step")[column]
    return by_step.agg(["median", "min", "max"]).rename(columns={"min": "low", "max": "high"})


def probe_behaviour(rows: pd.DataFrame) -> pd.DataFrame:
    """What the probes of each run did: one row per run, with its spec.

    Returns:
        Columns beside the spec's: ``probes`` (their number); as shares of these, ``rejected`` (eta kept), ``clamped``
        (the rule's range was what decided), ``negative`` (the next eta is below zero) and ``clear`` (the slope is
        more than two standard deviations of its noise from zero); ``smallest_eta`` and ``largest_eta``, the extremes
        of the absolute rate without decay; ``last_loss_threshold``, R_l at the last probe.
    """
    probes = rows[rows.slope.notna()]
    marked = probes.assign(
        rejected=~probes.accepted.astype(bool),
        clamped=probes.reason.str.contains("clamped"),
        negative=probes.eta_next < 0,
        clear=probes.slope.abs() > 2 * probes.slope_std,
        size=probes.eta_next.abs(),
    )
    if "loss_threshold" not in marked:
        marked["loss_threshold"] = np.nan
    by_run = marked.groupby(list(SPEC_COLUMNS), sort=False)
    shares = by_run[["rejected", "clamped", "negative", "clear"]].mean()
    return shares.assign(
        probes=by_run.size(),
        smallest_eta=by_run["size"].min(),
        largest_eta=by_run["size"].max(),
        last_loss_threshold=by_run["loss_threshold"].last(),
    ).reset_index()


def peaks(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Where a column peaks and what is left of it at the end of each run: one row per run with values in it.

    Returns:
        Columns beside the spec's: ``peak``, ``peak_at`` (the share of the run before it) and ``last`` (over the peak).
    """
    table = []
    for spec, run in rows.dropna(subset=column).groupby(list(SPEC_COLUMNS), sort=False):
        highest = run.loc[run[column].idxmax()]
        shape = (highest[column], highest.step / run.step.max(), run[column].iloc[-1] / highest[column])
        table.append([*spec, *shape])
    return pd.DataFrame(table, columns=[*SPEC_COLUMNS, "peak", "peak_at", "last"])


def ablation_table(records: Iterable[dict[str, Any]], folder: Path) -> pd.DataFrame:
    """One row per run: the spec, its result (``runs.cells.tabulate``) and :func:`probe_behaviour`."""
    table = tabulate(records)
    specs = [Spec(**record["spec"]) for record in records]
    behaviour = probe_behaviour(steps_of(specs, folder))
    return table.merge(behaviour, on=list(SPEC_COLUMNS), how="left", validate="one_to_one")


def record_ablation(folder: Path, table: Path, *, seeds: int = 5, jobs: int = 1) -> pd.DataFrame:
    """Run what is missing of the ablation on digits, at the study's three epsilons, and write one row per run."""
    specs = [
        spec
        for epsilon, seed in product(small_tasks.EPSILONS, range(seeds))
        for spec in ablation_specs(Spec(task="digits", epsilon=epsilon, seed=seed))
    ]
    rows = ablation_table(run_cells(specs, folder, jobs=jobs, description="ablation"), folder)
    rows = with_versions(rows)
    write_csv(table, rows)
    return rows


def spread(values: pd.Series) -> str:
    """Mean and standard deviation with one decimal, as text; the mean alone of a single value."""
    return f"{values.mean():.1f}" + (f" ± {values.std():.1f}" if len(values) > 1 else "")


def probe_table(rows: pd.DataFrame, results: pd.DataFrame, specs: Iterable[Spec]) -> pd.DataFrame:
    """How clearly the probes of each spec saw the slope, and what the runs reached.

    Args:
        rows: of :func:`steps_of`.
        results: of ``runs.cells.tabulate``.
        specs: line searches.

    Returns:
        One row per spec: ``task``, ``method``, ``K``; ``probes`` of a run; medians, over seeds and the probes after the
        first tenth of the run, of the noise of the slope over one probe distance, in units of the threshold (``noise /
        R``) and in nats, and of the size of the slope in units of its noise (``|b| / noise``); ``accuracy`` in percent,
        as text.
    """
    table = []
    for spec in specs:
        chosen = of_spec(rows, spec)
        probes = chosen.dropna(subset="slope")
        count = len(probes) // probes.seed.nunique()
        probes = probes[probes.step >= 0.1 * (chosen.step.max() + 1)]
        noise = probes.slope_std * probes.distance
        kind = "difference" if METHODS[spec.method].settings.probe == "contrasts" else "loss"
        threshold = probes[f"{kind}_threshold"]
        clear = (probes.slope / probes.slope_std).abs()
        medians = ((noise / threshold).median(), noise.median(), clear.median())
        table.append([spec.task, spec.method, spec.interval, count, *medians, reached(results, spec)])
    columns = ["task", "method", "K", "probes", "noise / R", "noise (nats)", "|b| / noise", "accuracy"]
    return pd.DataFrame(table, columns=columns)


def accuracy_table(rows: pd.DataFrame, methods: Sequence[str] = ABLATION) -> pd.DataFrame:
    """Final test accuracy in percent, mean and standard deviation over seeds as text: methods by epsilon."""
    percent = rows.assign(percent=100 * rows.accuracy).groupby(["method", "epsilon"]).percent
    text = percent.agg(spread).unstack()
    text = text.loc[[method for method in methods if method in text.index], ::-1]
    return text.rename(index=TITLES).rename_axis(index=None)


def behaviour_table(rows: pd.DataFrame, results: pd.DataFrame, base: Spec) -> pd.DataFrame:
    """What the probes of each method of the ablation did, averaged over seeds, and what it reached.

    Args:
        rows: of :func:`steps_of`.
        results: of ``runs.cells.tabulate``.
        base: its task and interval are those of the ablation.

    Returns:
        One row per method: ``what`` (its title), in percent of the probes ``clear``, ``rejected``, ``clamped`` and
        ``negative``, ``smallest_eta`` and ``largest_eta`` of all runs (see :func:`probe_behaviour`), ``accuracy`` in
        percent and as text with its deviation in ``spread``.
    """
    by_method = probe_behaviour(of_ablation(rows, base)).groupby("method")
    shares = 100 * by_method[["clear", "rejected", "clamped", "negative"]].mean()
    extremes = by_method.agg(smallest_eta=("smallest_eta", "min"), largest_eta=("largest_eta", "max"))
    here = of_ablation(results, base)
    final = (100 * here.accuracy).groupby(here.method)
    table = shares.round(0).join(extremes).join(final.agg(accuracy="mean", spread=spread)).loc[list(ABLATION)]
    table.insert(0, "what", [TITLES[method] for method in table.index])
    return table


def shown(table: pd.DataFrame, methods: Iterable[str]) -> Styler:
    """Some rows of :func:`behaviour_table`, to be read."""
    shares = ["clear", "rejected", "clamped", "negative"]
    chosen = table.loc[list(methods)].drop(columns="accuracy").rename(columns={"spread": "accuracy (%)"})
    formats = dict.fromkeys(shares, "{:.0f}") | dict.fromkeys(["smallest_eta", "largest_eta"], "{:.1e}")
    return chosen.style.format(formats).hide(axis="index")


def of_ablation(table: pd.DataFrame, base: Spec) -> pd.DataFrame:
    """The rows of all methods of the ablation at the task and the interval of ``base``."""
    return table[(table.task == base.task) & (table.interval == base.interval) & table.method.isin(ABLATION)]


def late_medians(rows: pd.DataFrame, base: Spec) -> pd.DataFrame:
    """Medians of R_l, released and test loss over the second half of all runs, by the keys of ``LOSS_THRESHOLDS``."""
    found = {}
    for rules, method in LOSS_THRESHOLDS.items():
        chosen = of_spec(rows, replace(base, method=method))
        late = chosen[chosen.step >= 0.5 * chosen.step.max()]
        found[rules] = late[["loss_threshold", "private_loss", "test_loss"]].median()
    return pd.DataFrame(found).T


def reached(results: pd.DataFrame, spec: Spec) -> str:
    """Final test accuracy of a spec in percent over seeds, as text."""
    return f"{spread(100 * of_spec(results, spec).accuracy)} %"


def losses_by_budget(rows: pd.DataFrame) -> list[str]:
    """What leaving out each part of the line search costs at epsilon 8, 3 and 1, from :func:`record_ablation`."""
    means = 100 * rows.groupby(["method", "epsilon"]).accuracy.mean().unstack()[[8.0, 3.0, 1.0]]
    return [
        f"{TITLES[method]}: {', '.join(f'{points:+.1f}' for points in means.loc[method] - means.loc['line_search'])} "
        "points"
        for method in PARTS.values()
        if method != "line_search"
    ]
