"""Poisson batches: every record independently with probability q, the same again for the same seed and step."""

import copy
import itertools
import math
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import each, together
from opacus.data_loader import DPDataLoader
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler
from twins import Made, cross_entropy, make_data, make_private, refused, sgd, train, trainable

from hyfreedp.data.batches import batch_length, take
from hyfreedp.data.sampling import Drawn, Fetch, PoissonSampler, poisson_loader
from hyfreedp.noise import NoiseGenerator
from hyfreedp.running.devices import CPU

FALSE_ALARM = 1e-6  # of each statistical test below; the seeds are fixed, so a test that passes always passes

SEED = 11  # its first batch is empty, others hold three records


def make_sampler(**changes):
    return PoissonSampler(**({"num_records": 50, "sample_rate": 0.1, "steps_per_epoch": 10, "seed": 3} | changes))


@pytest.fixture(scope="module")
def memberships():
    """Which of 50 records were in which of 4,000 batches, at rate 0.1."""
    sampler = make_sampler()
    drawn = np.zeros((4000, 50), dtype=bool)
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
    centred = (memberships - 0.1) / np.sqrt(0.1 * 0.9)
    limit = stats.norm.isf(FALSE_ALARM / 2)
    for lag in (1, 2, 10):
        products = centred[lag:] * centred[:-lag]
        assert abs(products.sum()) / np.sqrt(products.size) < limit
    neighbours = centred[:, 1:] * centred[:, :-1]
    assert abs(neighbours.sum()) / np.sqrt(neighbours.size) < limit
    pairs = (centred.sum(axis=1) ** 2 - (centred**2).sum(axis=1)).sum() / 2  # of all records within a step
    assert abs(pairs) / np.sqrt(len(centred) * 50 * 49 / 2) < limit


@together("rate", [1.0, 1e-9])
def test_extreme_rates(rate):
    """At rate 1 every batch is the whole data set; at a tiny one all batches are empty."""
    expected = list(range(50)) if rate == 1 else []
    assert all(batch == expected for batch in make_sampler(sample_rate=rate))


# -- seeds and positions -----------------------------------------------------------------------------------------------


def test_seeds_and_steps_determine_the_batches():
    """The same seed gives the same run on any machine; other seeds and other steps give other batches."""
    batches = list(make_sampler())
    assert batches == list(make_sampler())
    assert batches == [make_sampler().batch(step) for step in range(10)]
    assert len({tuple(batch) for batch in batches}) == 10
    others = [list(make_sampler(seed=seed)) for seed in (0, 4, 3 + 2**32, 3 + 2**64, 3 + 2**127)]
    for other in others:  # seeds that differ in any of their bits differ
        assert sum(a == b for a, b in zip(batches, other, strict=True)) <= 2
    assert len({str(other) for other in others}) == len(others)


def test_sampling_leaves_the_global_generators_alone():
    """Otherwise the number of records would move the dropout masks, and users' seeds the batches."""
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(make_sampler())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


# -- the structure of batches ------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


FORMS = {
    "tensor": lambda x, y: x,
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y},
    "namedtuple": lambda x, y: Pair(x, torch.tensor(y)),
    "nested": lambda x, y: {"inputs": {"ids": x, "mask": (x, x)}, "y": y},
    "names": lambda x, y: {"file": f"{x[0]}.png", "x": x, "y": y},
}


def records(form):
    """Thirty records of one of the structures that default collation knows."""
    return Made(30, lambda index: FORMS[form](torch.full((3,), float(index)), index % 2))


def inputs_of(batch):
    if isinstance(batch, torch.Tensor):
        return batch
    if isinstance(batch, dict):
        return batch["x"] if "x" in batch else batch["inputs"]["ids"]
    return batch[0]


def same(first, second):
    """Equal in structure, types and values."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if type(first) is not type(second) or len(first) != len(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return first == second if isinstance(first, str) else all(map(same, first, second))


@together("form", FORMS)
def test_pieces_have_the_structure_of_the_batch(form):
    """Splitting a batch equals collating its parts, whatever it is made of; the empty piece has the same form."""
    data = records(form)
    collate = DataLoader(data).collate_fn
    whole = collate([data[i] for i in range(7)])
    assert batch_length(whole) == 7
    assert same(take(whole, slice(0, 7)), whole)
    assert same(take(whole, slice(2, 5)), collate([data[i] for i in range(2, 5)]))
    assert same(take(whole, slice(6, 9)), collate([data[6]]))
    step, empty = Fetch(data, collate, CPU)(Drawn([], 5, NoiseGenerator(SEED)))
    assert step == 5
    assert batch_length(empty) == 0
    assert same(empty, take(whole, slice(0, 0)))
    assert inputs_of(empty).shape == (0, 3)


@together(*each(form=FORMS, pieces=[None, 2]).args)
def test_training_works_on_every_structure_with_empty_batches(form, pieces):
    """The loss function gets batches of the form that the loader gives, and never an empty one."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    settings = {"steps": 12, "preset": "paper", "interval": 1, "max_physical_batch_size": pieces}
    _, optimizer, loader = make_private(
        model, sgd(model), loader=DataLoader(records(form), batch_size=2), seed=SEED, **settings
    )
    optimizer._checks_due = []  # which ask for a few samples once more, as the engine does until it has compared some
    sizes, asked = [], []

    def loss(batch):
        asked.append(len(inputs_of(batch)))
        return F.softplus(model(inputs_of(batch))[:, 0])

    for batch in loader:
        sizes.append(batch_length(batch))
        asked.clear()
        compared = bool(optimizer.gradient_engine.verified)
        optimizer.step(loss, batch)
        assert 0 not in asked and max(asked, default=0) <= (pieces or sizes[-1]) + (not compared)
        assert not compared or sum(asked) == 3 * sizes[-1]
        assert all(parameter.isfinite().all() for parameter in trainable(model))
        if not optimizer.steps_left:
            break
    assert sizes == [len(loader.batch_sampler.batch(step)) for step in range(12)]
    assert 0 in sizes and max(sizes) > 2


# -- what is refused ---------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("touched")


@together(
    ("loader", "error", "message"),
    [
        ([1, 2], TypeError, "data_loader must be a torch DataLoader, got list"),
        (DataLoader(Stream(), batch_size=2), ValueError, "data_loader must be over a map-style data set"),
        (DataLoader(make_data(), batch_size=None), ValueError, "data_loader must have a batch_size"),
        (DataLoader(make_data(), batch_sampler=[[0]]), ValueError, "data_loader must have a batch_size"),
        (DataLoader(TensorDataset(torch.zeros(0, 2)), batch_size=2), ValueError, "at least one record"),
        (DataLoader(make_data(), batch_size=41), ValueError, "at most the number of records, 40, got 41.* > 1"),
        (DPDataLoader(make_data(), sample_rate=0.2), ValueError, "got Opacus's DPDataLoader: give the one from which"),
        (
            DataLoader(make_data(), batch_size=4, sampler=DistributedSampler(make_data(), num_replicas=2, rank=0)),
            ValueError,
            "must not have a DistributedSampler.*all processes together",
        ),
        (
            DataLoader(make_data(), batch_size=8, sampler=WeightedRandomSampler([1.0] * 40, 40)),
            ValueError,
            r"step\(per_sample_loss, batch, weights=\.\.\.\)",
        ),
    ],
)
def test_loaders_that_cannot_be_poisson_sampled_are_refused(loader, error, message):
    with pytest.raises(error, match=message):
        poisson_loader(loader, seed=0)


# -- batches of another loader -----------------------------------------------------------------------------------------


def private_run(**settings):
    old = DataLoader(make_data(), batch_size=8, shuffle=True)
    private = {"target_epsilon": 3.0, "accountant": "rdp", "preset": "fixed", "steps": 12}
    model, optimizer, loader = make_private(loader=old, **(private | settings))
    return cross_entropy(model), old, optimizer, loader


def test_a_step_takes_the_private_loaders_batches_alone_or_gives_no_guarantee():
    """Those of the loader that was given are no Poisson samples; where nothing is private nothing is asked."""
    loss, old, optimizer, loader = private_run()
    with refused(optimizer, r"private loader, which gave none so far.*sampler = None", RuntimeError):
        optimizer.step(loss, next(iter(old)))
    assert optimizer.guarantee
    optimizer.sampler = None
    optimizer.step(loss, next(iter(old)))
    assert optimizer.ledger.steps == 1 and not optimizer.guarantee
    loss, old, optimizer, loader = private_run()
    optimizer.sampler, start = None, copy.deepcopy(optimizer.state_dict())
    optimizer.step(loss, next(iter(old)))
    optimizer.sampler = loader.batch_sampler
    optimizer.load_state_dict(start | {"sampler": loader.batch_sampler.state_dict()})
    assert optimizer.ledger.steps == 0 and not optimizer.guarantee
    loss, old, optimizer, loader = private_run()
    optimizer.sampler = None
    optimizer.step(loss, next(iter(old)))
    optimizer.sampler = loader.batch_sampler  # which does not bring the guarantee back
    assert not optimizer.guarantee
    for _ in range(2):
        with refused(optimizer, "made 1 steps and its sampler stands at 0", RuntimeError):
            optimizer.step(loss, next(iter(loader)))
    loss, old, optimizer, _ = private_run(target_epsilon=math.inf)
    train(optimizer, old, until=3)


def test_a_batch_keeps_its_step_where_two_passes_share_an_iterator():
    """As torch's do with persistent workers: a look at the next batch takes it out of the loop's order."""
    loss, _, optimizer, loader = private_run()
    shared = DataLoader.__iter__(loader)
    with mock.patch.object(DataLoader, "__iter__", lambda _: shared):
        batches = iter(loader)
        optimizer.step(loss, next(batches))
        next(iter(loader))
        with pytest.raises(RuntimeError, match="every batch must be passed to optimizer"):
            next(batches)


def test_what_fetches_records_does_not_show_them():
    """A traceback with local variables, as error reporters send, has the repr of the loader's parts."""
    loader = poisson_loader(DataLoader([f"record {number}" for number in range(9)], batch_size=3), seed=0)
    assert "record" not in repr(vars(loader)) and hash(loader.collate_fn)


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
