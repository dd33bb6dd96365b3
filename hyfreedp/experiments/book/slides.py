"""Slides of the course: ``python -m hyfreedp.experiments.book.slides`` writes ``build/slides.html``, one whole file.

``notebooks/slides.json`` has questions and answers. Figures, and the numbers under an answer, are the committed ones.
"""

from __future__ import annotations

import base64
import json
from importlib.resources import files

import jinja2
from markupsafe import Markup

from hyfreedp.experiments.book import sliders
from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.store.paths import workspace


def slides() -> str:
    """The page: the moving picture of a step, then a question, a figure and an answer on each slide."""
    here = workspace()
    shown = json.loads((here.notebooks / "slides.json").read_text(encoding="utf-8"))
    for slide in shown:
        path = here.figures / slide["figure"]
        slide |= json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        slide["image"] = base64.b64encode(path.with_suffix(".png").read_bytes()).decode()
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = files(__package__).joinpath("slides.html").read_text(encoding="utf-8")
    return template.from_string(text).render(slides=shown, step=Markup(sliders.private_step().data))


if __name__ == "__main__":
    path = workspace().build / "slides.html"
    write_text(path, slides())
    print(f"{path}: open it in a browser; → and ← lead on and back")
