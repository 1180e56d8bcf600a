"""The pure functions of the step."""

import functools
import math
from typing import Any

import pytest
import torch

from optimizers.steps.stacks import Form
from optimizers.steps.step_size import Decision
from optimizers.steps.updates import (
    Move,
    are_finite,
    inner,
    take,
    within_trust,
)

pytestmark = pytest.mark.fast
UNUSED: Any = None, None  # states, which are not for `take`


def test_updates():
    one = functools.partial(torch.tensor, dtype=torch.float64)
    cut = lambda length: within_trust(one(2.0), one(length), one(10.0), one(0.1)).item()
    expected = {0.1: 2, 4.0: 0.25, 0.0: 2}
    assert [cut(length) for length in expected] == pytest.approx(list(expected.values()))
    assert inner(one([1.0, 2.0]), one([3.0, 4.0])) == 11
    assert are_finite([one([1.0]), one([])]) and are_finite([one([1e308, 1e308])])  # whose sum is not
    assert not any(are_finite([one([1.0]), one([2.0, bad])]) for bad in (math.nan, math.inf, -math.inf))


@pytest.mark.parametrize(("good", "undo"), [(True, False), (False, False), (False, True)])
def test_a_step_of_two_layers(good: bool, undo: bool):
    """The first is cut back to a tenth of its length, the second decays and has a rate of its own."""
    one = functools.partial(torch.tensor, dtype=torch.float64)
    parameters, starts = [one([3.0, 4.0]), one([1.0, 0.0])], [one([3.0, 4.0]), one([1.0, 0.0])]
    last = [one([0.0, 0.0, 7.0, 7.0])]
    rates, slope = take(
        Move(
            parameters=parameters,
            directions=[one([0.0, 10.0, 0.2, 0.0])],
            last=last,
            forms=[[Form.of(1, ((2,),)), Form.of(1, ((2,),))]],
            scales=None,
            norms=None,
            slopes=one([2.0, 3.0]),
            rates=one([1.0, 0.5]),
            decayed=[(one(0.9), parameters[1:])],
            tables=[],
            blocks=None,
        ),
        Decision(one(0.2 * good), one(0.1), *map(torch.tensor, (good, undo, not (good or undo))), *UNUSED),
    )
    moved = [one([0.0, -0.5]), one([-0.02, 0.0])] if good else [torch.zeros(2).double()] * 2
    kept = [1.0, 0.9 if good else 1.0]
    for p, start, k, d in zip(parameters, starts, kept, moved, strict=True):
        torch.testing.assert_close(p, k * start + d - (7.0 if undo and p is parameters[1] else 0.0))
    torch.testing.assert_close(last[0][2:], moved[1] if good else one([0.0, 0.0] if undo else [7.0, 7.0]))
    assert rates.tolist() == pytest.approx([0.05, 0.1] if good else [0.0, 0.0])
    assert slope.item() == pytest.approx(-(0.05 * 2.0 + 0.2 * 0.5 * 3.0) if good else 0.0)


def test_layers_of_one_form_are_cut_apart():
    """Two layers of a weight and a bias: the first is short enough, the second is not; each lies next to the other."""
    one = functools.partial(torch.tensor, dtype=torch.float64)
    parameters = [one([[3.0, 0.0]]), one([4.0]), one([[0.0, 30.0]]), one([40.0])]
    starts = [p.clone() for p in parameters]
    rates, slope = take(
        Move(
            parameters=parameters,
            directions=[one([30.0, 0.0, 40.0, 3.0, 0.0, 4.0])],
            last=[torch.zeros(6).double()],
            forms=[[Form.of(2, ((1, 2), (1,)))]],
            scales=None,
            norms=None,
            slopes=one([2.0, 3.0]),
            rates=one(1.0),
            decayed=[],
            tables=[],
            blocks=None,
        ),
        Decision(one(0.5), one(0.1), torch.tensor(True), *(2 * [torch.tensor(False)]), *UNUSED),
    )
    assert slope.item() == pytest.approx(-(0.01 * 2.0 + 0.5 * 3.0)) and rates.tolist() == pytest.approx([0.01, 0.5])
    steps = [one([[-0.3, 0.0]]), one([-0.4]), one([[-1.5, 0.0]]), one([-2.0])]
    for p, start, step in zip(parameters, starts, steps, strict=True):
        torch.testing.assert_close(p - start, step)


def test_each_row_of_a_table_is_cut():
    """Rows of norm 5 and 1, whose root mean square is 3.6: no row moves by more than a tenth of the larger of both."""
    one = functools.partial(torch.tensor, dtype=torch.float64)
    table, rows = one([[3.0, 4.0], [0.0, 1.0]]), one([0.0, 0.2, 0.0, 1.0])
    start = table.clone()
    take(
        Move(
            parameters=[table],
            directions=[rows],
            last=[torch.zeros(4).double()],
            forms=[[Form.of(1, ((2, 2),))]],
            scales=None,
            norms=None,
            slopes=one([1.0]),
            rates=one(1.0),
            decayed=[],
            tables=[(0, 2)],
            blocks=None,
        ),
        Decision(one(1.0), one(0.1), torch.tensor(True), *(2 * [torch.tensor(False)]), *UNUSED),
    )
    whole = 0.1 * 26**0.5 / 1.04**0.5  # what the layer is cut to
    torch.testing.assert_close(start - table, one([[0.0, 0.2 * whole], [0.0, 0.1 * 13**0.5]]))
