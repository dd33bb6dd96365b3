"""Losses along a run's direction: exact at the ends, without a trace in the run; fits and prices by closed forms."""

import math
from dataclasses import replace
from itertools import chain, islice, repeat

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyfreedp import NoiseGenerator, calibrate_noise, fit_quadratic
from hyfreedp.experiments.runs.cells import Spec
from hyfreedp.experiments.runs.train import make_run
from hyfreedp.experiments.studies import landscape
from hyfreedp.experiments.studies.landscape import (
    FIVE_POINTS,
    PROBED,
    loss_curves,
    noise_for_points,
    price_of_points,
    private_view,
    rate_bands,
    visits,
    with_losses,
)

CONTRASTS = Spec(method="line_search", epsilon=8.0, interval=1, steps=4)
LOSSES = replace(CONTRASTS, method="paper_anchored")


def per_sample_loss(model):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def endless(loader):
    return chain.from_iterable(repeat(loader))


@pytest.mark.whole
@pytest.mark.parametrize("spec", [CONTRASTS, LOSSES], ids=["contrasts", "losses"])
def test_points_are_those_that_the_run_itself_probes(spec):
    """A twin run records its own raw probe losses; -1, 0 and 1 must be these."""
    optimizer, loader = make_run(spec, diagnostics=True)
    seen = [optimizer.step(per_sample_loss(optimizer.module), batch) for batch in islice(loader, 2)]
    for visit in visits(spec, [0.0, 0.25]):
        twin = seen[visit.record.step]
        assert visit.record.probe == twin.probe
        ahead, here, behind = visit.losses(PROBED).mean(dim=1).tolist()
        assert here == pytest.approx(twin.diagnostics["loss_here"], rel=1e-6)
        assert ahead == pytest.approx(twin.diagnostics["loss_ahead"], rel=1e-5)
        assert behind == pytest.approx(twin.diagnostics["loss_behind"], rel=1e-5)


def test_looking_leaves_no_trace_in_the_run():
    optimizer, loader = make_run(CONTRASTS)
    plain = [optimizer.step(per_sample_loss(optimizer.module), batch) for batch in islice(endless(loader), 4)]
    steps = []
    for visit in visits(CONTRASTS, [0.0, 0.25, 0.5, 0.75]):
        visit.losses([-2.0, 0.7])
        visit.rest([0.1])
        steps.append(visit.record)
    assert steps == plain


def test_rest_is_the_training_data_outside_the_batch():
    (visit,) = visits(CONTRASTS, [0.0])
    batch, rest = visit.losses([0.0]), visit.rest([0.0])
    assert batch.shape[1] + rest.shape[1] == 1500
    assert not torch.isin(rest, batch).all()


def test_a_quadratic_loss_gives_its_own_coefficients(monkeypatch):
    """L(x) = c - b x + a x^2 / 2 for every sample, no clipping, no noise: the fit is b and a, whatever the points."""
    (visit,) = visits(LOSSES, [0.0])
    x = torch.tensor(FIVE_POINTS, dtype=torch.float64)[:, None]
    losses = (0.7 - 0.2 * x + 0.15 * x**2).expand(-1, 500)  # a = 0.3
    wide = replace(visit, record=replace(visit.record, probe=replace(visit.record.probe, loss_threshold=10.0)))
    wide = replace(wide, expected_batch_size=500.0)
    fit, means = private_view(losses, FIVE_POINTS, wide, 0.0, None)
    assert (fit.slope, fit.curvature, fit.intercept) == pytest.approx((0.2, 0.3, 0.7))
    assert means == pytest.approx(losses.mean(dim=1).tolist())
    (visit,) = visits(CONTRASTS, [0.0])
    probe = replace(visit.record.probe, difference_threshold=10.0, bend_threshold=10.0)
    wide = replace(visit, record=replace(visit.record, probe=probe), expected_batch_size=500.0)
    fit, means = private_view(losses, FIVE_POINTS, wide, 0.0, None)
    assert (fit.slope, fit.curvature) == pytest.approx((0.2, 0.3)) and means is None


def test_noise_of_a_view_is_what_the_fit_says():
    """400 draws: the standard deviation of the slope lies within 4 standard errors of the stated one (1e-4)."""
    (visit,) = visits(LOSSES, [0.0])
    losses, generator = visit.losses(FIVE_POINTS), NoiseGenerator(0)
    fits = [private_view(losses, FIVE_POINTS, visit, visit.split.sigma_loss, generator)[0] for _ in range(400)]
    measured = np.std([fit.slope for fit in fits], ddof=1)
    assert abs(measured / fits[0].slope_std - 1) < 4 / math.sqrt(2 * 400)


def test_three_losses_see_the_step_of_the_contrasts_at_its_price_and_their_own_threshold():
    (visit,) = visits(CONTRASTS, [0.0])
    losses = visit.losses(PROBED)
    seen = with_losses(visit, losses)
    assert seen.record.probe.loss_threshold == pytest.approx(losses.mean(dim=1).sum().item())
    assert seen.record.probe.distance == visit.record.probe.distance
    # The effective multiplier of a step: three losses of squared sensitivity 3, contrasts of 1.5.
    assert 3 / seen.split.sigma_loss**2 == pytest.approx(1.5 / visit.split.sigma_loss**2)
    fit, means = private_view(losses, PROBED, seen, 0.0, None)
    size = losses.shape[1] / visit.expected_batch_size
    raw = fit_quadratic(PROBED, losses.mean(dim=1).tolist())  # nothing lies above the sum of the three means
    assert losses.max() < losses.mean(dim=1).sum() and len(means) == 3
    assert (fit.slope, fit.curvature) == pytest.approx((size * raw.slope, size * raw.curvature), abs=1e-9)


def test_five_points_at_the_price_of_three():
    """The effective multiplier of a step, and so the run's epsilon, stays the same."""
    split = calibrate_noise(
        target_epsilon=3.0, target_delta=1e-5, sample_rate=0.1, steps=50, probe="losses", gamma=1.02
    )
    five = noise_for_points(split.sigma_loss, 5)
    three_points = split.sigma_gradient_probe**-2 + 3 * split.sigma_loss**-2
    assert split.sigma_gradient_probe**-2 + 5 * five**-2 == pytest.approx(three_points, rel=1e-12)
    assert three_points**-0.5 == pytest.approx(split.sigma, rel=1e-9)


def test_price_of_points_by_hand():
    """Slope: sigma sqrt(n/3) / sqrt(sum x^2). Three points: 1/sqrt(2); five at -1, -1/2, 0, 1/2, 1: sum x^2 = 5/2."""
    table = price_of_points(2.0, [3, 5]).set_index("points")
    assert table.sigma_loss.tolist() == pytest.approx([2.0, 2.0 * math.sqrt(5 / 3)])
    assert table.slope_noise.tolist() == pytest.approx([1.0, math.sqrt(5 / 3) * math.sqrt(2 / 2.5)])
    # Curvature is twice the weight of x^2 - mean: variances 4/(2/3) and 4/(7/8) times sigma^2.
    assert table.curvature_noise.tolist() == pytest.approx([1.0, math.sqrt(5 / 3) * math.sqrt((2 / 3) / (7 / 8))])
    assert table.forwards.tolist() == [2, 4]


def test_tables_hold_what_the_visits_say():
    arguments = {"method": "line_search", "epsilon": 8.0, "interval": 1, "steps": 4}
    table = loss_curves(spec=arguments, stages=[0.25], grid=[-1.0, 0.0], repeats=3, seed=0)
    (visit,) = visits(CONTRASTS, [0.25])
    raw = table[table.kind == "raw"]
    assert raw.value.tolist() == pytest.approx(visit.losses([-1.0, 0.0]).mean(dim=1).tolist())
    assert sorted(table[table.kind == "noised fit"].draw.unique()) == [0, 1, 2]
    (row,) = rate_bands(spec=arguments, stages=[0.25], repeats=50, seed=0).to_dict("records")
    exact = fit_quadratic(PROBED, visit.losses(PROBED).mean(dim=1).tolist())
    assert row["slope_batch"] == pytest.approx(exact.slope)
    assert row["slope_rest"] == pytest.approx(
        fit_quadratic(PROBED, visit.rest(PROBED).mean(dim=1).tolist()).slope, rel=1e-6
    )
    assert row["q5"] <= row["q50"] <= row["q95"]
    run = table[table.kind == "run"].set_index("x").value
    threshold = visit.record.probe.difference_threshold
    assert run.threshold == threshold and run.before == visit.record.probe.eta_probed
    assert run.noise == pytest.approx(visit.split.sigma_loss * threshold / visit.expected_batch_size)


def test_bad_stages_and_methods():
    with pytest.raises(ValueError, match=r"stages must be shares of the run in \[0, 1\], got \[2\]"):
        next(visits(CONTRASTS, [0.1, 2]))
    with pytest.raises(ValueError, match="method must probe, got 'linear'"):
        next(visits(Spec(method="linear", learning_rate=0.02, steps=2), [0.0]))
    assert landscape.same_signs(fit_quadratic(PROBED, [0, 1, 3]), fit_quadratic(PROBED, [1, 2, 4]))
