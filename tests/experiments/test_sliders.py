"""Figures with sliders, as the committed notebooks have them: small and right."""

import json
import re

import nbformat
import numpy as np
import pytest

from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.book.sliders import sliders

STYLE = {"color": "#000", "linestyle": "-"}


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


def test_bias_and_variance_of_the_sliders_are_the_closed_forms():
    data = data_of(committed()["sliders-01_bias_variance"])
    bias, variance, total = (np.broadcast_to(np.reshape(c["values"], c["shape"]), (7, 4, 59)) for c in data["curves"])
    batch, noise = (np.array(dial["values"]) for dial in data["dials"])
    assert np.allclose(variance, (noise[:, None] * data["x"] / batch[:, None, None]) ** 2, rtol=1e-3)
    assert np.allclose(total, bias + variance, rtol=1e-3)
    draws = np.random.default_rng(0).normal(2.0, 0.4, 1_000_000)
    for place in (20, 30):  # a percent is six standard errors
        simulated = np.maximum(draws - data["x"][place], 0).mean() ** 2
        assert bias[0, 0, place] == pytest.approx(simulated, rel=0.02)
