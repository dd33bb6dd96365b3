"""Language tasks: the loss of a record, scores, what is written, and documents of one's own."""

from dataclasses import replace

import pytest
import torch

from hyfreedp.experiments.data.encoding import IGNORED, encode_prompts
from hyfreedp.experiments.data.texts import Texts, synthetic
from hyfreedp.experiments.models.language_models import LANGUAGE_MODELS, own_tokenizer
from hyfreedp.experiments.runs.cells import Spec
from hyfreedp.experiments.tasks import generation
from hyfreedp.experiments.tasks.generation import generate
from hyfreedp.experiments.tasks.language_tasks import WIDTHS, read_documents, shortened
from hyfreedp.experiments.tasks.registry import TASKS

DOCUMENTS = [f"Report {number} is about {'tea and cake ' * (number % 3)}on day {number}." for number in range(24)]


@pytest.fixture
def small(monkeypatch):
    """Both kinds of task with a few records, in place of the real ones."""
    whole = synthetic("restaurants")
    texts = Texts(whole.train[:40], whole.test[:6], 32, whole.source)
    reports = Texts(DOCUMENTS[:20], DOCUMENTS[20:], 16, "made here")
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


def test_scores_count_every_target_token_once_whatever_the_pieces(small, monkeypatch):
    task = small["restaurants"]
    network, data = task.model(0, "gpt2_tiny"), task.datasets("test", "gpt2_tiny")[1]
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


def test_a_beam_of_one_is_the_greedy_loop_and_padding_changes_nothing(small, monkeypatch):
    tokenizer, task = own_tokenizer(), small["restaurants"]
    network = task.model(0, "gpt2_sentences")
    meanings = [meaning for meaning, _ in task.load().test[:4]]
    monkeypatch.setattr(generation, "MOST_TOKENS", 15)
    assert generate(network, tokenizer, meanings[1:2]) == generate(network, tokenizer, meanings)[1:2]
    monkeypatch.setattr(generation, "BEAMS", 1)
    together = generate(network, tokenizer, meanings)
    for meaning, found in zip(meanings, together, strict=True):
        ids, _ = encode_prompts(tokenizer, [meaning])
        written = []
        while len(written) < 15 and tokenizer.eos_token_id not in written:
            step = network.eval()(torch.cat([ids[0], torch.tensor(written, dtype=torch.int64)])[None]).logits[0, -1]
            written.append(int(step.argmax()))
        assert found == " ".join(tokenizer.decode(written, skip_special_tokens=True).split())


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
