"""The most telling attacks on an early version of this package, tried on Opacus 1.6.0 as it is ordinarily used.

Every test is named after the script of its attack and asserts what Opacus does, so a later Opacus may make it fail. The
other rows of the table in docs/pitfalls.md were tests of version 0.1.0.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
        scale = self.optimizer.expected_batch_size if self.optimizer.loss_reduction == "mean" else 1
        return flat(p.grad for p in self.optimizer.params) * scale

    def moved(self, loss, records):
        """How far the last of so many records moves the clipped sum, in units of the norm that it is clipped to."""
        less, more = (self.clipped_sum(lambda n=n: loss(n)) for n in (records - 1, records))
        return float((more - less).norm()) / self.optimizer.max_grad_norm


def zeros(model):
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


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


def test_t1_seed32_a_search_from_one_published_step_gives_back_the_seed_the_batch_and_the_raw_sum():
    # Batches and noise come from PyTorch's global generator, which keeps 32 bits of the process's seed. The search runs
    # over a window here, which nothing in it needs.
    data, model = points(), nn.Linear(8, 3)
    data.tensors[0][:, 0] = 0.0  # nobody has this feature: what is released of its weights is pure noise
    plain = copy.deepcopy(model)
    secret = 0x1234_5678_9ABC_DEF0
    torch.manual_seed(secret)
    run = Run(model, data, batch_size=20, noise=4.0)
    start = run.weights()
    batch = next(iter(run.loader))
    published = run.release(*batch)

    generator = torch.Generator()

    def replay(seed):
        generator.manual_seed(seed)
        torch.empty((), dtype=torch.int64).random_(generator=generator)  # the loader draws a seed for its workers
        members = torch.rand(100, generator=generator) < 0.2
        return members, torch.cat([torch.normal(0.0, 4.0, (size,), generator=generator) for size in (24, 3)])

    low = secret & 0xFFFF_FFFF
    blank = slice(0, 24, 8)
    found = [s for s in range(low - 500, low + 500) if torch.allclose(replay(s)[1][blank], published[blank], atol=1e-4)]
    assert found == [low]
    members, noise = replay(low)
    assert torch.equal(data.tensors[0][members], batch[0])
    recovered = published - noise
    assert recovered.norm() > 3
    torch.testing.assert_close(recovered, raw_sum(plain, start, *batch), atol=2e-5, rtol=0)


@both_modes
def test_t3_bn_frozen_batch_norm_is_accepted_and_wakes_up_with_model_train(mode):
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)).train()
    model[0].requires_grad_(False).eval()
    assert not ModuleValidator.validate(model) and isinstance(ModuleValidator.fix(model)[0], nn.BatchNorm1d)
    data = points(200)
    x, y = data.tensors
    run = Run(model, data, 200, noise=0.0, mode=mode)
    x[-1] *= 1e3
    assert run.moved(lambda n: run.loss(x[:n], y[:n]), 200) < 1.01
    run.model.eval()
    run.model.train()
    model[0].reset_running_stats()
    run.clipped_sum(lambda: run.loss(x[:50], y[:50]))
    told = run.model.state_dict()["_module.0.running_mean"] / 0.1
    torch.testing.assert_close(told, x[:50].mean(0))  # the raw mean, in what is saved
    assert run.moved(lambda n: run.loss(x[:n], y[:n]), 200) > 10


@pytest.mark.parametrize("mode, least, most", [("hooks", 0.99, 1.01), ("ghost", 1e5, math.inf)])
def test_ghost_clipping_of_a_loss_of_one_column_does_not_clip(mode, least, most):
    # Found on the way: a loss of shape (n, 1), as regression has it, times clipping factors of shape (n,) is (n, n).
    x, y = torch.randn(100, 8), torch.zeros(100, 1)
    y[-1] = 1e4
    run = Run(nn.Linear(8, 1), TensorDataset(x, y), 100, noise=0.0, mode=mode, criterion=nn.MSELoss())
    assert least < run.moved(lambda n: run.loss(x[:n], y[:n]), 100) < most
