"""The paper's tables, from its LaTeX source to data/paper: ``python -m ....tables.paper_tables PAPER.tex``.

Numbers are copied as printed, trailing zeros included. Names are the paper's, but for its own method, which is
"HyFreeDP" here, and the two spellings of D-Adaptation, which become one.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hyfreedp.experiments.store.files import replacing
from hyfreedp.experiments.tables.paper import COLUMNS, PAPER

Row = tuple[str, ...]  # without the name of the table: tuning, epsilon, method, model, dataset, metric, value, std

_NAMES = {
    r"\ours": "HyFreeDP",
    "Ours (this work)": "HyFreeDP",
    "D-adaptation": "D-Adaptation",
    "NonDP": "inf",
    r"ROUGE\_L": "ROUGE_L",
}
_TUNINGS = {"Fully Fine-Tune": "full", "Full Fine-Tune": "full", "BitFit Fine-Tune": "bitfit"}
_MARKS = {r"\checkmark": "1", r"$\times$": "0"}
_RULES = re.compile(r"\\(?:toprule|midrule|bottomrule|hline|cmidrule)(?:\[\w+\])?(?:\(lr\))?(?:\{[\d-]+\})?")
_NUMBER = r"\d+(?:\.\d+)?"
_WITH_STD = re.compile(rf"({_NUMBER})(?:\\pm\\scriptscriptstyle({_NUMBER}))?")
_MINUTES = re.compile(rf"({_NUMBER})\s*\(\$\\times\$ ({_NUMBER})\)")
_PERCENT = re.compile(rf"(\$\\approx\$|\$<\$)?({_NUMBER})\\%")
_PERCENT_METRICS = {None: "budget_percent", r"$\approx$": "budget_percent_about", "$<$": "budget_percent_below"}


def cells(source: str, label: str) -> list[list[str]]:
    """The rows of the table with this LaTeX label, as lists of stripped cells.

    A cell that spans several columns is followed by empty ones.

    Raises:
        ValueError: there is no such table.
    """
    for table in re.findall(r"\\begin\{table\}.*?\\end\{table\}", source, re.DOTALL):
        if rf"\label{{{label}}}" in table:
            break
    else:
        raise ValueError(f"the source has no table labelled {label!r}")
    body = re.search(r"\\begin\{tabular\}\{[^}]*\}(.*)\\end\{tabular\}", table, re.DOTALL)
    if body is None:
        raise ValueError(f"table {label!r} has no tabular")
    lines = (_RULES.sub("", line).strip() for line in body[1].split(r"\\"))
    return [[cell.strip() for cell in _spread(line).split("&")] for line in lines if line]


def _spread(line: str) -> str:
    spans = re.sub(r"\\multicolumn\{(\d)\}\{\w+\}\{([^}]*)\}", lambda m: m[2] + "&" * (int(m[1]) - 1), line)
    return re.sub(r"\\multirow\{\d\}\{\*\}\{([^}]*)\}", r"\1", spans)


def _name(cell: str) -> str:
    plain = re.sub(r"~?\\cite\{\w+\}|\$|\\epsilon=", "", cell).strip()
    return _NAMES.get(plain, plain)


def _number(cell: str) -> tuple[str, str]:
    """The value and its standard deviation, empty if none is printed."""
    found = _WITH_STD.fullmatch(re.sub(r"[${}\s]|\\ul|\\textbf", "", cell))
    if found is None:
        raise ValueError(f"not a number: {cell!r}")
    return found[1], found[2] or ""


def _carried(row: list[str]) -> list[str]:
    """Empty cells take the value on their left: what a spanning header says of each of its columns."""
    result: list[str] = []
    for cell in row:
        result.append(cell or result[-1])
    return result


def accuracies(rows: list[list[str]]) -> Iterator[Row]:
    """Tab. cv_main and its two relatives in the appendix: blocks of a tuning, a header each, budgets and methods."""
    tuning, epsilon, models, datasets = "", "", [""], [""]
    for row in rows:
        if row[0] in _TUNINGS:
            tuning, models = _TUNINGS[row[0]], _carried(row[2:])
        elif row[0] == "Privacy budget":
            datasets = row[2:]
        else:
            epsilon = _name(row[0]) or epsilon
            for model, dataset, cell in zip(models, datasets, row[2:], strict=True):
                yield tuning, epsilon, _name(row[1]), model, dataset, "accuracy_percent", *_number(cell)


def scheduled(rows: list[list[str]]) -> Iterator[Row]:
    """Tab. nondp_ls: one method, one row per budget."""
    models, datasets = _carried(["Privacy Budget", *rows[0][1:]])[1:], rows[1][1:]
    for row in rows[2:]:
        for model, dataset, cell in zip(models, datasets, row[1:], strict=True):
            yield "full", _name(row[0]), "NonDP-GS w/ LS", model, dataset, "accuracy_percent", *_number(cell)


def language(rows: list[list[str]]) -> Iterator[Row]:
    """Tab. gpt2: budgets across, five scores each."""
    epsilons, metrics = [_name(cell) for cell in _carried(rows[0][2:])], [_name(cell) for cell in rows[1][2:]]
    model = ""
    for row in rows[2:]:
        model = row[0] or model
        for epsilon, metric, cell in zip(epsilons, metrics, row[2:], strict=True):
            yield _TUNINGS[rows[0][0]], epsilon, _name(row[1]), model, "E2E", metric, *_number(cell)


def efficiency(rows: list[list[str]]) -> Iterator[Row]:
    """Tab. eff: minutes of a run and their ratio to the run without HyFreeDP."""
    for row in rows[1:]:
        model, suffix = re.fullmatch(r"([\w-]+)(?: \((\w+)-FT\))?", row[0]).groups("")  # type: ignore[union-attr]
        for method, cell in zip(rows[0][2:], row[2:], strict=True):
            values = _MINUTES.fullmatch(cell).groups()  # type: ignore[union-attr]
            for metric, value in zip(("minutes", "ratio"), values, strict=True):
                yield suffix.lower() or "full", "", method, model, row[1], metric, value, ""


def strategies(rows: list[list[str]]) -> Iterator[Row]:
    """Tab. hyperparam_comparison: what each strategy searches for (1 or 0) and what share of the budget that takes."""
    for row in rows[1:]:
        method = _name(row[0])
        yield "", "", method, "", "", "searches_eta", _MARKS[row[1]], ""
        yield "", "", method, "", "", "searches_clipping_threshold", _MARKS[row[2]], ""
        sign, value = _PERCENT.fullmatch(row[3]).groups()  # type: ignore[union-attr]
        yield "", "", method, "", "", _PERCENT_METRICS[sign], value, ""


# Name of the file -> LaTeX label of the table, and how it is read.
SOURCES: dict[str, tuple[str, Callable[[list[list[str]]], Iterator[Row]]]] = {
    "cv_main": ("tab:cv_main", accuracies),
    "app_cv_main": ("tab:app_cv_main", accuracies),
    "cv_main_eps8": ("app:tab:cv_main", accuracies),
    "nondp_ls": ("app:tab:nondp_ls", scheduled),
    "gpt2": ("tab:gpt2", language),
    "eff": ("tab:eff", efficiency),
    "hyperparam_comparison": ("app:tab:hyperparam_comparison", strategies),
}


def write(source: str, folder: Path) -> None:
    """Write every table of the LaTeX source as ``<folder>/<name>.csv``."""
    for name, (label, read) in SOURCES.items():
        rows = [(name, *row) for row in read(cells(source, label))]
        with replacing(folder / f"{name}.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([COLUMNS, *rows])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="the paper's LaTeX file")
    write(parser.parse_args().source.read_text(encoding="utf-8"), PAPER)
