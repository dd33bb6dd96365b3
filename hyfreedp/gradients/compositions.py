"""Functions of torch as the operations that they are made of, each of which a pass intercepts, or functorch maps.

Without these functorch would map them by a loop over the samples, which is slow, or wrongly, or not at all.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyfreedp.gradients.functorch import is_wrapped
from hyfreedp.gradients.isolation import inlined
from hyfreedp.gradients.mapped import Pass, composed, replaces
from hyfreedp.gradients.per_sample import widened
from hyfreedp.gradients.pieces import Unmappable
from hyfreedp.pytorch.devices import without_autocast


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if input1.shape[:-1] != input2.shape[:-1]:
        return NotImplemented
    with without_autocast(input1.device):
        y = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias


def _embedding_of_samples(input: Tensor, weight: Tensor, padding_idx: int | None = None, **named: Any) -> Any:
    """Rows of a table of each sample's own: for ids outside of it functorch would return rows of other samples."""
    if not is_wrapped(weight) or named["max_norm"] is not None or named["scale_grad_by_freq"]:
        return NotImplemented
    rows = weight[input]
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight))[..., None], rows.detach(), rows)


def _embedding_bag(input: Tensor, weight: Tensor, *, mode: str, padding_idx: int | None, **named: Any) -> Any:
    """Of bags of one length, (R, L): sums or means of rows, none of which is of the padding."""
    factors = named["per_sample_weights"]
    if input.dim() != 2 or named["offsets"] is not None or named["max_norm"] is not None or named["scale_grad_by_freq"]:
        return NotImplemented
    if mode not in ("sum", "mean") or (factors is not None and (mode == "mean" or factors.shape != input.shape)):
        return NotImplemented
    counted = torch.ones_like(input) if padding_idx is None else (input != padding_idx % len(weight)).long()
    weights = counted if factors is None else counted * factors
    sums = (F.embedding(input, weight, padding_idx) * weights[..., None]).sum(1)
    return sums / counted.sum(1, keepdim=True).clamp(min=1) if mode == "mean" else sums


def _projected(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """Queries, keys and values (T, R, E), each by the whole weight: parts of it would need copies per sample."""
    of_key = F.linear(k, weight, bias).chunk(3, -1)
    of_query = of_key if q is k else F.linear(q, weight, bias).chunk(3, -1)
    of_value = of_key if v is k else F.linear(v, weight, bias).chunk(3, -1)
    parts = of_query[0], of_key[1], of_value[2]
    return parts if q.shape[1] == k.shape[1] == 1 else [part.contiguous() for part in parts]  # whose heads are views


@replaces(torch.kl_div, torch.margin_ranking_loss, torch.triplet_margin_loss)
def _decomposed(one_pass: Pass, func: Any, *args: Any, **named: Any) -> Any:
    """By torch's own composition, for which functorch has no rule."""
    own = getattr(torch.ops.aten, func.__name__).default
    if "reduction" not in [one.name for one in own._schema.arguments[: len(args)]]:
        named = {"reduction": 0} | named  # by default nothing is reduced, unlike in torch.nn.functional
    loss = _widely(own.decompose, *one_pass.repeated(args), **one_pass.repeated(named))
    return one_pass.mark(loss) if is_wrapped(loss) else loss


def _bincount(input: Tensor, weights: Any = None, minlength: int = 0) -> Any:
    """Of samples whose counts have one length, which is a decision; functorch fails if lengths differ."""
    _ = input.numel() and int(input.max().clamp(min=minlength - 1))
    return NotImplemented


def _written_back(name: str, x: Tensor, *args: Any, **named: Any) -> Any:
    y = getattr(x.clone(), name)(*args, **named)  # a backward pass may need the clone
    return x.copy_(y) if torch.can_cast(y.dtype, x.dtype) else NotImplemented


def _widely(function: Any, *args: Any, **named: Any) -> Any:
    """Under autocast in float32, as autocast would have the torch function, but not the operations it is made of."""
    wide = torch.is_autocast_enabled(args[0].device.type)
    return function(*(widened(a) if wide and isinstance(a, Tensor) else a for a in args), **named)


def _mapped_if(fits: Callable[..., bool]) -> Callable[..., Any]:
    """Refuses to map an operation unless its arguments fit: functorch would take dimension 0 for one of a sample's."""

    def checked(*args: Any, **named: Any) -> Any:
        if not fits(*args, **named):
            raise Unmappable("samples whose dimensions are not those that an operation takes")
        return NotImplemented

    return checked


for _name in ("clamp", "pow", "square"):
    composed(partial(_written_back, _name), getattr(Tensor, f"{_name}_"))
composed(lambda v, g, dim=0: v * (g / torch.norm_except_dim(v, 2, dim)), torch._weight_norm)
composed(partial(_widely, _bilinear), F.bilinear)
composed(_embedding_of_samples, F.embedding)
composed(_embedding_bag, F.embedding_bag)
composed(lambda condition, *args, **kw: NotImplemented if args or kw else condition.nonzero(as_tuple=True), torch.where)
composed(Tensor.all, torch._is_all_true)  # which functorch maps wrongly; torch.distributions check arguments by it
composed(_bincount, torch.bincount, Tensor.bincount)
composed(inlined(F.multi_head_attention_forward, _in_projection_packed=_projected), F.multi_head_attention_forward)
composed(inlined(F.gaussian_nll_loss), F.gaussian_nll_loss)  # it asks for values
for _function in (F.kl_div, F.margin_ranking_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss):
    composed(inlined(_function), _function)  # they call the functions above, or the user's
_layer_norm_fits = _mapped_if(lambda input, normalized_shape, *_, **named: input.dim() >= len(normalized_shape))
composed(_layer_norm_fits, F.layer_norm, torch.layer_norm, torch.native_layer_norm)
_is_matrix = _mapped_if(lambda input, *_, **named: input.dim() >= 2)
composed(_is_matrix, torch.tril, torch.triu, Tensor.tril, Tensor.triu, Tensor.tril_, Tensor.triu_)
composed(_mapped_if(lambda sorted_sequence, *_, **named: sorted_sequence.dim() > 0), torch.searchsorted)
composed(_mapped_if(lambda input, *_, **named: input.dim() > 0), torch.roll, Tensor.roll)
_is_system = _mapped_if(lambda A, B, **named: A.dim() <= B.dim() or A.shape[:-1] == B.shape)
composed(_is_system, torch.linalg.solve, torch.linalg.solve_ex)
