"""Names that have changed go on working, and say once what to use."""

import importlib
import warnings

import pytest
from twins import adamw, make_model, make_private

from hyfreedp import HyFreeDPOptimizer, NoiseGenerator, rate_learner, records, renamed, votes


@pytest.fixture
def warned(monkeypatch):
    """The warnings so far, as of a process that has seen none of them."""
    monkeypatch.setattr(renamed, "_told", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [(warning.category, str(warning.message), warning.filename) for warning in caught]


def test_the_module_probe(warned):
    old = importlib.import_module("hyfreedp.probe")
    for _ in range(2):
        assert old.Probe is rate_learner.LossSearch and old.ProbeResult is records.ProbeResult
    assert old.LineSearch is rate_learner.LineSearch
    assert [message for _, message, _ in warned()] == [
        f"hyfreedp.probe.{name} is now hyfreedp.{place}.{new}; the old name will go"
        for name, place, new in (
            ("Probe", "rate_learner", "LossSearch"),
            ("ProbeResult", "records", "ProbeResult"),
            ("LineSearch", "rate_learner", "LineSearch"),
        )
    ]
    assert {(category, file) for category, _, file in warned()} == {(FutureWarning, __file__)}
    with pytest.raises(AttributeError, match=r"module 'hyfreedp\.probe' has no attribute 'Prob'"):
        old.Prob  # noqa: B018


def test_the_vote_result_where_it_was(warned):
    assert votes.VoteResult is records.VoteResult and not warned()


def test_the_optimizers_attribute_and_argument_probe(warned):
    model = make_model()
    _, optimizer, _ = make_private(model, adamw(model), target_epsilon=3.0, accountant="rdp")
    assert not warned()
    for _ in range(2):
        assert optimizer.probe is optimizer.rate_learner
        again = HyFreeDPOptimizer(
            optimizer.base,
            module=model,
            gradient_engine=optimizer.gradient_engine,
            split=optimizer.split,
            generator=NoiseGenerator(0),
            expected_batch_size=8,
            probe=optimizer.rate_learner,
        )
        assert again.rate_learner is optimizer.rate_learner
    assert warned() == [
        (FutureWarning, f"{old} is now 'rate_learner'; the old name will go", __file__)
        for old in ("HyFreeDPOptimizer.probe", "HyFreeDPOptimizer's argument 'probe'")
    ]
