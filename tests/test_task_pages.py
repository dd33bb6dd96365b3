"""The pages of single tasks are true: each is a complete program that ends as the page says."""

import re

import pytest
from pages import programs


def run(page, capsys):
    """The names of a page's program, and the numbers that it prints."""
    (code,) = programs(f"docs/{page}")
    exec(compile(code, page, "exec"), names := {})
    return names, [float(number) for number in re.findall(r"\d+\.\d+", capsys.readouterr().out)]


@pytest.mark.whole
def test_several_records_a_person(capsys):
    names, (spent,) = run("owners.md", capsys)
    assert names["optimizer"].guarantee and names["optimizer"].steps_left == 0
    assert 2.9 < spent <= 3.0 and names["optimizer"].sampler.num_records == 400


@pytest.mark.whole
def test_few_records_of_one_class(capsys):
    names, recalls = run("rare-classes.md", capsys)
    assert names["optimizer"].guarantee and names["optimizer"].epsilon_spent() <= 3.0
    assert min(recalls) > 0.4
