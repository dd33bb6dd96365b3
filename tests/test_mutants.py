"""The deliberate faults can be made: each has its place in the code, and gives code that still compiles."""

import shutil

import pytest
from mutants import ROOT, killed, mutants


@pytest.mark.parametrize("mutant", mutants())
def test_its_place_is_there_once_and_the_changed_file_compiles(mutant, tmp_path):
    path = mutant.file(ROOT)
    copy = tmp_path / mutant.name / path.relative_to(ROOT)
    copy.parent.mkdir(parents=True)
    shutil.copy(path, copy)
    assert mutant.apply(tmp_path / mutant.name) == copy and copy.read_text() != path.read_text()
    compile(copy.read_text(), copy.name, "exec")
    assert mutant.tests and all((ROOT / file).is_file() for file in mutant.tests)


def test_only_a_test_that_ran_and_failed_kills():
    """Not a module that cannot be imported, nor a fixture, a time limit or an empty selection."""
    assert killed("FAILED tests/test_a.py::test_b - assert 1 == 2")
    for told in ("", "Timeout", "ERROR tests/test_a.py - collection", "FAILED tests/test_a.py::test_b - NameError: x"):
        assert not killed(told)
