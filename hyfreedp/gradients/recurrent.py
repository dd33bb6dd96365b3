"""LSTM, GRU and RNN by linear maps, one time step after the other, instead of PyTorch's fused kernels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from hyfreedp.gradients.mapped import Pass, composed, rule
from hyfreedp.gradients.per_sample import Instantiated, products, sum_to
from hyfreedp.gradients.rules import NN, samples_if_trained

State = tuple[Tensor, ...]  # hidden state (B, H) and, for an LSTM, cell state (B, H)


def unrolled(mode: str, input: Tensor, hx: Any, weights: Any, *settings: Any) -> Any:
    """``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``, as ``mode`` says, of inputs (B, T, I), by linear maps.

    Returns outputs, last hidden states and, for an LSTM, last cell states; NotImplemented for a packed sequence.
    """
    has_biases, num_layers, dropout, train, bidirectional, batch_first = settings
    if not isinstance(has_biases, bool):  # the overload for packed sequences has other arguments
        return NotImplemented
    x = input if batch_first else input.transpose(0, 1)
    starts: list[State] = list(zip(*hx, strict=True)) if mode == "lstm" else [(h,) for h in hx]
    count = len(weights) // len(starts)  # per layer and direction: two weights, two biases, a projection
    ends: list[State] = []
    for number in range(num_layers):
        outputs = []
        for backwards in (False, True)[: 1 + bidirectional]:
            index = len(ends)
            of_input, of_state, *others = weights[index * count :][:count]
            input_bias, state_bias = others[:2] if has_biases else (None, None)
            projection = others[-1] if len(others) % 2 else None
            inputs = NN.linear(x.flip(1) if backwards else x, of_input, input_bias)
            output, *end = recurrence(inputs, of_state, state_bias, projection, mode, *starts[index])
            outputs.append(output.flip(1) if backwards else output)
            ends.append(tuple(end))
        x = torch.cat(outputs, 2)
        if dropout and train and number < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return x if batch_first else x.transpose(0, 1), *(torch.stack(states) for states in zip(*ends, strict=True))


def recurrence(inputs: Tensor, weight: Any, bias: Any, projection: Any, mode: str, *state: Tensor) -> State:
    """The outputs (B, T, H) and the last state, from ``inputs``: their contributions to the G gates, (B, T, G H).

    It can be overridden like a function of torch, and has a rule. An LSTM may have a ``projection`` of hidden states.
    """
    if has_torch_function((inputs, *state)):
        return handle_torch_function(recurrence, (inputs, *state), inputs, weight, bias, projection, mode, *state)
    return _steps(inputs, _shifts(inputs, bias), weight, projection, mode, state)


def _steps(inputs: Tensor, shifts: Tensor, weight: Tensor, projection: Any, mode: str, state: State) -> State:
    """As :func:`recurrence`, given ``shifts``, the bias for each sample and time step, (B, T, G H)."""
    constant, outputs = shifts if mode == "gru" else inputs + shifts, []
    for from_input, shift in zip(inputs.unbind(1), constant.unbind(1), strict=True):
        hidden, *cell = _cell(mode, from_input, torch.addmm(shift, state[0], weight.mT), state)
        state = (hidden if projection is None else NN.linear(hidden, projection), *cell)
        outputs.append(state[0])
    return torch.stack(outputs, 1), *state


def _shifts(inputs: Tensor, bias: Tensor | None) -> Tensor:
    """The bias for each sample and time step, in the shape of the inputs."""
    return torch.zeros_like(inputs) if bias is None else torch.zeros_like(inputs) + bias


@rule(recurrence)
def _recurrence(
    one_pass: Pass, func: Any, inputs: Tensor, weight: Any, bias: Any, projection: Any, mode: str, *state: Tensor
) -> Any:
    """Computes time steps outside of the map, which would slow down each; inputs are (B, R, T, G H), R rows per sample.

    The gradients by the shifts equal those by the contributions of the hidden states to the gates.
    """
    x, states = samples_if_trained(one_pass, inputs, weight, bias), [one_pass.samples(t) for t in state]
    starts = [t.flatten(0, 1) for t in states if t is not None]
    if x is None or x.dim() != 4 or projection is not None or len(starts) < len(states):
        return NotImplemented
    outputs = x  # known when the backward pass begins

    def backward(x: Tensor | None, g: Tensor, wanted: bool) -> None:
        hidden = torch.cat([starts[0][:, None].to(outputs), outputs[:, :-1]], 1).detach().to(g.dtype)
        if one_pass.is_trained(weight):
            one_pass.add(weight, products(g, hidden.unflatten(0, g.shape[:2])))
        if one_pass.is_trained(bias):
            one_pass.add(bias, Instantiated(sum_to(g, -1)))

    shifts: Any = one_pass.samples(one_pass.layer(lambda x: _shifts(x, bias), backward, x, keeps_input=False))
    outputs, *ends = _steps(x.flatten(0, 1), shifts.flatten(0, 1), weight.detach(), None, mode, tuple(starts))
    return tuple(one_pass.of_sample(t.unflatten(0, x.shape[:2])) for t in (outputs, *ends))


def cell_step(
    mode: str, x: Tensor, hx: Any, w_ih: Any, w_hh: Any, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Any:
    """``torch.lstm_cell``, ``gru_cell``, ``rnn_tanh_cell`` or ``rnn_relu_cell``, by linear maps."""
    state = tuple(hx) if mode == "lstm" else (hx,)
    from_input, from_state = NN.linear(x, w_ih, b_ih), NN.linear(state[0], w_hh, b_hh)
    new = _cell(mode, from_input, from_state if mode == "gru" else from_input + from_state, state)
    return new if mode == "lstm" else new[0]


def _cell(mode: str, from_input: Tensor, gates: Tensor, state: State) -> State:
    """The next state, before any projection, from the contributions (B, G H) of input and last state to the gates.

    ``gates`` is their sum. For a GRU, whose candidate needs them apart, it is the contribution of the state only.
    """
    if mode == "lstm":
        input_gate, forget_gate, _, output_gate = gates.sigmoid().chunk(4, 1)
        cell = forget_gate * state[1] + input_gate * gates.chunk(4, 1)[2].tanh()
        return output_gate * cell.tanh(), cell
    if mode == "gru":
        resets, updates, candidates = zip(from_input.chunk(3, 1), gates.chunk(3, 1), strict=True)
        candidate = (candidates[0] + (resets[0] + resets[1]).sigmoid() * candidates[1]).tanh()
        return (candidate + (updates[0] + updates[1]).sigmoid() * (state[0] - candidate),)
    return (gates.tanh() if mode == "rnn_tanh" else gates.relu(),)


for mode in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    composed(partial(unrolled, mode), getattr(torch, mode))
    composed(partial(cell_step, mode), getattr(torch, f"{mode}_cell"))
