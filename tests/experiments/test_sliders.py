"""Figures with sliders, as the committed notebooks have them: small, right, and moved in a browser."""

import json
import re
import shutil
import subprocess
from urllib.parse import unquote

import nbformat
import numpy as np
import pytest

from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.book.sliders import ABSENT, sliders

STYLE = {"color": "#000", "linestyle": "-"}
# Moves each slider of each figure to its end and back, and tells what was drawn and read off.
PROBE = """
const lines = (box) => [...box.querySelectorAll("path.curve")].map((path) => path.getAttribute("d"));
const see = (box) => ({lines: lines(box), text: box.querySelector("p").textContent});
const told = [...document.querySelectorAll('div[id^="sliders-"]')].map((box) => {
  const moved = [...box.querySelectorAll("input")].map((input) => {
    const [before, place] = [see(box), input.value];
    const go = (to) => { input.value = to; input.dispatchEvent(new Event("input")); return see(box); };
    const [after, back] = [go(input.max), go(place)];
    return {before, after, back};
  });
  return {name: box.id, text: box.textContent, moved};
});
document.body.innerHTML = "";
document.body.dataset.told = encodeURIComponent(JSON.stringify(told));
"""


def committed():
    """The HTML of each figure with sliders, by name."""
    found = {}
    for source in notebooks.sources():
        cells = nbformat.read(source.with_suffix(".ipynb"), as_version=4).cells
        pages = [output.get("data", {}).get("text/html", "") for cell in cells for output in cell.get("outputs", [])]
        found |= {re.search('id="(.+?)"', page)[1]: page for page in pages if 'id="sliders-' in page}
    return found


def data_of(page):
    return json.loads(page[page.rindex("})({") + 3 : page.rindex(");\n</script>")])


def test_what_is_handed_over_broadcasts_to_the_dials_and_the_axis():
    curves = {"a": (STYLE, [[[1.0], [2.00004]]]), "b": (STYLE, [5, 6, 7])}
    page = sliders("one", [1, 2, 3], curves, {"B": [1, 2, 3, 4], "</script>": [0, 1]}, x_label="x", y_label="y").data
    assert page.count("</script>") == 1
    a, b = data_of(page)["curves"]
    assert (a["shape"], a["values"], b["shape"], b["values"]) == ([1, 2, 1], [1, 2], [1, 1, 3], [5, 6, 7])
    with pytest.raises(ValueError, match="broadcast"):
        sliders("one", [1, 2, 3], {"a": (STYLE, np.zeros((2, 3)))}, {"B": [1, 2, 3]})


def test_the_u_is_the_closed_form():
    data = data_of(committed()["sliders-01_bias_variance"])
    bias, variance, total = (np.broadcast_to(np.reshape(c["values"], c["shape"]), (7, 4, 59)) for c in data["curves"])
    batch, noise = (np.array(dial["values"]) for dial in data["dials"])
    assert np.allclose(variance, (noise[:, None] * data["x"] / batch[:, None, None]) ** 2, rtol=1e-3)
    assert np.allclose(total, bias + variance, rtol=1e-3)
    draws = np.random.default_rng(0).normal(2.0, 0.4, 1_000_000)
    for place in (20, 30):  # a percent is six standard errors
        simulated = np.maximum(draws - data["x"][place], 0).mean() ** 2
        assert bias[0, 0, place] == pytest.approx(simulated, rel=0.02)


def told_by_chromium(html, folder):
    """What a script left in ``data-told`` of the page's body, five seconds after it was opened."""
    (folder / "page.html").write_text(f"<!doctype html><meta charset='utf-8'><body>{html}", encoding="utf-8")
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [*browser, "--virtual-time-budget=5000", "--dump-dom", (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return json.loads(unquote(re.search('data-told="(.+?)"', done.stdout)[1]))


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium")
def test_moving_a_slider_changes_the_drawing(tmp_path):
    pages = committed()
    told = told_by_chromium("".join(pages.values()) + f"<script>{PROBE}</script>", tmp_path)
    figures = {figure["name"]: figure for figure in told}
    assert figures.keys() == pages.keys()
    for name, figure in figures.items():
        assert ABSENT not in figure["text"]
        *dials, axis = figure["moved"]
        assert len(dials) == len(data_of(pages[name])["dials"]) > 0
        for moved in (*dials, axis):
            assert moved["before"] == moved["back"] and moved["before"]["text"] != moved["after"]["text"]
        assert all(moved["before"]["lines"] != moved["after"]["lines"] for moved in dials)
        assert axis["before"]["lines"] == axis["after"]["lines"]
        assert not re.search("NaN|undefined|Infinity", figure["text"] + str(figure["moved"]))
