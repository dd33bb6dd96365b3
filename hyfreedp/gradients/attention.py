"""Attention: its rule, and PyTorch's ``multi_head_attention_forward`` as the operations that it is made of."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyfreedp.gradients.compositions import inlined
from hyfreedp.gradients.mapped import Pass, composed, rule


@rule(F.scaled_dot_product_attention)
def _attention(
    one_pass: Pass, func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **named: Any
) -> Any:
    """Joins samples and other batch dimensions, since functorch cannot map this function on CPUs."""
    tensors: list[Any] = [one_pass.samples(t) for t in (query, key, value, attn_mask) if t is not None]
    if any(t is None for t in tensors) or any(t.dim() < 4 for t in tensors[:3]):
        return NotImplemented
    most = max(t.dim() for t in tensors[:3])
    if tensors[-1].dim() > most:
        return NotImplemented
    # Otherwise broadcasting would match the samples of a tensor with fewer dimensions with the rows of another.
    tensors = [t.reshape(len(t), *[1] * (most - t.dim()), *t.shape[1:]) for t in tensors]
    batch = torch.broadcast_shapes(*(t.shape[:-3] for t in tensors[:3]))
    q, k, v, *mask = (t.expand(*batch, *t.shape[len(batch) :]).flatten(0, len(batch) - 1) for t in tensors)
    return one_pass.of_sample(func(q, k, v, *mask or [None], *args, **named).unflatten(0, batch))


def _projected(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """Queries, keys and values (T, R, E), each by the whole weight: parts of it would need copies per sample."""
    of_key = F.linear(k, weight, bias).chunk(3, -1)
    of_query = of_key if q is k else F.linear(q, weight, bias).chunk(3, -1)
    of_value = of_key if v is k else F.linear(v, weight, bias).chunk(3, -1)
    parts = of_query[0], of_key[1], of_value[2]
    return parts if q.shape[1] == k.shape[1] == 1 else [part.contiguous() for part in parts]  # whose heads are a view


composed(inlined(F.multi_head_attention_forward, _in_projection_packed=_projected), F.multi_head_attention_forward)
