"""report.html: whole, self-contained, escaped, and nothing on it that the batch did not make."""

import itertools
from collections import Counter

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from pages import Page

from hyfreedp.experiments.book import page as page_module
from hyfreedp.experiments.book.committed import Comparison
from hyfreedp.experiments.book.jobs import Job, Origin, Outcome
from hyfreedp.experiments.store import plots

pytest_plugins = ["batch"]

HOSTILE = """<script>alert("x")</script> & 'quotes' </pre> a < b"""


KEY = "0123456789abcdef"
ORIGIN = Origin(frozenset([KEY]), 2, [f"machine {HOSTILE}"], ["1 of 1 records made again: equal", "digits: equal"])


def save(name, **changes):
    described = {
        "parameters": {"profile": "smoke", "task": HOSTILE},
        "inputs": [f"cell {name}"],
        "shows": f"what {name} shows",
        "claim": f"the claim of {name}",
        "summary": [f"finding of {name}"],
    } | changes
    if "table" in changes:
        plots.save_table(described.pop("table"), name, **described)
        return
    figure, axis = plt.subplots(figsize=(1, 1))
    axis.plot([0, 1])
    plots.save(figure, name, **described)
    plt.close(figure)


@pytest.fixture
def page(project):
    """Of two notebooks that made two figures, a table and a slider, and one that failed; a stale figure lies about."""
    for stem in ("01_first", "02_second", "03_third"):
        project.write(stem)
    save("01_first")
    save("01_first_part", shows=HOSTILE, claim=HOSTILE, summary=[HOSTILE])
    save(
        "02_second",
        inputs=[f"cell {KEY}", KEY[::-1], "a file"],
        table=pd.DataFrame({"<name>": [HOSTILE, ""], "value": [1 / 3, np.nan], "count": [1, 2]}),
    )
    save("02_second_old")
    (project.figures / "01_first.html").write_text(f"<p>slider</p><script>let text = '{HOSTILE}'</script>")
    made = {
        "01_first": ["01_first.html", "01_first.json", "01_first.png", "01_first_part.json", "01_first_part.png"],
        "02_second": ["02_second.csv", "02_second.json"],
    }
    jobs = {stem: Job(project.notebooks / f"{stem}.py", {"profile": "smoke", "epsilon": 1.0}) for stem in made}
    outcomes = [Outcome(job, "done", 12.0, made[stem], {"commit": f"of {stem}"}) for stem, job in jobs.items()]
    third = Job(project.notebooks / "03_third.py", {"profile": "smoke", "task": "a b; rm"})
    outcomes.append(Outcome(third, "failed", 3.0, error=f"ValueError: {HOSTILE}"))
    return page_module.page(outcomes, "smoke", Comparison(("01_first.png",), (HOSTILE,), 3), ORIGIN)


def test_it_needs_nothing_but_itself(page):
    found = Page(page)
    sources = found.all("img", "src")
    assert len(sources) == 2 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert all(target.startswith("#") for target in found.all("a", "href"))
    assert not {"link", "script", "object", "base"} & {tag for tag, _ in found.elements}
    assert "://" not in page and "url(" not in page and "@import" not in page


def test_every_figure_and_table_of_the_batch_appears_once_with_its_words(page):
    found = Page(page)
    headings = Counter(attributes["id"] for tag, attributes in found.elements if tag == "h3")
    assert headings == Counter(["01_first", "01_first_part", "02_second", "01_first.html"])
    assert found.all("img", "alt") == ["what 01_first shows", HOSTILE]
    for text in ("the claim of 01_first", "finding of 01_first", "cell 01_first_part", "a file"):
        assert found.text.count(text) == 1
    assert found.text.count("profile = smoke") == 3
    assert found.text.count("commit of 01_first") == 2 and found.text.count("commit of 02_second") == 1
    assert "1 of 2 files are the committed ones, byte for byte; 3 have other parameters" in found.text
    cells = [text.strip() for text in found.text.split("\n")]
    assert f"{HOSTILE}0.33331" in cells and "2" in cells  # the row of the table; nan is an empty cell
    ids = Counter(attributes["id"] for _, attributes in found.elements if "id" in attributes)
    assert max(ids.values()) == 1
    targets = [target[1:] for target in found.all("a", "href")] + found.all("section", "aria-labelledby")
    assert set(targets) <= set(ids)


def test_texts_are_escaped_and_the_slider_is_framed(page):
    found = Page(page)
    (slider,) = (attributes for tag, attributes in found.elements if tag == "iframe")
    assert slider["srcdoc"] == f"<p>slider</p><script>let text = '{HOSTILE}'</script>"
    assert slider["sandbox"] == "allow-scripts" and slider["title"]
    # shows (contents and caption), claim, summary, the parameter of three figures and tables, the table, the error, the
    # name of a file, what records were made with
    assert found.text.count(HOSTILE) == 11


def test_it_says_what_is_read_and_what_is_fresh(page):
    text = " ".join(Page(page).text.split())
    assert (
        "1 runs are read from committed records, 2 others were trained here; 1 of 1 records made again: equal" in text
    )
    assert "2 runs: 1 read from committed records, 1 trained here" in text
    assert "digits: equal" in text and "never called equal" in text
    assert str(Origin()) == "every run was trained on this machine"


def test_it_says_how_to_make_each_and_what_failed(page):
    found = Page(page)
    command = "python -m hyfreedp.experiments reproduce --profile smoke --only"
    assert f"{command} 01_first --set epsilon=1.0" in found.text
    assert f"{command} 03_third --set 'task=a b; rm'" in found.text
    assert "Failed: 03_third" in found.text and f"ValueError: {HOSTILE}" in found.text
    assert "02_second_old" not in page, "made by no notebook of this batch"
    levels = [int(tag[1]) for tag, _ in found.elements if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
