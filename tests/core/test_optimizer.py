"""One run of the optimizer: the noise it adds, the releases it counts, and what it tells."""

import itertools
import math

import numpy as np
import pandas
import pytest
import torch
from cases import each
from scipy import stats
from torch import nn
from twins import PRESETS, by_hand, changed, cross_entropy, flat, make_batches, sgd, trainable

from hyfreedp.gradients import AbadiClipping, AutomaticClipping

FALSE_ALARM = 1e-6  # of each statistical test below; the seeds are fixed, so a test that passes always passes
PRIVATE = {"target_epsilon": 3.0}


def noise_run(size, *, steps=60, dtype=torch.float64, seed=0, **settings):
    """The update directions of a run whose gradients are zero, shape (steps, 210): nothing but noise."""
    model = nn.Sequential(nn.Linear(20, 5), nn.Tanh(), nn.Linear(5, 17, bias=False), nn.Linear(17, 1, bias=False))
    model = model.to(dtype)
    for parameter in model.parameters():
        parameter.data.zero_()
    settings = {"preset": "fixed", "seed": seed, "steps": steps} | PRIVATE | settings
    optimizer = by_hand(model, sgd(model), decay="none", **settings)
    batch = [torch.ones(size, 20, dtype=dtype)]
    directions = []
    for _ in range(steps):
        before = flat(model)
        record = optimizer.step(lambda b: 0.5 + 0 * model(b[0])[:, 0], batch)
        directions.append(((before - flat(model)) / record.eta).numpy())
    return optimizer.split, np.array(directions)


def assert_standard(values):
    """Independent draws of N(0, 1), by size, shape and correlations in both directions."""
    size = stats.chi2(values.size).cdf((values**2).sum())
    assert FALSE_ALARM / 2 < size < 1 - FALSE_ALARM / 2, f"the noise is {values.std():.4f} times the stated one"
    assert stats.kstest(values.ravel(), "norm").pvalue > FALSE_ALARM
    half = values.shape[1] // 2
    for first, second in (
        (values[1:], values[:-1]),  # steps
        (values[2:], values[:-2]),
        (values[:, 1:], values[:, :-1]),  # neighbouring weights
        (values[:, :half], values[:, half : 2 * half]),  # parameters
    ):
        assert abs((first * second).sum()) / math.sqrt(first.size) < stats.norm.isf(FALSE_ALARM / 2)


@each(size=[0, 8, 13], clipping=[AbadiClipping(3.0), AutomaticClipping(), AbadiClipping(0.25)], R_g=[3.0, 1.0, 0.25])
def test_gradient_noise_is_sigma_times_sensitivity_over_the_expected_batch_size(size, clipping, R_g):
    """12,600 numbers on empty, expected and larger batches: the expected size 8 divides, whatever the batch held."""
    split, directions = noise_run(size, clipping=clipping)
    assert split.sigma_gradient > 0.5
    assert_standard(directions / (split.sigma_gradient * R_g / 8))


@each(allocation=["per_step", "constant"], size=[0, 9])
def test_probe_steps_have_their_own_gradient_noise(allocation, size):
    """Each kind of step has the multiplier that the accountant assumed for it."""
    split, directions = noise_run(size, preset="paper", allocation=allocation, interval=2, warmup=0.0, gamma=1.3)
    probing = np.arange(60) % 2 == 0
    assert_standard(directions[probing] / (split.sigma_gradient_probe / 8))
    assert_standard(directions[~probing] / (split.sigma_gradient / 8))
    if allocation == "per_step":
        assert split.sigma_gradient_probe > 1.2 * split.sigma_gradient  # so the two lines above differ


def spend(preset, sizes, **settings):
    """Epsilon before and after every step."""
    optimizer = by_hand(preset=preset, **(PRIVATE | settings))
    spent = [optimizer.epsilon_spent()]
    for batch in make_batches(sizes):
        optimizer.step(cross_entropy(optimizer.module), batch)
        spent.append(optimizer.epsilon_spent())
    return optimizer, spent


@pytest.mark.parametrize("preset", PRESETS.values())
def test_epsilon_grows_to_the_target_and_empty_batches_count(preset):
    """A run on empty batches costs what any other costs."""
    optimizer, spent = spend(changed(preset, interval=3), [8] * 10)
    assert all(before < after for before, after in itertools.pairwise(spent))
    assert spent[0] == 0 and 0.999 * 3 < spent[-1] <= 3
    assert optimizer.epsilon_spent() == pytest.approx(optimizer.split.epsilon)
    assert optimizer.epsilon_spent(1e-2) < spent[-1] < optimizer.epsilon_spent(1e-6)
    assert spend(changed(preset, interval=3), [0] * 10)[1] == spent
    assert spend(changed(preset, interval=3), [3, 0, 20] * 3)[1] == spent[:-1]


def test_a_step_leaves_nothing_in_the_engine():
    optimizer = by_hand(**PRIVATE)
    before = repr(vars(optimizer.gradient_engine))
    optimizer.step(cross_entropy(optimizer.module), make_batches([8])[0])
    assert repr(vars(optimizer.gradient_engine)) == before


STEP_KEYS = {"step", "eta"}
PROBE_KEYS = STEP_KEYS | {"eta_probed", "eta_next", "accepted", "reason", "private_loss", "loss_threshold"}
PROBE_KEYS |= {"slope", "curvature", "slope_std", "curvature_std"}
LOOK_KEYS = STEP_KEYS | {"rates", "margins", "margin_std", "chosen", "eta_next", "along"}
RAW_KEYS = {f"not_private_{name}" for name in ("batch_size", "mean_loss", "mean_gradient_norm", "non_finite_samples")}
RAW_PROBE_KEYS = RAW_KEYS | {f"not_private_loss_{where}" for where in ("ahead", "here", "behind")}


@each(preset=PRESETS.values(), diagnostics=[False, True])
def test_history_makes_a_frame_and_marks_all_that_is_raw(preset, diagnostics):
    """A new column must be added here by hand, by someone who knows that it is private."""
    optimizer, _ = spend(changed(preset, interval=2, warmup=0.0), [8, 3, 0, 8], diagnostics=diagnostics)
    searches = preset not in ("fixed", "robust")
    for t, row in enumerate(optimizer.history):
        probing = searches and t % 2 == 0
        keys = PROBE_KEYS if probing else STEP_KEYS
        if preset == "robust" and t in (1, 2):
            keys = LOOK_KEYS
        raw = RAW_PROBE_KEYS if probing else RAW_KEYS
        assert set(row) == (keys | raw if diagnostics else keys)
        assert all(value is None or type(value) in (int, float, bool, str, tuple) for value in row.values())
    frame = pandas.DataFrame(optimizer.history)
    assert frame.step.tolist() == [0, 1, 2, 3] and frame.eta.dtype == float and (frame.eta > 0).all()
    if searches:
        assert frame.slope.notna().tolist() == [True, False, True, False]


@pytest.mark.parametrize(("preset", "diagnostics"), [*itertools.product(["robust", "paper"], [False, True])])
def test_raw_values_do_not_reach_what_is_private(preset, diagnostics, unbound_noise):
    """Losses of 50 and of 500, both beyond the largest clip, release the same and must tell the same."""
    told = []
    for value in (50.0, 500.0):
        optimizer = by_hand(preset=changed(preset, interval=1), diagnostics=diagnostics, **PRIVATE)
        model, printed = optimizer.module, []
        for batch in make_batches([8, 0, 5, 9]):
            record = optimizer.step(lambda b, v=value, m=model: v + 0 * cross_entropy(m)(b), batch)
            printed.append(str(record))
        told.append((flat(model).tolist(), optimizer.history, repr(optimizer), printed, optimizer.epsilon_spent()))
    first, second = told
    for row, other in zip(first[1], second[1], strict=True):
        private = {key: value for key, value in row.items() if not key.startswith("not_private_")}
        assert repr(private) == repr({key: value for key, value in other.items() if key in private})
    assert first[0] == second[0] and first[2] == second[2] and first[4] == second[4]
    assert (repr(first[1]) == repr(second[1])) == (first[3] == second[3]) == (not diagnostics)


def test_diagnostics_are_the_raw_values():
    """Means over the actual batch, before any clipping; samples that are not finite are counted."""
    optimizer = by_hand(preset="paper", interval=1, diagnostics=True, **PRIVATE)
    model, (batch,) = optimizer.module, make_batches([5])
    losses = cross_entropy(model)(batch)
    norms = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, trainable(model), retain_graph=True)]).norm()
        for loss in losses
    ]
    raw = optimizer.step(cross_entropy(model), batch).diagnostics
    assert (raw["batch_size"], raw["non_finite_samples"]) == (5, 0)
    assert raw["mean_loss"] == pytest.approx(losses.mean().item())
    assert raw["loss_here"] == pytest.approx(losses.mean().item())
    assert raw["mean_gradient_norm"] == pytest.approx(float(sum(norms)) / 5)
    broken = [batch[0].clone(), batch[1]]
    broken[0][2] = math.nan
    assert optimizer.step(cross_entropy(model), broken).diagnostics["non_finite_samples"] == 1
