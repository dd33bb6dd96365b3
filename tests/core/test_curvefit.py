"""The parabola: equal to a QR least squares, with the right standard errors, exact on exact parabolas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyfreedp.curvefit import fit_quadratic

etas = st.lists(st.integers(-20, 20).filter(bool), min_size=2, max_size=8, unique=True)


def design(x):
    return np.stack([np.ones_like(x), -x, x**2 / 2], axis=1)


@given(etas, st.floats(1e-5, 10), st.integers(0, 2**32 - 1))
def test_equals_lstsq_with_any_number_of_probes(nonzero, scale, seed):
    x = np.array([0.0, *nonzero]) * scale
    y = np.random.default_rng(seed).normal(size=len(x))
    columns = np.abs(design(x)).max(axis=0)
    intercept, slope, curvature = np.linalg.lstsq(design(x) / columns, y, rcond=None)[0] / columns
    fit = fit_quadratic(x, y)
    unit = np.abs(x).max()
    assert fit.intercept == pytest.approx(intercept, abs=1e-10)
    assert fit.slope * unit == pytest.approx(slope * unit, abs=1e-10, rel=1e-10)
    assert fit.curvature * unit**2 == pytest.approx(curvature * unit**2, abs=1e-10, rel=1e-10)


def test_standard_errors_are_those_of_repeated_noise():
    """Empirical spread over 4,000 noisy fits; its own relative error is 1.1 %, the tolerance five times that."""
    rng = np.random.default_rng(0)
    x, std = np.array([-0.2, -0.1, 0.0, 0.1, 0.2]), np.array([0.3, 0.1, 0.2, 0.1, 0.5])
    fits = [fit_quadratic(x, rng.normal(scale=std), std) for _ in range(4_000)]
    assert np.std([f.slope for f in fits]) == pytest.approx(fits[0].slope_std, rel=0.055)
    assert np.std([f.curvature for f in fits]) == pytest.approx(fits[0].curvature_std, rel=0.055)


def test_two_distinct_points_make_no_parabola():
    with pytest.raises(ValueError, match="three distinct"):
        fit_quadratic([1, 1, 0, 0], [0, 1, 2, 3])
