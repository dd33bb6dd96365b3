"""Several processes make the run of a single one: the same weights but for rounding, one noise, one failure for all.

Two processes talk through gloo on the CPU. They are started once and given jobs, functions of this module that every
process calls with its rank; what a job returns or raises comes back in order of rank. A job without processes is the
single process that the others are compared with.
"""

import itertools
import math
import multiprocessing
import os
import pickle
import random
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import twins
from cases import each
from pages import ROOT, programs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset
from twins import BASES, Made, changed, cross_entropy, flat, make_data, make_model, make_private, refused, unbind_noise

from hyfreedp.data.sampling import PoissonSampler
from hyfreedp.gradients import AutomaticClipping
from hyfreedp.noise import stream as noise

pytestmark = [
    pytest.mark.usefixtures("unbound_noise"),  # a sum over two processes rounds as that of one does not
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # of threads that wait for the processes
]
PATIENCE = 120  # seconds that a test waits for a job; a hanging process fails the test
NOISE_BOUND = mock.patch.object(noise, "derive", noise.derive)  # as it is outside these tests


def join(rank, size, store):
    """What a process begins with."""
    torch.set_num_threads(1)
    unbind_noise()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def done(job, rank, arguments):
    torch.manual_seed(rank)
    return job(rank, **arguments)


class Team:
    """Processes that stay alive from job to job."""

    def __init__(self, size: int, folder: Path) -> None:
        fork = multiprocessing.get_context("fork")  # which imports nothing again
        places = [(rank, size, folder / "store") for rank in range(size)]
        self.processes = [ProcessPoolExecutor(1, fork, join, place) for place in places]

    def start(self, job, **arguments):
        return [process.submit(done, job, rank, arguments) for rank, process in enumerate(self.processes)]

    def run(self, job, **arguments):
        return [answer.exception(PATIENCE) or answer.result() for answer in self.start(job, **arguments)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    team = Team(2, tmp_path_factory.mktemp("two"))
    yield team
    for process in team.processes:
        process.shutdown()


# -- jobs --------------------------------------------------------------------------------------------------------------


def start(rank, *, tuning="full", dropout=0.0, base="adamw", records=41, preset="robust", interval=2, **settings):
    """A run about to begin; its weights differ by rank until the engine has made them equal."""
    model = make_model(tuning, seed=rank, dropout=dropout)
    preset = changed(preset, interval=interval, initial_learning_rate=0.03)
    settings = {"seed": 3, "steps": 9, "preset": preset} | settings
    _, optimizer, loader = make_private(model, BASES[base](model), make_data(records), **settings)
    return model, optimizer, loader


def advance(model, optimizer, loader, until):
    """The loop of a user; returns the sizes of this process's batches."""
    sizes = []
    twins.train(optimizer, loader, until=until, after=lambda batch: sizes.append(len(batch[1])))
    return sizes


class End(NamedTuple):
    weights: Tensor
    history: list
    epsilon: float
    sizes: list


def end(model, optimizer, sizes=()):
    return End(flat(model), optimizer.history, optimizer.epsilon_spent(), list(sizes))


def train(rank, **settings):
    """A whole run."""
    model, optimizer, loader = start(rank, **settings)
    return end(model, optimizer, advance(model, optimizer, loader, optimizer.split.steps))


def assert_one_run(ends, single=None):
    """All processes hold the same, bit for bit; and, but for rounding, what a single process holds."""
    for other in ends[1:]:
        assert torch.equal(other.weights, ends[0].weights)
        assert repr(other.history) == repr(ends[0].history)
        assert other.epsilon == ends[0].epsilon
    if single is not None:
        torch.testing.assert_close(ends[0].weights, single.weights, rtol=1e-8, atol=1e-10)
        assert [sum(sizes) for sizes in zip(*(e.sizes for e in ends), strict=True)] == single.sizes
        assert ends[0].epsilon == single.epsilon
        for mine, other in zip(ends[0].history, single.history, strict=True):
            words, theirs = ({k: v for k, v in row.items() if isinstance(v, str | None)} for row in (mine, other))
            assert words == theirs and mine.keys() == other.keys()
            numbers = mine.keys() - words
            mine, other = (np.hstack([row[key] for key in numbers]).astype(float) for row in (mine, other))
            assert mine == pytest.approx(other, 1e-8, 1e-12, True)


# -- the same run ------------------------------------------------------------------------------------------------------


RUNS = {
    "losses at every step": {"preset": "paper", "interval": 1},
    "no probe": {"preset": "fixed", "base": "sgd"},
    "looks": {"base": "groups", "records": 100, "batch_size": 25, "steps": 12},
    "empty batches": {"preset": "paper", "steps": 20, "batch_size": 1},
    "diagnostics": {"diagnostics": True, "batch_size": 3, "steps": 12},
    "looks, without privacy": {"base": "groups", "records": 100, "batch_size": 25, "steps": 12},
}
QUIET = {"target_epsilon": math.inf}
CLIPPED = {"target_epsilon": math.inf, "clipping": AutomaticClipping()}
NOISY = {"target_epsilon": 3.0}


@each(noise=[QUIET, CLIPPED, NOISY, QUIET, CLIPPED, QUIET], run=RUNS)
def test_two_processes_make_the_run_of_one(two, run, noise):
    """Weights, rates, thresholds and epsilon. With noise too: it is that of a single process, added once."""
    settings = RUNS[run] | noise
    ends = two.run(train, **settings)
    assert_one_run(ends, train(0, **settings))
    assert all(sum(e.sizes) > 0 for e in ends)


def other_sums(rank):
    """Rank 1 holds another sum, as after a faulty all_reduce."""
    model, optimizer, loader = start(rank, target_epsilon=3.0)
    add_up = optimizer.processes.add_up

    def faulty(tensors):
        add_up(tensors)
        if rank == 1:
            tensors[0].view(-1)[0] += 1e-12

    optimizer.processes.add_up = faulty
    with NOISE_BOUND, refused(optimizer, "^the processes hold different sums", RuntimeError):
        advance(model, optimizer, loader, 1)


def test_processes_with_different_sums_are_refused_before_the_release(two):
    assert two.run(other_sums) == [None, None]


def meets(rank):
    """As where a loss is divided by the tokens of all processes."""
    model, optimizer, loader = start(rank, target_epsilon=3.0, batch_size=30)

    def loss(record):
        dist.all_reduce(size := record[0].abs().sum())
        return cross_entropy(model)((record[0] / size, record[1]))

    with refused(optimizer, "met other processes, which hold other records, as by all_reduce: leave that out"):
        twins.train(optimizer, loader, loss)


def test_a_loss_that_meets_other_processes_is_refused(two):
    """A record reached one of the other process: 0.9 clips, and more by its signs."""
    assert two.run(meets) == [None, None]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shards_make_up_the_batch_of_one_process(size):
    """Disjoint, of equal size but for one record, each record always on the same process; their union is Poisson."""
    settings = {"num_records": 50, "steps_per_epoch": 10, "seed": 3}
    for rate in (0.3, 1.0):
        whole = PoissonSampler(**settings, sample_rate=rate)
        parts = [PoissonSampler(**settings, sample_rate=rate, rank=rank, world_size=size) for rank in range(size)]
        for step in range(20):
            batches = [part.batch(step) for part in parts]
            assert sorted(itertools.chain(*batches)) == whole.batch(step)
            assert all(index % size == rank for rank, batch in enumerate(batches) for index in batch)
    assert {len(part.batch(0)) for part in parts} <= {50 // size, 50 // size + 1}


# -- what must be equal ------------------------------------------------------------------------------------------------

UNEQUAL = {
    "seed": ({"seed": [1, 2]}, "seed is 1 on rank 0 and 2 on rank 1"),
    "records": ({"records": [41, 40]}, "records is 41 on rank 0 and 40 on rank 1"),
    "guarantee": ({"without_guarantee": [False, True]}, "without_guarantee is False on rank 0 and True on rank 1"),
    "clipping": ({"clipping": [None, AutomaticClipping(0.1)]}, "rank 0 and AutomaticClipping(stability=0.1) on rank 1"),
    "model": ({"tuning": ["full", "biases"]}, "ight', (7, 5), torch.float64, False), ('0.bias', (7,), torch on rank 1"),
}


def unequal(rank, changes):
    start(rank, **({"target_epsilon": 3.0} | {name: values[rank] for name, values in changes.items()}))


@pytest.mark.parametrize("case", UNEQUAL)
def test_processes_with_other_arguments_are_refused(case, two):
    changes, message = UNEQUAL[case]
    answers = two.run(unequal, changes=changes)
    assert repr(answers[0]) == repr(answers[1]) and isinstance(answers[0], ValueError)
    assert str(answers[0]).startswith("all processes must be given the same run, but ")
    assert message in str(answers[0])


def other_order(rank, *, orders, plain=False):
    """Records of many kinds, with random numbers of torch and of a generator of its own."""
    plainly, own = Subset(make_data(), orders[rank]), random.Random(rank)

    def augmented(index):
        x, y = plainly[index]
        record = {("x", 0): x * (torch.rand(()) < 0.5), "half": x.bfloat16(), "image": np.ones(3), "text": f"{y}"}
        return record | ({"own": own.random()} if index < 20 else {})

    make_private(data=plainly if plain else Made(40, augmented), target_epsilon=3.0)


@pytest.mark.parametrize("plain", [True, False])
def test_processes_whose_records_are_in_another_order_are_refused(two, plain):
    """As of a split without a seed: each takes its share by index, so 12 of 40 records were in both shares."""
    order = list(range(40))
    assert two.run(other_order, orders=[order, order], plain=plain) == [None, None]
    for answer in two.run(other_order, orders=[order, order[1:] + order[:1]], plain=plain):
        assert isinstance(answer, ValueError) and re.match(
            r"data_loader must be over the same records in the same order on every process, but record \d+ of rank 0 "
            r"is not that of rank 1: .* sort what lists files .* and seed what splits",
            str(answer),
        )


def wrapped(rank, wrapper):
    model = make_model()
    if wrapper == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif wrapper == "tensor":
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight, init_device_mesh("cpu", (2,))))
    else:
        model = DistributedDataParallel(model) if wrapper == "ddp" else nn.DataParallel(model)
    make_private(model, target_epsilon=3.0, steps=9)


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        ("ddp", "module must not be wrapped in DistributedDataParallel .*: give the model itself, its .module"),
        ("dp", "module must not be wrapped in DataParallel "),
        ("fsdp", "module must be whole on every process, but layer '.*' is split by FSDP"),
        ("tensor", "module must be whole on every process, but parameter '0.weight' is a DTensor"),
    ],
)
def test_wrapped_models_are_refused(two, wrapper, message):
    for answer in two.run(wrapped, wrapper=wrapper):
        assert isinstance(answer, ValueError) and re.match(message, str(answer))


# -- failures ----------------------------------------------------------------------------------------------------------


def one_bad_loss(rank, *, when, bad=1):
    """Rank ``bad`` returns a bad loss once; the run then goes on, on all processes."""
    model, optimizer, loader = start(rank, target_epsilon=3.0, preset="paper", interval=1, batch_size=41)
    (batch,) = loader
    optimizer.step(lambda batch: 0 * sum(p.sum() for p in model.parameters()), batch)  # which compares losses
    caught, calls = [], []

    def loss(batch):
        now = "probe" if optimizer.ledger.steps > 1 else "forward"
        calls.append(now)
        losses = cross_entropy(model)(batch)
        return losses.expand(2) if rank == bad and now == when and calls.count(now) == 1 else losses

    (batch,) = loader
    try:
        optimizer.step(loss, batch)
    except (ValueError, RuntimeError) as error:
        caught = [type(error).__name__, str(error)]
    counted = optimizer.ledger.steps
    advance(model, optimizer, loader, 5)
    return end(model, optimizer), caught, counted


@pytest.mark.parametrize(("when", "counted"), [("forward", 1), ("probe", 2)])
def test_an_error_of_one_process_in_a_step_is_an_error_of_all(two, when, counted):
    """No process waits for the other, all count the same, and whoever catches the error can go on."""
    (first, caught, steps), (second, own, other_steps) = two.run(one_bad_loss, when=when)
    assert caught == ["RuntimeError", "rank 1 failed; its own traceback tells why"]
    assert own[0] == "Refused" and "one number for a record, got shape (2,)" in own[1]
    assert steps == other_steps == counted
    assert_one_run([first, second])
    single, single_caught, _ = one_bad_loss(0, when=when, bad=0)
    assert single_caught[0] == "Refused"
    torch.testing.assert_close(first.weights, single.weights, rtol=1e-8, atol=1e-10)


def no_memory_to_look(rank):
    """Rank 1 has no memory left when its first look moves the weights."""
    model, optimizer, loader = start(rank, target_epsilon=3.0, batch_size=41)
    advance(model, optimizer, loader, 1)
    moved = mock.patch.object(torch, "_foreach_add", side_effect=MemoryError) if rank else nullcontext()
    with moved, pytest.raises((MemoryError, RuntimeError)) as caught:
        advance(model, optimizer, loader, 2)
    advance(model, optimizer, loader, 5)
    return end(model, optimizer), caught.typename


def test_an_error_where_a_look_moves_weights_is_an_error_of_all(two):
    (first, theirs), (second, own) = two.run(no_memory_to_look)
    assert (theirs, own) == ("RuntimeError", "MemoryError")
    assert_one_run([first, second])


def dies(rank):
    model, optimizer, loader = start(rank, target_epsilon=3.0)
    advance(model, optimizer, loader, 2)
    if rank == 1:
        os._exit(1)
    advance(model, optimizer, loader, 3)


@pytest.mark.whole
def test_a_process_that_dies_is_an_error_at_once(tmp_path):
    """Long before the timeout, which is half an hour here."""
    first, second = Team(2, tmp_path).start(dies)
    assert isinstance(first.exception(PATIENCE), RuntimeError)
    assert isinstance(second.exception(PATIENCE), BrokenProcessPool)


# -- resuming ----------------------------------------------------------------------------------------------------------

LONG = NOISY | {"steps": 9, "dropout": 0.5}


def saved(rank, **settings):
    """A whole run, and its state after four steps."""
    model, optimizer, loader = start(rank, **(LONG | settings))
    advance(model, optimizer, loader, 4)
    state = pickle.dumps(optimizer.state_dict())
    advance(model, optimizer, loader, 9)
    return end(model, optimizer), state


def resume(rank, states, **settings):
    """The rest of a run, in processes with other weights, seeds and random states."""
    model, optimizer, loader = start(rank + 5, **(LONG | {"seed": 8} | settings))
    torch.manual_seed(rank + 7)
    optimizer.load_state_dict(pickle.loads(states[rank]))
    advance(model, optimizer, loader, 9)
    return end(model, optimizer)


@pytest.mark.parametrize("preset", ["robust", "paper"])
def test_resumes_bitwise_when_each_process_loads_its_own_state(two, preset):
    """With dropout, whose masks are those of the key, the step and the process."""
    answers = two.run(saved, preset=preset)
    ends, states = zip(*answers, strict=True)
    resumed = two.run(resume, states=states, preset=preset)
    assert_one_run(resumed)
    for again, ended in zip(resumed, ends, strict=True):
        assert torch.equal(again.weights, ended.weights)
        assert repr(again.history) == repr(ended.history)


def test_resumes_on_another_number_of_processes(two):
    """One after two and two after one make the same run, as long as there is no dropout."""
    ended, state = saved(0, dropout=0.0)
    resumed = two.run(resume, states=[state] * 2, dropout=0.0)
    assert_one_run(resumed)
    torch.testing.assert_close(resumed[0].weights, ended.weights, rtol=1e-8, atol=1e-10)
    _, of_second = two.run(saved, dropout=0.0)[1]
    single = resume(0, [of_second], dropout=0.0)
    torch.testing.assert_close(single.weights, ended.weights, rtol=1e-8, atol=1e-10)


@pytest.mark.whole
def test_the_script_of_the_docs_runs_under_torchrun(tmp_path):
    """As printed, on two processes: both tell the same, within the budget."""
    (code,) = programs("docs/usage.md", "On several processes")
    (command,) = re.findall(r"^    torchrun (.*)$", (ROOT / "docs/usage.md").read_text("utf-8"), flags=re.MULTILINE)
    *options, script = command.split()
    (tmp_path / script).write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, script],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    spent = re.findall(r"epsilon spent: ([\d.]+)", done.stdout)
    assert len(spent) == 1 and 2.9 < float(spent[0]) <= 3.0
