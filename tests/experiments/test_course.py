"""The course, notebooks 00 to 04: what it says of other parameters is true of them; 00 and 02 need no library."""

import re
import subprocess
import sys
import zipfile
from dataclasses import replace

import jupytext
import nbformat
import pytest
import students
from scipy.stats import norm

from hyfreedp import calibrate_noise
from hyfreedp.accounting.accountants import composed_epsilon
from hyfreedp.experiments.accounting_of_the_paper import SOUND, Counting, calibrate
from hyfreedp.experiments.book import exercises, notebooks
from hyfreedp.experiments.book.answers import truth
from hyfreedp.experiments.store.paths import ROOT
from hyfreedp.experiments.studies import bias_variance, noise_split

SOURCES = {source.stem: source for source in notebooks.sources(["00", "01", "02", "03", "04"])}
SECOND = {
    "00_primer": {"sigma": 2.0, "steps": 5, "rate": 0.3},
    "01_bias_variance": {"profile": "smoke", "loss_mean": 3.0, "loss_std": 1.0, "batch_sizes": [300, 3000], "seeds": 1},
    "02_private_step": {"sigma": 2.0, "records": 300, "steps": 30, "seed": 1},
    "03_noise_split": {"profile": "smoke", "interval": 2, "gamma": 1.05, "seeds": 1},
}
NUMBER = r"([-+]?[\d.]+(?:e[-+]\d+)?)"


@pytest.fixture
def said(tmp_path, monkeypatch):
    """What a notebook prints at its second setting: a function of a sentence to the numbers at the places of its #."""
    monkeypatch.setenv("HYFREEDP_CELLS", str(tmp_path / "cells"))

    def run(stem):
        notebooks.execute(SOURCES[stem], tmp_path / "out.ipynb", SECOND[stem])
        cells = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        printed = [output.text for output in outputs if output.output_type == "stream"]

        def numbers(sentence):
            found = re.search(re.escape(sentence).replace(r"\#", NUMBER), "".join(printed))
            assert found, f"{sentence!r} is not in {printed}"
            return [float(number) for number in found.groups()]

        return numbers

    return run


def near(*values):
    """Pairs of a number and how many digits are printed after the point: within a unit of the last of them."""
    return [pytest.approx(value, abs=1.01 * 10**-digits) for value, digits in values]


@pytest.mark.whole
def test_00_says_what_other_noise_costs(said):
    numbers = said("00_primer")
    gain = [norm.sf(4 * e + 0.5, 1, 2) - 2.718281828**e * norm.sf(4 * e + 0.5, 0, 2) for e in (0, 1)]
    assert numbers("noise of 2: delta is # at epsilon 0, # at 1") == near((gain[0], 2), (gain[1], 3))
    one, many, once, often = (
        composed_epsilon([(2.0, times)], sample_rate=q, delta=1e-5, accountant="pld")
        for times, q in ((1, 1.0), (5, 1.0), (1, 0.3), (5, 0.3))
    )
    costs = near((one, 2), (many, 2), (many / one, 1))
    assert numbers("one release costs # at delta = 1e-05, 5 cost #: # times") == costs
    assert numbers("share 0.3: one release costs # of it, 5 cost #") == near((once / one, 2), (often / many, 2))


@pytest.mark.whole
def test_01_says_where_the_bottom_of_another_u_is(said):
    numbers = said("01_bias_variance")
    (sigma,) = numbers("B = 500, sigma_l = #: the mean squared error is least")
    expected = {
        size: bias_variance.optimal_threshold(3.0, 1.0, noise_multiplier=sigma, expected_batch_size=size)
        for size in (300, 500, 3000)
    }
    assert numbers("the mean squared error is least at R_l = # nats") == [pytest.approx(expected[500], rel=0.02)]
    for size in (300, 3000):
        assert numbers(f"B = {size:,}: the best R_l is # L") == near((expected[size] / 3.0, 2))


@pytest.mark.whole
def test_02_says_what_another_run_costs(said):
    numbers = said("02_private_step")
    spent = composed_epsilon([(2.0, 30)], sample_rate=0.25, delta=1e-4, accountant="pld")
    plan = {"target_epsilon": 3.0, "target_delta": 1e-4, "sample_rate": 0.25, "steps": 30}
    split = calibrate_noise(**plan, probe="losses", interval=5, gamma=1.02)
    borne = near((spent, 1), (split.sigma_gradient / 2, 1))
    assert numbers("its epsilon is #; at epsilon = 3 it would bear # times") == borne
    noise = near((split.sigma_gradient, 2), (split.sigma_gradient_probe, 2))
    assert numbers("sigma_g = #, on steps with a probe #") == noise


@pytest.mark.whole
def test_03_says_what_another_pair_costs(said):
    numbers = said("03_noise_split")
    assert numbers("the gradient noise rises by #% at every K") == near((5.0, 1))
    budget = noise_split.DataSet("", 50_000, 1000, 1).budget(0.5)
    pair = calibrate(**budget, interval=2, gamma=1.05, counting=Counting("rdp", "independent"))
    true = SOUND.epsilon(replace(pair, accountant="pld"), coarseness=noise_split.COARSENESS)
    assert numbers("the paper's pair for epsilon = 0.5 really costs #,") == near((true, 2))


@pytest.mark.parametrize(
    ("answer", "truth", "said"),
    [
        (3.05, 3.0, "**Right.**"),
        (-3.07, -3.0, "**Not yet.** It is too low."),
        (1e-9, 0.0, "**Not yet.** It is too high."),
        (0, 0.0, "**Right.**"),
    ],
)
def test_an_answer_is_right_or_told_to_be_too_low_or_too_high(answer, truth, said, monkeypatch):
    shown = []
    monkeypatch.setattr(exercises, "display", shown.append)
    exercises.check(answer, lambda: truth)
    assert [markdown.data for markdown in shown] == [said]


@pytest.mark.parametrize(
    ("stem", "names"),
    [
        ("00_primer", {"largest": "00.1", "each": "00.2", "times_one": "00.3"}),
        ("02_private_step", {"length": "02.1", "together": "02.2", "farther": "02.3"}),
    ],
)
def test_answers_in_code_are_those_of_the_library(stem, names):
    text = SOURCES[stem].read_text(encoding="utf-8")
    for name, exercise in names.items():
        (code,) = set(re.findall(rf'^check\({name}, "(\w+)"\)', text, re.MULTILINE))
        assert float(bytes.fromhex(code)) == pytest.approx(truth(exercise), rel=1e-3)


@pytest.mark.whole
def test_the_students_copy_checks_answers_shows_none_and_has_no_dead_link(tmp_path):
    students.pack(ROOT, tmp_path / "course.zip")
    zipfile.ZipFile(tmp_path / "course.zip").extractall(tmp_path)
    root = tmp_path / students.FOLDER
    assert not [*root.glob("notebooks/**/*.py"), *root.glob("**/solutions"), *root.glob("tests")]
    hidden = (root / "hyfreedp" / "experiments" / "book" / "answers.py").read_text()
    exec(compile(hidden, "answers.py", "exec"), names := {})
    assert names["truth"]("02.2") == truth("02.2") and "02.2" not in hidden
    for path in [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("notebooks/**/*.ipynb")]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = nbformat.reads(text, as_version=4).cells
            text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
        assert not [link for link in links if "://" not in link and not (path.parent / link).exists()], path


WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *more):
        if name.partition(".")[0] not in {"hyfreedp", "torch", "pandas", "seaborn", "sklearn"}:
            return self.finder.find_spec(name, *more)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


@pytest.mark.whole
@pytest.mark.parametrize("stem", ["00_primer", "02_private_step"])
def test_a_class_starts_with_numpy_scipy_and_matplotlib_alone(stem, tmp_path):
    student = exercises.without_solutions(jupytext.read(SOURCES[stem]))
    code = [cell.source for cell in student.cells if cell.cell_type == "code"]
    (tmp_path / "alone.py").write_text("\n".join([WITHOUT, "import matplotlib", 'matplotlib.use("Agg")', *code]))
    done = subprocess.run([sys.executable, tmp_path / "alone.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
