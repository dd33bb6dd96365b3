"""report.html: every figure and table of a batch on one page that needs nothing but itself."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pandas as pd
from markupsafe import Markup

from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.store.provenance import commit, environment

if TYPE_CHECKING:
    from hyfreedp.experiments.book.batch import Origin, Outcome

_RUN = re.compile(r"(cell )?([0-9a-f]{16})")


def page(outcomes: Sequence[Outcome], profile: str, comparison: str, origin: Origin) -> str:
    """The page as text: what each figure and table shows, the paper's claim, ours, and what made it."""
    folder = files(__package__)
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return template.from_string(folder.joinpath("report.html").read_text(encoding="utf-8")).render(
        profile=profile,
        style=Markup(folder.joinpath("page.css").read_text(encoding="utf-8")),
        versions=_versions(environment()),
        commit=commit(),
        origin=origin,
        comparison=comparison,
        notebooks=[_notebook(outcome, origin) for outcome in outcomes],
    )


def _notebook(outcome: Outcome, origin: Origin) -> dict[str, Any]:
    paths = sorted(outcome.job.output / name for name in outcome.made if name.endswith(".json"))
    return {
        "name": outcome.job.name,
        "title": notebooks.title(outcome.job.source),
        "command": outcome.job.command,
        "status": outcome.status,
        "seconds": f"{outcome.seconds:.0f}",
        "error": outcome.error,
        "made_with": _versions(outcome.made_with),
        "made": [_made(path, origin) for path in paths],
    }


def _made(path: Path, origin: Origin) -> dict[str, Any]:
    """One figure or table with its description, which ``plots.save`` wrote."""
    made = json.loads(path.read_text(encoding="utf-8"))
    image, table = "", Markup()
    if "figure" in made:
        image = base64.b64encode(path.with_suffix(".png").read_bytes()).decode()
    else:
        frame = pd.read_csv(path.with_suffix(".csv"), keep_default_na=False, na_values=[""])
        table = Markup(frame.to_html(index=False, na_rep="", float_format="{:.4g}".format, border=0))
    parameters = [f"{key} = {value}" for key, value in made["parameters"].items()]
    inputs = _inputs(made["inputs"], origin)
    return made | {"name": path.stem, "image": image, "table": table, "parameters": parameters, "inputs": inputs}


def _inputs(inputs: Sequence[str], origin: Origin) -> list[str]:
    """Inputs as they are, but runs as their numbers: read, and trained here."""
    keys = [run[2] for name in inputs if (run := _RUN.fullmatch(name))]
    read = sum(key in origin.committed for key in keys)
    runs = [f"{len(keys)} runs: {read} read from committed records, {len(keys) - read} trained here"] if keys else []
    return [*runs, *(name for name in inputs if not _RUN.fullmatch(name))]


def _versions(made_with: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in made_with.items())
