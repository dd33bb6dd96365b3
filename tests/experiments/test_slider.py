"""The slider page of notebook 02: whole, self-contained, labelled, and its numbers are the library's."""

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
    clipped = clouds.clipped_fits(batch, 0.1, MULTIPLES, expected_batch_size=50)
    settings = {"usual": usual, "marks": {"R_l = L": usual[0], "sum of three": 3 * usual[0]}, "exact": exact}
    settings |= {"distance": 0.1, "batch_size": 50, "noise_multiplier": 3.0}
    return errors, clipped, fits, settings


def embedded(text):
    return json.loads(Page(text).scripts[0])


def test_the_numbers_of_the_page_are_the_librarys(batch, inputs):
    errors, clipped, fits, settings = inputs
    made = slider.page_data(errors, clipped, fits, setting="a </script> b", drawn=30, **settings)
    data = embedded(slider.page(made))
    assert data["setting"] == "a </script> b"  # cannot end the script
    assert [position["multiple"] for position in data["positions"]] == pytest.approx(MULTIPLES, rel=1e-5)
    assert (data["batch_size"], data["sigma"]) == (50, 3.0)
    for position in data["positions"]:
        threshold = position["multiple"] * data["usual"][0]
        bias = np.sqrt(np.mean([clipping_bias(probe, threshold) ** 2 for probe in batch]))
        assert position["bias"] == pytest.approx(bias, rel=1e-4)
        capped = np.minimum(batch, threshold).mean(axis=1)
        by_hand = fit_quadratic([0.1, 0.0, -0.1], capped)
        assert position["losses"] == pytest.approx([by_hand.slope * 0.1, by_hand.curvature * 0.01], rel=1e-4)
        for probe in slider.PROBES:
            of_page = np.array(position[probe]) + position["multiple"] * np.array(data["noise"][probe])
            of_library = fits[(fits.probe == probe) & np.isclose(fits.multiple, position["multiple"], rtol=1e-5)]
            values = of_library[["slope", "curvature"]].to_numpy() * [0.1, 0.01]
            if position["multiple"] == 1:  # the very draws
                assert of_page == pytest.approx(values, rel=1e-3, abs=1e-5)
            else:  # others of the same law
                error = np.hypot(values.std(axis=0), of_page.std(axis=0)) / np.sqrt(30)
                assert (np.abs(of_page.mean(axis=0) - values.mean(axis=0)) < 4 * error).all()
                assert of_page.std(axis=0) == pytest.approx(values.std(axis=0), rel=0.5)


@pytest.mark.parametrize("table", ["clipped", "fits"])
def test_a_missing_threshold_is_refused(inputs, table):
    errors, clipped, fits, settings = inputs
    if table == "clipped":
        clipped = clipped[clipped.multiple < 2]
    else:
        fits = fits[fits.multiple > 2]
    with pytest.raises(ValueError, match=r"3 is missing|must have the same thresholds"):
        slider.page_data(errors, clipped[clipped.multiple != 3], fits, setting="", **settings)


def test_it_stands_in_a_notebook_and_reaches_nothing_else():
    shown = slider.frame("<p>a & b</p>")
    assert (
        'sandbox="allow-scripts"' in shown["text/html"]
        and 'srcdoc="&lt;p&gt;a &amp; b&lt;/p&gt;"' in shown["text/html"]
    )
    assert shown["text/plain"]


def check_page(text):
    page = Page(text)
    assert len(text.encode()) < 400_000
    assert not re.search(r"https?:|url\(['\"]?(?!#)|@import|\bsrc=|\bhref=|fetch\(|XMLHttp|import\(", text)
    controls = page.find("input")
    assert [control["id"] for control in controls] == ["slider", "size", "sigma"]
    assert {control["type"] for control in controls} == {"range"}
    assert [label["for"] for label in page.find("label")] == [control["id"] for control in controls]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for picture in page.find("svg"):
        assert picture["role"] == "img"
        assert {picture["aria-labelledby"], picture["aria-describedby"]} <= set(ids)
    assert "prefers-color-scheme: dark" in text and 'lang="en"' in text and 'name="viewport"' in text


def test_the_page_stands_alone_and_is_labelled(inputs):
    errors, clipped, fits, settings = inputs
    check_page(slider.page(slider.page_data(errors, clipped, fits, setting="test", **settings)))


def test_the_committed_page_is_the_slider_of_its_notebook():
    text = (FIGURES / "02_parabolas.html").read_text(encoding="utf-8")
    check_page(text)
    data = embedded(text)
    assert len(data["positions"]) >= 25
    assert len(data["noise"]["losses"]) == len(data["noise"]["contrasts"]) == 100
    # What surrounds the numbers is what this version of the library writes.
    assert text == slider.page(data)


def test_every_position_can_be_drawn(inputs, tmp_path):
    """Runs the page's script against the few calls of a browser that it needs."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    errors, clipped, fits, settings = inputs
    page = Page(slider.page(slider.page_data(errors, clipped, fits, setting="test", **settings)))
    data, script = page.scripts
    program = tmp_path / "page.js"
    program.write_text(
        "const make = () => ({attributes: {}, listeners: {}, children: [], value: 0,\n"
        "  setAttribute(k, v) { this.attributes[k] = v; }, append(e) { this.children.push(e); },\n"
        "  addEventListener(k, f) { this.listeners[k] = f; }});\n"
        f"const elements = {{data: {{textContent: {json.dumps(data)}}}}};\n"
        "const document = {getElementById: id => elements[id] ??= make(), createElement: make};\n"
        f"(() => {{ {script} }})();\n"
        "const seen = [], words = () => Object.fromEntries(Object.entries(elements).map(([id, e]) =>\n"
        "  [id, [e.innerHTML, e.textContent, e.attributes?.['aria-valuetext'], e.value].join(' ')]));\n"
        "const show = name => seen.push({name, ...words()});\n"
        "for (let k = 0; k <= elements.slider.max; k += 0.5) {\n"
        "  elements.slider.value = k; elements.slider.listeners.input(); show('at ' + k);\n"
        "}\n"
        "elements.size.value = 1; elements.sigma.value = -1; elements.size.listeners.input(); show('moved');\n"
        "for (const b of elements.jumps.children) { b.listeners.click(); show(b.textContent); }\n"
        "console.log(JSON.stringify(seen));\n",
        encoding="utf-8",
    )
    done = subprocess.run([node, str(program)], capture_output=True, text=True, check=True, timeout=60)
    seen = {shown.pop("name"): shown for shown in json.loads(done.stdout)}
    assert list(seen)[:5] == ["at 0", "at 0.5", "at 1", "at 1.5", "at 2"]
    assert list(seen)[5:] == ["moved", "R_l = L", "least error", "sum of three", "B and σ_l of the run"]
    for shown in seen.values():
        drawn = "".join(shown[name] for name in ("errors", "eta", "losses", "contrasts"))
        assert not re.search('NaN|Infinity|="undefined', drawn)
        assert shown["losses"].count('class="cloud"') == 30
    usual = settings["usual"][0]
    between = usual * np.sqrt(MULTIPLES[0] * MULTIPLES[1])
    for name, threshold in (
        ("at 0", usual * 0.3),
        ("at 0.5", between),
        ("R_l = L", usual),
        ("sum of three", 3 * usual),
    ):
        assert f"R_l = {float(f'{threshold:.3g}'):g} nats" in seen[name]["now"], name
    assert "B = 500, σ_l = 0.3" in seen["moved"]["now"]
    noise = 0.3 * 3 * usual / 500
    assert f"noise of the mean loss {float(f'{noise:.3g}'):g} nats" in seen["moved"]["now"]
    # With a hundredth of the noise the widest threshold has the least error.
    assert f"R_l = {float(f'{3 * usual:.3g}'):g} nats" in seen["least error"]["now"]
    assert "B = 50, σ_l = 3:" in seen["B and σ_l of the run"]["now"]
