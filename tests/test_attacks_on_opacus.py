"""The attacks on version 0.1.0 of this package, tried on Opacus 1.6.0 as it is ordinarily used: what it withstands, and what not.

Every test is named after the script of its attack and asserts what Opacus does, so that it fails when a later Opacus does otherwise.
"""

import copy
import io
import math
import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.layers import DPMultiheadAttention
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError
from scipy.stats import norm
from torch import nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

pytestmark = pytest.mark.slow

both_modes = pytest.mark.parametrize("mode", ["hooks", "ghost"])


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


class Run:
    """Opacus's ordinary call, and a step of it in either mode."""

    def __init__(self, model, data, batch_size, *, noise=1.0, clip=1.0, mode="hooks", criterion=None, **settings):
        self.engine = settings.pop("engine", None) or PrivacyEngine()
        self.plain = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        made = self.engine.make_private(
            module=model,
            optimizer=self.plain,
            criterion=criterion or nn.CrossEntropyLoss(),
            data_loader=DataLoader(data, batch_size=batch_size, sampler=settings.pop("sampler", None)),
            noise_multiplier=noise,
            max_grad_norm=clip,
            grad_sample_mode=mode,
            **settings,
        )
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.criterion = made[2] if mode == "ghost" else criterion or nn.CrossEntropyLoss()

    def loss(self, x, y):
        return self.criterion(self.model(x), y)

    def weights(self):
        return flat(self.optimizer.params)

    def release(self, x, y):
        """What one step publishes, taken from the weights before and after it: the noisy sum of clipped gradients."""
        before = self.weights()
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        self.optimizer.step()
        return (before - self.weights()) * self.optimizer.expected_batch_size

    def clipped_sum(self, loss):
        """The secret: what the optimizer adds its noise to. Only for runs with ``noise=0``."""
        self.optimizer.zero_grad()
        loss().backward()
        self.optimizer.pre_step()
        return flat(p.grad for p in self.optimizer.params) * self.optimizer.expected_batch_size

    def moved(self, loss, records):
        """How far the last of so many records moves the clipped sum, in units of the norm that it is clipped to."""
        less, more = (self.clipped_sum(lambda n=n: loss(n)) for n in (records - 1, records))
        return float((more - less).norm()) / self.optimizer.max_grad_norm


def points(records=100, features=8, classes=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, features, generator=generator)
    return TensorDataset(x, torch.randint(0, classes, (records,), generator=generator))


def raw_sum(model, weights, x, y):
    """The sum of clipped gradients at these weights, sample by sample and without Opacus."""
    model = copy.deepcopy(model)
    nn.utils.vector_to_parameters(weights, model.parameters())
    total = torch.zeros_like(weights)
    for sample in zip(x, y, strict=True):
        loss = F.cross_entropy(model(sample[0][None]), sample[1][None])
        gradient = flat(torch.autograd.grad(loss, list(model.parameters())))
        total += gradient * min(1.0, 1.0 / (float(gradient.norm()) + 1e-6))
    return total


# --- the source of the noise ---


def test_t1_seed32_a_search_from_one_published_step_gives_back_the_seed_the_batch_and_the_raw_sum():
    # Batches and noise come from PyTorch's global generator, which keeps 32 bits of whatever seed the process has, its
    # own from the operating system included. The search runs over a window here; nothing in it needs the window.
    data, model = points(), nn.Linear(8, 3)
    data.tensors[0][:, 0] = 0.0  # nobody has this feature: what is released of its weights is pure noise
    plain = copy.deepcopy(model)
    secret = 0x1234_5678_9ABC_DEF0
    torch.manual_seed(secret)
    run = Run(model, data, batch_size=20, noise=4.0)
    start = run.weights()
    batch = next(iter(run.loader))
    published = run.release(*batch)

    def replay(seed):
        torch.manual_seed(seed)
        torch.empty((), dtype=torch.int64).random_()  # the loader draws a seed for its workers
        members = torch.rand(100) < 0.2
        return members, torch.cat([torch.normal(0.0, 4.0, (24,)), torch.normal(0.0, 4.0, (3,))])

    low = secret & 0xFFFF_FFFF
    blank = slice(0, 24, 8)
    found = [s for s in range(low - 500, low + 500) if torch.allclose(replay(s)[1][blank], published[blank], atol=1e-4)]
    assert found == [low]
    members, noise = replay(low)
    assert torch.equal(data.tensors[0][members], batch[0])
    recovered = published - noise
    assert recovered.norm() > 5
    torch.testing.assert_close(recovered, raw_sum(plain, start, *batch), atol=2e-5, rtol=0)


def test_t1_seed32_a_noise_generator_of_ones_own_keeps_32_bits_as_well():
    seeds = 0x1234_5678_9ABC_DEF0, 0x9ABC_DEF0
    data, x, y = points(), torch.zeros(0, 8), torch.zeros(0, dtype=torch.long)
    one, other = (
        Run(nn.Linear(8, 3), data, 20, noise_generator=torch.Generator().manual_seed(seed)).release(x, y)
        for seed in seeds
    )
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_t9_default_seed_there_is_none_but_an_unseeded_generator_always_starts_at_the_same_one():
    def direct(generator):
        model = nn.Linear(8, 3)
        for p in model.parameters():
            p.grad_sample = torch.zeros(0, *p.shape)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        before = flat(model.parameters())
        DPOptimizer(
            sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1, generator=generator
        ).step()
        return before - flat(model.parameters())

    assert not torch.allclose(direct(None), direct(None), atol=1e-2)
    assert torch.Generator().initial_seed() == 67280421310721  # PyTorch's own constant
    torch.testing.assert_close(direct(torch.Generator()), direct(torch.Generator()), atol=1e-5, rtol=0)


def zeros(model):
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def first_step(engine, data, noise, seed=None, **settings):
    if seed is not None:
        torch.manual_seed(seed)  # as scripts do so that they can be repeated
    run = Run(zeros(nn.Linear(8, 3)), data, 20, noise=noise, engine=engine, **settings)
    batch = next(iter(run.loader))
    return run.release(*batch), batch


def test_t2_engine_reuse_gives_new_batches_and_noise_and_both_runs_are_accounted_for():
    engine, data = PrivacyEngine(accountant="rdp"), points()
    (one, batch), (other, batch2) = first_step(engine, data, 1.0), first_step(engine, data, 2.0)
    assert batch[0].shape != batch2[0].shape and not torch.allclose(one, other, atol=0.5)
    assert engine.accountant.history == [(1.0, 0.2, 1), (2.0, 0.2, 1)]
    with pytest.warns(UserWarning, match="Privacy accounting works per dataset"):
        first_step(engine, points(), 1.0)


@pytest.mark.parametrize("own", [False, True], ids=["global seed", "noise_generator"])
def test_t2_engine_reuse_with_the_usual_seed_before_each_run_gives_back_the_raw_sum(own):
    engine, data, releases = PrivacyEngine(), points(), []
    for noise in (1.0, 2.0):
        generator = {"noise_generator": torch.Generator().manual_seed(1)} if own else {}
        published, batch = first_step(engine, data, noise, seed=1, **generator)
        releases.append(published)
    recovered = 2 * releases[0] - releases[1]
    truth = raw_sum(nn.Linear(8, 3), torch.zeros(27), *batch)
    assert truth.norm() > 3
    torch.testing.assert_close(recovered, truth, atol=2e-5, rtol=0)


def secure_mode(monkeypatch):
    """Secure mode with a stand-in for the package it needs: Opacus's own part of it, with another generator."""
    stand_in = types.ModuleType("torchcsprng")
    stand_in.create_random_device_generator = lambda device: torch.Generator().manual_seed(7)
    monkeypatch.setitem(sys.modules, "torchcsprng", stand_in)
    return PrivacyEngine(secure_mode=True)


def test_secure_mode_needs_a_package_and_its_draws_do_not_follow_the_global_seed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchcsprng", None)
    with pytest.raises(ImportError, match="you must install the torchcsprng package"):
        PrivacyEngine(secure_mode=True)
    engine = secure_mode(monkeypatch)
    data = points()
    (one, batch), (other, batch2) = first_step(engine, data, 1.0, seed=1), first_step(engine, data, 1.0, seed=1)
    assert batch[0].shape != batch2[0].shape and not torch.allclose(one, other, atol=0.5)
    with pytest.raises(ValueError, match="Passing seed is prohibited in secure mode"):
        first_step(engine, data, 1.0, noise_generator=torch.Generator())


def pure_noise(engine=None, numbers=2**20):
    run = Run(nn.Linear(numbers, 1, bias=False), TensorDataset(torch.zeros(1, 1)), 1, engine=engine)
    nn.init.zeros_(run.optimizer.params[0])
    return run.release(torch.zeros(0, numbers), torch.zeros(0, dtype=torch.long))


def test_t6_tail_float32_noise_on_the_cpu_is_made_of_24_bit_numbers_and_ends_at_5_77_sigma(monkeypatch):
    # Box and Muller's radius squared is -2 log(u): of all u, only multiples of 2^-24 occur, so none is below that.
    pairs = pure_noise().double().view(-1, 2, 8)
    radius = pairs.square().sum(1).sqrt()
    grid = (2**24 * (-radius[radius > 4].square() / 2).exp()).numpy()
    assert len(grid) > 150 and abs(grid - grid.round()).max() < 0.05
    end = math.sqrt(2 * 24 * math.log(2))
    assert end == pytest.approx(5.768, abs=1e-3) and pairs.abs().max() < end
    # An output above the end is possible only with the record. Opacus calibrates for (8, 1e-5):
    sigma = get_noise_multiplier(target_epsilon=8.0, target_delta=1e-5, sample_rate=0.02, steps=250, accountant="rdp")
    delta = 1 - (1 - 0.02 * norm.sf(end - 1 / sigma)) ** 250
    assert 10 < delta / 1e-5 < 1000, delta
    # Secure mode adds four draws and halves the sum: the end is twice as far out.
    assert norm.sf(2 * end - 1 / sigma) < 1e-15
    assert pure_noise(secure_mode(monkeypatch)).std() == pytest.approx(1.0, abs=0.01)
