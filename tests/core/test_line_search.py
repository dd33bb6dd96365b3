"""The paper's line search: step rules against closed forms, what a probe releases, and the state it moves."""

import math
from types import SimpleNamespace

import pytest
import torch
from cases import pairs
from hypothesis import given
from hypothesis import strategies as st

from hyfreedp import line_search
from hyfreedp.curvefit import QuadraticFit
from hyfreedp.line_search import LossSearch
from hyfreedp.schedule import decay_factor

LOSSES = torch.tensor([[0.4, 0.1, 0.9], [0.5, 0.3, 1.1], [0.8, 0.6, 1.6]], dtype=torch.float64)  # at w - hG, w, w + hG

values = st.floats(-1e3, 1e3)
rates = st.floats(1e-6, 10)


@given(values.filter(lambda b: abs(b) > 1e-3), values.filter(lambda a: abs(a) > 1e-3), rates)
def test_literal_is_b_over_a_with_whatever_sign(slope, curvature, eta):
    assert line_search.literal(QuadraticFit(slope, curvature, 1.0), eta).eta == slope / curvature


@pytest.mark.parametrize(("slope", "curvature"), [(1.0, 0.0), (0.0, 0.0), (0.0, 1.0)])
def test_literal_keeps_eta_when_b_over_a_is_no_rate(slope, curvature):
    decision = line_search.literal(QuadraticFit(slope, curvature, 1.0), 0.1)
    assert (decision.eta, decision.accepted) == (0.1, False) and "zero or not finite" in decision.reason


@given(values, values, rates)
def test_gen_moves_only_on_a_convex_descent_and_within_its_range(slope, curvature, eta):
    decision = line_search.gen(QuadraticFit(slope, curvature, 1.0), eta)
    if slope > 0 and curvature > 0:
        clamped = min(max(slope / curvature, 0.5 * eta), 2 * eta)
        assert decision.accepted and decision.eta == pytest.approx(0.1 * clamped + 0.9 * eta)
    else:
        assert not decision.accepted and decision.eta == eta


@pytest.mark.parametrize(
    ("decay", "start", "expected"),
    [
        ("none", 0.0, [1, 1, 1, 1]),
        ("linear", 0.0, [1, 0.75, 0.5, 0.25]),
        ("linear", 0.5, [1, 1, 1, 0.5]),
        ("cosine", 0.0, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_decay(decay, start, expected):
    assert [decay_factor(t, 4, decay, start) for t in range(4)] == pytest.approx(expected)


@pairs(bad=[math.nan, math.inf, 1e300], where=[(0,), (1,), (2,), (0, 1, 2)])
def test_one_bad_record_moves_a_release_by_no_more_than_its_clip(where, bad):
    """Whatever one record's losses are, the fit stays finite and within the sensitivity of the fit without it."""
    extended = torch.cat([LOSSES, torch.full((3, 1), 0.7, dtype=torch.float64)], dim=1)
    extended[list(where), -1] = bad
    fits = []
    for losses in (LOSSES, extended):
        probe = LossSearch(rule="gen", eta=0.1)
        batch = SimpleNamespace(losses=iter(losses[[0, 2]]).__next__, weighted=lambda losses: losses)
        batch.noise_multiplier, batch.expected_batch_size, batch.released = 0.0, 4.0, lambda: None
        batch.terms = {"noise_multiplier": 0.0, "expected_batch_size": 4.0}
        fits.append(probe.probe_after_step(batch, losses[1], lambda distance: None)[0])
        assert math.isfinite(probe.eta) and math.isfinite(probe.loss_threshold) and probe.eta > 0
    slope, curvature = (abs(getattr(fits[0], name) - getattr(fits[1], name)) for name in ("slope", "curvature"))
    assert slope <= 1.0 / 4 / (2 * 0.1) * (1 + 1e-9)
    assert curvature <= 2.0 / 4 / 0.1**2 * (1 + 1e-9)  # where 2 L(w) counts twice
