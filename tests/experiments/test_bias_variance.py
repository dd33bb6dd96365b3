"""Notebook 01's numbers: simulations of Theorem 1, and the noise of Tab. "diff priv"."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from cases import together
from scipy import optimize, stats

from hyfreedp import clipping_bias, normal_clipping_bias
from hyfreedp.experiments.studies import bias_variance, bias_variance_figures, noise_magnitudes


def test_simulated_bias_of_normal_losses_is_corollary_1():
    alphas = [-2.0, 0.0, 1.0]
    dots = bias_variance.normal_bias_dots(mean=2.0, std=0.4, batch_size=50, alphas=alphas, batches=2000, seed=0)
    alpha = np.array(alphas)
    mean = normal_clipping_bias(alpha, mean=0.0, std=1.0)
    square = (1 + alpha**2) * stats.norm.sf(alpha) - alpha * stats.norm.pdf(alpha)  # E ReLU(Z - alpha)^2
    # Four standard errors: a false alarm in one of 5,000 seeds.
    assert (np.abs(dots.bias - mean) < 4 * dots.error).all()
    assert dots.spread.to_numpy() == pytest.approx(np.sqrt((square - mean**2) / 50), rel=0.1)


@together("expected", [40, 80])
def test_simulated_releases_are_theorem_1(expected):
    losses = np.random.default_rng(0).gamma(2.0, 0.5, 40)
    plan = {"noise_multiplier": 3.0, "expected_batch_size": expected, "runs": 4000, "seed": 1}
    dots = bias_variance.release_dots(losses, [0.5, 2.0], **plan)
    bias = clipping_bias(losses, [0.5, 2.0]) * 40 / expected
    noise = 3.0 * np.array([0.5, 2.0]) / expected
    # Four standard errors each: a false alarm in one of 2,600 seeds.
    assert (np.abs(dots.bias - bias) < 4 * dots.bias_error).all()
    assert (np.abs(dots.noise - noise) < 4 * dots.noise_error).all()
    assert (np.abs(dots.rmse - np.hypot(bias, noise)) < 4 * dots.rmse_error).all()


@together(("batch_size", "golden"), [(50, 1.614), (5000, 2.818)])
def test_the_marked_optimum_is_the_lowest_point_of_the_curve(batch_size, golden):
    setting = {"noise_multiplier": 23.2845, "expected_batch_size": batch_size}

    def error(threshold):
        return bias_variance.normal_errors(threshold, mean=2.0, std=0.4, **setting).rmse[0]

    lowest = optimize.minimize_scalar(lambda t: error([t]), bounds=(0.1, 10), method="bounded", options={"xatol": 1e-9})
    assert bias_variance.optimal_threshold(2.0, 0.4, **setting) == pytest.approx(lowest.x, abs=1e-5)
    assert lowest.x == pytest.approx(golden, abs=1e-3)
    trade = bias_variance.trade_off(mean=2.0, std=0.4, noise_multiplier=23.2845, batch_size=batch_size)
    assert trade.error_at(trade.best) == pytest.approx(lowest.fun, rel=2e-3)


def test_errors_of_several_probes_are_root_mean_squares():
    losses = np.random.default_rng(0).exponential(1.0, (3, 20))
    table = bias_variance.batch_errors(losses, [0.3, 1.0], noise_multiplier=2.0, expected_batch_size=25)
    for row, threshold in zip(table.itertuples(), [0.3, 1.0], strict=True):
        biases = [sum(max(x - threshold, 0) for x in probe) / 20 for probe in losses]
        assert row.bias == pytest.approx(math.sqrt(sum(b**2 for b in biases) / 3))
        assert row.noise == pytest.approx(2.0 * threshold / 25)
        assert row.rmse == pytest.approx(math.sqrt(row.bias**2 + row.noise**2))


def test_norm_of_normal_noise():
    closed = {1: math.sqrt(2 / math.pi), 2: math.sqrt(math.pi / 2), 3: 2 * math.sqrt(2 / math.pi)}
    for dimension, value in closed.items():
        assert noise_magnitudes.noise_norm(dimension) == pytest.approx(value, rel=1e-12)
    for dimension in (10**3, 10**8):  # sqrt(d) (1 - 1/4d + O(d^-2))
        assert noise_magnitudes.noise_norm(dimension) == pytest.approx(math.sqrt(dimension) * (1 - 0.25 / dimension))


def test_sizes_of_transformers_are_timms():
    timm = pytest.importorskip("timm")
    for name, shape in noise_magnitudes.TRANSFORMERS.items():
        with torch.device("meta"):
            model = timm.create_model(f"{name.lower().replace('-', '_')}_patch16_224", num_classes=10)
        size = noise_magnitudes.transformer_size(**shape, classes=10)
        assert size == sum(parameter.numel() for parameter in model.parameters())


def test_noise_magnitudes_are_what_the_formulas_say():
    model = {"model": "m", "dimension": 5000, "expected_batch_size": 50, "sigma_loss": 4.0, "sigma_gradient": 2.0}
    table = noise_magnitudes.noise_magnitudes(models=[model], seeds=20)
    assert table.exact.to_list() == pytest.approx([math.sqrt(2 / math.pi) * 4 / 50, math.sqrt(5000) * 2 / 50], rel=1e-4)
    # Four standard errors, by Student's t for twenty norms: a false alarm in one of 1,200 seeds.
    assert (np.abs(table.simulated - table.exact) < 4 * table.error).all()


@together("piece", [64, 2**22])
def test_gradient_noise_is_whole_however_it_is_drawn(piece):
    norm = noise_magnitudes._gradient_noise(1000, 2.0, 50, seed=3, piece=piece)
    # The norm of a long normal vector has standard deviation 1/sqrt(2): four of them, one of 16,000 seeds fails.
    assert norm == pytest.approx(noise_magnitudes.noise_norm(1000) * 2.0 / 50, abs=4 / math.sqrt(2) * 2.0 / 50)


def test_real_losses_are_compared_with_a_normal_of_their_moments():
    """Of Exp(1): skewness 2, and clipping at the mean takes 1/e of it."""
    here = -np.log1p(-(np.arange(2000) + 0.5) / 2000)
    losses = {"ahead": here, "here": here, "behind": here}
    table = pd.DataFrame({"step": 3, "distance": 1.0, "part": "batch"} | losses)
    moments = bias_variance.loss_moments([table, table], [3]).loc[3]
    assert (moments["mean"], moments.skewness) == pytest.approx((1.0, 2.0), rel=0.05)
    assert moments.bias_at_L == pytest.approx(math.exp(-1), rel=0.01)
    assert moments.normal_bias_at_L == pytest.approx(1 / math.sqrt(2 * math.pi), rel=0.01)


@together(("shift", "outcome"), [(0.0, "reproduced"), (0.05, "mathematically wrong")])
def test_a_formula_is_wrong_by_four_standard_errors(shift, outcome):
    alphas = np.array([0.0, 1.0])
    dots = pd.DataFrame({"alpha": alphas, "bias": bias_variance_figures.normal_bias(alphas) + shift, "error": 0.01})
    losses, releases = np.array([1.0, 3.0]), {"threshold": 2.0, "bias": 0.5, "noise": 4.0 * 2 / 2}
    releases = pd.DataFrame([releases | {"bias_error": 0.1, "noise_error": 0.1}])
    farthest = max(abs(z).max() for z in bias_variance_figures.standard_errors(dots, releases, losses, 4.0))
    moments = pd.DataFrame({"bias_at_L": [0.012, 0.31]}, index=[3, 10])
    theorem, bias = bias_variance_figures.verdicts(farthest, 4, moments)
    assert (theorem.outcome, bias.outcome) == (outcome, "fails here")
    assert bias.number == "of the mean loss it is 1% at step 3, 31% at step 10"
    assert bias_variance_figures.verdicts(farthest, 4, moments[:1])[1].outcome == "reproduced"
