"""Tables of cost: ours beside the paper's and its formula (notebook 08), and those of docs/results-cost.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from hyfreedp.experiments.benchmark.cases import RUN
from hyfreedp.experiments.benchmark.contenders import CONTENDERS
from hyfreedp.experiments.store.files import markdown_table
from hyfreedp.experiments.store.verdicts import Outcome, Verdict, by_interval, by_row, span

# Rows of Tab. "eff", as (model, tuning) in data/paper, and our case for each, by device.
PAPER_CASES: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("Llama2-7B", "lora"): {"accelerator": ("llama2_7b", "lora"), "cpu": ("llama_d256", "lora")},
    ("GPT2", "full"): {"accelerator": ("gpt2", "full"), "cpu": ("gpt2_d256", "full")},
    ("Vit-base", "full"): {"accelerator": ("vit_base", "full"), "cpu": ("vit_d384", "full")},
    ("Vit-base", "bitfit"): {"accelerator": ("vit_base", "biases"), "cpu": ("vit_d384", "biases")},
    ("Vit-small", "full"): {"accelerator": ("vit_small", "full"), "cpu": ("vit_d192", "full")},
}
INTERVALS = (1, 5, 10)
DRAWN = ("opacus_hooks", "opacus_ghost", "ours")


def relative(rows: pd.DataFrame, contenders: Sequence[str]) -> pd.DataFrame:
    """Time and peak memory of some contenders over those of the plain step of the same case, one row for each."""
    case = ["model", "tuning", "varied", "value"]
    plain = rows.peak_mib.where(rows.contender == "plain").groupby([rows[name] for name in case], dropna=False)
    frame = rows.assign(time=rows.ratio_to_plain, memory=rows.peak_mib / plain.transform("first"))
    frame = frame[frame.contender.isin(contenders)].replace({"contender": labels()})
    frame = frame.melt([*case, "contender"], ["time", "memory"], var_name="quantity", value_name="ratio")
    return frame.dropna(subset="ratio")


def quickest(rows: pd.DataFrame, by: str, contender: str) -> tuple[list[str], list[str]]:
    """Values of the column ``by`` at which this contender has the smallest ``ratio``; and all its values, in order."""
    first = rows.loc[rows.groupby(by).ratio.idxmin()].set_index(by).contender
    return list(first[first == contender].index), list(dict.fromkeys(rows[by]))


def labels() -> dict[str, str]:
    """The labels of all contenders, by name."""
    return {name: contender.label for name, contender in CONTENDERS.items()}


def beside_paper(paper: pd.DataFrame, rows: pd.DataFrame, device: str) -> pd.DataFrame:
    """Tab. "eff" as ratios to a private step without HyFreeDP: columns ``paper``, ``record`` (ours) and ``theory``.

    Args:
        paper: table "eff" of :mod:`hyfreedp.experiments.tables.paper`.
        rows: our record.
        device: of our record, "cpu" or "accelerator".
    """
    printed = paper[paper.metric == "ratio"].set_index(["model", "tuning", "method"]).value
    measured = rows.set_index(["model", "tuning", "contender"]).ratio_to_ours
    lines = []
    for (name, tuning), stand_ins in PAPER_CASES.items():
        for k in INTERVALS:
            ratios = {
                "paper": float(printed[name, tuning, f"K={k}"]),
                "record": measured.get((*stand_ins[device], f"ours_k{k}"), np.nan),
                "theory": interval_ratio(k, 1 / 3 if tuning == "full" else 1 / 2),
            }
            case = {"paper_model": name, "model": stand_ins[device][0], "tuning": tuning, "interval": k}
            lines.append(case | ratios)
    return pd.DataFrame(lines)


def interval_ratio(interval: float, forward_share: float) -> float:
    """Mean time of a step with a probe every K steps, over that of a step without: 1 + 2 f / K.

    A probe adds two forward passes (section "Efficiency of algorithm"); f is the share of one forward pass in a step
    without probe. If a backward pass takes as long as two forward passes, f = 1/3.
    """
    return 1 + 2 * forward_share / interval


def forward_share(ratio: float, interval: int = 1) -> float:
    """The f that follows from a measured ratio at K = ``interval``: the inverse of :func:`interval_ratio`."""
    return (ratio - 1) * interval / 2


FITS = 0.05  # the largest difference of a ratio to the formula
OVERHEAD, FAR = 0.07, 10  # the paper's "less than 7 %", and its K
ALMOST = 1.25  # most plain steps for "almost as efficient as the standard non-DP optimization"; the goal of docs/gpu.md


def by_quartiles(rows: pd.DataFrame, ratio: str, most: float) -> Outcome:
    """The outcome for a ratio of times: the worst over rows, each by whether its quartiles are below the mark."""
    found = [by_interval(row[f"{ratio}_q1"], row[f"{ratio}_q3"], most=most) for _, row in rows.iterrows()]
    worse: list[Outcome] = ["reproduced", "not shown", "fails here"]
    return max(found, key=worse.index, default="reproduced")


def judged(rows: pd.DataFrame, compared: pd.DataFrame) -> list[Verdict]:
    """Verdicts on the paper's formula and sentences about cost; its own times, of other hardware, do not count.

    Args:
        rows: our record.
        compared: :func:`beside_paper` of it.
    """
    every = rows.contender.str.extract(r"ours_k(\d+)$")[0].astype(float)
    ratios = rows.assign(interval=every).dropna(subset="interval")
    table = ratios.pivot(index=["model", "tuning"], columns="interval", values="ratio_to_ours").dropna()
    off = max((table[k] - interval_ratio(k, forward_share(table[1]))).abs().max() for k in table)
    full, some = table.xs("full", level="tuning"), table.drop("full", level="tuning")
    far = ratios[(ratios.tuning == "full") & (ratios.interval == FAR)]
    dearer = some[1] - full[1].reindex(some.index, level="model")
    printed = compared.dropna(subset="record").groupby("interval").paper.agg(["min", "max"])
    own = compared[compared.interval == 1].pivot(index="paper_model", columns="tuning", values="paper")
    own = own.drop(columns="full").sub(own.full, axis=0).stack().dropna()
    falls = (table.diff(axis=1).iloc[:, 1:] < 0).all(axis=1)
    ranges = [
        f"K = {k}: {span(table[k], '.2f')} (paper: {low:.2f} to {high:.2f})" for k, low, high in printed.itertuples()
    ]
    free = rows[(rows.contender == "ours") & (rows.tuning == "full")].ratio_to_plain
    more = ", ".join(f"{name} {100 * (ratio - 1):.1f}" for name, ratio in full[FAR].items())
    return [
        Verdict(
            "§ Efficiency: a probe costs two forward passes, 1 + 2f/K of a step",
            by_row([off <= FITS]),
            f"with f from K = 1 the {len(table)} cases are at most {off:.2f} from it at K = 5 and 10; where all is "
            f"trained f = {span([forward_share(ratio) for ratio in full[1]], '.2f')} (the paper's 0.33)",
        ),
        Verdict(
            f"§ Efficiency: less than 7 % more at K = {FAR} (all parameters)",
            by_quartiles(far, "ratio_to_ours", 1 + OVERHEAD),
            f"{more} % (medians); the upper quartiles reach {100 * (far.ratio_to_ours_q3.max() - 1):.1f} %",
        ),
        Verdict(
            "§ Efficiency: almost as efficient as optimization without DP (all parameters)",
            by_quartiles(far, "ratio_to_plain", ALMOST),
            f"{span(far.ratio_to_plain, '.2f')} plain steps at K = {FAR}, in this implementation; without probes "
            f"{span(free, '.2f')}",
        ),
        Verdict(
            'Tab. "eff": less than twice the time at K = 1',
            by_quartiles(ratios[ratios.interval == 1], "ratio_to_ours", 2),
            "; ".join(ranges),
        ),
        Verdict(
            'Tab. "eff": the cost approaches 1 as K grows',
            by_row(list(falls)),
            f"it falls with each K in {falls.sum()} of {len(table)} cases",
        ),
        Verdict(
            'Tab. "eff": LoRA and BitFit have lower additional costs',
            by_row(list(dearer < 0)),
            f"in {(dearer < 0).sum()} of {len(dearer)} cases; at K = 1 {span(dearer, '+.2f')} to full tuning of the "
            f"same model (in the paper's table {span(own, '+.2f')})",
        ),
    ]


def peers(rows: pd.DataFrame) -> str:
    """The table of libraries in docs/results-cost.md: the time of each contender's step in plain steps.

    Ours is bold if it is the quickest private one. Its first step and the memory of its process follow.
    """
    shown = [name for name in dict.fromkeys(rows.contender) if name not in ("plain", "ours")]
    times = rows.pivot(index="model", columns="contender", values="ratio_to_plain").loc[rows.model.unique()]
    ours, plain = (rows[rows.contender == name].set_index("model") for name in ("ours", "plain"))
    lines = []
    for model, own in times.iterrows():
        cells = [f"{own[name]:.2f}" if np.isfinite(own[name]) else "fails" for name in shown]
        cells.append(f"**{own.ours:.2f}**" if own.ours <= own[shown].min() else f"{own.ours:.2f}")
        memory = ours.resident_mib[model] / plain.resident_mib[model]
        cells += [f"{ours.first_to_plain[model]:.1f}", f"{memory:.2f}"]
        lines.append([f"{model}, {ours.batch_size[model]}", *cells])
    titles = [labels()[name] for name in shown]
    return markdown_table(["Model, batch", *titles, "ours", "its first step", "memory of its process"], lines)


def runs(rows: pd.DataFrame) -> str:
    """The table of whole runs in docs/results-cost.md: the time of each contender's run in plain runs."""
    names = [name for name in dict.fromkeys(rows.contender) if name != "plain"]
    times = rows.pivot(index="model", columns="contender", values="ratio_to_plain").loc[rows.model.unique(), names]
    lines = [[model, *(f"{ratio:.2f}" for ratio in own)] for model, own in times.iterrows()]
    return markdown_table([f"{RUN} steps of", *(labels()[name] for name in names)], lines)
