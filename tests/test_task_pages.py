"""The programs of docs/trainers.md run as they are and resume; those of single tasks end as their pages say."""

import re

import pytest
import torch
from pages import ROOT, programs
from twins import flat

from hyfreedp import Statement

pytestmark = [pytest.mark.whole, pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")]
BLOCKS = dict(zip(("classification", "language", "lightning", "accelerate"), programs("docs/trainers.md"), strict=True))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a program of the page in a folder of its own; its names."""
    monkeypatch.chdir(tmp_path)

    def run(name):
        exec(compile(BLOCKS[name], f"trainers.md, {name}", "exec"), names := {"__name__": "page"})
        return names

    return run


def test_classification_learns_and_resumes_bit_for_bit(run, capsys):
    pytest.importorskip("transformers")
    names = run("classification")
    told = capsys.readouterr()
    assert "epsilon=3, rate=" in told.err and float(re.search(r"accuracy: ([\d.]+)", told.out).group(1)) > 0.3
    assert 2.9 < names["output"].metrics["epsilon"] <= 3.0
    trainer, resumed = names["trainer"], names["resumed"]
    assert torch.equal(flat(resumed.model), flat(trainer.model))
    assert repr(resumed.private.history) == repr(trainer.private.history)


def test_language_with_lora_learns_and_saves_a_small_adapter(run, tmp_path, capsys):
    pytest.importorskip("peft")
    trainer = run("language")["trainer"]
    assert 10 < float(re.search(r"perplexity: (\d+)", capsys.readouterr().out).group(1)) < 100
    assert trainer.private.steps_left == 0 and 2.9 < trainer.private.epsilon_spent() <= 3.0
    assert (tmp_path / "language" / "adapter" / "adapter_model.safetensors").stat().st_size < 10_000


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:`isinstance.treespec, LeafSpec")  # Lightning's advice
def test_lightning_resumes_bit_for_bit(run):
    pytest.importorskip("lightning")
    names = run("lightning")
    assert names["module"].private.steps_left == 0
    assert torch.equal(flat(names["resumed"]), flat(names["module"]))
    assert repr(names["resumed"].private.history) == repr(names["module"].private.history)


def test_accelerate_leaves_a_model_and_its_checkpoint(run, tmp_path, capsys):
    pytest.importorskip("accelerate")
    names = run("accelerate")
    assert float(re.findall(r"epsilon ([\d.]+), accuracy [\d.]+", capsys.readouterr().out)[-1]) <= 3.0
    weights = torch.load(tmp_path / "model.pt")
    names["engine"].load_checkpoint(path="run-0.pt", module=names["model"], optimizer=names["optimizer"])
    assert all(torch.equal(weights[name], value) for name, value in names["model"].state_dict().items())


def ran(page, capsys):
    """The names of a page's program, and the numbers that it prints."""
    (code,) = programs(f"docs/{page}")
    exec(compile(code, page, "exec"), names := {})
    return names, [float(number) for number in re.findall(r"\d+\.\d+", capsys.readouterr().out)]


def test_several_records_a_person_spend_the_budget(capsys):
    names, (spent,) = ran("owners.md", capsys)
    assert names["optimizer"].guarantee and names["optimizer"].steps_left == 0
    assert 2.9 < spent <= 3.0 and names["optimizer"].sampler.num_records == 400


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


def test_few_records_of_one_class_are_recalled(capsys):
    names, recalls = ran("rare-classes.md", capsys)
    assert names["optimizer"].guarantee and names["optimizer"].epsilon_spent() <= 3.0
    assert min(recalls) > 0.4
