"""README and docs are true: their code runs as written, their files exist, their numbers are real."""

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from pages import programs
from torch.utils.data import DataLoader, Subset, TensorDataset

from hyfreedp import PrivacyEngine
from hyfreedp.experiments.benchmark import efficiency
from hyfreedp.experiments.book import committed, notebooks
from hyfreedp.experiments.studies import loss_noise
from hyfreedp.experiments.tables import image_classification, looks

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("results*.md")))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "data/README.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.whole
def test_the_programs_of_the_readme_and_the_usage_page_run_as_written(capsys):
    (code,), (loop, shown, views, *_) = programs("README.md"), programs("docs/usage.md")  # others run its sections
    exec(compile(code, "README.md", "exec"), names := {})
    spent = float(re.search(r"epsilon spent: ([\d.]+)", capsys.readouterr().out).group(1))
    assert 2.9 < spent <= 3.0
    wired = code.partition("for epoch in")[0]
    for block in (loop, shown):
        exec(compile(wired + block, "usage.md", "exec"), names)
        assert names["optimizer"].steps_left == 0
    assert re.search(r"epsilon=3, eta=[\d.e-]+", capsys.readouterr().err)
    names["augment"] = lambda x: x + 0.1 * torch.randn_like(x)
    exec(compile(views, "usage.md", "exec"), names)
    assert names["loss"](names["data"][:1]).shape == ()


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_exist(page):
    place = ROOT / page
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", place.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (place.parent / target).exists()]
    assert not missing


def test_the_boards_are_those_of_the_notebooks():
    page = (ROOT / "docs" / "verdicts.md").read_text(encoding="utf-8")
    assert committed.with_boards(ROOT / "docs" / "verdicts.md") == page, "python -m hyfreedp.experiments update"
    boards = page.partition("## The paper's claims")[2]
    judging = {source.stem for source in notebooks.sources() if "\nverdict(" in source.read_text(encoding="utf-8")}
    assert set(re.findall(r"(\w+)\.ipynb", boards)) == judging and len(judging) > 10
    assert loss_noise.markdown(pd.read_csv(loss_noise.TABLE)) in page


def image_table(rows):
    return image_classification.markdown(rows.assign(profile="laptop"))


def image_places(rows):
    return image_classification.markdown_by_place(image_classification.whole_places(rows.assign(profile="desktop")))


def test_the_looks_are_those_of_the_record():
    today = pd.read_csv(ROOT / "data" / "results" / "laptop" / "looks.csv")
    page = (ROOT / "docs" / "step_rule.md").read_text(encoding="utf-8")
    assert all(looks.sentence(today) in re.sub(r"\s+", " ", text) for text in (README, page))


@pytest.mark.parametrize(
    ("record", "table"),
    [
        ("laptop/image_classification", image_table),
        ("desktop/image_classification", image_places),
        ("laptop/efficiency_peers", efficiency.peers),
        ("laptop/efficiency_runs", efficiency.runs),
    ],
)
def test_the_tables_are_those_of_the_records(record, table):
    assert table(pd.read_csv(ROOT / "data" / "results" / f"{record}.csv")) in RESULTS


def test_the_tests_that_the_page_of_pitfalls_names_exist():
    page = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) > 25
    for file, name in named:
        assert f"\ndef {name}(" in next((ROOT / "tests").rglob(file)).read_text(encoding="utf-8"), f"{file}::{name}"


def run(section):
    """A program of docs/usage.md, on data that it does not make."""
    (block,) = programs("docs/usage.md", section)
    data = TensorDataset(torch.randn(2000, 20), torch.randint(0, 3, (2000,)))
    names = {"torch": torch, "F": F, "data": data}
    names |= {one.__name__: one for one in (DataLoader, PrivacyEngine, Subset)}
    exec(compile(block, "usage.md", "exec"), names)
    return block


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:samples are computed one at a time")
def test_the_audit_of_the_usage_page_runs_as_written(capsys):
    run("An audit of your own script")
    assert re.search(r"claimed 3.00, found at least [0-2]\.\d\d .*at most 4\.78", capsys.readouterr().out)


@pytest.mark.whole
def test_the_search_of_the_usage_page_costs_what_it_says(capsys):
    block = run("Several runs on the same records")
    assert re.search(r"  # ([\d.]+), not 3", block)[1] == capsys.readouterr().out.split()[-1]
