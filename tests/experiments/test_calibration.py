"""Probabilities: the calibration error by its definition, and a temperature that finds the lowest mean loss."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from artists import line
from scipy.optimize import brentq
from sklearn.calibration import calibration_curve

from hyfreedp import calibrate_noise
from hyfreedp.clipping import AutomaticClipping
from hyfreedp.experiments.store.paths import RESULTS
from hyfreedp.experiments.studies import calibration, calibration_figures
from hyfreedp.experiments.studies.calibration import LADDER
from hyfreedp.experiments.tasks.scores import calibration_error


def test_the_calibration_error_of_four_predictions_is_that_worked_out_by_hand():
    """Two bins: of confidences 0.6, 0.7 and 0.9 the second and third are right, of 0.4 none is."""
    probabilities = torch.tensor([[0.6, 0.2, 0.2], [0.3, 0.7, 0.0], [0.05, 0.05, 0.9], [0.3, 0.4, 0.3]])
    found = calibration_error(probabilities, torch.tensor([1, 1, 2, 0]), bins=2)
    above, below = abs(2 / 3 - (0.6 + 0.7 + 0.9) / 3), abs(0 - 0.4)
    assert found == pytest.approx(3 / 4 * above + 1 / 4 * below)


def test_a_confidence_on_an_edge_belongs_to_the_bin_below():
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.25, 0.0]], dtype=torch.float64)
    right, wrong = torch.tensor([0, 1]), torch.tensor([1, 0])
    apart = 0.5 * 0.5 + 0.5 * 0.75
    assert calibration_error(probabilities, right, bins=4) == pytest.approx(apart)  # (1/4, 1/2] and (1/2, 3/4]
    assert calibration_error(probabilities, wrong, bins=4) == pytest.approx(0.5 * 0.5 + 0.5 * 0.25)
    assert calibration_error(probabilities, right, bins=1) == pytest.approx(abs(0.5 - 0.625))


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


def test_the_ladder_is_searched_by_the_questions_that_are_paid_for(monkeypatch, too_sure):
    asked = []
    monkeypatch.setattr(calibration, "answers", lambda *_, by: asked.append(by) or torch.ones(1))
    top = calibration.private_temperature(*too_sure, by="slopes", sample_rate=0.1, sigma=0.0, seed=0)
    assert top == LADDER[-1] and len(asked) <= calibration.QUESTIONS
    assert 2**calibration.QUESTIONS >= len(LADDER)


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


def test_losses_of_the_class_shares_are_entropies():
    labels = torch.tensor([0, 0, 0, 1, 3])
    expected = -(0.6 * math.log(0.6) + 2 * 0.2 * math.log(0.2))
    assert calibration.base_rate_loss(labels) == pytest.approx(expected)


def test_three_labels_in_ten_are_of_the_other_class_and_a_fifth_of_the_digits_is_wrong():
    _, labels = calibration.coin().test
    assert labels.double().mean().item() == pytest.approx(0.69, abs=0.02)
    _, labels = calibration.minority().test
    assert labels.double().mean().item() == pytest.approx(0.1, abs=0.02)
    flipped, known = calibration.flipped_digits(), calibration.datasets.digits()
    for part in ("train", "test"):
        wrong = getattr(flipped, part)[1] != getattr(known, part)[1]
        assert wrong.double().mean().item() == pytest.approx(0.2, abs=0.06)


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


def test_a_record_is_gone_on_with(monkeypatch, workspace):
    table = workspace.results / "laptop" / "calibration.csv"
    runs = [("coin", "robust", 8.0, "default", 0, "validation"), ("coin", "fixed", 3.0, "flat 1", 1, "validation")]
    monkeypatch.setattr(calibration, "planned", lambda: iter(runs))
    monkeypatch.setattr(
        calibration,
        "run_of",
        lambda *run: pd.DataFrame([dict(zip(calibration.RUN, run, strict=True)) | {"fit": "none"}]),
    )
    assert len(calibration.record(table)) == 2
    kept = table.read_bytes()
    monkeypatch.setattr(calibration, "run_of", lambda *_: pytest.fail("it is there"))
    calibration.record(table)
    assert table.read_bytes() == kept


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_the_drift_rests_where_the_library_clips_it_to_zero():
    """On 70/30 labels, by the clipping that the library has and a root finder."""
    clip = AutomaticClipping()

    def push(logit):
        p = torch.sigmoid(torch.tensor(logit, dtype=torch.float64))
        short, long = (clip.factors(norm) * norm for norm in (1 - p, p))
        return (0.7 * short - 0.3 * long).item()

    logits = np.linspace(-2, 8, 201)
    expected = brentq(push, 0, 8)
    assert calibration_figures.resting(logits, np.array([push(z) for z in logits])) == pytest.approx(expected, abs=1e-3)
    p = 1 / (1 + np.exp(-logits))
    (told,) = calibration_figures.mechanism_findings(logits, {"none": 0.7 * (1 - p) - 0.3 * p})
    assert told == "none: rests at a logit of 0.8, probability 0.700, log loss 0.61 nats"


@pytest.mark.usefixtures("figure_style")
def test_the_study_is_drawn_as_it_is_recorded():
    rows = pd.read_csv(RESULTS / "laptop" / "calibration.csv")
    figure = calibration_figures.draw_study(rows)
    here = rows[(rows.evaluation == "test") & (rows.setting == "default") & (rows.fit == "slopes")]
    for axis, column in zip(figure.axes, ("log_loss", "calibration_error"), strict=True):
        values, _ = line(axis, "a temperature by slopes")
        assert values.tolist() == pytest.approx(
            [here[column][here.problem == name].mean() for name in calibration.PROBLEMS]
        )
