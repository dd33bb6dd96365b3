"""Figures of notebooks 01 to 05: what is drawn is what the tables or the closed forms say, and axes have units."""

import math
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from artists import bars, line
from cases import together
from scipy import stats

from hyfreedp import calibrate_noise
from hyfreedp.experiments.runs.cells import Spec
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.studies import (
    band_figures,
    bias_variance,
    bias_variance_figures,
    clouds,
    clouds_figures,
    dynamics,
    dynamics_figures,
    landscape_figures,
    noise_magnitudes,
    noise_split,
    noise_split_figures,
    noise_split_rows,
    repeated_probes,
    short_sighted,
    short_sighted_figures,
    true_cost_figures,
)

pytestmark = pytest.mark.usefixtures("figure_style")


def labels(figure):
    """Of the axes that have them."""
    return [text for axis in figure.axes for text in (axis.get_xlabel(), axis.get_ylabel()) if text]


# -- what all figures share --------------------------------------------------------------------------------------------


def test_what_is_to_be_seen_is_a_list_of_sentences(monkeypatch):
    shown = []
    monkeypatch.setattr(plots, "display", shown.append)
    plots.what_to_see(["one", "two."], "means")
    plots.what_to_see(["three"])
    assert [one.data for one in shown] == [
        "**What to see** (means).\n\n* one.\n* two.",
        "**What to see.**\n\n* three.",
    ]


def test_a_shared_legend_has_each_label_once():
    figure, axes = plt.subplots(1, 2)
    for axis in axes:
        axis.plot([0, 1], label="both")
    axes[1].plot([1, 0], label="second")
    plots.shared_legend(figure, axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["both", "second"]


def test_log_ticks_are_these_numbers_and_no_others():
    figure, axis = plt.subplots()
    axis.set_xscale("log")
    axis.plot([0.5, 20], [1, 1])
    plots.log_ticks(axis.xaxis, [0.5, 1, 20])
    figure.canvas.draw()
    assert [text.get_text() for text in axis.get_xticklabels()] == ["0.5", "1", "20"]
    assert not len(axis.get_xticks(minor=True))


def test_a_shaded_table_keeps_its_texts_and_takes_the_colours_of_its_differences():
    texts = pd.DataFrame({"a": ["x", "y"]})
    html = plots.shaded(texts, pd.DataFrame({"a": [-10.0, math.nan]})).to_html()
    assert "x</td>" in html and html.count("background-color") == 1


# -- 01: bias and noise ------------------------------------------------------------------------------------------------


def test_blocks_of_a_long_table_are_shown_one_by_one_and_folded_after_the_first(monkeypatch):
    shown = []
    monkeypatch.setattr(plots, "display", shown.append)
    rows = pd.MultiIndex.from_product([["1", "<8>"], ["grid", "ours"]], names=["epsilon", "method"])
    texts = pd.DataFrame({"digits": ["90.1", "80.2", "70.3", "60.4"]}, index=rows)
    plots.show_blocks(texts, pd.DataFrame({"digits": [0.0, 10.0, -10.0, 0.0]}, index=rows))
    first, folded = shown[0].to_html(), shown[1].data
    assert "90.1" in first and "80.2" in first and "70.3" not in first
    assert folded.startswith("<details><summary>epsilon = &lt;8&gt;</summary>") and folded.endswith("</details>")
    assert "70.3" in folded and "60.4" in folded and "90.1" not in folded and len(shown) == 2


def test_the_truncated_normal_is_its_formula():
    axis = bias_variance_figures.draw_normal_bias().axes[0]
    alpha, bias = axis.lines[0].get_data()
    assert bias == pytest.approx(stats.norm.pdf(alpha) - alpha * stats.norm.sf(alpha))
    assert [text.get_text() for text in axis.texts] == ["1.083", "0.399", "0.083", "0.008"]
    assert "0.3989 = 1/sqrt(2 pi) at alpha = 0" in bias_variance_figures.normal_bias_findings()[0]


def test_simulations_stand_on_the_closed_forms_with_two_standard_errors():
    dots = pd.DataFrame({"alpha": [-1.0, 1.0], "bias": [1.1, 0.1], "error": [0.01, 0.02], "spread": [0.1, 0.2]})
    losses = np.array([0.5, 1.0, 3.0])
    curves, releases = bias_variance.one_batch(losses, noise_multiplier=2.0, runs=50, seed=0)
    figure = bias_variance_figures.draw_theorem(dots, curves, releases, batches=7, batch_size=50, real_size=3, runs=50)
    left, right = figure.axes
    x, y, low, high = bars(left, "mean of batches")
    assert (x, y) == (pytest.approx(dots.alpha), pytest.approx(dots.bias))
    assert high[:, 1] - low[:, 1] == pytest.approx(4 * dots.error)
    threshold, noise = line(right, "noise (sd): Theorem 1")
    assert noise == pytest.approx(2.0 * threshold / 3)
    assert bars(right, "clipping bias: simulated")[1] == pytest.approx(releases.bias)
    assert all("nats" in text for text in (right.get_xlabel(), right.get_ylabel()))
    (first, _) = bias_variance_figures.theorem_findings(dots, releases, losses, 2.0)
    exact = stats.norm.pdf(1) + np.array([1, -1]) * stats.norm.cdf([1, -1])
    assert f"within {np.max(np.abs(dots.bias - exact) / dots.error):.1f} standard errors" in first


def test_the_trade_off_has_its_least_error_at_the_star():
    found = bias_variance.trade_offs([50, 500], mean=2.0, std=0.4, noise_multiplier=20.0, batches=20)
    figure = bias_variance_figures.draw_trade_offs(found, 2.0)
    for axis, (size, trade) in zip(figure.axes, found.items(), strict=True):
        threshold, total = line(axis, "total (root sum of squares)")
        bias, noise = (line(axis, name)[1] for name in ("clipping bias", "noise (sd)"))
        assert total == pytest.approx(np.hypot(bias, noise)) and noise == pytest.approx(20 * threshold / size)
        (best,), (least,) = line(axis, "least error")
        assert best == trade.best and least <= total.min() * 1.001
        assert line(axis, "the paper's $R_l = L$")[0].tolist() == [2, 2]
        assert line(axis, "sum of three losses")[0].tolist() == [6, 6]
        assert axis.get_xlabel() == "threshold $R_l$ (nats)"
    (text, _) = bias_variance_figures.trade_off_findings(found, 2.0)
    assert text.startswith("B = 50: least error") and f"R_l = {found[50].best:.2f}" in text


def probed(scale=1.0, step=3):
    """One run whose losses are exponential quantiles, on a parabola with b = 0.5 and a = 1 along the update."""
    here = scale * -np.log1p(-(np.arange(2000) + 0.5) / 2000)
    losses = {"ahead": here, "here": here + 0.0, "behind": here + 1.0}  # h = 1: b = (behind - ahead) / 2, a = 1
    return pd.DataFrame({"step": step, "distance": 1.0, "part": "batch"} | losses)


def test_real_losses_are_compared_with_a_normal_of_their_moments():
    runs = [probed(), probed(2.0)]
    moments = bias_variance.loss_moments(runs, [3]).loc[3]
    # Of Exp(1): skewness 2, and clipping at the mean takes 1/e of it.
    assert (moments["mean"], moments.skewness) == pytest.approx((1.5, 2.0), rel=0.05)
    assert moments.bias_at_L == pytest.approx(math.exp(-1), rel=0.01)
    assert moments.normal_bias_at_L == pytest.approx(1 / math.sqrt(2 * math.pi), rel=0.01)
    top, bottom = bias_variance_figures.draw_losses(runs, [3]).axes
    ratio, bias = line(bottom, "actual")
    assert bias[ratio < 4] == pytest.approx(np.exp(-ratio[ratio < 4]), rel=0.05)
    x, density = line(top, "normal, same mean and sd")
    batch = clouds.losses_of(runs[0], 3, "batch")[1]
    assert density == pytest.approx(stats.norm.pdf(x, batch.mean(), batch.std()))
    assert top.get_xlabel() == "loss of a sample (nats)" and top.get_ylabel() == "density (1/nat)"
    assert "36.8% of the mean loss" in bias_variance_figures.loss_findings(moments.to_frame().T, 2)[0]


def split(**changes):
    """A split in ten steps, cheap to find and cheap to account."""
    plan = {"target_delta": 1e-3, "sample_rate": 0.1, "steps": 10, "accountant": "rdp", "interval": 2}
    return replace(calibrate_noise(target_epsilon=3.0, probe="losses", allocation="constant", **plan), **changes)


def test_noise_of_both_mechanisms_is_their_density():
    splits = {"gaussian": split(sigma_loss=10.0), "laplace": split(sigma_loss=12.0, loss_mechanism="laplace")}
    setting = {"mean": 2.0, "std": 0.4, "batch_size": 50}
    left, right = bias_variance_figures.draw_mechanisms(splits, **setting).axes
    x, density = line(left, f"laplace, sd {12 / 50 * math.sqrt(2):.3f}")
    assert density == pytest.approx(np.exp(-np.abs(x) / 0.24) / 0.48)
    x, density = line(left, "gaussian, sd 0.200")
    assert density == pytest.approx(stats.norm.pdf(x, scale=0.2))
    (label,) = (one.get_label() for one in right.lines if one.get_label().startswith("gaussian"))
    threshold, error = line(right, label)
    assert error[-1] == pytest.approx(0.2 * threshold[-1], rel=1e-3)  # far above the losses there is only noise
    assert label == f"gaussian: least {error.min():.3f} nats"
    (text,) = bias_variance_figures.mechanism_findings(splits, **setting)
    assert f"{2 * 1.44 - 1:+.0%} variance (sigma_l = 12.0 against 10.0)" in text


def test_the_table_of_magnitudes_is_told_in_units_of_the_clips():
    table = pd.DataFrame(
        {"model": "m", "quantity": ["loss", "gradient"], "dimension": [1, 4000], "exact": [0.01, 2.0], "simulated": 0.1}
    )
    *_, last = noise_magnitudes.magnitude_findings(table)
    assert last.startswith("Gradient noise is 200 to 200 times the loss noise")
    assert "agree to 900.00%" in noise_magnitudes.magnitude_text(table)  # 0.1 for 0.01
    aspects = noise_magnitudes.aspects(table, np.array([0.0, 4.0]), 7).set_index("aspect")
    assert aspects.gradient["dimension"] == "4,000" and aspects.loss["noise, in units of the clip"] == "0.01"
    assert aspects.loss["key to convergence"] == "clipping bias: 50% of the loss at R_l = L (step 7, first seed)"


# -- 02: parabolas -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    table = probed().assign(
        behind=lambda t: t.here * 1.5 + 0.75, ahead=lambda t: t.here * 0.5 + 0.25
    )  # b = 0.75, a = 1
    setting = {"sigmas": {"losses": 5.0, "contrasts": 5.0}, "expected_batch_size": 2000, "multiples": [0.25, 1.0, 2.0]}
    return repeated_probes.repeated_probes(tmp_path_factory.mktemp("cells"), [table], 3, runs=5, **setting)[0]


def test_parabolas_are_those_of_the_fits_and_the_exact_one_that_of_the_losses(cloud):
    errors = repeated_probes.errors_of(cloud, [0.25, 1.0], noise_multiplier=5.0, expected_batch_size=2000)
    assert errors.noise.to_numpy() == pytest.approx(5 * np.array([0.25, 1.0]) * cloud.usual[0] / 2000)
    exact = (cloud.exact.slope, cloud.exact.curvature)
    assert exact == pytest.approx((0.75, 1.0), rel=1e-3)
    right = repeated_probes.right_multiples(cloud, 3 * cloud.usual[0])
    choices = repeated_probes.threshold_choices(right, [0.25, 1.0, 2.0])
    assert right == {"losses": pytest.approx(3.0), "contrasts": 1.0}
    assert choices["losses"] == {"too small": 1.0, "right": 2.0, "too large": 2.0}  # the nearest there are
    figure = clouds_figures.draw_parabolas(cloud, choices, right)
    axis, spread = figure.axes[1], figure.axes[3]
    u, curve = axis.lines[0].get_data()
    assert curve == pytest.approx(-exact[0] * u + exact[1] * u**2 / 2)
    fits = cloud.fits[(cloud.fits.probe == "losses") & (cloud.fits.multiple == 2.0)]
    drawn = axis.collections[0].get_segments()
    assert len(drawn) == len(fits) == 5
    for segment, fit in zip(drawn, fits.itertuples(), strict=True):
        assert segment[:, 1] == pytest.approx(-fit.slope * u + fit.curvature * u**2 / 2)
    x, median = line(spread, "median")
    rows = cloud.spread[cloud.spread.probe == "losses"]
    assert (x, median) == (pytest.approx(rows.multiple), pytest.approx(rows.q50))
    assert line(spread, "exact")[1] == pytest.approx([cloud.exact.minimizer] * 2)
    assert line(spread, "right")[0] == pytest.approx([3, 3])
    assert axis.get_title() == f"right: $R_l$ = {2 * cloud.usual[0]:.2g}" and axis.get_xlabel().endswith("(h)")


def test_the_table_of_spreads_is_the_mean_over_runs_in_units_of_h(cloud):
    wider = replace(cloud, distance=2.0, spread=cloud.spread.assign(near=0.0))
    table = repeated_probes.spread_table([cloud, wider], {"contrasts": {"right": 1.0}}, [0.25, 1.0, 2.0])
    row = cloud.spread[(cloud.spread.probe == "contrasts") & (cloud.spread.multiple == 1.0)].iloc[0]
    assert table.q50.item() == pytest.approx(row.q50 * (1 + 0.5) / 2)
    assert (table.near.item(), table.near_low.item()) == (pytest.approx(row.near / 2), 0.0)
    (text,) = clouds_figures.spread_findings(table, 2)
    assert text.startswith(f"contrasts, right (1 times): {row.near / 2:.0%}") and "over 2 seeds" in text


@together(("total", "outcome"), [(0.4, "not at this scale"), (0.6, "reproduced")])
def test_the_papers_thresholds_are_judged_by_the_rates_they_give(total, outcome):
    names = ["R_l = L", "sum of three losses", "right", "right"]
    probes = ["losses", "losses", "losses", "contrasts"]
    (judged,) = clouds_figures.verdicts(
        pd.DataFrame({"probe": probes, "threshold": names, "near": [0.1, total, 0.7, 0.9]})
    )
    assert judged.outcome == outcome
    assert (
        judged.number
        == f"within a factor of two in 10% of the probes at R_l = L, {total:.0%} at the sum, 70% at the best threshold"
    )


def test_rates_of_clipping_alone_are_told_relative_to_the_exact_one():
    rates = pd.DataFrame(
        {"step": 3, "exact": [2.0, 4.0], "mean_loss": [1.0, 4.0], "sum_of_losses": 2.0, "contrasts": [2.0, 2.0]}
    )
    (text,) = clouds_figures.rate_findings(rates, [3], 2)
    assert "contrasts give 0.50 to 1.00 times" in text and "0.50 to 1.00 times at their sum" in text


# -- 03: the noise split -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    data = noise_split.DataSet("small", 1000, 100, 1)
    grid = noise_split_rows.grid_of("smoke", 0.5, 2) | {"targets": [0.5], "runs": 200}
    rows = noise_split_rows.rows_of("smoke", data, grid, epsilon=0.5, interval=2, gamma=1.01)
    rows = [row for row in rows if row["section"] != "data"]
    return noise_split.calibrations(rows, tmp_path_factory.mktemp("cells")), grid


def test_sections_are_asked_for_as_the_notebook_says():
    data = noise_split.DataSet("small", 1000, 100, 1)
    grid = noise_split_rows.grid_of("laptop", 2.0, 5)
    assert grid["targets"] == [1.0, 2.0, 3.0, 8.0]
    rows = pd.DataFrame(noise_split_rows.rows_of("laptop", data, grid, epsilon=2.0, interval=5, gamma=1.01))
    intervals = rows[(rows.section == "interval") & (rows.loss_mechanism == "laplace") & (rows.accountant == "pld")]
    assert sorted(intervals.interval) == [1, 5, 20]
    assert (rows[rows.section == "epsilon"].interval == 5).all()
    assert rows[rows.section == "data"].groupby("preset").size().to_dict() == {"line_search": 18, "paper": 18}


@pytest.mark.whole
def test_noises_are_those_of_the_calibrations(calibrated):
    table, grid = calibrated
    rows = table[table.section == "interval"]
    figure = noise_split_figures.draw_noises(rows, "interval", "probing interval $K$ (steps)", [2])
    for column, (accountant, composition, _) in enumerate(noise_split_figures.COLUMNS):
        here = rows[(rows.accountant == accountant) & (rows.composition == composition)]
        even, gaussian = here[here.even].iloc[0], here[~here.even & (here.loss_mechanism == "gaussian")].iloc[0]
        above, below = figure.axes[column], figure.axes[3 + column]
        assert above.lines[1].get_ydata()[0] == gaussian.sigma_gradient == pytest.approx(1.01 * gaussian.sigma)
        assert below.lines[0].get_ydata()[0] == gaussian.sigma_loss
        assert above.lines[-1].get_ydata()[0] == below.lines[-1].get_ydata()[0] == even.sigma_gradient
    assert figure.axes[3].get_xlabel() == "probing interval $K$ (steps)"
    *told, laplace = noise_split_figures.interval_findings(rows, grid, 0.5)
    assert len(told) == 3 and all("grows by 1.0 % at every K" in text for text in told)
    assert "more variance than Gaussian" in laplace
    of_epsilon = table[table.section == "epsilon"]
    pld = of_epsilon[(of_epsilon.accountant == "pld") & (of_epsilon.loss_mechanism == "gaussian") & ~of_epsilon.even]
    ratio = (pld.sigma_loss / pld.sigma_gradient).item()
    assert f"{ratio:.2f} at epsilon 0.5" in noise_split_figures.epsilon_findings(of_epsilon, grid, 2)[-1]


@pytest.mark.whole
def test_true_costs_are_drawn_over_their_targets(calibrated):
    table, grid = calibrated
    rows = table[table.section == "true cost"]
    pair = true_cost_figures.papers_pair(rows, 0.5)
    assert (pair.accountant, pair.composition, pair.target_epsilon) == ("rdp", "independent", 0.5)
    simulated = pd.DataFrame({"epsilon": [0.1, 0.4], "delta": [0.02, 0.01], "error": [0.001, 0.002]})
    figure = true_cost_figures.draw_true_costs(rows, [0.5], pair, simulated)
    costs, curves = figure.axes
    names = [text.get_text() for text in costs.get_yticklabels()]
    ratio, height = line(costs, r"target $\varepsilon$ = 0.5")
    cost = rows[rows.probe == "losses"].set_index(["accountant", "composition"]).true_epsilon
    place = names.index("epsilon sum, RDP")
    assert ratio[height == place] == pytest.approx(cost["rdp", "epsilon_sum"] / 0.5)
    epsilons, deltas = line(curves, "as run: one batch per step")
    assert deltas == pytest.approx(noise_split.delta_curve(pair, "same_batch", epsilons))
    _, y, low, high = bars(curves, "simulated runs (2 standard errors)")
    assert y == pytest.approx(simulated.delta) and high[:, 1] - low[:, 1] == pytest.approx(4 * simulated.error)
    told = true_cost_figures.true_cost_findings(table, grid, pair, simulated)
    assert f"really costs {cost['rdp', 'independent']:.2f}" in told[0]
    assert "delta(0.4) = 1.00e-02 ± 2.0e-03" in told[-1]
    assert true_cost_figures.true_cost_table(rows).composition.iloc[0] == "same_batch"


@pytest.mark.whole
def test_the_mu_gdp_equation_is_the_accountant_and_its_costs_are_bars(calibrated):
    table, _ = calibrated
    rows = table[table.section == "true cost"]
    formula = true_cost_figures.mu_gdp_table(rows)
    assert formula.epsilon_formula.to_numpy() == pytest.approx(formula.epsilon_library.to_numpy(), abs=1e-5)
    left, right = true_cost_figures.draw_mu_gdp(formula, rows, 0.5).axes
    heights = [patch.get_height() for patch in left.patches]
    columns = ["true_vanilla", "true_same_batch", "true_independent"]
    assert heights == pytest.approx(formula.loc[0, columns].to_numpy(float) / 0.5)
    (label,) = (one.get_label() for one in right.lines if "GDP" in one.get_label())
    epsilons, deltas = line(right, label)
    vanilla = rows[(rows.probe == "none") & (rows.accountant == "gdp")].iloc[0]
    mu = noise_split.mu_gdp(sample_rate=vanilla.sample_rate, steps=vanilla.steps, sigma=vanilla.sigma)
    assert deltas == pytest.approx(noise_split.gdp_delta(mu, epsilons))
    assert len(true_cost_figures.mu_gdp_findings(formula)) == 2


@pytest.mark.whole
def test_prices_and_allocations_are_those_of_the_calibrations(calibrated):
    table, _ = calibrated
    rows = table[table.section == "gamma"]
    noise, share = noise_split_figures.draw_price(rows, 100).axes
    part = rows[(rows.probe == "contrasts") & (rows.allocation == "per_step")].sort_values("gamma")
    x, y = line(noise, "contrasts, per step (line_search)")
    assert (x, y) == (pytest.approx(100 * (part.gamma - 1)), pytest.approx(part.loss_std))  # B = 100: percent of a sum
    assert share.lines[2].get_ydata() == pytest.approx(part.probe_share)
    assert len(noise_split_figures.price_findings(rows)) == 3
    steps, loss = noise_split_figures.draw_allocation(table, [2], 2).axes
    at = noise_split_figures.allocation_rows(table)
    _, ratio = line(steps, "three losses, per step")
    raised = at.loc[("losses", "per_step", 2)]
    expected = [raised.sigma_gradient_probe if t % 2 == 0 else raised.sigma for t in range(6)]
    assert ratio == pytest.approx(np.array(expected) / raised.sigma)
    assert line(loss, "three losses, constant (paper)")[1] == pytest.approx([at.loss_std["losses", "constant", 2]])
    (text,) = noise_split_figures.allocation_findings(table, [2], 1.01)
    change = 100 * (at.sigma_loss["losses", "per_step", 2] / at.sigma_loss["losses", "constant", 2] - 1)
    assert f"needs {change:+.1f} % loss noise" in text


def test_the_data_sets_stand_with_their_sizes():
    row = {"data": "GTSRB", "steps": 7, "target_delta": 1e-5, "target_epsilon": 3.0, "preset": "paper", "sigma": 1.0}
    row |= {"accountant": "rdp", "sigma_gradient": 1.01, "sigma_gradient_probe": 1.01, "sigma_loss": 20.0}
    table = noise_split_figures.data_set_table(
        pd.DataFrame([row | {"probe_share": 0.02, "loss_std": 20.0, "true_epsilon": 3.1}])
    )
    found = table.iloc[0]
    assert (found.N, found.B, found.epochs) == (26_640, 1000, 5)
    assert (found.share_percent, found.noise_percent) == pytest.approx((2.0, 2.0))
    assert noise_split_figures.data_set_findings(table) == [
        "Preset paper: the probes take 2.00 to 2.00 % of epsilon over all data sets and budgets"
    ]


def test_shares_are_drawn_in_percent_for_data_sets_and_gammas():
    splits = pd.DataFrame(
        {
            "section": ["data", "data", "interval", "interval"],
            "data": ["a", "a", math.nan, math.nan],
            "target_epsilon": [1.0, 3.0, 3.0, 3.0],
            "gamma": 1.01,
            "interval": [5, 5, 1, 10],
            "probe_share": [0.01, 0.03, 0.02, 0.04],
        }
    )
    left, right = noise_split_figures.draw_shares(splits, 5, 1000, 3.0).axes
    assert line(left, "a")[1] == pytest.approx([1, 3])
    x, y = line(right, r"$\gamma$ = 1.01")
    assert x.tolist() == [1, 10] and y == pytest.approx([2, 4])
    assert noise_split_figures.share_findings(splits, 5) == [
        "gamma = 1.01, K = 5: 1.00 to 3.00 % over the data sets and budgets",
        "gamma = 1.01: 2.00 to 4.00 % over K = 1, 10",
    ]


# -- 04: the parabola behind the rate ----------------------------------------------------------------------------------


def made_curves(*, heights):
    """One step of ``landscape.loss_curves``: raw losses on 3 - 2x + 2x^2, clipped half as steep, two noisy fits."""
    grid = [-1.25, 0.0, 1.25]
    rows = [("raw", -1, x, 3 - 2 * x + 2 * x**2) for x in grid]
    fits = {("exact fit", -1): (2.0, 4.0), ("clipped fit", -1): (1.0, 2.0)}
    fits |= {("noised fit", 0): (0.5, 1.0), ("noised fit", 1): (-3.0, 1.0)}
    for (kind, draw), (slope, curvature) in fits.items():
        height = 3.0 if heights else math.nan
        values = {"slope": slope, "curvature": curvature, "intercept": height}
        rows += [(kind, draw, name, value) for name, value in values.items()]
    if heights:
        for kind, draw in (("points", -1), ("clipped", -1), ("noised", 0)):
            rows += [(kind, draw, x, 3.0 + x) for x in landscape_figures.FIVE_POINTS]
    run = {"distance": 0.1, "before": 0.05, "after": 0.2, "threshold": 2.5, "noise": 0.12}
    rows += [("run", -1, name, value) for name, value in run.items()]
    return pd.DataFrame(rows, columns=["kind", "draw", "x", "value"]).assign(step=4)


def test_parabolas_behind_the_rate_are_those_of_the_table():
    figure = landscape_figures.draw_losses(made_curves(heights=True))
    top, bottom = figure.axes
    for axis, label, (slope, curvature) in (
        (top, "parabola through raw", (2, 4)),
        (top, "parabola through clipped", (1, 2)),
        (bottom, "its parabola", (0.5, 1)),
    ):
        x, y = line(axis, label)
        assert y == pytest.approx(3 - slope * x + curvature * x**2 / 2)
    assert line(bottom, "its b/a")[0].tolist() == [0.5, 0.5]
    assert line(top, "clipped")[1] == pytest.approx(3 + np.array(landscape_figures.FIVE_POINTS))
    assert labels(figure) == ["mean loss (nats)", "distance along -G (units of h)", "mean loss (nats)"]
    assert [axis.get_title() for axis in figure.axes] == ["step 4: $R_l$ = 2.5 nats", "noise of a point: 0.12 nats"]


def test_contrasts_are_drawn_as_changes_with_the_rates_of_the_run():
    axis = landscape_figures.draw_contrasts(made_curves(heights=False)).axes[0]
    x, y = line(axis, "raw loss minus L(w)")
    assert y == pytest.approx(-2 * x + 2 * x**2)
    x, y = line(axis, "from clipped contrasts")
    assert y == pytest.approx(-x + x**2)
    assert [line(axis, f"the run's rate {name}")[0].item() for name in ("before", "after")] == pytest.approx([0.5, 2])
    assert axis.get_ylabel() == "change of the mean loss (nats)"


def test_the_table_of_fits_and_its_sentences():
    fits = landscape_figures.fit_table(made_curves(heights=True))
    row = fits.iloc[0]
    assert (row["b/a raw"], row["b/a clipped"], row["right signs"]) == (0.5, 0.5, 0.5)
    deviation = np.std([0.5, -3.0], ddof=1)
    assert row["b noise"] == pytest.approx(deviation) and (row.h, row.threshold) == (0.1, 2.5)
    (told,) = landscape_figures.fit_findings(fits)
    assert told.startswith(f"step 4: noise of the slope is {deviation:.1f} times") and "in 50 %" in told
    assert "0.50 to 0.50 times the raw one" in landscape_figures.losses_text(fits, 500)
    contrasts = landscape_figures.fit_table(made_curves(heights=False))
    assert "keeps 50 to 50 % of the slope" in landscape_figures.contrasts_text(contrasts, fits)


@pytest.fixture
def bands():
    columns = {"exact": 1.5, "q5": 0.1, "q25": 0.5, "q50": 1.0, "q75": 2.0, "q95": 9.0}
    columns |= {"slope_batch": 0.04, "slope_rest": 0.02, "curvature_batch": 0.2, "curvature_rest": 0.3}
    rows = [
        columns
        | {"step": step, "probe": probe, "run": run, "slope_std": 0.01}
        | {"right_signs": share + 0.1 * run, "right_signs_losses": 0.4 + 0.1 * run}
        for step in (0, 10)
        for run in (0, 1)
        for probe, share in (("losses", 0.25), ("contrasts", 0.8))
    ]
    return pd.DataFrame(rows)


def test_bands_are_medians_and_shares_are_means_with_their_range(bands):
    first, _, shares = band_figures.draw_bands(bands).axes
    assert line(first, "median")[1].tolist() == [1, 1]
    assert line(first, "b/a of raw losses (not private)")[1].tolist() == [1.5] * 4
    assert line(shares, "three losses")[1] == pytest.approx([30, 30])
    assert line(shares, "three losses in the run of the contrasts")[1] == pytest.approx([45, 45])
    assert (shares.get_ylabel(), first.get_ylabel()) == ("share (%)", "b/a (units of the run's rate)")
    assert band_figures.band_findings(bands)[0].startswith("three losses: 30 % of the draws")
    text = band_figures.bands_text(bands)
    assert "30 % of the draws with three losses and in 85 % with contrasts" in text and "would reach 45 %" in text


def test_the_own_batch_is_steeper_and_the_ratio_of_rates_is_told(bands):
    axis = band_figures.draw_same_batch(bands).axes[0]
    assert line(axis, "on the step's own batch")[1].tolist() == [0.04, 0.04]
    assert line(axis, "on the other training records")[1].tolist() == [0.02, 0.02]
    assert axis.get_ylabel() == "slope over one probe distance (nats)"
    assert band_figures.same_batch_findings(bands)[0].endswith("at 100 % of the steps looked at")
    assert line(axis, "mean over the second half: 0.02")[1].tolist() == [0.02, 0.02]
    assert "b/a is 3.0 times" in band_figures.same_batch_text(bands)  # (0.04 / 0.2) / (0.02 / 0.3)


def test_the_price_of_points_is_told_as_more_noise():
    price = pd.DataFrame({"points": [3, 5], "forwards": [2, 4], "slope_noise": [1, 1.15], "curvature_noise": [1, 1.5]})
    assert landscape_figures.price_findings(price)[1] == (
        "5 points: 4 forward passes, slope noise 1.15, curvature noise 1.50 (three points: 1)"
    )
    assert "15 % *more* noise and a curvature with 50 % more" in landscape_figures.price_text(price)


def test_the_short_sighted_rate_is_told_by_where_it_ends():
    peaks = [0.1, 0.5, 1.0]
    paths = short_sighted.runs(short_sighted.EXAMPLE, peaks, steps=100)
    final = short_sighted.ends(short_sighted.EXAMPLE, peaks, steps=100)
    votes = pd.DataFrame({"top": peaks, "batch_size": 100, "kept": [0.9, 0.6, 0.4], "fast": [0.1, 0.2, 0.9]})
    votes = votes.assign(slow=0.5, reached=[0.1, 0.15, 2.0])
    told = short_sighted_figures.findings(paths, final, votes, votes)
    assert told[0].endswith(f"ends at {paths.loss[short_sighted.GREEDY].iloc[-1]:.3f} of the loss")
    assert "keeps the faster branch up to a rate of 0.50" in told[3] and "does end lower up to 0.50" in told[3]
    assert told[4].endswith("from peaks of the faster branch of 0.10 to 0.50")
    lower = [peak for peak in peaks if final[short_sighted.LINEAR][peak] < paths.loss[short_sighted.GREEDY].iloc[-1]]
    assert f"from peaks of {lower[0]:.2f} to 1.00 (the highest looked at)" in told[2]
    ratio = paths.loss[short_sighted.GREEDY].iloc[-1] / final[short_sighted.LINEAR].min()
    assert f"{ratio:.1f} times the loss of a linear decay" in short_sighted_figures.lead(paths, final)


# -- 05: training dynamics ---------------------------------------------------------------------------------------------

BASE = Spec(task="digits", epsilon=3.0, interval=5)


def step_rows():
    """Two steps and two seeds of every method of the ablation, and of a rate tuned by hand."""
    rows = []
    for number, method in enumerate([*dynamics.ABLATION, "linear"]):
        for seed in (0, 1):
            spec = {"task": "digits", "method": method, "epsilon": 3.0, "seed": seed, "interval": 5}
            spec["learning_rate"] = 0.02 if method == "linear" else BASE.learning_rate
            for step in (0, 1):
                decided = {
                    "slope": 1.0,
                    "slope_std": 0.4,
                    "distance": 0.5,
                    "accepted": True,
                    "reason": "clamped",
                    "eta_next": -0.5,
                }
                measured = {"eta": 0.1 * (number + 1) * (-1) ** step, "loss_threshold": 2.0 - step + seed}
                measured |= {"test_loss": 1.0 + step, "test_accuracy": 0.5 + 0.1 * step, "private_loss": 0.4}
                measured |= {"difference_threshold": 0.3, "bend_threshold": 0.2}
                rows.append(spec | {"step": step} | decided | measured)
    return pd.DataFrame(rows)


def final_rows():
    rows = step_rows().drop_duplicates(["method", "seed"])
    return rows.assign(accuracy=0.6 + 0.2 * rows.seed)


TUNED = replace(BASE, method="linear", learning_rate=0.02)


def test_curves_are_medians_over_seeds_in_rows_of_line_searches():
    rows = step_rows()
    robust = rows[rows.method == "paper"].assign(method="robust", eta=0.3)
    rate, result = (
        np.reshape(
            dynamics_figures.draw_curves(pd.concat([rows, robust]), {"digits": TUNED}, [5], panels).axes, (2, -1)
        )
        for panels in ("rate", "result")
    )
    assert line(rate[1, 0], "K = 5")[1].tolist() == [2.5, 1.5]  # R_l, median of two seeds
    assert line(rate[1, 2], "preset robust")[1].tolist() == [0.3, 0.3]
    assert line(rate[0, 2], "tuned by hand")[1][0] == pytest.approx(0.1 * (len(dynamics.ABLATION) + 1))
    assert line(result[0, 1], "K = 5")[1] == pytest.approx([50, 60])
    titles = [axis.get_title() for axis in rate[1]]
    assert titles[:2] == ["$R_l$ (nats)", "released training loss (nats)"] and len(titles) == 3
    assert [axis.get_title() for axis in result[1]] == ["test loss (nats)", "test accuracy (%)"]
    told = dynamics_figures.curve_findings(step_rows(), final_rows(), [replace(BASE, method="paper"), TUNED])
    assert told[0].startswith("digits, paper, K = 5: accuracy 70.0 ± 14.1 %; R_l is highest after 0 % of the run")
    assert told[1] == "digits, tuned by hand (0.02, linear): accuracy 70.0 ± 14.1 %"
    (known,) = dynamics.probe_table(rows, final_rows(), [replace(BASE, method="paper")]).to_dict("records")
    # |b| / noise = 1 / 0.4; noise of b is 0.4 at a distance of 0.5; at the last of two probes thresholds 1 and 2.
    assert (known["probes"], known["|b| / noise"], known["noise (nats)"]) == (2, 2.5, pytest.approx(0.2))
    assert known["noise / R"] == pytest.approx(0.15) and known["accuracy"] == "70.0 ± 14.1 %"


def test_real_images_have_a_line_per_series_and_say_where_the_threshold_peaks():
    steps = {"step": [0, 1, 2], "eta": [0.1, 0.3, 0.2], "private_loss": 1.0, "test_loss": 2.0}
    paper = pd.DataFrame(steps | {"series": "paper, K = 1", "loss_threshold": [1.0, 4.0, 2.0], "test_accuracy": 0.25})
    tuned = pd.DataFrame(steps | {"series": "tuned by hand", "loss_threshold": math.nan, "test_accuracy": 0.75})
    rows = pd.concat([paper, tuned]).assign(seed=0, epsilon=8.0)
    axes = dynamics_figures.draw_real(rows).axes
    assert [axis.get_title() for axis in axes] == list(dynamics_figures.REAL.values())
    assert line(axes[0], "paper, K = 1")[1].tolist() == [1.0, 4.0, 2.0] and len(axes[0].lines) == 1
    assert line(axes[4], "tuned by hand")[1].tolist() == [75.0] * 3
    assert dynamics_figures.real_findings(rows) == [
        "paper, K = 1: accuracy 25.0 %; rate at most 0.3, 0.2 at the end; "
        "R_l is highest after 50 % of the run and ends at 50 % of that",
        "tuned by hand: accuracy 75.0 %; rate at most 0.3, 0.2 at the end",
    ]


def test_every_rate_is_drawn_by_its_size_with_a_cross_where_it_is_negative():
    figure = dynamics_figures.draw_rates(step_rows(), BASE, dynamics.RULES.values())
    assert len(figure.axes) == 8
    axis = next(axis for axis in figure.axes if axis.get_title() == "losses, gen (preset paper)")
    value = 0.1 * (dynamics.ABLATION.index("paper") + 1)
    assert [one.get_ydata().tolist() for one in axis.lines[:2]] == [
        pytest.approx([value, value]),
        pytest.approx([value]),
    ]
    table = dynamics.behaviour_table(step_rows(), final_rows(), BASE)
    row = table.loc["paper"]
    assert (row.clear, row.clamped, row.negative, row.rejected) == (100, 100, 100, 0)
    assert row.spread == "70.0 ± 14.1" and row.accuracy == pytest.approx(70)
    assert dynamics_figures.rate_findings(table)[0].startswith("losses, literal: 100 % of the probes make the rate")
    table.loc["line_search_losses", ["accuracy", "spread"]] = [10.0, "10.0 ± 1.0"]
    first, *_, last = dynamics_figures.ablation_findings(table)
    assert first.endswith("60.0 points are lost, which leaves 10.0 ± 1.0 %") and "reach 70.0 ± 14.1 %" in last
    part = dynamics_figures.part_findings(table)[2]
    assert part == "line search with losses for contrasts: 10.0 ± 1.0 %, -60.0 points to the whole line search"


def test_rates_below_the_axis_are_told():
    tiny = step_rows().assign(eta=1e-12)
    axis = dynamics_figures.draw_rates(tiny, BASE, dynamics.RULES.values()).axes[0]
    assert [text.get_text() for text in axis.texts] == ["down to 1e-12"]


def test_the_verdict_has_the_best_interval_and_the_smallest():
    frames = [final_rows().assign(accuracy=0.6)] + [
        final_rows().query("method == 'paper'").assign(interval=k, accuracy=value) for k, value in ((1, 0.2), (10, 0.3))
    ]
    results = pd.concat([frames[0].query("method != 'paper'"), *frames[1:]])
    (found,) = dynamics_figures.verdicts(results, {"digits": TUNED})
    assert found.outcome == "not at this scale"
    assert found.number == "-30.0 points on digits at its best K, -40.0 at K = 1"


def test_thresholds_are_compared_over_the_second_half():
    figure = dynamics_figures.draw_thresholds(step_rows(), BASE)
    assert line(figure.axes[1], "threshold $R_l$")[1].tolist() == [2.5, 1.5]
    assert figure.axes[0].get_ylabel() == "nats"
    late = dynamics.late_medians(step_rows(), BASE)
    assert late.loc[("gen", "sum")].tolist() == [1.5, 0.4, 2.0]
    told = dynamics_figures.threshold_findings(step_rows(), final_rows(), BASE)
    assert told[1].startswith("rule gen, R_l from the sum, K = 5: R_l is 1.5, the released loss 0.4")


def test_the_ablation_shows_every_run_and_the_tuned_rate():
    rules, parts = dynamics_figures.draw_ablation(final_rows(), BASE, TUNED).axes
    assert line(rules, "tuned by hand")[0] == pytest.approx([70, 70])
    assert parts.lines[0].get_xdata() == pytest.approx([60, 80])
    assert rules.get_xlabel() == "test accuracy (%), epsilon = 3"
    budgets = pd.DataFrame(
        [(m, e, 0.5 + 0.1 * (m == "line_search")) for m in dynamics.PARTS.values() for e in (1.0, 3.0, 8.0)],
        columns=["method", "epsilon", "accuracy"],
    )
    assert dynamics.losses_by_budget(budgets)[0] == "line search without damping: -10.0, -10.0, -10.0 points"
