"""Language tasks: the loss of a record, what is masked, what moves, what is written, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pretrain
import pytest
import torch

from hyfreedp.experiments.data.encoding import IGNORED, encode_documents, encode_prompts
from hyfreedp.experiments.data.texts import restaurants
from hyfreedp.experiments.models import language_models
from hyfreedp.experiments.models.language_models import LANGUAGE_MODELS, own_tokenizer
from hyfreedp.experiments.runs import train
from hyfreedp.experiments.runs.cells import Spec, read_steps, run_cell
from hyfreedp.experiments.store import archive, unfinished
from hyfreedp.experiments.store.paths import CHECKPOINTS
from hyfreedp.experiments.tables import language_generation
from hyfreedp.experiments.tables.plan import Learner, Scale, filled
from hyfreedp.experiments.tasks.generation import generate
from hyfreedp.experiments.tasks.language_tasks import WIDTHS, Documents, read_documents, shortened
from hyfreedp.experiments.tasks.registry import TASKS

DOCUMENTS = [f"Report {number} is about {'tea and cake ' * (number % 3)}on day {number}." for number in range(24)]


@pytest.fixture
def small(monkeypatch):
    """Both kinds of task with a few records, in place of the real ones."""
    texts = restaurants(40, 6)
    reports = Documents(DOCUMENTS[:20], DOCUMENTS[20:], 16, "made here")
    for name, data, size in (("restaurants", texts, 40), ("reports", reports, 20)):
        task = replace(TASKS[name], train_size=size, batch_size=8, steps=6, delta=1e-2, load=lambda data=data: data)
        monkeypatch.setitem(TASKS, name, task)
    return TASKS


def mean_loss_by_loop(model, tokens, labels):
    """Of one sequence without its padding: every target's -log p, one by one."""
    end = int((labels != IGNORED).nonzero().max()) + 1
    logits = model(tokens[None, :end]).logits[0]
    targets = [t for t in range(end) if labels[t] != IGNORED]
    return sum(-logits[t - 1].double().log_softmax(0)[labels[t]] for t in targets) / len(targets)


@pytest.mark.parametrize(("name", "model"), [("restaurants", "gpt2_tiny"), ("reports", "llama_tiny")])
def test_a_records_loss_is_the_mean_over_its_own_targets(small, name, model):
    task = small[name]
    network = task.model(0, model)
    tokens, labels = (tensor[:5] for tensor in task.datasets("test", model)[0].tensors)
    together = task.losses_of(network)(shortened(tokens, labels))
    for row in range(5):
        expected = pytest.approx(mean_loss_by_loop(network, tokens[row], labels[row]).item(), rel=1e-5)
        record = task.collate([(tokens[row], labels[row])])
        assert task.losses_of(network)(record).item() == expected == together[row].item()
        assert record[0].shape[1] % WIDTHS == 0 or record[0].shape[1] == tokens.shape[1] - 1


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "model", "tuning"), [("restaurants", "gpt2_tiny", None), ("reports", "llama_tiny", "lora")]
)
def test_a_killed_run_goes_on_to_the_same_numbers_and_sentences(small, tmp_path, monkeypatch, name, model, tuning):
    spec = Spec(task=name, model=model, tuning=tuning, interval=2)
    whole = run_cell(spec, tmp_path / "whole")
    monkeypatch.setattr(train, "CHECKPOINT_SECONDS", -1.0)
    real, calls = type(small[name]).evaluate, []

    def evaluate(self, *args):
        calls.append(1)
        if len(calls) == 2:  # after the last step; the first was after step 0
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(type(small[name]), "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        run_cell(spec, tmp_path / "killed")
    kept = unfinished.load(tmp_path / "killed" / f"{spec.key}.ckpt")["optimizer"]["model"]
    assert all("lora_" in key for key in kept) == (tuning == "lora")
    resumed = run_cell(spec, tmp_path / "killed")
    assert resumed | {"seconds": 0} == whole | {"seconds": 0}
    pd.testing.assert_frame_equal(read_steps(spec, tmp_path / "killed"), read_steps(spec, tmp_path / "whole"))
    assert ("outputs" in whole) == (name == "restaurants")


def test_scores_count_every_target_token_once_whatever_the_pieces(small, monkeypatch):
    task = small["restaurants"]
    network = task.model(0, "gpt2_tiny")
    data = task.datasets("test", "gpt2_tiny")[1]
    right, loss, count = 0, 0.0, 0
    for tokens, labels in zip(*data.tensors, strict=True):
        targets = (labels != IGNORED).nonzero().flatten()
        logits = network.eval()(tokens[None]).logits[0, targets - 1]
        right += int((logits.argmax(1) == labels[targets]).sum())
        loss += torch.nn.functional.cross_entropy(logits, labels[targets], reduction="sum").item()
        count += len(targets)
    for budget in (200, None):
        monkeypatch.setitem(LANGUAGE_MODELS, "gpt2_tiny", replace(LANGUAGE_MODELS["gpt2_tiny"], token_budget=budget))
        found = task.evaluate(network.train(), data, "gpt2_tiny")
        assert found.accuracy == right / count and found.loss == pytest.approx(loss / count, rel=1e-5)
        assert network.training


def test_a_beam_of_one_is_the_greedy_loop_and_padding_changes_nothing(small):
    tokenizer, task = own_tokenizer(), small["restaurants"]
    network = task.model(0, "gpt2_sentences")
    meanings = [meaning for meaning, _ in task.load().test[:4]]
    together = generate(network, tokenizer, meanings, beams=1, most_tokens=15)
    for meaning, found in zip(meanings, together, strict=True):
        ids, _ = encode_prompts(tokenizer, [meaning])
        written = []
        while len(written) < 15 and tokenizer.eos_token_id not in written:
            step = network.eval()(torch.cat([ids[0], torch.tensor(written, dtype=torch.int64)])[None]).logits[0, -1]
            written.append(int(step.argmax()))
        assert found == " ".join(tokenizer.decode(written, skip_special_tokens=True).split())
    all_, alone = (generate(network, tokenizer, some, most_tokens=15) for some in (meanings, meanings[1:2]))
    assert all_[1] == alone[0]


def test_documents_of_a_file_make_a_task_and_name_the_cell(tmp_path, monkeypatch):
    path = tmp_path / "abstracts.txt"
    path.write_text("\n\n".join(f"Abstract {number} of a paper." for number in range(500)), encoding="utf-8")
    spec = Spec(task="reports", model="llama_tiny", tuning="lora", source=str(path))
    task = spec.problem
    assert (task.train_size, task.batch_size, task.steps, len(task.load().test)) == (450, 200, 9, 50)
    assert task.validation_start == 360 and task.delta == pytest.approx(450**-1.1)
    assert sorted([*task.load().train, *task.load().test]) == sorted(f"Abstract {n} of a paper." for n in range(500))
    other = tmp_path / "moved.txt"
    other.write_bytes(path.read_bytes())
    assert replace(spec, source=str(other)).key == spec.key != replace(spec, source=None).key
    other.write_text(path.read_text(encoding="utf-8").replace("499", "four hundred"), encoding="utf-8")
    read_documents.cache_clear()
    assert replace(spec, source=str(other)).key != spec.key


def test_real_weights_are_read_from_a_folder_and_name_the_cell(monkeypatch, tmp_path):
    folder = tmp_path / "gpt2"
    made = LANGUAGE_MODELS["gpt2_tiny"].build()
    made.config.resid_pdrop = made.config.attn_pdrop = made.config.embd_pdrop = 0.1
    made.save_pretrained(folder)
    own_tokenizer().save_pretrained(folder)
    monkeypatch.setenv("HYFREEDP_WEIGHTS", str(tmp_path))
    architecture = LANGUAGE_MODELS["gpt2"]
    read = architecture.build().train()
    torch.testing.assert_close(dict(read.named_parameters()), dict(made.named_parameters()))
    ids = torch.arange(9)[None]
    torch.testing.assert_close(read(ids).logits, made.eval()(ids).logits)  # no dropout
    assert architecture.tokenizer().encode("tea") == own_tokenizer().encode("tea")
    before = architecture.checksum()
    with torch.no_grad():
        made.lm_head.weight[0, 0] += 1
    made.save_pretrained(folder)
    language_models._folder_checksum.cache_clear()
    assert len(before) == 64 and architecture.checksum() not in (before, None)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"the weights in .* cannot be read"):
        architecture.build()


@pytest.mark.parametrize("name", ["gpt2_sentences", "llama_sentences"])
def test_committed_starts_are_what_their_recipes_say(name):
    described = json.loads((CHECKPOINTS / f"{name}.json").read_text(encoding="utf-8"))
    recipe = pretrain.RECIPES[name]
    assert {key: described[key] for key in recipe.settings} == recipe.settings
    network = TASKS[recipe.task].model(0, name)
    encoded = shortened(*encode_documents(own_tokenizer(), ["We asked 60 visitors about The Red Lion."], 256))
    fresh = TASKS[recipe.task].model(0, recipe.model)
    losses = TASKS[recipe.task].losses_of
    assert losses(network)(encoded) < 0.7 * losses(fresh)(encoded) or name == "gpt2_sentences"
    assert LANGUAGE_MODELS[name].checksum() == described["sha256"]


@pytest.mark.whole
def test_committed_records_stand_in_for_cells_and_are_never_lost(small, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    learner = Learner("restaurants", "gpt2_tiny", "full")
    scale = Scale((learner,), epsilons=(8.0,), seeds=1, rows=("reference", "hyfreedp_robust"))
    monkeypatch.setattr(language_generation, "DESKTOP", scale)
    monkeypatch.setattr(language_generation, "workspace", lambda: SimpleNamespace(results=tmp_path))
    some = replace(scale, rows=("reference",))
    trained = language_generation.scored(some, "none", tmp_path / "cells")
    assert language_generation.record(tmp_path / "cells", tmp_path, train=False).endswith(
        "3 numbers, 1 of them still missing; 1 runs"
    )
    for cells in ("none", "cells"):
        rows = language_generation.scored(scale, "desktop", tmp_path / cells, train=False)
        pd.testing.assert_frame_equal(rows.iloc[:2][trained.columns], trained, check_dtype=False)
        assert rows.row.tolist() == ["start", *scale.rows] and rows.accuracy.isna().tolist() == [False, False, True]
    before, runs = (tmp_path / "desktop" / name for name in ("language_generation.csv", archive.NAME))
    table, kept, image = before.read_bytes(), archive.read(runs), "0123456789abcdef"
    for name, text in ((f"{image}.json", '{"spec": {"task": "digits"}}'), (f"{image}.csv", "step,eta\n0,0.1\n")):
        (tmp_path / "cells" / name).write_text(text)
    archive.pack(tmp_path / "cells", runs, {image, *(Path(name).stem for name in kept)})
    language_generation.record(tmp_path / "none", tmp_path, train=False)
    assert before.read_bytes() == table and archive.read(runs).keys() == {*kept, f"{image}.json", f"{image}.csv"}


def test_seeds_of_two_versions_are_never_in_one_mean():
    places = {"task": "t", "model": "m", "tuning": "f", "epsilon": 3.0, "row": ["robust", "robust", "grid"], "runs": 1}
    rows = pd.DataFrame(places | {"seed": [0, 1, 0], "accuracy": [0.6, np.nan, np.nan], "key": "new"})
    committed = pd.DataFrame(places | {"seed": [0, 1, 0], "accuracy": [0.4, 0.5, 0.7], "key": "old", "METEOR": 0.2})
    committed["version_hyfreedp"], rows["version_hyfreedp"] = "0.10.0.dev0", ["0.10.0", np.nan, np.nan]
    found = filled(rows, committed)
    np.testing.assert_array_equal(found.accuracy, [0.6, np.nan, 0.7])
