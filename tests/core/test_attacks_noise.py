"""The adversary against noise, reuse and resumption, written out: each of these attacks once gave back raw sums."""

import copy
import math
import random
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from twins import Made, flat, make_data, make_model, make_private, refused, sgd, train
from twins import cross_entropy as losses

from hyfreedp import NoiseGenerator, PrivacyEngine
from hyfreedp.errors import BudgetExhausted
from hyfreedp.gradients import AbadiClipping


def wire(data, **settings):
    model = make_model()
    return make_private(model, sgd(model), data, **({"preset": "fixed", "target_epsilon": 1.0, "steps": 20} | settings))


def steps_of(optimizer, loader, until):
    """Run on; the weights after each step, and the last batch."""
    seen = [(flat(optimizer.module), None)]
    train(optimizer, loader, until=until, after=lambda batch: seen.append((flat(optimizer.module), batch)))
    return [weights for weights, _ in seen], seen[-1][1]


DRAWS = {"torch": lambda: torch.rand(()).item(), "numpy": np.random.rand, "random": random.random}


def augmented(draw):
    """Each record is flipped at random, by one of the generators that people use."""
    x, y = make_data().tensors
    return Made(40, lambda i: (x[i] * (1 if draw() < 0.5 else -1), y[i]))


@pytest.mark.parametrize("kind", DRAWS)
def test_a_step_made_again_has_the_same_augmentation_and_so_the_same_noise(kind):
    np.random.seed(0)
    random.seed(0)
    data = augmented(DRAWS[kind])
    _, optimizer, loader = wire(data, seed=123)
    train(optimizer, loader, until=5)
    saved = copy.deepcopy(optimizer.state_dict())
    first, batch = steps_of(optimizer, loader, 6)  # published; then the process dies
    _, optimizer, loader = wire(data, seed=123)
    optimizer.load_state_dict(saved)
    if kind == "torch":
        torch.rand(3)  # as where another version of PyTorch draws once more
    again, other = steps_of(optimizer, loader, 6)
    assert torch.equal(batch[0], other[0]) and all(map(torch.equal, first, again))  # one release, and not two


OTHER_RUNS = {
    "clipping": {"clipping": AbadiClipping(5.0)},
    "rate learner": {"preset": "paper", "step_rule": "literal"},
    "learning rate": {"lr": 0.5},
    "optimizer's group 0": {"momentum": 0.9},
    "noise": {"secure_noise": True},
    "target_epsilon": {"target_epsilon": 2.0},
}


@pytest.mark.parametrize("field", OTHER_RUNS)
def test_a_state_of_another_run_is_refused_by_the_field_that_differs(field):
    def make(*, lr=0.1, momentum=0.0, secure_noise=False, **settings):
        model, engine = make_model(), PrivacyEngine(seed=0, secure_noise=secure_noise)
        base = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        return make_private(model, base, engine=engine, **({"preset": "fixed", "target_epsilon": 1.0} | settings))

    preset = {"preset": OTHER_RUNS[field]["preset"]} if "preset" in OTHER_RUNS[field] else {}
    _, optimizer, loader = make(**preset)
    train(optimizer, loader, until=2)
    saved = copy.deepcopy(optimizer.state_dict())
    (_, other, _), random = make(**OTHER_RUNS[field]), torch.get_rng_state()
    with refused(other, f"the state is of another run: {field} is .*, here .*. Make the run as the saved one was made"):
        other.load_state_dict(saved)
    assert torch.equal(torch.get_rng_state(), random)
    _, same, _ = make(**preset)
    same.load_state_dict(saved)
    assert same.ledger.steps == 2


def test_a_step_is_released_once_where_that_is_known():
    data = make_data()
    model, optimizer, loader = wire(data)
    train(optimizer, loader, until=4)
    saved = copy.deepcopy(optimizer.state_dict())
    first, _ = steps_of(optimizer, loader, 8)
    once = optimizer.epsilon_spent()
    optimizer.load_state_dict(saved)
    assert optimizer.ledger.steps == 4 and optimizer.epsilon_spent() == once  # steps 4 to 7 are out
    again, _ = steps_of(optimizer, loader, 8)  # the same again: the same releases
    assert optimizer.epsilon_spent() == once and all(map(torch.equal, first, again))
    optimizer.load_state_dict(saved)
    data.tensors[0].mul_(-1)
    with refused(optimizer, "step 4 was released before, with other data", BudgetExhausted):
        train(optimizer, loader)
    assert optimizer.epsilon_spent() == once
    assert all(parameter.grad is None for parameter in model.parameters())  # what was not released


def test_no_detour_forgets_what_was_released():
    """Over the state of another run, and over a state that fails to load."""
    data = make_data()
    _, optimizer, loader = wire(data)
    begin = copy.deepcopy(optimizer.state_dict())
    train(optimizer, loader, until=12)
    spent, other = optimizer.epsilon_spent(), wire(data, seed=1)[1]
    with refused(optimizer, r'Missing key\(s\) in state_dict: "0.weight", "0.bias"', RuntimeError):
        optimizer.load_state_dict(begin | {"model": {}})
    with refused(optimizer, "state is of another run, and this one has made 12 steps: .* load the state into what"):
        optimizer.load_state_dict(other.state_dict())
    other.load_state_dict(optimizer.state_dict())  # which has made none
    assert other.epsilon_spent() == spent
    optimizer.load_state_dict(begin)
    assert optimizer.epsilon_spent() == spent and optimizer.ledger.steps == 0


def test_a_batch_is_never_served_again_as_fresh():
    (model, optimizer, loader), used = wire(make_data(60), batch_size=2, steps=60), []
    with pytest.raises(RuntimeError, match=r"batch of step \d+ .*gave that of step \d+ last: .*empty ones too"):
        for _ in range(4):
            for batch in loader:
                if len(batch[1]) == 0:
                    continue
                optimizer.step(losses(model), batch)
                used.append(optimizer.ledger.steps)
    assert used == list(range(1, len(used) + 1))
    # After the mistake is mended the run goes on with the batch that was passed over.
    for batch in loader:
        assert len(batch[1]) == 0
        optimizer.step(losses(model), batch)
        break


def test_a_step_that_fails_once_it_is_counted_is_passed_over():
    """The loader gave its batch for ever, which the ledger refused."""
    _, optimizer, loader = wire(make_data(), steps=3)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(optimizer.rate_learner, "on_gradient", Mock(side_effect=MemoryError))
        train(optimizer, loader)
    train(optimizer, loader)
    assert optimizer.guarantee and [row["step"] for row in optimizer.history] == [1, 2]


def test_the_support_reaches_beyond_eight_sigma(monkeypatch):
    from hyfreedp.noise import cipher

    keystream = cipher.Keystream.take
    monkeypatch.setattr(cipher.Keystream, "take", lambda self, count: keystream(self, count).zero_())
    for dtype in (torch.float32, torch.float64):
        total = torch.zeros(4, dtype=dtype)
        NoiseGenerator(0).add_noise([total], 1.0)
        assert total.max() == pytest.approx(math.sqrt(2 * math.log(2**64)), rel=1e-6)  # 9.42, at the smallest uniform
