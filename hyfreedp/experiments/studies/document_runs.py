"""Fig. "llama" (notebook 07): learned and constant rates of a LLaMA with LoRA, trained on documents."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from hyfreedp.experiments.runs.cells import Spec, read_steps, reader, run_cells
from hyfreedp.experiments.store.files import write_csv
from hyfreedp.experiments.store.provenance import with_versions
from hyfreedp.experiments.store.verdicts import Verdict, Whose, by_data_sets
from hyfreedp.experiments.tables.grid import train_missing
from hyfreedp.experiments.tables.image_classification import OURS
from hyfreedp.experiments.tables.plan import Learner, Scale, entries

NO_NOISE = "no_noise"  # a row: preset paper without privacy
NOISELESS_LOSSES = "noiseless_losses"  # a row: the paper's noise on gradients, a millionth of its noise on losses
METHODS = ("grid", "grid_extended", "reference", "hyfreedp_paper", "hyfreedp_claimed", "hyfreedp_robust")
TABLE, EPSILON, SEEDS = "desktop/documents.csv", 8.0, 3  # of the committed record
VALUES = ("eta", "loss_threshold", "test_loss")
EVERY = 3  # one of so many steps is recorded, and all steps with an evaluation
# Marks: the least ratio of largest to first rate, the greatest ones of last to largest, and of perplexity to another's.
ROSE, FELL, AS_WELL = 1.1, 0.9, 1.05


def documents_scale(profile: str, source: str | None, epsilon: float, seeds: int) -> Scale:
    """The private runs of the figure: LoRA on a tiny LLaMA or, at profiles gpu and paper, on LLaMA-2-7B.

    ``source`` is a file of documents; None: the synthetic reports.
    """
    model = "llama_sentences" if profile in ("smoke", "laptop", "desktop") else "llama2_7b"
    learner = Learner("reports", model, "lora", 6 if profile == "smoke" else None, source)
    return Scale((learner,), (epsilon,), seeds, METHODS[3:] if profile == "smoke" else METHODS)


def dynamics(scale: Scale, cells: Path, *, jobs: int) -> pd.DataFrame:
    """Train the runs of the figure and two controls, without privacy and without noise on losses.

    Returns:
        One row per step: ``row``, ``seed``, ``epsilon_run``, which the run really spent, ``step``, ``eta``,
        ``loss_threshold`` (R_l) and ``test_loss`` in nats per token; NaN if a step or method has none.
    """
    wanted = list(entries(scale))
    train_missing(wanted, cells, jobs=jobs)
    read = reader(cells)
    runs = [(entry.row, cast(Spec, entry.final(read))) for entry in wanted]
    free = [replace(run, epsilon=math.inf) for row, run in runs if row == "hyfreedp_paper" and run.seed == 0]
    bare = [replace(run, method="paper_noiseless_losses") for row, run in runs if row == "hyfreedp_claimed"]
    run_cells([*free, *bare], cells, jobs=jobs, description="controls")
    frames = []
    for row, run in [*runs, *((NO_NOISE, run) for run in free), *((NOISELESS_LOSSES, run) for run in bare)]:
        named = {"row": row, "seed": run.seed, "epsilon_run": cast(dict[str, Any], read(run))["epsilon_spent"]}
        frames.append(read_steps(run, cells).reindex(columns=["step", *VALUES]).assign(**named))
    return pd.concat(frames, ignore_index=True)


def record(source: str, cells: Path, table: Path, *, jobs: int) -> pd.DataFrame:
    """Train what is missing on the documents in a file; write recorded steps, with versions; return all steps."""
    rows = dynamics(documents_scale("desktop", source, EPSILON, SEEDS), cells, jobs=jobs)
    write_csv(table, with_versions(rows[(rows.step % EVERY == 0) | rows.test_loss.notna()]))
    return rows


def rates(curves: pd.DataFrame) -> pd.DataFrame:
    """One row per run: ``epsilon_run``, its ``first``, ``largest`` and ``last`` rate, and its last ``perplexity``."""
    ordered = curves.sort_values("step", kind="stable").groupby(["row", "seed", "epsilon_run"], sort=False)
    found = ordered.eta.agg(first="first", largest="max", last="last")
    return found.assign(perplexity=np.exp(ordered.test_loss.last())).reset_index()


def judged(found: pd.DataFrame, data: str) -> list[Verdict]:
    """Verdicts on Fig. "llama" by :func:`rates`: "not shown", as one data set, named ``data``, has no interval."""
    runs, decided = found.set_index("row"), []
    for row, case in (("hyfreedp_claimed", "the paper's accounting"), ("hyfreedp_paper", "sound accounting")):
        at = runs.loc[[row]]
        rise, fall = at.largest / at["first"], at["last"] / at.largest
        both = (rise >= ROSE) & (fall <= FELL)
        number = f"{both.sum()} of {len(at)} runs, {data}: to {rise.min():.2f} to {rise.max():.2f} times its first, "
        number += f"then to {fall.min():.2f} to {fall.max():.2f} of that; epsilon {at.epsilon_run.mean():.2f}"
        claim = 'Fig. "llama": the learned rate increases, then decreases'
        outcome = by_data_sets(both.set_axis([data] * len(at)).astype(float), least=1.0)
        decided.append(Verdict(claim, outcome, number, case=case))
    searches = runs.perplexity[runs.index.str.startswith("grid")].groupby("row").mean()
    better = 'Fig. "llama": it generalises better than the early-stopped grid search'
    claims: list[tuple[str, str, Whose, str, float]] = [
        ("hyfreedp_claimed", better, "the paper's", "", 1.0),
        ("hyfreedp_robust", OURS, "ours", data, AS_WELL),
    ]
    for row, claim, whose, case, most in claims:
        if row in runs.index and "grid" in searches:  # not at profile smoke
            ratio = runs.perplexity[[row]] / (searches.min() if case else searches["grid"])
            number = f"test perplexity {ratio.min():.2f} to {ratio.max():.2f} times that of the search, which is not "
            number += f"stopped early; {len(ratio)} runs, {data}"
            outcome = by_data_sets(ratio.set_axis([data] * len(ratio)), most=most)
            decided.append(Verdict(claim, outcome, number, whose, case))
    return decided
