"""Specs: the same cell however it is written, and nothing else than allowed ones."""

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyfreedp.experiments.runs.methods import METHODS
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store.paths import CHECKPOINTS

SPECS = st.builds(
    Spec,
    method=st.sampled_from(["robust", "paper", "prodigy", "linear"]),
    epsilon=st.floats(0.01, 100) | st.just(math.inf) | st.integers(1, 10),
    seed=st.integers(0, 10_000),
    learning_rate=st.floats(1e-6, 1),
    interval=st.integers(1, 20),
    evaluation=st.sampled_from(["test", "validation"]),
    steps=st.none() | st.integers(20, 1000),
    base=st.none() | st.sampled_from(["adamw", "sgd"]),
    tuning=st.none() | st.sampled_from(["full", "bitfit"]),
)


@given(SPECS)
def test_json_gives_the_same_spec_and_the_same_cell(spec):
    again = Spec.from_json(spec.to_json())
    assert again == spec and again.key == spec.key


def test_another_way_of_learning_the_rate_makes_another_cell(monkeypatch):
    """Records of an earlier version's rule are not taken for those of today's; fixed rates have none."""
    before = {spec: spec.key for spec in (Spec(method=method) for method in ("robust", "paper", "linear"))}

    def changed():
        return [spec.key != key for spec, key in before.items()]

    monkeypatch.setattr("hyfreedp.look.CONSTANTS", (0.31,))
    assert changed() == [True, False, False]
    monkeypatch.setitem(METHODS, "paper", replace(METHODS["paper"], overrides={"gamma": 1.02}))
    assert changed() == [True, True, False]
    monkeypatch.undo()
    monkeypatch.setattr("hyfreedp.experiments.runs.methods.LEARNING", 2)
    assert changed() == [True, True, False]


def test_other_pre_trained_weights_make_another_cell(monkeypatch):
    scratch, tuned = Spec(model="mlp"), Spec(model="vit8_glyphs")
    before = scratch.key, tuned.key
    assert tuned.weights == json.loads((CHECKPOINTS / "glyphs.json").read_text())["sha256"] and scratch.weights is None
    monkeypatch.setattr("hyfreedp.experiments.models.public_weights.checksum", lambda name: f"other {name}")
    assert scratch.key == before[0] and tuned.key != before[1]


def test_a_run_has_room_for_a_probe_interval():
    with pytest.raises(ValueError, match="interval must be at most the 4 steps of the run, got 5"):
        Spec(steps=4)
    assert Spec(steps=4, method="linear").interval == 5  # not used


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("epsilon", value) for value in (0, math.nan, "1", None, True)],
        *[("learning_rate", value) for value in (0.0, math.inf)],
        *[("steps", value) for value in (0, 1.5)],
        *[(name, "other") for name in ("task", "method", "model")],
    ],
)
def test_a_value_that_is_not_allowed_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field} must be .*got {value!r}"):
        Spec(**{field: value})
    given = json.loads(json.dumps(asdict(Spec()) | {field: value}))
    with pytest.raises(ValueError, match=rf"^{field} must be"):
        Spec.from_fields(given)
