"""The paper's accounting: against other people's accountants, the reference numbers of the design, and simulation."""

import math

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from opacus.accountants.analysis.gdp import eps_from_mu
from scipy import integrate
from scipy.stats import laplace, norm

from hyfreedp import calibrate_noise, epsilon
from hyfreedp.experiments.accounting_of_the_paper import (
    SOUND,
    Counting,
    Mechanism,
    calibrate,
    chi_squared,
    even_split,
    gdp_delta,
    gdp_epsilon,
    mu_gdp,
    rdp_of,
    vanilla_noise,
)
from hyfreedp.experiments.studies.noise_split import DataSet

CHEAP = dict(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, steps=20, interval=4)
REFERENCE = DataSet("reference", 50_000, 1000, 5)  # of the design


@pytest.mark.parametrize(
    "counting",
    [
        Counting("rdp", "independent"),
        Counting("gdp", "independent"),
        Counting("pld", "independent"),
        Counting("gdp", "same_batch"),
        Counting("rdp", "independent", "laplace"),
    ],
)
def test_every_way_of_counting_meets_its_target_and_not_much_less(counting):
    split = calibrate(**CHEAP, gamma=1.1, counting=counting)
    assert 1 - 1e-3 < counting.epsilon(split) <= 1 + 1e-9
    assert split.sigma_gradient == pytest.approx(1.1 * split.sigma) and not split.guarantee
    assert counting.sound == (counting.composition == "same_batch" and counting.accountant != "gdp")


def test_the_sound_way_is_the_cores():
    ours = calibrate_noise(**CHEAP, probe="losses", allocation="constant", gamma=1.1)
    theirs = calibrate(**CHEAP, gamma=1.1, counting=SOUND)
    assert theirs.sigma == pytest.approx(ours.sigma, rel=1e-6)
    assert theirs.sigma_loss == pytest.approx(ours.sigma_loss, rel=1e-4)
    assert SOUND.epsilon(ours) == epsilon(ours)


@pytest.mark.parametrize(
    ("counting", "interval", "target", "true_epsilon"),
    [
        (Counting("rdp", "independent"), 5, 3.0, 4.02),
        (Counting("rdp", "independent"), 1, 3.0, 3.15),
        (Counting("rdp", "independent"), 5, 8.0, 15.02),
        (Counting("gdp", "independent"), 5, 3.0, 5.50),
        (Counting("gdp", "same_batch"), 5, 3.0, 4.39),
    ],
)
def test_what_the_papers_pairs_really_cost(counting, interval, target, true_epsilon):
    """As an independent implementation found it: Algorithm 1, whose gradient and losses share a batch, misses 3."""
    split = calibrate(**REFERENCE.budget(target), interval=interval, counting=counting)
    assert epsilon(split) == pytest.approx(true_epsilon, abs=0.01)


def test_independent_pld_is_dp_accountings():
    counting = Counting("pld", "independent")
    split = calibrate(**CHEAP, gamma=1.1, counting=counting)
    releases = ((GaussianDpEvent(split.sigma_gradient), 20), (GaussianDpEvent(split.sigma_loss), 3 * 5))
    events = [SelfComposedDpEvent(PoissonSampledDpEvent(0.1, one), count) for one, count in releases]
    reference = PLDAccountant().compose(ComposedDpEvent(events)).get_epsilon(1e-5)
    assert counting.epsilon(split) == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize("sigma", [math.inf, 1.5])
def test_laplace_rdp_is_the_larger_of_both_directions_integrated(sigma):
    q, scale, orders = 0.2, 4.0, (2, 3, 8)
    x = np.linspace(-100, 101, 20_101)
    log_with, log_without = laplace.logpdf(x, 1, scale), laplace.logpdf(x, 0, scale)
    if math.isfinite(sigma):  # the plane of one Gaussian and one Laplace number
        x = np.linspace(-200, 201, 8_021)
        y = np.linspace(-18, 19, 371)
        log_with = laplace.logpdf(x, 1, scale) + norm.logpdf(y, 1, sigma)[:, None]
        log_without = laplace.logpdf(x, 0, scale) + norm.logpdf(y, 0, sigma)[:, None]
    log_mixture = np.logaddexp(math.log(1 - q) + log_without, math.log(q) + log_with)

    def divergence(log_p, log_q, order):
        inner = integrate.trapezoid(np.exp(order * log_p - (order - 1) * log_q), x, axis=-1)
        return math.log(inner if inner.ndim == 0 else integrate.trapezoid(inner, y)) / (order - 1)

    for order, rdp in zip(orders, rdp_of(Mechanism(sigma, scale, 1), q, orders), strict=True):
        assert rdp == pytest.approx(divergence(log_mixture, log_without, order), rel=1e-3)
        assert rdp > divergence(log_without, log_mixture, order)


@pytest.mark.parametrize("interval", [1, 5])
def test_mu_gdp_as_printed_is_the_accountant_and_opacuss(interval):
    counting = Counting("gdp", "independent")
    split = calibrate(**CHEAP | {"interval": interval}, counting=counting)
    schedule = {"sample_rate": 0.1, "steps": 20}
    mu = mu_gdp(**schedule, sigma=split.sigma_gradient, probe_steps=split.probe_steps, sigma_loss=split.sigma_loss)
    assert gdp_epsilon(mu, 1e-5) == pytest.approx(counting.epsilon(split), rel=1e-9)
    assert eps_from_mu(mu=mu, delta=1e-5) == pytest.approx(counting.epsilon(split), rel=1e-6)
    assert mu == pytest.approx(mu_gdp(**schedule, sigma=split.sigma), rel=1e-6)  # the same budget, Eq. (sigmas)


@pytest.mark.parametrize(("mu", "eps"), [(0.5, 0.0), (0.7, 1.3), (2.0, 3.0)])
def test_gdp_delta_is_the_hockey_stick_of_two_normals(mu, eps):
    crossing = eps / mu + mu / 2
    expected, _ = integrate.quad(lambda x: norm.pdf(x - mu) - math.exp(eps) * norm.pdf(x), crossing, 30, epsabs=1e-14)
    assert gdp_delta(mu, eps) == pytest.approx(expected, rel=1e-8)
    assert gdp_epsilon(mu, float(gdp_delta(mu, eps))) == pytest.approx(eps, abs=1e-7)
    assert gdp_epsilon(0.1, 0.5) == 0


def test_chi_squared_of_laplace_noise_is_its_integral():
    scale = 3.0
    density = integrate.quad(lambda x: laplace.pdf(x, 1, scale) ** 2 / laplace.pdf(x, 0, scale), -90, 90, points=[0, 1])
    assert chi_squared(Mechanism(laplace=scale, numbers=3)) == pytest.approx(density[0] ** 3 - 1)
    assert chi_squared(Mechanism(2.0)) == pytest.approx(math.expm1(1 / 4))


@pytest.mark.parametrize(("accountant", "interval"), [("rdp", 1), ("rdp", 4), ("gdp", 4)])
def test_the_even_split_counted_as_independent_is_dp_sgd_with_all_accesses_as_steps(accountant, interval):
    counting, budget = Counting(accountant, "independent"), CHEAP | {"interval": interval}
    even = even_split(**budget, counting=counting)
    twin = vanilla_noise(**budget | {"steps": 20 + 3 * 20 // interval}, counting=counting)
    assert even.sigma_loss == even.sigma_gradient == even.sigma_gradient_probe
    assert even.sigma_gradient == pytest.approx(twin.sigma, rel=2e-5)
    assert 1 - 1e-4 < counting.epsilon(even) <= 1


def test_the_even_split_on_one_batch_needs_twice_the_noise_at_every_step():
    # sigma_eff = (x^-2 + 3 x^-2)^(-1/2) = x/2 at every step has to be vanilla's sigma.
    even = even_split(**CHEAP | {"interval": 1})
    assert even.sigma_gradient == pytest.approx(2 * even.sigma, rel=1e-3)
    assert even.gamma == pytest.approx(2, rel=1e-3) and epsilon(even) <= 1  # on the fine grid too
