"""Random numbers of the model and of the loader: secret, of the run's key, and the caller's own given back."""

import hashlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import together
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate
from twins import Made, by_hand, cross_entropy, make_batches, make_data, make_private, sgd

from hyfreedp.data.sampling import PoissonSampler, poisson_loader
from hyfreedp.noise.cipher import derive
from hyfreedp.running.devices import CPU
from hyfreedp.running.random_states import random_states, random_states_of, seed_random_states

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
    with random_states_of(key, CPU):
        first = torch.initial_seed()
    with random_states_of(derive(b"", "another"), CPU):
        assert first != torch.initial_seed() and first > 2**32


@together("kind", DRAWS)
def test_a_key_sets_each_generator_and_the_callers_states_come_back(kind):
    draw = DRAWS[kind]
    publicly_seeded()
    before, expected = random_states(CPU), draw()
    publicly_seeded()
    found = []
    for key in (b"1" * 32, b"1" * 32, b"2" * 32):
        with random_states_of(key, CPU):
            found.append(draw())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert before.same(random_states(CPU)) and torch.equal(draw(), expected)
    assert not before.same(random_states(CPU))
    seed_random_states(b"1" * 32, CPU)
    assert torch.equal(draw(), found[0])


# -- attack: who knows the seed of a script knows its masks ------------------------------------------------------------


@together("kind", DRAWS)
def test_masks_under_a_public_seed_are_secret_and_the_same_in_all_passes_of_a_step(kind):
    draw = DRAWS[kind]
    (batch,) = make_batches((8,))
    runs = []
    for seed in (None, None, 1, 1):
        publicly_seeded()
        model, seen = nn.Linear(5, 3).double(), []
        optimizer = by_hand(model, sgd(model), preset="paper", interval=1, seed=seed, target_epsilon=3.0)
        optimizer._checks_due = []

        def loss(batch, model=model, seen=seen):
            seen.append(draw())
            return F.cross_entropy(model(batch[0] * seen[-1][0]), batch[1], reduction="none")

        optimizer.step(loss, batch)
        runs.append(torch.stack(seen[-2:]))  # of the two probes
        assert torch.equal(seen[-1], seen[-2])
        optimizer.step(loss, batch)
        assert not torch.equal(seen[-1], runs[-1][0]), "another step, other masks"
    assert not torch.equal(runs[0], runs[1]) and torch.equal(runs[2], runs[3])


def augmented(seed, workers=0):
    """The batches of a run on records that every generator moves."""
    publicly_seeded()
    data = Made(40, lambda index: (torch.cat([draw() for draw in DRAWS.values()]), index % 2))
    model = nn.Linear(9, 2).double()
    loader = DataLoader(data, batch_size=8, num_workers=workers)
    _, optimizer, loader = make_private(model, sgd(model), loader=loader, seed=seed, preset="fixed", steps=2)
    batches = []
    for batch in loader:
        batches.append(batch[0])
        optimizer.step(lambda b, model=model: F.cross_entropy(model(b[0]), b[1], reduction="none"), batch)
        if not optimizer.steps_left:
            break
    return torch.cat(batches)


def test_augmentation_under_a_public_seed_is_secret_and_of_the_engines_seed_alone():
    secret = [augmented(None), augmented(None)]
    for column in range(9):
        assert not set(secret[0][:, column].tolist()) & set(secret[1][:, column].tolist())
    known = augmented(1)
    assert len(known.unique()) == known.numel(), "records or steps that share numbers"
    assert torch.equal(known, augmented(1)) and torch.equal(known, augmented(1, workers=2))


def test_processes_share_no_random_numbers():
    """Two records at one place of two shares would else have the same ones, and others if one more were before them."""
    plan = {"num_records": 40, "sample_rate": 0.5, "steps_per_epoch": 2, "seed": 3, "world_size": 2}
    shares = [PoissonSampler(**plan, rank=rank) for rank in (0, 1)]
    first, again = ([share.batch(step).generator.key for share in shares for step in (0, 1)] for _ in range(2))
    assert len(set(first)) == 4 and first == again


# -- attack: collate functions that mix --------------------------------------------------------------------------------


def mixed_up(x, y):
    share = float(torch.rand(()))
    return share * x + (1 - share) * x.roll(1, 0), y


def joined(x, y):
    names = [str(float(value)) for value in x[:, 0]]
    return {"x": x, "y": y, "text": [own + other for own, other in zip(names, names[1:] + names[:1], strict=True)]}


MIXING = {
    "mixed up": mixed_up,
    "standardised": lambda x, y: ((x - x.mean(0)) / x.std(0), y),
    "counted": lambda x, y: (x / len(x), y),
    "scaled by the largest": lambda x, y: (x / x.abs().max(), y),
    "windows": lambda x, y: (x.repeat_interleave(2, 0), y.repeat_interleave(2)),
    "packed": lambda x, y: (x.sum(0, keepdim=True), y[:1]),
    "joined": joined,
    "shifted ids": lambda x, y: (torch.arange(50_000, 50_000 + len(y)) + y.roll(1), y),
}


@together("mixing", MIXING)
def test_a_collate_function_by_which_rows_depend_on_other_records_is_refused(mixing):
    model = nn.Linear(5, 3).double()
    collate = lambda records: MIXING[mixing](*default_collate(records))  # noqa: E731
    loader = DataLoader(make_data(), batch_size=8, collate_fn=collate)
    _, optimizer, loader = make_private(model, sgd(model), loader=loader, target_epsilon=3.0, accountant="rdp")
    with pytest.raises(ValueError, match="collate_fn must make one row of each record, of its own record alone"):
        next(iter(loader))
    assert optimizer.epsilon_spent() == 0


class Transformed(Dataset):
    """As ``set_transform`` of datasets, which is given all rows of a batch."""

    def __len__(self):
        return 40

    def __getitems__(self, rows):
        x = make_data().tensors[0][rows]
        return list((x - x.mean(0)).unbind())


def test_records_that_a_data_set_makes_of_each_other_are_refused():
    with pytest.raises(ValueError, match="collate_fn must make one row of each record, of its own record alone"):
        next(iter(poisson_loader(DataLoader(Transformed(), batch_size=8), seed=0)))


def test_a_loss_that_seeds_torch_is_refused():
    """Everybody knows the masks of seed 0: one record more moved the sum by 8.7 clips."""
    model = nn.Linear(5, 3)
    optimizer = by_hand(model, sgd(model), preset="fixed", steps=3)
    batch = [torch.randn(8, 5), torch.randint(3, (8,))]
    with pytest.raises(ValueError, match="seeded while a loss was computed"):
        optimizer.step(lambda b: (torch.manual_seed(0), cross_entropy(model)(b))[1], batch)
    optimizer.step(cross_entropy(model), batch)


def padded_left(records):
    x = pad_sequence([record["ids"].flip(0) for record in records], batch_first=True).flip(1)
    y = torch.tensor([record.pop("label") for record in records])  # as some of transformers' do
    return {"ids": x, "mask": x != 0, "label": y}


def masked(records):
    """As for a masked language model: a draw for each token of the padded batch."""
    batch = padded_left(records)
    batch["ids"] = batch["ids"].masked_fill(torch.rand(batch["ids"].shape) < 0.15, 99)
    return batch


def cropped(records):
    return default_collate([(record["ids"][random.randrange(2) :][:2], record["label"]) for record in records])


def shuffled(records):
    """In which a record takes as many random numbers as it has tokens."""
    rows = [record["ids"][torch.randperm(len(record["ids"]))] for record in records]
    return pad_sequence([F.pad(row, (0, 12 - len(row))) for row in rows], batch_first=True), torch.arange(len(rows)) * 0


def padded_in_two_dimensions(records):
    """To the tallest and to the widest record, which are two."""
    shapes = [(len(record["ids"]), 12 - len(record["ids"])) for record in records]
    high, wide = (max(sizes) for sizes in zip(*shapes, strict=True))
    images = [F.pad(torch.ones(h, w), (0, wide - w, 0, high - h)) for h, w in shapes]
    return torch.stack(images), torch.zeros(len(shapes))


@together("collate", [padded_left, masked, cropped, shuffled, padded_in_two_dimensions])
@pytest.mark.parametrize("seed", range(3))
def test_padding_and_random_numbers_of_a_record_are_no_mixing(collate, seed):
    torch.manual_seed(seed)
    data = [{"ids": torch.randint(1, 9, (3 + i % 7,)), "label": i % 2} for i in range(40)]
    model = nn.Linear(1, 1)
    _, _, loader = make_private(
        model, sgd(model), loader=DataLoader(data, batch_size=20, collate_fn=collate), seed=seed
    )
    assert len(next(iter(loader))) == (3 if collate in (padded_left, masked) else 2)
