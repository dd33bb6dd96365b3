"""Per-sample gradients of one parameter, in the cheapest form that gives their norms and weighted sums.

If a weight multiplies T vectors per sample, sample i's gradient is a sum of T outer products. Its norm follows from two
T x T Gram matrices, without forming the gradient (Goodfellow 2015 for T = 1, the "ghost norm" of Li et al. 2022 for
T > 1), and sum_i c_i g_i is one matrix product over all samples and tokens ("book-keeping", Bu et al. 2023). For large
T the gradient itself takes less memory or time than its factors, and is kept instead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property, reduce

import torch
from torch import Tensor

# Bytes of gradients that a backward pass may keep for speed. Beyond, a gradient is kept only if its factors are larger.
MEMORY_BUDGET = 2**28
_LARGEST_RELATIVE_ERROR = 1e-2  # of a squared norm by Gram matrices; if larger, the gradients are formed instead
_FORMED = 2**24  # entries of gradients that are formed at a time, for their norms alone
_BLOCK = 256  # numbers that a float32 sum may add one after the other
SQUARES = 2**18  # the most squares in one float32 sum: it loses at most 1/2000 of them, a longer one may lose any share
_LONGEST = 4096  # as _BLOCK, on accelerators, whose products add up tokens one by one, and where each call takes time
_LARGE, _ROWS_OF_BLAS = 16, 192  # for two vectors of 16 numbers or more BLAS (MKL) itself sums blocks of 192 products
_MULTIPLICATIONS_PER_ENTRY = 16  # done in the time of writing an entry of a gradient once and reading it twice


class PerSampleGradients(ABC):
    """Gradients g_1 ... g_B of one parameter of shape S."""

    @property
    def block(self) -> int:
        """The number of samples for which :meth:`weighted_sum` adds at most a few hundred numbers one by one."""
        return _BLOCK

    @property
    @abstractmethod
    def squared_norms(self) -> Tensor:
        """||g_i||^2, shape (B,), float32 or wider."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """sum_i weights_i g_i for weights (B,), in float32 or wider; the result has as many entries as the parameter.

        Weights and products are that wide, too. In half precision the rounding error of a sum over many samples would
        be several times the contribution of one.
        """

    @abstractmethod
    def select(self, samples: Tensor | slice) -> "PerSampleGradients":
        """The gradients of some samples, by their positions (n,), a boolean mask (B,) or a slice."""

    def cheaper(self, memory: float) -> "PerSampleGradients":
        """The same gradients in their fastest form, if each may take ``memory`` bytes."""
        return self


class Instantiated(PerSampleGradients):
    """The gradients themselves, shape (B, *S), each as a row."""

    def __init__(self, gradients: Tensor) -> None:
        self.rows = gradients.reshape(len(gradients), gradients.shape[1:].numel())

    @cached_property
    def squared_norms(self) -> Tensor:
        return squared_row_norms(self.rows)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        rows = widened(self.rows)
        return weights.to(rows.dtype) @ rows

    def instantiate(self) -> "Instantiated":
        return self

    def select(self, samples: Tensor | slice) -> "Instantiated":
        return Instantiated(self.rows[samples])


class OuterProducts(PerSampleGradients):
    """g_i = sum_t left_it right_it^T, with left (B, T, p) and right (B, T, d); the parameter has p d entries.

    To save memory, ``right`` may be a smaller tensor from which ``right_of`` computes right at each use.
    """

    def __init__(self, left: Tensor, right: Tensor, right_of: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.left, self._source, self._right_of = left, right, right_of

    @property
    def right(self) -> Tensor:
        return self._right_of(self._source)

    @property
    def block(self) -> int:
        tokens = max(1, self.left.shape[1])
        if self.left.device.type != "cpu":
            return min(_BLOCK, max(1, _LONGEST // tokens))
        large = min(self.left.shape[2], self._right_of(self._source[:1]).shape[2]) >= _LARGE
        return max(1, _BLOCK * (_ROWS_OF_BLAS if large else 1) // tokens)

    @cached_property
    def squared_norms(self) -> Tensor:
        """||g_i||^2, and for several tokens a bound of its rounding error added (large only where tokens cancel)."""
        left, right = widened(self.left), widened(self.right)
        if left.shape[1] == 1:
            return _squares(left[:, 0]) * _squares(right[:, 0])
        if left.shape[1] * relative_rounding(left.shape[2], right.shape[2], left.dtype) > _LARGEST_RELATIVE_ERROR:
            return _squares_by_gradients(left, right)
        return _squares_by_grams(left, right)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        left, right = widened(self.left), widened(self.right)
        weights = weights.to(left.dtype)[:, None, None]
        if left.numel() < right.numel():
            left = left * weights
        else:
            right = right * weights
        return left.flatten(0, 1).T @ right.flatten(0, 1)

    def instantiate(self) -> Instantiated:
        """In float32 or wider: no form of a gradient is rounded to half precision."""
        return Instantiated(widened(self.left).mT @ widened(self.right))

    def select(self, samples: Tensor | slice) -> "OuterProducts":
        return OuterProducts(self.left[samples], self._source[samples], self._right_of)

    def cheaper(self, memory: float) -> "OuterProducts | Instantiated":
        p, d = self.left.shape[2], self._right_of(self._source[:1]).shape[2]  # one sample, since all may take long
        fits = p * d * max(4, self.left.element_size()) <= memory
        return self if keeps_factors(self.left.shape[1], p, d, fits) else self.instantiate()


def products(left: Tensor, right: Tensor) -> OuterProducts:
    """sum_t left_it right_it^T from left (B, ..., p) and right (B, ..., d)."""
    left, right = (t.unsqueeze(1) if t.dim() == 2 else t.flatten(1, -2) for t in (left, right))
    return OuterProducts(left, right)


def keeps_factors(tokens: int, p: int, d: int, fits: bool = False) -> bool:
    """Whether to keep T = ``tokens`` pairs of vectors of lengths p and d per sample, instead of their product (p, d).

    Factors are T (p + d) numbers, the gradient p d. For T = 1 factors are kept. Else a gradient that is not larger is
    kept: it takes less memory and no more multiplications. A larger one is kept if it ``fits`` and saves time: factors
    take T^2 (p + d) multiplications for the norm and T p d for the sum; the gradient takes T p d, and the time of c p d
    to be written once and read twice (c is measured). Where Gram matrices are inexact, it must be formed anyway.
    """
    inexact = tokens * relative_rounding(p, d) > _LARGEST_RELATIVE_ERROR
    faster = fits and (inexact or _MULTIPLICATIONS_PER_ENTRY * p * d < tokens**2 * (p + d))
    return tokens == 1 or (p * d > tokens * (p + d) and not faster)


def sum_in_blocks(gradients: PerSampleGradients, weights: Tensor) -> Tensor:
    """:meth:`PerSampleGradients.weighted_sum`, block of samples by block.

    One float32 sum of n samples has an error of up to n^2 / 2^26 clips (0.25 for 4,096 samples, in each piece of a
    batch), and adding one record, which shifts all others, can change it by as much. In blocks of b it is n b / 2^26.
    Tokens are summed, too, so a block of factors has fewer samples, see :attr:`OuterProducts.block`.
    """
    size = gradients.block
    if len(weights) <= size:
        return gradients.weighted_sum(weights)
    blocks = [slice(start, start + size) for start in range(0, len(weights), size)]
    return reduce(Tensor.add_, (gradients.select(rows).weighted_sum(weights[rows]) for rows in blocks))


def relative_rounding(p: int, d: int, dtype: torch.dtype = torch.float32) -> float:
    """Bound (8 standard deviations) of the relative error of a product of two inner products, of p and d numbers."""
    return 4 * (p**0.5 + d**0.5) * torch.finfo(dtype).eps


def widened(t: Tensor) -> Tensor:
    """``t`` in float32, or in its own type if that is wider."""
    return t if t.dtype in (torch.float32, torch.float64) else t.to(torch.promote_types(t.dtype, torch.float32))


def sum_to(t: Tensor, kept: int) -> Tensor:
    """The sum over all dimensions but 0 and ``kept``, shape (B, n), in float32 or wider."""
    dims = [dim for dim in range(1, t.dim()) if dim != kept % t.dim()]
    return widened(t).sum(dims) if dims else t


def squared_row_norms(x: Tensor) -> Tensor:
    """Squared norms of the rows of (N, d), shape (N,), float32 or wider."""
    dtype, cut = torch.promote_types(x.dtype, torch.float32), x.shape[1] // SQUARES * SQUARES
    squares = torch.linalg.vector_norm(x[:, cut:], dim=1, dtype=dtype).square()
    if not cut:
        return squares
    parts = x[:, :cut].unflatten(1, (-1, SQUARES))
    return squares + torch.linalg.vector_norm(parts, dim=2, dtype=dtype).square().sum(1)


def _squares(x: Tensor) -> Tensor:
    """Squared norms of rows, plus what underflows: a square below ``tiny`` becomes zero."""
    return squared_row_norms(x) + x.shape[1] * torch.finfo(x.dtype).tiny


def _squares_by_gradients(left: Tensor, right: Tensor) -> Tensor:
    """||sum_t left_it right_it^T||^2, formed for a few samples at a time, plus what rounding may have lost."""
    tokens, entries = left.shape[1], left.shape[2] * right.shape[2]
    pairs = zip(*(t.split(max(1, _FORMED // entries)) for t in (left, right)), strict=True)
    squares = torch.cat([squared_row_norms((lefts.mT @ rights).flatten(1)) for lefts, rights in pairs])
    uncancelled = (torch.linalg.vector_norm(left, dim=2) * torch.linalg.vector_norm(right, dim=2)).sum(1)
    lost = 1000 * tokens**0.5 * torch.finfo(left.dtype).eps * uncancelled  # a sum's error is below a 1000th of it
    return squares + lost.square()


def _squares_by_grams(left: Tensor, right: Tensor) -> Tensor:
    """sum_ts <left_it, left_is> <right_it, right_is>, the same without forming gradients, plus its rounding."""
    products = _gram(left).mul_(_gram(right))
    uncancelled = products.diagonal(dim1=1, dim2=2).sqrt().sum(1)  # what the norms were if no tokens cancelled
    rounding = relative_rounding(left.shape[2], right.shape[2], left.dtype)
    return products.sum((1, 2)).clamp_(min=0) + rounding * uncancelled.square()


def _gram(x: Tensor) -> Tensor:
    """Inner products (B, T, T) of the rows of (B, T, d), in parts, since rounding errors of equal numbers add up."""
    gram = reduce(Tensor.add_, (part @ part.mT for part in (x.split(1024, 2) if x.shape[2] > 1024 else [x])))
    gram.diagonal(dim1=1, dim2=2).add_(x.shape[1:].numel() * torch.finfo(x.dtype).tiny)  # as in _squares
    return gram
