"""LSTM, GRU and RNN step by step, where PyTorch's kernels do all steps at once and show no weight at work."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]  # (B, H), and for an LSTM its cells (B, H)


def unrolled(
    mode: str,
    input: Tensor,
    hx: Any,
    weights: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """What ``torch.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu`` compute of (B, T, I), by linear maps.

    Args:
        mode: the function's name; its arguments follow. Those of packed sequences are others.

    Returns:
        As theirs: outputs, last states, and for an LSTM last cells; NotImplemented for a packed sequence.
    """
    if not isinstance(has_biases, bool):
        return NotImplemented
    x = input if batch_first else input.transpose(0, 1)
    directions = 2 if bidirectional else 1
    starts: list[State] = list(zip(*hx, strict=True)) if mode == "lstm" else [(h,) for h in hx]
    each = len(weights) // len(starts)  # weights of input and state, biases of both, a projection
    ends: list[State] = []
    for number in range(num_layers):
        outputs = []
        for direction in range(directions):
            place = len(ends)
            own = x.flip(1) if direction else x
            its = list(weights[place * each : (place + 1) * each])
            output, end = _one_direction(mode, its, has_biases, own, starts[place])
            outputs.append(output.flip(1) if direction else output)
            ends.append(end)
        x = torch.cat(outputs, 2)
        if dropout and train and number < num_layers - 1:
            x = F.dropout(x, dropout)
    final = tuple(torch.stack(states) for states in zip(*ends, strict=True))
    return x if batch_first else x.transpose(0, 1), *final


def _one_direction(mode: str, weights: list[Any], has_biases: bool, x: Tensor, state: State) -> tuple[Tensor, State]:
    """The outputs (B, T, H) of one layer in one direction, and its last state."""
    of_input, of_state = weights[:2]
    input_bias, state_bias = weights[2:4] if has_biases else (None, None)
    projection = weights[-1] if len(weights) in (3, 5) else None
    inputs = F.linear(x, of_input, input_bias)
    outputs = []
    for given in inputs.unbind(1):
        new = _cell(mode, given, F.linear(state[0], of_state, state_bias), state)
        state = new if projection is None else (F.linear(new[0], projection), *new[1:])
        outputs.append(state[0])
    return torch.stack(outputs, 1), state


def cell_step(
    mode: str, x: Tensor, hx: Any, w_ih: Any, w_hh: Any, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Any:
    """What ``torch.lstm_cell``, ``gru_cell``, ``rnn_tanh_cell`` and ``rnn_relu_cell`` compute, by linear maps."""
    state = tuple(hx) if mode == "lstm" else (hx,)
    new = _cell(mode, F.linear(x, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
    return new if mode == "lstm" else new[0]


def _cell(mode: str, given: Tensor, recalled: Tensor, state: State) -> State:
    """The next state, before any projection, from what input and last state contribute to the gates, (B, G H) each."""
    if mode == "lstm":
        enter, forget, change, leave = (given + recalled).chunk(4, 1)
        memory = forget.sigmoid() * state[1] + enter.sigmoid() * change.tanh()
        return leave.sigmoid() * memory.tanh(), memory
    if mode == "gru":
        resets, updates, changes = zip(given.chunk(3, 1), recalled.chunk(3, 1), strict=True)
        change = (changes[0] + (resets[0] + resets[1]).sigmoid() * changes[1]).tanh()
        return (change + (updates[0] + updates[1]).sigmoid() * (state[0] - change),)
    return ((given + recalled).tanh() if mode == "rnn_tanh" else (given + recalled).relu(),)
