"""One run of the optimizer: the noise it adds, the releases it counts, and what it tells."""

import dataclasses
import itertools
import math

import numpy as np
import pandas
import pytest
import torch
from cases import each, together
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import stats
from torch import nn
from twins import (
    PRESETS,
    adamw,
    changed,
    cross_entropy,
    flat,
    make_batches,
    make_data,
    make_model,
    make_private,
    sgd,
    trainable,
)

from hyfreedp import StepRecord
from hyfreedp.accounting import BudgetExhausted
from hyfreedp.clipping import AbadiClipping, AutomaticClipping
from hyfreedp.experiments.baselines.line_search import LINE_SEARCH, StudiedRule

FALSE_ALARM = 1e-6  # of each statistical test below; the seeds are fixed, so a test that passes always passes
PRIVATE = {"target_epsilon": 3.0, "accountant": "rdp"}


# -- the noise of the gradient -----------------------------------------------------------------------------------------


def noise_run(size, *, steps=60, dtype=torch.float64, seed=0, **settings):
    """The update directions of a run whose gradients are zero, shape (steps, 210): nothing but noise."""
    model = nn.Sequential(nn.Linear(20, 5), nn.Tanh(), nn.Linear(5, 17, bias=False), nn.Linear(17, 1, bias=False))
    model = model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _, optimizer, _ = make_private(
        model, sgd(model), seed=seed, steps=steps, decay="none", **({"preset": "fixed"} | PRIVATE | settings)
    )
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


@pytest.mark.parametrize("size", [0, 8, 13])
@pytest.mark.parametrize(
    ("clipping", "sensitivity"), [(AutomaticClipping(), 1.0), (AbadiClipping(0.25), 0.25), (AbadiClipping(3.0), 3.0)]
)
def test_gradient_noise_is_sigma_times_sensitivity_over_the_expected_batch_size(size, clipping, sensitivity):
    """12,600 numbers on empty, expected and larger batches: the expected size 8 divides, whatever the batch held."""
    split, directions = noise_run(size, clipping=clipping)
    assert split.sigma_gradient > 0.5
    assert_standard(directions / (split.sigma_gradient * sensitivity / 8))


@together(
    ("size", "settings"),
    itertools.product([0, 9], [{"preset": LINE_SEARCH, "step_rule": StudiedRule("gen")}, {"preset": "paper"}]),
)
def test_probe_steps_have_their_own_gradient_noise(settings, size):
    """Each kind of step has the multiplier that the accountant assumed for it."""
    split, directions = noise_run(size, **settings, interval=2, warmup=0.0, gamma=1.3)
    probing = np.arange(60) % 2 == 0
    assert_standard(directions[probing] / (split.sigma_gradient_probe / 8))
    assert_standard(directions[~probing] / (split.sigma_gradient / 8))
    if split.allocation == "per_step":
        assert split.sigma_gradient_probe > 1.2 * split.sigma_gradient  # so the two lines above differ


def test_noise_in_single_precision():
    split, directions = noise_run(8, dtype=torch.float32)
    assert_standard(directions.astype(np.float64) / (split.sigma_gradient / 8))


def test_physical_batches_get_noise_once():
    """Noise per piece would be sqrt(3) times too large."""
    split, directions = noise_run(12, max_physical_batch_size=4)
    assert_standard(directions / (split.sigma_gradient / 8))


def test_the_seed_determines_the_noise():
    runs = [noise_run(0, steps=3, seed=seed)[1] for seed in (0, 0, 1, 2**64, None, None)]
    assert np.array_equal(runs[0], runs[1])
    for i in range(1, 6):
        assert not any(np.array_equal(runs[i], other) for other in runs[i + 1 :])


def test_noise_is_added_to_the_clipped_sum(unbound_noise):
    """With the same noise, the update with it minus the one without is the noise alone."""
    updates = []
    for target, batch in ((3.0, 0), (math.inf, 0), (3.0, 1)):
        model = make_model()
        _, optimizer, _ = make_private(
            model, sgd(model), preset="fixed", accountant="rdp", target_epsilon=target, clipping=AutomaticClipping()
        )
        start = flat(model)
        optimizer.step(cross_entropy(model), make_batches((5, 0))[batch])
        updates.append(start - flat(model))
    with_noise, without, noise_alone = updates
    # Each was rounded to a multiple of 2^-32 of the noise.
    torch.testing.assert_close(with_noise - without, noise_alone, rtol=0, atol=2**-31 * noise_alone.abs().max().item())
    assert noise_alone.abs().min() > 0 and without.abs().min() > 0


# -- the ledger --------------------------------------------------------------------------------------------------------


def spend(preset, sizes, **settings):
    """Epsilon before and after every step."""
    model = make_model()
    _, optimizer, _ = make_private(model, adamw(model), preset=preset, **(PRIVATE | settings))
    spent = [optimizer.epsilon_spent()]
    for batch in make_batches(sizes):
        optimizer.step(cross_entropy(model), batch)
        spent.append(optimizer.epsilon_spent())
    return optimizer, spent


@together("preset", PRESETS.values())
def test_epsilon_grows_to_the_target_and_empty_batches_count(preset):
    """A run on empty batches costs what any other costs."""
    optimizer, spent = spend(changed(preset, interval=3), [8] * 10)
    assert spent[0] == 0
    assert all(before < after for before, after in itertools.pairwise(spent))
    assert 0.999 * 3 < spent[-1] <= 3
    assert optimizer.epsilon_spent() == pytest.approx(optimizer.split.epsilon)
    assert optimizer.epsilon_spent(1e-2) < spent[-1] < optimizer.epsilon_spent(1e-6)
    assert spend(changed(preset, interval=3), [0] * 10)[1] == spent
    assert spend(changed(preset, interval=3), [3, 0, 20] * 3)[1] == spent[:-1]


def test_epsilon_so_far_agrees_with_dp_accounting():
    """After four of ten steps of plain DP-SGD: the composition of four subsampled Gaussians."""
    optimizer, spent = spend("fixed", [8, 0, 8, 8])
    sampled = PoissonSampledDpEvent(8 / 40, GaussianDpEvent(optimizer.split.sigma))
    accountant = RdpAccountant().compose(SelfComposedDpEvent(sampled, 4))
    assert spent[-1] == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-2)


def test_without_privacy_epsilon_is_infinite():
    assert spend("robust", [8], target_epsilon=math.inf)[1][1] == math.inf


@together("preset", PRESETS.values())
def test_a_step_beyond_the_plan_is_refused_before_anything_is_looked_at(preset):
    """Neither the loss function nor the batch is touched, and nothing changes, however often one tries."""
    optimizer, spent = spend(changed(preset, interval=3), [8] * 10)
    state, weights, rows = torch.get_rng_state(), flat(optimizer.module), len(optimizer.history)

    def loss(batch):
        raise AssertionError("the loss function was called")

    for _ in range(2):
        with pytest.raises(BudgetExhausted, match=r"all 10 steps .* epsilon=3"):
            optimizer.step(loss, object())
    assert torch.equal(flat(optimizer.module), weights) and torch.equal(torch.get_rng_state(), state)
    assert (optimizer.ledger.steps, optimizer.steps_left, len(optimizer.history)) == (10, 0, rows)
    assert optimizer.epsilon_spent() == spent[-1]


def test_counters_and_schedule():
    """Probes at every step of the warm-up, then at every interval; steps_left counts down to zero."""
    model = make_model()
    _, optimizer, loader = make_private(model, adamw(model), preset="paper", interval=4, warmup=0.2)
    assert optimizer.steps_left == 10
    probed = []
    for t, batch in enumerate(make_batches([4] * 10)):
        record = optimizer.step(cross_entropy(model), batch)
        probed.append(record.probe is not None)
        assert (record.step, optimizer.steps_left, loader.batch_sampler.position) == (t, 9 - t, t + 1)
    assert probed == [True, True, True, False, False, False, True, False, False, False]
    assert optimizer.ledger.probe_steps == 4


# -- what is told ------------------------------------------------------------------------------------------------------

STEP_KEYS = {"step", "eta"}
PROBE_KEYS = {
    *STEP_KEYS,
    *("eta_probed", "eta_next", "distance", "accepted", "reason"),
    *("slope", "curvature", "slope_std", "curvature_std"),
    *("private_loss", "loss_threshold"),
}
VOTE_KEYS = STEP_KEYS | {"margin", "margin_std", "needed", "lost"}
CONTRAST_KEYS = PROBE_KEYS | {"difference_threshold", "bend_threshold"}
RAW_KEYS = {f"not_private_{name}" for name in ("batch_size", "mean_loss", "mean_gradient_norm", "non_finite_samples")}
RAW_PROBE_KEYS = RAW_KEYS | {f"not_private_loss_{where}" for where in ("ahead", "here", "behind")}


@together(*each(preset=PRESETS.values(), diagnostics=[False, True]).args)
def test_history_makes_a_frame_and_marks_all_that_is_raw(preset, diagnostics):
    """A new column must be added here by hand, by someone who knows that it is private."""
    optimizer, _ = spend(changed(preset, interval=2, warmup=0.0), [8, 3, 0, 8], diagnostics=diagnostics)
    searches = preset not in ("fixed", "robust")
    for t, row in enumerate(optimizer.history):
        probing = searches and t % 2 == 0
        keys = (CONTRAST_KEYS if preset is LINE_SEARCH else PROBE_KEYS) if probing else STEP_KEYS
        if preset == "robust" and t == 2:
            keys = VOTE_KEYS
        raw = RAW_PROBE_KEYS if probing else RAW_KEYS
        assert set(row) == (keys | raw if diagnostics else keys)
        assert all(value is None or type(value) in (int, float, bool, str) for value in row.values())
    frame = pandas.DataFrame(optimizer.history)
    assert frame.step.tolist() == [0, 1, 2, 3]
    assert frame.eta.dtype == float and (frame.eta > 0).all()
    if searches:
        assert frame.slope.notna().tolist() == [True, False, True, False]


@together(*each(preset=["robust", "paper", LINE_SEARCH], diagnostics=[False, True]).args)
def test_raw_values_do_not_reach_what_is_private(preset, diagnostics, unbound_noise):
    """Losses of 50 and of 500, both beyond the largest clip, release the same and must tell the same."""
    told = []
    for value in (50.0, 500.0):
        model = make_model()
        _, optimizer, _ = make_private(
            model, adamw(model), preset=changed(preset, interval=1), diagnostics=diagnostics, **PRIVATE
        )
        printed = []
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
    model = make_model()
    _, optimizer, _ = make_private(model, sgd(model), preset="paper", interval=1, diagnostics=True, **PRIVATE)
    (batch,) = make_batches([5])
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


def test_the_record_is_what_history_keeps():
    optimizer, _ = spend("paper", [8], interval=1)
    model, (batch,) = optimizer.module, make_batches([6])
    record = optimizer.step(cross_entropy(model), batch)
    assert isinstance(record, StepRecord) and record.to_dict() == optimizer.history[1]
    optimizer.history[1]["eta"] = 0.0
    assert optimizer.history[1] == record.to_dict()
    assert record.probe.eta_next == optimizer.eta
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.eta = 1.0


@together("preset", PRESETS.values())
def test_repr_says_where_the_run_stands(preset):
    optimizer, _ = spend(preset, [8, 3, 0])
    text = repr(optimizer)
    assert all(len(line) <= 200 for line in text.splitlines())
    for part in ("AdamW", "step 3 of 10", f"eta {optimizer.eta:.3g}", "epsilon 3", "delta 0.001", "sigma", "Automatic"):
        assert part in text, part
    assert "non-private" in repr(spend(preset, [], target_epsilon=math.inf)[0])


def test_loops_written_for_other_optimizers_go_on_working():
    """zero_grad and param_groups are there, and harmless between steps."""
    model, other = make_model(), make_model()
    _, optimizer, _ = make_private(model, adamw(model), **PRIVATE)
    _, undisturbed, _ = make_private(other, adamw(other), **PRIVATE)
    for batch in make_batches([8, 4]):
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)  # left over from somebody's backward
        optimizer.step(cross_entropy(model), batch)
        undisturbed.step(cross_entropy(other), batch)
        with torch.no_grad():
            cross_entropy(model)(batch)  # evaluation in between
    assert torch.equal(flat(model), flat(other))
    assert optimizer.param_groups is optimizer.base.param_groups


def test_the_data_type_of_the_losses_does_not_matter():
    """Half-precision losses of a float32 model, as under autocast, train and probe."""
    model = make_model().float()
    _, optimizer, _ = make_private(model, adamw(model), preset="paper", interval=1, **PRIVATE)
    for inputs, labels in make_batches([8, 4]):
        record = optimizer.step(lambda b: cross_entropy(model)(b).bfloat16(), [inputs.float(), labels])
        assert math.isfinite(record.probe.slope)
    assert flat(model).dtype == torch.float32 and flat(model).isfinite().all()


@together("preset", ["robust", LINE_SEARCH])
def test_training_learns(preset):
    """A hundred private steps without a learning rate, on the loader's batches; 0.73 to 0.75 is the best possible."""
    data = make_data(400)
    model = make_model()
    _, optimizer, loader = make_private(
        model,
        adamw(model),
        data,
        batch_size=100,
        steps=100,
        preset=preset,
        target_epsilon=8.0,
        accountant="rdp",
    )
    while optimizer.steps_left:
        for batch in loader:
            optimizer.step(cross_entropy(model), batch)
    inputs, labels = data.tensors
    assert (model(inputs).argmax(dim=1) == labels).double().mean().item() > 0.6
