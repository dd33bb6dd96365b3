"""Poisson sampling: the batch of a step is a function of a secret seed and the step's number."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from hyfreedp.checks import check_count, check_type, made_by
from hyfreedp.data.batches import batch_length, copied, is_plain, leaves, map_leaves, of_one_form, stack_records
from hyfreedp.errors import LOOP_THAT_ENDS, BudgetExhausted
from hyfreedp.noise import NoiseGenerator
from hyfreedp.noise.random_states import random_states_of
from hyfreedp.pytorch.devices import CPU
from hyfreedp.pytorch.wrapper import Unprepared

# Arguments that the private loader copies from the user's loader.
_WORKERS = "num_workers pin_memory timeout worker_init_fn multiprocessing_context prefetch_factor persistent_workers"


class Drawn(NamedTuple):
    """What one process fetches for a step."""

    step: int  # 0-based
    rows: list[int]  # indices of records or of owners
    key: bytes  # seeds random numbers while they are fetched, as of augmentation; each process has its own


@dataclass(kw_only=True, eq=False, repr=False)
class PoissonSampler(Sampler[Drawn]):
    """Yields batches in which each record is independently with probability ``sample_rate``; some may be empty.

    The batch of step t is a function of (seed, t) alone, so a run resumes exactly from its ``position``, even if worker
    processes have fetched ahead. One pass yields the rest of an epoch, or of the run if that ends first. Each of
    several processes draws the same batch and keeps the records whose index modulo ``world_size`` is ``rank``.
    """

    num_records: int  # N >= 1, of records or owners
    sample_rate: float  # q in (0, 1]
    steps_per_epoch: int  # batches in one whole pass
    seed: int  # non-negative, of any size; secret, since it determines which records are in which batch
    rank: int = 0  # of this process
    world_size: int = 1  # number of processes
    position: int = 0  # the step whose batch comes next; the optimizer advances it
    horizon: float = math.inf  # number of steps of the whole run
    yielded: tuple[int, int, Any] | None = None  # step, size and, of step 0, copy of the batch that was yielded last
    unit: Literal["record", "owner"] = "record"  # what is drawn

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Drawn]:
        first = self.position
        if first >= self.horizon:  # else "while True: for batch in loader" would loop for ever
            raise BudgetExhausted(f"all {self.horizon} planned steps have been made: {LOOP_THAT_ENDS}")
        last = first - first % self.steps_per_epoch + self.steps_per_epoch
        return map(self.drawn, range(first, int(min(last, self.horizon))))

    def drawn(self, step: int) -> Drawn:
        """What this process fetches for 0-based ``step``."""
        return Drawn(step, self.batch(step), NoiseGenerator(self.seed).child("records", step, self.rank).key)

    def batch(self, step: int) -> list[int]:
        """Indices of this process's records in the batch of 0-based ``step``."""
        uniform = NoiseGenerator(self.seed).child("batch", step).uniform(self.num_records)
        drawn = (uniform < self.sample_rate).nonzero()[:, 0]
        return drawn[drawn % self.world_size == self.rank].tolist()

    def check_drawn(self, step: int, batch: Any) -> None:
        """Refuse a batch unless it can be that of ``step``, which the loader yielded last; warn if the first differs.

        No batch may be skipped, even if it is empty or its step failed, since that would reveal something about it.
        """
        yielded, size, given = self.yielded or (None, 0, None)
        samples = batch_length(batch)
        if yielded != step:
            last = "none so far" if yielded is None else f"that of step {yielded} last"
            raise RuntimeError(
                f"the batch of step {step} must come from the private loader, which gave {last}: pass every batch to "
                "optimizer.step exactly once, empty ones too, before the next is fetched (no list, itertools.cycle or "
                "thread), and begin a new pass after a step that failed. Your own batches need without_guarantee=True"
            )
        if size != samples:
            raise ValueError(
                f"batch must have one row for each of the {size} records that were drawn, got {samples}: pass on what "
                "the loader gave. Several rows of a record are made by collate_fn, which gets each alone"
            )
        if step == 0 and samples:
            old, new = (next(t.cpu().flatten() for t in leaves(b) if isinstance(t, Tensor)) for b in (given, batch))
            if len(old) == len(new) and not torch.allclose(old, new.to(old), 0.01, equal_nan=True):
                warnings.warn(
                    "the batch was changed after it was loaded. Change each record in the data set or the loss: "
                    "epsilon does not hold if a row mixes several, as by Mixup or a mean over the batch",
                    stacklevel=6,
                )

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.seed, self.yielded = state["seed"], None


@dataclass(eq=False, repr=False)  # a repr would show records
class OneByOne(Dataset[Any]):
    """The loader's data set, which collates each record of a batch alone, so that user code sees one record at a time.

    The collate function is called with a list of one record. Only torch's default_collate, which just stacks, gets all
    records at once if they have one form, and makes a plain batch. Other attributes, such as ``classes``, are those of
    the user's data set.
    """

    dataset: Any  # the user's
    collate: Callable[[list[Any]], Any]  # the user's
    device: torch.device  # whose random numbers are seeded, too, unless worker processes fetch
    owners: list[list[int]] | None = None  # the indices of each owner's records, if owners are sampled
    records_per_owner: int | None = None  # the most records of an owner in a batch, chosen at random; None: all

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # not there yet while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, drawn: Drawn) -> tuple[tuple[int, int], Any]:
        """((step, size), batch); ``drawn.key`` seeds the random numbers of fetching, see ``noise.random_states``."""
        with random_states_of(drawn.key, self.device if torch.utils.data.get_worker_info() is None else CPU):
            seed = torch.initial_seed()
            if self.owners is not None:
                batch: Any = stack_records((self._of_owner(self.owners[owner]) for owner in drawn.rows), owners=True)
            elif _is_torchs(self.collate):
                batch = self._default_collated(drawn.rows)
            else:
                batch = stack_records(map(self._collated, drawn.rows))
            if torch.initial_seed() != seed:
                raise ValueError(
                    "torch's random numbers were seeded while records were fetched, so that others know those of the "
                    "records after: seed nothing in a data set or a collate_fn; numbers come from the run's key"
                )
        return (drawn.step, len(drawn.rows)), batch

    def _default_collated(self, rows: list[int]) -> Any:
        tensors = self.dataset.tensors if type(self.dataset) is torch.utils.data.TensorDataset else ()
        if tensors and all(type(t) is Tensor and is_plain(t) for t in tensors):
            chosen = torch.tensor(rows, dtype=torch.long)
            return [tensor[chosen] for tensor in tensors]
        # Copied, since a data set may reuse memory. An empty batch is made from record 0, of which no row is kept.
        records = [map_leaves(copied, self.dataset[row]) for row in rows or [0]]
        if not of_one_form(records):
            return stack_records(default_collate([record]) for record in records[: len(rows)])
        batch = default_collate(records)
        return batch if rows else map_leaves(lambda tensor: tensor[:0], batch)

    def _of_owner(self, rows: list[int]) -> tuple[Any, ...]:
        most = self.records_per_owner
        if most is not None and len(rows) > most:
            rows = [rows[place] for place in torch.randperm(len(rows))[:most].tolist()]
        return tuple(map(self._collated, rows))

    def _collated(self, row: int) -> Any:
        record = self.dataset[row]
        try:
            collated = self.collate([record])
        except Exception as error:
            error.add_note("collate_fn gets a list of one record, which it must keep: leave records out by a Subset")
            raise
        tensors = [t for t in leaves(collated) if isinstance(t, Tensor) and t.dim()]
        if collated is None or (tensors and not any(map(len, tensors))):  # a user would think it left out
            raise ValueError("collate_fn must keep its record, but returned no row: leave records out by a Subset")
        return collated


def _is_torchs(collate: Any) -> bool:
    """Whether a collate function is torch's default_collate, and nobody has registered functions of their own in it."""
    of_torch = (function.__module__ == default_collate.__module__ for function in default_collate_fn_map.values())
    return collate is default_collate and all(of_torch)


class PoissonLoader(Unprepared, DataLoader):
    """A loader over a :class:`PoissonSampler`; it notes there which batch it has yielded."""

    batch_sampler: PoissonSampler  # type: ignore[assignment]
    dataset: OneByOne

    def __iter__(self) -> Any:  # an iterator; torch declares a private type
        iter(self.batch_sampler)  # raises BudgetExhausted after the last step, before any worker starts
        for yielded, batch in super().__iter__():
            self.batch_sampler.yielded = (*yielded, None if yielded[0] else map_leaves(copied, batch))
            yield batch


def poisson_loader(
    loader: DataLoader,
    *,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device = CPU,
    records_per_person: int = 1,
    owners: Any = None,
    records_per_owner: int | None = None,
) -> PoissonLoader:
    """The data, workers and collation of ``loader``, Poisson-sampled at rate ``loader.batch_size / N``.

    It does not matter whether ``loader`` shuffles. For ``owners`` and ``records_per_person`` see the engine, for other
    arguments :class:`PoissonSampler` and :class:`OneByOne`. TypeError or ValueError if the loader cannot be
    Poisson-sampled, records are repeated too often, or ``owners`` does not fit the data.
    """
    check_type("data_loader", loader, DataLoader, "a torch DataLoader")
    if isinstance(loader, PoissonLoader):
        raise ValueError(
            "data_loader is private already, as where a notebook's cell is run twice: give the plain DataLoader, and "
            "call the private one by another name. To begin anew, make model and optimizer again"
        )
    if (library := made_by(loader)) is not None:
        raise ValueError(
            f"data_loader must be a plain DataLoader, got {library}'s {type(loader).__name__}: give the one behind it"
        )
    if isinstance(loader.dataset, torch.utils.data.IterableDataset) or not isinstance(loader.dataset, Sized):
        raise ValueError("data_loader must be over a map-style data set with a __len__, as list(dataset) is")
    if loader.batch_size is None:
        raise ValueError(
            "data_loader must have a batch_size and no batch_sampler: each record is drawn with probability "
            "batch_size / N. To leave records out give torch.utils.data.Subset(dataset, indices)"
        )
    num_records = len(loader.dataset)
    _check_order(loader.sampler, num_records)
    owned = None if owners is None else _owned(owners, num_records)
    num_records = num_records if owned is None else len(owned)
    if loader.batch_size > num_records:
        what = f"the {num_records} records" if owned is None else f"the {num_records} owners, of whom it draws so many"
        raise ValueError(f"data_loader's batch_size must be at most {what}, got {loader.batch_size}")
    if records_per_owner is not None:
        check_count("records_per_owner", records_per_owner, 1)
        if owned is None:
            raise ValueError(f"records_per_owner={records_per_owner} needs owners=, an id for each record")
    if owned is not None and records_per_person != 1:
        raise ValueError(f"records_per_person must be 1 with owners=, each a person, got {records_per_person}")
    _check_repeated(loader.dataset, records_per_person, owned)
    sampler = PoissonSampler(
        num_records=num_records,
        sample_rate=loader.batch_size / num_records,
        steps_per_epoch=math.ceil(num_records / loader.batch_size),
        seed=seed,
        rank=rank,
        world_size=world_size,
        unit="record" if owned is None else "owner",
    )
    return PoissonLoader(
        OneByOne(loader.dataset, loader.collate_fn, device, owned, records_per_owner),
        batch_sampler=cast(Any, sampler),
        collate_fn=tuple,  # which returns the pair of OneByOne as it is
        **{name: getattr(loader, name) for name in _WORKERS.split()},
        # Seeds the workers. By default each iterator would advance torch's global generator.
        generator=torch.Generator().manual_seed(NoiseGenerator(seed).child("workers", rank).integer()),
    )


def _check_repeated(dataset: Any, allowed: int, owned: list[list[int]] | None) -> None:
    """ValueError if a (nested) torch ``Subset`` or ``ConcatDataset`` holds a record more than ``allowed`` times."""
    if not isinstance(dataset, Subset | ConcatDataset):
        return
    origins = _origins(dataset, {})
    if owned is not None:  # an owner may hold a record several times, since all of them are one sample
        origins = np.concatenate([np.unique(origins[rows]) for rows in owned])
    most = int(np.unique(origins, return_counts=True)[1].max())
    if most <= allowed:
        return
    if owned is not None:
        raise ValueError(f"owners must give repetitions of a record one id, but one has {most}: leave them out")
    raise ValueError(
        f"data_loader must be over data that hold each record {'once' if allowed == 1 else f'{allowed} times'}, but "
        f"one is there {most} times, as by a Subset with repeated indices or a ConcatDataset of one data set: "
        f"leave repetitions out (more epochs do as well), or pay for them by records_per_person={most}"
    )


def _origins(dataset: Any, known: dict[int, int]) -> NDArray[np.int64]:
    """For each record, its index in the data set it comes from plus 2^40 times that data set's number in ``known``."""
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_origins(part, known) for part in dataset.datasets])
    if isinstance(dataset, Subset) and len(dataset):
        if (indices := np.asarray(dataset.indices)).dtype.kind not in "iu":
            raise ValueError(f"a Subset's indices must be integers, got {indices.dtype}: give mask.nonzero()[:, 0]")
        return _origins(dataset.dataset, known)[indices]
    return np.arange(len(dataset), dtype=np.int64) + (known.setdefault(id(dataset), len(known)) << 40)


def _check_order(sampler: object, num_records: int) -> None:
    """ValueError for a sampler that selects, repeats or weights records, which Poisson sampling would not do."""
    whole = (torch.utils.data.SequentialSampler, torch.utils.data.RandomSampler)
    plain = type(sampler) in whole and not getattr(sampler, "replacement", False)
    if not (plain and len(cast(Sized, sampler)) == num_records == len(cast(Any, sampler).data_source)):
        raise ValueError(
            f"data_loader must have no sampler of its own, got {type(sampler).__name__}: Poisson sampling takes its "
            "place. On several processes give each the same loader, over the whole data set and with the batch size of "
            "all together; to train on some records give torch.utils.data.Subset(dataset, indices); to let some count "
            "for more, optimizer.step(loss, batch, weights=...)"
        )


def _owned(owners: Any, records: int) -> list[list[int]]:
    """The indices of each owner's records, from one owner id per record; ValueError if these do not fit."""
    ids = owners.tolist() if hasattr(owners, "tolist") else owners
    ids = [*ids] if isinstance(ids, Iterable) and not isinstance(ids, str | Mapping) else None
    if ids is None or len(ids) != records:
        seen = type(owners).__name__ if ids is None else len(ids)
        raise ValueError(f"owners must be a list, array or tensor of {records} ids, in the records' order, got {seen}")
    kinds = {type(owner) for owner in ids}
    if kinds != {str} and not all(issubclass(kind, Integral) and kind is not bool for kind in kinds):
        raise ValueError(
            f"owners must be integers, or all of them strings, got {', '.join(sorted(k.__name__ for k in kinds))}: "
            "leave records out whose owner is missing (None, NaN), or give each of them an id of its own"
        )
    rows_of: dict[Any, list[int]] = {}
    for row, owner in enumerate(ids):
        rows_of.setdefault(owner, []).append(row)
    return list(rows_of.values())
