"""The per-sample gradients of one parameter, in the cheapest form that still knows their norms and weighted sums.

For a weight that multiplies T vectors per sample, sample i's gradient is a sum of T outer products. Its norm follows
from the two T x T Gram matrices without forming it (Goodfellow 2015 for T = 1, the "ghost norm" of Li et al. 2022 for
T > 1), and sum_i c_i g_i is one matrix product over all samples and tokens ("book-keeping", Bu et al. 2023). Where T is
large the gradient itself is smaller than its factors, or takes less time, and then it is kept instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, reduce
from math import prod

import torch
from torch import Tensor, nn

# Bytes of gradients that one backward pass may keep, beyond which only those that are no larger than their factors are
# kept; a private step needs so much more memory at most.
MEMORY_BUDGET = 2**28
_SHARE, _FEW = 1e-3, 16  # of a squared norm that rounding may have lost; such gradients that are taken at once
_TRAFFIC = 16  # multiplications in the time in which a number of a gradient is written and, twice, read


class PerSampleGradients(ABC):
    """Gradients g_1 ... g_B of one parameter of shape S."""

    @property
    @abstractmethod
    def squared_norms(self) -> Tensor:
        """||g_i||^2, shape (B,), float32 or wider."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """sum_i weights_i g_i for weights of shape (B,); the result has shape S and is float32 or wider.

        Weights, products and the sum are of that width too: rounded to half precision, a sum of many samples would move
        by several times what one of them contributes.
        """

    @abstractmethod
    def instantiate(self) -> Tensor:
        """All gradients, shape (B, *S)."""

    @abstractmethod
    def select(self, samples: Tensor) -> PerSampleGradients:
        """The gradients of the samples chosen by a boolean mask of shape (B,)."""

    def cheaper(self, room: int) -> PerSampleGradients:
        """In the form that takes less time, of which so many bytes may be kept."""
        return self

    @property
    def lost(self) -> Tensor | None:
        """What rounding may have taken from the squared norms, shape (B,); None where they are of what is added."""
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
    """Gradients in the form of their factors, whose norms are what :func:`gram_norms` gives."""

    @property
    @abstractmethod
    def gram_norms(self) -> tuple[Tensor, Tensor]: ...

    @property
    def squared_norms(self) -> Tensor:
        return self.gram_norms[0]

    @property
    def lost(self) -> Tensor:
        return self.gram_norms[1]


class OuterProducts(Factors):
    """g_i = sum_t left_it right_it^T, from left (B, T, p) and right (B, T, d); the parameter has shape (p, d)."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right

    @cached_property
    def gram_norms(self) -> tuple[Tensor, Tensor]:
        return gram_norms(self.left, self.right)

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

    def cheaper(self, room: int) -> PerSampleGradients:
        p, d = self.left.shape[2], self.right.shape[2]
        fits = len(self.left) * p * d * max(4, self.left.element_size()) <= room
        return self if keeps_factors(self.left.shape[1], p, d, fits) else Instantiated(self.instantiate())


class EmbeddingRows(PerSampleGradients):
    """g_i adds rows (B, T, d) at positions ids (B, T) of a table of shape (entries, d); none at the padding's entry."""

    def __init__(self, ids: Tensor, rows: Tensor, entries: int, padding: int | None = None) -> None:
        self.ids, self.entries = ids, entries
        self.rows = rows if padding is None else rows.masked_fill((ids == padding)[..., None], 0)

    @cached_property
    def _summed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each sample's rows of one token, added up; their samples and tokens. Norms and sums are both of these.

        Rows that cancel would else be lost from others' sums by rounding.
        """
        samples = torch.arange(len(self.ids), device=self.ids.device)
        # There is room for as many pairs as there are tokens, since to count them would wait for the device.
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
            sizes = [_squared_norms(t.flatten(1)) for t in (picked, rows)]
            rounding = 8 * rows[0].numel() ** 0.5 * torch.finfo(rows.dtype).eps * (sizes[0] * sizes[1]).sqrt()
        else:  # = sum_ts left_it[id_is] <right_it, row_is>
            left, right = self.head.left, widened(self.head.right)
            picked = left.gather(2, ids[:, None, :].expand(-1, left.shape[1], -1))
            cross = (widened(picked) * (right @ rows.mT)).sum((1, 2))
            sizes = [_squared_norms(widened(t).flatten(1)) for t in (left, right, rows)]
            rounding = _rounding(widened(left), right) * (sizes[0] * sizes[1] * sizes[2] * rows.shape[1]).sqrt()
        cross = 2 * (cross + rounding) + (0 if self.head.lost is None else self.head.lost)
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
    """Whether to keep T = ``tokens`` pairs of vectors (p and d long) per sample, not their sum of products (p, d).

    Per sample, factors are T (p + d) numbers, the gradient p d. Where the gradient is not larger, it is kept: it saves
    memory, and the norm's T^2 (p + d) multiplications for two Gram matrices are no fewer than T p d for the gradient.

    Else memory ``fits`` or not; where it does, time decides. The weighted sum takes T p d multiplications from factors
    once more; with the gradient, which took as many, each of its p d numbers is written, read for the norm, and read
    for the sum instead. The whole is T^2 (p + d) + T p d against T p d + c p d, where c was measured in steps of a ViT
    and a GPT on a CPU: the gradient is quicker where T^2 (p + d) > c p d. With T = 1 factors are best.
    """
    smaller = p * d <= tokens * (p + d)
    quicker = fits and _TRAFFIC * p * d < tokens**2 * (p + d)
    return tokens == 1 or not (smaller or quicker)


class Settled(PerSampleGradients):
    """Gradients of which some, the ``unsure``, shape (B,), are instantiated for norm and sum, a few at a time."""

    def __init__(self, factors: PerSampleGradients, unsure: Tensor) -> None:
        self.factors, self.unsure = factors, unsure

    def _each(self) -> Iterator[tuple[Tensor, Instantiated]]:
        for rows in self.unsure.nonzero()[:, 0].split(_FEW):
            chosen = torch.zeros_like(self.unsure).index_fill(0, rows, True)
            yield rows, Instantiated(widened(self.factors.select(chosen).instantiate()))

    @cached_property
    def squared_norms(self) -> Tensor:
        norms = self.factors.squared_norms.clone()
        for rows, each in self._each():
            norms[rows] = each.squared_norms.to(norms.dtype)
        return norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.factors.weighted_sum(weights.masked_fill(self.unsure, 0))
        for rows, each in self._each():
            total = total + each.weighted_sum(weights[rows])
        return total

    def instantiate(self) -> Tensor:
        return self.factors.instantiate()

    def select(self, samples: Tensor) -> Settled:
        return Settled(self.factors.select(samples), self.unsure[samples])


def settle(gradients: dict[nn.Parameter, PerSampleGradients]) -> None:
    """Make norms those of what is added, in whatever form, about which other records decide.

    Where rounding may have lost a share of a norm, since tokens cancel, that sample's gradient itself is taken.
    """
    unsure = {p: g.lost > _SHARE * g.squared_norms for p, g in gradients.items() if g.lost is not None}
    some = [each.any() for each in unsure.values()]  # read at once: each reading waits for the device
    told = torch.stack([one.to(some[0].device) for one in some]).tolist() if some else []
    for (p, each), one in zip(unsure.items(), told, strict=True):
        if one:
            gradients[p] = Settled(gradients[p], each)


def add_uses(uses: Sequence[PerSampleGradients]) -> PerSampleGradients:
    """The gradients of a parameter that one forward pass used several times: each sample's uses add up.

    Products of one use follow those of another like further tokens of a longer sequence.
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
    """||sum_t left_it right_it^T||^2 from left (N, T, p) and right (N, T, d), and what rounding may have lost of it.

    Both of shape (N,), float32 or wider. Nothing is lost beside the norm unless tokens cancel.
    """
    left, right = widened(left), widened(right)
    if left.shape[1] == 1:
        tiny = torch.finfo(left.dtype).tiny  # as in _underflow
        lefts, rights = (_squared_norms(t[:, 0]) + t.shape[2] * tiny for t in (left, right))
        return lefts * rights, torch.zeros_like(lefts)
    products_left, products_right = left @ left.mT, right @ right.mT
    lefts, rights = (products.diagonal(dim1=1, dim2=2) for products in (products_left, products_right))
    sizes = (lefts * rights).sqrt().sum(1).square()  # if no tokens cancelled; padding adds nothing
    norms = (products_left * products_right).sum((1, 2)).clamp(min=0)
    return norms + _underflow(left, lefts.sum(1), right, rights.sum(1)), _rounding(left, right) * sizes


def _rounding(left: Tensor, right: Tensor) -> float:
    """Relative error of a product of inner products: eight standard deviations of as many independent roundings."""
    return 4 * (left.shape[2] ** 0.5 + right.shape[2] ** 0.5) * torch.finfo(left.dtype).eps


def _underflow(left: Tensor, lefts: Tensor, right: Tensor, rights: Tensor) -> Tensor:
    """What may be missing from the product of two squared norms because squares of tiny numbers are zero."""
    tiny = torch.finfo(left.dtype).tiny
    return left[0].numel() * tiny * rights + right[0].numel() * tiny * lefts


def widened(t: Tensor) -> Tensor:
    """In float32, or wider if it is."""
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
    """Of the rows of (N, d), shape (N,), summed in float32 or wider."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.promote_types(x.dtype, torch.float32)).square()
