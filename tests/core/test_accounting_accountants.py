"""Epsilon under each accountant, against other people's accountants, closed forms and numerical integration."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from cases import each, together
from dp_accounting import ComposedDpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.gdp import delta_eps_mu
from scipy import integrate
from scipy.stats import laplace, norm
from splits import effective, vanilla

from hyfreedp.accounting import calibrate_noise, epsilon
from hyfreedp.accounting.accountants import ORDERS, _subsampled_rdp, composed_epsilon
from hyfreedp.accounting.mechanisms import Mechanism, merge, probe_mechanism
from hyfreedp.accounting.pld import amplify_by_sampling, privacy_loss_distribution
from hyfreedp.experiments.baselines.contrasts import privatize_contrasts
from hyfreedp.privatize import privatize_loss
from hyfreedp.sensitivity import LAPLACE_SENSITIVITY, SQUARED_L2_SENSITIVITY

pytestmark = pytest.mark.filterwarnings("ignore::hyfreedp.accounting.UnsoundAccountingWarning")

# Little noise makes large grids; this budget asks for a noise multiplier of 4, so that a PLD takes 20 ms.
CHEAP = dict(target_epsilon=0.5, target_delta=1e-5, sample_rate=0.1, steps=20, interval=4)
# The reference setting of design.md: N = 50,000, B = 1,000, T = 250, K = 5.
REFERENCE = dict(target_delta=50_000**-1.1, sample_rate=0.02, steps=250, interval=5, gamma=1.01)
PAPER = dict(probe="losses", allocation="constant")


# ---- other people's accountants ------------------------------------------------------------------------------------


def pld_accountant_epsilon(sample_rate, delta, *groups):
    accountant = PLDAccountant()
    accountant.compose(
        ComposedDpEvent([SelfComposedDpEvent(PoissonSampledDpEvent(sample_rate, event), n) for event, n in groups])
    )
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize("probe", ["losses", "contrasts"])
@pytest.mark.parametrize("allocation", ["per_step", "constant"])
def test_agrees_with_dp_accounting_pld(probe, allocation):
    split = calibrate_noise(**CHEAP, probe=probe, allocation=allocation, gamma=1.1)
    for delta in (1e-6, 1e-4):
        reference = pld_accountant_epsilon(
            0.1, delta, (GaussianDpEvent(split.sigma_gradient), 15), (GaussianDpEvent(effective(split)), 5)
        )
        assert epsilon(split, target_delta=delta) == pytest.approx(reference, abs=1e-4)


def test_agrees_with_dp_accounting_pld_on_the_coarser_grid_of_little_noise():
    reference = pld_accountant_epsilon(0.001, 1e-5, (GaussianDpEvent(0.35), 10))
    ours = composed_epsilon(((Mechanism(0.35), 10),), sample_rate=0.001, delta=1e-5, accountant="pld")
    assert ours == pytest.approx(reference, abs=1e-4)


def test_independent_composition_agrees_with_dp_accounting_pld():
    for mechanism, event in (("gaussian", GaussianDpEvent), ("laplace", LaplaceDpEvent)):
        split = calibrate_noise(**CHEAP, composition="independent", loss_mechanism=mechanism, gamma=1.1, **PAPER)
        reference = pld_accountant_epsilon(
            0.1, 1e-5, (GaussianDpEvent(1.1 * split.sigma), 20), (event(split.sigma_loss), 3 * 5)
        )
        assert epsilon(split) == pytest.approx(reference, abs=1e-4)


@together(*each(probe=["losses", "contrasts"], target_epsilon=[0.7, 3.0, 8.0]).args)
def test_agrees_with_opacus_rdp(target_epsilon, probe):
    split = calibrate_noise(
        target_epsilon=target_epsilon, **REFERENCE, probe=probe, allocation="constant", accountant="rdp"
    )
    opacus = RDPAccountant()
    opacus.history = [(split.sigma_gradient, 0.02, 200), (effective(split), 0.02, 50)]
    assert set(RDPAccountant.DEFAULT_ALPHAS) < set(ORDERS)
    assert epsilon(split) == pytest.approx(opacus.get_epsilon(delta=split.target_delta), abs=1e-6)


def test_large_orders_keep_small_epsilons_from_being_cut_off():
    split = calibrate_noise(
        target_epsilon=0.1, target_delta=1e-6, sample_rate=0.01, steps=100, accountant="rdp", probe="none"
    )
    opacus = RDPAccountant()
    opacus.history = [(split.sigma, 0.01, 100)]
    assert epsilon(split) <= 0.1 < opacus.get_epsilon(delta=1e-6)


def test_opacus_prv_brackets_pld():
    split = calibrate_noise(**CHEAP, allocation="constant", gamma=1.1)
    accountant = PRVAccountant()
    accountant.history = [(split.sigma_gradient, 0.1, 15), (effective(split), 0.1, 5)]
    distribution = accountant._get_dprv(eps_error=0.01, delta_error=1e-8)
    lower, _, upper = distribution.compute_epsilon(1e-5, 1e-8, 0.01)
    assert lower <= epsilon(split) <= upper
    assert upper - lower < 0.05


def test_gdp_is_the_papers_formula():
    split = calibrate_noise(**CHEAP, composition="independent", accountant="gdp", gamma=1.01, **PAPER)
    gradient = 0.1**2 * 20 * (math.exp((1.01 * split.sigma) ** -2) - 1)
    losses = 0.1**2 * 3 * 5 * (math.exp(split.sigma_loss**-2) - 1)
    mu = math.sqrt(gradient + losses)
    assert delta_eps_mu(eps=epsilon(split), mu=mu) == pytest.approx(1e-5, rel=1e-6)


def test_the_compositions_of_the_paper_are_what_they_say():
    split = calibrate_noise(**CHEAP, composition="epsilon_sum", accountant="rdp", gamma=1.05, **PAPER)
    gradient, losses = RDPAccountant(), RDPAccountant()
    gradient.history = [(1.05 * split.sigma, 0.1, 20)]
    losses.history = [(split.sigma_loss, 0.1, 3 * 5)]
    alphas = list(ORDERS)
    expected = gradient.get_epsilon(1e-5, alphas) + losses.get_epsilon(1e-5, alphas)
    assert epsilon(split) == pytest.approx(expected, abs=1e-9)


def test_equal_mechanisms_are_merged_to_the_noisier_count():
    smaller, larger = Mechanism(1.0), Mechanism(1.0 + 1e-13)
    assert merge([(larger, 2), (smaller, 3), (Mechanism(2.0), 0)]) == ((smaller, 5),)
    assert len(merge([(Mechanism(1.0), 2), (Mechanism(1.0 + 1e-9), 3), (Mechanism(1.0, 2.0, 1), 1)])) == 3


def test_without_subsampling_pld_is_the_analytic_gaussian_mechanism():
    split = calibrate_noise(target_epsilon=2, target_delta=1e-6, sample_rate=1.0, steps=9, probe="none")
    mu = 3 / split.sigma  # nine releases of multiplier sigma
    exact = norm.cdf(mu / 2 - 2 / mu) - math.exp(2) * norm.cdf(-mu / 2 - 2 / mu)
    assert 0.999e-6 < exact <= 1e-6


# ---- the sensitivities that the noise is scaled to ------------------------------------------------------------------


@given(losses=st.lists(st.floats(0, 1e6), min_size=3, max_size=3), thresholds=st.tuples(*[st.floats(1e-4, 1e4)] * 2))
def test_one_record_moves_a_probe_by_no_more_than_its_sensitivity(losses, thresholds):
    record, exact = torch.tensor(losses, dtype=torch.float64)[:, None], dict(expected_batch_size=1)
    for mechanism in ("gaussian", "laplace"):
        clipped = privatize_loss(record, thresholds[0], 0.0, mechanism=mechanism, **exact) / thresholds[0]
        assert all(0 <= loss <= 1 for loss in clipped)  # so three of them move by sqrt(3) in L2
        released = privatize_contrasts(record, thresholds, 0.0, mechanism=mechanism, **exact)
        empty = privatize_contrasts(record[:, :0], thresholds, 0.0, mechanism=mechanism, **exact)
        moved = np.array(
            [
                (released.difference - empty.difference) / thresholds[0],
                (released.bend - empty.bend) / thresholds[1],
                *np.subtract(released.fractions, empty.fractions),
            ]
        )
        if mechanism == "gaussian":
            assert moved @ moved <= SQUARED_L2_SENSITIVITY["contrasts"] * (1 + 1e-12)
        else:
            moved[:2] /= 2  # the noise is added to d/2R_d and c/2R_c
            coordinates, sensitivity = LAPLACE_SENSITIVITY["contrasts"]
            assert moved.size == coordinates and (np.abs(moved) <= sensitivity * (1 + 1e-12)).all()


# ---- the numbers of the paper's accounting, as an independent implementation found them ----------------------------


@pytest.mark.parametrize(("steps", "true_epsilon"), [(250, 4.02), (1000, 2.82)])
def test_independent_composition_by_rdp_misses_its_target_of_3(steps, true_epsilon):
    split = calibrate_noise(
        target_epsilon=3, **{**REFERENCE, "steps": steps}, accountant="rdp", composition="independent", **PAPER
    )
    assert split.epsilon <= 3 and not split.guarantee
    assert epsilon(split, accountant="pld", composition="same_batch") == pytest.approx(true_epsilon, abs=0.01)


def test_mu_gdp_misses_its_target_of_3():
    split = calibrate_noise(target_epsilon=3, **REFERENCE, accountant="gdp", composition="independent", **PAPER)
    assert epsilon(split, accountant="pld", composition="same_batch") == pytest.approx(5.50, abs=0.01)


# ---- Laplace noise -------------------------------------------------------------------------------------------------


def laplace_losses(scale, count, size, generator):
    """Sum of the privacy losses of ``count`` Laplace coordinates of sensitivity 1, drawn with the record present."""
    x = generator.laplace(scale=scale, size=(count, size))
    return ((np.abs(x - 1) - np.abs(x)) / scale).sum(axis=0)


def gaussian_hockey_stick(epsilon, sigma):
    return norm.cdf(0.5 / sigma - epsilon * sigma) - np.exp(epsilon) * norm.cdf(-0.5 / sigma - epsilon * sigma)


@pytest.mark.parametrize(("sigma", "scale", "count"), [(1.0, 2.0, 3), (2.0, 8.0, 4)])
def test_product_pld_against_the_exact_conditional_curve(sigma, scale, count):
    # Given the Laplace losses l, the pair is a Gaussian one at epsilon - l: only those losses are drawn at random.
    losses = laplace_losses(scale, count, 400_000, np.random.default_rng(0))
    q, mechanism = 0.1, Mechanism(sigma, scale, count)
    pld = privacy_loss_distribution(((mechanism, 1),), q)
    for eps in (0.0, 0.05, 0.2):
        remove = q * gaussian_hockey_stick(np.log1p(np.expm1(eps) / q) - losses, sigma)
        shrink = 1 - (1 - q) * math.exp(eps)
        add = shrink * gaussian_hockey_stick(eps + math.log(q / shrink) - losses, sigma) if shrink > 0 else np.zeros(1)
        exact = max(remove.mean(), add.mean())
        error = remove.std() / math.sqrt(losses.size)
        assert pld.get_delta_for_epsilon(eps) == pytest.approx(exact, abs=4 * error)


@pytest.mark.parametrize("sample_rate", [0.001, 0.1, 0.9])
def test_amplification_agrees_with_dp_accountings_own_where_that_has_one(sample_rate):
    for mechanism in (Mechanism(4.0), Mechanism(laplace=2.0, coordinates=1)):
        unsampled = privacy_loss_distribution(((mechanism, 1),), 1.0)
        amplified = amplify_by_sampling(unsampled, 30_000, sample_rate)  # losses end at 24,677 and 5,000 times 1e-4
        theirs = privacy_loss_distribution(((mechanism, 1),), sample_rate)
        for count in (1, 30):
            ours = amplified.self_compose(count).get_epsilon_for_delta(1e-5)
            reference = theirs.self_compose(count).get_epsilon_for_delta(1e-5)
            assert reference - 1e-9 <= ours <= reference + 1e-4
        for direction in ("_pmf_remove", "_pmf_add"):  # apart, for the public methods tell the larger of the two only
            ours, reference = getattr(amplified, direction), getattr(theirs, direction)
            for eps in (-0.1, 0.0, 0.001, 0.1):
                delta = reference.get_delta_for_epsilon(eps)
                assert delta - 1e-10 <= ours.get_delta_for_epsilon(eps) <= delta + 1e-6


@pytest.mark.parametrize("probe", ["losses", "contrasts"])
def test_laplace_pld_is_tighter_than_rdp(probe):
    split = calibrate_noise(**CHEAP, probe=probe, loss_mechanism="laplace", gamma=1.1)
    pld, rdp = epsilon(split), epsilon(split, accountant="rdp")
    assert 0.8 * rdp < pld < rdp
    assert pld > epsilon(vanilla(dataclasses.replace(split, sigma=split.sigma_gradient_probe)))


@together(("probe", "sensitivity"), [("losses", 3.0), ("contrasts", 2.0)])
def test_a_laplace_probe_costs_its_l1_sensitivity_without_sampling(probe, sensitivity):
    """Three losses in [0, 1], or four coordinates within +-1/2: pure epsilon is that sum over the noise scale."""
    release = (probe_mechanism(probe, 5.0, "laplace"), 1)
    pure = composed_epsilon((release,), sample_rate=1.0, delta=1e-12, accountant="pld")
    assert pure == pytest.approx(sensitivity / 5.0, abs=1e-3)


@together("sigma", [math.inf, 1.5])
def test_laplace_rdp_against_numerical_integration_in_both_directions(sigma):
    q, scale, orders = 0.2, 4.0, (2, 3, 8)
    x = np.linspace(-100, 101, 20_101) if math.isinf(sigma) else np.linspace(-25, 26, 1_021)
    log_with, log_without = laplace.logpdf(x, 1, scale), laplace.logpdf(x, 0, scale)
    if math.isfinite(sigma):  # the plane of one Gaussian and one Laplace coordinate
        x = np.linspace(-200, 201, 8_021)
        y = np.linspace(-18, 19, 371)
        log_with = laplace.logpdf(x, 1, scale) + norm.logpdf(y, 1, sigma)[:, None]
        log_without = laplace.logpdf(x, 0, scale) + norm.logpdf(y, 0, sigma)[:, None]
    log_mixture = np.logaddexp(math.log(1 - q) + log_without, math.log(q) + log_with)

    def divergence(log_p, log_q, order):
        density = np.exp(order * log_p - (order - 1) * log_q)
        inner = integrate.trapezoid(density, x, axis=-1)
        return math.log(inner if inner.ndim == 0 else integrate.trapezoid(inner, y)) / (order - 1)

    computed = _subsampled_rdp(Mechanism(sigma, scale, 1), q, orders)
    for order, rdp in zip(orders, computed, strict=True):
        assert rdp == pytest.approx(divergence(log_mixture, log_without, order), rel=1e-3)
        assert rdp > divergence(log_without, log_mixture, order)


def test_laplace_gdp_uses_the_chi_squared_divergence():
    scale, count, q = 3.0, 7, 0.1
    density = integrate.quad(lambda x: laplace.pdf(x, 1, scale) ** 2 / laplace.pdf(x, 0, scale), -90, 90, points=[0, 1])
    chi_squared = density[0] ** 3 - 1
    eps = composed_epsilon(
        ((Mechanism(laplace=scale, coordinates=3), count),), sample_rate=q, delta=1e-4, accountant="gdp"
    )
    assert delta_eps_mu(eps=eps, mu=math.sqrt(q**2 * count * chi_squared)) == pytest.approx(1e-4, rel=1e-6)


def test_with_laplace_noise_rdp_has_integer_orders_for_everything():
    loose = dict(CHEAP, target_epsilon=8, accountant="rdp")  # where the best order is fractional
    split, gaussian = calibrate_noise(**loose, loss_mechanism="laplace"), calibrate_noise(**loose)
    assert gaussian.sigma < split.sigma < 1.01 * gaussian.sigma
    infinite = _subsampled_rdp(Mechanism(1.0, 4.0, 3), 0.1, ORDERS)
    assert all(math.isinf(rdp) != float(order).is_integer() for order, rdp in zip(ORDERS, infinite, strict=True))
