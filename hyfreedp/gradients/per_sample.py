"""Per-sample gradients of one parameter, in the cheapest form that gives their norms and weighted sums.

For a weight that multiplies T vectors per sample, sample i's gradient is a sum of T outer products. Its norm follows
from the two T x T Gram matrices without forming it (Goodfellow 2015 for T = 1, the "ghost norm" of Li et al. 2022 for
T > 1), and sum_i c_i g_i is one matrix product over all samples and tokens ("book-keeping", Bu et al. 2023). For large
T the gradient itself takes less memory or time than its factors, and is kept instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, reduce
from math import prod

import torch
from torch import Tensor, nn

# Bytes of gradients that a backward pass may keep for speed; beyond, only those no larger than their factors are kept.
MEMORY_BUDGET = 2**28
_LARGEST_RELATIVE_ERROR = 1e-3  # of a squared norm from factors; beyond, the gradient is instantiated
_INSTANTIATED_AT_ONCE = 16  # such gradients
_MULTIPLICATIONS_PER_ENTRY = 16  # in the time in which an entry of a gradient is written once and read twice


class PerSampleGradients(ABC):
    """Gradients g_1 ... g_B of one parameter of shape S."""

    @property
    @abstractmethod
    def squared_norms(self) -> Tensor:
        """||g_i||^2, shape (B,), float32 or wider."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """sum_i weights_i g_i for weights of shape (B,); the result has shape S and is float32 or wider.

        Weights and products are of that width, too. In half precision, the rounding error of a sum over many samples
        would be several times the contribution of one.
        """

    @abstractmethod
    def instantiate(self) -> Tensor:
        """All gradients, shape (B, *S)."""

    @abstractmethod
    def select(self, samples: Tensor) -> PerSampleGradients:
        """The gradients of the samples chosen by a boolean mask of shape (B,)."""

    def cheaper(self, memory: int) -> PerSampleGradients:
        """The same gradients in the form that takes least time, if they may take ``memory`` bytes."""
        return self

    @property
    def norm_error(self) -> Tensor | None:
        """An upper bound of the rounding error of ``squared_norms``, shape (B,); None if it is negligible."""
        return None


class Instantiated(PerSampleGradients):
    """The gradients themselves, shape (B, *S)."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients

    @cached_property
    def squared_norms(self) -> Tensor:
        return _squared_norms(self._flat())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        flat = widened(self._flat())
        return (weights.to(flat.dtype) @ flat).view(self.gradients.shape[1:])

    def instantiate(self) -> Tensor:
        return self.gradients

    def select(self, samples: Tensor) -> Instantiated:
        return Instantiated(self.gradients[samples])

    def _flat(self) -> Tensor:
        return self.gradients.reshape(len(self.gradients), prod(self.gradients.shape[1:]))


class Factors(PerSampleGradients):
    """Gradients in the form of factors, whose norms are computed without forming the gradients."""

    @property
    @abstractmethod
    def gram_norms(self) -> tuple[Tensor, Tensor]:
        """See :func:`gram_norms`."""

    @property
    def squared_norms(self) -> Tensor:
        return self.gram_norms[0]

    @property
    def norm_error(self) -> Tensor | None:
        return self.gram_norms[1]


class OuterProducts(Factors):
    """g_i = sum_t left_it right_it^T, from left (B, T, p) and right (B, T, d); the parameter has shape (p, d)."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right

    @cached_property
    def gram_norms(self) -> tuple[Tensor, Tensor]:
        return gram_norms(self.left, self.right)

    @property
    def norm_error(self) -> Tensor | None:
        return None if self.left.shape[1] == 1 else self.gram_norms[1]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        left, right = widened(self.left), widened(self.right)
        weights = weights.to(left.dtype)[:, None, None]
        if left.numel() < right.numel():
            left = left * weights
        else:
            right = right * weights
        return left.flatten(0, 1).T @ right.flatten(0, 1)

    def instantiate(self) -> Tensor:
        return self.left.mT @ self.right

    def select(self, samples: Tensor) -> OuterProducts:
        return OuterProducts(self.left[samples], self.right[samples])

    def cheaper(self, memory: int) -> PerSampleGradients:
        p, d = self.left.shape[2], self.right.shape[2]
        fits = len(self.left) * p * d * max(4, self.left.element_size()) <= memory
        return self if keeps_factors(self.left.shape[1], p, d, fits) else Instantiated(self.instantiate())


class EmbeddingRows(PerSampleGradients):
    """g_i adds rows (B, T, d) to entries ids (B, T) of a table of shape (entries, d), except to entry ``padding``."""

    def __init__(self, ids: Tensor, rows: Tensor, entries: int, padding: int | None = None) -> None:
        self.ids, self.entries = ids, entries
        self.rows = rows if padding is None else rows.masked_fill((ids == padding)[..., None], 0)

    @cached_property
    def _summed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of rows over equal (sample, token) pairs, shape (B T, d), and each pair's sample and token, (B T,).

        Norms and weighted sums are both computed from these, so that rows which cancel do so in both.
        """
        samples = torch.arange(len(self.ids), device=self.ids.device)
        # The results have a row for each of the B T tokens: counting the distinct pairs would wait for the device.
        pairs, order = (self.ids + self.entries * samples[:, None]).flatten().sort()
        numbers = (pairs.diff(prepend=pairs[:1]) != 0).cumsum(0)
        inverse, owners, tokens = (torch.zeros_like(order) for _ in range(3))
        inverse[order], owners[numbers], tokens[numbers] = numbers, pairs // self.entries, pairs % self.entries
        sums = widened(self.rows).new_zeros(len(pairs), self.rows.shape[-1])
        return sums.index_add_(0, inverse, widened(self.rows).flatten(0, 1)), owners, tokens

    @cached_property
    def squared_norms(self) -> Tensor:
        sums, owners, _ = self._summed
        return sums.new_zeros(len(self.ids)).index_add_(0, owners, _squared_norms(sums))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        sums, owners, tokens = self._summed
        table = sums.new_zeros(self.entries, sums.shape[-1])
        return table.index_add_(0, tokens, sums * weights.to(sums.dtype)[owners, None])

    def instantiate(self) -> Tensor:
        tables = self.rows.new_zeros(len(self.ids), self.entries, self.rows.shape[-1])
        return tables.scatter_add_(1, self.ids[..., None].expand_as(self.rows), self.rows)

    def select(self, samples: Tensor) -> EmbeddingRows:
        return EmbeddingRows(self.ids[samples], self.rows[samples], self.entries)


class TiedTable(PerSampleGradients):
    """A table used both to embed and to compute logits: the sum of an ``EmbeddingRows`` and of the head's gradients."""

    def __init__(self, embedding: EmbeddingRows, head: OuterProducts | Instantiated) -> None:
        self.embedding, self.head = embedding, head

    @cached_property
    def squared_norms(self) -> Tensor:
        ids, rows = self.embedding.ids, widened(self.embedding.rows)
        if isinstance(self.head, Instantiated):  # <head_i, embedding_i> = sum_s <head_i[id_is], row_is>
            picked = widened(self.head.gradients.gather(1, ids[..., None].expand_as(rows)))
            cross = (picked * rows).sum((1, 2))
            squares = [_squared_norms(t.flatten(1)) for t in (picked, rows)]
            rounding = 8 * rows[0].numel() ** 0.5 * torch.finfo(rows.dtype).eps * (squares[0] * squares[1]).sqrt()
        else:  # = sum_ts left_it[id_is] <right_it, row_is>
            left, right = self.head.left, widened(self.head.right)
            picked = left.gather(2, ids[:, None, :].expand(-1, left.shape[1], -1))
            cross = (widened(picked) * (right @ rows.mT)).sum((1, 2))
            squares = [_squared_norms(widened(t).flatten(1)) for t in (left, right, rows)]
            rounding = _rounding(widened(left), right) * (squares[0] * squares[1] * squares[2] * rows.shape[1]).sqrt()
        cross = 2 * (cross + rounding) + (0 if self.head.norm_error is None else self.head.norm_error)
        return self.embedding.squared_norms + self.head.squared_norms + cross

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.embedding.weighted_sum(weights) + self.head.weighted_sum(weights)

    def instantiate(self) -> Tensor:
        return self.embedding.instantiate() + self.head.instantiate()

    def select(self, samples: Tensor) -> TiedTable:
        return TiedTable(self.embedding.select(samples), self.head.select(samples))


def products(left: Tensor, right: Tensor) -> OuterProducts:
    """sum_t left_it right_it^T from left (B, ..., p) and right (B, ..., d)."""
    return OuterProducts(_tokens(left), _tokens(right))


def keeps_factors(tokens: int, p: int, d: int, fits: bool = False) -> bool:
    """Whether to keep T = ``tokens`` pairs of vectors of lengths p and d per sample, or else their product (p, d).

    Per sample, the factors are T (p + d) numbers and the gradient is p d. A gradient that is not larger is kept: it
    saves memory, and takes T p d multiplications, no more than the T^2 (p + d) of the Gram matrices for the norm.

    A larger one is kept if it ``fits`` into memory and saves time. Factors take T^2 (p + d) multiplications for the
    norms and T p d for the weighted sum. The gradient takes T p d to be formed, and each of its p d entries is written
    once and read twice, which takes the time of c p d multiplications; c was measured in steps of a ViT and a GPT on a
    CPU. So the gradient is faster if T^2 (p + d) > c p d. With T = 1 factors are best.
    """
    smaller = p * d <= tokens * (p + d)
    faster = fits and _MULTIPLICATIONS_PER_ENTRY * p * d < tokens**2 * (p + d)
    return tokens == 1 or not (smaller or faster)


class PartlyInstantiated(PerSampleGradients):
    """Factors, of which the samples in the boolean mask ``inexact``, shape (B,), are instantiated, a few at a time."""

    def __init__(self, factors: PerSampleGradients, inexact: Tensor) -> None:
        self.factors, self.inexact = factors, inexact

    def _instantiated(self) -> Iterator[tuple[Tensor, Instantiated]]:
        for rows in self.inexact.nonzero()[:, 0].split(_INSTANTIATED_AT_ONCE):
            chosen = torch.zeros_like(self.inexact).index_fill(0, rows, True)
            yield rows, Instantiated(widened(self.factors.select(chosen).instantiate()))

    @cached_property
    def squared_norms(self) -> Tensor:
        norms = self.factors.squared_norms.clone()
        for rows, gradients in self._instantiated():
            norms[rows] = gradients.squared_norms.to(norms.dtype)
        return norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.factors.weighted_sum(weights.masked_fill(self.inexact, 0))
        for rows, gradients in self._instantiated():
            total = total + gradients.weighted_sum(weights[rows])
        return total

    def instantiate(self) -> Tensor:
        return self.factors.instantiate()

    def select(self, samples: Tensor) -> PartlyInstantiated:
        return PartlyInstantiated(self.factors.select(samples), self.inexact[samples])


def instantiate_inexact(gradients: dict[nn.Parameter, PerSampleGradients]) -> None:
    """Instantiate, in place, the gradients of samples whose norms may be inexact because tokens cancel.

    The form of a gradient depends on the other samples in the batch; with exact norms the clipped sum does not.
    """
    errors = {p: error for p, g in gradients.items() if (error := g.norm_error) is not None}
    inexact = {p: error > _LARGEST_RELATIVE_ERROR * gradients[p].squared_norms for p, error in errors.items()}
    if not inexact:
        return
    found = [mask.any() for mask in inexact.values()]
    present = torch.stack([one.to(found[0].device) for one in found]).tolist()  # waits for the device only once
    for (p, mask), some in zip(inexact.items(), present, strict=True):
        if some:
            gradients[p] = PartlyInstantiated(gradients[p], mask)


def add_uses(uses: Sequence[PerSampleGradients]) -> PerSampleGradients:
    """The gradients of a parameter that one forward pass used several times: sums over the uses of each sample.

    Outer products of several uses are concatenated, like tokens of a longer sequence.
    """
    if len(uses) == 1:
        return uses[0]
    heads = [use for use in uses if isinstance(use, OuterProducts)]
    embeddings = [use for use in uses if isinstance(use, EmbeddingRows)]
    parts = [use for use in uses if not isinstance(use, (OuterProducts, EmbeddingRows))]
    if heads:
        all_tokens = OuterProducts(torch.cat([h.left for h in heads], 1), torch.cat([h.right for h in heads], 1))
        parts.append(all_tokens.cheaper(0))
    if embeddings:
        ids, rows = torch.cat([e.ids for e in embeddings], 1), torch.cat([e.rows for e in embeddings], 1)
        parts.append(EmbeddingRows(ids, rows, embeddings[0].entries))
    match parts:
        case [single]:
            return single
        case [OuterProducts() | Instantiated() as head, EmbeddingRows() as embedding]:
            return TiedTable(embedding, head)
    return Instantiated(reduce(torch.add, (part.instantiate() for part in parts)))


def norms_of(gradients: Iterable[PerSampleGradients], losses: Tensor) -> Tensor:
    """||g_i|| over several parameters together, shape (B,), float32 or wider, inf where not finite."""
    zeros = torch.zeros_like(losses, dtype=torch.promote_types(losses.dtype, torch.float32))
    squared = sum((g.squared_norms for g in gradients), start=zeros)
    # Rounding may leave a tiny negative square; an overflow or NaN makes the norm inf and the factor 0.
    return squared.clamp(min=0).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf).detach()


def gram_norms(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of sum_t left_it right_it^T, from left (N, T, p) and right (N, T, d), and a bound of their error.

    Returns:
        The squared norms and an upper bound of their rounding error, which is large only if tokens cancel. Both have
        shape (N,) and are float32 or wider.
    """
    left, right = widened(left), widened(right)
    if left.shape[1] == 1:
        tiny = torch.finfo(left.dtype).tiny  # see _underflow
        lefts, rights = (_squared_norms(t[:, 0]) + t.shape[2] * tiny for t in (left, right))
        return lefts * rights, torch.zeros_like(lefts)
    products_left, products_right = left @ left.mT, right @ right.mT
    lefts, rights = (products.diagonal(dim1=1, dim2=2) for products in (products_left, products_right))
    uncancelled = (lefts * rights).sqrt().sum(1).square()  # the squared norms if no tokens cancelled
    norms = (products_left * products_right).sum((1, 2)).clamp(min=0)
    return norms + _underflow(left, lefts.sum(1), right, rights.sum(1)), _rounding(left, right) * uncancelled


def _rounding(left: Tensor, right: Tensor) -> float:
    """Bound of the relative error of a product of two inner products: eight standard deviations of its roundings."""
    return 4 * (left.shape[2] ** 0.5 + right.shape[2] ** 0.5) * torch.finfo(left.dtype).eps


def _underflow(left: Tensor, lefts: Tensor, right: Tensor, rights: Tensor) -> Tensor:
    """Bound of what the product of two squared norms lacks because squares of tiny numbers underflow to zero."""
    tiny = torch.finfo(left.dtype).tiny
    return left[0].numel() * tiny * rights + right[0].numel() * tiny * lefts


def widened(t: Tensor) -> Tensor:
    """``t`` in float32, or in its own type if that is wider."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def sum_tokens(t: Tensor, kept: int) -> Tensor:
    """(B, ..., *S) to (B, *S), where S has ``kept`` dimensions; sums are float32 or wider."""
    dims = tuple(range(1, t.dim() - kept))
    return widened(t).sum(dims) if dims else t


def sum_positions(t: Tensor) -> Tensor:
    """(B, C, ...) to (B, C); sums are float32 or wider."""
    return widened(t).flatten(2).sum(2) if t.dim() > 2 else t


def _tokens(x: Tensor) -> Tensor:
    """(B, ..., d) to (B, T, d)."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def _squared_norms(x: Tensor) -> Tensor:
    """Squared norms of the rows of (N, d), shape (N,), float32 or wider."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.promote_types(x.dtype, torch.float32)).square()
