"""Probabilities: the calibration error by its definition, and a temperature that finds the lowest mean loss."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from sklearn.calibration import calibration_curve

from hyfreedp import calibrate_noise
from hyfreedp.experiments.studies import calibration
from hyfreedp.experiments.studies.calibration import LADDER
from hyfreedp.experiments.tasks.scores import calibration_error


def test_the_calibration_error_equals_scikit_learns_curve():
    generator = torch.Generator().manual_seed(0)
    probabilities = (2 * torch.randn(500, 4, generator=generator, dtype=torch.float64)).softmax(1)
    labels = torch.randint(0, 4, (500,), generator=generator)
    confidence, predicted = (value.numpy() for value in probabilities.max(1))
    right, said = calibration_curve(predicted == labels.numpy(), confidence, n_bins=15)
    counts, _ = np.histogram(confidence, np.linspace(0, 1, 16))
    expected = (counts[counts > 0] / 500 * abs(right - said)).sum()
    assert calibration_error(probabilities, labels) == pytest.approx(expected, abs=1e-12)


@pytest.fixture
def too_sure():
    """20,000 records with labels drawn from their own logits, and these logits times 4."""
    generator = torch.Generator().manual_seed(0)
    true = 1.5 * torch.randn(20_000, 3, generator=generator)
    return 4 * true, torch.multinomial(true.softmax(1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("sigma", [0.0, 20.0])
def test_slopes_find_the_temperature_of_the_lowest_mean_loss(too_sure, sigma):
    logits, labels = too_sure
    losses = [F.cross_entropy(logits / temperature, labels).item() for temperature in LADDER]
    best = LADDER[int(np.argmin(losses))]
    assert best == 4.0  # that by which they are too large
    for seed in range(5):
        found = calibration.private_temperature(logits, labels, by="slopes", sample_rate=0.2, sigma=sigma, seed=seed)
        assert abs(math.log2(found / best)) < 0.51, "more than one rung away"


def test_votes_make_seventy_thirty_labels_surer_still():
    """Seven in ten records have the label that is predicted, and each of them gains by a lower temperature."""
    logits = torch.tensor([[2.0, 0.0]]).expand(1000, 2)
    labels = (torch.arange(1000) % 10 >= 7).long()
    settings = {"sample_rate": 1.0, "sigma": 0.0, "seed": 0}
    assert calibration.private_temperature(logits, labels, by="votes", **settings) == LADDER[0]
    sound = calibration.private_temperature(logits, labels, by="slopes", **settings)
    assert sound == pytest.approx(2 / math.log(7 / 3), rel=2**0.25)


@pytest.mark.parametrize("by", ["votes", "slopes"])
def test_no_record_says_more_than_one(by):
    generator = torch.Generator().manual_seed(0)
    logits = 1e4 * torch.randn(2000, 5, generator=generator)
    labels = torch.randint(0, 5, (2000,), generator=generator)
    for rung in (0, 8, len(LADDER) - 2):
        said = calibration.answers(logits, labels, rung, by=by)
        assert said.abs().max() <= 1 and said.std() > 0.1


def test_a_temperature_costs_less_than_as_many_steps():
    plan = {"target_delta": 1e-5, "sample_rate": 0.05, "steps": 40, "probe": "none"}
    split = calibrate_noise(target_epsilon=3.0, **plan)
    longer = calibrate_noise(target_epsilon=3.0, **plan | {"steps": 40 + calibration.QUESTIONS})

    class Finished:
        pass

    run = Finished()
    run.split = split
    spent = calibration.epsilon_with_temperature(run)
    assert 3.0 < spent < 3.0 * longer.sigma / split.sigma
    assert spent < 3.1


def test_costs_are_paired_by_seed_and_the_worst_place_is_named_with_its_error():
    accuracies = {("a", 1.0): ((0.8, 0.7), (0.79, 0.71)), ("b", 1.0): ((0.9, 0.5), (0.89, 0.47))}
    rows = pd.DataFrame(
        [
            {"problem": problem, "epsilon": epsilon, "seed": seed, "setting": setting, "fit": "none", "accuracy": value}
            for (problem, epsilon), both in accuracies.items()
            for setting, values in zip(("default", "flat 1"), both, strict=True)
            for seed, value in enumerate(values)
        ]
    )
    cost = calibration.accuracy_costs(rows).loc["flat 1", "none"]
    assert cost["mean"] == pytest.approx((0 - 2) / 2) and cost.worst == pytest.approx(-2)
    assert cost.error == pytest.approx(np.std([-1, -3], ddof=1) / math.sqrt(2))
