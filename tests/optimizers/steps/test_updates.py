"""The pure functions of the step."""

import functools
import math

import pytest
import torch

from optimizers.steps.updates import adapted_step, adapted_trust, are_finite, inner, slope_ratio, within_trust

pytestmark = pytest.mark.fast


def test_updates():
    one = functools.partial(torch.tensor, dtype=torch.float64)
    found = [
        adapted_step(one(2.0), slope_ratio(one(slope), one(-1.0)), 0.3).item() for slope in (-1.0, 0.0, 1.0, 9.0, -9.0)
    ]
    assert found == pytest.approx([2 * math.exp(0.3 * ratio) for ratio in (1, 0, -1, -2, 1)])
    for slope, predicted in ((1.0, 0.0), (math.nan, 1.0), (math.inf, math.inf)):
        assert adapted_step(one(2.0), slope_ratio(one(slope), one(predicted)), 0.3).item() == 2
    cut = lambda length: within_trust(one(2.0), one(length), one(10.0), one(0.1)).item()
    expected = {0.1: 2, 4.0: 0.25, 0.0: 2}
    assert [cut(length) for length in expected] == pytest.approx(list(expected.values()))
    found = [
        adapted_trust(one(bound), one(ratio), 0.05, 0.2).item()
        for bound, ratio in ((0.1, 1), (0.2, 1), (0.1, 0), (0.05, 0))
    ]
    assert found == pytest.approx([0.103, 0.2, 0.08, 0.05])
    assert inner(one([1.0, 2.0]), one([3.0, 4.0])) == 11
    assert are_finite([one([1.0]), one([])]) and are_finite([one([1e308, 1e308])])  # whose sum is not
    assert not any(are_finite([one([1.0]), one([2.0, bad])]) for bad in (math.nan, math.inf, -math.inf))
