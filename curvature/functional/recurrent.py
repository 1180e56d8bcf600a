"""Recurrent layers as loops of matrix products, and each loop as a single function.

Torch's fused kernels hide the backprops of the gates. While a recurrent layer is recorded it runs as the loop that
defines it, and every product in it is a use of its weight like any other. Each form takes the function `linear` that
makes these products; nothing else in it reads a parameter.

Such a loop costs a dozen nodes of autograd's graph for every step, and a read of the recurrent weight. With `together`,
which makes the products with this weight of all steps at once, all steps are one node, with the backward pass written
out, and one read of that weight: of the states before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import Function

State = tuple[Tensor, ...]
Linear = Callable[..., Tensor]  # of input, weight and bias
Together = Callable[..., Tensor] | None  # of a function that stands for F.linear and its arguments
Product = Callable[[Tensor], Tensor]  # with the recurrent weight, or with the projection
Step = Callable[[Tensor, State, Product], State]  # from the input's gates and the state to the next


class Cell(NamedTuple):
    """A recurrent layer: one step in torch functions, and how to go forward and back through all steps."""

    step: Step
    # from the input's gates (T, N, k), the first state, the recurrent weight and its bias to the states after each
    # step, one tensor (T, N, h) for each part of the state, and whatever `backward` needs besides
    forward: Callable[[Tensor, State, Tensor, Any], tuple[State, State]]
    # from the states before each step, those after it, what `forward` kept, the weight, and the gradients of the
    # outputs (T, N, h) and of the last state, to those of the input's gates, of the products with the recurrent weight,
    # and of the first state; nothing is written in place, so that it can be batched
    backward: Callable[[State, State, State, Tensor, Tensor, State], tuple[Tensor, Tensor, State]]


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


def _lstm_forward(gates: Tensor, state: State, weight: Tensor, bias: Any) -> tuple[State, State]:
    (h, c), size = state, weight.shape[1]
    all_h, all_c, all_tanh = (gates.new_empty(*gates.shape[:2], size) for _ in range(3))
    active = gates.clone() if bias is None else gates + bias
    for t, now in enumerate(active):
        now.addmm_(h, weight.t())
        i, f, g, o = now.chunk(4, 1)
        now[:, : 2 * size].sigmoid_()
        c = torch.mul(f, c, out=all_c[t]).addcmul_(i, g.tanh_())
        h = torch.mul(o.sigmoid_(), torch.tanh(c, out=all_tanh[t]), out=all_h[t])
    return (all_h, all_c), (active, all_tanh)


def _lstm_backward(
    before: State, after: State, kept: State, weight: Tensor, outputs: Tensor, last: State
) -> tuple[Tensor, Tensor, State]:
    (i, f, g, o), tanh = kept[0].chunk(4, 2), kept[1]
    slopes = torch.cat([g * i * (1 - i), before[1] * f * (1 - f), i * (1 - g * g), tanh * o * (1 - o)], 2)
    through = o * (1 - tanh * tanh)  # from h to c
    (h, c), gradients = last, []
    for t in reversed(range(len(outputs))):
        h = h + outputs[t]
        c = torch.addcmul(c, h, through[t])
        gradients.append(torch.cat([c, c, c, h], 1) * slopes[t])
        h, c = gradients[-1] @ weight, c * f[t]
    products = torch.stack(gradients[::-1])
    return products, products, (h, c)


def _gru_forward(gates: Tensor, state: State, weight: Tensor, bias: Any) -> tuple[State, State]:
    h, size = state[0], weight.shape[1]
    all_h = gates.new_empty(*gates.shape[:2], size)
    products, active = torch.empty_like(gates), torch.empty_like(gates)
    for t in range(len(gates)):
        product = torch.mm(h, weight.t(), out=products[t])
        if bias is not None:
            product += bias
        torch.add(gates[t], product, out=active[t])[:, : 2 * size].sigmoid_()
        r, z, _ = active[t].chunk(3, 1)
        new = active[t][:, 2 * size :]
        torch.addcmul(gates[t][:, 2 * size :], r, product[:, 2 * size :], out=new).tanh_()
        h = torch.lerp(new, h, z, out=all_h[t])
    return (all_h,), (active, products[..., 2 * size :])


def _gru_backward(
    before: State, after: State, kept: State, weight: Tensor, outputs: Tensor, last: State
) -> tuple[Tensor, Tensor, State]:
    (r, z, new), product = kept[0].chunk(3, 2), kept[1]
    slope = (1 - z) * (1 - new * new)
    slopes = torch.cat([slope * product * r * (1 - r), (before[0] - new) * z * (1 - z), slope * r], 2)
    h, gradients, states = last[0], [], []
    for t in reversed(range(len(outputs))):
        states.append(h + outputs[t])
        gradients.append(torch.cat([states[-1]] * 3, 1) * slopes[t])
        h = torch.addcmul(gradients[-1] @ weight, states[-1], z[t])
    products, size = torch.stack(gradients[::-1]), weight.shape[1]
    gates = torch.cat([products[..., : 2 * size], torch.stack(states[::-1]) * slope], -1)
    return gates, products, (h,)


def _plain(
    activate: Callable[[Tensor], Tensor], in_place: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]
) -> Cell:
    """``h = activate(gates + product)``, with its form that works in place, and its derivative by its value."""

    def step(gates: Tensor, state: State, hidden: Product) -> State:
        return (activate(gates + hidden(state[0])),)

    def forward(gates: Tensor, state: State, weight: Tensor, bias: Any) -> tuple[State, State]:
        h, all_h = state[0], gates.clone() if bias is None else gates + bias
        for now in all_h:
            h = in_place(now.addmm_(h, weight.t()))
        return (all_h,), ()

    def backward(
        before: State, after: State, kept: State, weight: Tensor, outputs: Tensor, last: State
    ) -> tuple[Tensor, Tensor, State]:
        slopes, h, gradients = slope(after[0]), last[0], []
        for t in reversed(range(len(outputs))):
            gradients.append((h + outputs[t]) * slopes[t])
            h = gradients[-1] @ weight
        products = torch.stack(gradients[::-1])
        return products, products, (h,)

    return Cell(step, forward, backward)


LSTM = Cell(_lstm, _lstm_forward, _lstm_backward)
GRU = Cell(_gru, _gru_forward, _gru_backward)
TANH = _plain(lambda x: x.tanh(), Tensor.tanh_, lambda h: 1 - h * h)
RELU = _plain(lambda x: x.relu(), Tensor.relu_, lambda h: (h > 0).to(h.dtype))


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


class _KnownProduct(Function):
    """Stands for ``x @ weight.T + bias``, whose values are known elsewhere: zeros that pass gradients on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.has_bias = bias is not None
        ctx.set_materialize_grads(False)
        return x.new_zeros(()).expand(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (x,), g = ctx.saved_tensors, gradients[0]
        to_weight, to_bias = (None, None) if g is None else _of_weight(x, g)
        return None, to_weight, to_bias if ctx.has_bias else None


def _of_weight(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias from inputs (T, N, i) and gradients (T, N, o) of products."""
    g = g.reshape(-1, g.shape[-1])
    return g.transpose(0, 1) @ x.flatten(0, 1), g.sum(0)


class _Scan(Function):
    """All steps. The recurrent weight gets its gradient through `product`; where that is differentiated, itself too."""

    @staticmethod
    def forward(
        ctx: Any, results: tuple[Cell, State, State], gates: Tensor, product: Any, weight: Tensor, bias: Any,
        *state: Tensor,
    ) -> Any:  # fmt: skip
        ctx.cell, after, kept = results
        ctx.sizes = len(state), len(kept)
        ctx.save_for_backward(gates, weight, bias, *state, *after, *kept)
        return (after[0].clone(), *(x[-1].clone() for x in after))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gates, weight, bias, *rest = ctx.saved_tensors
        parts, outputs, last = ctx.sizes[0], gradients[0], gradients[1:]
        state, after, kept = rest[:parts], tuple(rest[parts : 2 * parts]), tuple(rest[2 * parts :])
        with torch.no_grad():
            before = _states_before(state, after)
            to_gates, to_products, to_state = ctx.cell.backward(before, after, kept, weight, outputs, last)
        if not torch.is_grad_enabled():
            return None, to_gates, to_products, None, None, *to_state
        by_loop = _differentiable(ctx.cell.step, [gates, weight, bias, *state], gradients)
        through = _of_weight(before[0], to_products)  # comes by `product`, without derivatives: they are added here
        others = [x if x is None else x - part for x, part in zip(by_loop[1:3], through, strict=True)]
        return None, by_loop[0], to_products, *others, *by_loop[3:]


def _states_before(state: Sequence[Tensor], after: Sequence[Tensor]) -> State:
    """The states before each step."""
    return tuple(torch.cat([first[None], x[:-1]]) for first, x in zip(state, after, strict=True))


def _differentiable(step: Step, inputs: list[Any], gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of the loop of torch functions, which can be differentiated again."""
    # views, since the first state, or the gates, may depend on the weight: by an earlier call of the layer
    inputs = [x if x is None else x.view_as(x) for x in inputs]
    gates, weight, bias, *state = inputs
    outputs, last = _loop(step, gates, tuple(state), lambda h: F.linear(h, weight, bias))
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    computed = iter(torch.autograd.grad([outputs, *last], leaves, gradients, create_graph=True, allow_unused=True))
    return [next(computed) if x is not None and x.requires_grad else None for x in inputs]


def _scan(cell: Cell, gates: Tensor, state: State, weight: Tensor, bias: Any, together: Linear) -> tuple[Tensor, State]:
    """The outputs (T, N, h) and the last state."""
    with torch.no_grad():
        after, kept = cell.forward(gates, state, weight, bias)
        before = _states_before(state[:1], after[:1])[0]
    product = together(_KnownProduct.apply, before, weight, bias)
    outputs, *last = _Scan.apply((cell, after, kept), gates, product, weight, bias, *state)
    return outputs, tuple(last)


def _direction(
    x: Tensor, state: State, weights: Sequence[Tensor], has_bias: bool, cell: Cell, reverse: bool, linear: Linear,
    together: Together,
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
        outputs, last = _loop(cell.step, gates, state, lambda h: linear(h, w_hidden, b_hidden), project)
    else:
        outputs, last = _scan(cell, gates, state, w_hidden, b_hidden, together)
    return outputs.flip(0) if reverse else outputs, last


def _is_transformed(gates: Tensor) -> bool:
    """Whether the loop has to be one of torch functions: for dual numbers, vmap, autocast, or no steps."""
    inside = forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    return inside or torch.is_autocast_enabled(gates.device.type) or not len(gates)


def _layers(cell: Cell) -> Callable[..., Any]:
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
                out, end = _direction(x, first, part, has_bias, cell, reverse, linear, together)
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
    torch.lstm: _layers(LSTM),
    torch.gru: _layers(GRU),
    torch.rnn_tanh: _layers(TANH),
    torch.rnn_relu: _layers(RELU),
    torch.lstm_cell: _cell(LSTM.step),
    torch.gru_cell: _cell(GRU.step),
    torch.rnn_tanh_cell: _cell(TANH.step),
    torch.rnn_relu_cell: _cell(RELU.step),
}
