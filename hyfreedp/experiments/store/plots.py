"""The style of all figures, and how they are saved: as PNG and PDF, with a JSON that describes them.

The same values give the same bytes: the font is one that comes with matplotlib, and no file contains a time, a commit
or a machine. Versions and hardware of a batch are on its report, see :mod:`hyfreedp.experiments.book.batch`.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from IPython.display import HTML
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import ScaledTranslation
from pandas.io.formats.style import Styler

from hyfreedp.experiments.store.files import replacing, write_csv, write_text
from hyfreedp.experiments.store.paths import workspace

# Okabe and Ito's colours, which colour-blind readers can tell apart; each method also has its own dash pattern and
# marker, for greyscale.
STYLES: dict[str, dict[str, Any]] = {
    "robust": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "paper": {"color": "#D55E00", "linestyle": "--", "marker": "s"},
    "alternative": {"color": "#E69F00", "linestyle": (0, (1, 1)), "marker": "X"},
    "best": {"color": "#009E73", "linestyle": "-.", "marker": "^"},
    "worst": {"color": "#7F7F7F", "linestyle": ":", "marker": "v"},
    "reference": {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1)), "marker": "D"},
}
# For series that are not methods, in order. Blue is ours in every figure, so it is not among them.
SERIES = [
    {"color": "#1A1A1A", "linestyle": "-", "marker": "o"},
    *(STYLES[name] for name in ("paper", "best", "reference", "worst")),
    {"color": "#56B4E9", "linestyle": (0, (3, 1)), "marker": "P"},
    STYLES["alternative"],
    {"color": "#882255", "linestyle": (0, (4, 2)), "marker": "p"},
]
NOISELESS_LOSSES = SERIES[5]  # the paper's method without noise on its losses, a control


def line(style: dict[str, Any]) -> dict[str, Any]:
    """A style without its marker."""
    return {name: style[name] for name in ("color", "linestyle")}


def marks(style: dict[str, Any]) -> dict[str, Any]:
    """A style without its line."""
    return style | {"linestyle": "none"}


def log_ticks(axis: Axis, ticks: Sequence[float] | None = None) -> None:
    """Label a logarithmic axis, by plain numbers, at ``ticks`` only, or if None at 1, 2 and 5 times powers of ten."""
    if ticks is None:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axis.set_ticks(ticks)
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def plain_log_ticks(axis: Axis) -> None:
    """Label a logarithmic axis, by plain numbers, at powers of ten; up to a factor of 30 also at 2 and 5 times them."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > 30 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def shared_legend(figure: Figure, axes: Iterable[Axes], **choices: Any) -> None:
    """One legend for all axes, below the figure unless chosen otherwise, with each label once."""
    found = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in found}
    figure.legend(list(handles.values()), list(handles), **{"loc": "outside lower center"} | choices)


def legend_below(axis: Axes, **choices: Any) -> None:
    """A legend for one axis, below its x label."""
    assert axis.figure is not None
    below = axis.transAxes + ScaledTranslation(0, -0.5, axis.figure.dpi_scale_trans)
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": below}
    axis.legend(**place | {"fontsize": "small"} | choices)


def use_style() -> None:
    """Apply the style to all figures made from here on."""
    warnings.filterwarnings("ignore", message="The figure layout has changed to tight")  # by seaborn's grids
    sns.set_theme(context="notebook", style="whitegrid", font_scale=0.9)
    plt.rcParams.update(
        {
            "figure.dpi": 110,
            "savefig.dpi": 200,
            "savefig.bbox": "tight",
            "figure.constrained_layout.use": True,
            "axes.titlesize": "medium",
            "legend.frameon": False,
            "font.family": ["DejaVu Sans"],  # comes with matplotlib; any other may be missing on another machine
            "mathtext.fontset": "dejavusans",
            "pdf.fonttype": 42,  # text stays text
        }
    )


def folded(title: str, table: Styler) -> HTML:
    """A long table, folded: it opens by a click on this title."""
    return HTML(f"<details><summary>{escape(title)}</summary>\n{table.to_html()}\n</details>")


def save(figure: Figure, name: str, *, parameters: dict[str, Any], **described: Any) -> None:
    """Write ``build/<profile>/figures/<name>.png``, ``.pdf`` and ``.json``, as :func:`_describe` says."""
    folder = workspace().output(parameters["profile"])
    figure.draw_without_rendering()  # computes the layout
    figure.set_layout_engine("none")  # keeps it: otherwise each savefig below would compute it again
    for kind in ("png", "pdf"):
        with replacing(folder / f"{name}.{kind}") as temporary:
            figure.savefig(temporary, format=kind, metadata={"CreationDate": None} if kind == "pdf" else None)
    _describe("figure", name, parameters, **described)


def save_table(table: pd.DataFrame, name: str, *, parameters: dict[str, Any], **described: Any) -> None:
    """Write ``<name>.csv`` (without the index) and ``.json``; folder and arguments as for :func:`save`."""
    write_csv(workspace().output(parameters["profile"]) / f"{name}.csv", table)
    _describe("table", name, parameters, **described)


def _describe(
    kind: str,
    name: str,
    parameters: dict[str, Any],
    *,
    inputs: Sequence[str],
    shows: str,
    claim: str = "",
    summary: Sequence[str] = (),
) -> None:
    """Write the ``.json`` that describes a "figure" or a "table".

    Args:
        inputs: the records that it was made from, as keys of cells or paths in the repository.
        shows: what is drawn, in one sentence.
        claim: the paper's figure or table, and what the paper says of it; empty if it has none.
        summary: our findings, for the report, one per line.
    """
    here = workspace()
    made = {kind: name, "shows": shows, "claim": claim, "summary": list(summary), "parameters": parameters}
    records = {one: digest(here.root / one) for one in inputs if (here.root / one).is_file()}
    made |= {"inputs": list(inputs), "records": records}
    write_text(here.output(parameters["profile"]) / f"{name}.json", json.dumps(made, indent=1) + "\n")


def digest(record: Path) -> str:
    """Hash of a record that a figure was made from; a test checks that the record is still the same."""
    return hashlib.sha256(record.read_bytes()).hexdigest()[:16]
