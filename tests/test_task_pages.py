"""The pages of single tasks are true: each is a complete program that ends as the page says."""

import re

import pytest
from pages import ROOT, programs

from hyfreedp import Statement


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
def test_a_statement_is_that_of_the_page_but_for_versions(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "statement.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (code,) = programs("docs/statement.md")
    exec(compile(code, "statement.md", "exec"), names := {})
    (shown,) = re.findall(r"```markdown\n(.*?)```", page, flags=re.DOTALL)
    told = [re.sub(r"\| Versions .*", "", text) for text in (shown, str(names["statement"]))]
    number = r"\d+(?:\.\d+)?(?:e-\d+)?"
    assert re.sub(number, "#", told[0]) == re.sub(number, "#", told[1])
    values = [[float(found) for found in re.findall(number, text)] for text in told]
    assert values[0] == pytest.approx(values[1], rel=1e-3)
    assert Statement.from_json((tmp_path / "privacy.json").read_text()) == names["statement"]


@pytest.mark.whole
def test_few_records_of_one_class(capsys):
    names, recalls = run("rare-classes.md", capsys)
    assert names["optimizer"].guarantee and names["optimizer"].epsilon_spent() <= 3.0
    assert min(recalls) > 0.4
