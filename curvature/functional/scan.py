"""One direction of a recurrent layer as a single function of its products, with the backward pass written out.

As a loop of torch functions every step costs a dozen nodes of autograd's graph, and a read of the recurrent weight of
its own. Here all steps are one node, and one read of that weight: of the states before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

Tensors = tuple[Tensor, ...]


class Cell(NamedTuple):
    """How a recurrent layer goes forward and back through all steps."""

    # from the input's gates (T, N, k), the first state, the recurrent weight and its bias to the states after each
    # step, one tensor (T, N, h) for each part of the state, and whatever `backward` needs besides
    forward: Callable[[Tensor, Tensors, Tensor, Any], tuple[Tensors, Tensors]]
    # from the states before each step, those after it, what `forward` kept, the weight, and the gradients of the
    # outputs (T, N, h) and of the last state, to those of the input's gates, of the products with the recurrent weight,
    # and of the first state; nothing is written in place, so that it can be batched
    backward: Callable[[Tensors, Tensors, Tensors, Tensor, Tensor, Tensors], tuple[Tensor, Tensor, Tensors]]


def _lstm_forward(gates: Tensor, state: Tensors, weight: Tensor, bias: Any) -> tuple[Tensors, Tensors]:
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
    before: Tensors, after: Tensors, kept: Tensors, weight: Tensor, outputs: Tensor, last: Tensors
) -> tuple[Tensor, Tensor, Tensors]:
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


def _gru_forward(gates: Tensor, state: Tensors, weight: Tensor, bias: Any) -> tuple[Tensors, Tensors]:
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
    before: Tensors, after: Tensors, kept: Tensors, weight: Tensor, outputs: Tensor, last: Tensors
) -> tuple[Tensor, Tensor, Tensors]:
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


def _plain(activate: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Cell:
    """``h = activate(gates + product)``; `activate` works in place, `slope` is its derivative by its value."""

    def forward(gates: Tensor, state: Tensors, weight: Tensor, bias: Any) -> tuple[Tensors, Tensors]:
        h, all_h = state[0], gates.clone() if bias is None else gates + bias
        for now in all_h:
            h = activate(now.addmm_(h, weight.t()))
        return (all_h,), ()

    def backward(
        before: Tensors, after: Tensors, kept: Tensors, weight: Tensor, outputs: Tensor, last: Tensors
    ) -> tuple[Tensor, Tensor, Tensors]:
        slopes, h, gradients = slope(after[0]), last[0], []
        for t in reversed(range(len(outputs))):
            gradients.append((h + outputs[t]) * slopes[t])
            h = gradients[-1] @ weight
        products = torch.stack(gradients[::-1])
        return products, products, (h,)

    return Cell(forward, backward)


LSTM = Cell(_lstm_forward, _lstm_backward)
GRU = Cell(_gru_forward, _gru_backward)
TANH = _plain(Tensor.tanh_, lambda h: 1 - h * h)
RELU = _plain(Tensor.relu_, lambda h: (h > 0).to(h.dtype))


class _Product(Function):
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
        ctx: Any, results: tuple[Cell, Any, Tensors, Tensors], gates: Tensor, product: Any, weight: Tensor, bias: Any,
        *state: Tensor,
    ) -> Any:  # fmt: skip
        ctx.cell, ctx.loop, after, kept = results
        ctx.sizes = len(state), len(kept)
        ctx.save_for_backward(gates, weight, bias, *state, *after, *kept)
        return (after[0].clone(), *(x[-1].clone() for x in after))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gates, weight, bias, *rest = ctx.saved_tensors
        parts, outputs, last = ctx.sizes[0], gradients[0], gradients[1:]
        state, after, kept = rest[:parts], tuple(rest[parts : 2 * parts]), tuple(rest[2 * parts :])
        with torch.no_grad():
            before = states_before(state, after)
            to_gates, to_products, to_state = ctx.cell.backward(before, after, kept, weight, outputs, last)
        if not torch.is_grad_enabled():
            return None, to_gates, to_products, None, None, *to_state
        by_loop = _differentiable(ctx.loop, [gates, weight, bias, *state], gradients)
        through = _of_weight(before[0], to_products)  # comes by `product`, without derivatives: they are added here
        others = [x if x is None else x - part for x, part in zip(by_loop[1:3], through, strict=True)]
        return None, by_loop[0], to_products, *others, *by_loop[3:]


def states_before(state: Sequence[Tensor], after: Sequence[Tensor]) -> Tensors:
    """The states before each step."""
    return tuple(torch.cat([first[None], x[:-1]]) for first, x in zip(state, after, strict=True))


def _differentiable(loop: Any, inputs: list[Any], gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of the loop of torch functions, which can be differentiated again."""
    gates, weight, bias, *state = inputs
    outputs, last = loop(gates, tuple(state), weight, bias)
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    computed = iter(torch.autograd.grad([outputs, *last], leaves, gradients, create_graph=True, allow_unused=True))
    return [next(computed) if x is not None and x.requires_grad else None for x in inputs]


def scan(
    cell: Cell, loop: Callable[..., Any], gates: Tensor, state: Tensors, weight: Tensor, bias: Any,
    linear: Callable[..., Tensor],
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """The outputs (T, N, h) and the last state; `loop` is the same from (gates, state, weight, bias).

    `linear` is called once, with a function that stands for ``F.linear`` and its arguments of all steps.
    """
    with torch.no_grad():
        after, kept = cell.forward(gates, state, weight, bias)
        before = states_before(state[:1], after[:1])[0]
    product = linear(_Product.apply, before, weight, bias)
    outputs, *last = _Scan.apply((cell, loop, after, kept), gates, product, weight, bias, *state)
    return outputs, tuple(last)
