"""A run that was interrupted and resumed elsewhere equals the uninterrupted one, bit for bit."""

import copy
import functools
import io
import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from twins import adamw, flat, make_data, make_model, make_private, sgd_momentum, three_groups, train

from hyfreedp import PrivacyEngine

STEPS = 11  # epochs of four steps: 0-3, 4-7, 8-10
RUNS = {
    "line search": {"preset": "paper", "interval": 3, "warmup": 0.1, "max_physical_batch_size": 4},
    "looks": {"preset": "robust"},  # at steps 1 and 2
    "fixed": {"preset": "fixed", "base": sgd_momentum},
    "non-private": {"preset": "paper", "interval": 3, "target_epsilon": math.inf, "base": three_groups},
}


def start(name, *, model_seed=0, engine_seed=0, global_seed=0, workers=0):
    """A run about to begin."""
    model = make_model(seed=model_seed, dropout=0.5)
    settings = {"target_epsilon": 3.0, "steps": STEPS, "seed": engine_seed} | RUNS[name]
    loader = DataLoader(make_data(32), batch_size=8, num_workers=workers)
    _, optimizer, loader = make_private(model, settings.pop("base", adamw)(model), loader=loader, **settings)
    torch.manual_seed(global_seed)
    return model, optimizer, loader


def end(model, optimizer):
    """Tensors, and texts: repr tells equal from nearly equal floats, and takes NaN for equal to itself."""
    texts = (optimizer.history, optimizer.rate_learner.state_dict(), optimizer.epsilon_spent())
    return (flat(model), optimizer.base.state_dict()), repr(texts)


def assert_same(first, second):
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)
    assert first[1] == second[1]


def through_a_file(state) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    return file


def load(file: io.BytesIO):
    """As a careful reader of files does: tensors and plain values only."""
    file.seek(0)
    return torch.load(file, weights_only=True)


@functools.cache
def uninterrupted(name):
    """The end of the run, and a checkpoint from after each of its steps."""
    model, optimizer, loader = start(name)
    checkpoints = [through_a_file(optimizer.state_dict())]
    train(optimizer, loader, after=lambda _: checkpoints.append(through_a_file(optimizer.state_dict())))
    assert len(checkpoints) == STEPS + 1
    return end(model, optimizer), checkpoints


# Within an epoch and before a probe, and between epochs.
FAST = (3, 8)


@pytest.mark.parametrize(
    "interruption", [*FAST, *(pytest.param(t, marks=pytest.mark.slow) for t in range(STEPS + 1) if t not in FAST)]
)
@pytest.mark.parametrize("name", RUNS)
def test_resumes_bitwise_from_every_step(name, interruption):
    """Other initial weights, another engine seed and another random state, as in a new process; then the checkpoint."""
    reference, checkpoints = uninterrupted(name)
    model, optimizer, loader = start(name, model_seed=5, engine_seed=6, global_seed=7)
    optimizer.load_state_dict(load(checkpoints[interruption]))
    assert optimizer.ledger.steps == loader.batch_sampler.position == interruption
    train(optimizer, loader)
    assert_same(end(model, optimizer), reference)


def test_workers_that_fetch_ahead_lose_no_batch():
    """What workers had fetched before the interruption is fetched again, and the start of a worker draws nothing."""
    reference, checkpoints = uninterrupted("line search")
    model, optimizer, loader = start("line search", model_seed=5, engine_seed=6, workers=1)
    optimizer.load_state_dict(load(checkpoints[5]))
    train(optimizer, loader)
    assert_same(end(model, optimizer), reference)


def test_the_engines_checkpoint_resumes_bitwise_through_a_file(tmp_path):
    """As a user of Opacus would: saved in the middle, a new process, loaded; with what else was to be kept."""
    reference, _ = uninterrupted("line search")
    path, engine = tmp_path / "run.pt", PrivacyEngine()
    model, optimizer, loader = start("line search")
    train(optimizer, loader, until=5)
    more = {"epoch": 1, "best": torch.tensor([0.5])}
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict=more)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"] and path.stat().st_mode & 0o777 == 0o600
    model, optimizer, loader = start("line search", model_seed=5, engine_seed=6, global_seed=7)
    found = PrivacyEngine().load_checkpoint(path=str(path), module=model, optimizer=optimizer)
    assert found == more and "optimizer_state_dict" not in more
    train(optimizer, loader)
    assert_same(end(model, optimizer), reference)


def test_a_save_that_is_interrupted_or_could_not_be_loaded_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    path, engine, (model, optimizer, loader) = tmp_path / "run.pt", PrivacyEngine(), start("fixed")
    own = {"path": path, "module": model, "optimizer": optimizer}
    engine.save_checkpoint(**own)
    before = path.read_bytes()
    train(optimizer, loader, until=1)
    with pytest.raises(ValueError, match="must hold tensors and plain values only"):
        engine.save_checkpoint(**own, checkpoint_dict={"accuracy": {"nested": [np.int64(3)]}})

    def fail(state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint(**own)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_a_state_that_cannot_be_loaded_to_its_end_changes_nothing():
    """Weights, ledger, key, sampler, history, moments and learner are those of before, and the run goes on as if."""
    model, optimizer, loader = start("looks")
    train(optimizer, loader, until=6)
    state = copy.deepcopy(optimizer.state_dict())
    model, optimizer, loader = start("looks")
    train(optimizer, loader, until=3)
    handle = optimizer.base.register_load_state_dict_post_hook(lambda which: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.load_state_dict(state)
    handle.remove()
    train(optimizer, loader)
    assert_same(end(model, optimizer), uninterrupted("looks")[0])


def test_what_is_no_checkpoint_of_the_run_is_refused(tmp_path):
    """Other files, files of Opacus's form, files that would run code; other models."""
    path, engine, (model, optimizer, _) = tmp_path / "run.pt", PrivacyEngine(), start("fixed")
    own, plain = {"path": path, "module": model, "optimizer": optimizer}, torch.nn.Linear(2, 2)
    for content, message in (
        ({"optimizer_state_dict": sgd_momentum(model).state_dict()}, "it holds no state"),
        (torch.zeros(3), "it holds no state"),
        ({"optimizer_state_dict": plain}, "torch cannot read it"),  # a pickled object, which weights_only refuses
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=f"run.pt must be a file of save_checkpoint, but {message}"):
            engine.load_checkpoint(**own)
    with pytest.raises(ValueError, match="module must be the model that optimizer trains"):
        engine.load_checkpoint(**own | {"module": plain})
