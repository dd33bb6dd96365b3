"""Pre-training: resumable, its weights whole and checked."""

import json

import pretrain
import pytest
import torch
from glyphs import glyphs

from hyfreedp.experiments.models import public_weights as weights
from hyfreedp.experiments.models.image_models import head, make_model


def tiny():
    def corpus():
        features, labels = (torch.from_numpy(array) for array in glyphs(120, seed=3))
        return pretrain.Corpus((features[:80], labels[:80]), (features[80:], labels[80:]), "made here")

    settings = {"classes": 10, "epochs": 3, "batch_size": 16, "learning_rate": 2e-3}
    return pretrain.Recipe(model="vit8_d64_p4", corpus=corpus, **settings)


def fresh():
    return make_model("vit8_d64_p4", "full", features=64, classes=10, seed=9)


@pytest.mark.whole
def test_an_interrupted_run_ends_in_the_same_weights(tmp_path, monkeypatch):
    pretrain.pretrain("tiny", tiny(), tmp_path / "whole")
    monkeypatch.setattr(pretrain, "SAVE_SECONDS", 0.0)
    loss, calls = pretrain.F.cross_entropy, []

    def dies_at_the_ninth(*args, **kwargs):
        calls.append(None)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return loss(*args, **kwargs)

    monkeypatch.setattr(pretrain.F, "cross_entropy", dies_at_the_ninth)
    with pytest.raises(KeyboardInterrupt):
        pretrain.pretrain("tiny", tiny(), tmp_path / "killed")
    assert not list((tmp_path / "killed").glob("*.safetensors"))
    monkeypatch.setattr(pretrain.F, "cross_entropy", loss)
    pretrain.pretrain("tiny", tiny(), tmp_path / "killed")
    whole, killed = (json.loads((tmp_path / name / "tiny.json").read_text()) for name in ("whole", "killed"))
    assert whole["sha256"] == killed["sha256"] and whole["held_out_accuracy"] == killed["held_out_accuracy"]
    assert whole["records"] == 80 and whole["held_out_records"] == 40
    assert not list((tmp_path / "killed").glob(".*"))


def test_weights_come_back_in_half_precision_and_the_classifier_is_fresh(workspace):
    saved, loaded = fresh(), make_model("vit8_d64_p4", "full", features=64, classes=10, seed=5)
    pretrain.save("some", saved, {}, workspace.checkpoints)
    torch.nn.init.constant_(head(loaded).weight, 7.0)
    weights.load("some", loaded)
    assert (head(loaded).weight == 7).all()
    theirs = dict(loaded.named_parameters())
    for name, value in saved.named_parameters():
        if not name.startswith(weights.HEAD):
            assert torch.equal(theirs[name], value.half().float())


def test_damaged_missing_and_foreign_weights_are_refused(workspace):
    with pytest.raises(FileNotFoundError, match=r"no pre-trained weights .*: make them with python tools.*py some"):
        weights.load("some", fresh())
    pretrain.save("some", fresh(), {}, workspace.checkpoints)
    for other in ("mlp", "vit32_d128"):
        with pytest.raises(ValueError, match="is of another architecture"):
            weights.load("some", make_model(other, "full", features=64, classes=10, seed=0))
    path = workspace.checkpoints / "some.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: its SHA-256 is"):
        weights.load("some", fresh())
