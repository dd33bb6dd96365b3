"""Tables behind the notebook of the noise split: closed forms, slow twins and the reference numbers of the design."""

import math

import numpy as np
import pandas as pd
import pytest
from cases import together
from scipy.integrate import quad
from scipy.stats import norm

from hyfreedp import calibrate_noise
from hyfreedp.accounting import epsilon
from hyfreedp.experiments.runs.methods import METHODS
from hyfreedp.experiments.studies import noise_split
from hyfreedp.experiments.studies.noise_split import DATA_SETS, PAPER_SPLIT, DataSet, settings

pytestmark = pytest.mark.filterwarnings("ignore::hyfreedp.accounting.UnsoundAccountingWarning")

CHEAP = dict(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, steps=20)
REFERENCE = DataSet("reference", 50_000, 1000, 5)


def test_the_reference_data_set_is_that_of_the_design():
    budget = DATA_SETS[0].budget(3.0)
    assert budget == REFERENCE.budget(3.0)
    assert (budget["steps"], budget["sample_rate"]) == (250, 0.02)
    assert budget["target_delta"] == pytest.approx(6.78e-6, rel=1e-3)
    assert DataSet("tiny", 10, 10, 0.01).budget(1.0)["steps"] == 1


@together("name", ["robust", "line_search", "paper"])
def test_a_presets_split_is_the_engines(name):
    engines = METHODS[name].settings.split(1.0, 1e-5, 0.1, 25)
    ours = calibrate_noise(
        **CHEAP | {"steps": 25}, **noise_split.preset_split(name, 25), accountant="pld", composition="same_batch"
    )
    assert ours == engines


@together(("accountant", "interval"), [("rdp", 1), ("rdp", 4), ("gdp", 4)])
def test_the_even_split_counted_as_independent_is_dp_sgd_with_all_accesses_as_steps(accountant, interval):
    even = noise_split.even_split(**CHEAP, interval=interval, accountant=accountant, composition="independent")
    accesses = 20 + 3 * 20 // interval
    twin = calibrate_noise(**CHEAP | {"steps": accesses}, probe="none", accountant=accountant)
    assert even.sigma_loss == even.sigma_gradient == even.sigma_gradient_probe
    assert even.sigma_gradient == pytest.approx(twin.sigma, rel=2e-5)
    assert 1 - 1e-4 < even.epsilon <= 1
    assert even.probe_steps == 20 // interval


def test_the_even_split_on_one_batch_needs_twice_the_noise_at_every_step():
    # sigma_eff = (x^-2 + 3 x^-2)^(-1/2) = x/2 at every step has to be vanilla's sigma.
    even = noise_split.even_split(**CHEAP, interval=1)
    assert even.sigma_gradient == pytest.approx(2 * even.sigma, rel=1e-3)
    assert even.gamma == pytest.approx(2, rel=1e-3)
    assert even.guarantee and not even.reason
    assert epsilon(even) <= 1  # on the fine grid too


@together("interval", [1, 5])
def test_mu_gdp_of_the_paper_is_the_accountant_gdp(interval):
    split = calibrate_noise(**CHEAP, **PAPER_SPLIT, interval=interval, accountant="gdp", composition="independent")
    mu = noise_split.mu_gdp(
        sample_rate=0.1,
        steps=20,
        sigma=split.sigma_gradient,
        probe_steps=split.probe_steps,
        sigma_loss=split.sigma_loss,
    )
    assert noise_split.gdp_epsilon(mu, 1e-5) == pytest.approx(split.epsilon, rel=1e-9)
    vanilla = noise_split.mu_gdp(sample_rate=0.1, steps=20, sigma=split.sigma)
    assert mu == pytest.approx(vanilla, rel=1e-6)  # the same budget, Eq. (sigmas)


@together(("mu", "eps"), [(0.5, 0.0), (0.7, 1.3), (2.0, 3.0)])
def test_gdp_delta_is_the_hockey_stick_of_two_normals(mu, eps):
    crossing = eps / mu + mu / 2
    expected, _ = quad(lambda x: norm.pdf(x - mu) - math.exp(eps) * norm.pdf(x), crossing, 30, epsabs=1e-14)
    assert noise_split.gdp_delta(mu, eps) == pytest.approx(expected, rel=1e-8)
    assert noise_split.gdp_epsilon(mu, float(noise_split.gdp_delta(mu, eps))) == pytest.approx(eps, abs=1e-7)


def test_gdp_epsilon_is_zero_where_delta_is_generous():
    assert noise_split.gdp_epsilon(0.1, 0.5) == 0


def test_the_delta_curve_passes_through_the_budget():
    split = calibrate_noise(**CHEAP, **PAPER_SPLIT, gamma=1.05)
    (at_target, beyond) = noise_split.delta_curve(split, "same_batch", [1.0, 1.2])
    assert at_target == pytest.approx(1e-5, rel=0.01)
    assert beyond < at_target
    assert noise_split.delta_curve(split, "independent", [1.0])[0] < at_target
    with pytest.raises(ValueError, match="'epsilon_sum'"):
        noise_split.delta_curve(split, "epsilon_sum", [1.0])


def test_the_simulated_mechanism_lands_on_the_curve_of_one_batch_not_of_independent_ones():
    split = calibrate_noise(
        **CHEAP | {"target_epsilon": 4.0}, **PAPER_SPLIT, accountant="rdp", composition="independent"
    )
    points = [0.5, 1.5]
    table = noise_split.simulated_deltas(split=split.to_dict(), epsilons=points, runs=100_000, seeds=2)
    assert (table.epsilon == points).all()
    same_batch = np.array(noise_split.delta_curve(split, "same_batch", points))
    independent = np.array(noise_split.delta_curve(split, "independent", points))
    assert (table.error < 0.05 * table.delta).all()
    assert (np.abs(table.delta - same_batch) < 4 * table.error).all()  # false alarm: 1.3e-4
    assert (table.delta - independent > 5 * table.error).all()


def test_the_simulation_refuses_what_it_does_not_simulate():
    split = calibrate_noise(**CHEAP, accountant="rdp")
    with pytest.raises(ValueError, match="'contrasts'"):
        noise_split.simulated_deltas(split=split.to_dict(), epsilons=[1.0], runs=10, seeds=1)


def test_settings_are_all_combinations():
    rows = settings("s", interval=[1, 2], accountant=["rdp", "gdp"], gamma=1.01)
    assert len(rows) == 4
    assert all(row["section"] == "s" and row["gamma"] == 1.01 for row in rows)
    assert {(row["interval"], row["accountant"]) for row in rows} == {(1, "rdp"), (1, "gdp"), (2, "rdp"), (2, "gdp")}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A small version of the notebook's table."""
    shared = dict(**CHEAP, **PAPER_SPLIT, accountant="rdp", measured=True)
    rows = [
        *settings("gamma", **shared, gamma=[1.005, 1.02, 1.08], interval=4),
        *settings("interval", **shared, gamma=1.02, interval=[1, 2, 4, 10]),
        *settings("laplace", **shared, gamma=1.02, interval=4, loss_mechanism="laplace"),
        *settings("plain", **CHEAP, accountant="rdp", probe="none", measured=True),
        *settings("even", even=True, **CHEAP, accountant="rdp", interval=4),
    ]
    folder = tmp_path_factory.mktemp("cells")
    first = noise_split.calibrations(rows, folder)
    pd.testing.assert_frame_equal(first, noise_split.calibrations(rows, folder))
    assert len(list(folder.iterdir())) == len(rows) - 1  # gamma 1.02 at K = 4 occurs twice and was computed once
    return first


def test_more_gradient_noise_buys_less_loss_noise_and_a_larger_share(table):
    rows = table[table.section == "gamma"].sort_values("gamma")
    assert (rows.sigma == rows.sigma.iloc[0]).all()
    assert rows.sigma_loss.is_monotonic_decreasing
    assert rows.probe_share.is_monotonic_increasing
    assert rows.probe_share.between(0, 1).all()
    assert rows.probes_epsilon.is_monotonic_increasing


def test_loss_noise_falls_with_the_interval_and_at_every_step_meets_the_closed_form(table):
    rows = table[table.section == "interval"].sort_values("interval")
    assert rows.sigma_loss.is_monotonic_decreasing
    every_step = rows.iloc[0]
    closed_form = math.sqrt(3) * 1.02 * every_step.sigma / math.sqrt(1.02**2 - 1)
    assert every_step.sigma_loss == pytest.approx(closed_form, rel=1e-9)


def test_parts_of_a_budget(table):
    table = table[table.section != "even"]
    assert (table.gradients_epsilon <= table.epsilon).all()
    assert (table.gradients_epsilon + table.probes_epsilon >= table.epsilon * (1 - 1e-9)).all()
    assert (table.true_epsilon <= table.epsilon).all()  # RDP on the same batch is a bound, and PLD is tighter
    plain = table[table.section == "plain"].iloc[0]
    assert plain.probe_share == pytest.approx(0, abs=1e-12)
    assert plain.probes_epsilon == 0


def test_the_standard_deviation_of_laplace_noise_is_not_its_scale(table):
    row = table[table.section == "laplace"].iloc[0]
    assert row.loss_std == pytest.approx(math.sqrt(2) * row.sigma_loss)
    gaussian = table[(table.section == "interval") & (table.interval == 4)].iloc[0]
    assert gaussian.loss_std == gaussian.sigma_loss


def test_a_row_of_the_table_is_the_split_again(table):
    for row, made in (
        (
            table[(table.section == "gamma") & (table.gamma == 1.02)].iloc[0],
            calibrate_noise(**CHEAP, **PAPER_SPLIT, accountant="rdp", gamma=1.02, interval=4),
        ),
        (table[table.section == "even"].iloc[0], noise_split.even_split(**CHEAP, accountant="rdp", interval=4)),
    ):
        assert noise_split.split_of(row) == made


@together(
    ("accountant", "composition", "interval", "target", "true_epsilon"),
    [
        ("gdp", "same_batch", 5, 3.0, 4.39),
        ("gdp", "same_batch", 5, 8.0, 10.48),
        ("gdp", "independent", 5, 3.0, 5.50),
        ("rdp", "independent", 1, 3.0, 3.15),
        ("rdp", "independent", 5, 8.0, 15.02),
        ("rdp", "independent", 20, 3.0, 5.99),
    ],
)
def test_true_costs_of_calibrated_pairs(accountant, composition, interval, target, true_epsilon):
    budget = REFERENCE.budget(target)
    split = calibrate_noise(
        **budget, **PAPER_SPLIT, gamma=1.01, interval=interval, accountant=accountant, composition=composition
    )
    assert noise_split.true_epsilon(split) == pytest.approx(true_epsilon, abs=0.01)
