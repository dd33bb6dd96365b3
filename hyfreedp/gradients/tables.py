"""Per-sample gradients of an embedding table, and of parameters that one forward pass uses several times."""

from collections.abc import Sequence
from functools import cached_property, reduce

import torch
from torch import Tensor

from hyfreedp.gradients.per_sample import (
    SQUARES,
    Instantiated,
    OuterProducts,
    PerSampleGradients,
    relative_rounding,
    squared_row_norms,
    widened,
)


class EmbeddingRows(PerSampleGradients):
    """g_i adds rows (B, T, d) to entries ids (B, T) of a table of shape (entries, d), except to entry ``padding``."""

    def __init__(self, ids: Tensor, rows: Tensor, entries: int, padding: int | None = None) -> None:
        self.ids, self.entries = ids, entries
        self.rows = rows if padding is None else rows.masked_fill((ids == padding)[..., None], 0)

    @cached_property
    def _summed(self) -> tuple[Tensor, Tensor]:
        """Each sample's ids in order, (B, T), and rows (B, T, d): at the first of equal ids their sum, else zeros.

        Norms and weighted sums (also of some samples) both use these, so that rows cancel in both or in neither.
        """
        samples = torch.arange(len(self.ids), device=self.ids.device)
        pairs = (self.ids + self.entries * samples[:, None]).flatten()
        ordered = pairs.sort().values
        sums = widened(self.rows).new_zeros(len(pairs), self.rows.shape[-1])
        sums.index_add_(0, torch.searchsorted(ordered, pairs), widened(self.rows).flatten(0, 1))
        return (ordered % self.entries).view_as(self.ids), sums.view_as(self.rows)

    @cached_property
    def squared_norms(self) -> Tensor:
        ids, sums = self._summed
        squares = squared_row_norms(sums.flatten(0, 1))
        if ids.shape[1] > SQUARES // 8:  # index_add_ adds them one by one, not in eight lanes
            squares = squares.double()
        owners = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
        return squares.new_zeros(len(ids)).index_add_(0, owners, squares).to(sums.dtype)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        ids, sums = self._summed
        table = sums.new_zeros(self.entries, sums.shape[-1])
        return table.index_add_(0, ids.flatten(), (sums * weights.to(sums.dtype)[:, None, None]).flatten(0, 1))

    def added_to(self, tables: Tensor) -> Tensor:
        """The sum of these gradients and others of shape (B, entries, d), in float32 or wider."""
        return widened(tables).scatter_add(1, self.ids[..., None].expand_as(self.rows), widened(self.rows))

    def select(self, samples: Tensor | slice) -> "EmbeddingRows":
        ids, sums = self._summed
        return EmbeddingRows(ids[samples], sums[samples], self.entries)


class TiedTable(PerSampleGradients):
    """A table used both to embed and to compute logits: the sum of an ``EmbeddingRows`` and of the head's gradients."""

    def __init__(self, embedding: EmbeddingRows, head: OuterProducts) -> None:
        self.embedding, self.head = embedding, head

    @cached_property
    def squared_norms(self) -> Tensor:
        """Both squares, plus 2 <head_i, embedding_i> = 2 sum_ts left_it[id_is] <right_it, row_is> with its rounding.

        Where the two uses cancel, at least a quarter of both squares counts: each use is summed, and rounded, apart.
        """
        ids, rows = self.embedding.ids, widened(self.embedding.rows)
        left, right = widened(self.head.left), widened(self.head.right)
        picked = left.gather(2, ids[:, None, :].expand(-1, left.shape[1], -1))
        cross = (picked * (right @ rows.mT)).sum((1, 2))
        squares = [squared_row_norms(t.flatten(1)) for t in (left, right, rows)]
        rounding = (squares[0] * squares[1] * squares[2] * rows.shape[1]).sqrt()
        rounding = rounding * relative_rounding(left.shape[2], right.shape[2], left.dtype)
        separate = self.embedding.squared_norms + self.head.squared_norms
        return torch.maximum(separate + 2 * (cross + rounding), separate / 4)

    @property
    def block(self) -> int:
        return min(self.embedding.block, self.head.block)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.embedding.weighted_sum(weights) + self.head.weighted_sum(weights)

    def select(self, samples: Tensor | slice) -> "TiedTable":
        return TiedTable(self.embedding.select(samples), self.head.select(samples))


def add_uses(uses: Sequence[PerSampleGradients]) -> PerSampleGradients:
    """The gradients of a parameter that one forward pass used several times: for each sample the sum over its uses.

    Outer products of several uses are concatenated, like tokens of a longer sequence.
    """
    if len(uses) == 1:
        return uses[0]
    heads = [use for use in uses if isinstance(use, OuterProducts)]
    embeddings = [use for use in uses if isinstance(use, EmbeddingRows)]
    parts: list[Instantiated | OuterProducts] = [use for use in uses if isinstance(use, Instantiated)]
    if heads:
        joined = OuterProducts(torch.cat([h.left for h in heads], 1), torch.cat([h.right for h in heads], 1))
        parts.append(joined.cheaper(0))
    if embeddings:
        ids, rows = torch.cat([e.ids for e in embeddings], 1), torch.cat([e.rows for e in embeddings], 1)
        table = EmbeddingRows(ids, rows, embeddings[0].entries)
        if not parts:
            return table
        if len(parts) == 1 and isinstance(parts[0], OuterProducts):
            return TiedTable(table, parts[0])
    elif len(parts) == 1:
        return parts[0]
    added = reduce(torch.add, (part.instantiate().rows for part in parts))  # (B, entries of S)
    return Instantiated(table.added_to(added.unflatten(1, (table.entries, -1))) if embeddings else added)
