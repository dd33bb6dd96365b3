"""The check that samples do not mix: when it is made, what it sees, and that it leaves nothing behind."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from cases import together
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from twins import by_hand, make_batches, make_model, sgd

from hyfreedp import NoiseGenerator
from hyfreedp.gradients.dependence import SAMPLES, check_samples_apart, steps_to_check


def network(*first):
    return nn.Sequential(*first, nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).train()


def batch_of(size):
    return [torch.randn(size, 8), torch.randint(3, (size,))]


def check(model, loss, batch, seed=0, narrowest=torch.float32):
    check_samples_apart(loss, batch, module=model, narrowest_type=narrowest, generator=NoiseGenerator(seed))


def apart(model):
    return lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none")


def mixed(model):
    return lambda b: F.cross_entropy(model(b[0] - b[0].mean(0)), b[1], reduction="none")


def counted(model):
    return lambda b: apart(model)(b) / (b[1][:, None] == b[1]).sum(1)


@given(st.integers(1, 100_000), st.integers(0, 50), st.integers(0, 10**6))
def test_the_first_step_and_a_few_random_later_ones_are_checked(steps, first, seed):
    first = min(first, steps - 1)
    found = steps_to_check(first, steps, NoiseGenerator(seed))
    assert found[0] == first and found == sorted(set(found)) and found[-1] < steps
    assert len(found) <= 6 and (len(found) - 1) * 100 <= steps + 100
    assert found == steps_to_check(first, steps, NoiseGenerator(seed))


def test_other_keys_choose_other_steps():
    assert len({tuple(steps_to_check(0, 1000, NoiseGenerator(seed))) for seed in range(20)}) == 20


@together("size", [2, 3, 16, 200])
def test_what_mixes_is_refused_and_what_does_not_is_not(size):
    for seed in range(10):
        model, batch = network(), batch_of(size)
        check(model, apart(model), batch, seed)
        with pytest.raises(ValueError, match="depend on which other samples"):
            check(model, mixed(model), batch, seed)


def test_no_more_than_a_few_samples_are_asked_for():
    model, asked, (batch,) = make_model(), [], make_batches((100,))
    optimizer = by_hand(model, sgd(model), preset="fixed", batch_size=40)

    def loss(batch):
        asked.append(len(batch[0]))
        return apart(model)(batch)

    optimizer.step(loss, batch)
    assert max(asked) == 100 == asked[-1] and asked.count(100) == 1 and max(asked[:-1]) == SAMPLES + 1


def test_weights_random_state_and_modes_are_put_back_bit_for_bit():
    model, batch = network(nn.Dropout(0.5)), batch_of(20)
    before = [p.detach().clone() for p in model.parameters()]
    random = torch.get_rng_state()
    for loss, refusal in ((apart(model), nullcontext()), (mixed(model), pytest.raises(ValueError, match="depend on"))):
        with refusal:
            check(model, loss, batch)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert torch.equal(random, torch.get_rng_state()) and all(layer.training for layer in model.modules())


@together("value", [float("nan"), float("inf"), 1e30, -1e30, 0.0])
def test_one_record_never_decides(value):
    """Whatever its loss does: here it even depends on how many others there are."""
    for seed in range(20):
        model, batch = network(), batch_of(12)
        batch[0][3] = 77.0

        def loss(b, model=model):
            odd = (b[0] == 77.0).all(1)
            return torch.where(odd, value + len(b[0]), apart(model)(b))

        check(model, loss, batch, seed)


@together("scale", [1e-8, 1.0, 1e8])
def test_the_unit_of_the_loss_does_not_matter(scale):
    model, batch = network(), batch_of(30)
    check(model, lambda b: scale * apart(model)(b), batch)
    with pytest.raises(ValueError, match="depend on"):
        check(model, lambda b: scale * mixed(model)(b), batch)


def test_a_model_that_fits_its_data_is_not_refused():
    """Its losses are mere rounding, which differs with the size of a batch."""
    model, batch = network(), batch_of(200)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(1500):
        optimizer.zero_grad()
        apart(model)(batch).mean().backward()
        optimizer.step()
    assert apart(model)(batch).median() < 1e-3
    for seed in range(20):
        check(model, apart(model), batch, seed)
        with pytest.raises(ValueError, match="depend on"):
            check(model, mixed(model), batch, seed)


@together("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_less_than_mixing_moves(dtype):
    model = network(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())

    def halved(loss):
        def run(batch):
            with torch.autocast("cpu", dtype=dtype):
                return loss(model)(batch).float()

        return run

    for seed in range(20):
        batch = batch_of(64)
        check(model, halved(apart), batch, seed, dtype)
        with pytest.raises(ValueError, match="depend on"):
            check(model, halved(counted), batch, seed, dtype)
