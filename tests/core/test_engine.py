"""PrivacyEngine: what it makes of a model, an optimizer, a loader and a budget."""

import copy
import dataclasses
import math

import pytest
import torch
import twins
from cases import each
from twins import by_hand, changed, flat, make_private, steps

import hyfreedp
from hyfreedp import PRESETS, NoiseGenerator, PrivacyEngine, calibrate_noise
from hyfreedp.gradients import AbadiClipping, AutomaticClipping, NoClipping
from hyfreedp.schedule import look_steps

PRIVATE = {"target_epsilon": 3.0}


def test_the_preset_paper_is_the_papers():
    """Algorithm 1 and section 4.1; and the smoothing of its authors' package, see test_gen_optim."""
    paper = PRESETS["paper"]
    assert (paper.probe, paper.loss_threshold_rule, paper.allocation) == ("losses", "sum", "constant")
    assert (paper.gamma, paper.interval, paper.initial_learning_rate) == (1.01, 5, 1e-4)
    assert (paper.warmup, paper.decay, paper.step_rule) == (0.0, "none", "gen") and paper.smoothing == 0.1


@pytest.mark.parametrize("preset", PRESETS.values())
def test_the_split_is_that_of_calibrate_noise(preset):
    """Every argument reaches the accountant: rate B/N = 8/40, T steps, K, the warm-up's share of T, gamma, probe."""
    whole = changed(preset, interval=4, warmup=0.25, gamma=1.05)
    optimizer = by_hand(preset=whole, steps=24, **PRIVATE)
    plan = {"target_delta": 1e-3, "sample_rate": 8 / 40, "steps": 24, "interval": 4, "warmup_steps": 6}
    plan |= {"probe": preset.probe, "gamma": 1.05}
    plan |= {"vote_steps": look_steps(24) if preset.probe == "look" else (), "allocation": preset.allocation}
    assert optimizer.split == calibrate_noise(**plan, **PRIVATE)
    assert optimizer.expected_batch_size == pytest.approx(8)


@each(length=[1, 2, 5], preset=[*PRESETS])
def test_every_preset_trains_runs_shorter_than_its_interval(preset, length):
    """Its own interval of 5 is shortened to the run, by name or as an object; the plan is paid for and used up."""
    optimizer = by_hand(preset=preset, steps=length, **PRIVATE)
    steps(optimizer, [8] * length)
    assert optimizer.steps_left == 0 and optimizer.epsilon_spent() == pytest.approx(3.0, rel=1e-3)
    if optimizer.split.probe == "losses":
        assert optimizer.split.interval == min(5, length) and optimizer.history[0]["accepted"] in (True, False)
    else:
        assert optimizer.split.interval == 5  # nobody asks


def test_epsilon_as_in_opacus_is_what_the_run_has_spent():
    engine = PrivacyEngine(seed=0)
    copied = copy.deepcopy(engine)  # which counts the same runs
    assert engine.get_epsilon(1e-3) == 0
    runs = [by_hand(engine=engine, **PRIVATE) for _ in range(3)]
    assert engine.get_epsilon(1e-3) == 0  # nothing released
    spent = []
    for sizes in ((8, 3), (5,)):
        steps(runs[1], sizes)
        spent.append(engine.get_epsilon(1e-4))
        assert spent[-1] == runs[1].epsilon_spent(1e-4) == copied.get_epsilon(1e-4)
    assert 0 < spent[0] < spent[1] and engine.get_epsilon(1e-3) < spent[1]
    steps(runs[2], [8])
    with pytest.raises(ValueError, match=r"has trained 2 runs, .*: call hyfreedp.total_epsilon"):
        engine.get_epsilon(1e-3)


def test_a_run_can_be_given_a_split_made_elsewhere():
    """It trains with that noise, says whose claim the target is, and goes on counting what is proven."""
    plan = {"preset": "paper", "interval": 2, "steps": 10}
    own = by_hand(**plan, **PRIVATE)
    less = dataclasses.replace(own.split, sigma_loss=own.split.sigma_loss / 4)
    with pytest.warns(UserWarning, match="split was made elsewhere: .* its own claim, and no guarantee") as told:
        optimizer = by_hand(split=less, **plan, **PRIVATE)
    assert [one.filename.endswith("twins.py") for one in told] == [True]  # who called
    assert optimizer.split.sigma_loss == less.sigma_loss and not optimizer.split.guarantee
    steps(optimizer, [8] * 10)
    assert optimizer.epsilon_spent() == optimizer.split.epsilon == hyfreedp.epsilon(optimizer.split) > 3.0
    for holder in (own, own.ledger):
        with pytest.raises(AttributeError):
            holder.split = less
    with pytest.raises(ValueError, match="split must be of this run, got interval=2, which is 5 here"):
        make_private(split=less, preset="paper", steps=10, **PRIVATE)


def test_clipping_is_automatic_with_privacy_and_absent_without():
    for target, chosen, expected in (
        (3.0, None, AutomaticClipping()),
        (math.inf, None, NoClipping()),
        (3.0, AbadiClipping(0.5), AbadiClipping(0.5)),
        (math.inf, AutomaticClipping(), AutomaticClipping()),
    ):
        optimizer = by_hand(target_epsilon=target, clipping=chosen)
        assert repr(expected) in repr(optimizer)
        assert optimizer.gradient_engine.clipping == expected


def test_a_first_group_without_parameters_changes_nothing():
    """As the Trainer makes it of a model of which biases are trained."""
    model, twin = twins.make_model("biases"), twins.make_model("biases")
    groups = [{"params": []}, {"params": twins.trainable(model)}]
    base = torch.optim.AdamW(groups, lr=0.5, weight_decay=0.1)
    for optimizer in (by_hand(model, base, **PRIVATE), by_hand(twin, **PRIVATE)):
        steps(optimizer, [8, 5, 9])
    assert torch.equal(flat(model), flat(twin))


def run(seed, preset="robust", **changes):
    """The weights after an epoch on the loader's batches, and the indices of these."""
    settings = {"steps": 5, "preset": changed(preset, interval=2), "seed": seed} | PRIVATE | changes
    model, optimizer, loader = make_private(**settings)
    twins.train(optimizer, loader)
    return flat(model), [loader.batch_sampler.batch(step) for step in range(5)]


def test_a_seed_makes_a_run_reproducible():
    """Batches and noise follow from it, whatever the global generators say."""
    weights, batches = run(3)
    torch.manual_seed(99)
    again, same_batches = run(3)
    assert torch.equal(weights, again) and batches == same_batches
    other_weights, other_batches = run(3 + 2**100)
    assert not torch.equal(weights, other_weights) and batches != other_batches


def test_an_engine_gives_every_run_keys_of_its_own():
    """With a seed they are reproducible in their order, and a refused call takes none."""
    keys = []
    for _ in range(2):
        engine = PrivacyEngine(seed=3)
        with pytest.raises(ValueError, match="give either epochs or steps"):
            make_private(engine=engine, steps=None, **PRIVATE)
        for _ in range(3):
            _, optimizer, loader = make_private(engine=engine, **PRIVATE)
            keys += [optimizer.state_dict()["generator"]["key"], loader.batch_sampler.seed]
    assert keys[:6] == keys[6:] and len(set(keys)) == 6


def test_sampling_and_noise_have_seeds_of_their_own():
    """The sampler's seed is plain in every checkpoint; it must not give the noise away, nor one noise the other."""
    engine_seed = 3
    _, optimizer, loader = make_private(seed=engine_seed, **PRIVATE)
    key = optimizer.state_dict()["generator"]["key"]
    for guess in (engine_seed, loader.batch_sampler.seed):
        tried = NoiseGenerator(guess)
        children = [tried.child(*path) for path in (("noise",), ("run", 0), ("sampling",), ("gradient", 0))]
        assert key not in {generator.key.hex() for generator in (tried, *children)}
    assert key == NoiseGenerator(engine_seed).child("run", 0).child("noise").key.hex()  # who knows the seed knows all
