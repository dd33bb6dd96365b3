"""LSTM, GRU and RNN step by step, where PyTorch's kernels do all steps at once and show no weight at work."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

State = tuple[Tensor, ...]  # (B, H), and for an LSTM its cells (B, H)


def unrolled(layer: nn.RNNBase, input: Any, hx: Any = None) -> tuple[Any, Any]:
    """What ``layer.forward`` computes, by linear maps of tensors that have the samples in dimension 0.

    Dropout between layers draws other random numbers than PyTorch's kernels do.

    Args:
        layer: an LSTM, GRU or RNN.
        input: (B, T, I), (T, B, I) without ``batch_first``, or a packed sequence.
        hx: states to start from, as PyTorch takes them.

    Raises:
        ValueError: the input is one sample without its dimension.
        RuntimeError: the input or the states have another shape than PyTorch takes.
    """
    lengths = None
    if isinstance(input, PackedSequence):
        x, lengths = pad_packed_sequence(input, batch_first=True)
    elif input.dim() != 3:
        raise ValueError(
            f"{type(layer).__name__} got an input of shape {tuple(input.shape)}: it needs a dimension of samples"
        )
    else:
        x = input if layer.batch_first else input.transpose(0, 1)
    sizes = (input.data, input.batch_sizes) if isinstance(input, PackedSequence) else (input, None)
    if hx is None:
        layer.check_input(*sizes)
    else:  # states of fewer samples would be broadcast
        layer.check_forward_args(sizes[0], hx, sizes[1])
    order, present = None, None
    if lengths is not None:
        steps, ends = torch.arange(x.shape[1], device=x.device), lengths.to(x.device)[:, None]
        order, present = torch.where(steps < ends, ends - 1 - steps, steps), (steps < ends)[..., None].unbind(1)
    directions = ("", "_reverse") if layer.bidirectional else ("",)
    starts = _starts(layer, x, hx, layer.num_layers * len(directions))
    ends_of: list[State] = []
    for number in range(layer.num_layers):
        outputs = []
        for direction in directions:
            own = _backwards(x, order) if direction else x
            output, end = _one_direction(layer, f"l{number}{direction}", own, starts[len(ends_of)], present)
            outputs.append(_backwards(output, order) if direction else output)
            ends_of.append(end)
        x = torch.cat(outputs, 2)
        if number < layer.num_layers - 1:
            x = F.dropout(x, layer.dropout, layer.training)
    ends_by_kind = tuple(torch.stack(states) for states in zip(*ends_of, strict=True))
    final = ends_by_kind if isinstance(layer, nn.LSTM) else ends_by_kind[0]
    if lengths is None:
        x = x.transpose(0, 1).contiguous()  # laid out as PyTorch's, for a dropout after it
        return x.transpose(0, 1) if layer.batch_first else x, final
    assert isinstance(input, PackedSequence)
    indices = input.sorted_indices
    in_order, lengths = (x, lengths) if indices is None else (x[indices], lengths[indices.to(lengths.device)])
    packed = pack_padded_sequence(in_order, lengths, batch_first=True)
    return PackedSequence(packed.data, input.batch_sizes, indices, input.unsorted_indices), final


def _starts(layer: nn.RNNBase, x: Tensor, hx: Any, number: int) -> list[State]:
    """The states of each layer and direction at the start."""
    if hx is not None:
        return list(zip(*hx, strict=True)) if isinstance(layer, nn.LSTM) else [(h,) for h in hx]
    widths = (layer.proj_size or layer.hidden_size, layer.hidden_size)[: 2 if isinstance(layer, nn.LSTM) else 1]
    return [tuple(x.new_zeros(len(x), width) for width in widths)] * number


def _backwards(x: Tensor, order: Tensor | None) -> Tensor:
    """(B, T, d) from the last token to the first; what is beyond a sample's end stays there."""
    return x.flip(1) if order is None else x.gather(1, order[..., None].expand_as(x))


def _one_direction(
    layer: nn.RNNBase, name: str, x: Tensor, state: State, present: tuple[Tensor, ...] | None
) -> tuple[Tensor, State]:
    """The outputs (B, T, H) of one layer in one direction, and its last state."""
    weight, bias = getattr(layer, f"weight_hh_{name}"), getattr(layer, f"bias_hh_{name}", None)
    projection = getattr(layer, f"weight_hr_{name}", None)
    inputs = F.linear(x, getattr(layer, f"weight_ih_{name}"), getattr(layer, f"bias_ih_{name}", None))
    outputs = []
    for t, given in enumerate(inputs.unbind(1)):
        new = cell(layer.mode, given, F.linear(state[0], weight, bias), state)
        new = new if projection is None else (F.linear(new[0], projection), *new[1:])
        if present is not None:
            new = tuple(torch.where(present[t], after, before) for after, before in zip(new, state, strict=True))
        state = new
        outputs.append(state[0])
    return torch.stack(outputs, 1), state


def cell(mode: str, given: Tensor, recalled: Tensor, state: State) -> State:
    """The next state, before any projection, from what input and last state contribute to the gates, (B, G H) each."""
    if mode == "LSTM":
        enter, forget, change, leave = (given + recalled).chunk(4, 1)
        memory = forget.sigmoid() * state[1] + enter.sigmoid() * change.tanh()
        return leave.sigmoid() * memory.tanh(), memory
    if mode == "GRU":
        resets, updates, changes = zip(given.chunk(3, 1), recalled.chunk(3, 1), strict=True)
        change = (changes[0] + (resets[0] + resets[1]).sigmoid() * changes[1]).tanh()
        return (change + (updates[0] + updates[1]).sigmoid() * (state[0] - change),)
    return ((given + recalled).tanh() if mode == "RNN_TANH" else (given + recalled).relu(),)
