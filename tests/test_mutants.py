"""The deliberate faults can be made: each has its place in the code, and gives code that still compiles."""

import collections

import pytest
from cases import together
from mutant_list import MUTANTS
from mutants import is_killed, named_tests, read_report

from hyfreedp.experiments.store.paths import ROOT


def test_there_are_at_least_thirty_and_every_one_has_its_own_name():
    assert len(MUTANTS) >= 30
    names = collections.Counter(mutant.name for mutant in MUTANTS)
    assert not [name for name, count in names.items() if count > 1]


@together("mutant", MUTANTS)
def test_its_place_is_there_once_and_the_changed_file_compiles(mutant, tmp_path):
    copy, code = tmp_path / mutant.name / mutant.file, (ROOT / mutant.file).read_text()
    copy.parent.mkdir(parents=True)
    copy.write_text(code)
    mutant.apply(tmp_path / mutant.name)
    assert copy.read_text() != code
    compile(copy.read_text(), mutant.file, "exec")
    assert mutant.what.endswith(".") and mutant.tests
    for named in named_tests([mutant]):
        file, _, test = named.partition("::")
        found = f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).is_file()
        assert found, f"there is no {named}"


def test_a_change_of_the_code_under_a_mutant_is_named(tmp_path):
    mutant = MUTANTS[0]
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text(mutant.old * 2)
    with pytest.raises(ValueError, match=f"mutant '{mutant.name}'.* it occurs 2 times"):
        mutant.apply(tmp_path)


def report(path, *cases):
    body = "".join(f'<testcase file="tests/test_a.py" name="{name}">{inner}</testcase>' for name, inner in cases)
    path.write_text(f'<testsuites><testsuite tests="{len(cases)}" time="1.5">{body}</testsuite></testsuites>')
    return read_report(path)


def test_only_a_test_that_ran_and_failed_kills(tmp_path):
    """Not a module that cannot be imported, nor a fixture, a time limit or an empty selection."""
    path = tmp_path / "report.xml"
    killed = report(path, ("test_b", ""), ("test_c[1]", '<failure message="assert 1 == 2"/>'))
    assert is_killed(killed) and killed.failed == "tests/test_a.py::test_c[1]" and killed.seconds == 1.5
    assert not is_killed(report(path, ("test_b", ""))) and not report(path, ("test_b", "")).broken
    for inner in (
        '<error message="collection failure"/>',
        '<failure message="ImportError: cannot import name"/>',
        '<failure message="Failed: Timeout &gt;120.0s"/>',
    ):
        outcome = report(path, ("test_b", inner))
        assert outcome.broken and not is_killed(outcome)
    assert report(path).broken == "no test ran"
