"""Losses along a run's direction: those that the run saw, without a trace in it; fits, clouds and prices by hand."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch

from hyfreedp import NoiseGenerator, fit_quadratic
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run
from hyfreedp.experiments.studies import clouds, landscape
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.experiments.tasks.scores import losses_of

SPEC = {"method": "paper", "learning_rate": 0.05, "epsilon": 8.0, "interval": 1, "steps": 4, "seed": 0}


@pytest.fixture(scope="module")
def seen():
    """The first records of the run, with the raw losses that its own probes saw."""
    optimizer, loader = make_run(Spec(**SPEC), diagnostics=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    per_sample_loss = losses_of(optimizer.module)
    return [(optimizer.step(per_sample_loss, batch), len(batch[1])) for batch in itertools.islice(batches, 3)]


# -- along a run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probed():
    return clouds.probed_losses(spec=SPEC, stages=[0, 2], brightness=16.0)


def test_probed_losses_are_those_that_the_run_saw_and_leave_no_trace(probed, seen):
    """The rate moves at every probe, and one looks at the old rate: reach h / eta, along the same direction."""
    for step in (0, 2):
        record, size = seen[step]
        mine = clouds.losses_of(probed, step, "batch")
        assert mine.shape == (3, size) and clouds.distance_of(probed, step) == pytest.approx(record.eta, rel=1e-12)
        assert mine[1].mean() == pytest.approx(record.diagnostics["loss_here"], abs=2e-6)
        if record.probe.eta_next == record.probe.eta_probed:
            assert mine[0].mean() == pytest.approx(record.diagnostics["loss_ahead"], abs=2e-6)
            assert mine[2].mean() == pytest.approx(record.diagnostics["loss_behind"], abs=2e-6)


def test_probed_losses_hold_all_records_and_the_outlier(probed):
    sizes = probed.groupby(["step", "part"]).size()
    assert sizes[2, "train"] == TASKS["digits"].train_size and sizes[2, "outlier"] == 1
    features, label = clouds.outlier("digits", 16.0)
    train, labels = TASKS["digits"].datasets("test")[0].tensors
    assert torch.equal(features, 16 * train[:1]) and label != labels[0]
    with pytest.raises(ValueError, match="stages must be steps of the run, 0 to 3, got"):
        clouds.probed_losses(spec=SPEC, stages=[4], brightness=1.0)


def test_curves_are_the_same_losses_with_the_runs_own_threshold_and_noise(probed, seen):
    curves = landscape.loss_curves(spec=SPEC, stages=[0.0, 0.5], grid=[-1.0, 0.0, 1.0], reach=1.0)
    assert sorted(curves.step.unique()) == [0, 2]
    record, size = seen[2]
    here = curves[curves.step == 2]
    raw = here[here.kind == "raw"].value.tolist()  # behind, here, ahead
    assert raw[::-1] == pytest.approx(clouds.losses_of(probed, 2, "batch").mean(axis=1).tolist(), abs=2e-6)
    assert here.threshold.unique() == [record.probe.loss_threshold]
    three = record.probe.slope_std * math.sqrt(2) * record.probe.distance  # of one of three losses
    assert here.noise.unique() == pytest.approx([three * math.sqrt(5 / 3)])
    clipped = here[here.kind == "clipped"].value
    assert (clipped <= here[here.kind == "points"].value.to_numpy() * size / 500 + 1e-9).all()
    with pytest.raises(ValueError, match="stages must be shares"):
        landscape.loss_curves(spec=SPEC, stages=[2], grid=[0.0], reach=1.0)


# -- parabolas ---------------------------------------------------------------------------------------------------------


def made_curves(noise):
    """L(x) = 0.7 - 0.2 x + 0.15 x^2, and clipped by 0.1 at the far end."""
    x = np.array(landscape.FIVE_POINTS)
    values = 0.7 - 0.2 * x + 0.15 * x**2
    kinds = {"raw": values, "points": values, "clipped": values - 0.1 * (x == -1)}
    tables = [pd.DataFrame({"kind": kind, "x": x, "value": value}) for kind, value in kinds.items()]
    return pd.concat(tables).assign(step=5, distance=0.1, threshold=1.0, noise=noise)


def test_a_quadratic_loss_gives_its_own_coefficients():
    (row,) = landscape.fit_table(made_curves(0.0), repeats=3, seed=0).to_dict("records")
    assert (row["b raw"], row["a raw"], row["b/a raw"]) == pytest.approx((0.2, 0.3, 2 / 3))
    clipped = fit_quadratic(landscape.FIVE_POINTS, made_curves(0.0).query("kind == 'clipped'").value)
    assert (row["b clipped"], row["a clipped"]) == pytest.approx((clipped.slope, clipped.curvature))
    assert (row["b noise"], row["right signs"]) == pytest.approx((0.0, 1.0), abs=1e-12)


def test_clouds_scatter_as_their_known_noise_says():
    losses = np.random.default_rng(0).uniform(0.5, 1.0, (3, 40))
    known = {"distance": 0.5, "expected_batch_size": 40}
    table = clouds.clouds(losses=losses.tolist(), noise_multiplier=2.0, multiples=[4.0], runs=1000, seed=0, **known)
    noise = 2.0 * 4.0 * losses[1].mean() / 40
    exact = fit_quadratic([0.5, 0.0, -0.5], losses.mean(axis=1), noise)
    # Means to four standard errors, standard deviations to four of theirs (2.2 %): one of 4,000 seeds fails.
    assert table.slope.mean() == pytest.approx(exact.slope, abs=4 * exact.slope_std / math.sqrt(1000))
    assert table.curvature.mean() == pytest.approx(exact.curvature, abs=4 * exact.curvature_std / math.sqrt(1000))
    assert table.slope.std() == pytest.approx(exact.slope_std, rel=0.09)
    assert table.curvature.std() == pytest.approx(exact.curvature_std, rel=0.09)
    whole = clouds.private_fit(torch.from_numpy(losses), 1e9, 0.0, generator=NoiseGenerator(), **known)
    assert (whole.slope, whole.curvature) == pytest.approx((exact.slope, exact.curvature), rel=1e-9)


def test_spread_of_the_rate_by_hand():
    etas = [1.0, -1.0, 2.0, -1.0]
    fits = pd.DataFrame({"multiple": 1.0, "slope": [1, -1, 2, 1], "curvature": [1, 1, 1, -1], "eta": etas})
    (row,) = clouds.spread_table(fits, exact=1.0).to_dict("records")
    assert (row["near"], row["uphill"], row["concave"]) == (0.5, 0.25, 0.25)
    assert row["q50"] == 0.0 and row["q95"] == pytest.approx(np.quantile(etas, 0.95))


# -- prices ------------------------------------------------------------------------------------------------------------


def test_price_of_points_by_hand():
    """Slope: sigma sqrt(n/3) / sqrt(sum x^2). Three points: 1/sqrt(2); five at -1, -1/2, 0, 1/2, 1: sum x^2 = 5/2."""
    table = landscape.price_of_points([3, 5]).set_index("points")
    assert table.loss_noise.tolist() == pytest.approx([1.0, math.sqrt(5 / 3)])
    assert table.slope_noise.tolist() == pytest.approx([1.0, math.sqrt(5 / 3) * math.sqrt(2 / 2.5)])
    # Curvature is twice the weight of x^2 - mean: variances 4/(2/3) and 4/(7/8) times sigma^2.
    assert table.curvature_noise.tolist() == pytest.approx([1.0, math.sqrt(5 / 3) * math.sqrt((2 / 3) / (7 / 8))])
    assert table.forwards.tolist() == [2, 4]
