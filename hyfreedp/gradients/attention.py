"""``torch.nn.functional.multi_head_attention_forward`` with the samples in dimension 0.

PyTorch's has them in dimension 1 and joins them with other dimensions, so that its projections match no rule.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """The output (T, B, E) and, if ``need_weights``, weights (B, T, S) or (B, H, T, S), as in PyTorch.

    ``query``, ``key`` and ``value`` have shapes (T, B, E), (S, B, ...), (S, B, ...). NotImplemented for added tokens
    (``add_bias_kv``, ``add_zero_attn``), static keys or values, ``is_causal`` without a mask, and unbatched inputs.
    """
    added = add_zero_attn or any(t is not None for t in (bias_k, bias_v, static_k, static_v))
    if added or query.dim() != 3 or (is_causal and attn_mask is None):
        return NotImplemented
    x, y, z = (t.transpose(0, 1) for t in (query, key, value))
    if use_separate_proj_weight:
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        q, k, v = (F.linear(t, w, b) for t, w, b in zip((x, y, z), weights, biases, strict=True))
    elif query is key and key is value:
        q, k, v = F.linear(x, in_proj_weight, in_proj_bias).chunk(3, -1)
    else:  # the whole weight each time, since gradients of a part of it would be instantiated
        q = F.linear(x, in_proj_weight, in_proj_bias).chunk(3, -1)[0]
        _, k, v = F.linear(y, in_proj_weight, in_proj_bias).chunk(3, -1)
        v = v if key is value else F.linear(z, in_proj_weight, in_proj_bias).chunk(3, -1)[2]
    q, k, v = (t.unflatten(2, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    mask = None if attn_mask is None else _additive(attn_mask, q.dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (len(q), num_heads))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q.dtype)[:, None, None]
        mask = padding if mask is None else mask + padding
    dropout = dropout_p if training else 0.0
    attended = None
    if need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.mT
        attended = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        output = attended @ v
        attended = attended.mean(1) if average_attn_weights else attended
    else:
        # PyTorch's, too, replaces the mask by the hint.
        causal = is_causal and key_padding_mask is None
        output = F.scaled_dot_product_attention(q, k, v, None if causal else mask, dropout, causal)
    output = F.linear(output.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    # With PyTorch's memory layout, since a later dropout draws in the order of memory.
    return output.transpose(0, 1).contiguous(), attended


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as a float one that is -inf where it is true; any other mask as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
