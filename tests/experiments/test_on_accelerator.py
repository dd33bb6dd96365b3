"""The experiments' training and evaluation on a simulated accelerator: the same numbers as on the CPU."""

from dataclasses import replace

import pytest
from simulated import simulated

from hyfreedp.experiments.data.texts import restaurants
from hyfreedp.experiments.models.language_models import own_tokenizer
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import train
from hyfreedp.experiments.store.provenance import environment
from hyfreedp.experiments.tasks.generation import generate
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.noise import stream as noise
from hyfreedp.pytorch.devices import default_device


@pytest.mark.whole
@pytest.mark.usefixtures("unbound_noise")
def test_a_cell_is_trained_evaluated_and_resumed_there(tmp_path, monkeypatch):
    monkeypatch.setattr("hyfreedp.experiments.runs.train.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(noise, "_ACCELERATOR_CHUNK", noise._CHUNK)  # the pieces in which the same numbers are drawn
    spec = Spec(method="robust", epsilon=8.0, steps=4, interval=1)
    _, here = train(spec, tmp_path / "here")
    with simulated() as machine:
        optimizer, there = train(spec, tmp_path / "there")
        assert next(optimizer.module.parameters()).device == machine.device
        resumed, rows = train(spec, tmp_path / "there")  # from a checkpoint at an earlier step, or the last
        assert next(resumed.module.parameters()).device == machine.device
        assert environment()["accelerator"] == "simulated cuda"
    assert str(here) == str(there) == str(rows)


def test_sentences_are_written_and_scored_there(monkeypatch):
    texts = restaurants(8, 3)
    task = replace(TASKS["restaurants"], train_size=8, load=lambda: texts)
    model, tokenizer = task.model(0, "gpt2_tiny"), own_tokenizer()
    _, held_out = task.datasets("test", "gpt2_tiny")
    here = task.evaluate(model, held_out, "gpt2_tiny"), generate(model, tokenizer, ["name[A]"], most_tokens=4)
    with simulated():
        model.to(default_device())
        there = task.evaluate(model, held_out, "gpt2_tiny"), generate(model, tokenizer, ["name[A]"], most_tokens=4)
    assert here == there
