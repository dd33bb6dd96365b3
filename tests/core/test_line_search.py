"""The paper's line search: step rules against closed forms, and the decay of the rate."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyfreedp import line_search
from hyfreedp.curvefit import QuadraticFit
from hyfreedp.schedule import decay_factor

values, rates = st.floats(-1e3, 1e3), st.floats(1e-6, 10)


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
def test_the_rate_decays_by_the_closed_forms(decay, start, expected):
    assert [decay_factor(t, 4, decay, start) for t in range(4)] == pytest.approx(expected)
