"""Self-contained HTML pages: report.html of a batch, and the course's slides."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pandas as pd
from markupsafe import Markup

from hyfreedp.experiments.book import notebooks, sliders
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.experiments.store.provenance import commit, environment

if TYPE_CHECKING:
    from hyfreedp.experiments.book.batch import Outcome


def page(outcomes: Sequence[Outcome], profile: str, told: Sequence[str]) -> str:
    """The report as HTML: the result of each notebook, and its figures and tables with their descriptions.

    ``told`` has lines on where training runs come from, and which files equal committed ones.
    """
    output = workspace().output(profile)
    return _rendered(
        "report.html",
        profile=profile,
        style=Markup(files(__package__).joinpath("page.css").read_text(encoding="utf-8")),
        made_with={"commit": commit()} | environment(),
        told=told,
        outcomes=[
            {
                "title": notebooks.title(outcome.job.source),
                "outcome": outcome,
                "made": [_made(path) for path in sorted(output.glob(f"{outcome.job.name}*.json"))],
            }
            for outcome in outcomes
        ],
    )


def slides() -> str:
    """The slides as HTML: an animated step, then questions and answers of ``notebooks/slides.json`` with figures."""
    here = workspace()
    shown = json.loads((here.notebooks / "slides.json").read_text(encoding="utf-8"))
    shown = [slide | _made((here.figures / slide["figure"]).with_suffix(".json")) for slide in shown]
    return _rendered("slides.html", slides=shown, step=Markup(sliders.private_step().data))


def _rendered(template: str, **names: Any) -> str:
    text = files(__package__).joinpath(template).read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(text).render(**names)


def _made(path: Path) -> dict[str, Any]:
    """A figure or table with its description, from the ``.json`` that ``plots.save`` wrote."""
    made = json.loads(path.read_text(encoding="utf-8"))
    if "figure" in made:
        return made | {"name": path.stem, "image": base64.b64encode(path.with_suffix(".png").read_bytes()).decode()}
    frame = pd.read_csv(path.with_suffix(".csv"), keep_default_na=False, na_values=[""])
    table = Markup(frame.to_html(index=False, na_rep="", float_format="{:.4g}".format, border=0))
    return made | {"name": path.stem, "table": table}
