"""report.html: whole, self-contained, escaped, and with every figure and table of the batch."""

from collections import Counter

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from pages import Page

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


def test_it_needs_nothing_but_itself_and_escapes_what_it_is_given(page):
    found = Page(page)
    sources = found.all("img", "src")
    assert len(sources) == 2 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert all(target.startswith("#") for target in found.all("a", "href"))
    assert not {"link", "script", "object", "base", "iframe"} & {tag for tag, _ in found.elements}
    assert "://" not in page and "url(" not in page and "@import" not in page
    # shows (contents and caption), claim, summary, the parameter of three, the table, the error, the files
    assert found.text.count(HOSTILE) == 10


def test_every_figure_and_table_of_the_batch_appears_once_with_its_words(page):
    found = Page(page)
    headings = Counter(attributes["id"] for tag, attributes in found.elements if tag == "h3")
    assert headings == Counter(["01_first", "01_first_part", "02_second"])
    assert found.all("img", "alt") == ["what 01_first shows", HOSTILE]
    assert found.text.count("the claim of 01_first") == found.text.count("finding of 01_first") == 1
    assert "0.3333" in found.text and "NaN" not in found.text
    ids = Counter(attributes["id"] for _, attributes in found.elements if "id" in attributes)
    assert max(ids.values()) == 1
    assert {target[1:] for target in found.all("a", "href")} <= set(ids)
