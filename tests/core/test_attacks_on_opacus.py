"""The attacks on version 0.1.0 of this package, tried on Opacus 1.6.0 as it is ordinarily used.

Every test is named after the script of its attack and asserts what Opacus does, so a later Opacus may make it fail.
"""

import copy
import io
import math
import random
import sys
import types

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


# --- the source of the noise ---


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


@pytest.mark.parametrize("seed", [0x1234_5678_9ABC_DEF0, None])
def test_t1_seed32_a_noise_generator_of_ones_own_keeps_32_bits_as_well(seed):
    generator = torch.Generator()
    seed = generator.seed() if seed is None else seed  # None: drawn from the operating system
    data, x, y = points(), torch.zeros(0, 8), torch.zeros(0, dtype=torch.long)
    one, other = (
        Run(zeros(nn.Linear(8, 3)), data, 20, noise_generator=torch.Generator().manual_seed(s)).release(x, y)
        for s in (seed, seed & 0xFFFF_FFFF)
    )
    assert seed > 2**32 and one.norm() > 1
    torch.testing.assert_close(one, other)


def test_t9_default_seed_there_is_none_but_an_unseeded_generator_always_starts_at_the_same_one():
    def direct(generator):
        model = nn.Linear(8, 3)
        for p in model.parameters():
            p.grad_sample = torch.zeros(0, *p.shape)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        before = flat(model.parameters())
        DPOptimizer(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1, generator=generator).step()
        return before - flat(model.parameters())

    assert not torch.allclose(direct(None), direct(None), atol=1e-2)
    assert torch.Generator().initial_seed() == 67280421310721  # PyTorch's own constant
    torch.testing.assert_close(direct(torch.Generator()), direct(torch.Generator()), atol=1e-5, rtol=0)


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
    zeros(run.model)
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
    assert delta / 1e-5 == pytest.approx(7.1, rel=0.1)
    # Secure mode adds four draws and halves the sum: the end is twice as far out.
    assert norm.sf(2 * end - 1 / sigma) < 1e-15
    assert pure_noise(secure_mode(monkeypatch)).std() == pytest.approx(1.0, abs=0.01)


# --- half precision ---


@pytest.mark.parametrize(
    "mode, reduction, half, least, most",
    [
        ("hooks", "mean", False, 0.99, 1.01),
        ("ghost", "mean", False, 0.99, 1.01),
        ("hooks", "mean", True, 1.2, 2.0),  # the loss's division by 1,000 or 999 rounds all gradients differently
        ("hooks", "sum", True, 0.99, 1.01),  # sums of samples are in float32
        ("ghost", "sum", True, 1.4, 20.0),  # sums of samples are in bfloat16
    ],
)
def test_t5_bf16_autocast_lets_one_of_a_thousand_like_records_move_the_sum(mode, reduction, half, least, most):
    x = torch.randn(1, 64).expand(1000, 64)
    y = torch.zeros(1000, dtype=torch.long)
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    settings = {"mode": mode, "criterion": criterion, "loss_reduction": reduction}
    run = Run(nn.Linear(64, 10), TensorDataset(x, y), 1000, noise=0.0, **settings)

    def loss(n):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            out = run.model(x[:n])
        return run.criterion(out.float(), y[:n])

    assert least < run.moved(loss, 1000) < most


@pytest.mark.parametrize("mode, finite", [("hooks", False), ("ghost", True)])
def test_t13b_fp16_autocast_overflows_for_one_finite_record_and_the_weights_tell_of_it(mode, finite):
    data = TensorDataset(torch.randn(100, 64), torch.randn(100))
    for target in (1.0, 1e5):
        data.tensors[1][7] = target
        run = Run(nn.Linear(64, 1), data, 100, mode=mode, criterion=nn.MSELoss())
        with torch.autocast("cpu", dtype=torch.float16):
            out = run.model(data.tensors[0])
        run.criterion(out.float()[:, 0], data.tensors[1]).backward()
        run.optimizer.step()
        assert bool(run.weights().isfinite().all()) is (finite or target == 1.0)


def on_grid(dtype, step, present, *, engine=None, size=60_000, repeats=20):
    """Of the released numbers near zero, which share is a multiple of ``step``: one share per release."""
    run = Run(
        nn.Linear(size, 1, bias=False).to(dtype),
        TensorDataset(torch.zeros(4, size), torch.zeros(4)),
        4,
        noise=3.73,
        criterion=nn.L1Loss(),
        engine=engine,
    )
    x = torch.zeros(4, size, dtype=dtype)
    if present:
        x[0] = -1.0
    shares = []
    for _ in range(repeats):
        zeros(run.model)
        near = run.release(x, torch.full((4, 1), -1.0, dtype=dtype)).double()
        near = near[near.abs() < 2**-9] / step
        assert len(near) > 8
        shares.append(float((near == near.round()).double().mean()))
    return shares


def test_t16c_bf16_parameters_one_release_tells_whether_a_record_is_there():
    # Noise of bfloat16 is finely spaced near zero and coarsely around the record's share of 1 / sqrt(60,000), so sums
    # of the two near zero are coarsely spaced. The noise multiplier is that of (1, 1e-5) for a single step.
    assert max(on_grid(torch.bfloat16, 2**-16, present=False)) < 0.7
    assert min(on_grid(torch.bfloat16, 2**-16, present=True)) == 1.0


def test_t16c_float32_the_same_a_known_attack_without_secure_mode():
    assert max(on_grid(torch.float32, 2**-32, present=False)) < 0.7
    assert min(on_grid(torch.float32, 2**-32, present=True)) == 1.0


@pytest.mark.parametrize("dtype, step", [(torch.bfloat16, 2**-16), (torch.float32, 2**-24)])
def test_t16c_secure_mode_sums_four_draws_in_the_same_precision_and_is_told_all_the_same(dtype, step, monkeypatch):
    without, present = (on_grid(dtype, step, present=p, engine=secure_mode(monkeypatch)) for p in (False, True))
    if dtype is torch.bfloat16:
        assert max(without) < 0.7 and min(present) == 1.0
    else:  # the other way round: the sum of four numbers of size 1 is coarse, the record's share is fine
        assert min(without) > 0.5 and max(present) < 0.2


# --- models and losses in which samples mix ---


@both_modes
def test_t3_bn_trainable_batch_norm_is_refused_and_replaced_on_request(mode):
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(UnsupportedModuleError, match="BatchNorm cannot support training with differential privacy"):
        Run(model, points(), 50, mode=mode)
    assert isinstance(ModuleValidator.fix(model)[0], nn.GroupNorm)


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


@both_modes
def test_t10_buffer_that_collects_raw_data_is_accepted_in_a_module_without_parameters(mode):
    class Average(nn.Module):
        def __init__(self, parameter):
            super().__init__()
            self.register_buffer("ema", torch.zeros(8))
            if parameter:
                self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            self.ema.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return x

    with pytest.raises(NotImplementedError, match="trainable layer with buffers"):
        Run(nn.Sequential(Average(True), nn.Linear(8, 3)), points(), 50, mode=mode)
    data = points()
    run = Run(nn.Sequential(Average(False), nn.Linear(8, 3)), data, 50, mode=mode)
    run.release(*data.tensors)
    torch.testing.assert_close(run.model.state_dict()["_module.0.ema"] / 0.1, data.tensors[0].mean(0))


@both_modes
def test_t7_mix_batch_centred_inputs_are_accepted(mode):
    data = points(200, 10)
    x, y = data.tensors
    x[-1] *= 1e4
    run = Run(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3)), data, 200, noise=0.0, mode=mode)
    assert run.moved(lambda n: run.loss(x[:n], y[:n]), 200) < 1.01
    assert run.moved(lambda n: run.loss(x[:n] - x[:n].mean(0), y[:n]), 200) > 10


def test_t7_mix_class_weights_of_the_batch_are_accepted():
    x, y = 0.1 * torch.randn(200, 10), torch.zeros(200, dtype=torch.long)
    y[-1] = 1  # the only one of its class
    run = Run(nn.Linear(10, 3), TensorDataset(x, y), 200, noise=0.0)

    def loss(n):
        weights = 1 / torch.bincount(y[:n], minlength=3).clamp(min=1)
        return F.cross_entropy(run.model(x[:n]), y[:n], weight=weights)

    assert run.moved(loss, 200) > 50


def test_t7b_tokens_a_loss_divided_by_the_tokens_of_the_batch_is_accepted():
    ids = torch.randint(0, 50, (1, 128)).expand(400, 128)
    real = torch.arange(128) < torch.tensor([2] * 399 + [128])[:, None]
    run = Run(
        nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)), TensorDataset(ids, real), 400, noise=0.0, clip=5.0
    )

    def loss(n):
        losses = F.cross_entropy(run.model(ids[:n, :-1]).mT, ids[:n, 1:], reduction="none") * real[:n, 1:]
        return losses.sum() / real[:n, 1:].sum()

    assert run.moved(loss, 400) > 10


@both_modes
def test_wrong_batch_attention_with_the_default_order_of_axes_is_accepted(mode):
    class Net(nn.Module):
        def __init__(self, **settings):
            super().__init__()
            self.inp, self.out = nn.Linear(20, 16), nn.Linear(16, 5)
            self.att = DPMultiheadAttention(16, 2, **settings)

        def forward(self, x):
            h = self.inp(x)
            return self.out((h + self.att(h, h, h)[0]).mean(1))

    x = torch.randn(7, 20) + 0.3 * torch.randn(128, 7, 20)
    x, y = torch.cat([x, -100 * x[:1]]), torch.tensor([0] * 128 + [3])
    right, wrong = (Run(net, TensorDataset(x, y), 128, noise=0.0, mode=mode) for net in (Net(batch_first=True), Net()))
    assert right.moved(lambda n: right.loss(x[:n], y[:n]), 129) < 1.01
    assert wrong.moved(lambda n: wrong.loss(x[:n], y[:n]), 129) > 50


@both_modes
def test_t21_check_gap_hand_written_batch_norm_behind_a_zero_gate_is_accepted(mode):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.gate, self.out = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 2)
            nn.init.zeros_(self.gate.weight)

        def forward(self, x):
            h = self.f(x)
            h = (h - h.mean(0)) / (h.std(0) + 1e-3)
            return self.out(x + self.gate(torch.tanh(h)))

    data = points(200, classes=2)
    x, y = data.tensors
    x[-1] *= 1e3
    model = Block()
    run = Run(model, data, 200, noise=0.0, mode=mode)
    closed = run.moved(lambda n: run.loss(x[:n], y[:n]), 200)
    nn.init.normal_(model.gate.weight)
    assert 2 < closed < 10 < run.moved(lambda n: run.loss(x[:n], y[:n]), 200)


@both_modes
def test_t21_check_gap_samples_permuted_between_layers_are_accepted(mode):
    class Sort(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 64), nn.Linear(64, 2)

        def forward(self, x):
            order = x[:, 0].argsort()
            return self.b(torch.tanh(self.a(x[:, 1:]))[order])[order.argsort()]

    data = points(50, 5, classes=2)
    x, y = data.tensors
    x[::2] *= 30
    x[:, 0] = torch.arange(50)
    x[-1, 0] = -1.0  # with this record every other one is shifted against itself
    run = Run(Sort(), data, 50, noise=0.0, mode=mode)
    assert run.moved(lambda n: run.loss(x[:n], y[:n]), 50) > 1.5


@pytest.mark.parametrize("mode, least, most", [("hooks", 0.99, 1.01), ("ghost", 1e5, math.inf)])
def test_ghost_clipping_of_a_loss_of_one_column_does_not_clip(mode, least, most):
    # Found on the way: a loss of shape (n, 1), as regression has it, times clipping factors of shape (n,) is (n, n).
    x, y = torch.randn(100, 8), torch.zeros(100, 1)
    y[-1] = 1e4
    run = Run(nn.Linear(8, 1), TensorDataset(x, y), 100, noise=0.0, mode=mode, criterion=nn.MSELoss())
    assert least < run.moved(lambda n: run.loss(x[:n], y[:n]), 100) < most


@both_modes
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_one_bad_record_makes_the_weights_nan(bad, mode):
    data = points()
    data.tensors[0][7] = bad
    model = nn.Linear(8, 3)
    nn.init.ones_(model.weight)
    run = Run(model, data, 100, mode=mode)
    run.release(*data.tensors)
    assert run.weights().isnan().any() and len(run.engine.accountant) == 1


# --- what is drawn, released and counted ---


def test_t4_subset_a_sampler_is_dropped_and_records_outside_it_are_trained_on():
    data = TensorDataset(torch.arange(1000.0)[:, None], torch.zeros(1000))
    run = Run(nn.Linear(1, 2), data, 10, sampler=SubsetRandomSampler(range(100)))  # without a warning
    seen = {int(record) for _ in range(2) for x, _ in run.loader for record in x}
    assert run.loader.sample_rate == 0.1 and run.optimizer.expected_batch_size == 100
    assert sum(record >= 100 for record in seen) > 700


def test_t15_skip_empty_batches_are_not_drawn_twice_but_skipping_them_goes_unnoticed():
    data = TensorDataset(torch.randn(60, 8), torch.randint(0, 3, (60,)))
    run = Run(nn.Linear(8, 3), data, 2)
    batches = [(x, y) for x, y in run.loader]
    assert len(batches) == 30
    taken = [run.release(x, y) for x, y in batches if len(y)]
    assert 0 < len(taken) < 30
    assert run.engine.accountant.history == [(1.0, 1 / 30, len(taken))]
    members = [tuple(x.flatten().tolist()) for x, y in batches if len(y) > 1]
    assert len(set(members)) == len(members)


@both_modes
def test_t15_skip_an_empty_batch_that_is_not_skipped_is_pure_noise_and_counted(mode):
    run = Run(nn.Linear(1000, 10), points(), 20, mode=mode)
    published = run.release(torch.zeros(0, 1000), torch.zeros(0, dtype=torch.long))
    assert published.std() == pytest.approx(1.0, abs=0.05) and len(run.engine.accountant) == 1


def test_t15_skip_the_sampler_of_distributed_training_skips_empty_batches_itself(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    sampler = DistributedUniformWithReplacementSampler(total_size=60, sample_rate=1 / 30)
    assert len(sampler) == 30 > len(list(sampler))


@both_modes
def test_old_optimizer_variable_steps_without_noise_clipping_or_account(mode):
    data, model = points(), nn.Linear(8, 3)
    data.tensors[0].mul_(100.0)
    before = flat(model.parameters())
    expected = flat(torch.autograd.grad(F.cross_entropy(model(data.tensors[0]), data.tensors[1]), model.parameters()))
    run = Run(model, data, 100, mode=mode)
    run.loss(*data.tensors).backward()
    run.plain.step()
    moved = before - run.weights()
    if mode == "hooks":
        torch.testing.assert_close(moved, expected, atol=1e-4, rtol=1e-4)
    else:  # the sum of clipped gradients, without noise
        torch.testing.assert_close(moved, raw_sum(nn.Linear(8, 3), before, *data.tensors), atol=1e-4, rtol=1e-4)
    assert len(run.engine.accountant) == 0


# --- resuming ---


class Flipped(Dataset):
    """A random flip by the standard library's generator, whose state PyTorch does not hold."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return random.choice((-1, 1)) * x, y


def start(data, checkpoint=None, *, seed=None, model=None, batch_size=20, **settings):
    """The head of a training script, which starts or resumes."""
    if seed is not None:
        torch.manual_seed(seed)
    run = Run(model or nn.Linear(8, 3), data, batch_size, **settings)
    if checkpoint is not None:
        saved = run.engine.load_checkpoint(path=io.BytesIO(checkpoint), module=run.model, optimizer=run.optimizer)
        if "rng" in saved:
            torch.set_rng_state(saved["rng"])
    return run


def save(run, **extra):
    file = io.BytesIO()
    run.engine.save_checkpoint(path=file, module=run.model, optimizer=run.optimizer, checkpoint_dict=extra)
    return file.getvalue()


def step(run):
    """The weights before a step, its batch and what it published."""
    weights, batch = run.weights(), next(iter(run.loader))
    return weights, batch, run.release(*batch)


def test_t8b_resume_releases_with_new_noise_and_forgets_what_was_released_after_the_checkpoint():
    data = points()
    run = start(data)
    step(run)
    checkpoint = save(run)
    _, _, one = step(run)
    resumed = start(data, checkpoint)
    _, _, other = step(resumed)
    assert (one - other).std() > 1
    assert resumed.engine.accountant.history == [(1.0, 0.2, 2)]  # three were published


def test_t8b_resume_by_a_script_that_sets_its_seed_repeats_the_noise_of_its_first_step_on_other_weights():
    data = points()
    run = start(data, seed=123, noise=4.0)
    weights, batch, one = step(run)
    step(run)
    again, batch2, other = step(start(data, save(run), seed=123, noise=4.0))
    assert torch.equal(batch[0], batch2[0]) and not torch.equal(weights, again)
    truth = raw_sum(nn.Linear(8, 3), weights, *batch) - raw_sum(nn.Linear(8, 3), again, *batch2)
    assert truth.norm() > 0.1
    torch.testing.assert_close(one - other, truth, atol=2e-5, rtol=0)


@pytest.mark.parametrize("augmented", [False, True])
def test_t8b_resume_with_the_saved_state_of_the_generator_releases_the_same_step_again(augmented):
    random.seed(0)
    data = Flipped(points()) if augmented else points()
    run = start(data, noise=4.0)
    step(run)
    checkpoint = save(run, rng=torch.get_rng_state())
    weights, batch, one = step(run)
    again, batch2, other = step(start(data, checkpoint, noise=4.0))
    assert torch.equal(weights, again) and torch.equal(batch[0].abs(), batch2[0].abs())
    truth = raw_sum(nn.Linear(8, 3), weights, *batch) - raw_sum(nn.Linear(8, 3), weights, *batch2)
    assert bool(truth.norm() > 3) is augmented
    torch.testing.assert_close(one - other, truth, atol=2e-5, rtol=0)


def test_t8c_resume_with_smaller_physical_batches_repeats_the_noise_under_other_dropout():
    data = points()

    def resumed(size, noise):
        net = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        run = start(data, checkpoint, model=net, batch_size=100, noise=noise)
        before = run.weights()
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=size, optimizer=run.optimizer
        ) as loader:
            for x, y in loader:
                run.optimizer.zero_grad()
                run.loss(x, y).backward()
                run.optimizer.step()
        assert len(run.engine.accountant) == 1
        return (before - run.weights()) * 100

    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    checkpoint = save(start(data, model=net), rng=torch.get_rng_state())
    published = resumed(100, 4.0) - resumed(50, 4.0)
    truth = resumed(100, 0.0) - resumed(50, 0.0)
    assert truth.norm() > 1
    torch.testing.assert_close(published, truth, atol=1e-4, rtol=0)


def test_t23_resume_with_other_settings_is_accepted_and_the_account_is_of_what_was_done():
    run = start(points(), engine=PrivacyEngine(accountant="rdp"))
    step(run)
    checkpoint = save(run)
    other = start(points(200, seed=2), checkpoint, noise=0.5, clip=5.0, engine=PrivacyEngine(accountant="rdp"))
    step(other)
    assert other.engine.accountant.history == [(1.0, 0.2, 1), (0.5, 0.1, 1)]
    by_hand = RDPAccountant()
    by_hand.step(noise_multiplier=1.0, sample_rate=0.2)
    by_hand.step(noise_multiplier=0.5, sample_rate=0.1)
    assert other.engine.accountant.get_epsilon(1e-5, [2, 3, 4, 6]) == by_hand.get_epsilon(1e-5, [2, 3, 4, 6])
    with pytest.raises(ValueError, match="rdp cannot be loaded"):
        start(points(), checkpoint)
