"""Notebook 07: the runs of Tab. gpt2, their scores beside the paper's, and verdicts."""

from __future__ import annotations

import json
import math
import os
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from hyfreedp.experiments.runs.cells import reader
from hyfreedp.experiments.store import archive
from hyfreedp.experiments.store.files import key_of, write_csv, write_text
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.experiments.store.provenance import columns_of, environment
from hyfreedp.experiments.store.verdicts import COMPARABLE_SCORE, POOR_SCORE, Verdict, Whose, by_data_sets
from hyfreedp.experiments.tables import paper, plan
from hyfreedp.experiments.tables.grid import train_missing
from hyfreedp.experiments.tables.image_classification import CLOSE, OURS
from hyfreedp.experiments.tables.plan import CELL, NUMBER, ROWS, Learner, Scale, entries, finals, searches, table
from hyfreedp.experiments.tasks.language_tasks import LANGUAGE_TASKS, LanguageTask

METRICS = ("BLEU", "NIST", "METEOR", "ROUGE_L", "CIDEr")
TABLE = "language_generation.csv"
START = "start"  # the row of the model before private training, at epsilon 0
_WELL, _POORLY = {"least": COMPARABLE_SCORE}, {"most": POOR_SCORE}
CLAIMS: dict[str, tuple[str, Whose, str, dict[str, float]]] = {  # by row: claim, whose, case, mark for share of BLEU
    "hyfreedp_paper": (CLOSE, "the paper's", 'Tab. "gpt2"', _WELL),
    "dadaptation": ('Tab. "gpt2": D-Adaptation does not perform well', "the paper's", "", _POORLY),
    "prodigy": ('Tab. "gpt2": Prodigy does not perform well', "the paper's", "", _POORLY),
    "hyfreedp_robust": (OURS, "ours", "texts of E2E", _WELL),
}
TITLES = plan.TITLES | {START: "public start, not trained"}

# The extended grid trains three rates more per epsilon than the paper's.
_ROWS = ("grid", "grid_extended", "dadaptation", "prodigy", "reference", "hyfreedp_paper", "hyfreedp_robust")


def e2e_scale(profile: str, seeds: int) -> Scale:
    """The runs of the table on E2E: GPT-2's architecture at profiles gpu and paper, else a tiny model.

    The large model starts from GPT-2's weights at profile paper, or if ``$HYFREEDP_WEIGHTS`` is set; else from ours.
    """
    large = profile in ("gpu", "paper")
    real = profile == "paper" or bool(os.environ.get("HYFREEDP_WEIGHTS"))
    model = ("gpt2" if real else "gpt2_small_sentences") if large else "gpt2_sentences_fused"
    return Scale((Learner("e2e", model, "full"),), epsilons=(3.0, 8.0), seeds=seeds, rows=_ROWS)


# The committed runs: the tiny model on all of E2E, about thirteen hours of one core.
DESKTOP = e2e_scale("desktop", 2)


def scored(scale: Scale, profile: str, cells: Path, *, train: bool = True, jobs: int = 1) -> pd.DataFrame:
    """The numbers of the table, the first row being the model before training (row ``START``, epsilon 0, one seed).

    Args:
        scale: with one learner.
        profile: the one whose committed table fills numbers without a cell.
        train: whether to train missing runs first.

    Returns:
        The columns of :func:`hyfreedp.experiments.tables.plan.table` (``accuracy`` is that of test tokens),
        ``perplexity``, ``METRICS`` (the last three NaN without Java), date, versions and hardware.
    """
    learner, read = scale.learners[0], reader(cells)
    committed = workspace().results / profile / TABLE
    if train:
        train_missing(entries(scale), cells, jobs=jobs)
    records = {spec.key: found for spec in finals(entries(scale), read) if (found := read(spec)) is not None}
    rows = table(scale, read)
    first = {name: getattr(learner, name) for name in plan.LEARNER}
    first |= {"epsilon": 0.0, "row": START, "seed": 0, "runs": 0}
    start = public_start(learner, cells, train=train)
    if start.exists():
        records[start.stem] = json.loads(start.read_text(encoding="utf-8"))
        first |= {"accuracy": records[start.stem]["accuracy"], "epsilon_run": 0.0, "key": start.stem}
    rows = pd.DataFrame([first, *rows.to_dict("records")], columns=rows.columns)
    lines = [
        {"key": key, "perplexity": math.exp(record["loss"])}
        | _scores(key, LANGUAGE_TASKS[learner.task], record["outputs"], cells)
        | columns_of(record)
        for key, record in tqdm(records.items(), desc="scores", unit="run", delay=10, leave=False)
    ]
    scores = pd.DataFrame(lines, columns=None if lines else ["key", "perplexity", *METRICS])
    rows = rows.astype({"key": object}).merge(scores, on="key", how="left").astype(dict.fromkeys(METRICS, float))
    if not committed.exists():
        return rows
    # If the same run is committed with a METEOR, its committed scores are taken: Java may be missing here.
    before, run = pd.read_csv(committed), [*NUMBER, "key"]
    same = rows.merge(before.dropna(subset="METEOR")[run], on=run, how="left", indicator=True)._merge == "both"
    always = [*NUMBER, "runs"]
    return plan.filled(rows[always].join(rows.drop(columns=always)[~same]), before)


def record(cells: Path, results: Path, *, train: bool, jobs: int = 1) -> str:
    """Write the table of ``DESKTOP`` and the archive of its runs, after unpacking the old archive into ``cells``."""
    scale, path, runs = DESKTOP, results / "desktop" / TABLE, results / "desktop" / archive.NAME
    before = archive.read(runs)
    archive.unpack(before, cells)
    rows = scored(scale, "desktop", cells, train=train, jobs=jobs)
    specs = [*searches(entries(scale)), *finals(entries(scale), reader(cells))]
    spec_of = {Path(name).stem: json.loads(before[name]).get("spec", {}) for name in before if name.endswith(".json")}
    others = {key for key, of in spec_of.items() if of.get("task") != "e2e" or of["evaluation"] == "validation"}
    kept = archive.pack(cells, runs, {spec.key for spec in specs} | set(rows.key) | others)
    write_csv(path, rows)
    return f"{path}: {len(rows)} numbers, {rows.accuracy.isna().sum()} of them still missing; {kept} runs"


def public_start(learner: Learner, cells: Path, *, train: bool) -> Path:
    """The path of a record of the model before training: ``accuracy``, ``loss`` (of test tokens) and ``outputs``.

    With ``train`` it is written if it does not exist.
    """
    task = LANGUAGE_TASKS[learner.task]
    named = {"task": learner.task, "model": learner.model, "weights": task.architecture(learner.model).checksum()}
    path = cells / f"start-{key_of(named)}.json"
    if train and not path.exists():
        model = task.model(seed=0, name=learner.model)
        found = task.evaluate(model, task.datasets("test", learner.model)[1], learner.model)
        record: dict[str, Any] = {"accuracy": found.accuracy, "loss": found.loss}
        record |= {"outputs": task.outputs(model, learner.model), "date": str(date.today())}
        write_text(path, json.dumps(record | {"environment": environment()}, indent=1))
    return path


def _scores(key: str, task: LanguageTask, outputs: list[str], cells: Path) -> dict[str, Any]:
    """The five scores of a cell's sentences, cached beside it; computed again if Java was missing and now is not."""
    from hyfreedp.experiments.tasks import nlg_metrics

    path = cells / f"{key}-{key_of({'outputs': outputs})}.scores.json"  # another machine may generate others
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if known["METEOR"] is not None or not shutil.which("java"):
            return known
    scores = nlg_metrics.scores([references for _, references in task.load().test], outputs)
    write_text(path, json.dumps(scores))
    return scores


def summarise(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per place, method and metric: ``mean``, ``std``, ``low``, ``high`` (the range), ``count`` over seeds."""
    long = rows.melt(id_vars=NUMBER, value_vars=[*METRICS, "perplexity"], var_name="metric")
    groups = long.groupby([*CELL, "metric"], sort=False).value
    return groups.agg(mean="mean", std="std", low="min", high="max", count="count").reset_index()


def with_paper(summary: pd.DataFrame) -> pd.DataFrame:
    """The summary with a column ``paper``: Tab. gpt2's number for the same method, epsilon and metric, or NaN."""
    printed = paper.load("gpt2").rename(columns={"value": "paper"})[["epsilon", "method", "metric", "paper"]]
    named = summary.assign(method=summary.row.map({name: row.paper for name, row in ROWS.items()}))
    return named.merge(printed, on=["epsilon", "method", "metric"], how="left").drop(columns="method")


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of the grid search's BLEU at the same seed, by row and epsilon: the mean over seeds that both have."""
    bleu = rows[rows.epsilon > 0].pivot(index=["epsilon", "seed"], columns="row", values="BLEU")
    return bleu.div(bleu.grid, axis=0).groupby("epsilon").mean().T


def judged(rows: pd.DataFrame) -> list[Verdict]:
    """Verdicts on Tab. gpt2 by :func:`shares`: "not shown", as E2E is one data set, without an interval."""
    bleu, decided = shares(rows), []
    for row, (claim, whose, case, mark) in CLAIMS.items():
        found = bleu.loc[row].dropna()
        told, budgets = " and ".join(f"{one:.0%}" for one in found), " and ".join(f"{one:g}" for one in found.index)
        sides = ", ".join(f"at {side} {value:.0%}" for side, value in mark.items())
        number = f"{told} of the search's BLEU on E2E at epsilon = {budgets}, one data set (mark: {sides})"
        decided.append(Verdict(claim, by_data_sets(found.set_axis(["E2E"] * len(found)), **mark), number, whose, case))
    return decided


def written(rows: pd.DataFrame, cells: Path, number: int) -> pd.DataFrame:
    """The sentences for test input ``number`` (from 0): a row for each run whose sentences are stored."""
    files = archive.read(workspace().results / "desktop" / archive.NAME)
    lines = []
    for row in rows.dropna(subset="key").to_dict("records"):
        name, path = f"{row['key']}.json", cells / f"{row['key']}.json"
        record = json.loads(path.read_bytes() if path.exists() else files.get(name, b"{}"))
        if "outputs" in record:
            lines.append((TITLES[row["row"]], row["epsilon"], row["BLEU"], record["outputs"][number]))
    return pd.DataFrame(lines, columns=["method", "epsilon", "BLEU", "sentence"])
