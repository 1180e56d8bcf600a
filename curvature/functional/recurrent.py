"""Recurrent layers as loops of matrix products.

Torch's fused kernels hide the backprops of the gates. While a recurrent layer is recorded it runs as the loop that
defines it, and every product in it is a use of its weight like any other. Each form takes the function `linear` that
makes these products; nothing else in it reads a parameter. With `together`, which makes the products with a recurrent
weight of all steps at once, the loop is a single function (`scan`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from curvature.functional import scan

State = tuple[Tensor, ...]
Linear = Callable[..., Tensor]  # of input, weight and bias
Together = Callable[..., Tensor] | None  # of a function that stands for F.linear and its arguments
Product = Callable[[Tensor], Tensor]  # with the recurrent weight, or with the projection
Step = Callable[[Tensor, State, Product], State]  # from the input's gates and the state to the next


def _lstm(gates: Tensor, state: State, hidden: Product) -> State:
    i, f, g, o = (gates + hidden(state[0])).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return (o.sigmoid() * c.tanh(), c)


def _gru(gates: Tensor, state: State, hidden: Product) -> State:
    ir, iz, inew = gates.chunk(3, -1)
    hr, hz, hnew = hidden(state[0]).chunk(3, -1)
    z = (iz + hz).sigmoid()
    new = (inew + (ir + hr).sigmoid() * hnew).tanh()
    return ((state[0] - new) * z + new,)


def _tanh(gates: Tensor, state: State, hidden: Product) -> State:
    return ((gates + hidden(state[0])).tanh(),)


def _relu(gates: Tensor, state: State, hidden: Product) -> State:
    return ((gates + hidden(state[0])).relu(),)


def _direction(
    x: Tensor, state: State, weights: Sequence[Tensor], has_bias: bool, step: Step, cell: scan.Cell, reverse: bool,
    linear: Linear, together: Together,
) -> Any:  # fmt: skip
    """Run one layer in one direction over (T, N, i); returns the outputs (T, N, h) and the last state."""
    w_in, w_hidden = weights[:2]
    b_in, b_hidden = (weights[2], weights[3]) if has_bias else (None, None)
    extra = weights[4 if has_bias else 2 :]
    gates = linear(x, w_in, b_in)
    if reverse:
        gates = gates.flip(0)
    if together is None or extra or _is_transformed(gates):
        project = (lambda h: linear(h, extra[0])) if extra else None
        outputs, last = _loop(step, gates, state, lambda h: linear(h, w_hidden, b_hidden), project)
    else:
        loop = lambda gates, state, w, b: _loop(step, gates, state, lambda h: F.linear(h, w, b))
        outputs, last = scan.scan(cell, loop, gates, state, w_hidden, b_hidden, together)
    return outputs.flip(0) if reverse else outputs, last


def _loop(
    step: Step, gates: Tensor, state: State, hidden: Product, project: Product | None = None
) -> tuple[Tensor, State]:
    outputs: list[Tensor] = []
    for now in gates.unbind():  # the backward pass of an index would make zeros for all other times
        state = step(now, state, hidden)
        if project is not None:  # of an LSTM's output
            state = (project(state[0]), state[1])
        outputs.append(state[0])
    return torch.stack(outputs), state


def _is_transformed(gates: Tensor) -> bool:
    """Whether the loop has to be one of torch functions: for dual numbers, vmap, autocast, or no steps."""
    inside = forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    return inside or torch.is_autocast_enabled(gates.device.type) or not len(gates)


def _layers(step: Step, cell: scan.Cell) -> Callable[..., Any]:
    """The plain form of ``torch.lstm``, ``torch.gru``, ..., with their arguments and results."""

    def run(
        x: Tensor, hx: Any, weights: Sequence[Tensor], has_bias: bool, layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool, linear: Linear = F.linear, together: Together = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        states = hx if isinstance(hx, tuple | list) else (hx,)
        directions = 2 if bidirectional else 1
        each = len(weights) // (layers * directions)
        if batch_first:
            x = x.transpose(0, 1)
        last: list[State] = []
        for layer in range(layers):
            outs = []
            for reverse in (False, True)[:directions]:
                k = len(last)
                part, first = weights[k * each : (k + 1) * each], tuple(s[k] for s in states)
                out, end = _direction(x, first, part, has_bias, step, cell, reverse, linear, together)
                outs.append(out)
                last.append(end)
            x = torch.cat(outs, -1) if bidirectional else outs[0]
            if dropout and train and layer < layers - 1:
                x = F.dropout(x, dropout, True)
        return (x.transpose(0, 1) if batch_first else x, *(torch.stack(s) for s in zip(*last, strict=True)))

    return run


def _cell(step: Step) -> Callable[..., Any]:
    """The plain form of ``torch.lstm_cell``, ``torch.gru_cell``, ..., which are one step."""

    def run(
        x: Tensor, hx: Any, w_in: Tensor, w_hidden: Tensor, b_in: Any = None, b_hidden: Any = None,
        linear: Linear = F.linear, together: Together = None,
    ) -> Any:  # fmt: skip
        state = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        new = step(linear(x, w_in, b_in), state, lambda h: linear(h, w_hidden, b_hidden))
        return new if len(new) > 1 else new[0]

    return run


RECURRENT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _layers(_lstm, scan.LSTM),
    torch.gru: _layers(_gru, scan.GRU),
    torch.rnn_tanh: _layers(_tanh, scan.TANH),
    torch.rnn_relu: _layers(_relu, scan.RELU),
    torch.lstm_cell: _cell(_lstm),
    torch.gru_cell: _cell(_gru),
    torch.rnn_tanh_cell: _cell(_tanh),
    torch.rnn_relu_cell: _cell(_relu),
}
