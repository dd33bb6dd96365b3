"""Poisson batches: every record independently with probability q, the same again for the same seed and step."""

import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from opacus.data_loader import DPDataLoader
from scipy import stats
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, default_collate
from twins import Made, cross_entropy, make_data, make_private, refused, train, unstacked

from hyfreedp.data.batches import batch_length, groups_of, map_leaves
from hyfreedp.data.sampling import Drawn, OneByOne, PoissonSampler, poisson_loader
from hyfreedp.noise import NoiseGenerator
from hyfreedp.pytorch.devices import CPU

FALSE_ALARM = 1e-6  # of each statistical test below; the seeds are fixed, so a test that passes always passes

SEED = 11  # its first batch is empty, others hold three records


def make_sampler(**changes):
    return PoissonSampler(**({"num_records": 50, "sample_rate": 0.1, "steps_per_epoch": 10, "seed": 3} | changes))


@pytest.fixture(scope="module")
def memberships():
    """Which of 50 records were in which of 4,000 batches, at rate 0.1."""
    sampler, drawn = make_sampler(), np.zeros((4000, 50), dtype=bool)
    for step, row in enumerate(drawn):
        row[sampler.batch(step)] = True
    return drawn


# -- the distribution --------------------------------------------------------------------------------------------------
def test_every_record_is_included_at_the_sample_rate(memberships):
    """Chi-square over the 50 records' frequencies: a rate off by a little, or a favoured record, would show."""
    steps, records = memberships.shape
    z = (memberships.sum(axis=0) - 0.1 * steps) / np.sqrt(steps * 0.1 * 0.9)
    assert FALSE_ALARM / 2 < stats.chi2(records).cdf((z**2).sum()) < 1 - FALSE_ALARM / 2
    assert abs(z.sum() / np.sqrt(records)) < stats.norm.isf(FALSE_ALARM / 2)


def test_batch_sizes_are_binomial(memberships):
    """Fixed-size batches, or sizes drawn in another way, have no privacy amplification of the kind that is counted."""
    sizes = memberships.sum(axis=1)
    classes = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    observed = np.array([(sizes == k).sum() for k in classes[:-1]] + [(sizes >= 10).sum()])
    expected = len(sizes) * np.append(stats.binom(50, 0.1).pmf(classes[:-1]), stats.binom(50, 0.1).sf(9))
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM
    assert observed[0] > 0  # empty batches do occur


def test_inclusion_is_independent_across_steps_and_records(memberships):
    """Shuffled epochs would be negatively correlated over the steps, fixed-size batches over the records."""
    centred, limit = (memberships - 0.1) / np.sqrt(0.1 * 0.9), stats.norm.isf(FALSE_ALARM / 2)
    for lag in (1, 2, 10):
        products = centred[lag:] * centred[:-lag]
        assert abs(products.sum()) / np.sqrt(products.size) < limit
    neighbours = centred[:, 1:] * centred[:, :-1]
    assert abs(neighbours.sum()) / np.sqrt(neighbours.size) < limit
    pairs = (centred.sum(axis=1) ** 2 - (centred**2).sum(axis=1)).sum() / 2  # of all records within a step
    assert abs(pairs) / np.sqrt(len(centred) * 50 * 49 / 2) < limit


# -- seeds and positions -----------------------------------------------------------------------------------------------
def test_seeds_and_steps_determine_the_batches():
    """The same seed gives the same run on any machine; other seeds and other steps give other batches."""
    batches = [drawn.rows for drawn in make_sampler()]
    assert list(make_sampler()) == list(make_sampler())
    assert batches == [make_sampler().batch(step) for step in range(10)]
    assert len({tuple(batch) for batch in batches}) == 10
    others = [[drawn.rows for drawn in make_sampler(seed=seed)] for seed in (0, 4, 3 + 2**32, 3 + 2**64, 3 + 2**127)]
    for other in others:  # seeds that differ in any of their bits differ
        assert sum(a == b for a, b in zip(batches, other, strict=True)) <= 2
    assert len({str(other) for other in others}) == len(others)


# -- the structure of batches ------------------------------------------------------------------------------------------
FORMS = {
    "tuple": lambda x, y: (x, y),
    "nested": lambda x, y: {"inputs": {"ids": x, "mask": (x, x)}, "y": y},
    "names": lambda x, y: {"file": f"{x[0]}.png", "x": x, "y": y},
    "lengths": lambda x, y: x[: 1 + y],
    "keys": lambda x, y: {"x": x, "y" if y else "z": 1.0},
}


def records(form):
    """Thirty records of one of the structures that default collation knows."""
    return Made(30, lambda index: FORMS[form](torch.full((3,), float(index)), index % 2))


def fetched(data, rows, collate=default_collate, **owners):
    """The batch of some records, and its records by their places."""
    given, batch = OneByOne(data, collate, CPU, **owners).__getitems__(Drawn(5, rows, NoiseGenerator(SEED).key))
    assert given == (5, len(rows))
    return batch, unstacked(groups_of(batch))


@pytest.mark.parametrize("form", FORMS)
def test_each_record_is_what_collation_makes_of_it_alone(form):
    """By torch's default a batch of numbers is a plain one, also an empty one."""
    data, rows = records(form), [4, 7, 1, 20]
    batch, found = fetched(data, rows)
    assert [repr(found[place]) for place in range(4)] == [repr(default_collate([data[row]])) for row in rows]
    empty, none = fetched(data, [])
    assert batch_length(batch) == 4 and batch_length(empty) == 0 and none == {}
    if form in ("names", "lengths", "keys"):  # each of another form
        with pytest.raises(AttributeError, match=r"no 'items': a batch of records .* pass it to optimizer.step as"):
            batch.items()
    else:
        assert repr(batch) == repr(default_collate([data[row] for row in rows]))
        assert repr(empty) == repr(map_leaves(lambda tensor: tensor[:0], batch))


@pytest.mark.parametrize("rows", [[], [4, 7, 1]])
def test_the_rows_of_torchs_own_tensors_are_taken_at_once(rows):
    data = TensorDataset(torch.randn(9, 2, 3).mT, torch.arange(9))
    batch, _ = fetched(data, rows)
    expected, _ = fetched(Made(9, data.__getitem__), rows)  # record by record
    assert repr(batch) == repr(expected)


@pytest.mark.parametrize("owners", [{}, {"owners": [[0], [1, 2]]}])
def test_a_collate_function_that_drops_records_is_told_that_it_gets_each_alone(owners):
    with pytest.raises(IndexError) as told:
        fetched(records("tuple"), [1], lambda some: default_collate(some[1:]), **owners)
    assert "a list of one record, which it must keep: leave records out by a Subset" in told.value.__notes__[0]
    for nothing in (None, torch.empty(0, 5)):
        with pytest.raises(ValueError, match="collate_fn must keep its record, but returned no row"):
            fetched(records("tuple"), [1], lambda _, nothing=nothing: nothing, **owners)


# -- what is refused ---------------------------------------------------------------------------------------------------
class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("touched")


FEW = type("Few", (torch_data.SequentialSampler,), {"__iter__": lambda sampler: iter(range(9))})(range(40))
SAMPLERS = [range(9), FEW, torch_data.SubsetRandomSampler(range(9)), torch_data.RandomSampler(range(9))]
SAMPLERS += [torch_data.WeightedRandomSampler([1.0] * 40, 40), torch_data.RandomSampler(range(40), replacement=True)]
CHOOSING = [DataLoader(range(40), sampler=sampler) for sampler in SAMPLERS]  # of the records some, or some twice
CHOOSING += [DataLoader(range(40), batch_sampler=torch_data.BatchSampler(range(9), 3, False))]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Stream(), batch_size=2), "data_loader must be over a map-style data set"),
        (DataLoader(torch_data.Dataset(), batch_size=2), "over a map-style data set with a __len__"),
        (DataLoader(make_data(), batch_size=41), "at most the 40 records, got 41"),
        *((loader, r"Subset\(dataset, indices\)") for loader in CHOOSING),
        (DPDataLoader(make_data(), sample_rate=0.2), "got Opacus's DPDataLoader: give the one behind it"),
        (
            DataLoader(make_data(), batch_size=4, sampler=DistributedSampler(make_data(), num_replicas=2, rank=0)),
            "must have no sampler of its own, got DistributedSampler: .* the batch size of all together",
        ),
    ],
)
def test_loaders_that_cannot_be_poisson_sampled_are_refused(loader, message):
    with pytest.raises(ValueError, match=message):
        poisson_loader(loader, seed=0)


# -- batches of another loader -----------------------------------------------------------------------------------------
def private_run(**settings):
    old = DataLoader(data := make_data(), batch_size=8, shuffle=True)
    data.tensors[0].requires_grad_()  # as features that a model has computed
    settings = {"target_epsilon": 3.0, "preset": "fixed", "steps": 12} | settings
    model, optimizer, loader = make_private(loader=old, **settings)
    return cross_entropy(model), old, optimizer, loader


def test_a_step_takes_the_private_loaders_batches_alone_or_gives_no_guarantee():
    """Those of the loader that was given are no Poisson samples; where nothing is private nothing is asked."""
    loss, old, optimizer, loader = private_run()
    with refused(optimizer, r"private loader, which gave none so far.*without_guarantee=True", RuntimeError):
        optimizer.step(loss, next(iter(old)))
    x, y = next(iter(loader))
    with pytest.warns(UserWarning, match=r"batch was changed after it was loaded.* a row mixes several, as by Mixup"):
        optimizer.step(loss, [x.add_(x.roll(1, 0)), y])
    with pytest.raises(AttributeError):
        optimizer.sampler = None
    assert optimizer.guarantee
    loss, old, other, loader = private_run(without_guarantee=True)
    other.step(loss, next(iter(old)))
    other.step(loss, next(iter(loader)))
    assert other.ledger.steps == 2 and not other.guarantee
    with pytest.raises(ValueError, match="batches is any, without guarantee, here the sampler's"):
        optimizer.load_state_dict(other.state_dict())
    loss, old, optimizer, _ = private_run(target_epsilon=math.inf)
    train(optimizer, old, until=3)


def test_batches_that_are_given_again_are_refused():
    """``itertools.cycle`` keeps those of the first epoch; the ones of a second are others."""
    loss, _, optimizer, loader = private_run()
    batches, first = itertools.cycle(loader), len(loader)
    for _ in range(first):
        optimizer.step(loss, next(batches))
    with pytest.raises(RuntimeError, match=rf"batch of step {first} .*gave that of step {first - 1} last.*cycle"):
        optimizer.step(loss, next(batches))
    for batch in loader:  # as it says
        optimizer.step(loss, batch)
    assert optimizer.ledger.steps == 2 * first


def test_a_batch_whose_step_failed_is_not_passed_over():
    loss, _, optimizer, loader = private_run()
    batches = iter(loader)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda record: 1 / 0, next(batches))
    with refused(optimizer, "gave that of step 1 last: .* begin a new pass", RuntimeError):
        optimizer.step(loss, next(batches))
    optimizer.step(loss, next(iter(loader)))


def test_a_thread_may_fetch_a_batch_during_a_step_but_no_two_ahead():
    """It seeded the random numbers of the step."""
    loss, _, optimizer, loader = private_run()
    batches, ahead = iter(loader), []

    def slow(record):
        ahead.append(thread.submit(next, batches))
        time.sleep(0.1)
        return loss(record)

    with ThreadPoolExecutor(1) as thread:  # it ends with all batches fetched
        optimizer.step(slow, thread.submit(next, batches).result())
    with refused(optimizer, "no list, itertools.cycle or thread", RuntimeError):
        optimizer.step(loss, ahead[0].result())


def test_what_fetches_records_does_not_show_them():
    """A traceback with local variables, as error reporters send, has the repr of the loader's parts."""
    plain = DataLoader([f"record {number}" for number in range(9)], batch_size=4, drop_last=True)
    loader = poisson_loader(plain, seed=0)
    assert len(loader) == 3  # nothing is dropped
    assert "record" not in repr(vars(loader))
