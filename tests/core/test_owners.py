"""Owners as samples: drawn, clipped and counted as one, however many records each has."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, Subset
from twins import Made, flat, make_data, make_private, sgd, train, unstacked

from hyfreedp.data.sampling import poisson_loader
from hyfreedp.gradients import AbadiClipping

IDS = [i % 10 for i in range(20)] + [9] * 20  # ten owners: nine of two records, one of 22


def numbered(size=40):
    """Records that tell which they are."""
    return Made(size, lambda row: (torch.full((5,), float(row), dtype=torch.float64), row % 3))


def private(owners=IDS, data=None, **settings):
    settings = {"batch_size": 4, "target_epsilon": 3.0, "preset": "fixed"} | settings
    return make_private(data=data or numbered(), owners=owners, **settings)


def rows_of(batch):
    """Of each sample the numbers of its records."""
    found = unstacked(batch.groups)
    assert all(isinstance(sample, tuple) and all(x.shape == (1, 5) for x, _ in sample) for sample in found.values())
    return [[int(x[0, 0]) for x, _ in found[place]] for place in range(len(batch))]


def drawn(steps, owners=IDS, seed=0, **settings):
    """The batches of some steps, without training."""
    loader = poisson_loader(DataLoader(numbered(), batch_size=4), seed=seed, owners=owners, **settings)
    return [rows_of(loader.dataset.__getitems__(loader.batch_sampler.drawn(step))[1]) for step in range(steps)]


@pytest.mark.parametrize(
    "owners", [IDS, torch.tensor(IDS), np.array([f"person {i}" for i in IDS]), [2**70 - i for i in IDS]]
)
def test_a_sample_is_all_that_an_owner_has(owners):
    whole, batches = [[row for row in range(40) if IDS[row] == owner] for owner in range(10)], drawn(20, owners)
    assert all(sample in whole for batch in batches for sample in batch)
    assert batches == drawn(20) and batches != drawn(20, seed=1)


def test_owners_are_drawn_at_the_sample_rate_whatever_they_have():
    steps, counts = 400, np.zeros(10)
    for batch in drawn(steps, records_per_owner=1):
        for (row,) in batch:
            counts[IDS[row]] += 1
    z = (counts - 0.4 * steps) / np.sqrt(steps * 0.4 * 0.6)
    assert 1e-6 < stats.chi2(10).cdf((z**2).sum()) < 1 - 1e-6


@pytest.mark.parametrize("most", [1, 3])
def test_of_an_owner_at_most_so_many_records_are_drawn_anew_each_time(most):
    samples = [sample for batch in drawn(300, records_per_owner=most) for sample in batch]
    assert all(len(set(sample)) == len(sample) == min(most, IDS.count(IDS[sample[0]])) for sample in samples)
    assert all(len({IDS[row] for row in sample}) == 1 for sample in samples)
    times = np.bincount([row for sample in samples for row in sample if IDS[row] == 9], minlength=40)
    own = times[[row for row in range(40) if IDS[row] == 9]]
    assert stats.chisquare(own).pvalue > 1e-6 and own.min() > 0


def test_workers_and_a_resumed_run_draw_the_same():
    def batches(optimizer, loader, steps):
        seen = []
        train(optimizer, loader, loss_of(optimizer.module), until=steps, after=lambda b: seen.append(rows_of(b)))
        return seen

    _, whole, loader = private(records_per_owner=3, seed=1)
    expected = batches(whole, loader, 6)
    _, first, loader = private(records_per_owner=3, seed=1)
    assert batches(first, loader, 2) == expected[:2]
    workers = DataLoader(numbered(), batch_size=4, num_workers=2)
    _, second, loader = private(records_per_owner=3, seed=2, loader=workers)
    second.load_state_dict(first.state_dict())
    assert batches(second, loader, 6) == expected[2:]
    assert torch.equal(flat(second.module), flat(whole.module))


def test_epsilon_is_that_of_as_many_records():
    """Exactly, however many records an owner has; with no more group privacy than a record has."""
    _, optimizer, loader = private(epochs=2)
    _, other, plain = private(None, numbered(10), epochs=2)
    assert len(loader) == len(plain) == 3 and loader.batch_sampler.num_records == 10
    assert optimizer.split == other.split and optimizer.split.records_per_person == 1
    assert optimizer.expected_batch_size == 4
    with pytest.warns(UserWarning, match=r"not below 1/N, with N = 10 records"):
        private(target_delta=0.1)


def loss_of(model):
    return lambda record: F.cross_entropy(model(record[0]), record[1])


def test_a_step_clips_the_mean_of_an_owners_losses():
    """Beside autograd; with weights of records, the mean of these."""
    data, steps, weight = make_data(), 3, lambda record: record[1][0] > 0
    for weights in (None, weight):
        model, twin = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
        twin.load_state_dict(model.state_dict())
        settings = {"clipping": AbadiClipping(0.5), "steps": steps, "preset": "fixed", "owners": IDS, "batch_size": 4}
        _, optimizer, loader = make_private(model, sgd(model, 0.1), data, **settings)
        for batch in itertools.islice(loader, steps):
            sums = [torch.zeros_like(parameter) for parameter in twin.parameters()]
            for sample in unstacked(batch.groups).values():
                loss = torch.stack([loss_of(twin)(record) for record in sample]).mean()
                gradients = torch.autograd.grad(loss, [*twin.parameters()])
                norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
                share = min(1.0, 0.5 / norm)
                if weights is not None:
                    share = share * torch.stack([weight(record) for record in sample]).float().mean()
                for total, gradient in zip(sums, gradients, strict=True):
                    total += share * gradient
            optimizer.step(loss_of(model), batch, weights=weights)
            with torch.no_grad():
                for parameter, total in zip(twin.parameters(), sums, strict=True):
                    parameter -= 0.1 * total / 4
            torch.testing.assert_close(flat(model), flat(twin), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"owners": IDS[1:]}, "a list, array or tensor of 40 ids, .*, got 39"),
        ({"owners": dict(enumerate(IDS))}, "of 40 ids, in the records' order, got dict"),
        ({"owners": [None, *IDS[1:]]}, r"owners must be integers, or all of them strings, got NoneType, int: leave"),
        ({"batch_size": 11}, "at most the 10 owners, of whom it draws so many, got 11"),
        ({"records_per_person": 2}, "records_per_person must be 1 with owners=, each a person, got 2"),
        ({"owners": None, "records_per_owner": 2}, "records_per_owner=2 needs owners=, an id for each record"),
    ],
)
def test_what_is_no_id_of_each_record_and_what_contradicts_owners_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        private(**settings)


def test_a_record_of_two_owners_is_refused_and_one_of_an_owner_may_be_there_twice():
    data = Subset(numbered(), [*range(40), 0])
    private([*IDS, IDS[0]], data)
    with pytest.raises(ValueError, match="give repetitions of a record one id, but one has 2: leave them out"):
        private([*IDS, IDS[1]], data)
