"""Several processes that train one model together: what they exchange, and how they fail together.

Every process holds the whole model and computes its own part of every Poisson batch. Clipped gradients and losses are
summed over the processes. Then each process draws the same noise, a function of the same key and the same sum. So all
have the same weights, learning rate and thresholds, bit for bit, without sending them. Processes with different
hardware or PyTorch could compute other bits and are refused; every step checks that all have drawn the same noise.

Not covered: models that are themselves split over processes (FSDP, tensor and pipeline parallelism).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# Tensors are joined and sent in buckets: fewer messages take less time, smaller buckets less memory.
BUCKET_BYTES = 2**25


class Processes:
    """The processes of a run, which must all call the same methods in the same order. A single one sends nothing.

    If one of them dies, the others get an error: from gloo at once, else after ``init_process_group``'s timeout.

    Args:
        group: a process group with this process (else ValueError); None: all processes if torch.distributed is
            initialised, else this one alone.
        device: of the tensors that are sent.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if self.rank < 0:
            raise ValueError("process_group must hold this process: give one of which it is a member, or none")
        self._group, self._device = group, device

    def check_joined(self) -> None:
        """RuntimeError if ``init_process_group`` was called since: each process would train a run of its own."""
        if self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "init_process_group was called after make_private_with_epsilon, so each process trains a run of its "
                "own, and their epsilons add: call it before"
            )

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the processes, the same bits on all of them."""
        if self.size > 1:
            _in_buckets(tensors, partial(dist.all_reduce, group=self._group))

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by that of the first process."""
        if self._group is not None and self.size > 1:
            first = dist.get_global_rank(self._group, 0)
            _in_buckets(tensors, partial(dist.broadcast, src=first, group=self._group))

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in order of rank; for small objects of any type."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def join_samples(self, values: Tensor) -> Tensor:
        """Per-sample values of all processes, shape ``(..., B)`` each, joined along the last dimension."""
        return torch.cat([part.to(values.device) for part in self.gather(values)], dim=-1)

    def agree(self, **values: Any) -> None:
        """ValueError, on all processes, unless all pass equal values; the message names one that differs."""
        first, *others = self.gather({name: " ".join(repr(value).split()) for name, value in values.items()})
        for rank, other in enumerate(others, start=1):
            for name in first:
                if other[name] != first[name]:
                    a, b = _from_difference(first[name], other[name])
                    raise ValueError(
                        f"all processes must be given the same run, but {name} is {a} on rank 0 and {b} on rank {rank}"
                    )

    def check_same(self, number: int) -> None:
        """RuntimeError, on all processes, unless all pass the same number of 63 bits."""
        if self.size == 1:
            return
        both = torch.tensor([number, -number], dtype=torch.int64, device=self._device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        if int(both[0]) != -int(both[1]):
            raise RuntimeError("the processes hold different sums: all_reduce must give every process the same bits")

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A context for work that each process does by itself: an error in one raises RuntimeError in the others."""
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        failed = torch.tensor(0 if error is None else self.rank + 1, device=self._device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if error is not None:
            raise error
        if failed > 0:
            raise RuntimeError(f"rank {int(failed) - 1} failed; its own traceback tells why")


def _from_difference(*texts: str) -> list[str]:
    """Excerpts of two texts, from a little before the first character that differs."""
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    start = max(0, alike - 30)
    return [("..." if start else "") + text[start : start + 60] for text in texts]


@torch.no_grad()
def _in_buckets(tensors: Iterable[Tensor], collective: Callable[[Tensor], Any]) -> None:
    """Apply an in-place collective operation to any tensors, in few messages."""
    for bucket in torch._utils._take_tensors(tensors, BUCKET_BYTES):  # each of one type and device
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        collective(flat)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))
