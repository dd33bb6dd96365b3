"""Random numbers of the model and of the loader: secret, of the run's key, and the caller's own given back."""

import hashlib
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import pairs
from torch import nn
from torch.utils.data import DataLoader
from twins import Built, Made, by_hand, cross_entropy, make_private, sgd, train

from hyfreedp.data.batches import groups_of
from hyfreedp.noise import random_states
from hyfreedp.noise.cipher import derive
from hyfreedp.noise.random_states import random_states_of
from hyfreedp.pytorch.devices import CPU

DRAWS = {
    "torch": lambda: torch.rand(3, dtype=torch.float64),
    "numpy": lambda: torch.from_numpy(np.random.rand(3)),
    "python": lambda: torch.tensor([random.random() for _ in range(3)], dtype=torch.float64),
}


def publicly_seeded():
    """What scripts begin with, and every reader of them knows."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)


def test_torch_draws_what_the_mersenne_twister_of_the_whole_key_does():
    """NumPy's, as a second library: a layout of torch's state that changed would show."""
    key = derive(b"", "a key")
    with random_states_of(key, CPU):
        drawn = torch.randint(0, 2**16, (2000,))  # more than the 624 words of the state
    twister = np.random.RandomState()
    words = np.frombuffer(hashlib.shake_256(derive(key, "torch")).digest(4 * 624), np.uint32)
    twister.set_state(("MT19937", words, 624))
    raw = np.array([twister.randint(0, 2**32, dtype=np.uint32) for _ in range(2000)])
    assert np.array_equal(drawn.numpy(), raw % 2**16)


def test_an_accelerators_state_is_seeded_and_given_back(monkeypatch):
    states = [torch.Generator().manual_seed(5).get_state()]
    module = SimpleNamespace(get_rng_state=lambda _: states[-1], set_rng_state=lambda state, _: states.append(state))
    monkeypatch.setattr(random_states, "backend", lambda device: module)
    with random_states_of(b"1" * 32, CPU):
        assert not torch.equal(states[-1], states[0])
    assert torch.equal(states[-1], states[0])


DOES = {  # with a record b, so that samples are computed so
    "together": lambda b: None,
    "by a decision": lambda b: bool(b[1] == 0),
    "one by one": lambda b: b[0][b[0] > 0],
}


def drawn(kind, does, pieces, seed):
    """What each of 12 samples draws in the gradient's pass of a step without noise."""
    publicly_seeded()
    model = Built(lambda m, x: (x * m.w).sum(), w=nn.Parameter(torch.zeros(12, dtype=torch.float64)))
    settings = {"preset": "paper", "interval": 1, "initial_learning_rate": 0.1, "max_physical_batch_size": pieces}
    optimizer = by_hand(model, sgd(model), seed=seed, **settings)

    def loss(b):
        DOES[does](b)
        return 1 + DRAWS[kind]()[0] * model(b[0])  # and never below zero, where losses are clipped

    step = optimizer.step(loss, [torch.eye(12).double(), torch.arange(12) % 3])
    direction = -model.w.detach() / step.eta
    shared = step.probe.slope == pytest.approx(direction.square().sum().item())
    assert shared == (kind != "torch")  # whose numbers are drawn anew in each pass, as splits in one must not show
    return (direction * optimizer.expected_batch_size).round(decimals=9)


@pytest.mark.filterwarnings("ignore:samples are computed one at a time")
@pairs(kind=DRAWS, does=DOES, pieces=[None, 5])
def test_masks_under_a_public_seed_are_secret(kind, does, pieces):
    """Torch's are each sample's own. NumPy's and Python's are one for all, however the samples are computed."""
    first, other, again = (drawn(kind, does, pieces, seed) for seed in (None, 1, 1))
    assert torch.equal(other, again) and not set(first.tolist()) & set(other.tolist())
    assert len(first.unique()) == (12 if kind == "torch" else 1)


def augmented(seed, workers=0):
    """The batches of a run on records that every generator moves."""
    publicly_seeded()
    data = Made(40, lambda index: (torch.cat([draw() for draw in DRAWS.values()]), index % 2))
    model, loader = nn.Linear(9, 2).double(), DataLoader(data, batch_size=8, num_workers=workers)
    _, optimizer, loader = make_private(model, sgd(model), loader=loader, seed=seed, preset="fixed", steps=2)
    seen = []
    train(optimizer, loader, after=lambda batch: seen.extend(group.tensors[0][:, 0] for group in groups_of(batch)))
    return torch.cat(seen)


def test_augmentation_under_a_public_seed_is_secret_and_of_the_engines_seed_alone():
    secret = [augmented(None), augmented(None)]
    for column in range(9):
        assert not set(secret[0][:, column].tolist()) & set(secret[1][:, column].tolist())
    known = augmented(1)
    assert len(known.unique()) == known.numel(), "records or steps that share numbers"
    assert torch.equal(known, augmented(1)) and torch.equal(known, augmented(1, workers=2))


def test_a_loss_that_seeds_torch_is_refused():
    """Everybody knows the masks of seed 0: one record more moved the sum by 8.7 clips."""
    model = nn.Linear(5, 3)
    optimizer = by_hand(model, sgd(model), preset="fixed", steps=3)
    batch = [torch.randn(8, 5), torch.randint(3, (8,))]
    with pytest.raises(ValueError, match="seeded while a loss was computed"):
        optimizer.step(lambda b: (torch.manual_seed(0), cross_entropy(model)(b))[1], batch)
    optimizer.step(cross_entropy(model), batch)
