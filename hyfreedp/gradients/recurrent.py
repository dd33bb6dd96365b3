"""LSTM, GRU and RNN as linear maps, one time step after the other, instead of PyTorch's fused kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

State = tuple[Tensor, ...]  # hidden state (B, H) and, for an LSTM, cell state (B, H)


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
    """``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``, named by ``mode``, of inputs (B, T, I), by linear maps.

    Returns outputs, last hidden states and, for an LSTM, last cell states; NotImplemented for a packed sequence.
    """
    if not isinstance(has_biases, bool):  # the overload for packed sequences, which has other arguments
        return NotImplemented
    x = input if batch_first else input.transpose(0, 1)
    directions = 2 if bidirectional else 1
    starts: list[State] = list(zip(*hx, strict=True)) if mode == "lstm" else [(h,) for h in hx]
    count = len(weights) // len(starts)  # per layer and direction: two weights, two biases, a projection
    ends: list[State] = []
    for number in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = len(ends)
            own = x.flip(1) if direction else x
            own_weights = list(weights[index * count : (index + 1) * count])
            output, end = _one_direction(mode, own_weights, has_biases, own, starts[index])
            outputs.append(output.flip(1) if direction else output)
            ends.append(end)
        x = torch.cat(outputs, 2)
        if dropout and train and number < num_layers - 1:
            x = F.dropout(x, dropout)
    final = tuple(torch.stack(states) for states in zip(*ends, strict=True))
    return x if batch_first else x.transpose(0, 1), *final


def _one_direction(mode: str, weights: list[Any], has_biases: bool, x: Tensor, state: State) -> tuple[Tensor, State]:
    """The outputs (B, T, H) of one layer in one direction, and its last state."""
    input_weight, state_weight = weights[:2]
    input_bias, state_bias = weights[2:4] if has_biases else (None, None)
    projection = weights[-1] if len(weights) in (3, 5) else None
    inputs = F.linear(x, input_weight, input_bias)
    if projection is None:
        output, *end = recurrence(inputs, state_weight, state_bias, mode, *state)
        return output, tuple(end)
    outputs = []
    for from_input in inputs.unbind(1):
        new = _cell(mode, from_input, F.linear(state[0], state_weight, state_bias), state)
        state = F.linear(new[0], projection), *new[1:]
        outputs.append(state[0])
    return torch.stack(outputs, 1), state


def recurrence(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, mode: str, *state: Tensor, added: Tensor | None = None
) -> State:
    """The outputs (B, T, H) and the last state, from what the inputs contribute to the gates, (B, T, G H).

    ``added``, of the same shape, is added to what the hidden states contribute. A torch function, which has a rule.
    """
    if has_torch_function((inputs, *state)):
        return handle_torch_function(recurrence, (inputs, *state), inputs, weight, bias, mode, *state)
    more = [None] * inputs.shape[1] if added is None else added.unbind(1)
    outputs = []
    for from_input, one in zip(inputs.unbind(1), more, strict=True):
        from_state = F.linear(state[0], weight, bias)
        state = _cell(mode, from_input, from_state if one is None else from_state + one, state)
        outputs.append(state[0])
    return torch.stack(outputs, 1), *state


def cell_step(
    mode: str, x: Tensor, hx: Any, w_ih: Any, w_hh: Any, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Any:
    """``torch.lstm_cell``, ``gru_cell``, ``rnn_tanh_cell`` or ``rnn_relu_cell``, by linear maps."""
    state = tuple(hx) if mode == "lstm" else (hx,)
    new = _cell(mode, F.linear(x, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
    return new if mode == "lstm" else new[0]


def _cell(mode: str, from_input: Tensor, from_state: Tensor, state: State) -> State:
    """The next state, before any projection, from the contributions of input and last state to the gates, (B, G H)."""
    if mode == "lstm":
        total = from_input + from_state
        input_gate, forget_gate, _, output_gate = total.sigmoid().chunk(4, 1)
        cell = forget_gate * state[1] + input_gate * total.chunk(4, 1)[2].tanh()
        return output_gate * cell.tanh(), cell
    if mode == "gru":
        resets, updates, candidates = zip(from_input.chunk(3, 1), from_state.chunk(3, 1), strict=True)
        candidate = (candidates[0] + (resets[0] + resets[1]).sigmoid() * candidates[1]).tanh()
        return (candidate + (updates[0] + updates[1]).sigmoid() * (state[0] - candidate),)
    total = from_input + from_state
    return (total.tanh() if mode == "rnn_tanh" else total.relu(),)
