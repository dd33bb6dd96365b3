"""Public weights, and the synthetic sentences that they and some records were made of: whole, checked, and the same."""

import pretrain
import pytest
import torch
from grammar import reports, restaurants

from hyfreedp.experiments.data.texts import synthetic
from hyfreedp.experiments.models import public_weights as weights
from hyfreedp.experiments.models.image_models import head, make_model


def test_the_committed_texts_are_what_the_grammar_makes():
    for name, made in (("restaurants", restaurants()), ("reports", reports())):
        stored = synthetic(name)
        assert stored.train == made.train and [*map(list, stored.test)] == [*map(list, made.test)], name
        assert (stored.validation_start, stored.source) == (made.validation_start, made.source)


def fresh():
    return make_model("vit8_d64_p4", "full", features=64, classes=10, seed=9)


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
