"""Notebook 01's numbers: simulations of Theorem 1, the noise of Tab. "diff priv", real losses and their parabolas."""

import inspect
import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from cases import together
from scipy import optimize, stats

from hyfreedp import NoiseGenerator, calibrate_noise, clipping_bias, fit_quadratic, normal_clipping_bias
from hyfreedp.experiments.baselines.contrasts import contrast_threshold
from hyfreedp.experiments.runs.cells import Spec
from hyfreedp.experiments.runs.train import make_run
from hyfreedp.experiments.store.paths import FIGURES
from hyfreedp.experiments.studies import bias_variance, clouds, noise_magnitudes
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.privatize import optimal_threshold


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
    dots = bias_variance.release_dots(
        losses, [0.5, 2.0], noise_multiplier=3.0, expected_batch_size=expected, runs=4000, seed=1
    )
    bias = clipping_bias(losses, [0.5, 2.0]) * 40 / expected
    noise = 3.0 * np.array([0.5, 2.0]) / expected
    # Four standard errors each: a false alarm in one of 2,600 seeds.
    assert (np.abs(dots.bias - bias) < 4 * dots.bias_error).all()
    assert (np.abs(dots.noise - noise) < 4 * dots.noise_error).all()
    assert (np.abs(dots.rmse - np.hypot(bias, noise)) < 4 * dots.rmse_error).all()


@together(
    ("mechanism", "batch_size", "golden"), [("gaussian", 50, 1.614), ("gaussian", 5000, 2.818), ("laplace", 500, 2.321)]
)
def test_the_marked_optimum_is_the_lowest_point_of_the_curve(mechanism, batch_size, golden):
    setting = {"noise_multiplier": 23.2845, "expected_batch_size": batch_size, "mechanism": mechanism}

    def error(threshold):
        return bias_variance.normal_errors(threshold, mean=2.0, std=0.4, **setting).rmse[0]

    lowest = optimize.minimize_scalar(lambda t: error([t]), bounds=(0.1, 10), method="bounded", options={"xatol": 1e-9})
    assert optimal_threshold(2.0, 0.4, **setting) == pytest.approx(lowest.x, abs=1e-5)
    assert lowest.x == pytest.approx(golden, abs=1e-3)


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


def test_the_saved_table_is_calibrated_and_computed():
    table = pd.read_csv(FIGURES / "01_bias_variance_noise.csv")
    assert table.dimension.to_list() == [1, 301_066, 1, 21_669_514, 1, 85_806_346]
    assert table.noise_multiplier.to_list() == pytest.approx(
        [23.2845, 4.25103, 5.14489, 0.871142, 5.14489, 0.871142], rel=1e-5
    )
    factor = np.where(table.quantity == "loss", math.sqrt(2 / math.pi), np.sqrt(table.dimension))
    assert table.formula.to_numpy() == pytest.approx(factor * table.noise_multiplier / table.expected_batch_size)
    assert table.simulated.to_numpy() == pytest.approx(table.exact.to_numpy(), rel=0.02)


def test_a_calibrated_split_survives_its_table(tmp_path):
    arguments = {"target_epsilon": 2.0, "target_delta": 1e-3, "sample_rate": 0.1, "steps": 5, "accountant": "rdp"}
    bias_variance.calibrated(**arguments).to_csv(tmp_path / "split.csv", index=False)
    split = bias_variance.split_of(pd.read_csv(tmp_path / "split.csv"))
    expected = calibrate_noise(**arguments)
    assert split.sigma_loss == pytest.approx(expected.sigma_loss, rel=1e-12)
    assert (split.steps, split.probe, split.reason) == (5, expected.probe, "")


# -- a run and its parabolas -------------------------------------------------------------------------------------------

SPEC = {"method": "line_search", "epsilon": 0.5, "seed": 0, "steps": 10}


@pytest.fixture(scope="module")
def probed():
    return clouds.probed_losses(spec=SPEC, stages=[0, 1], brightness=16.0)


def test_probed_losses_are_those_that_the_optimizer_saw(probed):
    optimizer, loader = make_run(Spec(**SPEC), diagnostics=True)

    def per_sample_loss(batch):
        return F.cross_entropy(optimizer.module(batch[0]), batch[1], reduction="none")

    for batch in itertools.islice(loader, 2):
        row = optimizer.step(per_sample_loss, batch).to_dict()
        mine = clouds.losses_of(probed, row["step"], "batch")
        assert mine.shape == (3, len(batch[1]))
        raw = [row[f"not_private_loss_{name}"] for name in clouds.POINTS]
        assert mine.mean(axis=1) == pytest.approx(raw, abs=2e-6)
        assert probed[probed.step == row["step"]].distance.unique() == pytest.approx([row["distance"]], rel=1e-12)


def test_probed_losses_hold_all_records_and_the_outlier(probed):
    sizes = probed.groupby(["step", "part"]).size()
    assert sizes[1, "train"] == TASKS["digits"].train_size and sizes[1, "outlier"] == 1
    features, label = clouds.outlier("digits", 16.0)
    train, labels = TASKS["digits"].datasets("test")[0].tensors
    assert torch.equal(features, 16 * train[:1]) and label != labels[0]


def test_a_stage_without_probe_is_refused():
    with pytest.raises(ValueError, match=r"stages must be steps with a probe, got \[3\].*at \[0, 1, 6\]"):
        clouds.probed_losses(spec=SPEC, stages=[0, 3], brightness=1.0)


def test_usual_thresholds_are_where_the_rules_aim():
    assert clouds.QUANTILE == inspect.signature(contrast_threshold).parameters["quantile"].default
    losses = np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0], [4.0, 1.0, 3.0]])
    d, c = np.array([3.0, 1.0, 0.0]), np.array([1.0, 1.0, 2.0])
    assert clouds.usual_thresholds(losses) == pytest.approx((2.0, np.quantile(d, 0.8), np.quantile(c, 0.8)))


@together("probe", ["losses", "contrasts"])
def test_without_clipping_and_noise_every_probe_sees_the_same_parabola(probe):
    losses = torch.rand((3, 30), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fit = clouds.private_fit(
        losses,
        probe,
        (1e9, 1e9, 1e9),
        0.0,
        distance=0.2,
        expected_batch_size=30,
        generator=NoiseGenerator(),
    )
    exact = fit_quadratic([0.2, 0.0, -0.2], losses.mean(dim=1))
    assert (fit.slope, fit.curvature) == pytest.approx((exact.slope, exact.curvature), rel=1e-9)


def test_clouds_scatter_as_their_known_noise_says():
    losses = np.random.default_rng(0).uniform(0.5, 1.0, (3, 40))
    arguments = {
        "losses": losses.tolist(),
        "distance": 0.5,
        "sigmas": {"losses": 2.0},
        "expected_batch_size": 40,
        "multiples": [4.0],
        "runs": 1000,
        "seed": 0,
    }
    table = clouds.clouds(**arguments)
    pd.testing.assert_frame_equal(table, clouds.clouds(**arguments))
    noise = 2.0 * 4.0 * losses[1].mean() / 40
    exact = fit_quadratic([0.5, 0.0, -0.5], losses.mean(axis=1), noise)
    # Means to four standard errors, standard deviations to four of theirs (2.2 %): one of 4,000 seeds fails.
    assert table.slope.mean() == pytest.approx(exact.slope, abs=4 * exact.slope_std / math.sqrt(1000))
    assert table.curvature.mean() == pytest.approx(exact.curvature, abs=4 * exact.curvature_std / math.sqrt(1000))
    assert table.slope.std() == pytest.approx(exact.slope_std, rel=0.09)
    assert table.curvature.std() == pytest.approx(exact.curvature_std, rel=0.09)


def test_clipping_alone_by_hand():
    ahead, here, behind = losses = np.array([[0.5, 4.0], [2.0, 4.0], [5.0, 4.0]])
    rates = clouds.clipped_rates(losses, distance=0.1)

    def rate(plus, middle, minus):
        return (minus.mean() - plus.mean()) / 2 / (minus.mean() + plus.mean() - 2 * middle.mean())

    assert rates["exact"] == pytest.approx(rate(ahead, here, behind))
    assert rates["mean_loss"] == pytest.approx(rate(*(np.minimum(row, 3.0) for row in losses)))  # mean loss 3
    assert rates["sum_of_losses"] == pytest.approx(rates["exact"])  # 9.75 clips nothing
    # One of two contrasts is zero; clipping (4.5, 1.5) at (3.6, 1.2) keeps their ratio.
    assert rates["contrasts"] == pytest.approx(rates["exact"])


def test_spread_of_the_rate_by_hand():
    fits = pd.DataFrame(
        {
            "probe": "losses",
            "multiple": 1.0,
            "slope": [1.0, -1.0, 2.0, 1.0],
            "curvature": [1.0, 1.0, 1.0, -1.0],
            "eta": [1.0, -1.0, 2.0, -1.0],
        }
    )
    (row,) = clouds.eta_spread(fits, exact=1.0).to_dict("records")
    assert (row["near"], row["uphill"], row["concave"]) == (0.5, 0.25, 0.25)
    assert row["q50"] == 0.0 and row["q95"] == pytest.approx(np.quantile(fits.eta, 0.95))
