"""What a capture records of recurrent layers: the products of their loops."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature import capture, per_sample_gradients
from curvature.gradients.plans import PLANS
from support.cases.case import Raw, seeded

pytestmark = pytest.mark.fast


def test_a_recurrent_layer_is_its_products():
    """Of the input and of the state at all times: nothing else, the zeros of the first state being data."""
    with seeded(0):
        gru, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
    with capture(gru) as tape:
        output, _ = gru(x)
    torch.testing.assert_close(output, gru(x)[0])
    shapes = [(use.function, use.activation.shape) for use in tape.uses if use.activation is not None]
    assert shapes == [(F.linear, shape) for shape in [(5, 2, 3), (5, 2, 4)]] and len(tape.uses) == 2
    states = tape.uses[1].activation
    assert states is not None and not states[0].any() and torch.equal(states[1:], output[:-1])


KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": partial(nn.RNN, nonlinearity="relu")}


def equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_the_kernel(kind: str, bias: bool):
    """Of every output in every input, of first and second order, and those of several vectors at once."""
    with seeded(0):
        layer = KINDS[kind](3, 4, 2, bidirectional=True, bias=bias).double()
        x = torch.randn(5, 6, 3, dtype=torch.float64, requires_grad=True)
        states = [torch.randn(4, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(1 + (kind == "lstm"))]
        inputs = [x, *states, *layer.parameters()]

        def run() -> list[Tensor]:
            output, last = layer(x, tuple(states) if len(states) > 1 else states[0])
            return [output, *(last if isinstance(last, tuple) else [last])]

        with capture(layer):
            found = run()
        expected = run()
        vectors = [torch.randn(2, *out.shape, dtype=out.dtype) for out in found]
        first = [v[0] for v in vectors]
        directions = [torch.randn_like(x) for x in inputs]
    equal(found, expected)
    wanted = torch.autograd.grad(expected, inputs, first, create_graph=True)
    equal(list(torch.autograd.grad(found, inputs, first, retain_graph=True)), list(wanted))
    batched = torch.autograd.grad(found, inputs, vectors, retain_graph=True, is_grads_batched=True)
    equal([g[0] for g in batched], list(wanted))
    gradients = torch.autograd.grad(found, inputs, first, create_graph=True)
    equal(list(gradients), list(wanted))
    second = partial(torch.autograd.grad, grad_outputs=directions, materialize_grads=True)
    equal(list(second(gradients, inputs)), list(second(wanted, inputs)))


def test_a_plan_is_kept_where_gradients_of_early_steps_vanish():
    """After 200 steps nothing arrives at the first, which tells nothing of where its samples are."""
    with seeded(0):
        model = Raw(lambda m, x: m.lstm(x)[0][:, -1], lstm=nn.LSTM(3, 4, batch_first=True))
        x, y = torch.randn(2, 200, 3), torch.randn(2, 4)
    per_sample_gradients(model, nn.MSELoss(), x, y)
    assert PLANS[model]


def test_a_recurrent_layer_of_constants_is_no_data():
    """Its products are of parameters alone, so that nobody takes one of their axes for that of samples."""
    run = lambda m, x: x @ m.gru(m.constant)[0][-1].T
    model = Raw(run, gru=nn.GRU(3, 4), constant=torch.ones(2, 4, 3))
    with capture(model) as tape:
        model(torch.randn(5, 4))
    assert all(use.results for use in tape.uses[:-1]) and not tape.uses[-1].results
