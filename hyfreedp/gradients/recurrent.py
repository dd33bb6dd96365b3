"""LSTM, GRU and RNN step by step, where PyTorch's kernels do all steps at once and show no weight at work."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

State = tuple[Tensor, ...]  # (B, H), and for an LSTM its cells (B, H)


def unrolled(layer: nn.RNNBase, input: Any, hx: Any = None) -> tuple[Any, Any]:
    """What ``layer.forward`` computes, by linear maps of tensors that have the samples in dimension 0.

    Packed sequences go to PyTorch's kernels, where no weight can be followed.

    Args:
        layer: an LSTM, GRU or RNN.
        input: (B, T, I), or (T, B, I) without ``batch_first``.
        hx: states to start from, as PyTorch takes them.

    Raises:
        RuntimeError: the input or the states have another shape than PyTorch takes.
    """
    if isinstance(input, PackedSequence) or input.dim() != 3:
        return type(layer).forward(layer, input, hx)  # type: ignore[call-arg]
    if hx is None:
        layer.check_input(input, None)
    else:  # states of fewer samples would be broadcast
        layer.check_forward_args(input, hx, None)
    x = input if layer.batch_first else input.transpose(0, 1)
    directions = ("", "_reverse") if layer.bidirectional else ("",)
    starts = _starts(layer, x, hx, layer.num_layers * len(directions))
    ends: list[State] = []
    for number in range(layer.num_layers):
        outputs = []
        for direction in directions:
            own = x.flip(1) if direction else x
            output, end = _one_direction(layer, f"l{number}{direction}", own, starts[len(ends)])
            outputs.append(output.flip(1) if direction else output)
            ends.append(end)
        x = torch.cat(outputs, 2)
    final = tuple(torch.stack(states) for states in zip(*ends, strict=True))
    x = x.transpose(0, 1).contiguous()  # laid out as PyTorch's, for a dropout after it
    return x.transpose(0, 1) if layer.batch_first else x, final if isinstance(layer, nn.LSTM) else final[0]


def unrolls(layer: nn.RNNBase) -> bool:
    """Whether :func:`unrolled` computes what ``layer`` does: it has no forward of its own and drops nothing."""
    plain = "forward" not in layer.__dict__ and type(layer).forward in (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward)
    return plain and not (layer.dropout and layer.num_layers > 1 and layer.training)


def _starts(layer: nn.RNNBase, x: Tensor, hx: Any, number: int) -> list[State]:
    """The states of each layer and direction at the start."""
    if hx is not None:
        return list(zip(*hx, strict=True)) if isinstance(layer, nn.LSTM) else [(h,) for h in hx]
    widths = (layer.proj_size or layer.hidden_size, layer.hidden_size)[: 2 if isinstance(layer, nn.LSTM) else 1]
    return [tuple(x.new_zeros(len(x), width) for width in widths)] * number


def _one_direction(layer: nn.RNNBase, name: str, x: Tensor, state: State) -> tuple[Tensor, State]:
    """The outputs (B, T, H) of one layer in one direction, and its last state."""
    weight, bias = getattr(layer, f"weight_hh_{name}"), getattr(layer, f"bias_hh_{name}", None)
    projection = getattr(layer, f"weight_hr_{name}", None)
    inputs = F.linear(x, getattr(layer, f"weight_ih_{name}"), getattr(layer, f"bias_ih_{name}", None))
    outputs = []
    for given in inputs.unbind(1):
        new = cell(layer.mode, given, F.linear(state[0], weight, bias), state)
        state = new if projection is None else (F.linear(new[0], projection), *new[1:])
        outputs.append(state[0])
    return torch.stack(outputs, 1), state


def one_step(
    mode: str, x: Tensor, hx: Any, w_ih: Any, w_hh: Any, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Any:
    """What ``nn.LSTMCell``, ``nn.GRUCell`` and ``nn.RNNCell`` compute, by linear maps."""
    state = tuple(hx) if mode == "LSTM" else (hx,)
    new = cell(mode, F.linear(x, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
    return new if mode == "LSTM" else new[0]


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
