"""The slider page of notebook 01: whole, self-contained, labelled, and its numbers are the library's."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from pages import Page

from hyfreedp import clipping_bias, fit_quadratic
from hyfreedp.experiments.book import slider
from hyfreedp.experiments.store.paths import FIGURES
from hyfreedp.experiments.studies import bias_variance, clouds

MULTIPLES = [0.3, 1.0, 3.0]


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    here = rng.exponential(1.0, 50)
    return np.stack([here * 0.9 + 0.05, here, here * 1.4])


@pytest.fixture(scope="module")
def inputs(batch):
    fits = clouds.clouds(
        losses=batch.tolist(),
        distance=0.1,
        sigmas={"losses": 3.0, "contrasts": 2.0},
        expected_batch_size=50,
        multiples=MULTIPLES,
        runs=30,
        seed=0,
    )
    exact = fit_quadratic([0.1, 0.0, -0.1], batch.mean(axis=1))
    usual = clouds.usual_thresholds(batch)
    errors = bias_variance.batch_errors(
        batch, np.array(MULTIPLES) * usual[0], noise_multiplier=3.0, expected_batch_size=50
    )
    spread = clouds.eta_spread(fits, exact.minimizer)
    settings = {"usual": usual, "marks": {"R_l = L": usual[0]}, "exact": exact, "distance": 0.1}
    return errors, fits, spread, settings


def embedded(text):
    return json.loads(Page(text).scripts[0])


def test_the_numbers_of_the_page_are_the_librarys(batch, inputs):
    errors, fits, spread, settings = inputs
    data = embedded(slider.page(slider.page_data(errors, fits, spread, setting="a </script> b", drawn=10, **settings)))
    assert data["setting"] == "a </script> b"  # cannot end the script
    assert [position["multiple"] for position in data["positions"]] == pytest.approx(MULTIPLES, rel=1e-5)
    for position in data["positions"]:
        threshold = position["thresholds"][0]
        bias = np.sqrt(np.mean([clipping_bias(probe, threshold) ** 2 for probe in batch]))
        assert position["bias"] == pytest.approx(bias, rel=1e-4)
        assert position["noise"] == pytest.approx(3.0 * threshold / 50, rel=1e-5)
        assert position["total"] == pytest.approx(np.hypot(position["bias"], position["noise"]), rel=1e-4)
        for probe in ("losses", "contrasts"):
            drawn = fits[(fits.probe == probe) & np.isclose(fits.multiple, position["multiple"], rtol=1e-5)]
            rates = [b / a for b, a in position[probe]["fits"]]
            assert rates == pytest.approx(list(drawn.eta[:10] / 0.1), rel=1e-4)
            assert position[probe]["quantiles"][2] == pytest.approx(drawn.eta.median() / 0.1, rel=1e-4)
            assert position[probe]["concave"] == pytest.approx((drawn.curvature < 0).mean(), rel=1e-5)


def test_a_missing_threshold_is_refused(inputs):
    errors, fits, spread, settings = inputs
    with pytest.raises(ValueError, match="every threshold of errors, 3 is missing"):
        slider.page_data(errors, fits[fits.multiple < 2], spread, setting="", **settings)


def check_page(text):
    page = Page(text)
    assert len(text.encode()) < 400_000
    assert not re.search(r"https?:|url\(['\"]?(?!#)|@import|\bsrc=|\bhref=|fetch\(|XMLHttp|import\(", text)
    (control,) = page.find("input")
    assert control["type"] == "range"
    assert [label["for"] for label in page.find("label")] == [control["id"]]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for picture in page.find("svg"):
        assert picture["role"] == "img"
        assert {picture["aria-labelledby"], picture["aria-describedby"]} <= set(ids)
    assert "prefers-color-scheme: dark" in text and 'lang="en"' in text and 'name="viewport"' in text


def test_the_page_stands_alone_and_is_labelled(inputs):
    errors, fits, spread, settings = inputs
    check_page(slider.page(slider.page_data(errors, fits, spread, setting="test", **settings)))


def test_the_committed_page_is_the_slider_of_notebook_01():
    text = (FIGURES / "01_bias_variance.html").read_text(encoding="utf-8")
    check_page(text)
    data = embedded(text)
    assert len(data["positions"]) >= 25
    for position in data["positions"]:
        assert position["total"] == pytest.approx(np.hypot(position["bias"], position["noise"]), rel=1e-4)
    # What surrounds the numbers is what this version of the library writes.
    assert text == slider.page(data)


def test_every_position_can_be_drawn(inputs, tmp_path):
    """Runs the page's script against the few calls of a browser that it needs."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    errors, fits, spread, settings = inputs
    page = Page(slider.page(slider.page_data(errors, fits, spread, setting="test", **settings)))
    data, script = page.scripts
    program = tmp_path / "page.js"
    program.write_text(
        f"const elements = {{data: {{textContent: {json.dumps(data)}}}}};\n"
        "const element = id => elements[id] ??= {attributes: {}, setAttribute(k, v) { this.attributes[k] = v; },\n"
        "  addEventListener(k, f) { this.listener = f; }};\n"
        "const document = {getElementById: element};\n"
        f"(() => {{ {script} }})();\n"
        "const seen = [];\n"
        "for (let k = 0; k <= elements.slider.max; k++) {\n"
        "  elements.slider.value = k; elements.slider.listener();\n"
        "  seen.push(Object.fromEntries(Object.entries(elements).map(([id, e]) =>\n"
        "    [id, [e.innerHTML, e.textContent, e.attributes?.['aria-valuetext']].join(' ')])));\n"
        "}\n"
        "console.log(JSON.stringify(seen));\n",
        encoding="utf-8",
    )
    done = subprocess.run([node, str(program)], capture_output=True, text=True, check=True, timeout=60)
    seen = json.loads(done.stdout)
    assert len(seen) == len(MULTIPLES)
    for position, shown in zip(json.loads(data)["positions"], seen, strict=True):
        drawn = "".join(shown[name] for name in ("errors", "eta", "losses", "contrasts"))
        assert not re.search('NaN|Infinity|="undefined', drawn)
        assert shown["losses"].count('class="cloud"') == len(position["losses"]["fits"])
        threshold = float(f"{position['thresholds'][0]:.3g}")
        assert f"R_l = {threshold:g} nats" in shown["now"]
