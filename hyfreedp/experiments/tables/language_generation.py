"""Notebook 06: the runs of Tab. gpt2 and Fig. llama, their scores, and the paper's beside them."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from hyfreedp.experiments.runs.cells import read_cell, read_steps, reader, run_cells
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.tables import paper
from hyfreedp.experiments.tables.plan import ROWS, Learner, Scale, entries, finals, searches, table
from hyfreedp.experiments.tasks.language import LANGUAGE_TASKS, Documents, LanguageTask

METRICS = ("BLEU", "NIST", "METEOR", "ROUGE_L", "CIDEr")
TABLE = "language_generation.csv"
CELL = ["task", "model", "tuning", "epsilon", "row"]

_ALL = ("grid", "dadaptation", "prodigy", "reference", "hyfreedp_paper", "hyfreedp_robust")
# The extended grid costs three runs more per epsilon, and stands in for the paper's where time is no matter.
_LARGE = ("grid", "grid_extended", *_ALL[1:])
_DYNAMICS = ("grid", "reference", "hyfreedp_paper", "hyfreedp_robust")


def sentences_scale(profile: str, dataset: str, epsilons: Sequence[float], seeds: int) -> Scale:
    """The runs of the table.

    Args:
        profile: "smoke", "laptop", "gpu" or "paper".
        dataset: "restaurants" or "e2e". On a laptop runs on the latter are short; the two large profiles train whole
            ones on GPT-2's architecture, from its real weights if ``$HYFREEDP_WEIGHTS`` has them ("paper": always).
        epsilons, seeds: of the table.
    """
    if profile in ("smoke", "laptop"):
        task = "restaurants" if dataset == "restaurants" else "e2e_short"
        learner = Learner(task, "gpt2_sentences", "full", 6 if profile == "smoke" else None)
    else:
        real = profile == "paper" or bool(os.environ.get("HYFREEDP_WEIGHTS"))
        task = "restaurants" if dataset == "restaurants" else "e2e"
        learner = Learner(task, "gpt2" if real else "gpt2_small_sentences", "full")
    rows = (
        ("dadaptation", "hyfreedp_paper", "hyfreedp_robust")
        if profile == "smoke"
        else _ALL
        if profile == "laptop"
        else _LARGE
    )
    return Scale((learner,), epsilons=tuple(epsilons), seeds=seeds, rows=rows)


def documents_scale(profile: str, source: str | None, epsilon: float, seeds: int) -> Scale:
    """The runs of the figure: LoRA on a LLaMA, at one epsilon.

    Args:
        profile: "smoke" and "laptop" train a tiny LLaMA from weights of our own, the others LLaMA-2-7B.
        source: documents, see :attr:`hyfreedp.experiments.runs.spec.Spec.source`; synthetic reports if None.
        epsilon, seeds: of the figure.
    """
    model = "llama_sentences" if profile in ("smoke", "laptop") else "llama2_7b"
    learner = Learner("reports", model, "lora", 6 if profile == "smoke" else None, source)
    rows = _DYNAMICS[2:] if profile == "smoke" else _DYNAMICS
    return Scale((learner,), epsilons=(epsilon,), seeds=seeds, rows=rows)


def trained(scale: Scale, cells: Path, *, jobs: int) -> list[Spec]:
    """Train what is missing, first the searches; the runs whose numbers are shown."""
    run_cells(searches(scale), cells, jobs=jobs, description="searches")
    shown = finals(scale, reader(cells))
    run_cells(shown, cells, jobs=jobs, description="tested runs")
    return shown


def scored(scale: Scale, cells: Path, *, jobs: int) -> pd.DataFrame:
    """Train and score every run of the table.

    Returns:
        The columns of :func:`hyfreedp.experiments.tables.plan.table` (``accuracy`` is that of test tokens),
        ``perplexity`` (of test tokens) and ``METRICS``; METEOR is NaN without Java.
    """
    shown = trained(scale, cells, jobs=jobs)
    for spec in tqdm([spec for spec in shown if _known_scores(spec, cells) is None], desc="scores", unit="run"):
        _score(spec, cells)
    rows = table(scale, reader(cells))
    scores = pd.DataFrame(
        [
            {"key": spec.key, "perplexity": math.exp((read_cell(spec, cells) or {})["loss"])}
            | (_known_scores(spec, cells) or {})
            for spec in shown
        ]
    )
    return rows.merge(scores, on="key", how="left").astype(dict.fromkeys(METRICS, float))


def _known_scores(spec: Spec, cells: Path) -> dict[str, Any] | None:
    path = cells / f"{spec.key}.scores.json"
    if not path.exists():
        return None
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    without_java = known["METEOR"] is None
    return None if without_java and shutil.which("java") else known


def _score(spec: Spec, cells: Path) -> None:
    from hyfreedp.experiments.tasks import nlg_metrics

    task, record = spec.problem, read_cell(spec, cells)
    assert isinstance(task, LanguageTask) and record is not None
    texts = task.load()
    assert not isinstance(texts, Documents)
    scores = nlg_metrics.scores([references for _, references in texts.test], record["outputs"])
    write_text(cells / f"{spec.key}.scores.json", json.dumps(scores))


def summarise(rows: pd.DataFrame) -> pd.DataFrame:
    """Over seeds: one line per place, method and metric (perplexity too), with ``mean``, ``std`` and ``count``."""
    long = rows.melt(id_vars=[*CELL, "seed"], value_vars=[*METRICS, "perplexity"], var_name="metric")
    return long.groupby([*CELL, "metric"], sort=False).value.agg(["mean", "std", "count"]).reset_index()


def with_paper(summary: pd.DataFrame) -> pd.DataFrame:
    """The summary with ``paper``, what Tab. gpt2 prints for the same method, epsilon and metric; NaN if nothing."""
    printed = paper.load("gpt2").rename(columns={"value": "paper"})[["epsilon", "method", "metric", "paper"]]
    named = summary.assign(method=summary.row.map({name: row.paper for name, row in ROWS.items()}))
    return named.merge(printed, on=["epsilon", "method", "metric"], how="left").drop(columns="method")


def printed(summary: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The table as the paper prints it: blocks of epsilon, a line per method, a column per metric.

    Args:
        summary: of :func:`with_paper`, of one task and model.

    Returns:
        Strings "paper | ours +- std", and the differences that colour it, in percent: ours less that of the grid search
        of the same epsilon and metric, relative to the latter; for perplexity the sign is turned round.
    """
    chosen = summary.copy()
    grid = chosen[chosen.row == "grid"].set_index(["epsilon", "metric"])["mean"]
    reference = pd.Series(
        [grid.get(place, math.nan) for place in chosen[["epsilon", "metric"]].itertuples(index=False, name=None)],
        chosen.index,
    )
    sign = chosen.metric.map(lambda name: -100.0 if name == "perplexity" else 100.0)
    chosen["difference"] = sign * (chosen["mean"] - reference) / reference
    chosen["text"] = [_text(*values) for values in zip(*(chosen[c] for c in ("paper", "mean", "std")), strict=True)]
    order = pd.MultiIndex.from_frame(chosen[["epsilon", "row"]].drop_duplicates())
    columns = [*METRICS, "perplexity"]
    texts, differences = (
        chosen.pivot(index=["epsilon", "row"], columns="metric", values=value).reindex(order, columns=columns)
        for value in ("text", "difference")
    )
    for frame in (texts, differences):
        frame.index = pd.MultiIndex.from_tuples(
            [(f"{epsilon:g}", ROWS[row].title) for epsilon, row in frame.index], names=["epsilon", "method"]
        )
        frame.columns.name = None
    return texts, differences


def _text(printed_value: float, mean: float, std: float) -> str:
    theirs = "–" if math.isnan(printed_value) else f"{printed_value:.3f}"
    if math.isnan(mean):
        return f"{theirs} | not available"
    return f"{theirs} | {mean:.3f}" + ("" if math.isnan(std) else f" ± {std:.3f}")


def examples(scale: Scale, cells: Path, numbers: Sequence[int]) -> pd.DataFrame:
    """Sentences side by side: for each meaning its first reference and what every method wrote with seed 0.

    Args:
        scale: trained.
        cells: of the runs.
        numbers: which meanings of the test part.

    Returns:
        ``meaning``, ``epsilon`` (NaN for the reference), ``method``, ``sentence``.
    """
    read = reader(cells)
    texts = LANGUAGE_TASKS[scale.learners[0].task].load()
    assert not isinstance(texts, Documents)
    lines = []
    for number in numbers:
        meaning, references = texts.test[number]
        lines.append((meaning, math.nan, "reference", references[0]))
        for entry in entries(replace(scale, seeds=1)):
            final = entry.final(read)
            record = None if final is None else read(final)
            if record is not None:
                lines.append((meaning, entry.epsilon, ROWS[entry.row].title, record["outputs"][number]))
    return pd.DataFrame(lines, columns=["meaning", "epsilon", "method", "sentence"])


def dynamics(scale: Scale, cells: Path, *, jobs: int) -> pd.DataFrame:
    """Train the runs of the figure; one line per step, with ``row`` and ``seed``.

    Returns:
        What the figure draws: ``eta``, ``loss_threshold`` (R_l), ``private_loss`` (released), ``test_loss`` in nats per
        token and ``test_perplexity``; NaN where a step or a method has none.
    """
    trained(scale, cells, jobs=jobs)
    read = reader(cells)
    names = ["step", "eta", "loss_threshold", "private_loss", "test_loss"]
    frames = []
    for entry in entries(scale):
        final = entry.final(read)
        assert final is not None
        frames.append(read_steps(final, cells).reindex(columns=names).assign(row=entry.row, seed=entry.seed))
    rows = pd.concat(frames, ignore_index=True)
    return rows.assign(test_perplexity=rows.test_loss.map(math.exp, na_action="ignore"))
