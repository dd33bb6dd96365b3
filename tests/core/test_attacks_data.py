"""Attacks on what feeds a run, and on what counts it, that worked before: data, accountant, processes."""

import os

import pytest
import torch
from cases import together
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split
from twins import cross_entropy, make_data, make_private, train

from hyfreedp.data.sampling import poisson_loader


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@together("workers", [0, 1])
def test_a_fork_of_a_run_releases_nothing(workers):
    """Two children of one wired run gave the same weights, bit for bit, unless one's record was in some batch."""
    loader = DataLoader(
        make_data(), batch_size=8, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    model, optimizer, loader = make_private(loader=loader, target_epsilon=3.0, accountant="rdp")
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


@together("case", REPEATED)
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
    with pytest.raises(ValueError, match=r"integers, got bool: of a mask take mask\.nonzero"):  # else records 0 and 1
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
    with pytest.raises(ValueError, match=r"another noise split \(.*records_per_person: 2 != None"):
        other.load_state_dict(optimizer.state_dict())
