"""report.html: whole, self-contained, escaped, and with every figure and table of the batch."""

import html
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from hyfreedp.experiments.book import page as page_module
from hyfreedp.experiments.book.batch import Job, Outcome
from hyfreedp.experiments.store import plots

pytest_plugins = ["batch"]

HOSTILE = """<script>alert("x")</script> & 'quotes' </pre> a < b"""


def save(name, table=None, **changes):
    described = {
        "parameters": {"profile": "smoke", "task": HOSTILE},
        "inputs": [f"cell {name}"],
        "shows": f"what {name} shows",
        "claim": f"the claim of {name}",
        "summary": [f"finding of {name}"],
    } | changes
    if table is not None:
        plots.save_table(table, name, **described)
        return
    figure, axis = plt.subplots(figsize=(1, 1))
    axis.plot([0, 1])
    plots.save(figure, name, **described)
    plt.close(figure)


@pytest.fixture
def page(project):
    """Of two notebooks that made two figures and a table, and one that failed."""
    for stem in ("01_first", "02_second", "03_third"):
        project.write(stem)
    save("01_first")
    save("01_first_part", shows=HOSTILE, claim=HOSTILE, summary=[HOSTILE])
    rows = pd.DataFrame({"<name>": [HOSTILE, ""], "value": [1 / 3, np.nan], "count": [1, 2]})
    save("02_second", rows, inputs=["a file"])
    jobs = [Job(project.notebooks / f"{stem}.py", {"profile": "smoke"}) for stem in ("01_first", "02_second")]
    outcomes = [Outcome(job, "done", 12.0) for job in jobs]
    third = Job(project.notebooks / "03_third.py", {"profile": "smoke", "task": "a b; rm"})
    outcomes.append(Outcome(third, "failed", 3.0, error=f"ValueError: {HOSTILE}"))
    return page_module.page(outcomes, "smoke", [f"1 of 2 files: {HOSTILE}"])


def test_it_has_every_figure_and_table_once_and_escapes_what_it_is_given(page):
    images = re.findall(r'<img src="(.*?)" alt="(.*?)">', page)
    assert [html.unescape(shown) for _, shown in images] == ["what 01_first shows", HOSTILE]
    assert all(source.startswith("data:image/png;base64,") for source, _ in images)
    assert re.findall(r'<h3 id="(.*?)">', page) == ["01_first", "01_first_part", "02_second"]
    assert page.count("the claim of 01_first<") == page.count("finding of 01_first<") == 1
    assert "0.3333" in page and "NaN" not in page and "://" not in page and "<script" not in page
    # shows (contents, caption and alt), claim, summary, the parameter of three, the table, the error, the files
    assert html.unescape(page).count(HOSTILE) == 11
