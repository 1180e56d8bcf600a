"""What a capture records of recurrent layers: the products of their loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature import capture
from support.cases.case import Raw, seeded

pytestmark = pytest.mark.fast


def test_a_recurrent_layer_is_its_products():
    """Of the input at all times, and of the state at each: nothing else, the zeros of the first state being data."""
    with seeded(0):
        gru, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
    with capture(gru) as tape:
        output, _ = gru(x)
    torch.testing.assert_close(output, gru(x)[0])
    shapes = [(use.function, use.activation.shape) for use in tape.uses if use.activation is not None]
    assert shapes == [(F.linear, shape) for shape in [(5, 2, 3), *[(2, 4)] * 5]] and len(tape.uses) == 6
    first, later = tape.uses[1].activation, tape.uses[3].activation
    assert first is not None and not first.any() and later is not None and torch.equal(later, output[1])


def test_a_recurrent_layer_of_constants_is_no_data():
    """Its products are of parameters alone, so that nobody takes one of their axes for that of samples."""
    run = lambda m, x: x @ m.gru(m.constant)[0][-1].T
    model = Raw(run, gru=nn.GRU(3, 4), constant=torch.ones(2, 4, 3))
    with capture(model) as tape:
        model(torch.randn(5, 4))
    assert all(use.results for use in tape.uses[:-1]) and not tape.uses[-1].results
