"""The course, notebooks 00 to 04: answers are the library's, the students' copy is whole; 00 and 02 need no library."""

import re
import subprocess
import sys
import zipfile

import jupytext
import nbformat
import pytest

from hyfreedp.experiments.book import exercises, notebooks, students
from hyfreedp.experiments.book.answers import truth
from hyfreedp.experiments.store.paths import ROOT

SOURCES = {source.stem: source for source in notebooks.sources(["00", "01", "02", "03", "04"])}


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
