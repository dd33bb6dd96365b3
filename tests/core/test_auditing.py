"""Audits of a script: the bound is that of the theorem and valid, broken scripts are refuted, a sound one is not."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import TensorDataset
from twins import cross_entropy, make_private, train

import hyfreedp
from hyfreedp import auditing, step_batch


def slow_p_value(right, guesses, canaries, epsilon, delta):
    """The theorem, sum by sum."""
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))
    each = [math.comb(guesses, k) * chance**k * (1 - chance) ** (guesses - k) for k in range(guesses + 1)]

    def at_least(v):
        return sum(each[max(v, 0) :])

    largest = max((at_least(right - i) - at_least(right)) / i for i in range(1, canaries + 1))
    return min(1.0, at_least(right) + 2 * canaries * delta * largest)


COUNTS = [(0, 0, 5), (0, 4, 4), (3, 4, 10), (30, 40, 100), (40, 40, 60)]


@pytest.mark.parametrize(("counts", "epsilon", "delta"), [*itertools.product(COUNTS, [0.0, 3.0], [0.0, 1e-4, 0.1])])
def test_p_value_is_that_of_the_theorem(counts, epsilon, delta):
    right, guesses, canaries = counts
    found = auditing.p_value(right, guesses, canaries, epsilon, delta)
    assert found == pytest.approx(slow_p_value(right, guesses, canaries, epsilon, delta), rel=1e-9, abs=1e-12)


def test_bound_without_delta_is_clopper_and_pearsons():
    """Then right guesses are at most binomial, and epsilon is the logit of their chance."""
    chance = stats.binomtest(180, 200).proportion_ci(0.9, method="exact").low
    assert auditing.epsilon_bound(180, 200, 1000, 0.0) == pytest.approx(math.log(chance / (1 - chance)), abs=1e-6)
    chance = 0.05 ** (1 / 100)  # all of a hundred right
    assert auditing.epsilon_bound(100, 100, 100, 0.0) == pytest.approx(math.log(chance / (1 - chance)), abs=1e-6)
    assert auditing.epsilon_bound(100, 200, 200, 0.0) == 0


def randomized(epsilon, delta, random):
    """A script that tells of each canary by randomized response, and with probability delta the truth: tight."""

    def train(data):
        model = torch.zeros(len(CANARIES))
        yield epsilon, lambda batch: -model[batch]
        included = np.isin(CANARIES, [data[place] for place in range(len(data))])
        told = included ^ ((random.random(len(model)) > 1 / (1 + math.exp(-epsilon))) & (random.random() > delta))
        model += torch.from_numpy(told + random.random(len(model)))

    return train


CANARIES = range(200)


@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_the_bound_of_randomized_response_is_valid(delta):
    random, options = np.random.default_rng(4), {"delta": delta, "confidence": 0.8}
    found = [hyfreedp.audit(randomized(1.0, delta, random), [], CANARIES, seed=seed, **options) for seed in range(50)]
    assert 0 < sum(one.refuted for one in found) <= 22  # 10 on average; more than 22 with probability 1e-4
    assert np.mean([one.lower_bound for one in found]) > (0.4 if delta == 0 else 0.2)


def some_data(canaries):
    """Records of noise, and canaries with a bright number of their own, under a random label."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(400, 10, generator=generator), torch.zeros(400, canaries)], dim=1)
    bright = torch.cat([torch.zeros(canaries, 10), 8 * torch.eye(canaries)], dim=1)
    labels = torch.randint(2, (400 + canaries,), generator=generator)
    return TensorDataset(x, labels[:400]), [*zip(bright, labels[400:], strict=True)]


def script(data, copies=1):
    """As on the front page, with dropout; as a fault some ``copies`` of each record."""
    data = [record for record in data for _ in range(copies)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(len(data[0][0]), 2))
    base, budget = torch.optim.AdamW(model.parameters(), lr=0.02), {"target_epsilon": 1.0, "target_delta": 1e-5}
    _, private, loader = make_private(model, base, data, batch_size=len(data) // 5, **budget, steps=15, preset="fixed")
    yield private, cross_entropy(model)
    assert all(layer.training for layer in model.modules())
    train(private, loader)


def audited(train, **options):
    return hyfreedp.audit(train, *some_data(200), delta=1e-5, seed=0, **options)


def test_a_sound_script_is_not_refuted():
    found = audited(script)
    assert found.lower_bound < found.claimed <= 1.0 < found.ceiling and not found.refuted
    assert "Not refuted, which proves nothing" in str(found)


def test_noise_left_out_is_refuted(monkeypatch):
    def mean(sums, *_, expected_batch_size, **__):
        torch._foreach_div_(sums, expected_batch_size)

    monkeypatch.setattr(step_batch, "privatize_gradient", mean)
    found = audited(script)
    assert found.refuted and found.lower_bound > 1.5 > 1 >= found.claimed
    assert "claimed 1.00, found at least" in str(found) and "Refuted: " in str(found)


def test_records_that_are_repeated_are_refuted():
    assert audited(lambda data: script(data, copies=20)).refuted


@pytest.mark.parametrize(
    ("train", "error", "message"),
    [
        (lambda data: (_ for _ in ()), TypeError, "train must yield once.*it gave NoneType"),
        (lambda data: (1.0 for _ in "a"), TypeError, "yield optimizer, loss; it gave float"),
        (lambda data: ((1.0, lambda one: one.expand(2)) for _ in "a"), ValueError, r"one number .* shape \(2,\)"),
    ],
)
def test_scripts_of_another_form_are_refused_by_name(train, error, message):
    with pytest.raises(error, match=message):
        hyfreedp.audit(train, [], [float(number) for number in CANARIES], delta=0.0)
