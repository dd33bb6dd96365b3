"""Pieces of a batch: samples that are mapped together, which have the same shapes and decide alike in Python.

Where Python asks for a value (``if mask.all()``), a map needs one answer for all its samples. :class:`Decisions` gives
it if they agree. If not, the piece is split by their answers, and each part is mapped with its answers known.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hyfreedp.checks import check_count
from hyfreedp.data.batches import Group, PhysicalBatchSize, groups_of
from hyfreedp.errors import Refused

SLOW = "samples are computed one at a time, since {}. It is exact and slow: see docs/usage.md, 'What is slow'"
MOST_TOGETHER = 4096  # samples; in float32 the sum of many more could be wrong by a clip, if all gradients agree
_MAX_ATTEMPTS = 50  # with other random numbers, until a sample alone decides as its piece did
Path = tuple[Tensor, ...]  # the answers to the first decisions of Python


class Regroup(Exception):
    """A piece cannot be mapped as it is; ``pieces`` makes the pieces to replace it by, the last first."""

    def __init__(self, pieces: Callable[[Piece], list[Piece]]) -> None:
        self.pieces = pieces


class Unmappable(RuntimeError):
    """The loss does something that cannot be mapped, so its samples are computed one at a time."""


class Decisions:
    """The answers that the samples of one pass have in common.

    Args:
        path: the answers to the first decisions, known from an earlier pass; later ones are added to the attribute.
        wanted: positions of the samples that decide; None for all.
    """

    def __init__(self, path: Path = (), wanted: Tensor | None = None) -> None:
        self.path, self.answered = path, 0
        self._wanted = slice(None) if wanted is None else wanted

    def answer(self, answers: Tensor) -> Tensor:
        """The common answer, shape (...), of the samples' ``answers`` (n, ...) to the next decision.

        Regroup if samples differ, or if they differ from the path, because the decision depends on random numbers.
        """
        answers, path = answers.detach()[self._wanted], self.path
        if self.answered < len(path):
            if not _agree(answers, path[self.answered]):
                raise Regroup(Piece.as_whole)
        elif len(groups := _positions_by_answer(answers)) > 1:
            if len(groups) == len(answers) and answers.is_floating_point():
                warnings.warn(SLOW.format("the loss asks each for a number, by .item() or float()"), stacklevel=2)
            raise Regroup(lambda piece: piece.split([((*path, answers[rows[0]]), rows) for rows in groups]))
        else:
            self.path += (answers[0].clone(),)
        self.answered += 1
        return self.path[self.answered - 1]


def _agree(answers: Tensor, before: Tensor) -> bool:
    """Whether all answers equal an earlier one, up to rounding, which depends on the size of a group."""
    if answers.dtype != before.dtype or answers.shape[1:] != before.shape:
        return False
    if answers.is_floating_point() or answers.is_complex():
        return torch.allclose(answers, before.expand_as(answers), rtol=1e-4, equal_nan=True)
    return bool((answers == before).all())


def _positions_by_answer(answers: Tensor) -> list[Tensor]:
    """For each answer the positions of its samples, on the CPU. Bits are compared: 0.0 is not -0.0, NaN equals NaN."""
    if len(answers) == 1 or answers[0].numel() == 0:
        return [torch.arange(len(answers))]
    bits = answers.contiguous().reshape(len(answers), -1).view(torch.uint8)
    kinds, kind_of = bits.unique(dim=0, return_inverse=True)
    return [(kind_of == k).nonzero()[:, 0].cpu() for k in range(len(kinds))]


@dataclass(eq=False)
class Piece:
    """Samples that are mapped together.

    Say the loss has ``if x.sum() > 0``, and samples 0 and 3 answer True, 1 and 2 False. Then two pieces replace that of
    all four: samples 1 and 2 with ``path`` (False,), and 0 and 3 with (True,), each with random numbers of its own. If
    the loss asks ``if torch.rand(()) < p``, samples may now answer otherwise than their path says. Then ``whole``
    replaces the piece: all four, with the random numbers of the first time, of which those ``wanted`` are used.
    """

    group: Group  # the samples that are mapped
    path: Path = ()  # their answers to the first decisions, as far as known; equal for all that are wanted
    wanted: Tensor | None = None  # positions in the group of the samples whose results are used; None for all
    repeats: tuple[int, int] | None = None  # the name of the random numbers that it repeats; None: it has its own
    whole: Piece | None = None  # to compute instead if a decision depends on random numbers, if it was not cut
    attempt: int = 0  # of one sample that is computed without a map: 1, 2, ...; each draws other random numbers

    @property
    def positions(self) -> Tensor:
        """As ``wanted``, but never None."""
        return torch.arange(len(self.group)) if self.wanted is None else self.wanted

    @property
    def rows(self) -> Tensor:
        """Positions in the batch of the samples whose results are used."""
        return self.group.rows if self.wanted is None else self.group.rows[self.wanted]

    @property
    def stream(self) -> tuple[int, int]:
        """The name of its random numbers: the first sample's place in the batch, the attempt or number of answers."""
        return self.repeats or (int(self.group.rows[0]), self.attempt or len(self.path))

    def split(self, parts: list[tuple[Path, Tensor]]) -> list[Piece]:
        """One piece for each path and the samples with these answers, given by their places in :attr:`positions`."""
        pieces = []
        for path, places in reversed(parts):
            positions = self.positions[places]
            piece = Piece(self.group, path, positions, repeats=self.stream)
            if self.wanted is None:  # it is not known whether decisions depend on random numbers
                piece = Piece(self.group.take(positions), path, whole=piece)
            pieces.append(piece)
        return pieces

    def cut(self, size: int) -> list[Piece]:
        """Pieces of at most ``size`` samples."""
        return [Piece(self.group.take(positions), self.path) for positions in reversed(self.positions.split(size))]

    def one_by_one(self, path: Path) -> list[Piece]:
        """Each sample on its own, to be computed without a map; ``path`` are the answers of all to first decisions."""
        places = self.positions.flip(0).tolist()
        return [Piece(self.group.take(slice(i, i + 1)), path, attempt=1) for i in places]

    def as_whole(self) -> list[Piece]:
        """[``whole``], or another attempt of a sample alone; Refused if there is none, since the piece was cut."""
        if self.attempt:
            attempt = self.attempt + 1
            return [replace(self, attempt=attempt, path=self.path if attempt < _MAX_ATTEMPTS else ())]
        if self.whole is None:
            raise Refused(
                "a decision of Python depends on random numbers, among samples that are too many for the memory: set "
                "max_physical_batch_size"
            )
        return [self.whole]


@dataclass
class Partition:
    """The samples of a batch, divided into pieces, which a pass replaces by smaller ones if it must split them."""

    pieces: list[Piece]  # those with which a pass begins; after it, those that it has computed
    # Called with each piece, to seed its random numbers. By default they are not seeded, and every pass begins with the
    # caller's, which it does not use up.
    begin: Callable[[Piece], None] = lambda piece: None
    checked: bool | None = None  # what may be computed twice to find memory: any piece (True), lone samples (False)

    @classmethod
    def of(cls, batch: Any, size: PhysicalBatchSize = None) -> Partition:
        """A batch in pieces of at most ``size`` samples; a partition is returned as it is.

        If ``size`` is a function, it gets each group's first record. A piece has at most :data:`MOST_TOGETHER` samples.
        """
        if isinstance(batch, Partition):
            return batch
        pieces, groups = [], groups_of(batch)
        if 8 < sum(map(len, groups)) < 2 * len(groups):
            warnings.warn(SLOW.format("nearly each has a shape, text, array or number of its own"), stacklevel=2)
        for group in groups:
            most = size(group.record([tensor[0].clone() for tensor in group.tensors])) if callable(size) else size
            most = MOST_TOGETHER if size is None else check_count("max_physical_batch_size, or its value,", most, 1)
            starts = range(0, len(group), min(most, MOST_TOGETHER))
            pieces += [Piece(group.take(slice(start, start + starts.step))) for start in starts]
        return cls(pieces)

    def in_order(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """The values of all pieces' samples, in the order of the batch, shape ``(B,)``."""
        if not parts:
            return torch.zeros(0, dtype=torch.float64, device=device)
        joined = torch.cat(list(parts))
        if len(parts) == 1:
            return joined
        return joined[torch.cat([piece.rows for piece in self.pieces]).argsort().to(device, non_blocking=True)]
