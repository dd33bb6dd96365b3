"""Attacks on what feeds a run, and on what counts it, that worked before: data, accountant, processes."""

import os

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, DataLoader, Subset, default_collate, random_split
from twins import Made, cross_entropy, make_data, make_private, train, unstacked

from hyfreedp.data.batches import groups_of
from hyfreedp.data.sampling import poisson_loader


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_fork_of_a_run_releases_nothing(workers):
    """Two children of one wired run gave the same weights, bit for bit, unless one's record was in some batch."""
    context = "fork" if workers else None
    loader = DataLoader(make_data(), batch_size=8, num_workers=workers, multiprocessing_context=context)
    model, optimizer, loader = make_private(loader=loader, target_epsilon=3.0)
    batches = iter(loader)  # whose worker is a fork, too, and only fetches
    optimizer.step(cross_entropy(model), next(batches))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            optimizer.step(cross_entropy(model), list(make_data(8)[:]))
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read().startswith(b"this run was wired before the process was forked")
    optimizer.step(cross_entropy(model), next(batches))
    assert optimizer.ledger.steps == 2


def nested(data):
    return ConcatDataset([Subset(data, range(20)), Subset(Subset(data, range(10, 40)), range(30))])


REPEATED = {
    "a subset": (lambda data: Subset(data, [*range(40)] + [39] * 9), 10),
    "from the end": (lambda data: Subset(data, torch.tensor([0, 39, -1])), 2),
    "one data set several times": (lambda data: ConcatDataset([data] * 10), 10),
    "nested": (nested, 2),
}


def wired(data, **settings):
    settings = {"target_epsilon": 1.0, "preset": "fixed", "batch_size": 2} | settings
    return make_private(data=data, **settings)


@pytest.mark.parametrize("case", REPEATED)
def test_repeated_records_are_refused_or_paid_for(case):
    """A record that was repeated ten times moved the sum by 9.9 clips."""
    repeat, times = REPEATED[case]
    data = repeat(make_data())
    for allowed in (1, times - 1):
        number = "once" if allowed == 1 else f"{allowed} times"
        message = f"hold each record {number}, but one is there {times} times, .* records_per_person={times}"
        with pytest.raises(ValueError, match=message):
            wired(data, records_per_person=allowed)
    poisson_loader(DataLoader(data, batch_size=2), seed=0, records_per_person=times)


def test_a_mask_is_no_subset():
    with pytest.raises(ValueError, match=r"integers, got bool: give mask\.nonzero"):  # else records 0 and 1
        wired(Subset(make_data(), torch.arange(40) % 2 == 0))


def test_parts_of_data_that_are_disjoint_are_no_repetition():
    parts = random_split(make_data(), [15, 25], generator=torch.Generator().manual_seed(0))
    _, optimizer, _ = wired(ConcatDataset(parts))
    assert repr(optimizer).endswith("at delta 0.001, of one record)")


def test_a_persons_epsilon_is_told_and_a_state_of_another_unit_is_refused():
    _, optimizer, loader = wired(make_data(), records_per_person=2)
    _, other, _ = wired(make_data())
    train(optimizer, loader)
    assert 0.999 < optimizer.epsilon_spent() == optimizer.split.epsilon <= 1
    assert optimizer.split.sigma > 1.4 * other.split.sigma
    assert repr(optimizer).endswith("at delta 0.001, of one person's 2 records)")
    with pytest.raises(ValueError, match=r"another run: .*, records_per_person is 2, here None\. Make"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="number of owners is None, here 40"):  # whose records may be several
        wired(make_data(), owners=range(40))[1].load_state_dict(other.state_dict())


def joined(x, y):
    names = [str(float(value)) for value in x[:, 0]]
    return {"x": x, "y": y, "text": [own + other for own, other in zip(names, names[1:] + names[:1], strict=True)]}


MIXING = {
    "mixed up": lambda x, y: (0.7 * x + 0.3 * x.roll(1, 0), y),
    "standardised": lambda x, y: (x - x.mean(0), y),
    "counted": lambda x, y: (x / len(x), y),
    "scaled by the largest": lambda x, y: (x / x.abs().max(), y),
    "windows": lambda x, y: (x.repeat_interleave(2, 0), y.repeat_interleave(2)),
    "packed": lambda x, y: (x.sum(0, keepdim=True), y[:1]),
    "joined": joined,
    "shifted ids": lambda x, y: (torch.arange(50_000, 50_000 + len(y)) + y.roll(1), y),
    "padded": lambda x, y: (pad_sequence([row[: 1 + int(label)] for row, label in zip(x, y, strict=True)]).T, y),
}


@pytest.mark.parametrize("mixing", MIXING)
def test_what_the_loader_gives_for_a_record_is_the_same_whatever_the_others_are(mixing):
    """Each of these moved many rows by one record, or one by many."""
    data, seen = make_data(), []

    def collate(records):
        seen.append(len(records))
        return MIXING[mixing](*default_collate(records))

    loader = poisson_loader(DataLoader(data, batch_size=8, collate_fn=collate), seed=0)
    batch, rows = next(iter(loader)), loader.batch_sampler.batch(0)
    assert len(batch) == len(rows) == len(seen) > 4 and set(seen) == {1}
    for place, record in unstacked(groups_of(batch)).items():
        assert repr(record) == repr(collate([data[rows[place]]]))


def standardised(rows):
    """As ``set_transform`` of datasets, which is given all rows of a batch, if it is asked so."""
    x = make_data().tensors[0][rows]
    return [*(x - x.mean(0))]


def test_a_data_set_makes_no_records_of_each_other():
    data = Made(40, lambda row: standardised([row])[0])
    data.__getitems__ = standardised
    assert not next(iter(poisson_loader(DataLoader(data, batch_size=8), seed=0))).any()


def test_a_record_of_several_rows_is_one_sample():
    """As of augmented views, or windows; it counted as several."""
    data = Made(40, lambda row: torch.full((2,), float(row)))
    loader = DataLoader(data, batch_size=20, collate_fn=lambda some: some[0].expand(1 + int(some[0][0]) % 3, 2))
    batch = next(iter(loader := poisson_loader(loader, seed=0)))
    assert sum(len(group) for group in batch.groups) == len(batch) == len(loader.batch_sampler.batch(0))
    assert {group.tensors[0].shape[1] for group in batch.groups} == {1, 2, 3}
