"""What one probe releases, how noisy it is, and how it moves the learned state."""

import dataclasses
import io
import itertools
import math

import numpy as np
import pytest
import torch
from cases import each, pairs, together
from scipy import stats
from torch import nn
from twins import line_search, make_private, searching, sgd, thresholds_of

from hyfreedp import NoiseGenerator
from hyfreedp.experiments.baselines.contrasts import contrast_threshold
from hyfreedp.experiments.baselines.line_search import LINE_SEARCH, StudiedRule
from hyfreedp.rate_learner import LossSearch

FALSE_ALARM = 1e-6  # of each statistical test below; the seeds are fixed, so a test that passes always passes

LOSSES = torch.tensor([[0.4, 0.1, 0.9], [0.5, 0.3, 1.1], [0.8, 0.6, 1.6]], dtype=torch.float64)  # at w - hG, w, w + hG


def standard(values, what):
    """The values look like draws of N(0, 1): chi-square for the size, Kolmogorov-Smirnov for the shape."""
    values = np.ravel(values)
    size = stats.chi2(values.size).cdf((values**2).sum())
    assert FALSE_ALARM / 2 < size < 1 - FALSE_ALARM / 2, f"{what} has {values.std():.4f} times the stated deviation"
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM, f"{what} is not normal"


def uncorrelated(first, second):
    products = np.asarray(first) * np.asarray(second)
    assert abs(products.sum()) / math.sqrt(products.size) < stats.norm.isf(FALSE_ALARM / 2)


def independent_standard(*sequences, what):
    """Each sequence is N(0, 1), independent from step to step and of the others; together they show a 10 % error."""
    for values in sequences:
        standard(values, what)
        uncorrelated(values[1:], values[:-1])
    standard(np.concatenate(sequences), what)
    for first, second in itertools.combinations(sequences, 2):
        uncorrelated(first, second)
        uncorrelated(first[1:], second[:-1])
        uncorrelated(first[:-1], second[1:])


def constant_run(kind, size, *, loss=0.5, steps=1000, **settings):
    """Probes at every step of a run whose losses do not depend on the weights."""
    model = nn.Linear(2, 1).double()
    _, optimizer, _ = make_private(
        model,
        sgd(model),
        **searching(kind, "gen"),
        steps=steps,
        interval=1,
        decay="none",
        **({"allocation": "per_step", "target_epsilon": 3.0, "accountant": "rdp", "gamma": 1.2} | settings),
    )
    batch = [torch.ones(size, 2, dtype=torch.float64)]
    probes = [optimizer.step(lambda b: loss + 0 * model(b[0])[:, 0], batch).probe for _ in range(steps)]
    return optimizer.split.sigma_loss, probes


# -- the noise of a release --------------------------------------------------------------------------------------------


@together("size", [0, 13])
def test_released_losses_have_the_stated_noise(size):
    """Of 1,000 releases on empty or large batches: sigma_l R_l / 8, independent of the actual size."""
    sigma, probes = constant_run("losses", size)
    noise, slopes, curvatures = [], [], []
    for probe in probes:
        std = sigma * probe.loss_threshold / 8
        noise.append((probe.private_loss - min(0.5, probe.loss_threshold) * size / 8) / std)
        assert probe.slope_std == pytest.approx(std / (math.sqrt(2) * probe.distance))
        assert probe.curvature_std == pytest.approx(std * math.sqrt(6) / probe.distance**2)
        slopes.append(probe.slope / probe.slope_std)
        curvatures.append(probe.curvature / probe.curvature_std)
    standard(curvatures, "curvature")
    # The slope holds the difference of the outer losses; their sum is the curvature's share beyond the middle loss.
    sums = (math.sqrt(6) * np.array(curvatures) + 2 * np.array(noise)) / math.sqrt(2)
    independent_standard(noise, slopes, sums, what="private losses")


@together("size", [0, 13])
def test_released_contrasts_have_the_stated_noise(size):
    """Of 1,000 releases of zero contrasts: sigma_l R_d / 8 and sigma_l R_c / 8, independent of each other."""
    sigma, probes = constant_run("contrasts", size)
    for probe in probes:
        assert probe.slope_std == pytest.approx(sigma * probe.difference_threshold / 8 / (2 * probe.distance))
        assert probe.curvature_std == pytest.approx(sigma * probe.bend_threshold / 8 / probe.distance**2)
    slopes = [probe.slope / probe.slope_std for probe in probes]
    curvatures = [probe.curvature / probe.curvature_std for probe in probes]
    independent_standard(slopes, curvatures, what="private contrasts")


def laplace_difference_cdf(x):
    """Of the difference of two Laplace(1) numbers, whose density is (1 + |x|) exp(-|x|) / 4."""
    tail = (2 + np.abs(x)) * np.exp(-np.abs(x)) / 4
    return np.where(x < 0, tail, 1 - tail)


@together("kind", ["losses", "contrasts"])
def test_laplace_noise_has_the_stated_deviation(kind):
    """Kolmogorov-Smirnov of 1,000 slopes: the difference of two Laplace numbers, or one of them, at scale sigma_l."""
    sigma, probes = constant_run(kind, 0, loss_mechanism="laplace")
    slopes = np.array([probe.slope * 2 * probe.distance * 8 / sigma for probe in probes])
    stated = np.array([probe.slope_std * 2 * probe.distance * 8 / sigma for probe in probes])
    if kind == "losses":
        thresholds = np.array([probe.loss_threshold for probe in probes])
        np.testing.assert_allclose(stated, 2 * thresholds)  # two of deviation sqrt(2)
        reference = laplace_difference_cdf
        noise = slopes / thresholds
    else:
        thresholds = np.array([probe.difference_threshold for probe in probes])
        np.testing.assert_allclose(stated, math.sqrt(2) * 2 * thresholds)  # each contrast has sensitivity 1/2 of 2 R_d
        reference = stats.laplace.cdf
        noise = slopes / (2 * thresholds)
    assert stats.kstest(noise, reference).pvalue > FALSE_ALARM


def test_probe_noise_is_independent_of_the_gradients_noise():
    """Two streams from one seed: if they were one, the same numbers would be released twice."""
    model = nn.Linear(4, 1, bias=False).double()
    _, optimizer, _ = make_private(
        model,
        sgd(model),
        preset=LINE_SEARCH,
        step_rule=StudiedRule("gen"),
        steps=500,
        interval=1,
        decay="none",
        target_epsilon=3.0,
        accountant="rdp",
    )
    gradients, released = [], []
    for _ in range(500):
        before = model.weight.detach().clone()
        record = optimizer.step(lambda batch: model(batch[0])[:, 0], [torch.zeros(0, 4, dtype=torch.float64)])
        direction = (before - model.weight.detach()) / record.eta * 8
        gradients.append((direction / optimizer.split.sigma_gradient_probe).flatten().tolist())
        probe = record.probe
        released.append((probe.slope / probe.slope_std, probe.curvature / probe.curvature_std))
    gradients, released = np.array(gradients), np.array(released)
    standard(gradients, "gradient")
    for coordinate in gradients.T:
        for number in released.T:
            uncorrelated(coordinate, number)
            uncorrelated(coordinate[1:], number[:-1])
            uncorrelated(coordinate[:-1], number[1:])


# -- what is not finite ------------------------------------------------------------------------------------------------


@together(
    *pairs(
        bad=[math.nan, math.inf, -math.inf, 1e300], where=[(0,), (1,), (2,), (0, 1, 2)], kind=["losses", "contrasts"]
    ).args
)
def test_one_bad_record_moves_a_release_by_no_more_than_its_clip(kind, where, bad):
    """Whatever one record's losses are, the fit stays finite and within the sensitivity of the fit without it."""
    if kind == "losses" and bad == -math.inf:
        bad = math.nan  # negative losses are refused
    extended = torch.cat([LOSSES, torch.full((3, 1), 0.7, dtype=torch.float64)], dim=1)
    extended[list(where), -1] = bad
    fits = []
    for losses in (LOSSES, extended):
        probe = line_search(kind, "gen", eta=0.1, loss_threshold=1.0, contrast_thresholds=(0.3, 0.2))
        fits.append(probe.update(losses, 0.0, 4.0, None, held=False))
        assert all(math.isfinite(value) for value in (probe.eta, *thresholds_of(probe))) and probe.eta > 0
    slope, curvature = (abs(getattr(fits[0], name) - getattr(fits[1], name)) for name in ("slope", "curvature"))
    clips = (1.0, 2.0) if kind == "losses" else (0.3, 0.2)  # of d; and of c, where 2 L(w) counts twice
    assert slope <= clips[0] / 4 / (2 * 0.1) * (1 + 1e-9)
    assert curvature <= clips[1] / 4 / 0.1**2 * (1 + 1e-9)


# -- the learned state -------------------------------------------------------------------------------------------------


@together(*each(kind=["losses", "contrasts"], rule=["literal", "gen", "posterior", "anchored"]).args)
def test_the_result_says_what_was_done(kind, rule):
    """The record holds the clips that were used, not the next ones, and the rate before and after."""
    probe = line_search(kind, rule, eta=0.1, momentum=0.5, loss_threshold=3.0, contrast_thresholds=(2.0, 1.5))
    distance = probe.distance
    result = probe.update(LOSSES, 0.0, 3.0, None, held=False)
    assert (result.eta_probed, result.eta_next, result.distance) == (0.1, probe.eta, distance)
    assert result.accepted and probe.eta != 0.1 and result.reason
    # Nothing but what a checkpoint may hold: numpy's numbers do not load with weights_only=True.
    assert all(value is None or type(value) in (float, bool, str) for value in dataclasses.asdict(result).values())
    # The parabola through the three means.
    ahead, here, behind = LOSSES.mean(dim=1).tolist()
    assert result.slope == pytest.approx((behind - ahead) / (2 * distance))
    assert result.curvature == pytest.approx((behind + ahead - 2 * here) / distance**2)
    assert (result.slope_std, result.curvature_std) == (0.0, 0.0)
    if kind == "losses":
        assert (result.private_loss, result.loss_threshold) == (pytest.approx(here), 3.0)
    else:
        assert (result.private_loss, result.loss_threshold) == (None, None)
        assert (result.difference_threshold, result.bend_threshold) == (2.0, 1.5)


@together(*each(kind=["losses", "contrasts"], rule=["literal", "gen", "posterior", "anchored"]).args)
def test_a_flat_slope_does_not_end_the_run(kind, rule):
    """With b = 0 the rate b/a is 0, from where no probe could look any further: it must not be taken."""
    probe = line_search(kind, rule, eta=0.25, contrast_thresholds=(2.0, 2.0))
    losses = torch.tensor([[0.75], [0.5], [0.75]], dtype=torch.float64)
    for _ in range(2):
        result = probe.update(losses, 0.0, 1.0, None, held=False)
        assert result.slope == pytest.approx(0.0, abs=1e-12)
        assert probe.eta > 0 and probe.distance > 0


@together("kind", ["losses", "contrasts"])
def test_distance_follows_the_rule(kind):
    """Algorithm 1 probes at eta; the posterior rules further out where momentum repeats the step."""
    for rule in ("literal", "gen"):
        assert line_search(kind, rule, eta=0.3, momentum=0.9).distance == 0.3
    for rule in ("posterior", "anchored"):
        assert line_search(kind, rule, eta=0.3).distance == pytest.approx(0.3)
        far = line_search(kind, rule, eta=0.3, momentum=0.9)
        assert far.distance == pytest.approx(0.3 * math.sqrt(19))
        assert far.distance / far.eta > 4  # so that a step grown fourfold stays inside


@together(
    ("rule", "scale", "expected"),
    [("sum", 1.0, 0.5 + 1.9 / 3 + 1.0), ("previous", 1.0, 1.9 / 3), ("sum", 0.01, 0.1), ("previous", 50.0, 20.0)],
)
def test_the_loss_threshold_follows_the_released_losses(rule, scale, expected):
    """R_l of the next probe is the sum of the three private losses, or the middle one, within [0.1, 20]."""
    probe = LossSearch(rule="gen", eta=0.1, loss_threshold=100.0, loss_threshold_rule=rule)
    probe.update(LOSSES * scale, 0.0, 3.0, None, held=False)
    if rule == "sum" and scale == 1:
        expected = float(LOSSES.mean(dim=1).sum())
    assert probe.loss_threshold == pytest.approx(expected)


def test_the_contrasts_thresholds_follow_their_fractions_and_the_distance():
    """R_d grows with the distance, R_c with its square, each times the factor of its own fraction."""
    probe = line_search("contrasts", "gen", eta=0.1, contrast_thresholds=(0.6, 0.01))
    result = probe.update(LOSSES, 0.0, 3.0, None, held=False)
    growth = result.eta_next / 0.1
    assert growth != 1
    # d = 0.4, 0.5, 0.7, of which two are within 0.6; c = 0.2, 0.1, 0.3: none is within 0.01
    assert probe.contrast_thresholds[0] == pytest.approx(contrast_threshold(0.6, 2 / 3, scale=growth))
    assert probe.contrast_thresholds[1] == pytest.approx(contrast_threshold(0.01, 0.0, scale=growth**2))


@together("kind", ["losses", "contrasts"])
def test_thresholds_of_a_run_without_privacy_stay_infinite(kind):
    unclipped = {"loss_threshold": math.inf, "contrast_thresholds": (math.inf, math.inf)}
    probe = line_search(kind, "gen", eta=0.1, **unclipped)
    probe.update(LOSSES, 0.0, 3.0, None, held=False)
    assert set(thresholds_of(probe)) == {math.inf}


@each(rule=["literal", "gen", "posterior", "anchored"], kind=["losses", "contrasts"])
def test_state_goes_through_a_file_and_continues_exactly(kind, rule, generator):
    """The next probe of the restored one is the next probe of the original, bit by bit."""
    probe, other = (line_search(kind, rule, eta=0.1, momentum=0.9) for _ in range(2))
    for _ in range(3):
        probe.update(LOSSES, 0.3, 3.0, generator, held=False)
    file = io.BytesIO()
    torch.save(probe.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    results = []
    for one in (probe, other):
        noise = NoiseGenerator(9)
        results.append([one.update(LOSSES, 0.3, 3.0, noise, held=held) for held in (False, True)])
    assert results[0] == results[1]
    assert probe.state_dict() == other.state_dict()


@together(
    ("changes", "message"),
    [
        ({"eta": 0.0}, "initial_learning_rate must be finite and positive, got 0.0"),
        ({"eta": -1.0}, "initial_learning_rate must be finite and positive, got -1.0"),
        ({"eta": math.inf}, "initial_learning_rate must be finite and positive, got inf"),
        ({"eta": math.nan}, "initial_learning_rate must be finite and positive, got nan"),
        ({"rule": "greedy"}, r"step_rule must be .*'literal'.*got 'greedy'"),
        ({"loss_threshold_rule": "mean"}, r"loss_threshold_rule must be .*'sum'.*got 'mean'"),
    ],
)
def test_arguments_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        LossSearch(**({"rule": "gen", "eta": 0.1} | changes))
